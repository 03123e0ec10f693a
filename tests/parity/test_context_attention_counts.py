"""What attention over a spread sequence computes, sends and keeps, counted, equals the formulas. No timings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel.schemes.context.attention import attend
from lightning_parallel.schemes.context.layout import Layout
from lightning_parallel.schemes.context.traffic import bytes_sent
from tests.parity.test_context_attention import initialise
from tests.support.collectives import CollectiveRecorder
from tests.support.pool import WorkerPool

BATCH, HEADS, DIM = 2, 4, 8


# In bf16, for which there is no kernel for small blocks.
class Pairs(TorchDispatchMode):
    """Counts the pairs of a query and a key that attention kernels compute, for each head of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert not name.startswith(("matmul", "bmm")), "attention by plain math is not counted"
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            self.forward += self._count(args[0], args[1], causal=len(args) > 4 and args[4])
        elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            self.backward += self._count(args[1], args[2], causal=len(args) > 7 and args[7])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _count(query: Tensor, key: Tensor, *, causal: bool) -> int:
        rows, cols = query.shape[2], key.shape[2]
        return query.shape[0] * query.shape[1] * (rows * (rows + 1) // 2 if causal else rows * cols)


def inputs(layout: Layout, kv_heads: int = HEADS, value_dim: int = DIM) -> list[Tensor]:
    shapes = [(HEADS, DIM), (kv_heads, DIM), (kv_heads, value_dim)]
    return [torch.randn(BATCH, heads, layout.num_local, dim, requires_grad=True) for heads, dim in shapes]


def count_pairs(
    method: str,
    length: int,
    balanced: bool,
    causal: bool,
    mask: Tensor | None = None,
    documents: tuple[int, ...] = (),
) -> tuple[int, int]:
    """Runs on every rank."""
    layout = Layout(length, initialise(), balanced, documents)
    with Pairs() as pairs:
        out = attend(
            *(tensor.bfloat16() for tensor in inputs(layout)), layout=layout, group=dist.group.WORLD, method=method,
            is_causal=causal, attn_mask=mask,
        )  # fmt: skip
        out.sum().backward()
    return pairs.forward, pairs.backward


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_balanced_and_causal_every_rank_computes_as_much(pool: WorkerPool, method: str) -> None:
    """And nothing that a causal mask hides: together no more than one device."""
    ranks = pool.run(count_pairs, method, 64, True, True)
    whole = BATCH * HEADS * 64 * 65 // 2
    assert ranks == [(whole // 4, whole // 4)] * 4


def test_plain_and_causal_the_last_rank_computes_most(pool: WorkerPool) -> None:
    ranks = pool.run(count_pairs, "ring", 64, False, True)
    assert [forward for forward, _ in ranks] == [BATCH * HEADS * (rank * 16 * 16 + 16 * 17 // 2) for rank in range(4)]


def test_blocks_that_a_mask_hides_are_not_computed(pool: WorkerPool) -> None:
    documents = torch.arange(64) // 16  # one to a rank
    ranks = pool.run(count_pairs, "ring", 64, False, False, documents.unsqueeze(-1) == documents)
    assert ranks == [(BATCH * HEADS * 16 * 16,) * 2] * 4


# Lengths as packing leaves them: few divide by twice the ranks.
DOCUMENTS = (301, 64, 150, 33, 97, 208, 11, 160)


def packed_mask(documents: tuple[int, ...]) -> Tensor:
    """Causal within each document, as Hugging Face makes it of positions that begin anew."""
    which = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    return (which.unsqueeze(-1) == which).tril()


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_packed_documents_are_balanced_each(pool: WorkerPool, method: str) -> None:
    """Every rank computes as much but for what does not divide, and all together no more than one device."""
    length, mask = sum(DOCUMENTS), packed_mask(DOCUMENTS)
    needed = BATCH * HEADS * sum(n * (n + 1) // 2 for n in DOCUMENTS)
    by_document = pool.run(count_pairs, method, length, True, False, mask, DOCUMENTS)
    pairs = [forward for forward, _ in by_document]
    assert [backward for _, backward in by_document] == pairs
    assert sum(pairs) == needed
    assert max(pairs) / (needed / 4) < 1.005
    # Head and tail of the whole compute more together, and one rank more than others.
    whole = [forward for forward, _ in pool.run(count_pairs, method, length, True, False, mask)]
    assert max(whole) / (sum(whole) / 4) > 1.05
    assert sum(whole) > 1.5 * needed


def test_a_mask_that_is_causal_is_computed_as_that(pool: WorkerPool) -> None:
    ranks = pool.run(count_pairs, "ring", 64, True, False, torch.ones(64, 64, dtype=torch.bool).tril())
    assert ranks == [(BATCH * HEADS * 64 * 65 // 8,) * 2] * 4


def test_padding_is_not_computed(pool: WorkerPool) -> None:
    ranks = pool.run(count_pairs, "ring", 13, True, False)
    assert sum(forward for forward, _ in ranks) == BATCH * HEADS * 13 * 13


def count_bytes(cases: list[Mapping[str, Any]]) -> list[tuple[list[float], tuple[int, int]]]:
    """What is sent in forward and backward, and the formula. Runs on every rank."""
    world, found = initialise(), []
    for case in cases:
        layout = Layout(case["length"], world, case["balanced"])
        tensors = [tensor.to(case["dtype"]) for tensor in inputs(layout, case["kv_heads"], case["value_dim"])]
        bias = torch.zeros(layout.length, layout.length, dtype=case["dtype"], requires_grad=True)
        mask = bias if case["learns"] else None
        sent = []
        with CollectiveRecorder() as forward:
            out = attend(*tensors, layout=layout, group=dist.group.WORLD, method=case["method"], attn_mask=mask)
        with CollectiveRecorder() as backward:
            out.sum().backward()
        for recorder in (forward, backward):
            # A message is sent whole; of a collective the ring algorithm sends all parts but one.
            calls = [(call.numel if call.kind == "send" else call.sent, call) for call in recorder.calls]
            sent.append(sum(numel * call.dtype.itemsize for numel, call in calls if call.kind != "recv"))
        formula = bytes_sent(
            case["method"],
            layout=layout,
            batch=BATCH,
            heads=HEADS,
            kv_heads=case["kv_heads"],
            head_dim=DIM,
            value_dim=case["value_dim"],
            itemsize=case["dtype"].itemsize,
            rank=dist.get_rank(),
            gathers_again=not case["learns"],
        )
        found.append((sent, formula))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_sends_what_the_formulas_say(pool: WorkerPool, world: int) -> None:
    cases: list[Mapping[str, Any]] = [
        {
            "method": method, "length": length, "balanced": balanced, "dtype": dtype, "kv_heads": kv_heads,
            "value_dim": DIM, "learns": False,
        }
        for method in ("ring", "allgather", "ulysses")
        for length, balanced in ((64, True), (15, False))
        for dtype in (torch.float32, torch.bfloat16)
        for kv_heads in (1, 2, 4)
    ]  # fmt: skip
    cases += [{**cases[0], "method": method, "value_dim": 6} for method in ("ring", "allgather", "ulysses")]
    cases += [{**cases[0], "method": method, "learns": True} for method in ("allgather", "ulysses")]
    ranks = pool.run(count_bytes, cases, world=world)
    for found in ranks:
        for case, (sent, formula) in zip(cases, found, strict=True):
            assert sent == list(formula), case


def test_formulas_of_the_literature() -> None:
    b, s, h, h_kv, size = 3, 64, 8 * 16, 4 * 16, 4
    sizes: dict[str, Any] = {"batch": b, "heads": 8, "kv_heads": 4, "head_dim": 16, "itemsize": 2}
    layout, part = Layout(s, size), (size - 1) / size
    for method in ("ring", "allgather"):
        forward, backward = bytes_sent(method, layout=layout, **sizes)
        assert forward == 2 * (2 * b * s * h_kv * part)
        assert backward == forward + 4 * (2 * b * s * h_kv * part)  # gradients in float32
    each_way = 2 * (2 * h + 2 * h_kv) * b * s * (size - 1) / size**2
    assert bytes_sent("ulysses", layout=layout, **sizes) == (each_way, each_way)


def keep(method: str) -> tuple[int, int]:
    """Bytes that autograd keeps for backward, on one of all ranks and on one alone. Runs on every rank."""
    world, found = initialise(), []
    alone, _ = dist.new_subgroups(1)
    for group in (dist.group.WORLD, alone):
        layout = Layout(64, dist.get_world_size(group))
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = attend(*inputs(layout), layout=layout, group=group, method=method, is_causal=True)
        out.sum().backward()
        found.append(sum(kept.values()))
    assert world == 4
    return found[0], found[1]


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_a_rank_keeps_its_part(pool: WorkerPool, method: str) -> None:
    for kept, alone in pool.run(keep, method, world=4):
        assert kept * 4 == alone
        # Query, key, value and output in float32, and the log-sum-exp.
        assert method == "ulysses" or alone == BATCH * HEADS * 64 * (4 * DIM + 1) * 4
