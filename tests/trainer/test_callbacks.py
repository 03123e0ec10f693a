"""Lightning's callbacks decide alike on every rank, and as on one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
)
from torch import Tensor

from tests.support.models import NanoGPT, OptimizerOptions
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, describe
from tests.trainer.common import (
    DDP,
    FSDP,
    FSDP_TP,
    TP,
    Data,
    MemoryLogger,
    largest_difference,
    make_trainer,
    one_file,
    seed,
    weights,
)

# Validation loss of the epochs; the decisions on it are spelled out in the tests.
LOSSES = (5.0, 3.0, 4.0, 2.0, 2.5, 2.6, 2.7, 1.0)


class Scripted(NanoGPT):
    """Trains as usual; the validation loss that the data ranks average is given."""

    def __init__(self) -> None:
        super().__init__(layers=4)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.loss(batch)
        # Ranks differ, as they do with their own samples: only the mean over them is the number above.
        data = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        offset = 10.0 * (data["rank"] - (data["num_replicas"] - 1) / 2)
        self.log("val_loss", LOSSES[self.current_epoch] + offset, sync_dist=True, batch_size=1)


def stop_and_save(strategy: Spec | None, folder: str) -> dict[str, Any]:
    seed()
    stopping = EarlyStopping("val_loss", patience=2)
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, filename="{epoch}", save_last=True)
    rates, logger = LearningRateMonitor(), MemoryLogger()
    trainer = make_trainer(
        strategy, stopping, best, rates, max_epochs=8, logger=logger, enable_checkpointing=True, num_sanity_val_steps=0
    )
    trainer.fit(Scripted(), datamodule=Data(train=8, val=8))
    return {
        "stopped": stopping.stopped_epoch,
        "epochs": trainer.current_epoch,
        "best": os.path.basename(best.best_model_path),
        "kept": sorted(os.path.basename(path) for path in best.best_k_models),
        "score": float(best.best_model_score),
        "files": sorted(os.listdir(folder)),
        "folders": [os.path.isdir(os.path.join(folder, name)) for name in sorted(os.listdir(folder))],
        "rates": logger.seen.get("lr-AdamW"),
    }


@pytest.mark.parametrize(
    ("strategy", "world"), [(DDP, 2), (one_file(FSDP), 2), (FSDP_TP, 4)], ids=["ddp", "fsdp-file", "fsdp-tp"]
)
def test_early_stopping_and_top_k(pool: WorkerPool, tmp_path: Path, strategy: Spec, world: int) -> None:
    seen = pool.run(stop_and_save, strategy, str(tmp_path / "mesh"), world=world)
    [expected] = pool.run(stop_and_save, None, str(tmp_path / "one"), world=1)
    for rank, of_rank in enumerate(seen):
        assert of_rank["epochs"] == 6
        assert of_rank["stopped"] == 5
        assert of_rank["score"] == pytest.approx(2.0)
        assert of_rank["best"] == "epoch=3.ckpt"
        assert of_rank["kept"] == ["epoch=3.ckpt", "epoch=4.ckpt"]
        assert of_rank["files"] == ["epoch=3.ckpt", "epoch=4.ckpt", "last.ckpt"]
        assert of_rank["folders"] == [describe(strategy).find("save_distributed_checkpoint=False") < 0] * 3
        assert rank or of_rank["rates"] == expected["rates"]
    assert len(set(expected["rates"])) > 1


class WithRate(NanoGPT):
    def __init__(self) -> None:
        super().__init__(optimizer=OptimizerOptions(step_lr=None))
        self.lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Finder(LearningRateFinder):
    """Remembers the weights before and after."""

    def lr_find(self, trainer: Any, pl_module: Any) -> None:
        before = weights(pl_module)
        super().lr_find(trainer, pl_module)
        self.moved = largest_difference(before, weights(pl_module))


def find_rate(strategy: Spec | None, folder: str) -> dict[str, Any]:
    seed()
    module = WithRate()
    finder = Finder(min_lr=1e-4, max_lr=10.0, num_training_steps=20, early_stop_threshold=None)
    trainer = make_trainer(strategy, finder, max_epochs=2, default_root_dir=folder, limit_val_batches=0)
    trainer.fit(module, datamodule=Data(train=80))
    return {
        "lr": module.lr,
        "losses": finder.optimal_lr.results["loss"],
        "moved": finder.moved,
        "steps": trainer.global_step,
        "left": os.listdir(folder),
        "weights": weights(module),
    }


@pytest.mark.parametrize(("strategy", "world"), [(FSDP, 2), (one_file(TP), 2)], ids=["fsdp", "tp-file"])
def test_learning_rate_finder(pool: WorkerPool, tmp_path: Path, strategy: tuple[str, Any], world: int) -> None:
    seen = pool.run(find_rate, strategy, str(tmp_path), world=world)
    [expected] = pool.run(find_rate, None, str(tmp_path), world=1)
    assert len(expected["losses"]) == 20
    for of_rank in seen:
        assert of_rank["moved"] == 0.0
        assert of_rank["lr"] == seen[0]["lr"] != 1e-2
        assert of_rank["losses"] == seen[0]["losses"]
        assert of_rank["steps"] == expected["steps"]
        assert of_rank["left"] == []
        if strategy[0] == "TensorParallel":  # Lightning looks at the loss of rank 0: here that of all samples
            assert of_rank["lr"] == pytest.approx(expected["lr"])
            assert of_rank["losses"] == pytest.approx(expected["losses"], rel=1e-4)
            assert largest_difference(of_rank["weights"], expected["weights"]) < 1e-4


class Summary(ModelSummary):
    """Keeps what it would print."""

    seen: dict[str, Any] | None = None

    def summarize(self, summary_data: Any, total_parameters: int, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.seen = {"total": total_parameters, "trainable": args[0], "rows": dict(summary_data)}


def summarise(strategy: Spec | None) -> dict[str, Any] | None:
    seed()
    module, summary = NanoGPT(), Summary(max_depth=3)
    module.model.wpe.requires_grad_(False)
    trainer = make_trainer(strategy, summary, max_steps=1, limit_val_batches=0)
    trainer.fit(module, datamodule=Data())
    return summary.seen


@pytest.mark.parametrize(("strategy", "world"), [(FSDP, 2), (TP, 2), (FSDP_TP, 4)], ids=describe)
def test_summary_counts_each_weight_once(pool: WorkerPool, strategy: Spec, world: int) -> None:
    # Lightning#20151.
    [expected] = pool.run_once(summarise, None, world=1)
    seen = pool.run(summarise, strategy, world=world)
    assert seen[0] is not None
    types = seen[0]["rows"]["Type"]
    types[:] = [name.removeprefix("FSDP") for name in types]  # fully_shard puts a class of its own in front
    assert seen[0] == expected
    module = NanoGPT()  # embedding and head are one weight
    assert expected["total"] == sum(parameter.numel() for parameter in module.parameters())
    assert seen[1:] == [None] * (world - 1)  # one rank speaks
