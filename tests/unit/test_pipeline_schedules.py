"""Which sizes a schedule takes: what is accepted runs, what is refused names sizes that do, on paper and from files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel import ParallelConfigError
from lightning_parallel._torch import PipelineStageBase
from lightning_parallel.schemes.pipeline.schedules import SCHEDULES, ScheduleSpec, actions_of, suits
from lightning_parallel.schemes.pipeline.timeline import Timeline
from tests.support.fake import fake_world

SINGLE, V_SHAPED = ("GPipe", "1F1B"), ("ZBVZeroBubble", "DualPipeV")


class Stub(PipelineStageBase):
    """A stage that only has its numbers."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__(nn.Identity(), index, num_stages, torch.device("cpu"), None)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any: ...
    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any: ...
    def _create_grad_recv_info(self, *args: Any) -> Any: ...
    def _get_init_p2p_neighbors_ops(self) -> Any: ...


def build(spec: ScheduleSpec, rank: int = 0) -> Any:
    return spec.build([Stub(index, spec.num_stages) for index in spec.stages_of[rank]], lambda output, target: output)


def virtuals(name: str) -> tuple[int, ...]:
    return (1,) if name in SINGLE else (2,) if name in V_SHAPED else (1, 2, 3)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_accepted_runs_and_the_rest_is_torchs_to_refuse(name: str, size: int) -> None:
    with fake_world(0, size):
        for virtual in virtuals(name):
            accepted = ScheduleSpec.of(name, size, virtual=virtual)
            for microbatches in range(1, 13):
                if suits(name, size, virtual, microbatches):
                    spec = ScheduleSpec.of(name.lower(), size, virtual=virtual, microbatches=microbatches)
                    events = Timeline.plan(actions_of(spec, build(spec))).events
                    run = Counter((e.rank, e.stage, e.microbatch, kind) for e in events for kind in parts(e.kind))
                    held = [(rank, stage) for rank, stages in enumerate(spec.stages_of) for stage in stages]
                    assert run == Counter((*at, i, kind) for at in held for i in range(microbatches) for kind in "FIW")
                elif microbatches >= size:
                    unchecked = ScheduleSpec(name, size, virtual, microbatches, accepted.stages_of)
                    with pytest.raises((ValueError, RuntimeError)):
                        build(unchecked)


def parts(kind: str) -> str:
    return {"B": "IW"}.get(kind, kind)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_is_on_one_rank(name: str, size: int) -> None:
    for virtual in virtuals(name):
        spec = ScheduleSpec.of(name, size, virtual=virtual)
        assert sorted(spec.rank_of) == list(range(spec.num_stages))
        assert suits(name, size, virtual, spec.microbatches)
        last = spec.rank_of[spec.num_stages - 1]
        assert last == (0 if name in V_SHAPED else size - 1)
    assert ScheduleSpec.of("ZBVZeroBubble", 3).stages_of == ((0, 5), (1, 4), (2, 3))
    assert ScheduleSpec.of("LoopedBFS", 3).stages_of == ((0, 3), (1, 4), (2, 5))


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("1f1bb", {}, ["'1f1bb': unknown. Did you mean '1F1B'?", "DualPipeV, or the path of a .csv file"]),
        ("nothing", {}, ["'nothing': unknown. Use one of GPipe, 1F1B"]),
        ("1F1B", {"microbatches": 3}, ["as many microbatches as stages, 4, or more", "Use microbatches=4."]),
        ("DualPipeV", {"microbatches": 5}, ["as stages, 8, or more", "Use microbatches=8."]),
        ("Interleaved1F1B", {"microbatches": 9}, ["rounds of equal length", "Use microbatches=8 or microbatches=10."]),
        ("Interleaved1F1B", {"microbatches": 2}, ["4 microbatches or more", "Use microbatches=4."]),
        ("GPipe", {"microbatches": 0}, ["microbatches=0: a number of microbatches is a positive integer"]),
        ("GPipe", {"microbatches": True}, ["microbatches=True: a number"]),
        ("GPipe", {"virtual": 2}, ["GPipe takes exactly 1 stage on each rank", "use Interleaved1F1B"]),
        ("ZBVZeroBubble", {"virtual": 1}, ["ZBVZeroBubble takes exactly 2 stages on each rank."]),
        ("LoopedBFS", {"virtual": 0}, ["virtual_stages=0: LoopedBFS takes one or more stages"]),
        ("missing.csv", {}, ["schedule='missing.csv': the file cannot be read"]),
    ],
)  # fmt: skip
def test_what_does_not_suit_is_refused_with_what_does(name: str, options: dict[str, Any], shown: list[str]) -> None:
    with pytest.raises(ParallelConfigError) as caught:
        ScheduleSpec.of(name, 4, **options)
    for text in shown:
        assert text in str(caught.value)


GOOD = "0F0,0F1,,0B0,0B1\n\n,1F0,1F1, 1I0 ,1W0,1B1\n"


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(GOOD)
    spec = ScheduleSpec.of(str(path), 2)
    assert (spec.virtual, spec.microbatches, spec.stages_of) == (1, 2, ((0,), (1,)))
    assert spec.splits_backward
    assert ScheduleSpec.of(str(path), 2, virtual=1, microbatches=2) == spec


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (GOOD, {"size": 3}, "it has 2 rows, one a rank, and the pipeline has 3 ranks"),
        (GOOD, {"microbatches": 4}, "it has 2 microbatches, not microbatches=4"),
        (GOOD, {"virtual": 2}, "it has {1} stages on each rank, not virtual_stages=2"),
        ("", {}, "it has 0 rows"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0\n", {}, "ranks have unequal numbers of stages"),
        ("0F0,0X0\n1F0,1B0\n", {}, "Compute actions only"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", {}, "0SEND_F0: unknown kind"),
        ("0F0,0B0\n2F0,2B0\n", {}, "waits"),
        ("0F0,0B0\n0F1,0B1\n", {}, "stage 1 does not run microbatch 0"),
        ("0F0\n1F0\n", {}, "stage 0 does not run microbatch 0 forward and backward"),
        ("0F0,0F1,0B1\n1F0,1F1,1B1,1B0\n", {}, "stage 0 does not run microbatch 0 forward and backward"),
        ("0F0,0B0\n1F0,1I0\n", {}, "stage 1 does not run microbatch 0 forward and backward"),
        ("0F0,0B0\n1B0,1F0\n", {}, "rank 1 waits before 1B0 for 1F0"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", {}, "rank 0 waits before 0B0 for 1B0"),
        ("0F0,0F0,0B0\n1F0,1B0\n", {}, "0F0: it has run before"),
    ],
)  # fmt: skip
def test_files_that_cannot_run(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    """Refused before anything runs: as a schedule each of these would wait forever, or train on a part."""
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(ParallelConfigError, match=re.escape(message)) as caught:
        ScheduleSpec.of(str(path), **{"size": 2, **options})
    assert str(caught.value).startswith(f"schedule={str(path)!r}: ")
