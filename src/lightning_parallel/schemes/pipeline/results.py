"""What the last stage found out, on every other."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Results:
    """Sends objects from one rank to all others without waiting for them.

    ``torch.distributed.broadcast_object_list`` waits: the sender could not begin the next step while others finish
    theirs, and a zero-bubble schedule would have its bubble back.

    Args:
        group: The ranks of one pipeline.
        source: The one that sends, in the group.
        device: Of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device
        self._under_way: list[tuple[Tensor, dist.Work]] = []

    def send(self, value: Any) -> None:
        """On the source. Tensors in ``value`` are on the host."""
        for _, work in self._under_way:
            work.wait()
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)
        size = torch.tensor([data.numel()], device=self._device)
        self._under_way = [(part, self._broadcast(part)) for part in (size, data)]

    def receive(self) -> Any:
        """On the others."""
        size = torch.empty(1, dtype=torch.long, device=self._device)
        self._broadcast(size).wait()
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        self._broadcast(data).wait()
        return pickle.loads(data.cpu().numpy().tobytes())

    def _broadcast(self, part: Tensor) -> dist.Work:
        work: dist.Work = dist.broadcast(part, group=self._group, group_src=self._source, async_op=True)
        return work
