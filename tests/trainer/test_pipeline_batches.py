"""Batches and blocks of every kind in a pipeline: one device's loss and weights, or one error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from lightning_parallel import ParallelConfigError, PlanError
from tests.support.models import HuggingFaceLM, NanoGPT, walk_tokens
from tests.support.parity import assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.support.training import Arrays, Recorder, first_names
from tests.trainer.common import make_trainer, seed
from tests.trainer.pipelined import Blocks, ManyEntries
from tests.trainer.test_bad_input import assert_refused, fit


def pipeline(schedule: str = "1F1B", microbatches: int = 4, **options: Any) -> Spec:
    return ("PipelineParallel", {"schedule": schedule, "microbatches": microbatches, **options})


def fit_batches(strategy: Spec | None, batches: list[Any], model: Any = NanoGPT, **options: Any) -> Any:
    """Train on these very batches: each one's loss, and the weights that this rank holds afterwards."""
    seed()
    module: LightningModule = model(**options)
    recorder = Recorder(ties=first_names(module), record_clipped=False)
    trainer = make_trainer(strategy, recorder, use_distributed_sampler=False, gradient_clip_val=0.5)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return recorder.record.losses, recorder.record.final


def check_batches(pool: WorkerPool, strategy: Spec, batches: list[Any], *, world: int, **options: Any) -> None:
    [(losses, final)] = pool.run_once(fit_batches, None, batches, world=1, **options)
    held: Arrays = {}
    for seen_losses, seen in pool.run(fit_batches, strategy, batches, world=world, **options):
        assert seen_losses == pytest.approx(losses, abs=3e-6)
        held |= seen
    assert held.keys() == final.keys()
    for name, array in final.items():
        assert abs(held[name] - array).max() < 1e-5, name


def tokens(rows: int, seq: int) -> tuple[Tensor, Tensor]:
    return walk_tokens(rows, seq, Generator().manual_seed(100 * rows + seq))


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_batches_that_vary(pool: WorkerPool, schedule: str, microbatches: int) -> None:
    # pytorch#126600 (5 rows), torchtitan#775 (fewer rows than microbatches), DeepSpeed#5729 (other lengths).
    batches = [tokens(rows, seq) for rows, seq in [(8, 8), (5, 8), (5, 3), (1, 9), (3, 8), (8, 8), (7, 1), (2, 6)]]
    check_batches(pool, pipeline(schedule, microbatches), batches, world=2, layers=4)


def test_batches_that_vary_beside_other_axes(pool: WorkerPool) -> None:
    batches = [tokens(rows, 8) for rows in (5, 2, 8)]
    strategy = ("HybridParallel", {"fsdp": 1, "tp": 2, "pp": 2})
    check_batches(pool, strategy, batches, world=4, model=HuggingFaceLM)


def entries(rows: int, seq: int, *, first: int) -> dict[str, Any]:
    ids, labels = tokens(rows, seq)
    mask = torch.arange(seq) <= torch.arange(rows).unsqueeze(1)  # row i has i + 1 labels
    row = torch.arange(first, first + rows)
    nested = ([f"row {i}" for i in row.tolist()], {"again": ids})
    return {
        "ids": ids, "labels": labels, "mask": mask, "row": row, "nested": nested, "none": None, "epoch": 3,
        "scalar": torch.tensor(1.5), "whole": torch.ones(5, 2) / 7,
    }  # fmt: skip


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_entries_are_cut_row_by_row(pool: WorkerPool, schedule: str) -> None:
    # torchtitan#1723, #4098: masks of the whole batch; strings, numbers, None, tensors of no or another number of rows.
    batches = [entries(8, 8, first=0), entries(6, 8, first=8), entries(3, 5, first=14)]
    strategy = pipeline(schedule, 4, batch_dims={"whole": None})
    check_batches(pool, strategy, batches, world=2, model=ManyEntries)


def test_an_entry_with_another_number_of_rows_is_refused(pool: WorkerPool) -> None:
    shown = ["Entry 'whole' of the batch has 5 rows and 'ids' has 8", "batch_dims={'whole': …}"]
    batches = [entries(8, 8, first=0)]
    assert_refused(pool, ParallelConfigError, shown, fit_batches, pipeline(), batches, model=ManyEntries)


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        ((torch.zeros(0, 8).long(), torch.zeros(0, 8).long()), "The batch has no samples"),
        (["a", "b"], "this batch has no tensor with a first dim: it is a list of 0: str, 1: str"),
    ],
    ids=["empty", "strings"],
)
def test_batches_that_cannot_be_cut(pool: WorkerPool, batch: Any, shown: str) -> None:
    assert_refused(pool, ParallelConfigError, [shown], fit_batches, pipeline(), [batch])


@pytest.mark.parametrize("kind", ["tuple", "keywords", "memory"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_blocks_of_any_signature(pool: WorkerPool, kind: str, schedule: str) -> None:
    assert_same_training(pool, Blocks, pipeline(schedule), world=2, model_kwargs={"kind": kind}, clip_val=0.1)


@pytest.mark.parametrize("kind", ["keywords", "memory"])
def test_what_all_blocks_take_reaches_every_stage(pool: WorkerPool, kind: str) -> None:
    assert_same_training(pool, Blocks, pipeline(), world=4, model_kwargs={"kind": kind})


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (0, ["The step ended without a call of the pipelined blocks (blocks.0 … blocks.3)", "exactly once"]),
        (2, ["blocks.0 was called a second time in one step", "join the inputs into one batch"]),
    ],
)
def test_a_step_that_does_not_call_its_model_once(pool: WorkerPool, calls: int, shown: list[str]) -> None:
    assert_refused(pool, PlanError, shown, fit, Blocks, pipeline(), calls=calls)
