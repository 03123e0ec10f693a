"""What the last stage found out, on every other."""

from __future__ import annotations

import io
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
        self.wait()
        data = torch.frombuffer(bytearray(_dumps(value)), dtype=torch.uint8).to(self._device)
        size = torch.tensor([data.numel()], device=self._device)
        self._under_way = [(part, self._broadcast(part)) for part in (size, data)]

    def wait(self) -> None:
        """On the source: until it has been sent."""
        for _, work in self._under_way:
            work.wait()

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
