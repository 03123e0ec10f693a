"""What of a model's activations fits in a budget: the programme that `solver` solves, and its frontier.

[Note: moments]  Blocks hold what they keep from forward to backward. A pipeline stage has several microbatches under
way, so block b holds ``live[b]`` of it. When the backward comes to block b, the blocks after it have given one back,
and b holds all that autograd needs of it, computed again: ``saved[b]``, and what b keeps that autograd does not need.
There is one limit for each such moment. Those that another implies are left out: with like blocks only the moment of
the last one is left, and what it keeps of what autograd saves is free.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.checkpointing.keeping import Key
from lightning_parallel.schemes.checkpointing.profile import Operation, Profile
from lightning_parallel.schemes.checkpointing.solver import Block, Item, solve


@dataclass(frozen=True, slots=True)
class Plan:
    """What each block keeps.

    Attributes:
        kept: Operations by name of the block.
        whole: Names of the blocks that are not checkpointed at all.
        peak: Bytes of activations in the blocks at the worst moment.
        seconds: Of recomputation in a step.
        flops: Of recomputation in a step.
        is_exact: Proven to take the least time.
    """

    kept: Mapping[str, frozenset[Key]]
    whole: frozenset[str]
    peak: int
    seconds: float
    flops: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """When the backward comes to a block.

    Attributes:
        position: Of the block.
        bytes: Held whatever is kept.
        counts: How often each block holds what it keeps.
    """

    position: int
    bytes: int
    counts: Sequence[int]

    def held(self, index: int, operation: Operation) -> int:
        """Bytes for keeping an operation of the block at ``index``."""
        return operation.bytes * self.counts[index] + operation.unsaved * (index == self.position)

    def held_whole(self, index: int, profile: Profile) -> int:
        """Bytes for leaving the block at ``index`` alone."""
        return (profile.saved - profile.inputs) * self.counts[index]

    def is_implied_by(self, later: Moment) -> bool:
        """Whether what fits then fits now. What only this moment's block holds, the later moment's count has."""
        return (
            later.position > self.position
            and later.bytes >= self.bytes
            and all(b >= a for a, b in zip(self.counts, later.counts, strict=True))
        )


class Model:
    """The blocks of one rank, and how many microbatches each holds.

    Args:
        profiles: By name, in the order in which they run.
        live: Calls of each block that wait for their backward, at the worst moment.
        calls: Of each block in a step; as many as ``live``, where that is not given.
    """

    def __init__(
        self, profiles: Mapping[str, Profile], live: Mapping[str, int], calls: Mapping[str, int] | None = None
    ) -> None:
        self.profiles, self._live, self._calls = dict(profiles), dict(live), dict(calls or live)
        self._moments = self._find_moments()

    def _find_moments(self) -> list[Moment]:
        names = list(self.profiles)
        found = []
        for position, name in enumerate(names):
            counts = [self._live[other] - (index >= position) for index, other in enumerate(names)]
            inputs = sum(n * self.profiles[other].inputs for n, other in zip(counts, names, strict=True))
            found.append(Moment(position, inputs + self.profiles[name].saved, counts))
        return [moment for moment in found if not any(moment.is_implied_by(later) for later in found)]

    def peak(self, kept: Callable[[str, Key], bool], whole: Container[str] = ()) -> int:
        """Bytes at the worst moment."""
        places = list(enumerate(self.profiles.items()))
        chosen = [
            (index, operation)
            for index, (name, each) in places
            if name not in whole
            for operation in each.operations
            if kept(name, operation.key)
        ]
        alone = [(index, each) for index, (name, each) in places if name in whole]
        return max(
            m.bytes + sum(m.held(index, o) for index, o in chosen) + sum(m.held_whole(index, p) for index, p in alone)
            for m in self._moments
        )

    def without_checkpointing(self) -> int:
        """Bytes if nothing were recomputed."""
        return sum(self._live[name] * each.saved for name, each in self.profiles.items())

    def extra(self, kept: Callable[[str, Key], bool], whole: Container[str] = ()) -> tuple[float, int]:
        """Seconds and FLOPs of a step's recomputation."""
        seconds, flops = 0.0, 0
        for name, each in self.profiles.items():
            if name not in whole:
                once = each.extra(lambda key, name=name: kept(name, key))  # type: ignore[misc]
                seconds, flops = seconds + self._calls[name] * once[0], flops + self._calls[name] * once[1]
        return seconds, flops

    def plan(self, budget: int, *, exactly: bool = True) -> Plan:
        """The least time within ``budget`` bytes.

        Raises:
            ParallelConfigError: Not even keeping nothing fits.
        """
        blocks, keys = [], []
        for index, (name, each) in enumerate(self.profiles.items()):
            found = [operation for operation in each.operations if operation.bytes and operation.runs_again]
            items = tuple(
                Item(tuple(moment.held(index, o) for moment in self._moments), self._calls[name] * o.seconds)
                for o in found
            )
            whole = tuple(moment.held_whole(index, each) for moment in self._moments)
            blocks.append(Block(items, Item(whole, sum(item.seconds for item in items))))
            keys.append([operation.key for operation in found])
        solution = solve(blocks, [budget - moment.bytes for moment in self._moments], exactly=exactly)
        kept = {
            name: frozenset(key for key, keeps in zip(of_block, choice.kept, strict=True) if keeps)
            for name, of_block, choice in zip(self.profiles, keys, solution.choices, strict=True)
        }
        alone = frozenset(n for n, choice in zip(self.profiles, solution.choices, strict=True) if choice.is_whole)

        def is_kept(name: str, key: Key) -> bool:
            return key in kept[name]

        return Plan(kept, alone, self.peak(is_kept, alone), *self.extra(is_kept, alone), solution.is_exact)

    def frontier(self, points: int = 11) -> list[Plan]:
        """Plans from the least memory to no recomputation that helps, in equal steps of bytes."""
        least, most = self.peak(lambda name, key: False), self.without_checkpointing()
        budgets = [least + (most - least) * i // max(points - 1, 1) for i in range(points)]
        return [self.plan(budget) for budget in budgets]


def table(plans: Sequence[Plan]) -> str:
    """A frontier in text: bytes against seconds and FLOPs of a step."""
    rows = [f"{'peak bytes':>16} {'extra seconds':>14} {'extra FLOPs':>16}"]
    rows += [f"{plan.peak:>16,} {plan.seconds:>14.6f} {plan.flops:>16,}" for plan in plans]
    return "\n".join(rows)


def agree(plan: Plan | None, error: str | None, names: tuple[str, ...]) -> Plan:
    """One plan for all ranks that hold the same blocks: peers exchange tensors while they compute again.

    Theirs is the plan of the rank among them that needs the most memory; what other ranks keep of other blocks is told
    besides. A collective of all ranks, where there are several.

    Raises:
        ParallelConfigError: A rank has none; on every rank.
    """
    found: list[tuple[Plan | None, str | None, tuple[str, ...]]] = [(plan, error, names)]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        found = [(None, None, ())] * dist.get_world_size()
        dist.all_gather_object(found, (_portable(plan), error, names))
    for rank, (_, problem, _) in enumerate(found):
        if problem is not None:
            raise ParallelConfigError(f"Rank {rank}: {problem}")
    plans = [each for each, _, others in found if others == names and each is not None]
    fewest = min(plans, key=lambda each: (len(each.whole), sum(map(len, each.kept.values()))))
    kept = {name: keys for each, _, _ in found if each is not None for name, keys in each.kept.items()}
    whole = {name for each, _, _ in found if each is not None for name in each.whole - fewest.kept.keys()}
    return _loaded(replace(fewest, kept={**kept, **fewest.kept}, whole=fewest.whole | whole))


def _portable(plan: Plan | None) -> Plan | None:
    """Operations by name: they do not pickle."""
    if plan is None:
        return None
    return replace(plan, kept={n: frozenset((str(f), i) for f, i in keys) for n, keys in plan.kept.items()})


def _loaded(plan: Plan) -> Plan:
    return replace(plan, kept={n: frozenset((_operation(f), i) for f, i in keys) for n, keys in plan.kept.items()})


def _operation(name: object) -> object:
    if not isinstance(name, str):
        return name
    found: object = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
