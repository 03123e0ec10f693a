"""What the tests of this folder share: a quiet Trainer on one device or on a mesh, the data, and a logger."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Generator
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.models import NANOGPT_PLAN, walk_tokens
from tests.support.specs import Spec, build_strategy
from tests.support.training import Arrays, GlobalBatchSampler, full_array

DDP: Spec = ("DataParallel", {})
FSDP: Spec = ("FullyShardedDataParallel", {})
TP: Spec = ("TensorParallel", {"plan": dict(NANOGPT_PLAN)})
DDP_TP: Spec = ("HybridParallel", {"ddp": 2, "fsdp": 1, "tp": 2, "plan": dict(NANOGPT_PLAN)})
CP: Spec = ("ContextParallel", {})
FSDP_CP: Spec = ("HybridParallel", {"fsdp": 2, "cp": 2})
FSDP_TP: Spec = ("HybridParallel", {"fsdp": 2, "tp": 2, "plan": dict(NANOGPT_PLAN)})


def one_file(spec: Spec) -> Spec:
    """The strategy, saving one whole file."""
    assert isinstance(spec, tuple)
    return spec[0], {**spec[1], "save_distributed_checkpoint": False}


class MemoryLogger(Logger):
    """Keeps every scalar that is logged on rank 0: name to values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[float]] = {}

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.seen.setdefault(name, []).append(float(value))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def make_trainer(strategy: Spec | None, *callbacks: Callback, **options: Any) -> Trainer:
    """On the ranks of this pool call; without a strategy, one device."""
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy="auto" if strategy is None else build_strategy(strategy),
        callbacks=list(callbacks),
        **{**defaults, **options},
    )


def weights(module: LightningModule) -> Arrays:
    """Whole parameters by name, of a pipeline those of this rank's stages. A collective."""
    return {name: full_array(parameter) for name, parameter in module.named_parameters() if not parameter.is_meta}


def largest_difference(left: Arrays, right: Arrays) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


class GlobalBatchesInOrder(DistributedSampler[int]):
    """Deals each global batch of training in order. Of a type that Lightning leaves alone."""

    def __init__(self, count: int, batch: int, shares: Mapping[str, int]) -> None:
        super().__init__(range(count), **shares, shuffle=False)  # type: ignore[arg-type]
        self._indices = [*GlobalBatchSampler(count, batch, **shares)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)


class Data(LightningDataModule):
    """Training in the same global batches on every mesh; other samples as Lightning's injected sampler deals them."""

    def __init__(self, *, train: int = 24, batch: int = 8, val: int = 7, seq: int = 8) -> None:
        super().__init__()
        make = partial(walk_tokens, seq=seq)
        self.train = TensorDataset(*make(train, generator=Generator().manual_seed(3)))
        self.val = TensorDataset(*make(val, generator=Generator().manual_seed(4)))
        self.batch = batch

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        shares = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = GlobalBatchesInOrder(len(self.train), self.batch, shares)
        return DataLoader(self.train, batch_size=self.batch // shares["num_replicas"], sampler=sampler)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=2)

    def test_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=2)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=2)


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def seed() -> None:
    torch.manual_seed(1234)
