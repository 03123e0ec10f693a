"""Which positions of a sequence each rank of the context axis holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]


class Part(NamedTuple):
    """What one rank holds of one document.

    Attributes:
        place: Of the rank in this document: the heads lie in ascending order of place, the tails in descending.
        head: Half-open range of positions.
        tail: Half-open range of positions, after all heads of the document; perhaps empty, as the head may be.
    """

    place: int
    head: Range
    tail: Range

    @property
    def num_rows(self) -> int:
        """Positions in both."""
        return self.head[1] - self.head[0] + self.tail[1] - self.tail[0]


@dataclass(frozen=True, slots=True)
class Layout:
    """A sequence of ``length`` tokens over ``size`` ranks, as many rows on each.

    Balanced, every document (without ``documents``: the sequence) is cut into ``2 × size`` chunks, of which the rank at
    place p has those numbered p and 2 × size - 1 - p (head and tail): where a token sees those before it in its
    document, every rank has the same work. Where a document of L tokens does not divide, its chunks differ by one row,
    and ranks by no more than L pairs of a query and a key, of L² / (2 × size) that each computes. Who has fewer rows so
    far gets the place with more, and among equals who has less work the place with more: rows of ranks differ by one at
    most, and pairs over many documents by far less than the sum of L.

    Otherwise rank r holds the r-th of ``size`` chunks. A rank's rows are in ascending order, and after them comes
    padding to ``num_local`` rows: a rank may hold nothing else.

    Args:
        length: Tokens.
        size: Ranks.
        balanced: Head and tail on one rank.
        documents: Lengths of the documents, ``length`` together, or none to treat the sequence as one.
    """

    length: int
    size: int
    balanced: bool = True
    documents: tuple[int, ...] = ()

    @property
    def num_local(self) -> int:
        """Rows that each rank holds, padding included."""
        return -(-self.length // self.size)

    def parts(self, rank: int) -> tuple[Part, ...]:
        """What ``rank`` holds of each document, without padding."""
        if self.balanced:
            return _deal(self.documents or (self.length,), self.size)[rank]
        start, stop = (min(edge * self.num_local, self.length) for edge in (rank, rank + 1))
        return (Part(rank, (start, stop), (self.length, self.length)),)

    def ranges(self, rank: int) -> list[Range]:
        """The half-open ranges of positions of ``rank``, in order, without padding."""
        return [held for part in self.parts(rank) for held in (part.head, part.tail)]

    def num_valid(self, rank: int) -> int:
        """Rows of ``rank`` that are no padding; they come first."""
        return sum(part.num_rows for part in self.parts(rank))

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Position of each row of ``rank``, shape (num_local,); the last one of the sequence for padding."""
        held = join(self.ranges(rank))
        padding = held.new_full((self.num_local - held.numel(),), self.length - 1)
        return torch.cat([held, padding]).to(device)

    def order(self, device: torch.device | None = None) -> Tensor:
        """Where each position lies in the rows of all ranks, concatenated by rank: shape (length,)."""
        return _order(self, device)


def join(ranges: list[Range] | tuple[Range, ...]) -> Tensor:
    """The positions in half-open ranges, one after the other, on the host."""
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


@lru_cache(maxsize=64)
def _order(layout: Layout, device: torch.device | None) -> Tensor:
    where = torch.empty(layout.length, dtype=torch.long)
    for rank in range(layout.size):
        held = join(layout.ranges(rank))
        where[held] = torch.arange(held.numel()) + rank * layout.num_local
    return where.to(device)


@lru_cache(maxsize=64)
def _deal(documents: tuple[int, ...], size: int) -> tuple[tuple[Part, ...], ...]:
    """Of each rank, its part of each document."""
    held: list[list[Part]] = [[] for _ in range(size)]
    rows, work = [0] * size, [0] * size
    start = 0
    for length in documents:
        places = sorted(_places(start, length, size), key=lambda part: (-part.num_rows, -_pairs(part, start)))
        ranks = sorted(range(size), key=lambda rank: (rows[rank], work[rank]))
        for rank, part in zip(ranks, places, strict=True):
            held[rank].append(part)
            rows[rank] += part.num_rows
            work[rank] += _pairs(part, start)
        start += length
    return tuple(map(tuple, held))


def _places(start: int, length: int, size: int) -> list[Part]:
    """The head and the tail of each place in one document.

    A row too many goes to each place once before to any twice, by turns to a tail and to the next head: then the chunks
    behind them are shifted alike for all places.
    """
    whole, more = divmod(length, 2 * size)
    sizes = [whole] * (2 * size)
    turns = [(place, turn) for turn in (0, 1) for place in range(size)]
    for place, turn in turns[:more]:
        sizes[place if (place + turn) % 2 else 2 * size - 1 - place] += 1
    edges = list(accumulate(sizes, initial=start))
    return [
        Part(place, (edges[place], edges[place + 1]), (edges[-2 - place], edges[-1 - place])) for place in range(size)
    ]


def _pairs(part: Part, start: int) -> int:
    """Of a query in the part and a key that it sees, in a document from ``start`` on."""
    return sum((stop - first) * (first + stop + 1 - 2 * start) // 2 for first, stop in (part.head, part.tail))
