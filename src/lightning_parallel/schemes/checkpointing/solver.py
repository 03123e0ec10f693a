"""The least time recomputed within a memory budget: an integer programme, solved exactly where scipy is installed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from operator import mul

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
class Block:
    """What can be kept of a block: some of its items, or the whole, which autograd then keeps in its own way.

    Args:
        items: Single outputs.
        whole: In place of all of them.
    """

    items: tuple[Item, ...]
    whole: Item | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Of a block.

    Attributes:
        kept: For each item.
        is_whole: The block is left alone.
    """

    kept: tuple[bool, ...]
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Solution:
    """What is kept.

    Attributes:
        choices: For each block.
        seconds: That are recomputed.
        is_exact: Proven to be the least; otherwise found by a greedy rule.
    """

    choices: tuple[Choice, ...]
    seconds: float
    is_exact: bool


class _Kinds:
    """Blocks that are alike, and items of them that are alike, as one variable each: how many are kept."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.members: dict[Block, list[int]] = defaultdict(list)
        for index, block in enumerate(blocks):
            self.members[block].append(index)
        # Item, how many at most, and the variable that counts the wholes of the same blocks with the items in one.
        self.items: list[Item] = []
        self.most: list[int] = []
        self.rivals: list[tuple[int, int] | None] = []
        for block, members in self.members.items():
            whole = len(self.items)
            if block.whole is not None:
                self._add(block.whole, len(members), None)
            for item, count in Counter(block.items).items():
                self._add(item, count * len(members), (whole, count) if block.whole is not None else None)

    def _add(self, item: Item, most: int, rival: tuple[int, int] | None) -> None:
        self.items.append(item)
        self.most.append(most)
        self.rivals.append(rival)

    def choices(self, counts: Sequence[int]) -> list[Choice]:
        """What that many are of each block; the last of like blocks first, which wait for the shortest time."""
        result: dict[int, Choice] = {}
        left = iter(counts)
        for block, members in self.members.items():
            num_whole = next(left) if block.whole is not None else 0
            wanted = {item: next(left) for item in Counter(block.items)}
            for place, index in enumerate(reversed(members)):
                kept = []
                for item in block.items:
                    keeps = place >= num_whole and wanted[item] > 0
                    wanted[item] -= keeps
                    kept.append(keeps)
                result[index] = Choice(tuple(kept), place < num_whole)
        return [result[index] for index in range(len(result))]


def solve(blocks: Sequence[Block], limits: Sequence[int], *, exactly: bool = True) -> Solution:
    """Choose what to keep, so that the rest takes the least time.

    Args:
        blocks: Whose items have as many numbers of bytes as there are limits.
        limits: Bytes at each moment.
        exactly: With scipy's ``milp`` (HiGHS), where it is installed; otherwise greedily.

    Raises:
        ParallelConfigError: A limit is negative: not even keeping nothing fits.
    """
    if min(limits, default=0) < 0:
        raise ParallelConfigError(f"Keeping nothing takes {-min(limits):,} bytes more than the budget. Give it more.")
    kinds = _Kinds(blocks)
    counts = _exact(kinds, limits) if exactly else None
    is_exact = counts is not None
    choices = kinds.choices(counts if counts is not None else _greedy(kinds, limits))
    seconds = sum(
        item.seconds
        for block, choice in zip(blocks, choices, strict=True)
        for item, keeps in zip(block.items, choice.kept, strict=True)
        if not keeps and not choice.is_whole
    )
    return Solution(tuple(choices), seconds, is_exact)


def _exact(kinds: _Kinds, limits: Sequence[int]) -> list[int] | None:
    """How many of each kind; ``None`` without scipy, or where the solver did not prove its answer in ten seconds."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        return None
    if not kinds.items:
        return []
    num = len(kinds.items)
    rows = [[item.bytes[moment] for item in kinds.items] for moment in range(len(limits))]
    tops = list(limits)
    for variable, rival in enumerate(kinds.rivals):
        if rival is not None:  # a block that is left alone keeps no single items
            row = [0] * num
            row[variable], row[rival[0]] = 1, rival[1]
            rows.append(row)
            tops.append(kinds.most[variable])
    scale = max(item.seconds for item in kinds.items) or 1.0
    units = [gcd(*row) or 1 for row in rows]  # whole and small numbers, so that the solver's tolerance decides nothing
    rows = [[value // unit for value in row] for row, unit in zip(rows, units, strict=True)]
    tops = [top // unit for top, unit in zip(tops, units, strict=True)]
    result = milp(
        [-item.seconds / scale for item in kinds.items],
        integrality=[1] * num,
        bounds=Bounds([0] * num, kinds.most),
        constraints=LinearConstraint(rows, ub=tops),
        options={"mip_rel_gap": 0.0, "time_limit": 10.0},
    )
    if result.status != 0 or result.x is None:
        return None
    counts = [round(x) for x in result.x]
    fits = all(sum(map(mul, row, counts)) <= top for row, top in zip(rows, tops, strict=True))
    return counts if fits else None


def _greedy(kinds: _Kinds, limits: Sequence[int]) -> list[int]:
    """By time saved for the share of a budget: items alone, or whole blocks first; or the best single kind."""

    def worth(variable: int) -> float:
        item = kinds.items[variable]
        return -item.seconds / max(max(map(_share, item.bytes, limits), default=0.0), 1e-30)

    order = sorted(range(len(kinds.items)), key=worth)
    wholes = {rival[0] for rival in kinds.rivals if rival is not None}
    singles = [variable for variable in order if variable not in wholes]
    first = [[*(v for v in order if v in wholes), *singles], singles, order, *([variable] for variable in order)]
    seconds = [item.seconds for item in kinds.items]
    return max((_fill(kinds, limits, variables) for variables in first), key=lambda n: sum(map(mul, seconds, n)))


def _fill(kinds: _Kinds, limits: Sequence[int], order: Sequence[int]) -> list[int]:
    left, counts = list(limits), [0] * len(kinds.items)
    for variable in order:
        rival = kinds.rivals[variable]
        most = kinds.most[variable] - (counts[rival[0]] * rival[1] if rival is not None else 0)
        for other, mine in enumerate(kinds.rivals):  # blocks some items of which are kept already
            if mine is not None and mine[0] == variable:
                most = min(most, (kinds.most[other] - counts[other]) // mine[1])
        sizes = kinds.items[variable].bytes
        counts[variable] = min([most, *(free // size for free, size in zip(left, sizes, strict=True) if size)])
        left = [free - counts[variable] * size for free, size in zip(left, sizes, strict=True)]
    return counts


def _share(size: int, limit: int) -> float:
    return size / limit if limit else float(size > 0) * 1e30
