"""Ways to optimise: accumulation, freezing, manual optimisation, skipped batches. Each equals one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.failures import RankError
from tests.support.models import NanoGPT
from tests.support.parity import Tolerance, assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, describe
from tests.trainer.common import CP, DDP, DDP_TP, FSDP, FSDP_CP, FSDP_TP
from tests.trainer.models import (
    ByHand,
    FreezesEmbeddings,
    OwnParameterByHand,
    ReturnsDict,
    SkipsBatches,
    Tempered,
    TwoOptimizers,
    Unfrozen,
    UsesItsParts,
)

LATER = Tolerance(later=10)
on_data_axes = pytest.mark.parametrize(("strategy", "world"), [(DDP, 2), (FSDP, 2)], ids=describe)
on_all_axes = pytest.mark.parametrize(
    ("strategy", "world"), [(DDP, 2), (FSDP, 2), (DDP_TP, 4), (FSDP_TP, 4), (CP, 2), (FSDP_CP, 4)], ids=describe
)


@on_all_axes
def test_partial_last_window(pool: WorkerPool, strategy: Spec, world: int) -> None:
    # cosmos-framework#161: 5 batches in windows of 3.
    options = {"limit_train_batches": 5}
    assert_same_training(
        pool, NanoGPT, strategy, world=world, steps=2, accumulate=3, trainer_kwargs=options, clip_val=0.1
    )


@on_data_axes
def test_accumulation_that_changes(pool: WorkerPool, strategy: Spec, world: int) -> None:
    scheduler = ("GradientAccumulationScheduler", {"scheduling": {0: 1, 1: 2, 2: 4}})
    options = {"max_epochs": 3, "callbacks": [scheduler]}
    assert_same_training(pool, NanoGPT, strategy, world=world, steps=5, trainer_kwargs=options, tolerance=LATER)


@pytest.mark.parametrize(("strategy", "world"), [(DDP, 2), (FSDP_TP, 4)], ids=describe)
def test_skipped_batches_are_refused_alike(pool: WorkerPool, strategy: Spec, world: int) -> None:
    # By Lightning, on any distributed strategy: a rank that skips leaves the others waiting.
    with pytest.raises(RankError) as failed:
        assert_same_training(pool, SkipsBatches, strategy, world=world)
    assert len(failed.value.exceptions) == world
    assert all("Skipping the `training_step` by returning None" in str(e) for e in failed.value.exceptions.values())


@on_all_axes
def test_scalar_parameters(pool: WorkerPool, strategy: Spec, world: int) -> None:
    # fully_shard takes no parameters without a dim.
    options = {"gated": strategy in (DDP, FSDP)}
    assert_same_training(
        pool, Tempered, strategy, world=world, accumulate=2, clip_val=0.1, seed_apart=True, model_kwargs=options
    )


@on_data_axes
def test_dict_outputs(pool: WorkerPool, strategy: Spec, world: int) -> None:
    assert_same_training(pool, ReturnsDict, strategy, world=world)


@on_data_axes
def test_parts_of_the_module(pool: WorkerPool, strategy: Spec, world: int) -> None:
    assert_same_training(pool, UsesItsParts, strategy, world=world, accumulate=2, clip_val=0.1)


@on_all_axes
def test_manual_optimisation(pool: WorkerPool, strategy: Spec, world: int) -> None:
    assert_same_training(pool, ByHand, strategy, world=world, steps=4, tolerance=LATER)


@on_data_axes
def test_own_parameters_after_a_manual_backward(pool: WorkerPool, strategy: Spec, world: int) -> None:
    assert_same_training(pool, OwnParameterByHand, strategy, world=world, tolerance=LATER)


@on_data_axes
def test_two_optimizers(pool: WorkerPool, strategy: Spec, world: int) -> None:
    assert_same_training(pool, TwoOptimizers, strategy, world=world, steps=4, tolerance=LATER)


@on_all_axes
def test_backbone_finetuning(pool: WorkerPool, strategy: Spec, world: int) -> None:
    callback = ("BackboneFinetuning", {"unfreeze_backbone_at_epoch": 1, "verbose": False})
    options = {"max_epochs": 3, "callbacks": [callback]}
    assert_same_training(pool, Unfrozen, strategy, world=world, steps=2, trainer_kwargs=options, tolerance=LATER)


@on_data_axes
def test_freezing_and_thawing(pool: WorkerPool, strategy: Spec, world: int) -> None:
    options: dict[str, Any] = {"max_epochs": 3}
    assert_same_training(
        pool, FreezesEmbeddings, strategy, world=world, steps=2, trainer_kwargs=options, tolerance=LATER
    )
