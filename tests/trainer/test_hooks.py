"""The model used outside of a step, by hooks and callbacks, and what hooks see of parameters and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models import NanoGPT
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.support.training import full_array
from tests.trainer.common import DDP, FSDP, FSDP_TP, Data, largest_difference, make_trainer, seed, weights

KEEPS_WHOLE: Spec = ("FullyShardedDataParallel", {"optimizer_state_only": True})
TOKENS = torch.arange(24).view(2, 12)


class Samples(NanoGPT):
    """Runs itself in every hook that one would use for it."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled: dict[str, list[np.ndarray]] = {}

    @torch.no_grad()
    def sample(self, where: str) -> None:
        tokens = TOKENS
        for _ in range(2):
            logits = self.logits(tokens)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        self.sampled.setdefault(where, []).append(np.array(logits.tolist()))

    def on_train_start(self) -> None:
        self.sample("start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.sample("zero_grad")

    def on_after_backward(self) -> None:
        self.sample("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.sample("optimizer_step")
        norms = [full_array(p.grad).astype(np.float64) for p in self.parameters() if p.grad is not None]
        self.sampled.setdefault("norm", []).append(np.array([np.sqrt(sum(float((n**2).sum()) for n in norms))]))

    def on_train_batch_end(self, *args: Any) -> None:
        self.sample("batch_end")

    def on_train_epoch_end(self) -> None:
        self.sample("epoch_end")

    def on_validation_epoch_end(self) -> None:
        self.sample("validation_end")

    def on_fit_end(self) -> None:
        self.sample("fit_end")


def sample_in_hooks(strategy: Spec | None) -> dict[str, Any]:
    seed()
    module = Samples()
    trainer = make_trainer(
        strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1, num_sanity_val_steps=1
    )
    trainer.fit(module, datamodule=Data(train=24))
    return {"sampled": module.sampled, "weights": weights(module)}


@pytest.mark.parametrize(
    ("strategy", "world"), [(DDP, 2), (FSDP, 2), (KEEPS_WHOLE, 2), (FSDP_TP, 4)],
    ids=["ddp", "fsdp", "zero-1", "fsdp-tp"],
)  # fmt: skip
def test_sampling_in_hooks(pool: WorkerPool, strategy: Spec, world: int) -> None:
    [expected] = pool.run_once(sample_in_hooks, None, world=1)
    assert {*expected["sampled"]} >= {"start", "backward", "optimizer_step", "batch_end", "epoch_end", "fit_end"}
    for rank, seen in enumerate(pool.run(sample_in_hooks, strategy, world=world)):
        for where, samples in expected["sampled"].items():
            assert len(seen["sampled"][where]) == len(samples), where
            for time, (one, other) in enumerate(zip(seen["sampled"][where], samples, strict=True)):
                assert np.abs(one - other).max() < 1e-4, f"{where} {time} on rank {rank}"
        assert largest_difference(seen["weights"], expected["weights"]) < 1e-5
    assert np.abs(expected["sampled"]["batch_end"][-1] - expected["sampled"]["start"][0]).max() > 0.1
