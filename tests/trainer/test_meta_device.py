"""Modules built on the meta device, in `configure_model` or before: one model on every mesh, and it trains."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from torch import nn

from tests.support.models import NANOGPT_PLAN, HuggingFaceLM, NanoGPT, Supervised
from tests.support.networks import GPT
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, build_strategy
from tests.support.training import Arrays, GlobalBatches, full_array

PLAN = dict(NANOGPT_PLAN)
MESHES: list[Spec] = [
    ("DataParallel", {}),
    ("FullyShardedDataParallel", {}),
    ("TensorParallel", {"plan": PLAN}),
    ("HybridParallel", {"fsdp": 2, "tp": 2, "plan": PLAN}),
    ("HybridParallel", {"ddp": 2, "fsdp": 2}),
]


class LateGPT(NanoGPT):
    """Builds its network in `configure_model`, on the meta device, once."""

    def __init__(self, *, tied: bool = True, half_loaded: bool = False) -> None:
        super().__init__()
        self.tied, self.half_loaded = tied, half_loaded
        del self.model

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        sizes: Any = {"vocab": 96, "dim": 32, "heads": 4, "layers": 2, "max_seq": 64, "tied": self.tied, "dropout": 0.0}
        with torch.device("meta"):
            self.model = GPT(**sizes)
        if self.half_loaded:
            # Ranks hold other values, as where only rank 0 has read the file.
            fill = 0.25 if self.global_rank == 0 else 9.0
            self.model.wpe.weight = nn.Parameter(torch.full((64, 32), fill))
            self.model.h[1].ln_1 = nn.LayerNorm(32)
            nn.init.constant_(self.model.h[1].ln_1.weight, fill)


def train(
    build: type[Supervised], strategy: Spec, *, precision: str = "32-true", **options: Any
) -> tuple[Arrays, Arrays, dict[str, Any]]:
    """The values before the first step, those after the last, and what kind of model it was."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(5 + 100 * rank)  # rank 0's seed decides
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=build_strategy(strategy), max_steps=2, precision=precision,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )  # fmt: skip
    module = build(**options)
    states: list[Arrays] = []
    module.on_train_start = lambda: states.append(_state(module))  # type: ignore[method-assign]
    module.on_train_end = lambda: states.append(_state(module))  # type: ignore[method-assign]
    torch.manual_seed(5 + 100 * rank)
    trainer.fit(module, datamodule=GlobalBatches(module, count=16, batch=8, seq=8))
    facts = {
        "parameters": len(list(module.parameters())),
        "dtypes": {name: str(buffer.dtype) for name, buffer in module.named_buffers()},
        "optimized": sum(len(group["params"]) for group in trainer.optimizers[0].param_groups),
    }
    return states[0], states[1], facts


def _state(module: nn.Module) -> Arrays:
    return {name: full_array(tensor) for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


def differing(one: Arrays, other: Arrays) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not np.array_equal(one[name], other[name])]


@pytest.mark.parametrize("strategy", MESHES, ids=lambda spec: "-".join([spec[0], *(k for k in spec[1] if k != "plan")]))
def test_one_model_on_every_mesh_and_it_trains(pool: WorkerPool, strategy: Spec) -> None:
    [(reference, _, _)] = pool.run_once(train, LateGPT, ("DataParallel", {}), world=1)
    world = 4 if strategy[0] == "HybridParallel" else 2  # type: ignore[index]
    for before, after, facts in pool.run(train, LateGPT, strategy, world=world):
        assert differing(reference, before) == []
        assert set(differing(before, after)) == set(before)  # every parameter moved
        assert facts["parameters"] == facts["optimized"] == len(reference)  # the tied weight is there once
        assert "model.lm_head.weight" not in before


@pytest.mark.parametrize("strategy", [MESHES[1], MESHES[3]], ids=["fsdp", "fsdp-tp"])
def test_loaded_parts_keep_rank_zeros_values(pool: WorkerPool, strategy: Spec) -> None:
    for before, _, _ in pool.run(train, LateGPT, strategy, world=4, half_loaded=True):
        assert (before["model.wpe.weight"] == 0.25).all()
        assert (before["model.h.1.ln_1.weight"] == 0.25).all()
        assert (before["model.h.0.ln_1.weight"] == 1).all()


class LateLlama(HuggingFaceLM):
    def __init__(self, *, on_meta: bool = True, tied: bool = False) -> None:
        with torch.device("meta" if on_meta else "cpu"):
            super().__init__("Llama", tie_word_embeddings=tied)


LLAMA_MESHES: list[tuple[Spec, int]] = [
    (("FullyShardedDataParallel", {}), 2),
    (("TensorParallel", {}), 2),
    (("HybridParallel", {"fsdp": 2, "tp": 2}), 4),
]


@pytest.mark.parametrize(("strategy", "world"), LLAMA_MESHES, ids=["fsdp", "tp", "fsdp-tp"])
def test_hugging_face_model_on_meta_has_its_rotary_table(pool: WorkerPool, strategy: Spec, world: int) -> None:
    """The table is in no checkpoint and must come from its formula; in half precision it stays float32."""
    table = 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    [(reference, _, _)] = pool.run_once(
        train, LateLlama, ("DataParallel", {}), world=1, precision="bf16-true", tied=True
    )
    for before, after, facts in pool.run(train, LateLlama, strategy, world=world, precision="bf16-true", tied=True):
        [name] = [name for name in before if name.endswith("rotary_emb.inv_freq")]
        np.testing.assert_allclose(before[name], table, rtol=1e-6)
        assert np.array_equal(before[name], after[name])
        assert facts["dtypes"][name] == "torch.float32"
        assert differing(reference, before) == []
        assert "model.lm_head.weight" not in before  # tied


def test_real_weights_come_from_rank_zero_whatever_the_seeds(pool: WorkerPool) -> None:
    """With `manual_seed(rank)` before the build, ranks would stitch their own models together."""
    [(reference, _, _)] = pool.run_once(train, LateLlama, ("DataParallel", {}), world=1, on_meta=False)
    for strategy, world in LLAMA_MESHES:
        for before, _, _ in pool.run(train, LateLlama, strategy, world=world, on_meta=False):
            assert differing(reference, before) == []
