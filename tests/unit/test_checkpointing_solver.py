"""The programme behind a memory budget, against every choice there is."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.checkpointing.budget import Model
from lightning_parallel.schemes.checkpointing.profile import Operation, Profile
from lightning_parallel.schemes.checkpointing.solver import Block, Item, Solution, solve


def ways(block: Block) -> list[tuple[tuple[int, ...], float]]:
    """Bytes at each moment, and seconds, of everything that can be done with a block."""
    moments = range(len(block.items[0].bytes))
    found = [] if block.whole is None else [(block.whole.bytes, 0.0)]
    for kept in itertools.product([False, True], repeat=len(block.items)):
        held = tuple(sum(i.bytes[m] for i, k in zip(block.items, kept, strict=True) if k) for m in moments)
        found.append((held, sum(i.seconds for i, k in zip(block.items, kept, strict=True) if not k)))
    return found


def best_of_all(blocks: list[Block], limits: list[int]) -> float:
    best = float("inf")
    for combination in itertools.product(*map(ways, blocks)):
        if all(sum(held[m] for held, _ in combination) <= limit for m, limit in enumerate(limits)):
            best = min(best, sum(seconds for _, seconds in combination))
    return best


def cases(seed: int) -> tuple[list[Block], list[int]]:
    draw = random.Random(seed)
    moments = draw.randint(1, 3)

    def item(seconds: float) -> Item:
        return Item(tuple(draw.choice([0, 1, 3, 1024, 4096, 10**9 + 7]) for _ in range(moments)), seconds)

    kinds = []
    for _ in range(draw.randint(1, 3)):
        few = [item(draw.choice([0.5, 1, 2, 3.25])) for _ in range(draw.randint(1, 3))]
        items = tuple(draw.choice(few) for _ in range(draw.randint(1, 3)))
        whole = item(sum(i.seconds for i in items)) if draw.random() < 0.7 else None
        kinds.append(Block(items, whole))
    blocks = [draw.choice(kinds) for _ in range(draw.randint(1, 4))]
    limits = [draw.randint(0, max(1, sum(i.bytes[m] for b in blocks for i in b.items))) for m in range(moments)]
    return blocks, limits


def assert_fits(blocks: list[Block], limits: list[int], solution: Solution) -> None:
    for moment, limit in enumerate(limits):
        held = 0
        for block, choice in zip(blocks, solution.choices, strict=True):
            if choice.is_whole:
                assert block.whole is not None and not any(choice.kept)
                held += block.whole.bytes[moment]
            held += sum(i.bytes[moment] for i, k in zip(block.items, choice.kept, strict=True) if k)
        assert held <= limit


@pytest.mark.parametrize("seed", range(200))
def test_no_choice_is_better(seed: int) -> None:
    pytest.importorskip("scipy", reason="the exact solver is scipy's")
    blocks, limits = cases(seed)
    solution = solve(blocks, limits)
    assert solution.is_exact
    assert solution.seconds == pytest.approx(best_of_all(blocks, limits))
    assert_fits(blocks, limits, solution)


@pytest.mark.parametrize("seed", range(200))
def test_greedy_fits_and_says_what_it_is(seed: int) -> None:
    blocks, limits = cases(seed)
    solution = solve(blocks, limits, exactly=False)
    assert not solution.is_exact
    assert solution.seconds >= best_of_all(blocks, limits) - 1e-9
    assert_fits(blocks, limits, solution)


def test_a_budget_too_small_says_how_much_is_lacking() -> None:
    with pytest.raises(ParallelConfigError, match="takes 7 bytes more"):
        solve([Block((Item((1,), 1.0),))], [-7])


def block(*, inputs: int, saved: int, operations: list[tuple[int, float]], unsaved: int = -1) -> Profile:
    return Profile(
        tuple(
            Operation(("op", i), size, seconds, 0, True, size * (i == unsaved))
            for i, (size, seconds) in enumerate(operations)
        ),
        saved,
        inputs,
    )


def all_peaks(profiles: dict[str, Profile], live: dict[str, int], kept: set[tuple[str, int]], whole: set[str]) -> int:
    """Forward and backward of one microbatch more than what waits, moment by moment."""
    held = {
        name: p.inputs + sum(o.bytes for i, o in enumerate(p.operations) if (name, i) in kept)
        for name, p in profiles.items()
    }
    held.update((name, profiles[name].saved) for name in whole)
    names, peak = list(profiles), 0
    for position, name in enumerate(names):
        waiting = sum((live[n] - (i >= position)) * held[n] for i, n in enumerate(names))
        unsaved = sum(o.unsaved for i, o in enumerate(profiles[name].operations) if (name, i) in kept)
        peak = max(peak, waiting + profiles[name].saved + unsaved * (name not in whole))
    return peak


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_is_the_best_of_all_that_fit(seed: int) -> None:
    """Blocks that differ, several microbatches under way: against every set of operations, and blocks left alone."""
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
    options = [*itertools.product([False, True], repeat=3), "whole"]
    budget = draw.randint(all_peaks(profiles, live, set(), set()), all_peaks(profiles, live, set(), set(profiles)))
    best = float("inf")
    for combination in itertools.product(options, repeat=len(profiles)):
        chosen = dict(zip(profiles, combination, strict=True))
        whole = {name for name, option in chosen.items() if option == "whole"}
        kept = {(n, i) for n, option in chosen.items() if n not in whole for i in range(3) if option[i]}  # type: ignore[index]
        if all_peaks(profiles, live, kept, whole) <= budget:
            times = (live[n] * o.seconds for n, p in profiles.items() if n not in whole
                     for i, o in enumerate(p.operations) if (n, i) not in kept)  # fmt: skip
            best = min(best, sum(times))
    plan = model.plan(budget)
    chosen_keys = {(name, key[1]) for name, keys in plan.kept.items() for key in keys}
    assert plan.seconds == pytest.approx(best)
    assert plan.peak == all_peaks(profiles, live, chosen_keys, set(plan.whole)) <= budget


def test_the_last_block_keeps_all_for_nothing() -> None:
    """When its backward begins it needs all of it anyway: it is left alone."""
    one = block(inputs=1, saved=10, operations=[(2, 1.0), (3, 1.0), (4, 9.0)], unsaved=2)
    model = Model({"a": one, "b": one}, {"a": 1, "b": 1})
    plan = model.plan(11)
    assert plan.whole == {"b"}
    assert not plan.kept["a"] and not plan.kept["b"]
    assert plan.peak == 11


def test_a_frontier_goes_down() -> None:
    one = block(inputs=1, saved=10, operations=[(2, 1.0), (3, 2.0), (1, 0.5)])
    plans = Model({str(i): one for i in range(4)}, dict.fromkeys("0123", 1)).frontier(9)
    assert [p.seconds for p in plans] == sorted((p.seconds for p in plans), reverse=True)
    assert [p.peak for p in plans] == sorted(p.peak for p in plans)
    assert plans[0].peak == 3 * 1 + 10
    assert plans[-1].seconds == 0
