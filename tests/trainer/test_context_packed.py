"""Packed sequences over context ranks: documents that the batch tells are spread each by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.schemes.context import pieces
from lightning_parallel.schemes.context.layout import Layout
from tests.support.models import HuggingFaceLM, NanoGPT
from tests.support.parity import Tolerance, assert_same_training, compare
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.support.training import Record, Training, train

DOCUMENTS = (13, 9, 2, 21)  # of 45 tokens
METHODS = ("ring", "allgather", "ulysses")


class PackedBatches:
    """Batches as mappings with positions that begin anew. Asserts that rows lie by document."""

    trainer: Any

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> dict[str, Tensor]:
        x, y = batch
        positions = torch.cat([torch.arange(count) for count in DOCUMENTS])
        return {"input_ids": x, "labels": y, "position_ids": positions.expand(len(x), -1).contiguous()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)  # type: ignore[attr-defined]
        self.log("train_loss", loss, sync_dist=True)  # type: ignore[attr-defined]
        strategy = self.trainer.strategy
        if hasattr(strategy, "sequence_positions"):
            axis = strategy._axis()
            layout = Layout(sum(DOCUMENTS), axis.size, True, DOCUMENTS)
            own = strategy.sequence_positions(layout.length)[: layout.num_valid(axis.rank)]
            assert own.equal(layout.positions(axis.rank)[: layout.num_valid(axis.rank)])
        return loss


class PackedLlama(PackedBatches, HuggingFaceLM):
    """Attends within documents: Hugging Face makes the mask of the positions."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


class PackedGPT(PackedBatches, NanoGPT):
    """Attends to earlier documents too: nothing has to be so as positions tell."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [PackedLlama, PackedGPT])
def test_packed_documents(pool: WorkerPool, model: Any, method: str) -> None:
    assert_same_training(pool, model, ("ContextParallel", {"method": method}), world=2, seq=sum(DOCUMENTS))


@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 2, "cp": 2},
        {"fsdp": 1, "cp": 2, "pp": ("PipelineParallel", {"size": 2, "microbatches": 2})},
        {"fsdp": 1, "cp": 4},
    ],
    ids=str,
)
def test_packed_documents_in_meshes(pool: WorkerPool, mesh: dict[str, Any]) -> None:
    strategy: Spec = ("HybridParallel", mesh)
    assert_same_training(pool, PackedLlama, strategy, world=4, seq=sum(DOCUMENTS), seed_apart=True)


CANDIDATES = pieces._candidates


def forget_other_ranks(layout: Layout, rank: int, source: int, **options: Any) -> Any:
    """What is wrong with packed sequences alone, so that blocks prove themselves on a few tokens."""
    return [] if layout.documents and source != rank else CANDIDATES(layout, rank, source, **options)


def broken_training(training: Training) -> Record:
    with patch.object(pieces, "_candidates", forget_other_ranks):
        return train(training)


def test_parity_sees_documents_that_are_not_exchanged(pool: WorkerPool) -> None:
    training = Training(model=PackedLlama, steps=2, batch=4, seq=sum(DOCUMENTS))
    [reference] = pool.run_once(train, training, world=1)
    ranks = pool.run(broken_training, replace(training, strategy=("ContextParallel", {})), world=2)
    with pytest.raises(AssertionError, match="loss"):
        compare(reference, ranks, Tolerance(), title="broken")
