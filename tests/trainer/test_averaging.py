"""Averages of the weights equal one device's: as they run, in validation, in checkpoints, and after the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging

from lightning_parallel.errors import ParallelConfigError
from tests.support.models import NanoGPT
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, build
from tests.support.training import Arrays
from tests.trainer.common import (
    DDP,
    FSDP,
    FSDP_TP,
    Data,
    largest_difference,
    make_trainer,
    one_file,
    seed,
    weights,
)


class Watch(Callback):
    """The weights that each validation saw."""

    def __init__(self) -> None:
        self.validated: list[Arrays] = []
        self.losses: list[float] = []

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.validated.append(weights(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:  # of as many batches, so of other samples
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def callbacks(kind: str, folder: str) -> tuple[WeightAveraging, Watch, ModelCheckpoint]:
    average = EMAWeightAveraging(decay=0.7) if kind == "ema" else WeightAveraging()
    return average, Watch(), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)


def fit_averaged(strategy: Spec | None, kind: str, folder: str) -> dict[str, Any]:
    """Two epochs, then the second again from the checkpoint of the first, then a third on the same module."""
    seed()
    module = NanoGPT()
    average, watch, checkpoint = callbacks(kind, folder)
    trainer = make_trainer(strategy, average, watch, checkpoint, max_epochs=2, enable_checkpointing=True)
    trainer.fit(module, datamodule=Data())
    seen = {"second": weights(module), "validated": watch.validated, "losses": watch.losses}

    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=Data())  # the callback copies the module once more, sharded by now
    seen["third"] = weights(module)

    again = NanoGPT()
    average, watch, checkpoint = callbacks(kind, f"{folder}/again")
    trainer = make_trainer(strategy, average, watch, checkpoint, max_epochs=2, enable_checkpointing=True)
    trainer.fit(again, datamodule=Data(), ckpt_path=f"{folder}/epoch=0.ckpt", weights_only=False)
    return {**seen, "resumed": weights(again)}


@pytest.mark.parametrize(
    ("strategy", "world", "kind"),
    [(DDP, 2, "ema"), (FSDP, 2, "equal"), (one_file(FSDP), 2, "ema"), (FSDP_TP, 4, "ema")],
    ids=["ddp", "fsdp", "fsdp-file", "fsdp-tp"],
)
def test_weight_averaging(pool: WorkerPool, tmp_path: Path, strategy: Spec, world: int, kind: str) -> None:
    # Lightning#21414.
    [expected] = pool.run(fit_averaged, None, kind, str(tmp_path / "one"), world=1)
    assert largest_difference(expected["second"], expected["resumed"]) < 1e-6
    assert largest_difference(expected["validated"][0], expected["second"]) > 1e-3, "nothing was trained"
    for seen in pool.run(fit_averaged, strategy, kind, str(tmp_path / "mesh"), world=world):
        for moment in ("second", "resumed", "third"):
            assert largest_difference(seen[moment], expected[moment]) < 1e-5, moment
        assert seen["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert largest_difference(seen["validated"][-1], expected["validated"][-1]) < 1e-5


def refuse(callback: str) -> str:
    options = {"swa_lrs": 1e-2} if callback == "StochasticWeightAveraging" else {"device": "meta"}
    trainer = make_trainer(FSDP, build((callback, options)))
    with pytest.raises(ParallelConfigError) as refused:
        trainer.fit(NanoGPT(), datamodule=Data())
    return str(refused.value)


def test_refusals_name_the_remedy(pool: WorkerPool) -> None:
    for message in pool.run(refuse, "StochasticWeightAveraging", world=2):
        assert "Use lightning.pytorch.callbacks.WeightAveraging" in message
    for message in pool.run(refuse, "WeightAveraging", world=2):
        assert "Leave device=None" in message
