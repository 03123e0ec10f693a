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

PIPELINE: Spec = ("PipelineParallel", {"microbatches": 2})
FSDP_PIPELINE: Spec = ("HybridParallel", {"fsdp": 2, "pp": 2})
KEEPS_WHOLE: Spec = ("FullyShardedDataParallel", {"optimizer_state_only": True})
TOKENS = torch.arange(24).view(2, 12)


class Samples(NanoGPT):
    """Runs itself in every hook that one would use for it."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.sampled: dict[str, list[np.ndarray]] = {}
        self.squares: list[float] = []  # of gradients, where they are whole: after the last backward of a window

    def add_squares(self) -> None:
        gradients = [full_array(p.grad).astype(np.float64) for p in self.parameters() if p.grad is not None]
        self.squares.append(sum(float((gradient**2).sum()) for gradient in gradients))

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
        if self.trainer.fit_loop._should_accumulate() is False:
            self.add_squares()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.sample("optimizer_step")
        self.add_squares()

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
    return {"sampled": module.sampled, "squares": module.squares, "weights": weights(module)}


@pytest.mark.parametrize(
    ("strategy", "world"), [(DDP, 2), (FSDP, 2), (KEEPS_WHOLE, 2), (FSDP_TP, 4), (PIPELINE, 2), (FSDP_PIPELINE, 4)],
    ids=["ddp", "fsdp", "zero-1", "fsdp-tp", "pp", "fsdp-pp"],
)  # fmt: skip
def test_sampling_in_hooks(pool: WorkerPool, strategy: Spec, world: int) -> None:
    [expected] = pool.run_once(sample_in_hooks, None, world=1)
    assert {*expected["sampled"]} >= {"start", "backward", "optimizer_step", "batch_end", "epoch_end", "fit_end"}
    ranks = pool.run(sample_in_hooks, strategy, world=world)
    squares = [seen["squares"] for seen in ranks]
    if strategy in (PIPELINE, FSDP_PIPELINE):  # each stage has its own: the first half of the ranks, and the second
        squares = [np.add(squares[0], squares[world // 2])]
    for seen_squares in squares:
        np.testing.assert_allclose(seen_squares, expected["squares"], rtol=1e-4)
    for rank, seen in enumerate(ranks):
        for where, samples in expected["sampled"].items():
            assert len(seen["sampled"][where]) == len(samples), where
            for time, (one, other) in enumerate(zip(seen["sampled"][where], samples, strict=True)):
                assert np.abs(one - other).max() < 1e-4, f"{where} {time} on rank {rank}"
        own = {name: expected["weights"][name] for name in seen["weights"]}
        assert largest_difference(seen["weights"], own) < 1e-5
    assert np.abs(expected["sampled"]["batch_end"][-1] - expected["sampled"]["start"][0]).max() > 0.1
