"""Which keys of another rank which of this rank's queries see, and the mask there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_parallel.schemes.context.layout import Layout

Ranges = tuple[tuple[int, int], ...]


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

    def mask(self, whole: Tensor) -> Tensor:
        """The explicit mask here, causality included where it applies: shape (1 | batch, 1 | heads, rows, cols).

        Args:
            whole: Bool or additive mask of the whole sequence, broadcastable to (batch, heads, length, length).
        """
        num_rows, num_cols = self.rows.stop - self.rows.start, self.cols.stop - self.cols.start
        part = cut(cut(whole, -1, self.col_ranges), -2, self.row_ranges).expand(-1, -1, num_rows, num_cols)
        return causal_mask(part, self.row_ranges, self.col_ranges, whole.device) if self.causal else part


def pieces(layout: Layout, rank: int, *, causal: bool, mask: Tensor | None = None) -> list[Piece | None]:
    """What the queries of ``rank`` see of the keys of each rank, by rank; None where that is nothing.

    Causal, every other rank's keys are seen as a rectangle: of an earlier rank all queries see the first chunk (of
    two, balanced), of a later rank the queries of the second chunk see all. So with whole chunks every rank computes
    as much. Where a bool mask hides all of a piece or nothing, it is left out: one look at the values for all pieces.

    Args:
        mask: Shape broadcastable to (batch, heads, length, length), four dims.
    """
    found = [_piece(layout, rank, source, causal=causal, masked=mask is not None) for source in range(layout.size)]
    if mask is None or mask.dtype != torch.bool:
        return found
    seen = [(source, piece, piece.mask(mask)) for source, piece in enumerate(found) if piece is not None]
    if not seen:
        return found
    # Under a causal piece a mask that is all True in the lower triangle is no mask.
    whole = [(part | ~part.new_ones(part.shape[-2:]).tril() if piece.causal else part) for _, piece, part in seen]
    flags = torch.stack([torch.stack([part.any(), full.all()]) for (_, _, part), full in zip(seen, whole, strict=True)])
    for (source, piece, _), (some, full) in zip(seen, flags.tolist(), strict=True):
        found[source] = None if not some else replace(piece, masked=not full)
    return found


def causal_mask(mask: Tensor | None, rows: Ranges, cols: Ranges, device: torch.device) -> Tensor:
    """A mask of rows × columns, or none, with what comes after each row's position hidden too."""
    row_positions, col_positions = (
        torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges]) for ranges in (rows, cols)
    )
    seen = row_positions.unsqueeze(-1) >= col_positions
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def cut(mask: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Ranges of positions along one dim, joined; a dim of size 1 is the same for all and stays."""
    if mask.shape[dim] == 1:
        return mask
    parts = [mask.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def valid_ranges(layout: Layout, rank: int) -> Ranges:
    """Positions that ``rank`` holds, padding left out: one range for each chunk, perhaps empty."""
    return tuple((min(start, layout.length), min(stop, layout.length)) for start, stop in layout.ranges(rank))


def _piece(layout: Layout, rank: int, source: int, *, causal: bool, masked: bool) -> Piece | None:
    queries, keys = valid_ranges(layout, rank), valid_ranges(layout, source)
    skipped = 0
    if causal and source < rank:
        keys = keys[:1]
    elif causal and source > rank:
        skipped, queries = _count(queries[:1]), queries[1:]
    num_rows, num_cols = _count(queries), _count(keys)
    if not num_rows or not num_cols:
        return None
    return Piece(
        rows=slice(skipped, skipped + num_rows),
        cols=slice(0, num_cols),
        row_ranges=queries,
        col_ranges=keys,
        causal=causal and source == rank,
        masked=masked,
    )


def _count(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)
