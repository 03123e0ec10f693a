"""A mean over valid tokens, on ranks that have 1, 9 and none of them, is one device's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.models import NANOGPT_PLAN, NanoGPT
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, describe
from tests.support.training import GlobalBatches, full_array
from tests.trainer.common import make_trainer, seed, weights

PLAN = dict(NANOGPT_PLAN)


class Masked(NanoGPT):
    """Sample i of a batch of 4 has 1, 9, 0 and 3 valid labels."""

    VALID = (1, 9, 0, 3)

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.gradients: list[dict[str, np.ndarray]] = []

    def make_samples(self, count: int, seq: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = super().make_samples(count, seq, generator)
        for i in range(count):
            y[i, self.VALID[i % 4] :] = -100
        return x, y

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: full_array(p.grad) for name, p in self.named_parameters() if p.grad is not None})


def fit_masked(strategy: Spec | None) -> dict[str, Any]:
    seed()
    module = Masked()
    trainer = make_trainer(strategy, use_distributed_sampler=False)
    trainer.fit(module, datamodule=GlobalBatches(module, count=8, batch=4, seq=12))
    return {
        "loss": float(trainer.callback_metrics["train_loss"]), "gradients": module.gradients, "weights": weights(module)
    }  # fmt: skip


def errors(seen: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float]:
    """Of the loss, and of the gradients of the first step by the scale of each."""
    one, other = seen["gradients"][0], expected["gradients"][0]
    worst = max(float(np.abs(one[name] - other[name]).max() / np.abs(other[name]).max()) for name in one)
    return abs(seen["loss"] - expected["loss"]), worst


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        (("HybridParallel", {"ddp": 4, "fsdp": 1}), 4),
        (("HybridParallel", {"fsdp": 4}), 4),
        (("HybridParallel", {"fsdp": 2, "tp": 2, "plan": PLAN}), 4),
        (("PipelineParallel", {"microbatches": 4}), 2),
        (("HybridParallel", {"fsdp": 2, "pp": ("PipelineParallel", {"size": 2, "microbatches": 2})}), 4),
        (("HybridParallel", {"ddp": 2, "fsdp": 1, "pp": 2}), 4),
    ],
    ids=lambda value: describe(value) if isinstance(value, tuple) else None,
)
def test_each_token_weighs_the_same(pool: WorkerPool, strategy: tuple[str, dict[str, Any]], world: int) -> None:
    # torchtitan#4167, #2972: and over the microbatches of a pipeline.
    [expected] = pool.run_once(fit_masked, None, world=1)
    weighted = strategy[0], {**strategy[1], "token_weighted_loss": True}
    for seen in pool.run(fit_masked, weighted, world=world):
        assert all(np.isfinite(array).all() for array in seen["weights"].values())
        loss, gradient = errors(seen, expected)
        assert loss < 1e-5
        assert gradient < 1e-5


def test_without_the_option_they_do_not(pool: WorkerPool) -> None:
    [expected] = pool.run_once(fit_masked, None, world=1)
    seen = pool.run(fit_masked, ("HybridParallel", {"fsdp": 2, "tp": 2, "plan": PLAN}))
    assert errors(seen[0], expected)[1] > 0.1
