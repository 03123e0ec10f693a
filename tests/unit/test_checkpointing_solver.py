"""The programme behind a memory budget, against every choice there is."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.checkpointing.budget import Model
from lightning_parallel.schemes.checkpointing.profile import Operation, Profile
from lightning_parallel.schemes.checkpointing.solver import Item, solve


def best_of_all(items: list[Item], limits: list[int]) -> float:
    best = float("inf")
    for kept in itertools.product([False, True], repeat=len(items)):
        held = [sum(i.bytes[m] for i, k in zip(items, kept, strict=True) if k) for m in range(len(limits))]
        if all(h <= limit for h, limit in zip(held, limits, strict=True)):
            best = min(best, sum(i.seconds for i, k in zip(items, kept, strict=True) if not k))
    return best


def cases(seed: int) -> tuple[list[Item], list[int]]:
    draw = random.Random(seed)
    moments = draw.randint(1, 3)
    kinds = [
        Item(
            tuple(draw.choice([0, 1, 3, 1024, 4096, 10**9 + 7]) for _ in range(moments)), draw.choice([0.5, 1, 2, 3.25])
        )
        for _ in range(draw.randint(1, 9))
    ]  # fmt: skip
    items = [draw.choice(kinds) for _ in range(draw.randint(1, 9))]
    limits = [draw.randint(0, max(1, sum(i.bytes[m] for i in items))) for m in range(moments)]
    return items, limits


@pytest.mark.parametrize("seed", range(200))
def test_no_choice_is_better(seed: int) -> None:
    pytest.importorskip("scipy", reason="the exact solver is scipy's")
    items, limits = cases(seed)
    solution = solve(items, limits)
    assert solution.is_exact
    assert solution.seconds == pytest.approx(best_of_all(items, limits))
    for moment, limit in enumerate(limits):
        assert sum(i.bytes[moment] for i, k in zip(items, solution.kept, strict=True) if k) <= limit


@pytest.mark.parametrize("seed", range(200))
def test_greedy_fits_and_says_what_it_is(seed: int) -> None:
    items, limits = cases(seed)
    solution = solve(items, limits, exactly=False)
    assert not solution.is_exact
    assert solution.seconds >= best_of_all(items, limits) - 1e-9
    for moment, limit in enumerate(limits):
        assert sum(i.bytes[moment] for i, k in zip(items, solution.kept, strict=True) if k) <= limit


def test_a_budget_too_small_says_how_much_is_lacking() -> None:
    with pytest.raises(ParallelConfigError, match="takes 7 bytes more"):
        solve([Item((1,), 1.0)], [-7])


def block(*, inputs: int, saved: int, operations: list[tuple[int, float]], unsaved: int = -1) -> Profile:
    return Profile(
        tuple(
            Operation(("op", i), size, seconds, 0, True, size * (i == unsaved))
            for i, (size, seconds) in enumerate(operations)
        ),
        saved,
        inputs,
    )


def all_peaks(profiles: dict[str, Profile], live: dict[str, int], kept: set[tuple[str, int]]) -> int:
    """Forward and backward of one microbatch more than what waits, moment by moment."""
    held = {
        name: p.inputs + sum(o.bytes for i, o in enumerate(p.operations) if (name, i) in kept)
        for name, p in profiles.items()
    }
    names, peak = list(profiles), 0
    for position, name in enumerate(names):
        waiting = sum((live[n] - (i >= position)) * held[n] for i, n in enumerate(names))
        unsaved = sum(o.unsaved for i, o in enumerate(profiles[name].operations) if (name, i) in kept)
        peak = max(peak, waiting + profiles[name].saved + unsaved)
    return peak


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_is_the_best_of_all_that_fit(seed: int) -> None:
    """Blocks that differ, several microbatches under way: against every set of operations."""
    pytest.importorskip("scipy", reason="the exact solver is scipy's")
    draw = random.Random(seed)
    profiles = {
        f"b{i}": block(
            inputs=draw.randint(1, 4),
            saved=draw.randint(8, 40),
            operations=[(draw.randint(1, 6), draw.choice([1.0, 2.0, 5.0])) for _ in range(3)],
            unsaved=draw.randint(-1, 2),
        )
        for i in range(draw.randint(1, 3))
    }
    live = {name: draw.randint(1, 3) for name in profiles}
    model = Model(profiles, live)
    places = [(name, i) for name in profiles for i in range(3)]
    choices = [set(itertools.compress(places, bits)) for bits in itertools.product([0, 1], repeat=len(places))]
    budget = draw.randint(all_peaks(profiles, live, set()), all_peaks(profiles, live, set(places)))
    times = {
        frozenset(c): sum(live[n] * o.seconds for n, p in profiles.items() for i, o in enumerate(p.operations)
                          if (n, i) not in c)
        for c in choices
        if all_peaks(profiles, live, c) <= budget
    }  # fmt: skip
    plan = model.plan(budget)
    chosen = {(name, key[1]) for name, keys in plan.kept.items() for key in keys}
    assert plan.seconds == pytest.approx(min(times.values()))
    assert plan.peak == all_peaks(profiles, live, chosen) <= budget


def test_the_last_block_keeps_all_for_nothing() -> None:
    """When its backward begins it needs all of it anyway."""
    one = block(inputs=1, saved=10, operations=[(2, 1.0), (3, 1.0), (4, 9.0)], unsaved=2)
    model = Model({"a": one, "b": one}, {"a": 1, "b": 1})
    plan = model.plan(11)
    assert plan.kept["b"] == {("op", 0), ("op", 1)}  # and not what autograd does not save
    assert not plan.kept["a"]
    assert plan.peak == 11


def test_a_frontier_goes_down() -> None:
    one = block(inputs=1, saved=10, operations=[(2, 1.0), (3, 2.0), (1, 0.5)])
    plans = Model({str(i): one for i in range(4)}, dict.fromkeys("0123", 1)).frontier(9)
    assert [p.seconds for p in plans] == sorted((p.seconds for p in plans), reverse=True)
    assert [p.peak for p in plans] == sorted(p.peak for p in plans)
    assert plans[0].peak == 3 * 1 + 10
    assert plans[-1].seconds == 0
