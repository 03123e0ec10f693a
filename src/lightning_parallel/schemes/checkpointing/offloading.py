"""Values that wait for backward in host memory, copied there and back while the device computes.

[Note: lanes]  Copies run on a stream of their own. It waits for what the compute stream has been asked so far, and the
compute stream waits for a copy only where its value is used. A region that is computed again asks for the values of
the region before it, which backward comes to next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_parallel._torch import HOST, local_of
from lightning_parallel.flops.peaks import is_accelerator


class Lane:
    """The stream of a device on which copies run; on the host, where there is none, they are plain copies.

    Args:
        device: Where values come from.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_apart = is_accelerator(device)
        self._device = device
        self._stream: Any = torch.Stream(device) if self.is_apart else None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around copies: after all that the device has been asked so far."""
        if not self.is_apart:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def mark(self) -> Any:
        """The end of the copies so far."""
        return self._stream.record_event() if self.is_apart else None

    def is_used_by(self, tensor: Tensor) -> None:
        """The memory of a tensor is not used again before the copies so far are done."""
        if self.is_apart:
            tensor.record_stream(self._stream)

    def wait(self, mark: Any, tensor: Tensor | None = None) -> None:
        """The device goes on once the copies up to ``mark`` are done, with a tensor that the lane has made, if any."""
        if self.is_apart:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(mark)
            if tensor is not None:
                tensor.record_stream(stream)


class OnHost:
    """A tensor that waits in host memory.

    Args:
        tensor: On the device.
        lane: Of that device.
    """

    def __init__(self, tensor: Tensor, lane: Lane) -> None:
        self._lane, self._device, self._needs_grad = lane, tensor.device, tensor.requires_grad
        local, self._whole = local_of(tensor.detach())
        self.bytes = local.numel() * local.element_size()
        self._host = torch.empty_like(local, device=HOST, pin_memory=lane.is_apart)
        with lane.copying():
            self._host.copy_(local, non_blocking=True)
        lane.is_used_by(local)
        self._copied = lane.mark()
        self._back: tuple[Tensor, Any] | None = None

    def before_change(self) -> None:
        """What it was copied from is about to be changed in place: the device waits for the copy."""
        self._lane.wait(self._copied)

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._back is None:
            with self._lane.copying():
                back = torch.empty_like(self._host, device=self._device)
                back.copy_(self._host, non_blocking=True)
            self._back = back, self._lane.mark()

    def get(self) -> Tensor:
        """It, on its device. The copy that was fetched is the caller's: fetch again for another one."""
        self.fetch()
        assert self._back is not None
        (local, mark), self._back = self._back, None
        self._lane.wait(mark, local)
        return self._whole(local).requires_grad_(self._needs_grad)


class Offloads:
    """What the regions of a module have in host memory, in the order of their forwards.

    Attributes:
        bytes: Held now.
        peak: Held at most.
    """

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._lanes: dict[torch.device, Lane] = {}
        self._waiting: dict[int, list[OnHost]] = {}

    def take(self, region: int, tensor: Tensor) -> OnHost:
        """Move a tensor of a region."""
        lane = self._lanes.get(tensor.device)
        if lane is None:
            lane = self._lanes[tensor.device] = Lane(tensor.device)
        moved = OnHost(tensor, lane)
        self._waiting.setdefault(region, []).append(moved)
        self.bytes += moved.bytes
        self.peak = max(self.peak, self.bytes)
        return moved

    def is_computed_again(self, region: int) -> None:
        """Fetch what the region before it will need."""
        before = max((other for other in self._waiting if other < region), default=0)  # regions count from 1
        for moved in self._waiting.get(before, ()):
            moved.fetch()

    def leave(self, region: int) -> None:
        """Autograd lets go of a region."""
        self.bytes -= sum(moved.bytes for moved in self._waiting.pop(region, ()))

    def inputs(self, region: int) -> saved_tensors_hooks:
        """Around the checkpointed call of a region: arguments that need a gradient wait in host memory."""

        def pack(tensor: Tensor) -> Any:
            return self.take(region, tensor) if tensor.requires_grad else tensor

        def unpack(packed: Any) -> Tensor:
            return packed.get() if isinstance(packed, OnHost) else packed

        return saved_tensors_hooks(pack, unpack)
