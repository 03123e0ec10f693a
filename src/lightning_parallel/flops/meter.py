"""Times optimizer steps without waiting for the device, and turns work and seconds into rates."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from lightning_parallel._torch import HOST
from lightning_parallel.flops.counting import Counted
from lightning_parallel.flops.peaks import is_accelerator


class Clock:
    """The host's clock: right where the host does the work, or waits for what does."""

    def mark(self) -> Any:
        """Now."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks."""
        return float(end - begin)

    def has_passed(self, mark: Any) -> bool:
        """Whether a mark's time is known."""
        return True

    def host(self) -> float:
        """The host's own time, in seconds."""
        return time.perf_counter()


class EventClock(Clock):
    """Events on the device's current stream. They are read later, when the device has passed them: nothing waits."""

    def __init__(self, events: Any) -> None:
        self._events = events

    def mark(self) -> Any:
        """An event behind the work that was given to the device so far."""
        event = self._events(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Of the device."""
        return float(begin.elapsed_time(end)) / 1000

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has come to it."""
        return bool(mark.query())


def clock_for(device: torch.device) -> Clock:
    """Events where the device has them."""
    events = getattr(torch.get_device_module(device), "Event", None) if is_accelerator(device) else None
    return Clock() if events is None else EventClock(events)


@dataclass(slots=True)
class Work:
    """What was done on one rank in some time, or several such added up.

    Attributes:
        seconds: Training time; validation, checkpoints and counting are not in it.
        waited: Seconds of it in which the host waited for a batch.
        model: FLOPs that the model needs.
        hardware: FLOPs with recomputation and padding.
        samples: Rows of batches.
        tokens: Without padding.
        steps: Optimizer steps.
    """

    seconds: float = 0.0
    waited: float = 0.0
    model: float = 0.0
    hardware: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0
    steps: float = 0.0

    def add(self, other: Work) -> None:
        """Add another one's numbers to this one's."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def numbers(self) -> list[float]:
        """In the order of the attributes."""
        return [getattr(self, each.name) for each in fields(self)]


@dataclass(slots=True)
class Filled:
    """A batch that is not all tokens, or has several documents in a row; known on the device first.

    Attributes:
        counted: FLOPs of all its positions.
        sums: Tokens, and the sum of squared lengths of documents. Shape: (2,).
        positions: Of the batch.
        pairs: Of positions in the same row.
    """

    counted: Counted
    sums: Tensor
    positions: int
    pairs: int


@dataclass(slots=True)
class _Step:
    begin: Any
    end: Any
    pauses: list[tuple[str, Any, Any]]
    work: Work
    filled: list[Filled]
    keep: bool


@dataclass
class Meter:
    """Adds up the work of steps over a window, and over the whole run.

    Attributes:
        clock: What tells the time.
        window: Steps in the sliding window.
        skip: First steps that are left out of everything: they compile, allocate and warm up.
        total: Of all steps that count.
        paused: Seconds in each kind of pause, over the whole run.
    """

    clock: Clock
    window: int
    skip: int
    total: Work = field(default_factory=Work)
    paused: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._recent: deque[Work] = deque(maxlen=self.window)
        self._pending: deque[_Step] = deque()
        self._pauses: list[tuple[str, Any, Any]] = []
        self._pausing: tuple[str, Any] | None = None
        self._depth = 0
        self._begin: Any = None
        self._wait_began: float | None = None
        self._left_to_skip = self.skip
        self._reset_step()

    def _reset_step(self) -> None:
        self._work, self._filled = Work(), list[Filled]()

    def begin(self) -> None:
        """The first batch of a run, or the first after a gap: what was before is not timed."""
        if self._begin is None:
            self._begin = self.clock.mark()
            self._work.waited = 0.0
            self._pauses.clear()

    def pause(self, kind: str) -> None:
        """What follows is no training. Pauses inside a pause are part of the outer one."""
        self._depth += 1
        if self._depth == 1:
            self._pausing = kind, self.clock.mark()

    def resume(self) -> None:
        """Training goes on."""
        self._depth -= 1
        if self._depth == 0 and self._pausing is not None:
            self._pauses.append((*self._pausing, self.clock.mark()))
            self._pausing = None

    def wait(self) -> None:
        """The host begins to wait for a batch."""
        self._wait_began = self.clock.host()

    def got(self) -> None:
        """The batch is there."""
        if self._wait_began is not None:
            self._work.waited += self.clock.host() - self._wait_began
            self._wait_began = None

    def batch(self, counted: Counted | None, *, samples: int, tokens: int, filled: Filled | None = None) -> None:
        """A batch of the running step."""
        self._work.samples += samples
        if filled is not None:
            self._filled.append(filled)
        else:
            self._work.tokens += tokens
            self._work.model += counted.model if counted else 0.0
        self._work.hardware += counted.hardware if counted else 0.0

    def step(self, *, keep: bool = True) -> None:
        """The optimizer has stepped. Without ``keep`` the step counts nowhere, and the next one begins here."""
        for filled in self._filled:
            # On its way to the host before the mark: known when the mark has passed.
            filled.sums = filled.sums.to(HOST, non_blocking=True)
        end = self.clock.mark()
        self._work.steps = 1
        self._pending.append(_Step(self._begin, end, self._pauses, self._work, self._filled, keep))
        self._begin, self._pauses = end, []
        self._reset_step()

    def end(self) -> None:
        """The run ends; pauses after the last step count as pauses."""
        self.resolve()
        self._add_pauses(self._pauses)
        self._pauses, self._begin = [], None

    def _add_pauses(self, pauses: list[tuple[str, Any, Any]]) -> float:
        total = 0.0
        for kind, begin, end in pauses:
            seconds = self.clock.seconds(begin, end)
            self.paused[kind] = self.paused.get(kind, 0.0) + seconds
            total += seconds
        return total

    def resolve(self) -> Work:
        """Take in the steps that the device has finished. Returns the window's sum."""
        while self._pending and self.clock.has_passed(self._pending[0].end):
            step = self._pending.popleft()
            seconds = self.clock.seconds(step.begin, step.end) - self._add_pauses(step.pauses)
            if not step.keep:
                continue
            for filled in step.filled:
                tokens, squares = filled.sums.tolist()
                step.work.tokens += tokens
                step.work.model += filled.counted.useful(tokens / filled.positions, squares / filled.pairs)
            step.work.seconds = seconds
            if self._left_to_skip > 0:
                self._left_to_skip -= 1
                continue
            self._recent.append(step.work)
            self.total.add(step.work)
        recent = Work()
        for work in self._recent:
            recent.add(work)
        return recent


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Over what one rank's numbers are scaled.

    Attributes:
        devices: All of them.
        data_ranks: Ranks that see different samples. The others of a mesh share theirs: they count once.
        peak: FLOP/s of one device, dense, in the dtype of the computation; ``None``: not known.
    """

    devices: int
    data_ranks: int
    peak: float | None


def rates(work: Work, fleet: Fleet) -> dict[str, float]:
    """Name to value. Shares are of 1; FLOP/s are in TFLOP/s; time is in seconds."""
    if work.seconds <= 0 or not work.steps:
        return {}
    seconds, share = work.seconds, fleet.data_ranks / fleet.devices
    found: dict[str, float] = {}
    if work.model:
        found["tflops_per_device"] = work.model * share / seconds / 1e12
        found["hardware_tflops_per_device"] = work.hardware * share / seconds / 1e12
        if fleet.peak:
            found["mfu"] = work.model * share / seconds / fleet.peak
            found["hfu"] = work.hardware * share / seconds / fleet.peak
    if work.tokens:
        found["tokens_per_second"] = work.tokens * fleet.data_ranks / seconds
        found["tokens_per_second_per_device"] = work.tokens * share / seconds
    found["samples_per_second"] = work.samples * fleet.data_ranks / seconds
    found["samples_per_second_per_device"] = work.samples * share / seconds
    found["step_seconds"] = seconds / work.steps
    found["data_share"] = min(1.0, work.waited / seconds)
    return found
