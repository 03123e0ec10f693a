"""The picture of a pipeline: which rank does what when, planned from a schedule's table or measured in a run.

An action is written as torch does: ``2F0`` is the forward of stage 2 on microbatch 0. Times are seconds when measured,
forwards of one stage when planned; either way the picture starts at 0.
"""

from __future__ import annotations

import colorsys
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from lightning_parallel.errors import ParallelConfigError

COST: Mapping[str, float] = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})

_WORDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
_HUES = {"F": 205, "B": 40, "I": 327, "W": 164}  # degrees; apart for colour-blind eyes too (Okabe and Ito)
# A full backward is both halves at once, for what waits on it and for what may run only once.
_PARTS = {"F": "F", "B": "IW", "I": "I", "W": "W"}

# Only paper and ink follow the reader's mode: the bars are light enough for black numbers on both.
_STYLE = """
.timeline text { font: 11px sans-serif; fill: #222 } .timeline .paper { fill: #fff }
.timeline .lane { fill: #ececec } .timeline .tick { fill: #777 }
@media (prefers-color-scheme: dark) {
  .timeline text { fill: #e6e6e6 } .timeline .paper { fill: #18181b }
  .timeline .lane { fill: #2b2b30 } .timeline .tick { fill: #999 }
}
.timeline .action text { fill: #000; text-anchor: middle }
"""


class Action(NamedTuple):
    """One computation of a schedule. Its kind is F, B (whole backward), or I and W (backward for inputs, weights)."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Event(NamedTuple):
    """An action and when its rank ran it."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float

    @property
    def action(self) -> Action:
        """What was run."""
        return Action(self.stage, self.kind, self.microbatch)


@dataclass(frozen=True, slots=True)
class Timeline:
    """What every rank runs when; made by `plan` or `measured`.

    Raises:
        ParallelConfigError: There are no events, or they take no time, or one is of no kind, rank or length there is.
    """

    events: tuple[Event, ...]
    num_ranks: int
    unit: str  # "forwards" for a plan, "s" for a measurement

    def __post_init__(self) -> None:
        for event in self.events:
            if event.kind not in COST or event.rank not in range(self.num_ranks) or event.end < event.start:
                rule = f"its kind is one of {', '.join(COST)}, its rank below {self.num_ranks}, its end after its start"
                raise ParallelConfigError(f"{event}: {rule}.")
        if not (self.events and self.span > 0):
            raise ParallelConfigError(f"A timeline needs events that take time, got {len(self.events)} that take none.")

    @classmethod
    def plan(
        cls, actions: Mapping[int, Sequence[Action | tuple[Action, ...] | None]], cost: Mapping[str, float] = COST
    ) -> Timeline:
        """What an action table comes to if every action starts as early as it can and communication costs nothing.

        Args:
            actions: Each rank's actions in order. A tuple is run one after the other; None is skipped: when a rank
                idles follows from what it waits for.
            cost: What an action of each kind takes; a kind left out takes its `COST`.

        Raises:
            ParallelConfigError: The table cannot run: ranks are left out, a kind is unknown, an action is there
                twice, or one waits forever.
        """
        if set(actions) != set(range(len(actions))):
            raise ParallelConfigError(f"The table has ranks {sorted(actions)}: number them 0, 1, ... without gaps.")
        queues = {rank: deque(_flatten(rank, actions[rank])) for rank in sorted(actions)}
        last_stage = max((action.stage for queue in queues.values() for action in queue), default=0)
        cost = {**COST, **cost}
        ends: dict[Action, float] = {}  # of parts, so no B
        events: list[Event] = []
        free_at = dict.fromkeys(queues, 0.0)
        is_stuck = False
        while not is_stuck:
            is_stuck = True
            for rank, queue in queues.items():
                while queue and ends.keys() >= (needs := _needs(queue[0], last_stage)):
                    action, is_stuck = queue.popleft(), False
                    if not ends.keys().isdisjoint(_parts(action)):
                        raise ParallelConfigError(
                            f"Rank {rank}, {action}: it has run before. Once is enough (B is I and W)."
                        )
                    start = max([free_at[rank], *(ends[need] for need in needs)])
                    free_at[rank] = start + cost[action.kind]
                    ends.update(dict.fromkeys(_parts(action), free_at[rank]))
                    events.append(Event(rank, *action, start, free_at[rank]))
        _raise_if_left(queues, ends, last_stage)
        return cls(tuple(sorted(events, key=_when)), len(queues), "forwards")

    @classmethod
    def measured(cls, events: Iterable[Event]) -> Timeline:
        """What a run took, in seconds of one clock for all ranks; any number of steps."""
        events = sorted(events, key=_when)
        zero = events[0].start if events else 0.0
        shifted = tuple(event._replace(start=event.start - zero, end=event.end - zero) for event in events)
        return cls(shifted, 1 + max((event.rank for event in events), default=-1), "s")

    @property
    def span(self) -> float:
        """Time from the start of the first event to the end of the last."""
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    @property
    def bubble_fraction(self) -> float:
        """The share of the ranks' time in which they idle."""
        total = self.num_ranks * self.span
        return (total - sum(map(self._busy, range(self.num_ranks)))) / total

    def bubble_of(self, rank: int) -> float:
        """The share of the span in which this rank idles."""
        return (self.span - self._busy(rank)) / self.span

    def in_flight(self) -> list[int]:
        """For each rank, the most (stage, microbatch) pairs whose activations it holds at one time.

        A pair is held from the start of its forward to the end of its backward: of W, if it is split, and without any
        backward to the end of the forward.
        """
        changes: list[list[tuple[float, int]]] = [[] for _ in range(self.num_ranks)]
        last_end: dict[tuple[int, int, int], float] = {}
        for event in sorted(self.events, key=_when, reverse=True):
            pair = (event.rank, event.stage, event.microbatch)
            last_end.setdefault(pair, event.end)
            if event.kind == "F":  # and what came before it belongs to an earlier step
                changes[event.rank] += [(event.start, 1), (last_end.pop(pair), -1)]
        # At the same time, what ends comes before what starts.
        return [max(accumulate(change for _, change in sorted(of_rank)), default=0) for of_rank in changes]

    def text(self, width: int | None = None) -> str:
        """One row a rank, one cell as long as the shortest action, or narrower so as to keep to ``width`` columns.

        A measured timeline keeps to 120 columns unless told otherwise.
        """
        shades = self._shades()
        has_stages = max(shades.values()) > 0
        names = {event: str(event.action) if has_stages else f"{event.kind}{event.microbatch}" for event in self.events}
        heads = [f"rank {rank} ".ljust(len(f"rank {self.num_ranks - 1} ")) for rank in range(self.num_ranks)]
        scale = (1 + max(map(len, names.values()))) / self._shortest
        if width is None and self.unit == "s":
            width = 120
        if width is not None:
            scale = min(scale, max(1, width - len(heads[0])) / self.span)

        rows = [list("." * _column(self.span * scale)) for _ in heads]
        for event, name in names.items():
            first, stop = _column(event.start * scale), _column(event.end * scale)
            shown = name if len(name) < stop - first else event.kind
            rows[event.rank][first:stop] = shown.ljust(stop - first - 1, "-")[: stop - first].ljust(stop - first)
        legend = [f"{kind} {_WORDS[kind]}" for kind in self._kinds()]
        legend += ["stage before it"] * has_stages + ["microbatch after it", ". idle"]
        lines = [head + "".join(row).rstrip() for head, row in zip(heads, rows, strict=True)]
        return "\n".join([*lines, ", ".join(legend), self._summary()])

    def svg(self) -> str:
        """A picture that needs nothing else: a lane a rank, coloured by kind, darker for its later stages."""
        shades, kinds = self._shades(), self._kinds()
        num_shades = 1 + max(shades.values())
        left, top, lane = 72, 34, 26
        scale = min(max(24 / self._shortest, 640 / self.span), 4800 / self.span)
        bottom, length = top + lane * self.num_ranks, self.span * scale
        parts = [_text(left, 20, self._summary())]
        for rank in range(self.num_ranks):
            y = top + lane * rank
            parts += [_text(8, y + 16, f"rank {rank}"), _rect(left, y, length, lane - 4, 'class="lane"')]
        for event in self.events:
            x, y, size = left + event.start * scale, top + lane * event.rank, (event.end - event.start) * scale
            title = f"{event.action} {_WORDS[event.kind]}, {event.start:.6g} to {event.end:.6g} {self.unit}"
            fill = _fill(event.kind, shades[event.rank, event.stage], num_shades)
            number = str(event.microbatch)
            shown = _text(x + size / 2, y + 15, number) if size > 3 + 7 * len(number) else ""
            bar = _rect(x, y, size, lane - 4, fill + ' stroke="#333" stroke-width="0.5"')
            parts.append(f'<g class="action"><title>{title}</title>{bar}{shown}</g>')
        step = _tick_step(self.span)
        for tick in (index * step for index in range(math.floor(self.span / step) + 1)):
            x = left + tick * scale
            parts += [
                _rect(x - 0.5, bottom, 1, 5, 'class="tick"'),
                _text(x, bottom + 17, f"{tick:g}", 'text-anchor="middle"'),
            ]
        parts.append(_text(8, bottom + 17, self.unit))
        for row, kind in enumerate(kinds):
            y = bottom + 30 + 18 * row
            fills = [_fill(kind, shade, num_shades) for shade in range(num_shades)]
            parts += [_rect(left + 14 * shade, y, 14, 12, fill) for shade, fill in enumerate(fills)]
            parts.append(_text(left + 14 * num_shades + 6, y + 10, _WORDS[kind]))
        width, height = math.ceil(left + length + 30), bottom + 50 + 18 * len(kinds)
        note = "number: microbatch" + "; darker: later stages of the rank" * (num_shades > 1)
        parts.append(_text(left, height - 10, note))
        box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" {box}><style>{_STYLE}</style>'
        return "\n".join([head, _rect(0, 0, width, height, 'class="paper"'), *parts, "</svg>"])

    def html(self) -> str:
        """A page that needs nothing else: the picture, and bubble and activations of each rank."""
        rows = "\n".join(
            f"<tr><td>{rank}</td><td>{self.bubble_of(rank):.1%}</td><td>{held}</td></tr>"
            for rank, held in enumerate(self.in_flight())
        )
        return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>Pipeline timeline</title><style>
:root {{ color-scheme: light dark; font-family: sans-serif }} .scroll {{ overflow-x: auto }}
td, th {{ padding: 2px 12px; text-align: right }}
</style></head><body><h1>Pipeline timeline</h1>
<div class="scroll">{self.svg()}</div>
<table><tr><th>rank</th><th>bubble</th><th>most in flight</th></tr>
{rows}</table>
<p>In flight: pairs of stage and microbatch whose backward has not ended.</p></body></html>
"""

    def chrome_trace(self) -> dict[str, Any]:
        """The Chrome trace event format, for Perfetto; one forward of a plan shows as one second."""
        names = [
            {"ph": "M", "name": name, "pid": 0, "tid": rank, "args": args}
            for rank in range(self.num_ranks)
            for name, args in (("thread_name", {"name": f"rank {rank}"}), ("thread_sort_index", {"sort_index": rank}))
        ]
        slices = [
            {
                "ph": "X",
                "name": str(event.action),
                "cat": _WORDS[event.kind],
                "pid": 0,
                "tid": event.rank,
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "args": event.action._asdict(),
            }
            for event in self.events
        ]
        return {"traceEvents": [*names, *slices], "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as its suffix says: .txt, .svg, .html, or .json for `chrome_trace`."""
        path = Path(path)
        writers: dict[str, Callable[[], str]] = {
            ".txt": lambda: self.text() + "\n",
            ".svg": self.svg,
            ".html": self.html,
            ".json": lambda: json.dumps(self.chrome_trace()),
        }
        if path.suffix not in writers:
            raise ParallelConfigError(f"A timeline is not saved as {path.name!r}. Use one of {', '.join(writers)}.")
        path.write_text(writers[path.suffix](), encoding="utf-8")

    @property
    def _shortest(self) -> float:
        return min(event.end - event.start for event in self.events if event.end > event.start)

    def _busy(self, rank: int) -> float:
        """Time in which the rank runs something; what it runs side by side counts once."""
        busy = reached = 0.0
        for event in sorted((event for event in self.events if event.rank == rank), key=_when):
            busy += max(0.0, event.end - max(event.start, reached))
            reached = max(reached, event.end)
        return busy

    def _kinds(self) -> list[str]:
        return [kind for kind in _WORDS if any(event.kind == kind for event in self.events)]

    def _shades(self) -> dict[tuple[int, int], int]:
        """(rank, stage) -> how many of the rank's stages come before it."""
        pairs = {(event.rank, event.stage) for event in self.events}
        return {(rank, stage): sum(r == rank and s < stage for r, s in pairs) for rank, stage in pairs}

    def _summary(self) -> str:
        made = "measured" if self.unit == "s" else "planned"
        return f"{made}: {self.num_ranks} ranks, {self.span:.6g} {self.unit}, bubble {self.bubble_fraction:.1%}"


def _when(event: Event) -> tuple[float, int]:
    return event.start, event.rank


def _flatten(rank: int, items: Iterable[Action | tuple[Action, ...] | None]) -> Iterator[Action]:
    for item in items:
        for action in (item,) if isinstance(item, Action) else item or ():
            if action.kind not in _PARTS:
                raise ParallelConfigError(f"Rank {rank}, {action}: unknown kind. Kinds: {', '.join(_PARTS)}.")
            yield action


def _parts(action: Action) -> list[Action]:
    return [action._replace(kind=part) for part in _PARTS[action.kind]]


def _needs(action: Action, last_stage: int) -> set[Action]:
    stage, kind, microbatch = action
    if kind == "F":
        return {Action(stage - 1, "F", microbatch)} if stage > 0 else set()
    if kind == "W":
        return {Action(stage, "I", microbatch)}
    later = {Action(stage + 1, "I", microbatch)} if stage < last_stage else set()
    return {Action(stage, "F", microbatch)} | later


def _raise_if_left(queues: Mapping[int, Iterable[Action]], ends: Mapping[Action, float], last_stage: int) -> None:
    planned = {part for queue in queues.values() for action in queue for part in _parts(action)}
    waits = []
    for rank, queue in queues.items():
        for action in [*queue][:1]:
            for need in sorted(_needs(action, last_stage) - ends.keys()):
                name = f"{need._replace(kind='B')} or {need}" if need.kind == "I" and action.kind != "W" else f"{need}"
                name += ", which no rank runs" * (need not in planned)
                waits.append(f"rank {rank} waits before {action} for {name}")
    if waits:
        raise ParallelConfigError(f"The table cannot run: {'; '.join(waits)}. Put every action after what it needs.")


def _column(position: float) -> int:
    """Nearest; half up, so that an action of one cell has one wherever it starts (`round` goes to even)."""
    return math.floor(position + 0.5)


def _text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {attributes}>{escape(words)}</text>'


def _rect(x: float, y: float, width: float, height: float, attributes: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" {attributes}/>'


def _fill(kind: str, shade: int, num_shades: int) -> str:
    rgb = colorsys.hls_to_rgb(_HUES[kind] / 360, 0.8 - 0.25 * shade / max(1, num_shades - 1), 0.7)
    return 'fill="#' + "".join(f"{round(255 * part):02x}" for part in rgb) + '"'


def _tick_step(span: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that makes ten ticks at most."""
    power: float = 10.0 ** math.floor(math.log10(span / 10))
    return next(step * power for step in (1, 2, 5, 10) if step * power * 10 >= span)
