"""The least time recomputed within a memory budget: a 0/1 programme, solved exactly where scipy is installed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from lightning_parallel.errors import ParallelConfigError


@dataclass(frozen=True, slots=True)
class Item:
    """Something to keep.

    Args:
        bytes: That it holds at each moment that has a limit.
        seconds: That keeping it saves.
    """

    bytes: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Solution:
    """Which items are kept.

    Attributes:
        kept: For each item.
        seconds: That are recomputed.
        is_exact: Proven to be the least; otherwise found by a greedy rule.
    """

    kept: tuple[bool, ...]
    seconds: float
    is_exact: bool


def solve(items: Sequence[Item], limits: Sequence[int], *, exactly: bool = True) -> Solution:
    """Choose items to keep, so that the others take the least time.

    Args:
        items: With as many numbers of bytes as there are limits.
        limits: Bytes at each moment.
        exactly: With scipy's ``milp`` (HiGHS), where it is installed; otherwise greedily.

    Raises:
        ParallelConfigError: A limit is negative: not even keeping nothing fits.
    """
    if min(limits, default=0) < 0:
        raise ParallelConfigError(f"Keeping nothing takes {-min(limits):,} bytes more than the budget. Give it more.")
    groups: dict[Item, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        groups[item].append(index)
    kinds = list(groups)
    counts = _exact(kinds, [len(groups[kind]) for kind in kinds], limits) if exactly else None
    is_exact = counts is not None
    if counts is None:
        counts = _greedy(kinds, [len(groups[kind]) for kind in kinds], limits)
    kept = [False] * len(items)
    for kind, count in zip(kinds, counts, strict=True):
        for index in groups[kind][len(groups[kind]) - count :]:  # the last ones are held for the shortest time
            kept[index] = True
    seconds = sum(item.seconds for item, keep in zip(items, kept, strict=True) if not keep)
    return Solution(tuple(kept), seconds, is_exact)


def _exact(kinds: list[Item], most: list[int], limits: Sequence[int]) -> list[int] | None:
    """How many of each kind; ``None`` without scipy, or where the solver did not prove its answer in ten seconds."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        return None
    if not kinds or not limits:
        return most
    rows, tops = [], []
    for moment, limit in enumerate(limits):
        row = [kind.bytes[moment] for kind in kinds]
        unit = gcd(*row) or 1  # whole and small numbers, so that the solver's tolerance decides nothing
        rows.append([value // unit for value in row])
        tops.append(limit // unit)
    scale = max(kind.seconds for kind in kinds) or 1.0
    result = milp(
        [-kind.seconds / scale for kind in kinds],
        integrality=[1] * len(kinds),
        bounds=Bounds([0] * len(kinds), most),
        constraints=LinearConstraint(rows, ub=tops),
        options={"mip_rel_gap": 0.0, "time_limit": 10.0},
    )
    if result.status != 0 or result.x is None:
        return None
    counts = [round(x) for x in result.x]
    fits = all(
        sum(value * n for value, n in zip(row, counts, strict=True)) <= top
        for row, top in zip(rows, tops, strict=True)
    )  # fmt: skip
    return counts if fits else None


def _greedy(kinds: list[Item], most: list[int], limits: Sequence[int]) -> list[int]:
    """By time saved for the share of a budget; or the best single kind, if that saves more: at least half of the best.

    The half is proven for one limit only.
    """
    shares = [max(map(_share, kind.bytes, limits), default=0.0) for kind in kinds]
    order = sorted(range(len(kinds)), key=lambda i: -kinds[i].seconds / max(shares[i], 1e-30))
    first = _fill(kinds, most, limits, order)
    best = max(
        (_fill(kinds, most, limits, [i]) for i in order),
        key=lambda counts: sum(k.seconds * n for k, n in zip(kinds, counts, strict=True)),
        default=first,
    )
    return max(first, best, key=lambda counts: sum(k.seconds * n for k, n in zip(kinds, counts, strict=True)))


def _share(size: int, limit: int) -> float:
    return size / limit if limit else float(size > 0) * 1e30


def _fill(kinds: list[Item], most: list[int], limits: Sequence[int], order: Sequence[int]) -> list[int]:
    left, counts = list(limits), [0] * len(kinds)
    for i in order:
        room = (free // b for free, b in zip(left, kinds[i].bytes, strict=True) if b)
        counts[i] = min([most[i], *room])
        left = [free - counts[i] * b for free, b in zip(left, kinds[i].bytes, strict=True)]
    return counts
