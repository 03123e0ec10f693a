"""For user code inside blocks, under context parallelism: where its rows are, and the whole of something in rows."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.context.rows import Context
from lightning_parallel.schemes.context.shard import SequenceShard, gathered
from lightning_parallel.step import EagerStep


class SequenceHelpers:
    """What a strategy answers about sequences. Around the blocks nothing of it is needed: sequences are whole there."""

    _step: EagerStep | None

    def _axis(self) -> Context | None:
        split = self._step.parallelized.context if self._step else None
        return split.context if split else None

    def sequence_positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Positions in a sequence of ``length`` tokens of the rows that a block gets on this rank, shape (rows,).

        Padding, which comes last, has position 0. Without ``cp`` all positions.
        """
        context = self._axis()
        return torch.arange(length, device=device) if context is None else context.rows(length).own.to(device)

    def gather_sequence(self, rows: Tensor, length: int, dim: int = 1) -> Tensor:
        """Of ``rows`` that a block has, the whole sequence of ``length`` tokens, in order, on every rank of ``cp``.

        A collective: call it on all of them. Differentiable.

        Raises:
            ParallelConfigError: ``rows`` has another number of rows along ``dim`` than a block gets.
        """
        context = self._axis()
        if context is None or isinstance(rows, SequenceShard):
            full: Tensor = gathered(rows)
            return full
        expected = context.rows(length).num_local
        if rows.size(dim) != expected:
            raise ParallelConfigError(
                f"gather_sequence: {rows.size(dim)} rows in dim {dim}, where a sequence of {length} tokens has "
                f"{expected} on each rank of cp={context.size}. Pass what a block computes, and the sequence's length."
            )
        return context.rows(length).gather(rows, dim)
