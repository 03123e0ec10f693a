"""Input that cannot keep the promise: one error, the same on every rank, with what was seen, the rule and the remedy.

Every case runs on all ranks. A rank that waited for a peer which has raised would show as `hung`, or with an error of
the connection instead of ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_parallel import ParallelConfigError, PlanError
from tests.support.failures import RankError
from tests.support.models import (
    NANOGPT_PLAN,
    Classifier,
    HandLlama,
    HuggingFaceLM,
    NanoGPT,
    llama_plan,
)
from tests.support.parity import assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, build_strategy
from tests.support.training import GlobalBatches


def fit(build: Callable[..., LightningModule], strategy: Spec, *, devices: int | None = None, **options: Any) -> None:
    world = int(os.environ.get("WORLD_SIZE", 1))
    trainer = _trainer(build_strategy(strategy), devices or world)
    module = build(**options)
    trainer.fit(module, datamodule=GlobalBatches(module, count=8, batch=8, seq=8))


def _trainer(strategy: Any, devices: int, *, accelerator: str = "cpu") -> Trainer:
    return Trainer(
        accelerator=accelerator, devices=devices, strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def assert_refused(
    pool: WorkerPool, kind: type[Exception], shown: list[str], fn: Callable[..., Any], /, *args: Any, world: int = 2,
    **kwargs: Any,
) -> None:  # fmt: skip
    """Every rank raises `kind`, with one and the same message, in which all of `shown` stand."""
    with pytest.raises(RankError) as caught:
        pool.run(fn, *args, world=world, **kwargs)
    assert {failure.kind for failure in caught.value.failures} == {"raised"}, str(caught.value)
    errors = caught.value.exceptions
    assert sorted(errors) == list(range(world)), str(caught.value)
    assert all(type(error) is kind for error in errors.values()), str(caught.value)
    assert len({str(error) for error in errors.values()}) == 1, str(caught.value)
    for text in shown:
        assert text in str(errors[0])


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "shown"),
    [
        (("HybridParallel", {"tp": 3}), ["tp=3 does not fit 4 devices", "not a multiple of 3", "tp=2 or tp=4"]),
        (("HybridParallel", {"ddp": 2, "fsdp": 4}), ["ddp=2 × fsdp=4", "the product is 8", "ddp=1 or fsdp=2"]),
        (("TensorParallel", {"size": 2}), ["tp=2 does not fit 4 devices", "tp=4, or 2 devices"]),
    ],
    ids=["not-a-multiple", "product", "standalone"],
)
def test_sizes(pool: WorkerPool, strategy: Spec, shown: list[str]) -> None:
    assert_refused(pool, ParallelConfigError, shown, fit, Classifier, strategy, world=4)


def test_two_autos_on_every_rank(pool: WorkerPool) -> None:
    strategy = ("HybridParallel", {"ddp": "auto", "tp": "auto"})
    shown = ['ddp="auto" and tp="auto"', "Give ddp or tp a number"]
    assert_refused(pool, ParallelConfigError, shown, fit, Classifier, strategy)


def test_a_strategy_on_the_wrong_axis(pool: WorkerPool) -> None:
    strategy = ("HybridParallel", {"tp": ("DataParallel", {"size": 2})})
    shown = ["tp=DataParallel(…): this axis takes a TensorParallel"]
    assert_refused(pool, ParallelConfigError, shown, fit, Classifier, strategy)


def test_more_processes_than_devices(pool: WorkerPool) -> None:
    shown = ["The launcher started 2 processes", "devices=1 × num_nodes=1", "set devices to the number of processes"]
    assert_refused(pool, ParallelConfigError, shown, fit, Classifier, ("HybridParallel", {}), devices=1)


def test_fewer_processes_than_devices(pool: WorkerPool) -> None:
    shown = ["The launcher started 2 processes", "devices=4 × num_nodes=1"]
    assert_refused(pool, ParallelConfigError, shown, fit, Classifier, ("HybridParallel", {}), devices=4)


# --- plans ------------------------------------------------------------------------------------------------------------


def plan(base: Mapping[str, str], **changes: str | None) -> dict[str, str]:
    """`base` with some roles changed; `__` stands for a dot, `X` for a star, and None takes a role away."""
    edits = {name.replace("__", ".").replace("X", "*"): role for name, role in changes.items()}
    merged: dict[str, str | None] = {**base, **edits}
    return {glob: role for glob, role in merged.items() if role is not None}


MLP = "model__h__X__mlp"


@pytest.mark.parametrize(
    ("build", "options", "roles", "shown"),
    [
        (NanoGPT, {}, plan(NANOGPT_PLAN, model__wte="vocab_im"), ["Unknown role 'vocab_im'", "mean 'vocab_in'?"]),
        (NanoGPT, {}, plan(NANOGPT_PLAN, model__hh__X="block"), ["'model.hh.*' (block) matches no", "model.h.*"]),
        (
            NanoGPT,
            {},
            plan(NANOGPT_PLAN, **{f"{MLP}__c_fc": None, f"{MLP}__c_proj": None}),
            ["plan=: model.h.*.mlp.c_fc.weight (8,192 parameters", "of the model) has no role", "the role replicate"],
        ),
        (
            NanoGPT,
            {},
            plan(NANOGPT_PLAN, model__lm_head="replicate"),
            ["model.wte.weight and model.lm_head.weight are one tied parameter", "vocab_in and replicate"],
        ),
        (
            HandLlama,
            {"dim": 48, "heads": 3, "kv_heads": 3},
            llama_plan(heads=3, kv_heads=3),
            ["tp=2 does not divide heads=3", "'model.layers.0.attention.w", "Use a tp size of [1, 3]"],
        ),
        (
            HandLlama,
            {"dim": 24, "heads": 6, "kv_heads": 3},
            llama_plan(heads=6, kv_heads=3),
            ["tp=2 does not divide heads=3", "'model.layers.0.attention.wk'", "3 heads over tp=2"],
        ),
        (
            HuggingFaceLM,
            {"heads": 3, "kv_heads": 1, "dim": 24},
            None,
            ["published _tp_plan", "tp=2 does not divide heads=3", "q_proj'"],
        ),
        (
            NanoGPT,
            {"dim": 30, "heads": 2},
            plan(NANOGPT_PLAN, model__h__X__attn__c_attn="fused(4)"),
            ["tp=2 does not divide out_features=90 of 'model.h.0.attn.c_attn'", "of 90 do not divide by tp=2"],
        ),
        (NanoGPT, {}, plan(NANOGPT_PLAN, model__wpe="colwise"), ["'model.wpe' is a Embedding", "takes an nn.Linear"]),
        (NanoGPT, {}, plan(NANOGPT_PLAN, model__ln_f="vocab_in"), ["is a LayerNorm", "takes an nn.Embedding"]),
        (
            NanoGPT,
            {},
            plan(NANOGPT_PLAN, model__h__0__mlp="block"),
            ["'model.h.0.mlp' is local by 'model.h.*.mlp' and block by 'model.h.0.mlp'", "Narrow one"],
        ),
        (NanoGPT, {}, None, ["tp=2 needs to know what the modules of NanoGPT are", "Pass plan=", "parallel_plan()"]),
        (NanoGPT, {}, {}, ["plan=: ", "has no role"]),
        (HuggingFaceLM, {"arch": "GPT2"}, None, ["tp=2 needs to know what the modules of HuggingFaceLM are"]),
        (HuggingFaceLM, {"arch": "Mixtral"}, None, ["the style 'packed_colwise'", "or use tp=1"]),
    ],
    ids=[
        "role", "glob", "large", "tied", "heads", "key-heads", "hf-heads", "fused", "colwise-kind", "vocab-kind",
        "conflict", "no-plan", "empty-plan", "hf-no-plan", "hf-experts",
    ],
)  # fmt: skip
def test_plans(pool: WorkerPool, build: Any, options: dict[str, Any], roles: Any, shown: list[str]) -> None:
    assert_refused(pool, PlanError, shown, fit, build, ("TensorParallel", {"plan": roles}), **options)


def test_features_that_do_not_divide_in_a_local_region(pool: WorkerPool) -> None:
    roles = plan(NANOGPT_PLAN, model__h__X__attn__c_attn="replicate", model__h__X__attn__c_proj="replicate")
    shown = ["tp=3 does not divide out_features=128 of 'model.h.0.mlp.c_fc'", "Use a tp size of [1, 2, 4, 8"]
    assert_refused(pool, PlanError, shown, fit, NanoGPT, ("TensorParallel", {"plan": roles}), world=3)


def test_heads_that_do_not_divide_are_right_where_code_keeps_global_sizes(pool: WorkerPool) -> None:
    """Three heads on two ranks: no region is `local`, so nothing is refused, and the numbers are one device's."""
    model = {"dim": 48, "heads": 3}
    assert_same_training(pool, NanoGPT, ("TensorParallel", {}), world=2, plan=NANOGPT_PLAN, model_kwargs=model)


def test_experts_train_where_nothing_is_split(pool: WorkerPool) -> None:
    """What tensor parallelism refuses is no reason to refuse the other axes."""
    pool.run(fit, HuggingFaceLM, ("FullyShardedDataParallel", {}), world=2, arch="Mixtral")


# --- modules ----------------------------------------------------------------------------------------------------------


class Prepared(Classifier):
    """Did in `configure_model` what other strategies ask for."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        match self.how:
            case "fully_shard":
                fully_shard(self.model[0], mesh=mesh)
            case "ddp":
                self.model = DistributedDataParallel(self.model)
            case "dtensor":
                whole = self.model[2].weight
                self.model[2].weight = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("fully_shard", "model.0 (FSDPLinear) is already wrapped or sharded"),
        ("ddp", "model (DistributedDataParallel) is already wrapped or sharded"),
        ("dtensor", "model.2 (Linear) is already wrapped or sharded"),
    ],
)
@pytest.mark.parametrize("strategy", ["FullyShardedDataParallel", "DataParallel"])
def test_a_module_that_something_else_wrapped(pool: WorkerPool, strategy: str, how: str, shown: str) -> None:
    remedy = "remove fully_shard, parallelize_module or the wrapper from configure_model"
    assert_refused(pool, ParallelConfigError, [shown, remedy], fit, Prepared, (strategy, {}), how=how)


class RankDependent(Classifier):
    def __init__(self, what: str) -> None:
        rank = int(os.environ["RANK"])
        super().__init__(dim=32 + rank if what == "shape" else 32)
        if what == "name" and rank == 1:
            self.extra = nn.Linear(2, 2)
        if what == "frozen" and rank == 1:
            self.model[0].bias.requires_grad_(False)
        if what == "dtype" and rank == 1:
            self.model[4].double()


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("shape", ["rank 0 has model.0.weight (32, 16)", "rank 1 has model.0.weight (33, 16)"]),
        ("name", ["rank 0 has nothing more", "rank 1 has extra.weight (2, 2)"]),
        ("frozen", ["rank 0 has model.0.bias (32,)", "rank 1 has model.0.bias (32,)", "frozen"]),
        ("dtype", ["torch.float32", "torch.float64"]),
    ],
)
def test_other_modules_on_other_ranks(pool: WorkerPool, what: str, shown: list[str]) -> None:
    shown = ["Ranks do not hold the same module", "must not depend on the rank", *shown]
    assert_refused(pool, ParallelConfigError, shown, fit, RankDependent, ("HybridParallel", {}), what=what)


# --- strategies -------------------------------------------------------------------------------------------------------


def fit_twice(accelerator: str, *, fit_first: bool) -> None:
    strategy: Any = build_strategy(("HybridParallel", {}))
    first, module = _trainer(strategy, 2), Classifier()
    if fit_first:
        first.fit(module, datamodule=GlobalBatches(module, count=8, batch=8, seq=8))
    _trainer(strategy, 2, accelerator=accelerator)


@pytest.mark.parametrize("fit_first", [True, False])
@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_a_strategy_in_two_trainers(pool: WorkerPool, accelerator: str, fit_first: bool) -> None:
    shown = ["This HybridParallel already belongs to another Trainer", "Make a new strategy for each Trainer"]
    assert_refused(pool, ParallelConfigError, shown, fit_twice, accelerator, fit_first=fit_first)


def fit_again_with_another_module() -> list[float]:
    """One Trainer may fit several modules; two Trainers with a strategy each share the processes."""
    trainer = _trainer(build_strategy(("HybridParallel", {})), 2)
    seen = []
    for module in (Classifier(), Classifier()):
        trainer.fit(module, datamodule=GlobalBatches(module, count=8, batch=8, seq=8))
        trainer.fit_loop.epoch_loop.max_steps += 1
        seen.append(float(trainer.callback_metrics["train_loss"]))
    other, module = _trainer(build_strategy(("DataParallel", {})), 2), Classifier()
    other.fit(module, datamodule=GlobalBatches(module, count=8, batch=8, seq=8))
    return [*seen, float(other.callback_metrics["train_loss"])]


def test_what_is_like_it_and_works(pool: WorkerPool) -> None:
    zero, one = pool.run(fit_again_with_another_module, world=2)
    assert zero == one
    assert len(set(zero)) == 3  # three modules, each drawn anew


# --- after an exception -----------------------------------------------------------------------------------------------


class Failing(Classifier):
    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.rank in (None, self.global_rank):
            raise KeyError("not in the batch")
        return super().training_step(batch, batch_idx)


def test_an_exception_on_all_ranks_comes_out_as_it_was(pool: WorkerPool) -> None:
    assert_refused(pool, KeyError, ["not in the batch"], fit, Failing, ("HybridParallel", {}), rank=None)


def test_an_exception_on_one_rank_comes_first(pool: WorkerPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fit, Failing, ("HybridParallel", {}), world=2, rank=1)
    assert caught.value.first.rank == 1
    assert isinstance(caught.value.exceptions[1], KeyError)
