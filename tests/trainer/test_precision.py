"""Each of Lightning's precisions, against one device in the same precision; overflow and NaN on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.support.models import NanoGPT, OptimizerOptions
from tests.support.parity import Tolerance, assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, describe
from tests.support.training import Arrays
from tests.trainer.common import CP, DDP, FSDP, FSDP_CP, FSDP_TP, Data, largest_difference, make_trainer, seed, weights

MESHES = [(DDP, 2), (FSDP, 2), (FSDP_TP, 4), (CP, 2), (FSDP_CP, 4)]

# bfloat16 keeps 8 bits: one rounding is up to 2**-8 = 0.4 %. Sums over ranks add a few of them, in another order than
# one device does. A wrong scale, a missing reduction or a lost sample is off by 30 % and more.
NOISE = Tolerance(loss=0.01, gradient=0.06, later=2.0, floor=0.05, norm=0.03, weight=0.03)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize(("strategy", "world"), MESHES, ids=describe)
def test_precisions(pool: WorkerPool, strategy: Spec, world: int, precision: str) -> None:
    exact = Tolerance(loss=1e-12, gradient=1e-11, norm=1e-12, weight=1e-10)
    assert_same_training(
        pool, NanoGPT, strategy, world=world, precision=precision, clip_val=1.0, optimizer=OptimizerOptions(name="sgd"),
        tolerance=exact if precision == "64-true" else NOISE,
    )  # fmt: skip


class Spoilt(NanoGPT):
    """One data rank's gradient is not finite on one batch."""

    def __init__(self, factor: float, batch: int = 1) -> None:
        super().__init__(optimizer=OptimizerOptions(step_lr=None))
        self.factor, self.spoilt = factor, batch
        self.seen: list[Arrays] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(weights(self))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        data = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        is_last = data["rank"] == data["num_replicas"] - 1
        return loss * (self.factor if is_last and batch_idx == self.spoilt else 1.0)


def overflow(strategy: Spec) -> dict[str, Any]:
    seed()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    trainer = make_trainer(strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], limit_val_batches=0)
    module = Spoilt(float("inf"))
    trainer.fit(module, datamodule=Data())
    plugin = trainer.precision_plugin
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    return {"weights": [*module.seen, weights(module)], "scale": plugin.scaler.get_scale()}


@pytest.mark.parametrize(("strategy", "world"), MESHES, ids=describe)
def test_all_ranks_skip_the_step_on_which_one_overflows(pool: WorkerPool, strategy: Spec, world: int) -> None:
    # torchtitan#803, Lightning#19902.
    for seen in pool.run(overflow, strategy, world=world):
        first, second, third, last = seen["weights"]
        assert largest_difference(first, second) > 0
        assert largest_difference(second, third) == 0
        assert largest_difference(third, last) > 0
        assert all(np.isfinite(array).all() for array in last.values())
        assert seen["scale"] == 512.0


def raise_on_nan(strategy: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    seed()
    strategy = strategy[0], {**strategy[1], "error_if_nonfinite": True}
    trainer = make_trainer(strategy, gradient_clip_val=1.0, limit_val_batches=0)
    module = Spoilt(float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        trainer.fit(module, datamodule=Data())
    return {"weights": [*module.seen, weights(module)]}


@pytest.mark.parametrize(("strategy", "world"), MESHES, ids=describe)
def test_all_ranks_raise_on_nan_before_the_step(pool: WorkerPool, strategy: Spec, world: int) -> None:
    # Lightning#21928.
    for seen in pool.run(raise_on_nan, strategy, world=world):
        first, second, last = seen["weights"]
        assert largest_difference(first, second) > 0
        assert largest_difference(second, last) == 0
