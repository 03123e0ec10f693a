"""Sequences over context ranks, through the Trainer: what users do with them, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_parallel import ParallelConfigError
from lightning_parallel.schemes.context.operations import HANDLERS
from lightning_parallel.schemes.context.random import own_numbers
from lightning_parallel.schemes.context.rows import Context
from tests.support.failures import RankError
from tests.support.models import HuggingFaceLM, NanoGPT
from tests.support.parity import assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.support.training import GlobalBatches
from tests.trainer.common import make_trainer, seed
from tests.trainer.context_models import InnerLoss, Masked, Pooled, Stack, Translator
from tests.trainer.test_pipeline_checkpoints import assert_goes_on, fit

RING: Spec = ("ContextParallel", {})
ULYSSES: Spec = ("ContextParallel", {"method": "ulysses"})
GATHER: Spec = ("ContextParallel", {"method": "allgather"})
METHODS = pytest.mark.parametrize("strategy", [RING, GATHER, ULYSSES], ids=["ring", "allgather", "ulysses"])


@METHODS
@pytest.mark.parametrize("extra", ["", "padding", "padding on the left", "packed", "shifted by hand"])
def test_labels_and_masks_of_hugging_face(pool: WorkerPool, extra: str, strategy: Spec) -> None:
    assert_same_training(pool, InnerLoss, strategy, world=2, seq=11, model_kwargs={"extra": extra})


def test_a_sliding_window(pool: WorkerPool) -> None:
    options = {"arch": "Mistral", "sliding_window": 4}
    assert_same_training(pool, InnerLoss, RING, world=4, seq=15, model_kwargs=options)


@METHODS
@pytest.mark.parametrize(
    "options",
    [{}, {"padded": False}, {"causal": True}, {"batch_first": False}, {"batch_first": False, "causal": True}],
    ids=str,
)
def test_torchs_encoder(pool: WorkerPool, options: dict[str, Any], strategy: Spec) -> None:
    assert_same_training(pool, Masked, strategy, world=2, seq=9, model_kwargs=options)


def test_attention_to_another_sequence(pool: WorkerPool) -> None:
    assert_same_training(pool, Translator, RING, world=2, seq=10)


@pytest.mark.parametrize("how", ["last", "mean", "token"])
def test_sequences_pooled(pool: WorkerPool, how: str) -> None:
    assert_same_training(pool, Pooled, RING, world=2, seq=9, model_kwargs={"how": how})


@pytest.mark.parametrize("options", [{"checkpoint": True}, {"kind": "TableInside"}], ids=str)
def test_blocks(pool: WorkerPool, options: dict[str, Any]) -> None:
    assert_same_training(pool, Stack, RING, world=2, seq=10, model_kwargs=options)


def test_hugging_faces_own_checkpointing(pool: WorkerPool) -> None:
    assert_same_training(pool, Recomputed, RING, world=2, seq=10)


class Recomputed(HuggingFaceLM):
    def __init__(self) -> None:
        super().__init__()
        self.model.gradient_checkpointing_enable()


def test_compiled_blocks(pool: WorkerPool) -> None:
    strategy = ("ContextParallel", {"compile": {"backend": "aot_eager"}})
    assert_same_training(pool, NanoGPT, strategy, world=2, timeout=300)


@pytest.mark.parametrize("kind", ["Convolving", "ByHand", "CountingPositions", "MaskInside"])
def test_a_block_that_cannot_lie_in_rows_is_refused(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(RankError, match=r"PlanError: layers.0.*cp=1") as error:
        pool.run(refused, kind, RING, world=2)
    assert len(error.value.failures) == 2


def refused(kind: str, strategy: Spec) -> None:
    seed()
    module = Stack(kind=kind)
    make_trainer(strategy, use_distributed_sampler=False).fit(
        module, datamodule=GlobalBatches(module, count=8, batch=4, seq=10)
    )


def test_dropout_in_attention_is_refused_by_the_ring(pool: WorkerPool) -> None:
    with pytest.raises(RankError, match=r"ParallelConfigError.*dropout.*ulysses"):
        pool.run(refused, "Dropping", RING, world=2)
    pool.run(refused, "Dropping", GATHER, world=2)
    pool.run(refused, "Dropping", ULYSSES, world=2)


def drawn() -> tuple[float, float, float, float]:
    """In a block, after it, and both again from the same state."""
    dist.init_process_group("gloo")
    context = Context(dist.group.WORLD, torch.device("cpu"), HANDLERS)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    numbers = []
    for _ in range(2):
        torch.set_rng_state(state)
        with own_numbers(context):
            numbers.append(float(torch.rand(())))
        numbers.append(float(torch.rand(())))
    return numbers[0], numbers[1], numbers[2], numbers[3]


def test_rows_draw_apart_and_what_is_whole_alike(pool: WorkerPool) -> None:
    (inside, outside, again, outside_again), other = pool.run(drawn, world=2)
    assert inside != other[0]
    assert outside == other[1]
    assert (again, outside_again) == (inside, outside)  # as a recomputation draws


class Sampling(NanoGPT):
    """Samples in validation, a token at a time: lengths 4, 5, 6 without gradients."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens = batch[0][:, :4]
        for _ in range(3):
            following = self.logits(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        self.log("val_loss", tokens.float().mean(), sync_dist=True)


def run_all(strategy: Spec | None) -> dict[str, Any]:
    seed()
    module = Sampling()
    data = GlobalBatches(module, count=8, batch=4, seq=11)
    trainer = make_trainer(strategy, use_distributed_sampler=False, limit_val_batches=2)
    trainer.fit(module, datamodule=data)
    trainer.validate(module, dataloaders=data.train_dataloader(), verbose=False)
    sampled = float(trainer.callback_metrics["val_loss"])
    predicted = trainer.predict(module, dataloaders=data.train_dataloader())
    assert predicted
    return {"sampled": sampled, "predicted": torch.cat(predicted), "kinds": {type(p).__name__ for p in predicted}}


@METHODS
def test_validation_samples_and_prediction(pool: WorkerPool, strategy: Spec) -> None:
    (expected,) = pool.run_once(run_all, None, world=1)
    for seen in pool.run(run_all, strategy, world=2):
        assert seen["sampled"] == expected["sampled"]
        assert seen["kinds"] == {"Tensor"}
        torch.testing.assert_close(seen["predicted"], expected["predicted"], atol=1e-4, rtol=1e-4)


class Watching(Stack):
    """Looks at what a layer inside a block gets."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = self.layers[0].qkv.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        loss = super().training_step(batch, batch_idx)
        hook.remove()
        tokens = batch[0]
        strategy, length = self.trainer.strategy, tokens.size(1)
        whole = F.embedding(tokens, self.embed.weight)
        *_, rows = seen  # the first ones are of the proof
        assert torch.equal(strategy.gather_sequence(rows, length), whole)
        positions = strategy.sequence_positions(length)
        count = int((positions > 0).sum()) + (strategy.cluster_environment.global_rank() == 0)
        assert torch.equal(rows[:, :count], whole[:, positions[:count]])
        with pytest.raises(ParallelConfigError, match="gather_sequence: 3 rows"):
            strategy.gather_sequence(rows[:, :3], length)
        return loss


def watch() -> None:
    seed()
    module = Watching()
    make_trainer(RING, use_distributed_sampler=False).fit(
        module, datamodule=GlobalBatches(module, count=8, batch=4, seq=11)
    )


def test_rows_for_user_code_in_blocks(pool: WorkerPool) -> None:
    pool.run(watch, world=2)


def is_restored(fails: bool) -> tuple[Any, ...]:
    seed()
    module = HuggingFaceLM()
    config = module.model.config
    config.use_cache = True
    before = config._attn_implementation, config.use_cache
    if fails:
        module.loss = _fail  # type: ignore[method-assign]
    trainer = make_trainer(RING, use_distributed_sampler=False)
    try:
        trainer.fit(module, datamodule=GlobalBatches(module, count=4, batch=4, seq=6))
    except ZeroDivisionError:
        assert fails
    after = config._attn_implementation, config.use_cache
    return before, after, torch.backends.mha.get_fastpath_enabled()


def _fail(batch: Any) -> Any:
    raise ZeroDivisionError("in the step")


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_redirected_is_put_back(pool: WorkerPool, fails: bool) -> None:
    for before, after, fast_path in pool.run(is_restored, fails, world=2):
        assert before == after == ("sdpa", True)
        assert fast_path


def test_checkpoints_go_on_with_other_numbers_of_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    (whole,) = (
        pool.run(fit, None, str(tmp_path / "one"), 4, None, world=1)
        if False
        else pool.run(fit, None, 1, str(tmp_path / "one"), 4, None, world=1)
    )
    two = pool.run(fit, RING, 2, str(tmp_path / "two"), 1, None, world=2)
    assert_goes_on(two, whole, 0)
    mesh: Spec = ("HybridParallel", {"fsdp": 2, "cp": 2})
    four = pool.run(fit, mesh, 4, str(tmp_path / "four"), 2, str(tmp_path / "two" / "epoch=0.ckpt"), world=4)
    assert_goes_on(four, whole, 1)
    one = pool.run(fit, None, 1, str(tmp_path / "last"), 3, _one_file(tmp_path), world=1)
    assert_goes_on(one, whole, 2)


def _one_file(folder: Path) -> str:
    source, target = folder / "four" / "epoch=1.ckpt", folder / "whole.ckpt"
    subprocess.run([sys.executable, "-m", "lightning_parallel", "consolidate", str(source), str(target)], check=True)
    return str(target)
