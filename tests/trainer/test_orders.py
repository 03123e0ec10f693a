"""fit, validate, test and predict in any order and repeatedly, saving after each, equal one device doing the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models import NanoGPT
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.trainer.common import (
    CP,
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

OFFLOADED: Spec = ("FullyShardedDataParallel", {"cpu_offload": True})
HSDP: Spec = ("HybridParallel", {"ddp": 2, "fsdp": 2})


class Tested(NanoGPT):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def run_in_order(strategy: Spec | None, order: str, folder: str) -> dict[str, Any]:
    """`order` is a letter a stage: f v t p."""
    seed()
    module, data, seen = Tested(), Data(), []
    trainer = make_trainer(strategy, max_epochs=0, num_sanity_val_steps=0)
    for number, stage in enumerate(order):
        match stage:
            case "f":
                trainer.fit_loop.max_epochs += 1  # type: ignore[operator]
                trainer.fit(module, datamodule=data)
                seen.append(float(trainer.callback_metrics["train_loss"]))
            case "v":
                seen.append(trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"])
            case "t":
                seen.append(trainer.test(module, datamodule=data, verbose=False)[0]["test_loss"])
            case "p":
                trainer.predict(module, datamodule=data)
        trainer.save_checkpoint(f"{folder}/{number}.ckpt")
    final = weights(module)

    # What was saved last is what is there: a fresh module that loads it validates to the same loss.
    torch.manual_seed(99)
    again = Tested()
    trainer = make_trainer(strategy)
    [loaded] = trainer.validate(
        again, datamodule=data, ckpt_path=f"{folder}/{len(order) - 1}.ckpt", verbose=False, weights_only=False
    )
    assert largest_difference(weights(again), final) == 0.0
    return {"seen": seen, "final": final, "loaded": loaded["val_loss"]}


@pytest.mark.parametrize(
    ("strategy", "world", "order"),
    [
        (DDP, 2, "vfvtpf"),
        (FSDP, 2, "vfvtpf"),
        (one_file(FSDP), 2, "pftfv"),
        (OFFLOADED, 2, "tfpf"),
        (HSDP, 4, "pvf"),
        (FSDP_TP, 4, "vftpf"),
        (CP, 2, "vftpf"),
        (one_file(FSDP_TP), 4, "tpf"),
    ],
    ids=["ddp", "fsdp", "fsdp-file", "offloaded", "hsdp", "fsdp-tp", "cp", "fsdp-tp-file"],
)
def test_any_order(pool: WorkerPool, tmp_path: Path, strategy: Spec, world: int, order: str) -> None:
    # Lightning#18971; pytorch#149205: an evaluation first must not leave the optimizer with old parameters.
    [expected] = pool.run(run_in_order, None, order, str(tmp_path / "one"), world=1)
    for rank, seen in enumerate(pool.run(run_in_order, strategy, order, str(tmp_path / "mesh"), world=world)):
        assert seen["seen"] == pytest.approx(expected["seen"], abs=1e-5), f"rank {rank}"
        assert largest_difference(seen["final"], expected["final"]) < 1e-5
        assert seen["loaded"] == pytest.approx(expected["loaded"], abs=1e-5)
    assert np.ptp(expected["seen"]) > 1e-3
