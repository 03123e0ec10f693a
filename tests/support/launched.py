"""A script as users start it: `python launched.py FOLDER`, `torchrun launched.py FOLDER`, … Not run by the pool.

Each rank writes `FOLDER/rank-N.json` when it is done. To try a death, `--fail` names how, `--rank` who and `--when`
in what: `setup` (no step yet), `step` (the second training step, in which peers wait in a collective) or `apart`
(the same, while peers sleep: they stand for a collective that never returns, as on an accelerator).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import HybridParallel


class OneLayer(LightningModule):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.arguments = arguments

    def setup(self, stage: str) -> None:
        (self.arguments.folder / f"pid-{self.global_rank}").write_text(str(os.getpid()))
        self.fail_in("setup")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.fail_in("step")
        return self.layer(batch[0]).square().mean()

    def fail_in(self, place: str) -> None:
        when = self.arguments.when
        if self.arguments.fail is None or (place == "setup") != (when == "setup"):
            return
        if self.arguments.rank != self.global_rank:
            if when == "apart":
                time.sleep(300)
            return
        if place == "step":
            time.sleep(0.5)  # the others are in their collective by now
        (self.arguments.folder / "failed").write_text(str(time.time()))
        match self.arguments.fail:
            case "raise":
                raise RuntimeError(f"rank {self.global_rank} had enough")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--fail", choices=["raise", "kill"])
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--when", choices=["setup", "step", "apart"], default="step")
    parser.add_argument("--save-on-exception", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        num_nodes=arguments.nodes,
        strategy=HybridParallel(),
        max_steps=4,
        logger=False,
        enable_checkpointing=arguments.save_on_exception,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OnExceptionCheckpoint(arguments.folder)] if arguments.save_on_exception else [],
    )
    trainer.fit(OneLayer(arguments))
    seen = {
        "world": trainer.world_size,
        "node": trainer.node_rank,
        "local": trainer.local_rank,
        "steps": trainer.global_step,
        "mesh": trainer.strategy.mesh_sizes,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "launcher": type(trainer.strategy.launcher).__name__,
        "weights": trainer.lightning_module.layer.weight.full_tensor().flatten().tolist(),
    }
    (arguments.folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
