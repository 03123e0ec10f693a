"""The parity helper, held against Lightning's own DDP: it accepts what is right and rejects what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lightning import LightningModule

from tests.support.broken import InitialisedByRank, LossOfTheRank, OneGradientByRank
from tests.support.comparison import Parity, Tolerance, compare, total_norm
from tests.support.meshes import factorisations, mesh_id
from tests.support.models import GAN, Classifier, EncoderLM, HandLlama, HuggingFaceLM, NanoGPT, OptimizerOptions
from tests.support.parity import assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import describe
from tests.support.training import GlobalBatchSampler, Record, Training, train

DDP = ("DDPStrategy", {})


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_trains_as_one_device(pool: WorkerPool, world: int) -> None:
    parity = assert_same_training(pool, NanoGPT, DDP, world=world)
    assert len(parity.losses) == 3
    assert parity.losses[0] > parity.losses[-1] - 1.0
    assert len(parity.ranks) == world


@pytest.mark.parametrize(
    ("model", "kwargs"),
    [
        (HandLlama, {}),
        (EncoderLM, {}),
        (Classifier, {}),
        (GAN, {}),
        (HuggingFaceLM, {"arch": "Llama"}),
        (HuggingFaceLM, {"arch": "Qwen3"}),
        (HuggingFaceLM, {"arch": "GPT2"}),
    ],
)
def test_every_model_trains(pool: WorkerPool, model: type[LightningModule], kwargs: dict[str, Any]) -> None:
    ddp = ("DDPStrategy", {"find_unused_parameters": model is GAN})
    parity = assert_same_training(pool, model, ddp, world=2, steps=2, model_kwargs=kwargs)
    assert parity.gradient_error > 0, "nothing was compared"
    moved = [name for name in parity.reference.initial if _differs(parity, name)]
    assert moved


def _differs(parity: Parity, name: str) -> bool:
    return not np.array_equal(parity.reference.initial[name], parity.reference.final[name])


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"clip_val": 0.1},
        {"clip_val": 0.01, "clip_algorithm": "value"},
        {"optimizer": OptimizerOptions(name="sgd", lr=0.1, momentum=0.9)},
        {"optimizer": OptimizerOptions(decay_groups=True, fused=True)},
        {"precision": "64-true"},
        {"seed_apart": True},
    ],
    ids=str,
)
def test_options(pool: WorkerPool, options: dict[str, Any]) -> None:
    assert_same_training(pool, NanoGPT, DDP, world=2, **options)


def test_reference_is_trained_once(pool: WorkerPool) -> None:
    first = assert_same_training(pool, Classifier, DDP, world=2)
    second = assert_same_training(pool, Classifier, DDP, world=4)
    assert first.reference is second.reference


def test_clipping_is_seen(pool: WorkerPool) -> None:
    parity = assert_same_training(pool, NanoGPT, DDP, world=2, clip_val=0.1)
    assert all(norm > 0.1 for norm in parity.norms)
    assert [total_norm(clipped) for clipped in parity.reference.clipped] == pytest.approx([0.1] * 3, rel=1e-4)


def test_missing_gradient_sync_is_rejected(pool: WorkerPool) -> None:
    wrong = ("tests.support.broken:UnsyncedDDP", {})
    with pytest.raises(AssertionError, match=r"UnsyncedDDP\(\) on 2 ranks, NanoGPT does not train") as caught:
        assert_same_training(pool, NanoGPT, wrong, world=2)
    assert "first: gradient of model.wte.weight at step 0 on rank 0" in str(caught.value)


def test_one_wrong_gradient_is_rejected_by_name(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_same_training(pool, OneGradientByRank, DDP, world=2)
    first = str(caught.value).splitlines()[1]
    assert "gradient of model.h.1.mlp.c_fc.weight at step 0 on rank 1: off by 0.0001" in first


def test_loss_that_is_not_reduced_is_rejected(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError, match=r"first: loss of batch 0 on rank 0"):
        assert_same_training(pool, LossOfTheRank, DDP, world=2, steps=1)


def test_other_initial_weights_are_rejected(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError, match=r"first: initial model\.0\.bias on rank 1: off by 1"):
        assert_same_training(pool, InitialisedByRank, DDP, world=2, steps=1)


@pytest.fixture(scope="module")
def record(pool: WorkerPool) -> Record:
    training = Training(
        model=Classifier,
        model_kwargs={},
        strategy=None,
        steps=2,
        batch=8,
        seq=1,
        accumulate=1,
        clip_val=0.01,
        clip_algorithm="norm",
        precision="32-true",
        trainer_kwargs={},
    )
    return pool.run_once(train, training, world=1)[0]


def _changed(arrays: dict[str, np.ndarray], name: str, factor: float) -> dict[str, np.ndarray]:
    return {**arrays, name: arrays[name] * np.float32(factor)}


NAME = "model.2.weight"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda r: replace(r, initial=_changed(r.initial, NAME, 1 + 1e-6)),
            "initial model.2.weight on rank 1: .* bit for bit",
        ),
        (lambda r: replace(r, losses=[r.losses[0], r.losses[1] + 1e-5]), "loss of batch 1 on rank 1"),
        (lambda r: replace(r, losses=[r.losses[0], float("nan")]), "loss of batch 1 on rank 1"),
        (lambda r: replace(r, losses=r.losses[:1]), r"number of losses \(1, not 2\) on rank 1"),
        (
            lambda r: replace(r, gradients=[_changed(r.gradients[0], NAME, 1 + 1e-5), r.gradients[1]]),
            "gradient of model.2.weight at step 0 on rank 1",
        ),
        (
            lambda r: replace(r, gradients=[{k: g for k, g in r.gradients[0].items() if k != NAME}, r.gradients[1]]),
            r"gradient of model.2.weight \(missing\) at step 0 on rank 1",
        ),
        (
            lambda r: replace(r, clipped=[r.clipped[0], {k: g * 2 for k, g in r.clipped[1].items()}]),
            "clipped gradient of model.0.weight at step 1 on rank 1",
        ),
        (lambda r: replace(r, final=_changed(r.final, NAME, 1 + 1e-3)), "weight model.2.weight after the last step"),
        (lambda r: replace(r, final=_changed(r.final, NAME, 1 + 2e-7)), "replica of model.2.weight on rank 1, beside"),
        (
            lambda r: replace(r, final={k: w for k, w in r.final.items() if k != NAME}),
            r"weight model.2.weight \(missing\) on ranks \[1\]",
        ),
        (
            lambda r: replace(r, final={**r.final, "head.weight": r.final[NAME]}),
            "weight head.weight that the module does not have",
        ),
    ],
)
def test_each_kind_of_error_is_named(record: Record, wrong: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=f"(first|worst): {message}"):
        compare(record, [record, wrong(record)], Tolerance(), title="test")


def test_stages_may_hold_a_part_each(record: Record) -> None:
    def part(keep: set[str]) -> Record:
        def only(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: array for name, array in arrays.items() if name in keep}

        return replace(
            record,
            initial=only(record.initial),
            final=only(record.final),
            gradients=[only(g) for g in record.gradients],
            clipped=[only(g) for g in record.clipped],
            absent=set(record.final) - keep,
        )

    names = sorted(record.final)
    compare(record, [part(set(names[:3])), part(set(names[3:]))], Tolerance(), title="test")
    with pytest.raises(AssertionError, match=rf"weight {names[-1]} \(missing\) on ranks all"):
        compare(record, [part(set(names[:3])), part(set(names[3:-1]))], Tolerance(), title="test")


def test_samplers_share_out_each_global_batch() -> None:
    shares = [list(GlobalBatchSampler(16, 8, num_replicas=2, rank=rank)) for rank in range(2)]
    assert shares == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    with pytest.raises(ValueError, match="8 does not divide over 3"):
        GlobalBatchSampler(16, 8, num_replicas=3, rank=0)


def test_factorisations() -> None:
    assert factorisations(4, ["fsdp", "tp"]) == [{"fsdp": 1, "tp": 4}, {"fsdp": 2, "tp": 2}, {"fsdp": 4, "tp": 1}]
    assert len(factorisations(8, ["ddp", "fsdp", "tp"])) == 10
    assert factorisations(6, []) == []
    assert mesh_id({"ddp": 1, "fsdp": 2, "tp": 2}) == "fsdp2-tp2"


def test_specs_read_as_written() -> None:
    spec = ("HybridParallel", {"fsdp": ("FullyShardedDataParallel", {"size": 2}), "tp": 2, "plan": {"a": "norm"}})
    assert describe(spec) == "HybridParallel(fsdp=FullyShardedDataParallel(size=2), tp=2)"
