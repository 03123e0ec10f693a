"""What a pipeline cannot do: one error, the same on every rank, that says why and what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_parallel import ParallelConfigError, PlanError
from tests.support.failures import RankError
from tests.support.models import Classifier, NanoGPT
from tests.support.parity import assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.trainer.models import ByHand, TwoOptimizers
from tests.trainer.test_bad_input import assert_refused, fit


def pipeline(**options: Any) -> Spec:
    return ("PipelineParallel", options)


class OneLayer(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(16, 10)


class TwoAutomatic(NanoGPT):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.model.h[i].parameters(), lr=0.1) for i in range(2)]


class ReturnsNothing(NanoGPT):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)


class LogsAStranger(NanoGPT):
    """A metric that no attribute holds."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        stranger = MeanMetric()
        stranger.update(loss)
        self.log("stranger", stranger, metric_attribute="stranger")
        return loss


class ReadsAValue(NanoGPT):
    def logits(self, x: Tensor) -> Tensor:
        hidden = self.model.wte(x)
        assert hidden.abs().max() < 100
        return super().logits(x)


@pytest.mark.parametrize("model", [ByHand, TwoOptimizers])
def test_manual_optimisation(pool: WorkerPool, model: Any) -> None:
    shown = [f"{model.__name__} uses manual optimisation", "Set automatic_optimization = True, or use pp=1"]
    assert_refused(pool, ParallelConfigError, shown, fit, model, pipeline())


def test_several_optimizers(pool: WorkerPool) -> None:
    # By Lightning itself, where optimisation is automatic.
    with pytest.raises(RankError) as caught:
        pool.run(fit, TwoAutomatic, pipeline(), world=2)
    messages = [str(error) for error in caught.value.exceptions.values()]
    assert len(messages) == 2
    assert all("multiple optimizers is only supported with manual optimization" in message for message in messages)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"schedule": "1F1B", "microbatches": 1}, ["does not suit 1F1B on 2 ranks", "Use microbatches=2."]),
        ({"schedule": "1F2B"}, ["schedule='1F2B': unknown. Did you mean '1F1B'?"]),
        ({"schedule": "ZBVZeroBubble"}, ["4 pipeline stages, but NanoGPT has 3 blocks", "Use 1 to 3 stages"]),
        ({"schedule": "none.csv"}, ["schedule='none.csv': the file cannot be read"]),
        ({"boundaries": ["model.h.9"]}, ["model.h.9", "model.h.2"]),
        ({"boundaries": ["model.h.1", "model.h.2"]}, ["2 stages need 1 names"]),
    ],
    ids=["microbatches", "unknown", "stages", "file", "boundary", "boundaries"],
)
def test_sizes(pool: WorkerPool, options: dict[str, Any], shown: list[str]) -> None:
    kind = PlanError if "boundaries" in options else ParallelConfigError
    assert_refused(pool, kind, shown, fit, NanoGPT, pipeline(**options), layers=3)


def test_a_model_without_a_trunk(pool: WorkerPool) -> None:
    assert_refused(pool, PlanError, ["OneLayer has no repeated layers", 'the role "block"'], fit, OneLayer, pipeline())


def test_a_value_that_another_stage_has(pool: WorkerPool) -> None:
    shown = ["computed from model.wte.weight, which another stage holds", "may look at shapes"]
    assert_refused(pool, PlanError, shown, fit, ReadsAValue, pipeline(), layers=4)


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (ReturnsNothing, ["training_step returned NoneType", "it returns the loss, or a dict with it"]),
        (LogsAStranger, ["A metric was logged that is no attribute of", "Assign it in __init__"]),
    ],
)
def test_what_the_last_stage_refuses(pool: WorkerPool, model: Any, shown: list[str]) -> None:
    """It alone runs the step to its end; the others must not be left waiting."""
    assert_refused(pool, ParallelConfigError, shown, fit, model, pipeline())


def test_stages_by_name_and_by_cost(pool: WorkerPool) -> None:
    """What is like the refused options and works."""
    for options in ({"boundaries": ["model.h.2"]}, {"balance": "cost"}):
        assert_same_training(pool, NanoGPT, pipeline(**options), world=2, model_kwargs={"layers": 3})
