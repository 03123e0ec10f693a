"""An unchanged LightningModule in a pipeline: steps, logs, metrics, callbacks, optimisation and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.schemes.pipeline.ghost import is_ghost
from tests.support.models import NANOGPT_PLAN, VOCAB, NanoGPT, OptimizerOptions
from tests.support.parity import assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, describe
from tests.support.training import full_array
from tests.trainer.common import Data, MemoryLogger, make_trainer, one_file, seed
from tests.trainer.models import FreezesEmbeddings, ReturnsDict, Tempered, Unfrozen, UsesItsParts
from tests.trainer.pipelined import Groups
from tests.trainer.test_callbacks import stop_and_save, summarise
from tests.trainer.test_precision import NOISE

PP: Spec = ("PipelineParallel", {"microbatches": 4})
ZBV: Spec = ("PipelineParallel", {"schedule": "ZBVZeroBubble", "microbatches": 4})
FSDP_PP: Spec = ("HybridParallel", {"fsdp": 2, "pp": ("PipelineParallel", {"size": 2, "microbatches": 2})})
DDP_V: Spec = ("HybridParallel", {"ddp": 2, "fsdp": 1, "pp": ("PipelineParallel", {**ZBV[1], "size": 2})})  # type: ignore[dict-item]
on_pipelines = pytest.mark.parametrize(
    ("strategy", "world"), [(PP, 2), (ZBV, 2), (FSDP_PP, 4), (DDP_V, 4)], ids=["pp", "zbv", "fsdp-pp", "ddp-zbv"]
)
on_two = pytest.mark.parametrize("strategy", [PP, ZBV], ids=["pp", "zbv"])


class Measured(NanoGPT):
    """Logs in every way there is, before and after the model is called; weights move."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.rows, self.mean, self.accuracy = MeanMetric(), MeanMetric(), MulticlassAccuracy(VOCAB, average="micro")
        self.val_rows, self.val_accuracy = MeanMetric(), MulticlassAccuracy(VOCAB, average="micro")
        # Else a step's value is the data rank's own.
        self.each, self.most, self.total = (kind(dist_sync_on_step=True) for kind in (MeanMetric, MaxMetric, SumMetric))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.rows.update(x.float().mean(1))
        self.log("train_rows", self.rows)
        self.log("train_before", x.float().mean(), sync_dist=True, on_step=True, on_epoch=True)
        logits = self.logits(x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("train_count", float(len(x)), reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        self.log("train_most", logits.max(), reduce_fx="max", sync_dist=True, on_step=False, on_epoch=True)
        self.log_dict({"train_a": logits.min(), "train_b": x.min().float()}, sync_dist=True, reduce_fx=torch.min)
        self.mean.update(loss, len(x))
        self.accuracy(logits.flatten(0, 1), y.flatten())
        self.each(x.float().mean(1))
        self.most(x)
        self.total(len(x))
        self.log("train_mean", self.mean, on_step=False, on_epoch=True)
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        each = {"train_each": self.each, "train_top": self.most, "train_total": self.total}
        self.log_dict(each, on_step=True, on_epoch=True)
        return loss

    def evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        x, y = batch
        self.val_rows.update(x.float().mean(1))
        logits = self.logits(x)
        self.log(f"{stage}_loss", torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()), sync_dist=True)
        self.log(f"{stage}_count", float(len(x)), reduce_fx="sum", sync_dist=True)
        self.val_accuracy.update(logits.flatten(0, 1), y.flatten())
        self.log_dict({f"{stage}_rows": self.val_rows, f"{stage}_accuracy": self.val_accuracy})

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")


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
    return {
        "fit": fitted, "validate": validated, "test": tested, "logged": logger.seen,
        "predictions": torch.cat(predictions).numpy(),  # type: ignore[arg-type]
        "data_rank": (trainer.distributed_sampler_kwargs or {"rank": 0})["rank"],
    }  # fmt: skip


@on_pipelines
def test_each_sample_counts_once_on_every_rank(pool: WorkerPool, strategy: Spec, world: int) -> None:
    # torchtitan#550, nanotron#405: a loss of -1 or None where the last stage is not.
    [expected] = pool.run_once(measure, None, world=1)
    assert expected["fit"]["train_count"] == 24
    assert expected["test"]["test_count"] == 7
    seen = pool.run(measure, strategy, world=world)
    for rank, of_rank in enumerate(seen):
        for moment in ("fit", "validate", "test"):
            assert of_rank[moment] == pytest.approx(expected[moment], rel=1e-5), f"{moment} on rank {rank}"
            assert of_rank[moment] == seen[0][moment], f"{moment} on rank {rank}"
    for name, values in seen[0]["logged"].items():
        assert values == pytest.approx(expected["logged"][name], rel=1e-5), name
    by_data_rank: dict[int, np.ndarray] = {}
    for of_rank in seen:
        first = by_data_rank.setdefault(of_rank["data_rank"], of_rank["predictions"])
        assert np.array_equal(first, of_rank["predictions"])
    together = np.concatenate([by_data_rank[rank] for rank in sorted(by_data_rank)])
    np.testing.assert_allclose(together, expected["predictions"], atol=1e-5)


# --- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "world"), [(ZBV, 2), (one_file(PP), 2), (FSDP_PP, 4)], ids=["zbv", "pp-file", "fsdp-pp"]
)
def test_callbacks_decide_alike(pool: WorkerPool, tmp_path: Path, strategy: Spec, world: int) -> None:
    seen = pool.run(stop_and_save, strategy, str(tmp_path / "mesh"), world=world)
    [expected] = pool.run(stop_and_save, None, str(tmp_path / "one"), world=1)
    for rank, of_rank in enumerate(seen):
        is_folder = describe(strategy).find("save_distributed_checkpoint=False") < 0
        assert of_rank == {**expected, "folders": [is_folder] * 3}, f"on rank {rank}"


@pytest.mark.parametrize(("strategy", "world"), [(PP, 2), (FSDP_PP, 4)], ids=["pp", "fsdp-pp"])
def test_summary_counts_the_whole_model(pool: WorkerPool, strategy: Spec, world: int) -> None:
    [expected] = pool.run_once(summarise, None, world=1)
    seen = pool.run(summarise, strategy, world=world)
    assert seen[0] is not None
    types = seen[0]["rows"]["Type"]
    types[:] = [name.removeprefix("FSDP") for name in types]
    assert seen == [expected, *[None] * (world - 1)]


# --- optimisation -----------------------------------------------------------------------------------------------------


@on_pipelines
def test_groups_frozen_and_unused_parameters(pool: WorkerPool, strategy: Spec, world: int) -> None:
    # The last stage has none of the first group, the first stage none of the third.
    assert_same_training(pool, Groups, strategy, world=world, clip_val=0.1, model_kwargs={"layers": 4}, accumulate=2)


@on_two
def test_clipping_by_value(pool: WorkerPool, strategy: Spec) -> None:
    assert_same_training(
        pool, NanoGPT, strategy, world=2, clip_val=1e-3, clip_algorithm="value", model_kwargs={"layers": 4}
    )


@on_two
@pytest.mark.parametrize("model", [ReturnsDict, Tempered, UsesItsParts])
def test_modules_written_in_other_ways(pool: WorkerPool, strategy: Spec, model: Any) -> None:
    assert_same_training(pool, model, strategy, world=2, accumulate=2, clip_val=0.1, model_kwargs={"layers": 4})


@on_two
def test_freezing_and_thawing(pool: WorkerPool, strategy: Spec) -> None:
    options = {"max_epochs": 3}
    assert_same_training(
        pool, FreezesEmbeddings, strategy, world=2, steps=2, trainer_kwargs=options, model_kwargs={"layers": 4}
    )


@on_two
def test_backbone_finetuning(pool: WorkerPool, strategy: Spec) -> None:
    callback = ("BackboneFinetuning", {"unfreeze_backbone_at_epoch": 1, "verbose": False})
    options = {"max_epochs": 3, "callbacks": [callback]}
    assert_same_training(pool, Unfrozen, strategy, world=2, steps=2, trainer_kwargs=options, model_kwargs={"layers": 4})


@on_two
def test_partial_last_window(pool: WorkerPool, strategy: Spec) -> None:
    options = {"limit_train_batches": 5}
    assert_same_training(
        pool, NanoGPT, strategy, world=2, steps=2, accumulate=3, trainer_kwargs=options, model_kwargs={"layers": 4}
    )


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "world"), [(PP, 2), (FSDP_PP, 4)], ids=["pp", "fsdp-pp"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(pool: WorkerPool, strategy: Spec, world: int, precision: str) -> None:
    assert_same_training(
        pool, NanoGPT, strategy, world=world, precision=precision, clip_val=1.0, tolerance=NOISE,
        optimizer=OptimizerOptions(name="sgd"), model_kwargs={"layers": 4},
    )  # fmt: skip


class Infinite(torch.autograd.Function):
    """Nothing, whose weight has an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.full_like(*ctx.saved_tensors, float("inf"))


class Overflows(NanoGPT):
    """The gradient of one weight, so of one stage, is infinite on the second batch."""

    def __init__(self, where: str) -> None:
        super().__init__(layers=4, tied=False, optimizer=OptimizerOptions(step_lr=None))
        self.get_submodule(where).register_forward_hook(self.spoil)
        self.sums: dict[int, list[float]] = {}

    def spoil(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        is_whole = self.trainer.fit_loop.batch_idx != 1 or is_ghost(out)
        return out if is_whole else Infinite.apply(out, module.weight)  # type: ignore[no-any-return, no-untyped-call]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sums[batch_idx] = [float(p.sum()) for p in self.parameters() if not is_ghost(p)]

    def on_train_end(self) -> None:
        self.on_train_batch_start(None, 3)


def overflow(strategy: Spec, where: str) -> dict[str, Any]:
    seed()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    trainer = make_trainer(strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], limit_val_batches=0)
    module = Overflows(where)
    trainer.fit(module, datamodule=Data())
    return {"sums": module.sums, "scale": scaler.get_scale()}


@on_two
@pytest.mark.parametrize("where", ["model.wte", "model.ln_f"])
def test_all_stages_skip_the_step_on_which_one_overflows(pool: WorkerPool, strategy: Spec, where: str) -> None:
    for seen in pool.run(overflow, strategy, where, world=2):
        first, second, third, last = seen["sums"].values()
        assert first != second == third != last
        assert np.isfinite(last).all()
        assert seen["scale"] == 512.0


# --- memory, random numbers -------------------------------------------------------------------------------------------


def hold(strategy: Spec, tied: bool) -> dict[str, int]:
    """Names to bytes of the parameters that this rank really has, of a module built on the meta device."""
    seed()
    with torch.device("meta"):
        module = NanoGPT(layers=4, tied=tied)
    make_trainer(strategy, max_steps=1, limit_val_batches=0).fit(module, datamodule=Data())
    return {name: p.untyped_storage().nbytes() for name, p in module.named_parameters() if not p.is_meta}


@on_two
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_stage_holds_its_own_parameters_only(pool: WorkerPool, strategy: Spec, tied: bool) -> None:
    held = pool.run(hold, strategy, tied, world=2)
    module = NanoGPT(layers=4, tied=tied)
    whole = sum(p.numel() * 4 for p in module.parameters())
    again = module.model.wte.weight.numel() * 4 if tied and strategy == PP else 0
    assert sum(sum(of_rank.values()) for of_rank in held) == whole + again
    blocks = [{name.split(".")[2] for name in of_rank if ".h." in name} for of_rank in held]
    assert blocks == ([{"0", "1"}, {"2", "3"}] if strategy == PP else [{"0", "3"}, {"1", "2"}])


class Drops(NanoGPT):
    """Keeps which entries dropout set to zero, in the blocks of this rank."""

    def __init__(self) -> None:
        super().__init__(layers=4, dropout=0.25, optimizer=OptimizerOptions(name="sgd", lr=0.0))
        self.masks: dict[int, list[np.ndarray]] = {}
        for index, block in enumerate(self.model.h):
            block.mlp.dropout.register_forward_hook(
                lambda _, args, out, index=index: is_ghost(out) or self.keep(index, out.detach() == 0)
            )

    def keep(self, index: int, mask: Tensor) -> None:
        self.masks.setdefault(index, []).append(full_array(mask))


def drop(strategy: Spec) -> dict[str, Any]:
    seed()
    module = Drops()
    trainer = make_trainer(strategy, limit_val_batches=0, max_steps=2)
    trainer.fit(module, datamodule=Data(batch=8))
    return {"masks": module.masks, "state": torch.get_rng_state().numpy()}


def test_dropout_differs_over_stages_microbatches_and_data_ranks(pool: WorkerPool) -> None:
    # torchtitan#689.
    strategy = ("HybridParallel", {"ddp": 2, "fsdp": 1, "pp": ("PipelineParallel", {"size": 2, "microbatches": 2})})
    ranks = pool.run(drop, strategy, world=4)
    assert [sorted(of_rank["masks"]) for of_rank in ranks] == [[0, 1]] * 2 + [[2, 3]] * 2
    drawn = [mask for of_rank in ranks for masks in of_rank["masks"].values() for mask in masks]
    assert len(drawn) == 4 * 2 * 2 * 2  # ranks, blocks, steps, microbatches
    assert len({mask.tobytes() for mask in drawn}) == len(drawn)
    assert all(0.2 < mask.mean() < 0.3 for mask in drawn)
    assert np.array_equal(ranks[0]["state"], ranks[2]["state"])  # stages stay in step
    assert not np.array_equal(ranks[0]["state"], ranks[1]["state"])


def test_dropout_agrees_over_tensor_parallel_peers(pool: WorkerPool) -> None:
    tensor_parallel = ("TensorParallel", {"size": 2, "sequence_parallel": False, "plan": dict(NANOGPT_PLAN)})
    ranks = pool.run(drop, ("HybridParallel", {"fsdp": 1, "tp": tensor_parallel, "pp": 2}), world=4)
    for first, second in (ranks[:2], ranks[2:]):
        assert np.array_equal(first["state"], second["state"])
        for index, masks in first["masks"].items():
            assert all(np.array_equal(*pair) for pair in zip(masks, second["masks"][index], strict=True))
    drawn = [mask.tobytes() for of_rank in ranks[::2] for masks in of_rank["masks"].values() for mask in masks]
    assert len(set(drawn)) == len(drawn)
