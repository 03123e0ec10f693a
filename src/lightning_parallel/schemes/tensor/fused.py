"""Taking a packed projection apart (query, key and value of one matrix) without gathering it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel._torch import StridedShard
from lightning_parallel.schemes.tensor.lazy import LazyShard


def _parts(x: LazyShard) -> int:
    placement = x._sharded.placements[0]
    return placement.split_factor if isinstance(placement, StridedShard) else 1


def _shards(local: Tensor, like: DTensor, shape: tuple[int, ...], dim: int) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def split(x: Any, split_size_or_sections: int | list[int], dim: int = 0) -> Any:
    """``Tensor.split`` into exactly the packed parts; ``NotImplemented`` for any other cut."""
    if not isinstance(x, LazyShard) or dim % x.ndim != x.ndim - 1:
        return NotImplemented
    parts, size = _parts(x), x.size(-1)
    sections = split_size_or_sections
    sizes = [sections] * (size // sections) if isinstance(sections, int) else list(sections)
    if sizes != [size // parts] * parts:
        return NotImplemented
    locals_ = (part.contiguous() for part in x._sharded.to_local().chunk(parts, dim=-1))
    shape = (*x.shape[:-1], size // parts)
    return tuple(_shards(local, x._sharded, shape, x.ndim - 1) for local in locals_)


def chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    """``Tensor.chunk`` into the packed parts."""
    if not isinstance(x, LazyShard) or chunks != _parts(x):
        return NotImplemented
    return split(x, x.size(-1) // chunks, dim)


def view(x: Any, *shape: Any) -> Any:
    """``view``/``reshape`` that splits the last dim into (parts, heads, …): then the heads are what is sharded."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    if not isinstance(x, LazyShard) or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    total = x.numel()
    if -1 in sizes:
        known = prod(size for size in sizes if size != -1)
        sizes = tuple(total // known if size == -1 else size for size in sizes)
    lead, tail = x.shape[:-1], sizes[x.ndim - 1 :]
    parts, tp = _parts(x), x._sharded.device_mesh.size()
    if tuple(sizes[: x.ndim - 1]) != tuple(lead) or len(tail) < 2 or tail[0] != parts or tail[1] % tp:
        return NotImplemented
    local = x._sharded.to_local().reshape(*lead, parts, tail[1] // tp, *tail[2:])
    return _shards(local, x._sharded, tuple(sizes), x.ndim)


FUSED_HANDLERS: dict[Any, Any] = {
    Tensor.split: split,
    torch.split: split,
    Tensor.chunk: chunk,
    torch.chunk: chunk,
    Tensor.view: view,
    Tensor.reshape: view,
    torch.reshape: view,
}
