"""Which schedule, with how many stages on each rank, and with how many microbatches it works."""

from __future__ import annotations

import csv
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from lightning_parallel._torch import PipelineAction, PipelineScheduleRuntime, PipelineStageBase
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.pipeline.timeline import Action, Timeline

SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
_SINGLE = ("GPipe", "1F1B")
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """A schedule, checked against its sizes.

    Attributes:
        name: One of ``SCHEDULES``, or the path of a CSV file with one row a rank (torch's format: ``0F0,1F0,…``).
        size: Number of pipeline ranks.
        virtual: Stages on each rank.
        microbatches: Into how many a batch is cut.
        stages_of: The stages of each rank.
    """

    name: str
    size: int
    virtual: int
    microbatches: int
    stages_of: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Over all ranks."""
        return self.size * self.virtual

    @property
    def rank_of(self) -> dict[int, int]:
        """Stage to rank."""
        return {stage: rank for rank, stages in enumerate(self.stages_of) for stage in stages}

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart, later than those of the inputs."""
        return self.name in _SPLIT_BACKWARD or any("W" in cell for row in self.rows for cell in row)

    @classmethod
    def of(cls, name: str, size: int, *, virtual: int | None = None, microbatches: int | None = None) -> ScheduleSpec:
        """Fill in what was left open, and check.

        Raises:
            ParallelConfigError: An unknown schedule, or sizes that do not suit it; the message names sizes that do.
        """
        if os.fspath(name).endswith(".csv"):
            return cls._of_csv(os.fspath(name), size, virtual, microbatches)
        lowered = {known.lower(): known for known in SCHEDULES}
        if name.lower() not in lowered:
            near = difflib.get_close_matches(name.lower(), lowered, n=1)
            raise ParallelConfigError(
                f"schedule={name!r}: unknown. {f'Did you mean {lowered[near[0]]!r}? ' if near else ''}Use one of "
                f"{', '.join(SCHEDULES)}, or the path of a .csv file."
            )
        name = lowered[name.lower()]
        wanted = 1 if name in _SINGLE else 2
        virtual = wanted if virtual is None else virtual
        if type(virtual) is not int or virtual < 1 or (virtual != wanted and name in _SINGLE + _V_SHAPED):
            how = f"exactly {wanted}" if name in _SINGLE + _V_SHAPED else "one or more"
            others = " For more stages on each rank use Interleaved1F1B." if name in _SINGLE else ""
            raise ParallelConfigError(
                f"virtual_stages={virtual!r}: {name} takes {how} stage{'s' if wanted > 1 else ''} on each rank.{others}"
            )
        microbatches = _default_microbatches(name, size, virtual) if microbatches is None else microbatches
        if type(microbatches) is not int or microbatches < 1:
            raise ParallelConfigError(f"microbatches={microbatches!r}: a number of microbatches is a positive integer.")
        if not suits(name, size, virtual, microbatches):
            raise ParallelConfigError(
                f"microbatches={microbatches} does not suit {name} on {size} ranks with {virtual} "
                f"stage{'s' if virtual > 1 else ''} each: it takes {_rule(name, size, virtual)}. "
                f"Use {_nearest(name, size, virtual, microbatches)}."
            )
        return cls(
            name, size, virtual, microbatches, tuple(_stages_of(name, rank, size, virtual) for rank in range(size))
        )

    @classmethod
    def _of_csv(cls, path: str, size: int, virtual: int | None, microbatches: int | None) -> ScheduleSpec:
        try:
            with open(path, newline="") as file:
                rows = [tuple(cell.strip() for cell in row) for row in csv.reader(file) if any(c.strip() for c in row)]
        except OSError as error:
            raise ParallelConfigError(f"schedule={path!r}: the file cannot be read ({error}).") from error
        try:
            actions = {rank: [PipelineAction.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        except RuntimeError as error:
            raise ParallelConfigError(
                f"schedule={path!r}: {error} Compute actions only: stage, F, B, I or W, microbatch."
            ) from error
        flat = [(rank, part) for rank, row in actions.items() for action in row for part in _parts(action)]
        stages_of = tuple(
            tuple(sorted({part.stage_index for at, part in flat if at == rank})) for rank in range(len(rows))
        )
        counts = {len(stages) for stages in stages_of}
        found = 1 + max((part.microbatch_index or 0 for _, part in flat), default=-1)
        problem = (
            f"it has {len(rows)} rows, one a rank, and the pipeline has {size} ranks"
            if len(rows) != size
            else "ranks have unequal numbers of stages"
            if len(counts) != 1
            else f"it has {found} microbatches, not microbatches={microbatches}"
            if microbatches not in (None, found)
            else f"it has {counts} stages on each rank, not virtual_stages={virtual}"
            if virtual not in (None, *counts)
            else None
        )
        if problem:
            raise ParallelConfigError(f"schedule={path!r}: {problem}. Change one to fit the other.")
        _check_runs(path, actions, num_stages=size * len(stages_of[0]), microbatches=found)
        return cls(path, size, len(stages_of[0]), found, stages_of, tuple(rows))

    def build(self, stages: Sequence[PipelineStageBase], loss_fn: Callable[[Any, Any], Any]) -> Any:
        """torch's schedule over this rank's stages, which are given in ascending order."""
        if self.rows:
            schedule = PipelineScheduleRuntime(list(stages), self.microbatches, loss_fn=loss_fn, scale_grads=False)
            schedule._load_csv(self.name)
            return schedule
        kind = get_schedule_class(self.name)
        if issubclass(kind, PipelineScheduleSingle):
            (stage,) = stages
            return kind(stage, self.microbatches, loss_fn=loss_fn, scale_grads=False)
        assert issubclass(kind, PipelineScheduleMulti)
        return kind(list(stages), self.microbatches, loss_fn=loss_fn, scale_grads=False)


def actions_of(spec: ScheduleSpec, schedule: Any) -> dict[int, list[Action | tuple[Action, ...] | None]]:
    """Rank to its compute actions, as the timeline takes them."""
    if spec.name in _SINGLE:  # torch 2.13's own table of 1F1B leaves out the last rank's first forward
        return {rank: [*_single_rank(spec, rank)] for rank in range(spec.size)}
    order: Mapping[int, Sequence[Any]] = schedule.pipeline_order or {}
    return {
        rank: [
            None
            if action is None
            else tuple(_plain(part) for part in action.sub_actions)
            if action.sub_actions
            else _plain(action)
            for action in row
            if action is None or action.sub_actions or action.computation_type.value in "FBIW"
        ]
        for rank, row in order.items()
    }


def _single_rank(spec: ScheduleSpec, rank: int) -> list[Action]:
    """GPipe runs all forwards first; 1F1B only as many as there are stages from this one on."""
    ahead = spec.microbatches if spec.name == "GPipe" else min(spec.size - rank, spec.microbatches)
    forwards = [Action(rank, "F", i) for i in range(spec.microbatches)]
    actions = forwards[:ahead]
    for i in range(spec.microbatches):
        actions.append(Action(rank, "B", i))
        actions += forwards[ahead + i : ahead + i + 1]
    return actions


def _plain(action: Any) -> Action:
    return Action(action.stage_index, action.computation_type.value, action.microbatch_index)


def _check_runs(path: str, actions: Mapping[int, Sequence[Any]], *, num_stages: int, microbatches: int) -> None:
    """Every stage runs every microbatch forward and backward, and no rank waits forever."""
    table = {rank: [tuple(map(_plain, _parts(action))) for action in row] for rank, row in actions.items()}
    try:
        events = Timeline.plan(table).events
    except ParallelConfigError as error:
        raise ParallelConfigError(f"schedule={path!r}: {error}") from error
    run = {event.action for event in events}
    for stage, i in product(range(num_stages), range(microbatches)):
        whole = {Action(stage, "B", i)} <= run or {Action(stage, "I", i), Action(stage, "W", i)} <= run
        if Action(stage, "F", i) not in run or not whole:
            raise ParallelConfigError(
                f"schedule={path!r}: stage {stage} does not run microbatch {i} forward and backward. Each of the "
                f"{num_stages} stages runs each of the {microbatches} microbatches: F, and B or both of I and W."
            )


def _parts(action: Any) -> tuple[Any, ...]:
    return () if action is None else action.sub_actions or (action,)


def suits(name: str, size: int, virtual: int, microbatches: int) -> bool:
    """Whether the schedule works with that many microbatches."""
    if name == "1F1B":
        return microbatches >= size
    if name == "DualPipeV":
        return microbatches >= size * virtual
    if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return microbatches >= size and microbatches % (microbatches // size) == 0
    return True


def _rule(name: str, size: int, virtual: int) -> str:
    if name == "1F1B":
        return f"as many microbatches as stages, {size}, or more"
    if name == "DualPipeV":
        return f"as many microbatches as stages, {size * virtual}, or more"
    return f"{size} microbatches or more, in rounds of equal length: a multiple of their number // {size}"


def _nearest(name: str, size: int, virtual: int, wanted: int) -> str:
    below = next((m for m in range(wanted - 1, 0, -1) if suits(name, size, virtual, m)), None)
    above = next(m for m in range(wanted + 1, wanted + 2 * size * virtual + 2) if suits(name, size, virtual, m))
    return " or ".join(f"microbatches={m}" for m in (below, above) if m is not None)


def _default_microbatches(name: str, size: int, virtual: int) -> int:
    """Two rounds, which leaves 1F1B a bubble of a third or less."""
    return 2 * size * (virtual if name in _V_SHAPED else 1)


def _stages_of(name: str, rank: int, size: int, virtual: int) -> tuple[int, ...]:
    if name in _V_SHAPED:
        return (rank, 2 * size - 1 - rank)
    return tuple(rank + turn * size for turn in range(virtual))
