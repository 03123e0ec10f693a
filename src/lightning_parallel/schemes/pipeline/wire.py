"""How a value travels between stages: beside tensor parallelism each ``tp`` rank sends its own part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel.schemes.pipeline.stages import Slot
from lightning_parallel.schemes.tensor.lazy import LazyShard
from lightning_parallel.schemes.tensor.modules import leave, replicated, sequence_dim, wrap_shards
from lightning_parallel.schemes.tensor.storage import split_evenly


@dataclass(frozen=True, slots=True)
class Wire:
    """Slots to tensors on the wire and back; both ends follow the same rule, so nothing about it is sent.

    With sequence parallelism the hidden state (the first floating slot with a sequence) is sent in its shards along the
    sequence, the bytes divided by ``tp``; anything else goes whole, between the peers of each ``tp`` rank.

    Args:
        tp: The tensor axis, if it splits anything.
        sequence_parallel: The residual stream between blocks is sharded along the sequence.
    """

    tp: DeviceMesh | None = None
    sequence_parallel: bool = False

    def sharded(self, slots: list[Slot]) -> Slot | None:
        """The slot that travels in shards."""
        if self.tp is None or not self.sequence_parallel:
            return None
        return next((slot for slot in slots if slot.dtype.is_floating_point and len(slot.shape) > 2), None)

    def shape(self, slot: Slot, slots: list[Slot]) -> torch.Size:
        """Of the tensor that this rank sends or receives."""
        if self.tp is None or slot is not self.sharded(slots):
            return slot.shape
        dim = len(slot.shape) - 2
        start, stop = split_evenly(slot.shape[dim], self.tp.size(), self.tp.get_local_rank())
        return torch.Size((*slot.shape[:dim], stop - start, *slot.shape[dim + 1 :]))

    def pack(self, value: Tensor, slot: Slot, slots: list[Slot]) -> Tensor:
        """What is sent for ``value``; differentiable."""
        if self.tp is None:
            return value
        if slot is not self.sharded(slots):
            whole: Tensor = leave(value)
            return whole.full() if isinstance(whole, LazyShard) else whole
        spread: DTensor = replicated(value, self.tp) if not isinstance(value, DTensor) else value
        return spread.redistribute(placements=[Shard(sequence_dim(spread))]).to_local()

    def unpack(self, local: Tensor, slot: Slot, slots: list[Slot]) -> Tensor:
        """The value for what was received; differentiable."""
        if self.tp is None or slot is not self.sharded(slots):
            return local
        dim = len(slot.shape) - 2
        return wrap_shards(local, self.tp, dim, slot.shape[dim])
