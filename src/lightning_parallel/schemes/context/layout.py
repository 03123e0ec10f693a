"""Which positions of a sequence each rank of the context axis holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """A sequence of ``length`` tokens over ``size`` ranks, as many rows on each.

    Balanced, it is cut into ``2 × size`` chunks, of which rank r holds those numbered r and 2 × size - 1 - r (head and
    tail): under a causal mask every rank then has the same work. Otherwise rank r holds the r-th of ``size`` chunks.
    Where the length does not divide, the last positions are padding, which repeats the last token: a rank may hold
    nothing else. A rank's rows are in ascending order, so that its padding comes last.

    Args:
        length: Tokens.
        size: Ranks.
        balanced: Head and tail on one rank.
    """

    length: int
    size: int
    balanced: bool = True

    @property
    def chunk(self) -> int:
        """Positions in a chunk, the last ones padding."""
        return -(-self.length // (2 * self.size if self.balanced else self.size))

    @property
    def num_local(self) -> int:
        """Rows that each rank holds, padding included."""
        return self.chunk * (2 if self.balanced else 1)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The half-open ranges of positions of ``rank``, in order; positions from ``length`` on are padding."""
        chunks = (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)
        return [(chunk * self.chunk, (chunk + 1) * self.chunk) for chunk in chunks]

    def num_valid(self, rank: int) -> int:
        """Rows of ``rank`` that are no padding; they come first."""
        return sum(max(0, min(stop, self.length) - start) for start, stop in self.ranges(rank))

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Position of each row of ``rank``, shape (num_local,); the last one of the sequence for padding."""
        rows = torch.cat([torch.arange(start, stop, device=device) for start, stop in self.ranges(rank)])
        return rows.clamp(max=self.length - 1)

    def order(self, device: torch.device | None = None) -> Tensor:
        """Where each position lies in the rows of all ranks, concatenated by rank: shape (length,)."""
        where = torch.empty(2 * self.size * self.chunk, dtype=torch.long, device=device)
        start = 0
        for rank in range(self.size):
            for first, last in self.ranges(rank):
                where[first:last] = torch.arange(start, start + last - first, device=device)
                start += last - first
        return where[: self.length]
