"""What is logged and measured counts each sample once, on any mesh, and equals one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.support.models import VOCAB, NanoGPT
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, describe
from tests.trainer.common import DDP_TP, FSDP, FSDP_CP, FSDP_TP, Data, MemoryLogger, make_trainer, seed


class Measured(NanoGPT):
    """Logs in every way there is; weights do not move, so that every number is a sum over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.samples, self.accuracy = SumMetric(), MulticlassAccuracy(VOCAB, average="micro")
        self.trained = SumMetric(dist_sync_on_step=True)  # else a step's value is the rank's own
        self.several = MetricCollection({"tokens": SumMetric()})
        self.gathered: list[list[int]] = []
        self.shapes: list[list[int]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.logits(x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("train_count", float(len(x)), reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        self.log("train_most", x.max().float(), reduce_fx="max", sync_dist=True, on_step=False, on_epoch=True)
        self.trained(len(x))
        self.log("train_samples", self.trained, on_step=True, on_epoch=True)
        return loss

    def evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        x, y = batch
        logits = self.logits(x)
        self.log(f"{stage}_loss", torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()), sync_dist=True)
        self.log(f"{stage}_count", float(len(x)), reduce_fx="sum", sync_dist=True)
        self.samples.update(len(x))
        self.accuracy.update(logits.flatten(0, 1), y.flatten())
        self.several.update(x.numel())
        self.log(f"{stage}_samples", self.samples)
        self.log(f"{stage}_accuracy", self.accuracy)
        self.log_dict({f"{stage}_{name}": metric for name, metric in self.several.items(keep_base=True)})
        gathered = self.all_gather(torch.tensor(len(x)))
        self.gathered.append(gathered.flatten().tolist())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def measure(strategy: Spec | None) -> dict[str, Any]:
    seed()
    module, logger = Measured(), MemoryLogger()
    trainer = make_trainer(strategy, logger=logger, num_sanity_val_steps=0, max_epochs=2)
    trainer.fit(module, datamodule=Data())
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    [validated] = trainer.validate(module, datamodule=Data(), verbose=False)
    [tested] = trainer.test(module, datamodule=Data(), verbose=False)
    predictions = trainer.predict(module, datamodule=Data())
    assert predictions is not None
    data = trainer.distributed_sampler_kwargs or {"rank": 0}
    return {
        "fit": fitted, "validate": validated, "test": tested, "logged": logger.seen, "gathered": module.gathered,
        "predictions": torch.cat(predictions).numpy(), "data_rank": data["rank"],  # type: ignore[arg-type]
    }  # fmt: skip


@pytest.mark.parametrize(("strategy", "world"), [(FSDP, 2), (DDP_TP, 4), (FSDP_TP, 4), (FSDP_CP, 4)], ids=describe)
def test_each_sample_counts_once(pool: WorkerPool, strategy: Spec, world: int) -> None:
    # trl#7100, Lightning#5060, #5257: 24 samples of training, 7 of evaluation, 8 tokens each.
    [expected] = pool.run_once(measure, None, world=1)
    assert expected["fit"]["train_samples_epoch"] == expected["fit"]["train_count"] == 24
    assert expected["test"]["test_samples"] == expected["test"]["test_count"] == 7
    assert expected["test"]["test_tokens"] == 7 * 8

    seen = pool.run(measure, strategy, world=world)
    for rank, of_rank in enumerate(seen):
        for moment in ("fit", "validate", "test"):
            assert of_rank[moment] == pytest.approx(expected[moment], rel=1e-5), f"{moment} on rank {rank}"
        assert of_rank["gathered"][:2] == [[2, 2], [2, 1]]  # of the data ranks, not of the world
    logged = {name: values for name, values in seen[0]["logged"].items() if name != "epoch"}
    for name, values in logged.items():
        assert values == pytest.approx(expected["logged"][name], rel=1e-5), name
    assert logged["train_samples_step"] == [8.0] * 6
    by_data_rank = {of_rank["data_rank"]: of_rank["predictions"] for of_rank in seen}
    together = torch.cat([torch.from_numpy(by_data_rank[rank]) for rank in sorted(by_data_rank)])
    assert together.shape == (7, 8, VOCAB)
    assert torch.allclose(together, torch.from_numpy(expected["predictions"]), atol=1e-5)
