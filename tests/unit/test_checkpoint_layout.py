"""The blocks that each rank holds, in one process: the arithmetic against splits that are really made."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from lightning_parallel._torch import StridedShard
from lightning_parallel.checkpoint.layout import Block, blocks, local_spans, splits
from lightning_parallel.errors import ParallelConfigError


def chunks(tensor: Tensor, parts: int, dim: int = 0) -> list[Tensor]:
    """As fully_shard and distribute_tensor split: torch.chunk, and empty parts where it gives too few."""
    found = list(torch.chunk(tensor, parts, dim))
    empty = tensor.narrow(dim, 0, 0)
    return found + [empty] * (parts - len(found))


def packed_chunks(tensor: Tensor, parts: int, pieces: int) -> list[Tensor]:
    """A packed projection: every part has its share of every piece."""
    split = [chunks(piece, parts) for piece in chunks(tensor, pieces)]
    return [torch.cat([piece[part] for piece in split]) for part in range(parts)]


def held(rows: int, mesh_shape: tuple[int, ...], placements: list[Placement], coordinate: tuple[int, ...]) -> list[int]:
    (spans,) = local_spans((rows,), mesh_shape, placements, coordinate)
    return [index for span in spans for index in range(span.start, span.start + span.length)]


@pytest.mark.parametrize("rows", [1, 2, 7, 9, 12, 97, 50257])
@pytest.mark.parametrize(("fsdp", "tp"), [(2, 2), (3, 2), (4, 2), (2, 4), (8, 2), (1, 4), (4, 1)])
def test_fully_shard_after_tensor_parallel(rows: int, fsdp: int, tp: int) -> None:
    placements = [StridedShard(0, split_factor=tp) if tp > 1 else Shard(0), Shard(0)]
    for i, j in product(range(fsdp), range(tp)):
        expected = chunks(chunks(torch.arange(rows), tp)[j], fsdp)[i]
        assert held(rows, (fsdp, tp), placements, (i, j)) == expected.tolist()


@pytest.mark.parametrize("rows", [6, 12, 24, 30])
def test_fully_shard_after_a_packed_projection(rows: int) -> None:
    placements = [StridedShard(0, split_factor=2), StridedShard(0, split_factor=3)]
    for i, j in product(range(2), range(2)):
        expected = chunks(packed_chunks(torch.arange(rows), parts=2, pieces=3)[j], 2)[i]
        assert held(rows, (2, 2), placements, (i, j)) == expected.tolist()


def test_two_axes_split_one_dim_left_to_right() -> None:
    for i, j in product(range(2), range(3)):
        expected = chunks(chunks(torch.arange(11), 2)[i], 3)[j]
        assert held(11, (2, 3), [Shard(0), Shard(0)], (i, j)) == expected.tolist()


def test_an_axis_that_came_last_of_three() -> None:
    placements = [StridedShard(0, split_factor=4), Shard(0), Shard(0)]
    for i, j, k in product(range(2), range(2), range(2)):
        expected = chunks(chunks(chunks(torch.arange(37), 2)[j], 2)[k], 2)[i]
        assert held(37, (2, 2, 2), placements, (i, j, k)) == expected.tolist()


def test_replicas_hold_the_same() -> None:
    assert (
        held(5, (2, 2), [Replicate(), Shard(0)], (0, 1)) == held(5, (2, 2), [Replicate(), Shard(0)], (1, 1)) == [3, 4]
    )


def test_every_index_is_held_once() -> None:
    for rows, fsdp, tp in product(range(1, 40), (2, 3, 4), (2, 3)):
        placements = [StridedShard(0, split_factor=tp), Shard(0)]
        parts = [held(rows, (fsdp, tp), placements, at) for at in product(range(fsdp), range(tp))]
        assert sorted(index for part in parts for index in part) == list(range(rows))


def test_splits_are_in_the_order_in_which_they_were_made() -> None:
    assert [s.axis for s in splits((2, 2), [StridedShard(0, split_factor=2), Shard(0)])] == [1, 0]
    assert [s.axis for s in splits((2, 2), [Shard(0), Shard(0)])] == [0, 1]
    assert splits((1, 1), [Shard(0), Shard(0)]) == []


def test_a_pending_sum_has_no_blocks() -> None:
    with pytest.raises(ParallelConfigError, match="on no rank"):
        splits((2,), [Partial()])


def test_blocks_of_a_plain_tensor() -> None:
    assert blocks(torch.zeros(2, 3)) == [Block((0, 0), (0, 0), (2, 3))]
    assert blocks(torch.tensor(1.0)) == [Block((), (), ())]
