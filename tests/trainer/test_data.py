"""Which samples each rank sees under the Trainer: training, evaluation, prediction, and data without a length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_parallel.errors import ParallelConfigError
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.trainer.common import make_trainer, rank

PLAN = {"layer": "colwise", "out": "rowwise"}
DDP_TP: Spec = ("HybridParallel", {"ddp": 2, "fsdp": 1, "tp": 2, "plan": PLAN})
FSDP_TP: Spec = ("HybridParallel", {"fsdp": 2, "tp": 2, "plan": PLAN})
DDP_CP: Spec = ("HybridParallel", {"ddp": 2, "fsdp": 1, "cp": 2, "plan": {"layer": "block"}})
on_both = pytest.mark.parametrize("strategy", [DDP_TP, FSDP_TP, DDP_CP], ids=["ddp-tp", "fsdp-tp", "ddp-cp"])


class Sees(LightningModule):
    """Notes the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: dict[str, list[list[int]]] = {}

    def step(self, batch: Tensor, stage: str) -> Tensor:
        self.seen.setdefault(stage, []).append(batch.tolist())
        return self.out(self.layer(batch.float().unsqueeze(1).expand(-1, 4) / 100)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(batch, f"train{self.current_epoch}")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(batch, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(batch, "test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.step(batch, "predict")
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def numbers(count: int, batch: int = 2, **options: Any) -> DataLoader[int]:
    return DataLoader(range(count), batch_size=batch, **options)  # type: ignore[arg-type]


def see_all_stages(strategy: Spec, drop_last: bool) -> dict[str, Any]:
    module = Sees()
    trainer = make_trainer(strategy, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, numbers(12, shuffle=True), numbers(7, drop_last=drop_last))
    lengths = [len(trainer.train_dataloader), trainer.num_training_batches, *trainer.num_val_batches]
    trainer.test(module, numbers(7, drop_last=drop_last), verbose=False)
    predicted = trainer.predict(module, numbers(7, drop_last=drop_last))
    assert predicted is not None
    return {**module.seen, "lengths": lengths, "predicted": torch.cat(predicted).tolist()}  # type: ignore[arg-type]


@on_both
@pytest.mark.parametrize("drop_last", [False, True])
def test_who_sees_what(pool: WorkerPool, strategy: Spec, drop_last: bool) -> None:
    # accelerate#3092, Lightning#5060.
    seen = pool.run(see_all_stages, strategy, drop_last)
    assert seen[0] == seen[1]  # peers
    assert seen[2] == seen[3]
    zero, one = seen[0], seen[2]
    for epoch in ("train0", "train1"):
        assert sorted(itertools.chain(*zero[epoch], *one[epoch])) == list(range(12))
    assert zero["train0"] != zero["train1"]  # set_epoch
    evaluated = ([[0, 2], [4, 6]], [[1, 3], [5]]) if not drop_last else ([[0, 2]], [[1, 3]])
    for stage, repeats in (("val", 2), ("test", 1)):
        assert (zero[stage], one[stage]) == (evaluated[0] * repeats, evaluated[1] * repeats)
    assert zero["lengths"] == one["lengths"] == [3, 3, len(evaluated[0])]
    together = zero["predicted"] + one["predicted"]
    # Lightning predicts every sample, whatever drop_last says.
    assert together == list(range(7))


class Stream(IterableDataset[int]):
    """Splits itself by what the Trainer says, or not at all."""

    def __init__(self, count: int, module: Sees, is_split: bool) -> None:
        self.count, self.module, self.is_split = count, module, is_split

    def __iter__(self) -> Iterator[int]:
        assert get_worker_info() is None
        shares = self.module.trainer.distributed_sampler_kwargs
        assert shares is not None
        start, step = (shares["rank"], shares["num_replicas"]) if self.is_split else (0, 1)
        return iter(range(start, self.count, step))


def fit_stream(strategy: Spec, count: int, is_split: bool) -> Any:
    module = Sees()
    loader = DataLoader(Stream(count, module, is_split), batch_size=2)
    try:
        make_trainer(strategy).fit(module, loader)
    except ParallelConfigError as error:
        return str(error)
    return module.seen["train0"]


@on_both
def test_streams(pool: WorkerPool, strategy: Spec) -> None:
    even, odd = [[0, 2], [4, 6]], [[1, 3], [5, 7]]
    assert pool.run(fit_stream, strategy, 8, True) == [even, even, odd, odd]
    for message in pool.run(fit_stream, strategy, 8, False):
        assert "see the same samples" in message
    for message in pool.run(fit_stream, strategy, 5, True):
        assert "ended after" in message


def validate_unequal(strategy: Spec, during_fit: bool) -> str:
    module = Sees()
    trainer = make_trainer(strategy, use_distributed_sampler=False, num_sanity_val_steps=0)
    mine = range(8 if rank() < 2 else 6)
    loader = numbers(8, sampler=mine)
    try:
        if during_fit:
            trainer.fit(module, numbers(4, sampler=range(4)), loader)
        else:
            trainer.validate(module, loader, verbose=False)
    except ParallelConfigError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("during_fit", [False, True])
def test_one_validation_batch_fewer_ends_every_rank(pool: WorkerPool, during_fit: bool) -> None:
    # Lightning#20561.
    for message in pool.run(validate_unequal, FSDP_TP, during_fit, timeout=60):
        assert "4 batches on ranks 0, 1; 3 batches on ranks 2, 3" in message
