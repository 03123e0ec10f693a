"""Sequences over context ranks: loss, gradients, norm and weights equal one device's, for every method and mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from lightning_parallel.schemes.context.blocks import _WAYS, Blocks
from lightning_parallel.schemes.context.redirect import _ATTENTION, AttentionOverRanks
from tests.support.failures import RankError
from tests.support.models import (
    LLAMA_PLAN,
    NANOGPT_PLAN,
    EncoderLM,
    HandLlama,
    HuggingFaceLM,
    NanoGPT,
    OptimizerOptions,
)
from tests.support.parity import Tolerance, assert_same_training, compare
from tests.support.pool import WorkerPool
from tests.support.training import Record, Training, train

ONE_DEVICE = Training(
    model=NanoGPT, model_kwargs={}, strategy=None, steps=2, batch=4, seq=16, accumulate=1, clip_val=None,
    clip_algorithm="norm", precision="32-true", trainer_kwargs={},
)  # fmt: skip
METHODS = ("ring", "allgather", "ulysses")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (NanoGPT, {"accumulate": 2, "clip_val": 0.1}),
        (HandLlama, {"seq": 15}),
        (EncoderLM, {"optimizer": OptimizerOptions(decay_groups=True)}),
        (HuggingFaceLM, {"seq": 7}),
        (HuggingFaceLM, {"model_kwargs": {"arch": "Qwen3"}}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_two_ranks(pool: WorkerPool, model: Any, options: dict[str, Any], method: str) -> None:
    assert_same_training(pool, model, ("ContextParallel", {"method": method}), world=2, seed_apart=True, **options)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({}, {}),
        ({"balanced": False}, {"seq": 13}),
        ({"method": "allgather", "balanced": False}, {"seq": 1}),
        ({"method": "ring"}, {"seq": 2}),
        ({"method": "ulysses"}, {"seq": 5, "clip_val": 0.1}),
        ({"method": "allgather"}, {"precision": "64-true", "seq": 6}),
        ({"method": "ulysses"}, {"model": HuggingFaceLM}),  # fewer key heads than ranks: TRAPS 60
    ],
    ids=str,
)
def test_four_ranks(pool: WorkerPool, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    options = dict(options)
    model = options.pop("model", NanoGPT)
    assert_same_training(pool, model, ("ContextParallel", strategy), world=4, **options)


def broken_training(training: Training) -> Record:
    """A block's attention is not exchanged, and nobody looks."""
    with (
        patch.object(AttentionOverRanks, "attention", lambda self, q, k, v, *rest, **options: _ATTENTION(q, k, v)),
        patch.object(Blocks, "_prove", lambda self, *args: _WAYS[0]),
    ):
        return train(training)


def test_parity_sees_attention_that_is_not_exchanged(pool: WorkerPool) -> None:
    [reference] = pool.run_once(train, ONE_DEVICE, world=1)
    ranks = pool.run(broken_training, replace(ONE_DEVICE, strategy=("ContextParallel", {})), world=2)
    with pytest.raises(AssertionError, match="loss"):
        compare(reference, ranks, Tolerance(), title="broken")


def test_a_block_is_refused_whose_attention_is_not_exchanged(pool: WorkerPool) -> None:
    with pytest.raises(RankError, match=r"PlanError: model.h.0 \(GPTBlock\) gives other values"):
        pool.run(unseen_training, replace(ONE_DEVICE, strategy=("ContextParallel", {})), world=2)


def unseen_training(training: Training) -> Record:
    with patch.object(AttentionOverRanks, "attention", lambda self, q, k, v, *rest, **options: _ATTENTION(q, k, v)):
        return train(training)


@pytest.mark.parametrize(
    "arch",
    [
        "GPT2",
        "GPTNeoX",
        "Gemma3Text",
        "Mistral",
        "Phi",
        "Olmo2",
        "Cohere",
        "Granite",
        "Gemma2",
        "GptOss",
        "OPT",
        "Mixtral",
    ],
)
def test_hugging_face_families(pool: WorkerPool, arch: str) -> None:
    options = {"arch": arch, **({"dropout": 0.0} if arch == "OPT" else {})}
    assert_same_training(pool, HuggingFaceLM, ("ContextParallel", {}), world=2, model_kwargs=options, optimizer="sgd")


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"ddp": 2, "fsdp": 1, "cp": 2}, {"accumulate": 2, "clip_val": 0.1}),
        ({"fsdp": 2, "cp": 2}, {"accumulate": 2, "clip_val": 0.1}),
        ({"fsdp": 2, "cp": ("ContextParallel", {"size": 2, "method": "ulysses"})}, {"model": HuggingFaceLM}),
        ({"fsdp": 1, "cp": 2, "tp": 2}, {"plan": NANOGPT_PLAN, "clip_val": 0.1}),
        ({"fsdp": 1, "cp": 2, "tp": 2}, {"model": HuggingFaceLM}),
        ({"fsdp": 1, "cp": 2, "pp": ("PipelineParallel", {"size": 2, "microbatches": 4})}, {"clip_val": 0.1}),
        (
            {
                "fsdp": 1,
                "cp": 2,
                "pp": ("PipelineParallel", {"size": 2, "microbatches": 2, "schedule": "ZBVZeroBubble"}),
            },
            {"model": HuggingFaceLM, "seq": 7, "model_kwargs": {"layers": 4}},
        ),
    ],
    ids=str,
)
def test_meshes_of_4(pool: WorkerPool, mesh: dict[str, Any], options: dict[str, Any]) -> None:
    options = dict(options)
    model = options.pop("model", NanoGPT)
    assert_same_training(pool, model, ("HybridParallel", mesh), world=4, seed_apart=True, **options)


@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 2, "cp": 2, "tp": 2},
        {"fsdp": 1, "cp": 2, "tp": 2, "pp": ("PipelineParallel", {"size": 2, "microbatches": 2})},
        {"ddp": 2, "fsdp": 2, "cp": 2},
    ],
    ids=str,
)
def test_meshes_of_8(pool: WorkerPool, mesh: dict[str, Any]) -> None:
    plan = LLAMA_PLAN if mesh.get("tp") else None
    assert_same_training(pool, HandLlama, ("HybridParallel", mesh), world=8, plan=plan, clip_val=0.1)
