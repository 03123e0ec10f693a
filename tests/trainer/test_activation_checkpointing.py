"""Activation checkpointing with any strategy: what is trained is the same bit for bit, and so are the names."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_parallel import ActivationCheckpointing, ParallelConfigError
from lightning_parallel.callbacks import activation_checkpointing
from lightning_parallel.flops.counting import void
from lightning_parallel.schemes.checkpointing.apply import Checkpointed
from tests.support.failures import RankError
from tests.support.models import BatchNormed, HuggingFaceLM, NanoGPT
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, build, describe
from tests.support.training import Arrays, Record, Training, train
from tests.trainer.common import CP, DDP, FSDP, FSDP_CP, FSDP_TP, TP, Data, make_trainer, seed, weights
from tests.trainer.test_mfu import PEAK, Monitor, Tick

LIGHTNING_DDP: Spec = ("DDPStrategy", {"find_unused_parameters": True})
STATIC: Spec = ("DDPStrategy", {"static_graph": True})
MODEL_PARALLEL: Spec = ("ModelParallelStrategy", {"data_parallel_size": 2, "tensor_parallel_size": 1})
PP: Spec = ("PipelineParallel", {"microbatches": 4})
ZBV: Spec = ("PipelineParallel", {"schedule": "ZBVZeroBubble", "microbatches": 4})
GATHER: Spec = ("ContextParallel", {"method": "allgather"})
ULYSSES: Spec = ("ContextParallel", {"method": "ulysses"})
FSDP_PP: Spec = ("HybridParallel", {"fsdp": 2, "pp": ("PipelineParallel", {"size": 2, "microbatches": 2})})

POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"policy": "selective"},
    "budget": {"policy": "budget", "budget": 0.7},
    "offload": {"policy": "selective", "offload": ("inputs", "aten.gelu")},
}


def differences(left: Record, right: Record) -> list[str]:
    """Where two runs are not the same bit for bit."""
    found = [f"loss {i}: {a} and {b}" for i, (a, b) in enumerate(zip(left.losses, right.losses, strict=True)) if a != b]
    pairs: list[tuple[str, Arrays, Arrays]] = [("final", left.final, right.final)]
    pairs += [(f"gradient {i}", a, b) for i, (a, b) in enumerate(zip(left.gradients, right.gradients, strict=True))]
    for what, one, other in pairs:
        assert list(one) == list(other), "names are the same"
        found += [f"{what} of {name}" for name in one if not np.array_equal(one[name], other[name])]
    return found


def run_policies(training: Training, policies: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    plain = train(training)
    found = {}
    for name, options in policies.items():
        callback = ActivationCheckpointing(**options)
        with_it = replace(training, trainer_kwargs={**training.trainer_kwargs, "callbacks": [callback]})
        found[name] = differences(plain, train(with_it))
        assert callback._checkpointing.ledger.profiles, "no block was checkpointed"
    return found


def assert_same(pool: WorkerPool, world: int, training: Training, policies: dict[str, Any] = POLICIES) -> None:
    for rank, found in enumerate(pool.run(run_policies, training, policies, world=world)):
        for policy, problems in found.items():
            assert not problems, f"rank {rank}, {policy}: {problems[:3]}"


class ShardsItself(NanoGPT):
    """As Lightning's ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for block in self.model.h:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


@pytest.mark.parametrize(
    ("strategy", "world", "model_kwargs"),
    [
        (None, 1, {"dropout": 0.1}),
        (LIGHTNING_DDP, 2, {"dropout": 0.1}),
        (STATIC, 2, {"dropout": 0.1}),
        (MODEL_PARALLEL, 2, {"dropout": 0.1, "tied": False}),
        (DDP, 2, {"dropout": 0.1}),
        (FSDP, 2, {"dropout": 0.1}),
        (TP, 2, {"dropout": 0.1}),
        (FSDP_TP, 4, {"dropout": 0.1}),
        (CP, 2, {}),
        (GATHER, 2, {"dropout": 0.1}),
        (ULYSSES, 2, {"dropout": 0.1}),
        (FSDP_CP, 4, {}),
        (PP, 2, {"dropout": 0.1, "layers": 4}),
        (ZBV, 2, {"dropout": 0.1, "layers": 4}),
        (FSDP_PP, 4, {"dropout": 0.1, "layers": 4}),
    ],
    ids=describe,
)
def test_training_is_the_same_bit_for_bit(
    pool: WorkerPool, strategy: Spec | None, world: int, model_kwargs: dict[str, Any]
) -> None:
    # pytorch#24005, torchtitan#1522
    policies = POLICIES if world == 1 else {name: POLICIES[name] for name in ("budget", "offload")}
    model: Any = ShardsItself if strategy is MODEL_PARALLEL else NanoGPT
    options: dict[str, Any] = {} if strategy in (STATIC, MODEL_PARALLEL) else {"accumulate": 2, "clip_val": 0.1}
    assert_same(pool, world, Training(model=model, strategy=strategy, model_kwargs=model_kwargs, **options), policies)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(("strategy", "world"), [(None, 1), (FSDP, 2), (TP, 2)], ids=describe)
def test_in_bfloat16(pool: WorkerPool, strategy: Spec | None, world: int, precision: str) -> None:
    # pytorch#159359
    training = Training(model=NanoGPT, strategy=strategy, model_kwargs={"dropout": 0.1}, precision=precision)
    assert_same(pool, world, training, {name: POLICIES[name] for name in ("full", "selective")})


class Adapted(HuggingFaceLM):
    """A Llama that is frozen but for its norms."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("norm" in name)


@pytest.mark.parametrize(("strategy", "world"), [(LIGHTNING_DDP, 2), (FSDP, 2)], ids=describe)
def test_frozen_weights(pool: WorkerPool, strategy: Spec, world: int) -> None:
    assert_same(pool, world, Training(model=Adapted, strategy=strategy), {"selective": POLICIES["selective"]})


@pytest.mark.parametrize(("strategy", "world"), [(None, 1), (FSDP, 2), (PP, 2)], ids=describe)
def test_running_statistics(pool: WorkerPool, strategy: Spec | None, world: int) -> None:
    """Updated once a forward: the buffers are among what is compared."""
    where = {name: {**options, "modules": "Sequential"} for name, options in POLICIES.items()} if world == 1 else {}
    assert_same(
        pool, world, Training(model=BatchNormed, strategy=strategy), where or {"full": {"modules": "BatchNorm2d"}}
    )


class Unfaithful(NanoGPT):
    """Draws numbers that no recomputation can draw again."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        for block in self.model.h:
            block.mlp.register_forward_pre_hook(lambda *_: void(torch.seed()))


def test_other_numbers_are_noticed(pool: WorkerPool) -> None:
    """The comparison can fail."""
    [found] = pool.run(run_policies, Training(model=Unfaithful), {"full": {}}, world=1)
    assert found["full"]


# --- with others ------------------------------------------------------------------------------------------------


def fit_and_save(strategy: Spec | None, options: dict[str, Any] | None, folder: str, ckpt: str | None) -> Arrays:
    seed()
    module = NanoGPT()
    callbacks: list[Callback] = [] if options is None else [ActivationCheckpointing(**options)]
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=1)
    epochs = 1 if ckpt is None else 2
    trainer = make_trainer(strategy, *callbacks, saver, enable_checkpointing=True, max_epochs=epochs)
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt)
    assert not any(isinstance(vars(m).get("forward"), Checkpointed) for m in module.modules()), "taken out again"
    return weights(module)


@pytest.mark.parametrize(("strategy", "world"), [(None, 1), (LIGHTNING_DDP, 2), (FSDP, 2)], ids=describe)
def test_checkpoints_interchange(pool: WorkerPool, strategy: Spec | None, world: int, tmp_path: Path) -> None:
    # Lightning#21357
    kinds: dict[str, dict[str, Any] | None] = {"none": None, "selective": {"policy": "selective"}}
    for name, options in kinds.items():
        pool.run(fit_and_save, strategy, options, str(tmp_path / name), None, world=world)
    again = str(tmp_path / "again")
    finals = [
        pool.run(fit_and_save, strategy, options, again, str(tmp_path / name / "last.ckpt"), world=world)[0]
        for name in kinds
        for options in kinds.values()
    ]
    for final in finals[1:]:
        assert all(np.array_equal(finals[0][name], final[name]) for name in finals[0])


class Frozen(NanoGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        blocks = self.model.h
        assert all(isinstance(vars(block)["forward"], Checkpointed) for block in blocks)
        assert vars(blocks[0])["forward"]._inner is None or not isinstance(
            vars(blocks[0])["forward"]._inner, Checkpointed
        )
        return super().training_step(batch, batch_idx)


def test_a_second_fit_wraps_each_block_once() -> None:
    seed()
    module, callback = Frozen(), ActivationCheckpointing()
    for _ in range(2):
        trainer = make_trainer(None, callback, limit_val_batches=0)
        trainer.fit(module, datamodule=Data())
    assert "forward" not in vars(module.model.h[0])


@pytest.mark.parametrize("strategy", [None, FSDP], ids=["one device", "fsdp"])
def test_another_module_is_measured_and_planned_anew(pool: WorkerPool, strategy: Spec | None) -> None:
    pool.run(fit_two, strategy, world=1 if strategy is None else 2)


def fit_two(strategy: Spec | None) -> None:
    callback = ActivationCheckpointing("budget", budget=0.7)
    plans = []
    for layers in (2, 3):
        make_trainer(strategy, callback, limit_val_batches=0).fit(NanoGPT(layers=layers), datamodule=Data())
        plans.append(callback._checkpointing.plan)
    assert [plan and len(plan.kept) for plan in plans] == [2, 3]


def test_the_frontier_is_shown(tmp_path: Path) -> None:
    callback = ActivationCheckpointing()
    with pytest.raises(ParallelConfigError, match="No checkpointed block has run"):
        callback.table()
    make_trainer(None, callback, limit_val_batches=0).fit(NanoGPT(layers=4), datamodule=Data())
    rows = callback.table().splitlines()
    assert rows[0].split() == ["peak", "bytes", "extra", "seconds", "extra", "FLOPs"]
    assert [int(row.split()[0].replace(",", "")) for row in rows[1:]] == [plan.peak for plan in callback.frontier]
    assert callback.frontier[-1].seconds == 0
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's")
    callback.save_plot(tmp_path / "frontier.svg")
    assert "activations in the blocks" in (tmp_path / "frontier.svg").read_text()


def reported(strategy: Spec | None, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """What was said, and what is known on this rank."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        seed()
        callback = ActivationCheckpointing(**options)
        module = NanoGPT(layers=4)
        make_trainer(strategy, callback, limit_val_batches=0, max_epochs=2).fit(module, datamodule=Data())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    plan = callback._checkpointing.plan
    return seen, {
        "plan": plan and {n: sorted((str(f), i) for f, i in keys) for n, keys in plan.kept.items()},
        "live": dict(callback._checkpointing.ledger.live),
        "peak": callback._checkpointing.ledger.peak,
        "predicted": callback._checkpointing.predicted()[0],
        "none": callback._checkpointing.model().without_checkpointing(),
    }


def test_one_line_says_what_was_done() -> None:
    said, known = reported(None, {"policy": "budget", "budget": 0.6})
    [line] = [message for message in said if message.startswith("Activation checkpointing")]
    found = re.findall(r"([\d,]+) (?:bytes|measured|without|FLOPs)", line)
    predicted, measured, none, flops = (int(number.replace(",", "")) for number in found)
    assert "budget(0.6), solved exactly, in 4 blocks" in line
    assert predicted <= 0.6 * none
    assert abs(measured - predicted) <= 0.05 * predicted
    assert (measured, none) == (known["peak"], known["none"])
    assert flops > 0


def test_a_budget_is_of_each_stage(pool: WorkerPool) -> None:
    """Under 1F1B the first stage holds two microbatches, the last one; each plans for itself."""
    (_, first), (_, last) = pool.run(reported, PP, {"policy": "budget", "budget": 300_000}, world=2)
    assert set(first["live"].values()) == {2}
    assert set(last["live"].values()) == {1}
    assert first["none"] == 2 * last["none"]
    assert first["predicted"] <= 300_000 and last["predicted"] <= 300_000
    assert abs(first["peak"] - first["predicted"]) <= 0.05 * first["predicted"]
    ours = [{n: k for n, k in plan.items() if ".h.0" in n or ".h.1" in n} for plan in (first["plan"], last["plan"])]
    assert ours[0] == ours[1], "each knows what the other keeps"


def test_ranks_that_share_blocks_keep_the_same(pool: WorkerPool) -> None:
    ranks = pool.run(reported, FSDP_TP, {"policy": "budget", "budget": 0.5}, world=4)
    assert all(known["plan"] == ranks[0][1]["plan"] for _, known in ranks)
    assert any(ranks[0][1]["plan"].values())


class SomeDevice:
    """A device of a thousand bytes, six hundred of them in use at most."""

    def max_memory_allocated(self, device: torch.device) -> int:
        return 600

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        pass

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=1000)


def test_fit_is_what_a_device_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 950 bytes: less 300 that were not the blocks', less 40 that the optimizer has made since."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SomeDevice())
    monkeypatch.setattr(activation_checkpointing, "is_accelerator", lambda device: True)
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")), optimizers=[optimizer], global_step=1
    )
    callback = ActivationCheckpointing("budget", budget="fit")
    given: list[int | None] = []
    monkeypatch.setattr(callback._checkpointing, "solve", given.append)
    for _ in range(2):
        callback.on_train_batch_start(trainer, None, None, 0)  # type: ignore[arg-type]
        callback._checkpointing.ledger.peak = 300
        parameter.grad = torch.ones(10)
        optimizer.step()
        callback.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
    assert given == [610, 650]  # the second step finds the state there


# --- FLOPs of the monitor ---------------------------------------------------------------------------------------


def measured(strategy: Spec | None, options: dict[str, Any] | None, first: bool) -> tuple[float, float]:
    """MFU and HFU, times devices, at the peak of the tests; the monitor before or after the other callback."""
    seed()
    monitor = Monitor()
    others: list[Callback] = [] if options is None else [ActivationCheckpointing(**options)]
    order = [monitor, Tick(monitor.hand), *others] if first else [*others, monitor, Tick(monitor.hand)]
    trainer = make_trainer(strategy, *order, limit_val_batches=0)
    trainer.fit(NanoGPT(), datamodule=Data())
    world = trainer.world_size
    return world * PEAK * monitor.figures["mfu"], world * PEAK * monitor.figures["hfu"]


@pytest.mark.parametrize(
    ("strategy", "world", "first"),
    [(None, 1, True), (None, 1, False), (FSDP_TP, 4, False), (PP, 2, True)],
    ids=describe,
)
def test_hfu_counts_what_is_recomputed(pool: WorkerPool, strategy: Spec | None, world: int, first: bool) -> None:
    mfu, hfu = pool.run_once(measured, None, None, True, world=1)[0]
    tokens, dim, blocks = 64, 32, 2
    # Its last product is not run again; the scores and sums of attention are (the causal half).
    forward = blocks * (2 * tokens * dim * (3 * dim + dim + 4 * dim) + 2 * tokens * 8 * dim)
    for _, (with_it, hardware) in enumerate(pool.run(measured, strategy, {}, first, world=world)):
        assert with_it == pytest.approx(mfu, rel=1e-6)
        assert hardware - hfu == pytest.approx(forward, rel=1e-6)
    for with_it, hardware in pool.run(measured, strategy, {"policy": "selective"}, first, world=world):
        assert with_it == pytest.approx(mfu, rel=1e-6)
        assert hardware == pytest.approx(hfu, rel=1e-6)
    # The first of three batches recomputes everything; then there is room for all.
    for with_it, hardware in pool.run(measured, strategy, {"policy": "budget", "budget": 1.0}, first, world=world):
        assert with_it == pytest.approx(mfu, rel=1e-6)
        assert hardware - hfu == pytest.approx(forward / 3, rel=1e-6)


def test_a_hugging_face_model_with_both(pool: WorkerPool) -> None:
    """An existing project adds a line for each callback."""
    plain = pool.run(train, Training(model=HuggingFaceLM), world=1)[0]
    both = [("ActivationCheckpointing", {"policy": "selective"}), ("MFUMonitor", {"peak_flops": 1e12})]
    with_both = pool.run(train_with, Training(model=HuggingFaceLM), both, world=1)[0]
    assert not differences(plain, with_both)


def train_with(training: Training, callbacks: list[Any]) -> Record:
    return train(replace(training, trainer_kwargs={"callbacks": [build(each) for each in callbacks]}))


# --- refusals ---------------------------------------------------------------------------------------------------


def fit(strategy: Spec | None, options: dict[str, Any], model: Any = NanoGPT) -> None:
    seed()
    make_trainer(strategy, ActivationCheckpointing(**options)).fit(model(), datamodule=Data())


def test_fit_asks_a_device_that_knows(pool: WorkerPool) -> None:
    with pytest.raises(ParallelConfigError, match="does not tell"):
        fit(None, {"policy": "budget", "budget": "fit"})


@pytest.mark.parametrize("options", [{"policy": "budget", "budget": 0.5}, {"offload": "inputs"}], ids=str)
def test_compiled_blocks_have_no_budget(pool: WorkerPool, options: dict[str, Any]) -> None:
    with pytest.raises(RankError, match=r"ParallelConfigError.*is compiled") as error:
        pool.run(fit, ("FullyShardedDataParallel", {"compile": {"backend": "eager"}}), options, world=2)
    assert len(error.value.failures) == 2


def test_a_budget_that_is_too_small(pool: WorkerPool) -> None:
    with pytest.raises(RankError, match=r"Rank \d: Keeping nothing takes [\d,]+ bytes more") as error:
        pool.run(fit, FSDP, {"policy": "budget", "budget": 1000}, world=2)
    assert len(error.value.failures) == 2


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_compiled_blocks(pool: WorkerPool, policy: str) -> None:
    strategy: Spec = ("FullyShardedDataParallel", {"compile": {"backend": "aot_eager"}})
    training = Training(model=NanoGPT, strategy=strategy, steps=2)
    found = pool.run(run_compiled, training, policy, world=2, timeout=280)
    for problems in found:
        assert not problems


def run_compiled(training: Training, policy: str) -> list[str]:
    plain = train(training)
    callback = ActivationCheckpointing(policy)  # type: ignore[arg-type]
    other = train(replace(training, trainer_kwargs={"callbacks": [callback]}))
    return differences(plain, other)
