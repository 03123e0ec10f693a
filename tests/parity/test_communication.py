"""What a step sends, collective by collective, equals the formulas.

Elements that a rank sends, by ring algorithms: an all-reduce of n elements over N ranks is 2n(N-1)/N, an all-gather
to n or a reduce-scatter of n is n(N-1)/N.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.support.collectives import Collective, Traffic, record_traffic
from tests.support.models import NANOGPT_PLAN, HuggingFaceLM, NanoGPT
from tests.support.pool import WorkerPool

BATCH, SEQ, DIM, LAYERS, VOCAB = 8, 16, 32, 2, 96
# Of `NanoGPT` at its default size: what its blocks hold, and what the root does (embeddings, tied head, last norm).
BLOCK = 12_704
ROOT = VOCAB * DIM + 64 * DIM + 2 * DIM
ALL = 2 * BLOCK + ROOT


def kinds(calls: list[Collective]) -> Counter[tuple[str, int]]:
    return Counter((call.kind, call.numel) for call in calls)


def traffic(pool: WorkerPool, model: Any, strategy: Any, *, world: int, **options: Any) -> Traffic:
    """Of one rank, after a look that all ranks send the same."""
    ranks = pool.run_once(record_traffic, model, strategy, world=world, **options)
    for rank, other in enumerate(ranks):
        assert other.batches == ranks[0].batches, f"rank {rank} sends other things than rank 0"
    return ranks[0]


def test_replicas_all_reduce_each_gradient_once_a_window(pool: WorkerPool) -> None:
    seen = traffic(pool, NanoGPT, ("DataParallel", {}), world=2, accumulate=2)
    assert seen.numel == ALL
    assert seen.of(0) == seen.of(2) == [], "nothing is sent before the window ends"
    # The first window also settles which parameters are used: one number each (see [Note: unused parameters]).
    assert kinds(seen.of(1)) == {("all_reduce", ALL): 1, ("all_reduce", 28): 1}
    assert kinds(seen.of(3)) == {("all_reduce", ALL): 1}
    assert seen.sent(3) == 2 * ALL * (2 - 1) / 2
    assert {call.dtype for call in seen.of(3)} == {torch.float32}


def test_a_window_sends_less_than_its_batches_apart(pool: WorkerPool) -> None:
    window = traffic(pool, NanoGPT, ("DataParallel", {}), world=2, accumulate=2)
    apart = traffic(pool, NanoGPT, ("DataParallel", {}), world=2, accumulate=1)
    assert sum(len(apart.of(batch)) for batch in (0, 1)) == 2 * len(window.of(3)) + 1


@pytest.mark.parametrize(
    ("options", "gathers_a_block"),
    [({}, 2), ({"reshard_after_forward": False}, 1), ({"optimizer_state_only": True}, 1)],
    ids=["zero3", "zero2", "zero1"],
)
@pytest.mark.parametrize("world", [2, 4])
def test_shards(pool: WorkerPool, options: Mapping[str, Any], gathers_a_block: int, world: int) -> None:
    seen = traffic(pool, NanoGPT, ("FullyShardedDataParallel", options), world=world, steps=2)
    # The root stays gathered from its forward to its backward, which follows at once.
    gathers = {("all_gather", BLOCK): LAYERS * gathers_a_block, ("all_gather", ROOT): 1}
    reductions = {("reduce_scatter", BLOCK): LAYERS, ("reduce_scatter", ROOT): 1}
    for batch in range(2):
        assert kinds(seen.of(batch)) == gathers | reductions
        part = (world - 1) / world
        assert seen.sent(batch) == (gathers_a_block + 1) * LAYERS * BLOCK * part + 2 * ROOT * part
    if gathers_a_block == 2:
        assert seen.sent(0) == 3 * ALL * part - ROOT * part


@pytest.mark.parametrize(
    ("options", "first", "last"),
    [
        ({}, {("all_gather", BLOCK): 4, ("all_gather", ROOT): 1}, {("all_gather", BLOCK): 4, ("all_gather", ROOT): 1}),
        ({"optimizer_state_only": True}, {("all_gather", BLOCK): 2, ("all_gather", ROOT): 1}, {}),
    ],
    ids=["zero3", "zero1"],
)
def test_shards_reduce_once_a_window(pool: WorkerPool, options: Any, first: Any, last: Any) -> None:
    seen = traffic(pool, NanoGPT, ("FullyShardedDataParallel", options), world=2, accumulate=2)
    reductions = {("reduce_scatter", BLOCK): LAYERS, ("reduce_scatter", ROOT): 1}
    for window in (0, 2):
        assert kinds(seen.of(window)) == first, "without synchronisation no gradient is sent"
        assert kinds(seen.of(window + 1)) == last | reductions


def test_replicas_of_shards(pool: WorkerPool) -> None:
    seen = traffic(pool, NanoGPT, ("HybridParallel", {"ddp": 2, "fsdp": 2}), world=4, steps=1)
    assert seen.sent(0, "fsdp") == (3 * ALL - ROOT) / 2
    # Each rank averages its shard over the replicas.
    assert kinds(seen.of(0, "ddp")) == {("all_reduce", BLOCK // 2): LAYERS, ("all_reduce", ROOT // 2): 1}
    assert seen.sent(0, "ddp") == 2 * (ALL / 2) / 2


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("view", ["local", "global"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallel_layers(pool: WorkerPool, world: int, view: str, sequence_parallel: bool) -> None:
    """8·b·s·h·(t-1)/t a layer, in the global view (packed attention) as in local regions (Hugging Face's Llama)."""
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
    if view == "local":
        seen = traffic(pool, HuggingFaceLM, ("TensorParallel", options), world=world, model_kwargs={"kv_heads": 4})
    else:
        seen = traffic(pool, NanoGPT, ("TensorParallel", {**options, "plan": dict(NANOGPT_PLAN)}), world=world)
    b_s_h, part = BATCH * SEQ * DIM, (world - 1) / world
    activations = Counter(call.kind for call in seen.of(1) if call.numel == b_s_h)
    # Outside the layers: the embedding's result is summed, and so is the gradient of the head's input.
    outside: float = 2 * 2 * b_s_h * part
    if sequence_parallel:
        # 2 gathers and 2 scatters forward, as many backward. At either end of the blocks the stream is gathered.
        assert activations == {"all_gather": 4 * LAYERS + 2, "reduce_scatter": 4 * LAYERS, "all_reduce": 2}
        outside += 2 * b_s_h * part
    else:
        assert activations == {"all_reduce": 4 * LAYERS + 2}
    sent = sum(call.sent for call in seen.of(1) if call.numel == b_s_h)
    assert sent == LAYERS * 8 * b_s_h * part + outside
    rest = kinds([call for call in seen.of(1) if call.numel != b_s_h])
    # Cross entropy: 4 numbers a token (the maximum; then the sum, the target's logit and the sum of logits).
    loss = Counter({("all_reduce", BATCH * SEQ): 1, ("all_reduce", 3 * BATCH * SEQ): 1})
    assert rest == loss + gradients_stored_whole(view, sequence_parallel)


def gradients_stored_whole(view: str, sequence_parallel: bool) -> Counter[tuple[str, int]]:
    """What is reduced at the end of a window: parameters of which each rank used a part, or its own tokens.

    They are norms and row-wise biases where the sequence is split, and biases of packed projections.
    """
    norms = LAYERS * 2 * (2 * DIM if view == "global" else DIM)
    packed_bias = LAYERS * 3 * DIM if view == "global" else 0
    row_biases = LAYERS * 2 * DIM if view == "global" else 0
    numel = packed_bias + (norms + row_biases if sequence_parallel else 0)
    return Counter({("all_reduce", numel): 1} if numel else {})


def test_tensor_parallel_sums_partial_gradients_once_a_window(pool: WorkerPool) -> None:
    strategy = ("TensorParallel", {"plan": dict(NANOGPT_PLAN)})
    seen = traffic(pool, NanoGPT, strategy, world=2, accumulate=2)
    numel = LAYERS * (4 * DIM + 2 * DIM + 3 * DIM)
    assert [kinds(seen.of(batch))["all_reduce", numel] for batch in range(4)] == [0, 1, 0, 1]


def test_every_axis_of_a_mesh(pool: WorkerPool) -> None:
    strategy = ("HybridParallel", {"fsdp": 2, "tp": 2, "plan": dict(NANOGPT_PLAN)})
    seen = traffic(pool, NanoGPT, strategy, world=4, accumulate=2)
    b_s_h = BATCH // 2 * SEQ * DIM
    # FSDP shards what tp has split: half of each matrix, and the whole of what tp stores whole.
    whole = 4 * DIM + 2 * DIM + 3 * DIM  # norms, row-wise biases, packed bias of one block
    block = (BLOCK - whole) // 2 + whole
    root = VOCAB * DIM // 2 + 64 * DIM + 2 * DIM
    gathers = {("all_gather", block): 2 * LAYERS, ("all_gather", root): 1}
    reductions = {("reduce_scatter", block): LAYERS, ("reduce_scatter", root): 1}
    for window in (0, 2):
        assert kinds(seen.of(window, "fsdp")) == gathers
        assert kinds(seen.of(window + 1, "fsdp")) == gathers | reductions
        for batch in (window, window + 1):
            activations = [call for call in seen.of(batch, "tp") if call.numel == b_s_h]
            assert sum(call.sent for call in activations) == (LAYERS * 8 + 6) * b_s_h / 2
    small = [
        sum(c.numel for c in seen.of(batch, "tp", "all_reduce") if c.numel < 2 * BATCH * SEQ) for batch in range(4)
    ]
    loss = 4 * BATCH // 2 * SEQ
    assert small == [loss, loss + LAYERS * whole, loss, loss + LAYERS * whole]
