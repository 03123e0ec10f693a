"""What a pipeline holds and sends, counted in a run, equals the formulas. No timings."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_parallel import PipelineParallel
from lightning_parallel.schemes.pipeline.ghost import is_ghost
from tests.support.collectives import Traffic, record_traffic
from tests.support.models import HuggingFaceLM, NanoGPT
from tests.support.pool import WorkerPool
from tests.support.training import GlobalBatches

BATCH, SEQ, DIM, LAYERS, MICROBATCHES = 8, 16, 32, 4, 8


@dataclass(kw_only=True, slots=True)
class Held:
    """By one rank.

    Attributes:
        in_flight: Of each rank, the most microbatches whose activations it holds at a time.
        saved: The most bytes that autograd keeps for backward at a time, parameters apart.
        parameters: Bytes of the parameters that are real here.
        whole: Bytes of all parameters of the model.
    """

    in_flight: list[int]
    saved: int
    parameters: int
    whole: int


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what graphs hold until they are freed."""

    class _Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def __init__(self, module: LightningModule) -> None:
        super().__init__(self._pack, lambda holder: holder.tensor)
        self.live = self.peak = 0
        self._module = module

    def _pack(self, tensor: Tensor) -> Any:
        holder = self._Holder(tensor)
        if not isinstance(tensor, torch._subclasses.FakeTensor) and not self._is_parameter(tensor):
            self.live += tensor.nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(holder, self._free, tensor.nbytes)
        return holder

    def _free(self, size: int) -> None:
        self.live -= size

    def _is_parameter(self, tensor: Tensor) -> bool:
        start = tensor.untyped_storage().data_ptr()
        real = (p for p in self._module.parameters() if not is_ghost(p))
        return any(p.untyped_storage().data_ptr() == start for p in real)


def hold(schedule: str) -> Held:
    """Train two steps, and count. Runs on every rank."""
    torch.manual_seed(0)
    module = NanoGPT(layers=LAYERS, tied=False)
    whole = sum(p.nbytes for p in module.parameters())
    strategy = PipelineParallel(schedule=schedule, microbatches=MICROBATCHES, measure=True)
    in_flight: list[int] = []

    class Measure(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            in_flight.extend(strategy.pipeline_timeline(measured=True).in_flight())

    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_epochs=1, logger=False,
        callbacks=[Measure()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    with (saved := SavedBytes(module)):
        trainer.fit(module, datamodule=GlobalBatches(module, count=2 * BATCH, batch=BATCH, seq=SEQ))
    assert saved.live == 0
    parameters = sum(p.nbytes for p in module.parameters() if not is_ghost(p))
    return Held(in_flight=in_flight, saved=saved.peak, parameters=parameters, whole=whole)


@pytest.mark.parametrize("pp", [2, 4])
def test_activations_and_parameters(pool: WorkerPool, pp: int) -> None:
    gpipe, one_f_one_b = (pool.run_once(hold, schedule, world=pp) for schedule in ("GPipe", "1F1B"))
    assert gpipe[0].in_flight == [MICROBATCHES] * pp
    assert one_f_one_b[0].in_flight == [min(pp - rank, MICROBATCHES) for rank in range(pp)]
    for rank in range(pp):
        # (p - rank) of m microbatches, to the byte.
        assert one_f_one_b[rank].saved * MICROBATCHES == gpipe[rank].saved * (pp - rank) > 0
    for ranks in (gpipe, one_f_one_b):
        assert sum(held.parameters for held in ranks) == ranks[0].whole, "each parameter is on one stage"


def sends(seen: Traffic) -> Counter[int]:
    """Elements of each send between stages of the second batch: in the first, ranks also tell each other shapes.

    The last stage sends what it logged besides, as bytes.
    """
    return Counter(call.numel for call in seen.of(1, kind="send") if call.dtype.is_floating_point)


@pytest.mark.parametrize("microbatches", [4, 8])
def test_a_boundary_carries_the_hidden_state_and_its_gradient(pool: WorkerPool, microbatches: int) -> None:
    """2·b·s·h a boundary and microbatch: each of its ends sends one b·s·h."""
    options = {"schedule": "1F1B", "microbatches": microbatches}
    ranks = pool.run_once(
        record_traffic, HuggingFaceLM, ("PipelineParallel", options), world=4, model_kwargs={"layers": LAYERS}
    )
    b_s_h = BATCH // microbatches * SEQ * DIM
    boundaries = [1, 2, 2, 1]  # that a rank is at
    assert [sends(seen) for seen in ranks] == [Counter({b_s_h: n * microbatches}) for n in boundaries]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_boundary_beside_tensor_parallelism(pool: WorkerPool, sequence_parallel: bool) -> None:
    """With sequence parallelism each tp rank sends its shard; without it, the whole."""
    options = {"fsdp": 1, "tp": ("TensorParallel", {"size": 2, "sequence_parallel": sequence_parallel}), "pp": 2}
    ranks = pool.run_once(record_traffic, HuggingFaceLM, ("HybridParallel", options), world=4)
    b_s_h, microbatches = BATCH // 4 * SEQ * DIM, 4
    expected = Counter({b_s_h // (2 if sequence_parallel else 1): microbatches})
    assert [sends(seen) for seen in ranks] == [expected] * 4


@pytest.mark.parametrize(("schedule", "num_roots"), [("1F1B", 4), ("ZBVZeroBubble", 2)])
def test_shards_are_gathered_and_reduced_once_a_step(pool: WorkerPool, schedule: str, num_roots: int) -> None:
    """Not once a microbatch: one unit a block, one for the root where a rank holds the stem or the head."""
    pipeline = ("PipelineParallel", {"size": 2, "schedule": schedule, "microbatches": 4})
    ranks = pool.run_once(
        record_traffic, NanoGPT, ("HybridParallel", {"fsdp": 2, "pp": pipeline}), world=4,
        model_kwargs={"layers": LAYERS, "tied": False},
    )  # fmt: skip
    for kind in ("all_gather", "reduce_scatter"):
        counts = sorted(len(seen.of(1, "fsdp", kind)) - LAYERS // 2 for seen in ranks)
        assert counts == [0] * (4 - num_roots) + [1] * num_roots
    assert {call.kind for seen in ranks for call in seen.of(1, "fsdp")} == {"all_gather", "reduce_scatter"}
