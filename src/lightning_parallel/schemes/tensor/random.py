"""Random numbers over the ``tp`` axis: alike where a tensor is replicated, apart where it is split.

[Note: two streams]  Every ``tp`` rank of a data replica starts with the same generator state, the *common* stream, and
all code that runs on replicated tensors draws from it, so dropout masks agree. Where tensors are split (between a
column-wise and a row-wise projection, or along the sequence) the rank draws from a stream of its own, seeded from the
common one, which advances alike on every rank. Recomputation under activation checkpointing restores the common
state and so draws the same masks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import Shard

from lightning_parallel._torch import StridedShard, default_generator


class SplitStreams:
    """Switches the default generator of one device between the common stream and this rank's own.

    DTensor takes an instance as its tracker: it asks ``_distribute_region`` around each random operation.

    Args:
        device: The device whose default generator modules draw from.
        rank: Position on the ``tp`` axis.
    """

    distribute_region_enabled = True

    def __init__(self, device: torch.device, rank: int) -> None:
        self._rank = rank
        self._generator = default_generator(device)
        self._common: torch.Tensor | None = None  # the common stream's state while this rank's own is in use

    def enter(self) -> None:
        """Draw from this rank's own stream until ``leave``; no effect when already there."""
        if self._common is None:
            seed = _draw_seed(self._generator)
            self._common = self._generator.get_state()
            self._generator.manual_seed(seed + 1 + self._rank)

    def leave(self) -> None:
        """Go back to the common stream; no effect when already there."""
        if self._common is not None:
            self._generator.set_state(self._common)
            self._common = None

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        split = any(isinstance(placement, (Shard, StridedShard)) for placement in spec.placements)
        if not split or self._common is not None:
            yield
            return
        self.enter()
        try:
            yield
        finally:
            self.leave()


def _draw_seed(generator: torch.Generator) -> int:
    """A fresh seed from ``generator``, which moves on."""
    if generator.device.type == torch.default_generator.device.type:
        return int(torch.empty((), dtype=torch.int64).random_(2**62, generator=generator).item())
    # On an accelerator a draw would wait for the device; its counter serves as well and lives on the host.
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return (generator.initial_seed() + 0x9E3779B97F4A7C15 * (offset + 1)) % 2**62
