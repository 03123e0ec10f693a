"""The training that parity compares: a few steps under the Trainer, and a record of every number on the way.

All of it runs in a worker. Every rank sees the same global batches, in the same order, on any mesh.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_parallel.schemes.pipeline.ghost import is_ghost
from tests.support.models import walk_tokens
from tests.support.specs import Spec, build, build_strategy

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What to train and how. Without a strategy: one device.

    Attributes:
        batch: Samples in one global batch, over all data ranks.
        steps: Optimizer steps, each of `accumulate` global batches.
        seed: Seeds the global generator before the model is built.
        seed_apart: Rank r seeds with `seed + r` instead, and must still train rank 0's model.
    """

    model: Callable[..., LightningModule]
    strategy: Spec | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 3
    batch: int = 8
    seq: int = 16
    accumulate: int = 1
    clip_val: float | None = None
    clip_algorithm: str = "norm"
    precision: str = "32-true"
    trainer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1234
    seed_apart: bool = False


@dataclass(kw_only=True, slots=True)
class Record:
    """What one rank saw. Tensors are whole, keyed by the name in the LightningModule.

    Attributes:
        losses: `train_loss` as logged, a batch.
        gradients: Before each optimizer step, not yet clipped. Where there are several optimizers, of
            the parameters of the one that steps.
        clipped: After each step, where clipping is on: what the optimizer used.
        initial: Parameters and buffers once the strategy has set the module up.
        final: The same after the last step.
        absent: Parameters and buffers that another pipeline stage holds.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Arrays] = field(default_factory=list)
    clipped: list[Arrays] = field(default_factory=list)
    initial: Arrays = field(default_factory=dict)
    final: Arrays = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)


class Recorder(Callback):
    """Records a fit.

    Args:
        ties: Name to the first name of the same parameter, before the fit.
    """

    def __init__(self, *, record_clipped: bool, ties: Mapping[str, str] | None = None) -> None:
        self.record = Record()
        self._ties = ties or {}
        self._record_clipped = record_clipped
        self._has_stepped = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.initial = self._state(pl_module)
        named = [*pl_module.named_parameters(), *pl_module.named_buffers()]
        self.record.absent = {name for name, tensor in named if is_ghost(tensor)} - {*self.record.initial}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        only = None if len(trainer.optimizers) == 1 else {id(p) for g in optimizer.param_groups for p in g["params"]}
        self.record.gradients.append(self._gradients(pl_module, only))
        self._has_stepped = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.record.losses.append(float(trainer.callback_metrics["train_loss"]))
        if self._has_stepped and self._record_clipped:
            self.record.clipped.append(self._gradients(pl_module, None))  # still there: zeroed by the next closure
        self._has_stepped = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.final = self._state(pl_module)

    def _parameters(self, module: LightningModule) -> list[tuple[str, nn.Parameter]]:
        """What this rank holds. A tie between stages has the name of a parameter that is on another one."""
        ghosts = {name for name, p in module.named_parameters() if is_ghost(p)}
        return [
            (self._ties[name] if self._ties.get(name) in ghosts else name, p)
            for name, p in module.named_parameters()
            if name not in ghosts
        ]

    def _state(self, module: LightningModule) -> Arrays:
        buffers = [(name, buffer) for name, buffer in module.named_buffers() if not is_ghost(buffer)]
        return _full_arrays([*self._parameters(module), *buffers])

    def _gradients(self, module: LightningModule, only: set[int] | None) -> Arrays:
        wanted = [(name, p.grad) for name, p in self._parameters(module) if only is None or id(p) in only]
        return _full_arrays((name, gradient) for name, gradient in wanted if gradient is not None)


class GlobalBatchSampler(Sampler[int]):
    """The slice of each global batch that belongs to one data rank, batches in order."""

    def __init__(self, count: int, batch: int, *, num_replicas: int, rank: int) -> None:
        if batch % num_replicas:
            raise ValueError(f"a global batch of {batch} does not divide over {num_replicas} data ranks")
        self._count, self._batch, self._share, self._rank = count, batch, batch // num_replicas, rank

    def __len__(self) -> int:
        return self._count // self._batch * self._share

    def __iter__(self) -> Iterator[int]:
        for start in range(self._rank * self._share, self._count, self._batch):
            yield from range(start, start + self._share)


class GlobalBatches(LightningDataModule):
    """The module's own samples (or tokens below `VOCAB`), as global batches of a fixed order."""

    def __init__(self, module: LightningModule, *, count: int, batch: int, seq: int, seed: int = 7) -> None:
        super().__init__()
        make = getattr(module, "make_samples", walk_tokens)
        self._data = TensorDataset(*make(count, seq, Generator().manual_seed(seed)))
        self._batch = batch

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        shares = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = GlobalBatchSampler(len(self._data), self._batch, **shares)
        return DataLoader(self._data, batch_size=self._batch // shares["num_replicas"], sampler=sampler)


def train(training: Training) -> Record:
    """Fit, and return what this rank saw. Runs on every rank."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(training.seed + (rank if training.seed_apart else 0))
    module = training.model(**training.model_kwargs)
    count = training.batch * training.steps * training.accumulate
    recorder = Recorder(ties=first_names(module), record_clipped=training.clip_val is not None)
    options = {key: build(value) for key, value in training.trainer_kwargs.items()}
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy="auto" if training.strategy is None else build_strategy(training.strategy),
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip_val,
        gradient_clip_algorithm=training.clip_algorithm if training.clip_val is not None else None,
        precision=training.precision,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*options.pop("callbacks", []), recorder],
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, datamodule=GlobalBatches(module, count=count, batch=training.batch, seq=training.seq))
    return recorder.record


def full_array(tensor: Tensor) -> np.ndarray:
    """The whole tensor as a copy, the same on every rank; 16-bit floats widened, which keeps their values."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if tensor.is_floating_point() and tensor.element_size() < 4:
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy(), copy=True)


def first_names(module: nn.Module) -> dict[str, str]:
    """Name of each parameter to the first name that it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}


def _full_arrays(named: Iterable[tuple[str, Tensor]]) -> Arrays:
    return {name: full_array(tensor) for name, tensor in named}
