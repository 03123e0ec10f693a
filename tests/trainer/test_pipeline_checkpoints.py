"""A checkpoint does not know how many stages wrote it: pp 1 → 2 → 4 → 1, as a folder and as a file, with moments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.models import HandLlama, OptimizerOptions
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, build_strategy
from tests.support.training import GlobalBatches, full_array

STEPS = 2  # an epoch
BATCH = 8


class Tied(HandLlama):
    def __init__(self) -> None:
        super().__init__(layers=4, tied=True, optimizer=OptimizerOptions(name="adamw", step_lr=3))
        self.save_hyperparameters()


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss"]))


def fit(strategy: Spec | None, world: int, folder: str, epochs: int, resume: str | None) -> dict[str, Any]:
    """Train to ``epochs``, from ``resume`` if given; a checkpoint an epoch goes to ``folder``."""
    torch.manual_seed(0)
    module, losses = Tied(), Losses()
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=build_strategy(strategy) if strategy else "auto",
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1), losses],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=GlobalBatches(module, count=STEPS * BATCH, batch=BATCH, seq=16), ckpt_path=resume)
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        "losses": losses.seen,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "step": trainer.global_step,
        "weights": _arrays(module),
        "moments": {
            f"{names[id(p)]}.{key}": full_array(value)
            for p, values in trainer.optimizers[0].state.items()
            for key, value in values.items()
        },
    }


def _arrays(module: LightningModule) -> dict[str, np.ndarray]:
    named = module.named_parameters(remove_duplicate=False)
    return {name: full_array(p) for name, p in named if not p.is_meta}


def assert_goes_on(ranks: Sequence[Mapping[str, Any]], whole: Mapping[str, Any], epoch: int) -> None:
    """The run's epoch is that of the uninterrupted one, on every rank, and the ranks have everything between them."""
    for rank in ranks:
        np.testing.assert_allclose(rank["losses"], whole["losses"][epoch * STEPS : (epoch + 1) * STEPS], atol=2e-6)
        assert rank["step"] == (epoch + 1) * STEPS
    for kind in ("weights", "moments"):
        held = {name for rank in ranks for name in rank[kind]}
        assert held == set(whole[kind]), kind
    if whole["step"] == (epoch + 1) * STEPS:
        for rank in ranks:
            assert rank["lr"] == whole["lr"]
            for kind, allowed in (("weights", 1e-5), ("moments", 1e-6)):
                for name, value in rank[kind].items():
                    np.testing.assert_allclose(value, whole[kind][name], atol=allowed, err_msg=name)


def pipeline(size: int, full: bool, **options: Any) -> Spec:
    return ("PipelineParallel", {"size": size, "microbatches": 4, "save_distributed_checkpoint": not full, **options})


@pytest.mark.parametrize("full", [False, True], ids=["folder", "file"])
def test_other_numbers_of_stages_go_on(pool: WorkerPool, tmp_path: Path, full: bool) -> None:
    """TRAPS 31, 66."""
    (whole,) = pool.run(fit, None, 1, str(tmp_path / "whole"), 5, None, world=1)
    stages = ("PipelineParallel", {"size": 2, "microbatches": 4})
    runs: list[tuple[Spec | None, int]] = [
        (("FullyShardedDataParallel", {"save_distributed_checkpoint": not full}), 2),
        (pipeline(2, full, schedule="ZBVZeroBubble"), 2),
        (pipeline(4, full), 4),
        (("HybridParallel", {"fsdp": 2, "pp": stages, "save_distributed_checkpoint": not full}), 4),
    ]
    saved: str | None = None
    for epoch, (strategy, world) in enumerate(runs):
        folder = tmp_path / str(epoch)
        ranks = pool.run(fit, strategy, world, str(folder), epoch + 1, saved, world=world)
        assert_goes_on(ranks, whole, epoch)
        saved = str(folder / f"epoch={epoch}.ckpt")
        assert Path(saved).is_dir() is not full
    assert saved
    if not full:
        one = tmp_path / "one.ckpt"
        subprocess.run([sys.executable, "-m", "lightning_parallel", "consolidate", saved, str(one)], check=True)
        saved = str(one)
    plain = Tied()
    assert set(torch.load(saved, weights_only=False)["state_dict"]) == set(plain.state_dict())
    assert_goes_on(pool.run(fit, None, 1, str(tmp_path / "back"), 5, saved, world=1), whole, 4)
    loaded = Tied.load_from_checkpoint(saved, weights_only=False)
    assert loaded.model.embed.weight is loaded.model.output.weight
