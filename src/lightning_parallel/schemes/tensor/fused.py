"""Taking a packed projection apart (query, key and value of one matrix) without gathering it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel.schemes.tensor.lazy import LazyShard


class PackedShard(LazyShard):
    """The output of a packed projection: each rank holds its share of every part, one after the other.

    That is not a shard in DTensor's sense (the shares of one rank are no range of the whole), so nothing but the
    handlers below, and operations element by element, keeps it split.

    Attributes:
        parts: Whole size of each part.
    """

    parts: tuple[int, ...]

    def replicated(self) -> DTensor:
        """The whole tensor in the module's own order."""
        tp = self._sharded.device_mesh.size()
        ranks_major = super().replicated().unflatten(-1, (tp, -1))
        shares = ranks_major.split([size // tp for size in self.parts], dim=-1)
        return torch.cat([share.flatten(-2) for share in shares], dim=-1)  # type: ignore[return-value]

    def like(self, sharded: DTensor) -> LazyShard:
        """The same layout for other values."""
        return _packed(sharded, self.parts)

    def reshaped(self, func: Any, args: Any, kwargs: Any) -> None:
        """No shape other than the handlers' keeps the shares in order."""

    def local_parts(self) -> Sequence[Tensor]:
        """This rank's share of each part."""
        tp = self._sharded.device_mesh.size()
        shares: tuple[Tensor, ...] = self._sharded.to_local().split([size // tp for size in self.parts], dim=-1)
        return shares


def pack(local: Tensor, tp: DeviceMesh, size: int, ratio: tuple[int, ...]) -> PackedShard:
    """This rank's output of a packed projection to ``size`` features, whose parts have the given ratio."""
    shape = (*local.shape[:-1], size)
    return _packed(_shards(local, tp, shape, local.ndim - 1), tuple(part * size // sum(ratio) for part in ratio))


def _packed(sharded: DTensor, parts: tuple[int, ...]) -> PackedShard:
    packed = PackedShard(sharded, FUSED_HANDLERS)
    packed.parts = parts
    return packed


def _shards(local: Tensor, tp: DeviceMesh, shape: tuple[int, ...], dim: int) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, tp, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride)


def _part(x: PackedShard, local: Tensor, size: int) -> DTensor:
    return _shards(local.contiguous(), x._sharded.device_mesh, (*x.shape[:-1], size), x.ndim - 1)


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedShard) and x.is_split()


def split(x: Any, split_size_or_sections: int | list[int], dim: int = 0) -> Any:
    """``Tensor.split`` into exactly the packed parts; ``NotImplemented`` for any other cut."""
    if not _is_packed(x) or dim % x.ndim != x.ndim - 1:
        return NotImplemented
    size, sections = x.size(-1), split_size_or_sections
    sizes = [sections] * (size // sections) if isinstance(sections, int) else list(sections)
    if sizes != list(x.parts):
        return NotImplemented
    return tuple(_part(x, local, part) for local, part in zip(x.local_parts(), x.parts, strict=True))


def chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    """``Tensor.chunk`` into the packed parts."""
    if not _is_packed(x) or [x.size(-1) // chunks] * chunks != list(x.parts):
        return NotImplemented
    return split(x, x.size(-1) // chunks, dim)


def get_part(x: Any, index: Any) -> Any:
    """``x[..., start:stop]`` that is one whole part."""
    where = index if isinstance(index, tuple) else (index,)
    lead, last = where[:-1], where[-1] if where else None
    if not _is_packed(x) or not isinstance(last, slice) or last.step not in (None, 1):
        return NotImplemented
    is_last_dim = lead == (Ellipsis,) or (len(lead) == x.ndim - 1 and all(each == slice(None) for each in lead))
    if not is_last_dim or not all(bound is None or isinstance(bound, int) for bound in (last.start, last.stop)):
        return NotImplemented
    start, stop, _ = last.indices(x.size(-1))
    stops = list(accumulate(x.parts))
    for local, size, end in zip(x.local_parts(), x.parts, stops, strict=True):
        if (start, stop) == (end - size, end):
            return _part(x, local, size)
    return NotImplemented


def view(x: Any, *shape: Any) -> Any:
    """``view``/``reshape`` that splits the last dim into (parts, heads, …): then the heads are what is sharded."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    if not _is_packed(x) or len(set(x.parts)) > 1 or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    if -1 in sizes:
        known = prod(size for size in sizes if size != -1)
        sizes = tuple(x.numel() // known if size == -1 else size for size in sizes)
    lead, tail = tuple(x.shape[:-1]), sizes[x.ndim - 1 :]
    num_parts, tp = len(x.parts), x._sharded.device_mesh.size()
    if sizes[: x.ndim - 1] != lead or len(tail) < 2 or tail[0] != num_parts or tail[1] % tp:
        return NotImplemented
    local = x._sharded.to_local().reshape(*lead, num_parts, tail[1] // tp, *tail[2:])
    return _shards(local, x._sharded.device_mesh, sizes, x.ndim)


def unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Any:
    """``unflatten`` of the last dim into (parts, heads, …)."""
    if not _is_packed(x) or dim % x.ndim != x.ndim - 1:
        return NotImplemented
    return view(x, *x.shape[:-1], *sizes)


FUSED_HANDLERS: dict[Any, Any] = {
    Tensor.split: split,
    torch.split: split,
    Tensor.chunk: chunk,
    torch.chunk: chunk,
    Tensor.__getitem__: get_part,
    Tensor.view: view,
    Tensor.reshape: view,
    torch.reshape: view,
    Tensor.unflatten: unflatten,
    torch.unflatten: unflatten,
}
