"""Pipeline stages train as one device does: every schedule, models, ties, accumulation, and the other axes beside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.comparison import Tolerance, compare
from tests.support.models import BatchNormed, EncoderLM, HandLlama, HuggingFaceLM, NanoGPT, OptimizerOptions
from tests.support.parity import assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.support.training import Training, train

SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied": (NanoGPT, {"tied": True}),
    "untied": (NanoGPT, {"tied": False}),
    "encoder": (EncoderLM, {}),
    "Llama": (HuggingFaceLM, {"arch": "Llama"}),
}
# Sums over microbatches add up in another order than one device's, through 8 blocks.
ROUNDING = Tolerance(gradient=2e-6)
# Every pair of schedule, model, number of ranks and accumulation.
CASES = [
    pytest.param(schedule, model, 4 if (i + j) % 2 else 2, 1 + (i + j // 2) % 2, id=f"{schedule}-{model}")
    for i, schedule in enumerate(SCHEDULES)
    for j, model in enumerate(MODELS)
]


def check(pool: WorkerPool, model: Any, strategy: Spec, *, world: int, layers: int = 4, **options: Any) -> Any:
    model_kwargs = {"layers": layers, **options.pop("model_kwargs", {})}
    return assert_same_training(
        pool, model, strategy, world=world, model_kwargs=model_kwargs, tolerance=ROUNDING, **options
    )


@pytest.mark.parametrize(("schedule", "model", "pp", "accumulate"), CASES)
def test_schedules(pool: WorkerPool, schedule: str, model: str, pp: int, accumulate: int) -> None:
    # torchtitan#1733, #2972, piper#13; clipping needs the norm over all stages, tied weights in it once.
    kind, model_kwargs = MODELS[model]
    microbatches = 8 if (schedule, pp) == ("DualPipeV", 4) else 4
    strategy = ("PipelineParallel", {"schedule": schedule, "microbatches": microbatches})
    check(
        pool, kind, strategy, world=pp, layers=8, steps=3 if model == "tied" else 2, accumulate=accumulate,
        clip_val=0.1, model_kwargs=model_kwargs, optimizer=OptimizerOptions(decay_groups=True),
    )  # fmt: skip


INTERLEAVED = ("PipelineParallel", {"size": 2, "schedule": "Interleaved1F1B", "microbatches": 4})
EAGER = ("PipelineParallel", {"size": 2, "microbatches": 4, "reduce_every_microbatch": True})
ZERO_BUBBLE = ("PipelineParallel", {"size": 2, "schedule": "ZBVZeroBubble", "microbatches": 4})


@pytest.mark.parametrize(
    ("mesh", "model", "model_kwargs"),
    [
        ({"ddp": 2, "fsdp": 1, "pp": 2}, NanoGPT, {}),
        ({"fsdp": 2, "pp": 2}, NanoGPT, {}),
        ({"fsdp": 2, "pp": ZERO_BUBBLE}, HandLlama, {}),
        ({"fsdp": 2, "pp": EAGER}, NanoGPT, {"tied": True}),
        ({"fsdp": 1, "tp": 2, "pp": 2}, HuggingFaceLM, {}),
        ({"fsdp": 2, "tp": 2, "pp": INTERLEAVED}, HuggingFaceLM, {"tie_word_embeddings": True}),
        ({"ddp": 2, "fsdp": 2, "pp": 2}, NanoGPT, {}),
    ],
    ids=[
        "ddp-pp",
        "fsdp-pp",
        "fsdp-zbv",
        "fsdp-eager",
        "tp-pp",
        "fsdp-tp-pp",
        "hsdp-pp",
    ],
)
def test_meshes(pool: WorkerPool, mesh: dict[str, Any], model: Any, model_kwargs: dict[str, Any]) -> None:
    sizes = [2 if isinstance(size, tuple) else size for size in mesh.values()]
    world = int(np.prod(sizes))
    check(
        pool, model, ("HybridParallel", mesh), world=world, model_kwargs=model_kwargs, clip_val=0.1, steps=2,
        accumulate=1 if world == 8 else 2,
    )  # fmt: skip


def test_schedule_from_a_file(pool: WorkerPool, tmp_path: Path) -> None:
    """All forwards, then the backwards last microbatch first: no schedule of torch does that."""
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0F1,0F2,,,0B2,0B1,0B0\n,1F0,1F1,1F2,1B2,1B1,1B0,\n")
    check(pool, NanoGPT, ("PipelineParallel", {"schedule": str(path)}), world=2, batch=6)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("pp", [2, 4])
def test_batch_norm_sees_each_microbatch_once(pool: WorkerPool, schedule: str, pp: int) -> None:
    # torchgpipe#14: a forward that only looks at shapes must not count.
    one_device = Training(
        model=BatchNormed, model_kwargs={}, strategy=None, steps=2, batch=2, seq=1, accumulate=8, clip_val=None,
        clip_algorithm="norm", precision="32-true", trainer_kwargs={},
    )  # fmt: skip
    strategy = ("PipelineParallel", {"schedule": schedule, "microbatches": 8})
    [reference] = pool.run_once(train, one_device, world=1)
    means = np.reshape(reference.losses, (2, 8)).mean(1).tolist()
    ranks = pool.run(train, replace(one_device, strategy=strategy, batch=16, accumulate=1), world=pp)
    tracked = [name for name in reference.final if name.endswith("num_batches_tracked")]
    assert [reference.final[name] for name in tracked] == [16] * 8
    compare(replace(reference, losses=means), ranks, ROUNDING, title=f"{schedule} on {pp} ranks")


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        ("ForgetsTies", "gradient of model.wte.weight at step 0"),
        ("DoublesAMicrobatch", "gradient of .* at step 0 on rank 0"),
        ("CountsTiesTwice", "clipped gradient of .* at step 0 on rank 0"),
    ],
)
def test_a_wrong_pipeline_is_noticed(pool: WorkerPool, broken: str, first: str) -> None:
    """The proof that these tests can fail."""
    strategy = (f"tests.support.broken:{broken}", {"microbatches": 2})
    with pytest.raises(AssertionError, match=f"first: {first}"):
        check(pool, NanoGPT, strategy, world=2, steps=1, clip_val=0.1)
