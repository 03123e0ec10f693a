"""What a step leaves on its LightningModule: a pipeline's stages all have it, as one device would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.strategies.module_state import ModuleState, make_changes
from tests.support.models import NanoGPT
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.support.training import GlobalBatches
from tests.trainer.common import make_trainer, seed


class Stateful(NanoGPT):
    """Keeps what users keep: outputs in a list for the end of the epoch, counters, a running total."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.indices: list[int] = []
        self.losses: list[Tensor] = []
        self.steps = self.samples = 0
        self.total: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.indices.append(batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.samples += len(batch[0])
        self.total = self.total + loss.detach()
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())


def fit(strategy: Spec | None) -> dict[str, Any]:
    seed()
    module = Stateful()
    trainer = make_trainer(strategy, use_distributed_sampler=False)
    trainer.fit(module, datamodule=GlobalBatches(module, count=24, batch=8, seq=12))
    return {
        "counts": (module.steps, module.samples, module.indices, len(module.losses)),
        "numbers": [float(module.total), float(trainer.callback_metrics["mean"]), *map(float, module.losses)],
    }


def test_every_stage_has_it_once_a_step(pool: WorkerPool) -> None:
    (expected,) = pool.run_once(fit, None, world=1)
    assert expected["counts"] == (3, 24, [0, 1, 2], 3)
    for seen in pool.run(fit, ("PipelineParallel", {"microbatches": 4}), world=2):
        assert seen["counts"] == expected["counts"]
        assert seen["numbers"] == pytest.approx(expected["numbers"], abs=1e-5)


def test_changes_are_taken_back_and_made_once() -> None:
    module = nn.Module()
    module.seen, module.calls, module.losses, module.mode = 10, 1, [0.5], "a"  # type: ignore[assignment]
    runs = []
    for size, loss in ((3, 1.0), (1, 5.0)):
        state = ModuleState(module)
        module.seen += size  # type: ignore[operator]
        module.calls += 1  # type: ignore[operator]
        module.losses.append(loss)  # type: ignore[operator]
        module.mode, module.new = "b", torch.tensor(loss)  # type: ignore[assignment]
        runs.append(state.take_back())
        assert (module.seen, module.calls, module.losses, module.mode) == (10, 1, [0.5], "a")
        assert "new" not in vars(module)
    make_changes(module, runs, [3, 1], [0.75, 0.25])
    assert (module.seen, module.calls, module.losses, module.mode) == (14, 2, [0.5, 2.0], "b")
    assert float(module.new) == 2.0  # type: ignore[arg-type]
