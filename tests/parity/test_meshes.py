"""Loss, gradients, gradient norm and weights equal one device's, on every mesh of 4 and a sample of 8."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.failures import RankError
from tests.support.meshes import mesh_params
from tests.support.models import (
    GAN,
    LLAMA_PLAN,
    NANOGPT_PLAN,
    Classifier,
    EncoderLM,
    HandLlama,
    HuggingFaceLM,
    NanoGPT,
    OptimizerOptions,
    llama_plan,
)
from tests.support.parity import Tolerance, assert_same_training
from tests.support.pool import WorkerPool

AXES = ("ddp", "fsdp", "tp")


@pytest.mark.parametrize("mesh", mesh_params(4, AXES))
def test_packed_attention_on_every_mesh_of_4(pool: WorkerPool, mesh: dict[str, int]) -> None:
    plan = NANOGPT_PLAN if mesh["tp"] > 1 else None
    assert_same_training(
        pool, NanoGPT, ("HybridParallel", mesh), world=4, accumulate=2, clip_val=0.1, plan=plan, seed_apart=True
    )


@pytest.mark.parametrize("mesh", mesh_params(4, AXES))
def test_hugging_face_llama_on_every_mesh_of_4(pool: WorkerPool, mesh: dict[str, int]) -> None:
    assert_same_training(
        pool, HuggingFaceLM, ("HybridParallel", mesh), world=4, optimizer=OptimizerOptions(decay_groups=True)
    )


@pytest.mark.parametrize(
    "mesh", [{"ddp": 2, "fsdp": 2, "tp": 2}, {"ddp": 1, "fsdp": 4, "tp": 2}, {"ddp": 2, "fsdp": 1, "tp": 4}], ids=str
)
def test_meshes_of_8(pool: WorkerPool, mesh: dict[str, int]) -> None:
    assert_same_training(pool, HandLlama, ("HybridParallel", mesh), world=8, plan=LLAMA_PLAN, clip_val=0.1)


@pytest.mark.parametrize(
    ("strategy", "model", "options"),
    [
        (("DataParallel", {}), EncoderLM, {}),
        (("DataParallel", {}), Classifier, {"accumulate": 3}),
        (("FullyShardedDataParallel", {}), EncoderLM, {"accumulate": 2}),
        (("FullyShardedDataParallel", {}), Classifier, {}),
        (("FullyShardedDataParallel", {}), HuggingFaceLM, {"model_kwargs": {"arch": "GPT2"}, "optimizer": "sgd"}),
        (("FullyShardedDataParallel", {"reshard_after_forward": False, "prefetch": 2}), NanoGPT, {"accumulate": 2}),
        (("FullyShardedDataParallel", {"optimizer_state_only": True}), NanoGPT, {"accumulate": 3, "clip_val": 0.1}),
        (("FullyShardedDataParallel", {"cpu_offload": True}), NanoGPT, {"clip_val": 0.1}),
        (("DataParallel", {}), GAN, {"tolerance": Tolerance(later=10)}),
        (("FullyShardedDataParallel", {}), GAN, {"tolerance": Tolerance(later=10)}),
        (("HybridParallel", {"ddp": 2, "fsdp": 1}), GAN, {"tolerance": Tolerance(later=10)}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else getattr(value, "__name__", None),
)
def test_data_axes(pool: WorkerPool, strategy: Any, model: Any, options: dict[str, Any]) -> None:
    assert_same_training(pool, model, strategy, world=2, seed_apart=True, **options)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("model", ["packed", "llama", "Qwen3"])
def test_tensor_parallel_of_2(pool: WorkerPool, model: str, sequence_parallel: bool) -> None:
    strategy = ("TensorParallel", {"sequence_parallel": sequence_parallel})
    if model == "packed":
        assert_same_training(pool, NanoGPT, strategy, world=2, plan=NANOGPT_PLAN, accumulate=2)
    elif model == "llama":
        assert_same_training(pool, HandLlama, strategy, world=2, plan=LLAMA_PLAN)
    else:
        assert_same_training(pool, HuggingFaceLM, strategy, world=2, model_kwargs={"arch": "Qwen3"})


@pytest.mark.parametrize("seq", [1, 2, 7, 15])
def test_sequence_that_does_not_divide(pool: WorkerPool, seq: int) -> None:
    assert_same_training(pool, NanoGPT, ("TensorParallel", {}), world=2, plan=NANOGPT_PLAN, seq=seq)


@pytest.mark.parametrize("mesh", [{"fsdp": 1, "tp": 4}, {"fsdp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_vocabulary_that_does_not_divide(pool: WorkerPool, mesh: dict[str, int], tied: bool) -> None:
    assert_same_training(
        pool, NanoGPT, ("HybridParallel", mesh), world=4, plan=NANOGPT_PLAN, model_kwargs={"vocab": 97, "tied": tied}
    )


def test_fewer_key_value_heads_than_ranks(pool: WorkerPool) -> None:
    assert_same_training(
        pool, HandLlama, ("TensorParallel", {}), world=4, plan=llama_plan(kv_heads=1), model_kwargs={"kv_heads": 1}
    )


def test_float64_leaves_nothing_to_rounding(pool: WorkerPool) -> None:
    tight = Tolerance(loss=1e-12, gradient=1e-11, norm=1e-12, weight=1e-10)
    assert_same_training(
        pool, NanoGPT, ("HybridParallel", {"fsdp": 2, "tp": 2}), world=4, plan=NANOGPT_PLAN, precision="64-true",
        tolerance=tight,
    )  # fmt: skip


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@pytest.mark.parametrize("mesh", [{"fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 1}], ids=str)
def test_optimizer_implementations(pool: WorkerPool, mesh: dict[str, int], flags: dict[str, bool]) -> None:
    # torchtune#2420: norms outside the plan stayed plain tensors, beside DTensors.
    assert_same_training(
        pool, NanoGPT, ("HybridParallel", mesh), world=2, clip_val=0.1, optimizer=OptimizerOptions(**flags),
        plan=NANOGPT_PLAN if mesh["tp"] > 1 else None,
    )  # fmt: skip


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"fsdp": 2, "tp": 2}], ids=str)
def test_clipping_by_value(pool: WorkerPool, mesh: dict[str, int]) -> None:
    assert_same_training(pool, HuggingFaceLM, ("HybridParallel", mesh), world=4, clip_val=0.01, clip_algorithm="value")


def test_a_wrong_plan_is_noticed(pool: WorkerPool) -> None:
    """The proof that these tests can fail: the packed projection cut as if it were one part."""
    wrong = {**NANOGPT_PLAN, "model.h.*.attn": "local"}
    with pytest.raises(RankError, match=r"shape|size|expected 3"):
        assert_same_training(pool, NanoGPT, ("TensorParallel", {}), world=2, plan=wrong)
