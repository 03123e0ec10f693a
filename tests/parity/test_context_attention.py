"""Attention over a spread sequence equals attention over the whole, outputs and gradients, and wrong engines do not.

The reference is full attention in float64 by plain math. An error is relative to the largest entry of the reference. A
gradient that is zero by mathematics (one key: the softmax is 1) has no scale of its own and takes that of the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.schemes.context import engine, pieces
from lightning_parallel.schemes.context.attention import attend
from lightning_parallel.schemes.context.layout import Layout
from tests.support.pool import WorkerPool

METHODS = ("ring", "allgather", "ulysses")
LENGTHS = (1, 2, 7, 15, 16, 64)
HEADS, DIM = 4, 8
ZERO = 1e-9  # below this part of the largest of the four tensors, a gradient is zero by mathematics
FLOAT32 = 1e-6
FLOAT64 = 1e-12
# One device's own scaled_dot_product_attention in bf16 is up to 6.4e-3 from the reference, in these cases.
BF16 = 1.5e-2

# Name to (is_causal, kind of mask).
MASKS: Mapping[str, tuple[bool, str | None]] = {
    "causal": (True, None),
    "full": (False, None),
    "window": (True, "window"),
    "documents": (False, "documents"),
    "padding": (True, "padding"),
    "bias": (True, "bias"),
    "blind": (False, "blind"),
    "blind bias": (False, "blind bias"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One problem, the same on all ranks."""

    length: int
    mask: str
    groups: int = 1  # query heads that share a key head
    heads: int = HEADS
    value_dim: int = DIM
    dtype: torch.dtype = torch.float32

    @property
    def is_causal(self) -> bool:
        return MASKS[self.mask][0]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and the gradient of the output."""
        batch = {1: 1, 2: 2}.get(self.groups, 3)
        generator = torch.Generator().manual_seed(self.length)
        kv_heads = self.heads // self.groups
        shapes = [(self.heads, DIM), (kv_heads, DIM), (kv_heads, self.value_dim), (self.heads, self.value_dim)]
        q, k, v, grad = (
            torch.randn((batch, heads, self.length, dim), generator=generator).to(self.dtype) for heads, dim in shapes
        )
        return q, k, v, grad

    def attn_mask(self) -> Tensor | None:
        batch, length = self.tensors()[0].shape[0], self.length
        i = torch.arange(length)
        before = i.unsqueeze(-1) - i
        match MASKS[self.mask][1]:
            case "window":
                return before.abs() < 4
            case "documents":
                return (i.unsqueeze(-1) // 5 == i // 5).unsqueeze(0)
            case "padding":  # of the batch: a shorter sequence in the middle of others
                lengths = torch.tensor([length, max(1, length // 2), length])[:batch]
                return (i < lengths.unsqueeze(-1)).view(batch, 1, 1, length)
            case "bias":  # as ALiBi has it
                slopes = torch.arange(1, self.heads + 1).view(-1, 1, 1) / 8
                return (-slopes * before.abs()).float()
            case "blind":  # a row that sees nothing, and rows that see nothing of some ranks
                return before > 0
            case "blind bias":
                return torch.zeros(length, length).masked_fill(before <= 0, -torch.inf)
        return None

    def reference(self) -> list[Tensor]:
        """Output and gradients of query, key and value in float64."""
        q, k, v = (tensor.double().requires_grad_() for tensor in self.tensors()[:3])
        scores = q @ k.repeat_interleave(self.groups, 1).mT / DIM**0.5
        mask = self.attn_mask()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if self.is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
        out = weights @ v.repeat_interleave(self.groups, 1)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), self.tensors()[3].double())]


def attend_and_compare(case: Case, wanted: list[Tensor], method: str, layout: Layout) -> float:
    """The largest error of this rank's rows. Padding is NaN in everything that goes in."""
    rank = dist.get_rank()
    positions, num_valid = layout.positions(rank), layout.num_valid(rank)
    q, k, v, grad = (tensor[:, :, positions] for tensor in case.tensors())
    for tensor in (q, k, v, grad):
        tensor[:, :, num_valid:] = torch.nan
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = attend(
        *inputs, layout=layout, group=dist.group.WORLD, method=method, attn_mask=case.attn_mask(),
        is_causal=case.is_causal,
    )  # fmt: skip
    out.backward(grad)
    got = [out.detach(), *(tensor.grad for tensor in inputs)]
    assert all(tensor.isfinite().all() for tensor in got), "padding went into the result"
    return largest_error(
        [tensor[:, :, :num_valid] for tensor in got], [t[:, :, positions[:num_valid]] for t in wanted], wanted
    )


def largest_error(got: list[Tensor], wanted: list[Tensor], whole: list[Tensor]) -> float:
    scales = [tensor.abs().max().item() for tensor in whole]
    scales = [scale if scale > ZERO * max(scales) else max(max(scales), ZERO) for scale in scales]
    errors = [0.0]
    for a, b, scale in zip(got, wanted, scales, strict=True):
        assert a.shape == b.shape
        if b.numel():
            errors.append((a.double() - b).abs().max().item() / scale)
    return max(errors)


def one_device(case: Case) -> float:
    """The error of scaled_dot_product_attention on the whole sequence, in the case's own dtype."""
    q, k, v, grad = case.tensors()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    mask = case.attn_mask()
    if case.is_causal:
        seen = torch.ones(case.length, case.length).tril().bool()
        if mask is not None:
            mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
    out = F.scaled_dot_product_attention(
        *inputs, attn_mask=mask, is_causal=case.is_causal and mask is None, enable_gqa=True
    )
    out.backward(grad)
    wanted = case.reference()
    return largest_error([out.detach(), *(tensor.grad for tensor in inputs)], wanted, wanted)


def initialise() -> int:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_world_size()


LAYOUTS = ("balanced", "plain", "documents")


def make_layout(kind: str, length: int, world: int) -> Layout:
    """Documents of 15 tokens, which are none that a mask tells."""
    sizes = (15,) * (length // 15)
    documents = (*sizes, length - sum(sizes)) if kind == "documents" else ()
    return Layout(length, world, kind != "plain", tuple(filter(None, documents)))


def compare(cases: list[Case], methods: tuple[str, ...], layouts: tuple[str, ...] = LAYOUTS) -> dict[Any, float]:
    """Runs on every rank: the error of each case, method and layout."""
    world, errors = initialise(), {}
    for case in cases:
        wanted = case.reference()
        for method, kind in product(methods, layouts):
            if (method == "ulysses" and case.heads % world) or (kind == "documents" and case.length < 16):
                continue
            layout = make_layout(kind, case.length, world)
            errors[case, method, kind] = attend_and_compare(case, wanted, method, layout)
    return errors


def worst(
    pool: WorkerPool, cases: list[Case], *, world: int, methods: tuple[str, ...] = METHODS
) -> dict[str, tuple[float, Any]]:
    """The largest error of each method on any rank, and where."""
    ranks = pool.run(compare, cases, methods, world=world)
    assert all(errors.keys() == ranks[0].keys() for errors in ranks) and ranks[0]
    found: dict[str, tuple[float, Any]] = {}
    for key, error in (item for errors in ranks for item in errors.items()):
        if not error <= found.get(key[1], (-1.0, None))[0]:
            found[key[1]] = error, key
    return found


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("world", [2, 4])
def test_equals_full_attention(pool: WorkerPool, world: int, groups: int) -> None:
    cases = [Case(length=length, mask=mask, groups=groups) for length in LENGTHS for mask in MASKS]
    for error, where in worst(pool, cases, world=world).values():
        assert error <= FLOAT32, where


def test_a_longer_sequence_is_as_close_as_on_one_device(pool: WorkerPool) -> None:
    """More terms, more roundings: up to 1.3e-6 for torch's own kernel too."""
    cases = [Case(length=256, mask=mask, groups=groups) for mask in ("causal", "full", "blind") for groups in (2, 4)]
    own = max(one_device(case) for case in cases)
    assert own > FLOAT32
    for error, where in worst(pool, cases, world=2).values():
        assert error <= 1.25 * own, where


def test_one_rank_is_full_attention(pool: WorkerPool) -> None:
    cases = [Case(length=length, mask=mask, groups=2) for length in LENGTHS for mask in MASKS]
    for error, where in worst(pool, cases, world=1).values():
        assert error <= FLOAT32, where


def test_equals_full_attention_in_float64(pool: WorkerPool) -> None:
    cases = [Case(length=length, mask=mask, groups=2, dtype=torch.float64) for length in (2, 15, 64) for mask in MASKS]
    # Heads that no fused kernel of a host takes: plain math in blocks.
    cases += [Case(length=15, mask=mask, groups=2, value_dim=5, dtype=torch.float64) for mask in ("causal", "blind")]
    # Key heads that do not divide by the ranks, or are fewer.
    cases += [Case(length=15, mask="bias", heads=12, groups=groups, dtype=torch.float64) for groups in (2, 4, 6, 12)]
    for error, where in worst(pool, cases, world=4).values():
        assert error <= FLOAT64, where


def test_bf16_is_as_close_as_one_device(pool: WorkerPool) -> None:
    cases = [Case(length=64, mask=mask, groups=groups, dtype=torch.bfloat16) for mask in MASKS for groups in (1, 2)]
    assert max(one_device(case) for case in cases) <= BF16
    for error, where in worst(pool, cases, world=4).values():
        assert 1e-4 < error <= BF16, where


def see_too_little(layout: Layout, rank: int, source: int, **options: Any) -> Any:
    """The wrong rule for the keys of one rank: of the last one's, the first rank sees nothing."""
    return [] if (rank, source) == (0, layout.size - 1) else CANDIDATES(layout, rank, source, **options)


def forget_the_weights(self: engine.RunningSoftmax, rows: slice, out: Tensor, lse: Tensor) -> None:
    """Blocks merged without their log-sum-exp."""
    FOLD(self, rows, out, torch.zeros_like(lse))


CANDIDATES, FOLD = pieces._candidates, engine.RunningSoftmax.fold
BREAKS: Mapping[str, Any] = {
    "nothing": nullcontext(),
    "causal rule": patch.object(pieces, "_candidates", see_too_little),
    "merge": patch.object(engine.RunningSoftmax, "fold", forget_the_weights),
}


def compare_broken(name: str, case: Case, method: str) -> dict[Any, float]:
    """As `compare`, with something of the engine replaced. Runs on every rank."""
    with BREAKS[name]:
        return compare([case], (method,), layouts=("balanced",))


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("name", ["nothing", "causal rule", "merge"])
def test_rejects_a_wrong_engine(pool: WorkerPool, name: str, method: str) -> None:
    ranks = pool.run(compare_broken, name, Case(length=16, mask="causal"), method, world=2)
    errors = [error for errors in ranks for error in errors.values()]
    assert max(errors) <= FLOAT32 if name == "nothing" else max(errors) > 1e-2


def attend_without_grad(case: Case) -> float:
    """Runs on every rank, in inference mode and under no_grad."""
    world, rank, error = initialise(), dist.get_rank(), 0.0
    layout = Layout(case.length, world)
    positions, num_valid = layout.positions(rank), layout.num_valid(rank)
    q, k, v, _ = (tensor[:, :, positions] for tensor in case.tensors())
    wanted = case.reference()[0]
    for method, context in product(METHODS, (torch.no_grad, torch.inference_mode)):
        with context():
            out = attend(q, k, v, layout=layout, group=dist.group.WORLD, method=method, is_causal=True)
        assert not out.requires_grad
        error = max(error, (out[:, :, :num_valid] - wanted[:, :, positions[:num_valid]]).abs().max().item())
    return error


def test_without_gradients(pool: WorkerPool) -> None:
    assert max(pool.run(attend_without_grad, Case(length=16, mask="causal"), world=2)) <= FLOAT32


def learn_bias(length: int) -> dict[tuple[str, bool], tuple[Tensor, Tensor]]:
    """The gradient of a learnt bias, summed over ranks, and that of full attention. Runs on every rank."""
    world, rank, found = initialise(), dist.get_rank(), {}
    case = Case(length=length, mask="causal", groups=2, dtype=torch.float64)
    q, k, v, grad = case.tensors()
    start = torch.randn((HEADS, length, length), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for method, balanced in product(("allgather", "ulysses"), (True, False)):
        layout = Layout(length, world, balanced)
        positions = layout.positions(rank)
        whole, bias = start.clone().requires_grad_(), start.clone().requires_grad_()
        scores = q @ k.repeat_interleave(2, 1).mT / DIM**0.5 + whole
        hidden = torch.ones(length, length).triu(1).bool()
        (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)).backward(grad)
        out = attend(
            *(tensor[:, :, positions] for tensor in (q, k, v)), layout=layout, group=dist.group.WORLD, method=method,
            attn_mask=bias, is_causal=True,
        )  # fmt: skip
        out.backward(grad[:, :, positions])
        dist.all_reduce(bias.grad)
        found[method, balanced] = bias.grad, whole.grad
    return found


@pytest.mark.parametrize("length", [2, 15])
def test_a_learnt_bias_gets_its_gradient(pool: WorkerPool, length: int) -> None:
    for found in pool.run(learn_bias, length, world=4):
        for got, wanted in found.values():
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def drop(rate: float) -> dict[str, list[float]]:
    """Attention with dropout over equal weights and values of 1. Runs on every rank."""
    world, found = initialise(), {}
    torch.manual_seed(dist.get_rank())
    layout = Layout(64, world)
    for method in ("allgather", "ulysses"):
        q = torch.zeros(4, HEADS, layout.num_local, DIM)
        v = torch.ones(4, HEADS, layout.num_local, DIM).requires_grad_()
        out = attend(q, q, v, layout=layout, group=dist.group.WORLD, method=method, dropout_p=rate)
        out.sum().backward()
        found[method] = [out.mean().item(), out.std().item(), out.sum().item(), v.grad.sum().item()]
    return found


def test_dropout(pool: WorkerPool) -> None:
    """The mean is kept, ranks draw on their own, and backward drops what forward dropped."""
    ranks = pool.run(drop, 0.5, world=4)
    for method in ("allgather", "ulysses"):
        mean, std, sums, grads = (torch.tensor([rank[method][i] for rank in ranks]) for i in range(4))
        assert (mean - 1).abs().max() < 0.02
        torch.testing.assert_close(
            std, torch.full((4,), (1 / 64) ** 0.5), rtol=0.1, atol=0
        )  # of 64 weights, each 0 or 2
        assert len(set(sums.tolist())) == 4
        # With values of 1 the sum of their gradients is the sum of the weights, as is that of the outputs.
        torch.testing.assert_close(grads.sum(), sums.sum(), rtol=1e-5, atol=0)


def attend_under_autocast() -> list[torch.dtype]:
    """Runs on every rank: queries in float32 beside values in bf16, as rotary embeddings leave them."""
    world = initialise()
    layout, found = Layout(16, world), []
    for method in METHODS:
        q, k = (torch.randn(1, HEADS, layout.num_local, DIM, requires_grad=True) for _ in range(2))
        v = torch.randn(1, HEADS, layout.num_local, DIM, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attend(
                q, k, v, layout=layout, group=dist.group.WORLD, method=method, attn_mask=torch.zeros(16, 16),
                is_causal=True,
            )  # fmt: skip
            out.float().sum().backward()
        found += [out.dtype, q.grad.dtype, v.grad.dtype]
    return found


def test_casts_as_autocast_does(pool: WorkerPool) -> None:
    for found in pool.run(attend_under_autocast, world=2):
        assert found == [torch.bfloat16, torch.float32, torch.bfloat16] * 3
