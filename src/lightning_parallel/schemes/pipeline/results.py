"""What the last stage found out, on every other."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TAG = 1  # what stages send each other has 0


class Results:
    """Sends objects from one rank to all others without waiting for them.

    ``torch.distributed.broadcast_object_list`` waits: the sender could not begin the next step while others finish
    theirs, and a zero-bubble schedule would have its bubble back. In a broadcast that does not wait, ranks still pass
    it on to each other, each when it has ended its own step. So every rank is sent its own copy.

    Args:
        group: The ranks of one pipeline.
        source: The one that sends, in the group.
        device: Of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device
        self._under_way: list[dist.Work] = []

    def send(self, value: Any) -> None:
        """On the source. Tensors in ``value`` are on the host."""
        self.wait()
        data = torch.frombuffer(bytearray(_dumps(value)), dtype=torch.uint8).to(self._device)
        size = torch.tensor([data.numel()], device=self._device)
        others = [rank for rank in range(self._group.size()) if rank != self._source]
        self._under_way = [work for part in (size, data) for work in self._start(dist.isend, part, others)]

    def wait(self) -> None:
        """On the source: until it has been sent."""
        for work in self._under_way:
            work.wait()

    def receive(self) -> Any:
        """On the others."""
        size = self._received(torch.empty(1, dtype=torch.long, device=self._device))
        data = self._received(torch.empty(int(size.item()), dtype=torch.uint8, device=self._device))
        return pickle.loads(data.cpu().numpy().tobytes())

    def _received(self, part: Tensor) -> Tensor:
        for work in self._start(dist.irecv, part, [self._source]):
            work.wait()
        return part

    def _start(self, kind: Any, part: Tensor, ranks: list[int]) -> list[dist.Work]:
        works: list[dist.Work] = dist.batch_isend_irecv(
            [dist.P2POp(kind, part, group=self._group, group_peer=rank, tag=_TAG) for rank in ranks]
        )
        return works


class _Pickler(pickle.Pickler):
    """Writes a tensor as its bytes: torch's own way is for files, and takes a hundred times as long for a number."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor_of, (data, value.dtype, tuple(value.shape))


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _tensor_of(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
