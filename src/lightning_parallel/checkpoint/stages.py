"""Checkpoints of a pipeline, whose stages hold different parts of one module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel._torch import HOST
from lightning_parallel.checkpoint.tree import Path, set_at
from lightning_parallel.schemes.pipeline.ghost import Ghost


def collect_stages(tree: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Complete rank 0's nested dicts with what the other stages have, one tensor at a time.

    Args:
        tree: Whole tensors in host memory, with ghosts, or nothing, in the place of what other stages hold.
        group: The ranks of one pipeline; a collective of all of them.
        device: Of this rank: what the group's backend sends.

    Returns:
        The whole tree on the group's first rank, ``{}`` on the others.
    """
    known: set[Path] = {path for path, _ in _leaves((), tree)} if dist.get_rank(group) == 0 else set()
    for position in range(1, dist.get_world_size(group)):
        known = _from(0, known, group, device)
        mine = dict(_leaves((), tree)) if dist.get_rank(group) == position else {}
        offered = {path: _described(value) for path, value in mine.items() if path not in known}
        for path, value in _from(position, offered, group, device).items():
            if isinstance(value, _Tensor):
                sent = mine[path].to(device).contiguous() if path in mine else None
                whole = torch.empty(value.shape, dtype=value.dtype, device=device) if sent is None else sent
                dist.broadcast(whole, dist.get_global_rank(group, position), group=group)
                value = whole.to(HOST) if dist.get_rank(group) == 0 else None
            if dist.get_rank(group) == 0:
                set_at(tree, path, value)
                known.add(path)
    return tree if dist.get_rank(group) == 0 else {}


class _Tensor:
    """What has to be known of a tensor before it comes."""

    def __init__(self, value: Tensor) -> None:
        self.shape, self.dtype = value.shape, value.dtype


def _described(value: Any) -> Any:
    return _Tensor(value) if isinstance(value, Tensor) else value


def _from(position: int, value: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    values = [value]
    dist.broadcast_object_list(values, dist.get_global_rank(group, position), group=group, device=device)
    return values[0]


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Every leaf below dicts but ghosts; lists and tuples are leaves."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves((*path, key), child)
    elif not isinstance(value, Ghost):
        yield path, value
