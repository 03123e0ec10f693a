"""Blocks that are compiled train as on one device, on every axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.parity.test_randomness import PLAN, RATE, SEQ, Masks, set_up
from tests.support.models import NANOGPT_PLAN, HuggingFaceLM, NanoGPT
from tests.support.parity import Tolerance, assert_same_training
from tests.support.pool import WorkerPool

# Of the code that is generated for speed, rounding differs; of the other back ends it does not.
AOT, EAGER, GENERATED = ({"backend": name} for name in ("aot_eager", "eager", "inductor"))


@pytest.mark.parametrize(
    ("model", "strategy", "world", "compile"),
    [
        (NanoGPT, ("DataParallel", {}), 2, AOT),
        (NanoGPT, ("FullyShardedDataParallel", {}), 2, GENERATED),
        (HuggingFaceLM, ("TensorParallel", {}), 2, EAGER),
        (NanoGPT, ("HybridParallel", {"fsdp": 2, "tp": 2, "plan": dict(NANOGPT_PLAN)}), 4, EAGER),
        (NanoGPT, ("PipelineParallel", {}), 2, AOT),
    ],
    ids=["ddp", "fsdp-inductor", "tp", "fsdp-tp", "pp"],
)
def test_compiled_blocks(pool: WorkerPool, model: Any, strategy: Any, world: int, compile: dict[str, str]) -> None:
    strategy = (strategy[0], {**strategy[1], "compile": compile})
    parity = assert_same_training(
        pool, model, strategy, world=world, steps=2, accumulate=2, tolerance=Tolerance(gradient=2e-6), timeout=280
    )
    held = {name for rank in parity.ranks for name in rank.final}
    assert held == set(parity.reference.final), "names of parameters stay plain"


def outer_masks(compile: dict[str, str] | bool) -> tuple[np.ndarray, int]:
    """What dropout on sequence shards left of ones, in the third step; and how many graphs were made."""
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    module = Masks(keep=False)
    for name, child in module.named_modules():
        if isinstance(child, nn.Dropout):
            child.p = RATE if name == "layers.0.layer.outer" else 0.0
        elif isinstance(child, nn.Linear):
            nn.init.zeros_(child.weight)
            nn.init.constant_(child.bias, 1.0 if name == "layers.0.layer.down" else 0.0)
    step = set_up(module, {"tp": 2}, PLAN, compile=compile)
    for _ in range(3):
        out = step.run("training", lambda: module(torch.zeros(4, SEQ, 64)), (), {}, keep_gathered=True)
        with step.backward():
            out.sum().backward()
    return (out != 0).numpy(), torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_masks_of_compiled_blocks_differ_over_shards(pool: WorkerPool) -> None:
    """pytorch#138329, where DTensor's random operations are traced once and run without DTensor."""
    (compiled, num_graphs), (peer, _) = pool.run(outer_masks, AOT, world=2, timeout=280)
    assert num_graphs > 0, "nothing was compiled"
    assert np.array_equal(compiled, peer)
    first, second = np.split(compiled, 2, axis=1)
    assert not np.array_equal(first, second)
    assert abs(compiled.mean() - (1 - RATE)) < 6 * (RATE * (1 - RATE) / compiled.size) ** 0.5
    eager, num_graphs = pool.run(outer_masks, False, world=2)[0]
    assert num_graphs == 0
    assert np.array_equal(compiled, eager)
