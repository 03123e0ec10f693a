"""Which keys of another rank which of this rank's queries see, and the mask there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_parallel.schemes.context.layout import Layout, Range, join

Ranges = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of attention: some of this rank's rows as queries, some of one rank's rows as keys. No padding.

    Attributes:
        rows: Of this rank.
        cols: Of the other rank.
        row_ranges: Positions of ``rows``, as half-open ranges in order.
        col_ranges: Positions of ``cols``.
        causal: Rows and columns are the same positions, and each sees itself and those before it.
        masked: The explicit mask hides something here, or adds something.
    """

    rows: slice
    cols: slice
    row_ranges: Ranges
    col_ranges: Ranges
    causal: bool
    masked: bool

    @property
    def num_rows(self) -> int:
        """Queries."""
        return _size(self.rows)

    @property
    def num_cols(self) -> int:
        """Keys."""
        return _size(self.cols)

    def mask(self, whole: Tensor) -> Tensor:
        """The explicit mask here, causality included where it applies: shape (1 | batch, 1 | heads, rows, cols).

        Args:
            whole: Bool or additive mask of the whole sequence, broadcastable to (batch, heads, length, length).
        """
        part = cut(cut(whole, -1, self.col_ranges), -2, self.row_ranges)
        part = part.expand(-1, -1, self.num_rows, self.num_cols)
        return causal_mask(part, self.row_ranges, self.col_ranges, whole.device) if self.causal else part


def pieces(layout: Layout, rank: int, *, causal: bool, mask: Tensor | None = None) -> list[list[Piece]]:
    """What the queries of ``rank`` see of the keys of each rank, by rank.

    Causal, within a document every other rank's keys are seen as a rectangle: of one at an earlier place all queries
    see the head, of one at a later place the queries of the tail see all. So with whole chunks every rank computes as
    much. Earlier documents are another rectangle. A bool mask is looked at, once for all pieces: one that hides what
    comes later is causal, what it hides all of is left out, and where it hides nothing it is no mask.

    Args:
        mask: Shape broadcastable to (batch, heads, length, length), four dims.
    """
    is_bool = mask is not None and mask.dtype == torch.bool
    if mask is not None and is_bool and not causal:
        whole = mask.expand(-1, -1, layout.length, layout.length)
        causal = layout.length > 1 and not bool(whole.triu(1).any())
    sources = range(layout.size)
    if mask is None or not is_bool:
        return [_candidates(layout, rank, source, causal=causal, masked=mask is not None) for source in sources]
    hides = _Hides(mask, layout, rank, causal=causal)
    candidates = [_candidates(layout, rank, source, causal=causal, masked=True, by_document=True) for source in sources]
    return [
        [replace(piece, masked=not hides.nothing(piece, source)) for piece in found if not hides.all(piece, source)]
        for source, found in enumerate(candidates)
    ]


class _Hides:
    """What a bool mask hides of the pairs of this rank's ranges of queries and each rank's ranges of keys.

    Args:
        mask: Of the whole sequence, four dims.
        causal: What comes after each query's position does not count.
    """

    def __init__(self, mask: Tensor, layout: Layout, rank: int, *, causal: bool) -> None:
        own = layout.ranges(rank)
        self._rows = _edges(own)
        self._cols = [_edges(layout.ranges(source)) for source in range(layout.size)]
        rows = join(own).to(mask.device)
        of_own = mask if mask.shape[-2] == 1 else mask.index_select(-2, rows)
        counts = []
        for source in range(layout.size):
            cols = join(layout.ranges(source)).to(mask.device)
            part = of_own if mask.shape[-1] == 1 else of_own.index_select(-1, cols)
            part = part.expand(-1, -1, rows.numel(), cols.numel()).flatten(0, 1)
            counted = rows.unsqueeze(-1) >= cols if causal else torch.ones_like(part[0])
            for taken in (part.any(0) & counted, ~part.all(0) & counted):
                counts.append(_count_in(_count_in(taken.float(), self._rows).mT, self._cols[source]).mT)
        sizes = [count.numel() for count in counts]
        told = torch.cat([count.flatten() for count in counts]).tolist()  # one look
        shaped = [part.view(count.shape) for part, count in zip(torch.tensor(told).split(sizes), counts, strict=True)]
        self._seen, self._hidden = shaped[::2], shaped[1::2]

    def all(self, piece: Piece, source: int) -> bool:
        """Whether no query of the piece sees any of its keys."""
        return not self._in(self._seen[source], piece, source).any()

    def nothing(self, piece: Piece, source: int) -> bool:
        """Whether every query of the piece sees all of its keys, or all up to its own position if it is causal."""
        return not self._in(self._hidden[source], piece, source).any()

    def _in(self, counts: Tensor, piece: Piece, source: int) -> Tensor:
        rows, cols = self._rows, self._cols[source]
        return counts[
            rows.index(piece.rows.start) : rows.index(piece.rows.stop),
            cols.index(piece.cols.start) : cols.index(piece.cols.stop),
        ]


def causal_mask(mask: Tensor | None, rows: Ranges, cols: Ranges, device: torch.device) -> Tensor:
    """A mask of rows × columns, or none, with what comes after each row's position hidden too."""
    row_positions, col_positions = (join(ranges).to(device) for ranges in (rows, cols))
    seen = row_positions.unsqueeze(-1) >= col_positions
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def cut(mask: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """Ranges of positions along one dim, joined; a dim of size 1 is the same for all and stays."""
    if mask.shape[dim] == 1:
        return mask
    parts = [mask.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _candidates(
    layout: Layout, rank: int, source: int, *, causal: bool, masked: bool, by_document: bool = False
) -> list[Piece]:
    """Pieces that cover every pair that may be seen once, before a look at the mask.

    Args:
        masked: There is a mask.
        by_document: Also without causality.
    """
    queries, keys = layout.parts(rank), layout.parts(source)
    row_ranges, col_ranges = (
        tuple(held for part in parts for held in (part.head, part.tail)) for parts in (queries, keys)
    )
    rows, cols = _edges(row_ranges), _edges(col_ranges)

    def piece(first: int, last: int, start: int, stop: int, *, own: bool = False) -> Piece:
        return Piece(
            rows=slice(rows[first], rows[last]),
            cols=slice(cols[start], cols[stop]),
            row_ranges=row_ranges[first:last],
            col_ranges=col_ranges[start:stop],
            causal=own,
            masked=masked,
        )

    end = len(col_ranges)
    if not causal and not by_document:
        found = [piece(0, len(row_ranges), 0, end)]
    else:
        found = []
        for i in range(0, end, 2):  # the ranges of one document: a head and a tail
            place, other = queries[i // 2].place, keys[i // 2].place
            found.append(piece(i, i + 2, 0, i))
            if not causal or place == other:
                found.append(piece(i, i + 2, i, i + 2, own=causal))
            elif other < place:
                found.append(piece(i, i + 2, i, i + 1))
            else:
                found.append(piece(i + 1, i + 2, i, i + 2))
            if not causal:
                found.append(piece(i, i + 2, i + 2, end))
    return [each for each in found if each.rows.start < each.rows.stop and each.cols.start < each.cols.stop]


def _size(part: slice) -> int:
    size: int = part.stop - part.start
    return size


def _edges(ranges: Sequence[Range]) -> list[int]:
    """Where each range begins in the rows that they are together, and the end."""
    return list(accumulate((stop - start for start, stop in ranges), initial=0))


def _count_in(taken: Tensor, edges: list[int]) -> Tensor:
    """Sums of consecutive rows: shape (len(edges) - 1, columns)."""
    sizes = torch.tensor([stop - start for start, stop in pairwise(edges)])
    which = torch.arange(len(sizes)).repeat_interleave(sizes).to(taken.device)
    return taken.new_zeros((len(sizes), taken.shape[1])).index_add_(0, which, taken)
