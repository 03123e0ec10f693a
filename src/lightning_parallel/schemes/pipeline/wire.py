"""How a value travels between stages: beside ``tp`` and ``cp`` each rank sends its own part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel.schemes.context.rows import Context
from lightning_parallel.schemes.context.shard import SequenceShard, gathered
from lightning_parallel.schemes.pipeline.stages import Slot
from lightning_parallel.schemes.tensor.lazy import LazyShard
from lightning_parallel.schemes.tensor.modules import leave, replicated, sequence_dim, wrap_shards
from lightning_parallel.schemes.tensor.storage import split_evenly


@dataclass(frozen=True, slots=True)
class Wire:
    """Slots to tensors on the wire and back; both ends follow the same rule, so nothing about it is sent.

    The hidden state is the first floating slot with a sequence. With context parallelism it is sent in rows, with
    sequence parallelism in its shards along the sequence: the bytes divided by ``cp`` and ``tp``. Anything else goes
    whole, between the peers of each rank.

    Args:
        tp: The tensor axis, if it splits anything.
        sequence_parallel: The residual stream between blocks is sharded along the sequence.
        context: The context axis, if there is one.
    """

    tp: DeviceMesh | None = None
    sequence_parallel: bool = False
    context: Context | None = None

    @staticmethod
    def hidden(slots: list[Slot]) -> Slot | None:
        """The slot that travels in parts."""
        return next((slot for slot in slots if slot.dtype.is_floating_point and len(slot.shape) > 2), None)

    def _rows_shape(self, slot: Slot, slots: list[Slot]) -> torch.Size:
        if self.context is None or slot is not self.hidden(slots):
            return slot.shape
        dim = len(slot.shape) - 2
        return torch.Size((*slot.shape[:dim], self.context.rows(slot.shape[dim]).num_local, *slot.shape[dim + 1 :]))

    def _is_split(self, slot: Slot, slots: list[Slot]) -> bool:
        return self.tp is not None and self.sequence_parallel and slot is self.hidden(slots)

    def shape(self, slot: Slot, slots: list[Slot]) -> torch.Size:
        """Of the tensor that this rank sends or receives."""
        shape = self._rows_shape(slot, slots)
        if self.tp is None or not self._is_split(slot, slots):
            return shape
        dim = len(shape) - 2
        start, stop = split_evenly(shape[dim], self.tp.size(), self.tp.get_local_rank())
        return torch.Size((*shape[:dim], stop - start, *shape[dim + 1 :]))

    def pack(self, value: Tensor, slot: Slot, slots: list[Slot]) -> Tensor:
        """What is sent for ``value``; differentiable."""
        if self.context is not None:
            value = self._in_rows(value, slot, slots)
        if self.tp is None:
            return value
        if not self._is_split(slot, slots):
            whole: Tensor = leave(value)
            return whole.full() if isinstance(whole, LazyShard) else whole
        spread: DTensor = replicated(value, self.tp) if not isinstance(value, DTensor) else value
        return spread.redistribute(placements=[Shard(sequence_dim(spread))]).to_local()

    def _in_rows(self, value: Tensor, slot: Slot, slots: list[Slot]) -> Tensor:
        assert self.context is not None
        if slot is not self.hidden(slots):
            full: Tensor = gathered(value)
            return full
        dim = len(slot.shape) - 2
        rows = self.context.rows(slot.shape[dim])
        if isinstance(value, SequenceShard) and value.rows is rows and value.sequence_dim == dim:
            return value.local
        return rows.take(gathered(value), dim)

    def unpack(self, local: Tensor, slot: Slot, slots: list[Slot]) -> Tensor:
        """The value for what was received; differentiable."""
        shape = self._rows_shape(slot, slots)
        dim = len(shape) - 2
        value = local
        if self.tp is not None and self._is_split(slot, slots):
            value = wrap_shards(local, self.tp, dim, shape[dim])
        if self.context is None or slot is not self.hidden(slots):
            return value
        return SequenceShard(value, self.context.rows(slot.shape[dim]), dim)
