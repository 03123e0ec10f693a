"""A batch cut into microbatches, and what their steps return put together again."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from lightning_parallel import ParallelConfigError
from lightning_parallel.schemes.pipeline.microbatches import merge_outputs, signature, split_batch

ROWS = torch.arange(5)


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass(frozen=True)
class Graph:
    nodes: Tensor
    size: int


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (5, 4, [2, 1, 1, 1]), (1, 4, [1]), (3, 8, [1, 1, 1]), (8, 1, [8])],
)
def test_sizes(rows: int, count: int, expected: list[int]) -> None:
    pieces, sizes = split_batch((torch.arange(rows), torch.ones(rows, 2)), count)
    assert [len(x) for x, _ in pieces] == expected
    assert torch.equal(torch.cat([x for x, _ in pieces]), torch.arange(rows))
    assert sizes == (expected if count > 1 else [1])  # one microbatch is all of the weight


@pytest.mark.parametrize(
    ("batch", "second"),
    [
        (ROWS, ROWS[3:]),
        ([ROWS, ROWS.view(5, 1)], [ROWS[3:], ROWS.view(5, 1)[3:]]),
        ({"x": ROWS, "names": [*"abcde"]}, {"x": ROWS[3:], "names": [*"de"]}),
        ({"x": ROWS, "numbers": [1, 2]}, {"x": ROWS[3:], "numbers": [1, 2]}),
        ({"x": ROWS, "none": None, "text": "abcde", "k": 3}, {"x": ROWS[3:], "none": None, "text": "abcde", "k": 3}),
        ({"x": ROWS, "scale": torch.tensor(2.0)}, {"x": ROWS[3:], "scale": torch.tensor(2.0)}),
        ({"a": ({"b": ROWS},), "empty": []}, {"a": ({"b": ROWS[3:]},), "empty": []}),
        (Pair(ROWS, "pair"), Pair(ROWS[3:], "pair")),
        (Graph(ROWS, 7), Graph(ROWS[3:], 7)),
        (OrderedDict(x=ROWS), OrderedDict(x=ROWS[3:])),
        (UserDict(x=ROWS), UserDict(x=ROWS[3:])),
        (BatchEncoding({"input_ids": ROWS}), BatchEncoding({"input_ids": ROWS[3:]})),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kinds_of_batches(batch: Any, second: Any) -> None:
    pieces, _ = split_batch(batch, 2)
    assert_same(pieces[1], second)


def assert_same(seen: Any, expected: Any) -> None:
    assert type(seen) is type(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(seen, expected)
    elif isinstance(expected, dict | UserDict):
        assert list(seen) == list(expected)
        for key in expected:
            assert_same(seen[key], expected[key])
    elif isinstance(expected, Graph):
        assert_same((seen.nodes, seen.size), (expected.nodes, expected.size))
    elif isinstance(expected, list | tuple):
        assert len(seen) == len(expected)
        for left, right in zip(seen, expected, strict=True):
            assert_same(left, right)
    else:
        assert seen == expected


def test_the_batch_is_left_as_it_was() -> None:
    batch = {"x": ROWS.clone(), "names": [*"abcde"], "graph": Graph(ROWS, 1)}
    split_batch(batch, 5)
    assert_same(batch, {"x": ROWS, "names": [*"abcde"], "graph": Graph(ROWS, 1)})


def test_dims_by_name() -> None:
    table, time_first = torch.ones(3, 2), torch.arange(10).view(2, 5)
    batch = {"x": ROWS, "extra": {"table": table, "time": time_first}, "names": [*"abcde"]}
    dims = {"extra.table": None, "*.time": 1, "names": None}
    (first, second), _ = split_batch(batch, 2, dims)
    assert first["extra"]["table"] is table
    assert torch.equal(second["extra"]["time"], time_first[:, 3:])
    assert second["names"] == [*"abcde"]


@pytest.mark.parametrize(
    ("batch", "dims", "shown"),
    [
        ((ROWS, torch.ones(3)), None, ["Entry '1' of the batch has 3 rows and '0' has 5", "batch_dims={'1': …}"]),
        ({"a": torch.ones(3), "b": ROWS, "c": ROWS}, None, ["Entry 'b' of the batch has 5 rows and 'a' has 3"]),
        ({"a": ROWS, "b": torch.ones(5, 3)}, {"b": 1}, ["Entry 'b' of the batch has 3 rows and 'a' has 5"]),
        ((torch.ones(0, 2),), None, ["The batch has no samples"]),
        ("text", None, ["no tensor with a first dim: it is a str"]),
        ({"x": torch.tensor(1.0), "y": [1, 2]}, None, ["it is a dict of x: Tensor, y: list"]),
        ((ROWS,), {"0": None}, ["no tensor with a first dim"]),
    ],
)
def test_what_cannot_be_cut(batch: Any, dims: Any, shown: list[str]) -> None:
    with pytest.raises(ParallelConfigError) as caught:
        split_batch(batch, 2, dims)
    for text in shown:
        assert text in str(caught.value)


def test_one_microbatch_needs_to_know_nothing() -> None:
    assert split_batch("text", 1) == (["text"], [1])


def test_signatures_tell_shapes_apart_and_not_values() -> None:
    batch = {"x": torch.ones(2, 3), "names": ["a", "b"], "flag": True, "graph": Graph(ROWS, 1), "none": None}
    same = {**batch, "x": torch.zeros(2, 3), "names": ["c", "d"], "graph": replace(batch["graph"], size=9)}
    assert signature(batch) == signature(same)
    hash(signature(batch))
    for change in ({"x": torch.ones(2, 4)}, {"x": torch.ones(2, 3).long()}, {"flag": False}, {"none": 1}, {"y": 1}):
        assert signature({**batch, **change}) != signature(batch)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor(1.4)),
        ([1.0, 2.0], 1.4),
        ([ROWS[:3], ROWS[3:]], ROWS),
        ([torch.ones(2), torch.zeros(2)], torch.zeros(2)),  # no row a sample: the last one's
        ([{"a": torch.tensor(0.0), "n": 1}, {"a": torch.tensor(5.0), "n": 2}], {"a": torch.tensor(2.0), "n": 2}),
        ([(ROWS[:3], None), (ROWS[3:], None)], (ROWS, None)),
        ([["a"], ["b"]], ["b"]),
        ([None, None], None),
        ([torch.tensor(1.0, dtype=torch.bfloat16)] * 2, torch.tensor(1.0, dtype=torch.bfloat16)),
    ],
)  # fmt: skip
def test_outputs_are_one_devices(outputs: list[Any], expected: Any) -> None:
    merged = merge_outputs(outputs, [3, 2], [0.6, 0.4])
    if isinstance(expected, Tensor | float):
        torch.testing.assert_close(merged, expected)
    else:
        assert_same(merged, expected)


def test_one_output_stays_the_object_it_is() -> None:
    output = {"any": object()}
    assert merge_outputs([output], [5], [1.0]) is output
