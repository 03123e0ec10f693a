"""A run goes on from a checkpoint on any mesh, and on one device, as if it had not stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import LLAMA_PLAN, HandLlama, OptimizerOptions, walk_tokens
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, build_strategy
from tests.support.training import GlobalBatchSampler, Recorder, full_array

BATCH, STEPS_PER_EPOCH = 8, 3


class Resumable(HandLlama):
    """Two epochs of the same batches in a fixed order; hyperparameters are saved."""

    def __init__(self, momentum: float = 0.0, name: str = "adamw") -> None:
        super().__init__(layers=2, optimizer=OptimizerOptions(name=name, momentum=momentum, step_lr=2))
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        data = TensorDataset(*walk_tokens(BATCH * STEPS_PER_EPOCH, 16, torch.Generator().manual_seed(3)))
        shares = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = GlobalBatchSampler(len(data), BATCH, **shares)
        return DataLoader(data, batch_size=BATCH // shares["num_replicas"], sampler=sampler)


def fit(strategy: Spec | None, folder: str, epochs: int, resume: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train to ``epochs``, from ``resume`` if given; a checkpoint an epoch goes to ``folder``."""
    torch.manual_seed(0)
    module = Resumable(**options)
    recorder = Recorder(record_clipped=False)
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy=build_strategy(strategy) if strategy else "auto",
        max_epochs=epochs,
        callbacks=[saver, recorder],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=resume)
    return {
        "losses": recorder.record.losses,
        "weights": recorder.record.final,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "moments": _moments(trainer, module),
        "keys": sorted(module.state_dict()),
    }


def _moments(trainer: Trainer, module: LightningModule) -> dict[str, np.ndarray]:
    names = {id(p): name for name, p in module.named_parameters()}
    state = trainer.optimizers[0].state
    return {
        f"{names[id(p)]}.{key}": full_array(value)
        for p, values in state.items()
        for key, value in values.items()
        if torch.is_tensor(value)
    }


def spec(full: bool, **mesh: int) -> Spec:
    options: dict[str, Any] = {"plan": dict(LLAMA_PLAN)} if mesh.get("tp", 1) > 1 else {}
    return ("HybridParallel", {**mesh, **options, "save_distributed_checkpoint": not full})


def assert_goes_on(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    """The second epoch of a resumed run is that of the uninterrupted one."""
    np.testing.assert_allclose(resumed["losses"], whole["losses"][STEPS_PER_EPOCH:], atol=2e-6)
    assert (resumed["step"], resumed["epoch"], resumed["lr"]) == (whole["step"], whole["epoch"], whole["lr"])
    assert resumed["weights"].keys() == whole["weights"].keys()
    for name, value in whole["weights"].items():
        np.testing.assert_allclose(resumed["weights"][name], value, atol=1e-5, err_msg=name)
    assert resumed["moments"].keys() == whole["moments"].keys()
    for name, value in whole["moments"].items():
        np.testing.assert_allclose(resumed["moments"][name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("full", [False, True], ids=["folder", "file"])
def test_resume_on_other_meshes(pool: WorkerPool, tmp_path: Path, full: bool) -> None:
    whole = pool.run(fit, None, str(tmp_path / "one"), 2, None, {}, world=1)[0]
    first = pool.run(fit, spec(full, fsdp=2, tp=2), str(tmp_path / "first"), 1, None, {}, world=4)[0]
    np.testing.assert_allclose(first["losses"], whole["losses"][:STEPS_PER_EPOCH], atol=2e-6)
    saved = tmp_path / "first" / "epoch=0.ckpt"
    assert saved.is_dir() is not full
    for mesh in ({"fsdp": 4}, {"fsdp": 1, "tp": 4}, {"ddp": 2, "fsdp": 1, "tp": 2}, {"ddp": 2, "fsdp": 2}):
        for resumed in pool.run(fit, spec(full, **mesh), str(tmp_path / str(mesh)), 2, str(saved), {}, world=4):
            assert_goes_on(resumed, whole)
    if not full:
        command = [sys.executable, "-m", "lightning_parallel", "consolidate", str(saved), str(tmp_path / "one.ckpt")]
        subprocess.run(command, check=True)
        saved = tmp_path / "one.ckpt"
    assert_goes_on(pool.run(fit, None, str(tmp_path / "back"), 2, str(saved), {}, world=1)[0], whole)
    # TRAPS 71, 31, 67: the file is an ordinary Lightning checkpoint with the plain module's keys.
    loaded = Resumable.load_from_checkpoint(saved, weights_only=False)
    assert loaded.hparams["name"] == "adamw"
    assert sorted(torch.load(saved, weights_only=False)["state_dict"]) == whole["keys"]


def test_a_one_device_file_resumes_on_a_mesh(pool: WorkerPool, tmp_path: Path) -> None:
    options = {"name": "sgd"}  # without momentum there is no state to restore
    whole = pool.run(fit, None, str(tmp_path / "one"), 2, None, options, world=1)[0]
    saved = str(tmp_path / "one" / "epoch=0.ckpt")
    for resumed in pool.run(fit, spec(False, fsdp=2, tp=2), str(tmp_path / "mesh"), 2, saved, options, world=4):
        assert_goes_on(resumed, whole)


def test_other_weights_are_noticed(pool: WorkerPool, tmp_path: Path) -> None:
    """The proof that these tests can fail: a run that does not resume."""
    whole = pool.run(fit, None, str(tmp_path / "one"), 2, None, {}, world=1)[0]
    fresh = pool.run(fit, spec(False, fsdp=2), str(tmp_path / "two"), 1, None, {}, world=2)[0]
    with pytest.raises(AssertionError):
        assert_goes_on(fresh, whole)
