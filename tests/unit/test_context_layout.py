"""Which rows each rank of the context axis holds, and what documents a batch tells."""

from __future__ import annotations

import random
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.schemes.context.documents import documents_of
from lightning_parallel.schemes.context.layout import Layout


def pairs(layout: Layout, rank: int) -> int:
    """Of a query of this rank and a key before it in its document, or itself."""
    starts = torch.tensor(layout.documents or (layout.length,)).cumsum(0)
    positions = layout.positions(rank)[: layout.num_valid(rank)]
    first = torch.cat([starts.new_zeros(1), starts])[torch.searchsorted(starts, positions, right=True)]
    return int((positions - first + 1).sum())


def packings() -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [
        tuple(draw.randint(1, most) for _ in range(count)) for count in (1, 2, 7, 60) for most in (3, 40, 500)
    ] + [(64,), (64, 128)]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_position_is_on_one_rank_and_rows_differ_by_one(size: int) -> None:
    for documents in packings():
        for layout in (Layout(sum(documents), size, True, documents), Layout(sum(documents), size, False)):
            valid = [layout.num_valid(rank) for rank in range(size)]
            held = [layout.positions(rank)[:count] for rank, count in enumerate(valid)]
            assert torch.cat(held).sort().values.equal(torch.arange(layout.length))
            assert all(rows.equal(rows.sort().values) for rows in held)
            assert all(layout.positions(rank).numel() == layout.num_local for rank in range(size))
            assert not layout.balanced or max(valid) - min(valid) <= 1
            rows = torch.cat([layout.positions(rank) for rank in range(size)])
            assert rows[layout.order()].equal(torch.arange(layout.length))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_pairs_differ_by_no_more_than_the_docstring_says(size: int) -> None:
    for length in range(1, 150):
        work = [pairs(Layout(length, size), rank) for rank in range(size)]
        assert sum(work) == length * (length + 1) // 2
        assert max(work) - min(work) <= length
    for documents in packings():
        work = [pairs(Layout(sum(documents), size, True, documents), rank) for rank in range(size)]
        assert max(work) - min(work) <= sum(documents)
    exact = Layout(6 * size, size, True, (2 * size, 4 * size))
    assert len({pairs(exact, rank) for rank in range(size)}) == 1


def test_head_and_tail_of_each_document() -> None:
    layout = Layout(12, 2, True, (8, 4))
    assert layout.ranges(0) == [(0, 2), (6, 8), (8, 9), (11, 12)]
    assert layout.ranges(1) == [(2, 4), (4, 6), (9, 10), (10, 11)]


@dataclass
class Packed:
    tokens: Tensor
    position_ids: Tensor


Named = namedtuple("Named", "tokens cu_seqlens")
TWICE = torch.tensor([0, 1, 2, 0, 1])


@pytest.mark.parametrize(
    ("batch", "documents"),
    [
        ({"position_ids": TWICE}, (3, 2)),
        ({"position_ids": TWICE.expand(4, -1)}, (3, 2)),
        ({"inner": [{"position_ids": TWICE.int()}]}, (3, 2)),
        (Packed(torch.zeros(5), TWICE), (3, 2)),
        (Named(torch.zeros(5), torch.tensor([0, 3, 5], dtype=torch.int32)), (3, 2)),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 3, 5])}, (3, 2)),
        ({"position_ids": torch.arange(5)}, (5,)),
        ({"position_ids": torch.arange(5) + 7}, (5,)),
        # Samples differ; not of tokens; not named; nothing.
        ({"position_ids": torch.stack([TWICE, torch.arange(5)])}, ()),
        ({"position_ids": TWICE.expand(3, 2, -1)}, ()),
        ({"position_ids": TWICE.float()}, ()),
        ({"cu_seqlens": torch.tensor([2, 3, 1])}, ()),
        ([TWICE], ()),
        (None, ()),
    ],
    ids=str,
)
def test_documents_that_a_batch_tells(batch: Any, documents: tuple[int, ...]) -> None:
    assert documents_of(((batch, 0), {})) == documents
