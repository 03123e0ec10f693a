"""Timelines of known schedules against their formulas, and every way to write one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from torch.distributed.pipelining import schedules

from lightning_parallel import ParallelConfigError
from lightning_parallel.schemes.pipeline.timeline import Action, Event, Timeline

Table = dict[int, list[Action | tuple[Action, ...] | None]]

SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 7), (3, 6), (4, 2), (4, 8), (5, 12)]
# name, stages a rank, time a rank idles with p ranks, pairs in flight on rank r
TORCH_SCHEDULES: dict[str, tuple[str, int, Callable[[int], float], Callable[[int, int], int]]] = {
    "interleaved": ("Interleaved1F1B", 2, lambda p: 3 * (p - 1), lambda p, r: 3 * p - 1 - 2 * r),
    "interleaved-3": ("Interleaved1F1B", 3, lambda p: 3 * (p - 1), lambda p, r: 4 * p - 1 - 2 * r),
    "zb-h1": ("InterleavedZeroBubble", 1, lambda p: p - 1, lambda p, r: p),
    "zb-interleaved": ("InterleavedZeroBubble", 2, lambda p: p - 1, lambda p, r: 2 * p),
    "zbv": ("ZBVZeroBubble", 2, lambda p: p - 1, lambda p, r: 2 * p),
    "dualpipev": ("DualPipeV", 2, lambda p: p - 1, lambda p, r: 2 * p + 1),
}


def gpipe(p: int, m: int) -> Table:
    return {rank: [Action(rank, kind, i) for kind in "FB" for i in range(m)] for rank in range(p)}


def one_f_one_b(p: int, m: int) -> Table:
    table: Table = {}
    for rank in range(p):
        ahead = min(p - rank - 1, m)
        table[rank] = [Action(rank, "F", i) for i in range(ahead)]
        for i in range(m):
            table[rank] += [Action(rank, "F", i + ahead)] if i + ahead < m else [None]
            table[rank].append(Action(rank, "B", i))
    return table


def torch_table(name: str, p: int, v: int, m: int) -> Table:
    """What torch's schedule makes up, without the process group that its constructor needs."""
    cls = getattr(schedules, f"Schedule{name}")
    schedule = object.__new__(cls)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = p, v, m
    schedule._num_stages = schedule.num_stages = p * v
    schedule.microbatches_per_round = m // max(1, m // p)

    def convert(action: Any) -> Action | tuple[Action, ...] | None:
        if action is None:
            return None
        if action.sub_actions:
            return tuple(convert(sub) for sub in action.sub_actions)
        return Action(action.stage_index, action.computation_type.value, action.microbatch_index)

    return {rank: [convert(action) for action in schedule._calculate_single_rank_operations(rank)] for rank in range(p)}


def flat(table: Table) -> list[tuple[int, Action]]:
    items = [(rank, item) for rank, actions in table.items() for item in actions if item is not None]
    return [(rank, action) for rank, item in items for action in ((item,) if isinstance(item, Action) else item)]


@pytest.fixture(params=["gpipe", "zbv", "dualpipev", "measured"])
def timeline(request: pytest.FixtureRequest) -> Timeline:
    if request.param == "gpipe":
        return Timeline.plan(gpipe(3, 4))
    if request.param == "zbv":
        return Timeline.plan(torch_table("ZBVZeroBubble", 3, 2, 12))
    plan = Timeline.plan(torch_table("DualPipeV", 2, 2, 4))
    if request.param == "dualpipev":
        return plan
    return Timeline.measured(
        event._replace(start=7 + event.start / 99, end=7 + event.end / 99) for event in plan.events
    )


# ---- plans


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("table", [gpipe, one_f_one_b])
def test_bubble_is_the_formulas(table: Callable[[int, int], Table], p: int, m: int) -> None:
    plan = Timeline.plan(table(p, m))
    assert plan.span == 3 * (m + p - 1)
    assert plan.bubble_fraction == (p - 1) / (m + p - 1)
    assert [plan.bubble_of(rank) for rank in range(p)] == [(p - 1) / (m + p - 1)] * p
    assert (plan.num_ranks, plan.unit) == (p, "forwards")


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_in_flight_is_the_formulas(p: int, m: int) -> None:
    assert Timeline.plan(gpipe(p, m)).in_flight() == [m] * p
    assert Timeline.plan(one_f_one_b(p, m)).in_flight() == [min(p - rank, m) for rank in range(p)]


def test_actions_start_when_what_they_need_is_done() -> None:
    """Two ranks, one microbatch, the backward of the last stage split: every dependency shows in a start."""
    table: Table = {
        0: [Action(0, "F", 0), Action(0, "B", 0)],
        1: [None, Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)],
    }
    plan = Timeline.plan(table, cost={"F": 2, "I": 3, "W": 5})
    assert {str(event.action): (event.rank, event.start, event.end) for event in plan.events} == {
        "0F0": (0, 0, 2),
        "1F0": (1, 2, 4),
        "1I0": (1, 4, 7),
        "0B0": (0, 7, 9),  # after 1I0, not after 1W0
        "1W0": (1, 7, 12),
    }
    assert plan.in_flight() == [1, 1]
    assert plan.bubble_of(0) == 8 / 12
    assert plan.bubble_of(1) == 2 / 12


def test_weights_hold_activations_until_their_backward() -> None:
    late = [Action(0, kind, i) for kind in "FIW" for i in range(3)]
    soon = [Action(0, kind, i) for i in range(3) for kind in "FIW"]
    assert Timeline.plan({0: late}).in_flight() == [3]
    assert Timeline.plan({0: soon}).in_flight() == [1]
    apart = [*(Action(0, kind, i) for i in range(3) for kind in "FI"), *(Action(0, "W", i) for i in range(3))]
    assert Timeline.plan({0: apart}).in_flight() == [3]
    assert Timeline.plan({0: apart[:6]}).in_flight() == [1]  # frozen weights
    assert Timeline.plan({0: late[:3]}).in_flight() == [1]  # no backward at all


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 16)])
@pytest.mark.parametrize("case", TORCH_SCHEDULES)
def test_torch_schedules(case: str, p: int, m: int) -> None:
    name, v, idle, in_flight = TORCH_SCHEDULES[case]
    table = torch_table(name, p, v, m)
    plan = Timeline.plan(table)
    assert Counter((event.rank, event.action) for event in plan.events) == Counter(flat(table))
    assert len(plan.events) >= 2 * p * v * m
    for rank in range(p):
        assert [event.action for event in plan.events if event.rank == rank] == [a for r, a in flat(table) if r == rank]
    assert plan.span == 3 * v * m + idle(p)
    assert plan.bubble_fraction == idle(p) / plan.span
    assert plan.bubble_fraction < Timeline.plan(one_f_one_b(p, m)).bubble_fraction
    assert plan.in_flight() == [in_flight(p, rank) for rank in range(p)]


# ---- tables that cannot run

CYCLE: Table = {
    0: [Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)],
    1: [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)],
}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (CYCLE, "rank 0 waits before 0B0 for 1B0 or 1I0; rank 1 waits before 1F1 for 0F1."),
        ({0: [], 1: [Action(1, "F", 0)]}, "rank 1 waits before 1F0 for 0F0, which no rank runs"),
        ({0: [Action(0, "B", 0)]}, "rank 0 waits before 0B0 for 0F0, which no rank runs"),
        ({0: [Action(0, "F", 0), Action(0, "W", 0)]}, "rank 0 waits before 0W0 for 0I0, which no rank runs"),
        ({0: [Action(0, "W", 0), Action(0, "I", 0)]}, "rank 0 waits before 0W0 for 0I0. "),
        ({0: [(Action(0, "B", 0), Action(0, "F", 0))]}, "rank 0 waits before 0B0 for 0F0. "),
        ({0: [Action(0, "F", 0), Action(0, "F", 0)]}, "Rank 0, 0F0: it has run before"),
        ({0: [Action(0, "F", 0), Action(0, "B", 0), Action(0, "W", 0)]}, "Rank 0, 0W0: it has run before"),
        ({0: [Action(0, "SEND_F", 0)]}, "Rank 0, 0SEND_F0: unknown kind. Kinds: F, B, I, W."),
        ({0: [], 2: []}, "The table has ranks [0, 2]"),
        ({0: [None]}, "A timeline needs events that take time"),
    ],
)
def test_a_table_that_cannot_run_is_refused(table: Table, message: str) -> None:
    with pytest.raises(ParallelConfigError, match=re.escape(message)):
        Timeline.plan(table)


# ---- measurements


def test_measured_starts_at_zero_and_counts_each_rank() -> None:
    """Rank 0 runs two things side by side and rank 1 nothing, of 10 seconds."""
    events = [Event(2, 2, "B", 0, 108.0, 110.0), Event(0, 0, "F", 0, 100.0, 104.0), Event(0, 0, "F", 1, 102.0, 105.0)]
    timeline = Timeline.measured(iter(events))
    assert [(event.start, event.end) for event in timeline.events] == [(0, 4), (2, 5), (8, 10)]
    assert (timeline.num_ranks, timeline.unit, timeline.span) == (3, "s", 10)
    assert [timeline.bubble_of(rank) for rank in range(3)] == [0.5, 1.0, 0.8]
    assert timeline.bubble_fraction == 23 / 30


def test_a_microbatch_of_the_next_step_is_another() -> None:
    steps = [event for step in range(3) for event in _shifted(Timeline.plan(one_f_one_b(3, 4)), 100 * step)]
    assert Timeline.measured(steps).in_flight() == [3, 2, 1]


def _shifted(timeline: Timeline, by: float) -> list[Event]:
    return [event._replace(start=event.start + by, end=event.end + by) for event in timeline.events]


@pytest.mark.parametrize(
    "events",
    [
        (),
        (Event(0, 0, "F", 0, 1.0, 1.0),),
        (Event(0, 0, "F", 0, 0.0, 1.0), Event(0, 0, "B", 0, 2.0, 1.0)),
        (Event(0, 0, "X", 0, 0.0, 1.0),),
        (Event(-1, 0, "F", 0, 0.0, 1.0), Event(0, 0, "F", 0, 0.0, 1.0)),
    ],
)
def test_events_that_make_no_picture_are_refused(events: tuple[Event, ...]) -> None:
    with pytest.raises(ParallelConfigError):
        Timeline.measured(events)


# ---- pictures


def test_text_of_a_plan() -> None:
    assert Timeline.plan(gpipe(2, 2)).text().splitlines() == [
        "rank 0 F0 F1 .........B0--- B1---",
        "rank 1 ...F0 F1 B0--- B1--- ......",
        "F forward, B backward, microbatch after it, . idle",
        "planned: 2 ranks, 9 forwards, bubble 33.3%",
    ]


def test_text_names_the_stage_where_a_rank_has_several() -> None:
    table: Table = {0: [Action(stage, "F", 0) for stage in (0, 1)] + [Action(1, "I", 0), Action(1, "W", 0)]}
    row, legend, _ = Timeline.plan(table).text().splitlines()
    assert row == "rank 0 0F0 1F0 1I0 1W0"
    assert "I backward for inputs, W backward for weights, stage before it, microbatch after it" in legend


def test_text_has_every_action_once(timeline: Timeline) -> None:
    *rows, _, last = timeline.text(10_000).splitlines()
    assert len(rows) == timeline.num_ranks
    for rank, row in enumerate(rows):
        shown = re.findall(r"\d*[FBIW]\d+", row.removeprefix(f"rank {rank} "))
        actions = [event.action for event in timeline.events if event.rank == rank]
        has_stages = timeline.num_ranks < len({event.stage for event in timeline.events})
        assert shown == [str(action) if has_stages else f"{action.kind}{action.microbatch}" for action in actions]
    assert last.endswith(f"bubble {timeline.bubble_fraction:.1%}")


def test_text_has_room_for_the_shortest_action_wherever_it_starts() -> None:
    """Here between columns, from 5.5 to 8.5, and rounding half to even would leave it two."""
    events = [Event(0, 0, "F", 0, 0.0, 2.75), Event(0, 0, "F", 1, 2.75, 4.25), Event(0, 0, "B", 0, 4.25, 6.25)]
    assert Timeline.measured(events).text().splitlines()[0] == "rank 0 F0--- F1 B0-"


@pytest.mark.parametrize("width", [40, 120, 200])
def test_text_keeps_to_its_width(width: int) -> None:
    plan = Timeline.plan(one_f_one_b(4, 32))
    rows = plan.text(width).splitlines()[:4]
    assert max(map(len, rows)) == width
    for rank, row in enumerate(rows if width > 40 else []):  # in 40 columns some are too short to be seen
        names = [f"{event.kind}{event.microbatch}" for event in plan.events if event.rank == rank]
        for shown, name in zip(re.findall(r"[FB]\d*", row), names, strict=True):
            assert shown in (name, name[0])  # cut short it would name another microbatch
    assert len(plan.text().splitlines()[0]) > 200
    assert Timeline.measured(plan.events).text().splitlines()[:4] == plan.text(120).splitlines()[:4]


def test_svg_draws_every_action_once(timeline: Timeline) -> None:
    root = ElementTree.fromstring(timeline.svg())
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == svg + "svg"
    bars = [group for group in root.iter(svg + "g") if group.get("class") == "action"]
    titles = Counter(bar.findtext(svg + "title", "").split()[0] for bar in bars)
    assert titles == Counter(str(event.action) for event in timeline.events)

    lanes = [float(lane.attrib["y"]) for lane in root.iter(svg + "rect") if lane.get("class") == "lane"]
    assert len(lanes) == timeline.num_ranks
    fills: dict[str, set[tuple[str, int]]] = {}
    for event, bar in zip(timeline.events, bars, strict=True):
        rect = bar.find(svg + "rect")
        assert rect is not None
        assert float(rect.attrib["y"]) == lanes[event.rank]
        assert bar.findtext(svg + "text") == str(event.microbatch)
        stages = sorted({other.stage for other in timeline.events if other.rank == event.rank})
        fills.setdefault(rect.attrib["fill"], set()).add((event.kind, stages.index(event.stage)))
    assert all(len(meanings) == 1 for meanings in fills.values())  # a fill says kind and virtual stage
    assert len(fills) == len({next(iter(meanings)) for meanings in fills.values()})

    words = [text.text for text in root.iter(svg + "text")]
    assert any(f"bubble {timeline.bubble_fraction:.1%}" in (word or "") for word in words)
    assert {"forward", timeline.unit, "0"} <= set(words)
    assert "prefers-color-scheme: dark" in timeline.svg()


def test_svg_bars_are_as_long_as_their_time(timeline: Timeline) -> None:
    root = ElementTree.fromstring(timeline.svg())
    rects = [group.findall("{*}rect")[0] for group in root.iter("{http://www.w3.org/2000/svg}g")]
    left = float(rects[0].attrib["x"])
    scale = float(rects[0].attrib["width"]) / (timeline.events[0].end - timeline.events[0].start)
    for event, rect in zip(timeline.events, rects, strict=True):
        assert float(rect.attrib["x"]) == pytest.approx(left + event.start * scale, abs=0.5)
        assert float(rect.attrib["width"]) == pytest.approx((event.end - event.start) * scale, abs=0.1)


def test_html_holds_the_picture_and_a_row_a_rank(timeline: Timeline) -> None:
    page = timeline.html()
    root = ElementTree.fromstring(page)
    assert timeline.svg() in page
    assert [[cell.text for cell in row] for row in root.iter("tr")][1:] == [
        [str(rank), f"{timeline.bubble_of(rank):.1%}", str(held)] for rank, held in enumerate(timeline.in_flight())
    ]
    for elsewhere in ("<script", "<link", "href", "src=", "url(", "@import"):
        assert elsewhere not in page


def test_chrome_trace(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(timeline.chrome_trace()))
    names = [event for event in trace["traceEvents"] if event["ph"] == "M" and event["name"] == "thread_name"]
    assert [(name["tid"], name["args"]["name"]) for name in names] == [
        (rank, f"rank {rank}") for rank in range(timeline.num_ranks)
    ]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    for event, shown in zip(timeline.events, slices, strict=True):
        assert (shown["name"], shown["pid"], shown["tid"]) == (str(event.action), 0, event.rank)
        assert (shown["ts"], shown["dur"]) == pytest.approx((event.start * 1e6, (event.end - event.start) * 1e6))
        assert shown["args"] == {"stage": event.stage, "kind": event.kind, "microbatch": event.microbatch}


def test_save_writes_what_the_suffix_says(tmp_path: Path) -> None:
    timeline = Timeline.plan(one_f_one_b(2, 3))
    expected = {
        ".txt": timeline.text() + "\n",
        ".svg": timeline.svg(),
        ".html": timeline.html(),
        ".json": json.dumps(timeline.chrome_trace()),
    }
    for suffix, content in expected.items():
        path = tmp_path / f"pipeline{suffix}"
        timeline.save(str(path))
        assert path.read_text(encoding="utf-8") == content
    with pytest.raises(ParallelConfigError, match=re.escape("'pipeline.png'. Use one of .txt, .svg, .html, .json.")):
        timeline.save(tmp_path / "pipeline.png")
    assert not (tmp_path / "pipeline.png").exists()
