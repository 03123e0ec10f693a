"""The parts of attention over a spread sequence that need no second rank: refusals, pieces, kernels."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.context import kernels
from lightning_parallel.schemes.context.attention import attend
from lightning_parallel.schemes.context.kernels import choose_exact, choose_kernel
from lightning_parallel.schemes.context.layout import Layout
from lightning_parallel.schemes.context.pieces import pieces
from tests.support.collectives import CollectiveRecorder
from tests.support.fake import fake_world

LENGTHS = (1, 2, 7, 15, 16, 64)


def refusal(*, heads: int = 4, kv_heads: int = 4, rows: int = 4, ranks: int = 4, **options: Any) -> str:
    """What attention says on rank 1 of 4, having sent nothing."""
    q, k = torch.randn(1, heads, rows, 8), torch.randn(1, kv_heads, rows, 8)
    with fake_world(1, 4), CollectiveRecorder() as recorder, pytest.raises(ParallelConfigError) as raised:
        attend(
            q, k, k, layout=Layout(16, ranks), group=dist.group.WORLD, name="layers.0.attn",
            **{"method": "ring", **options},
        )  # fmt: skip
    assert not recorder.calls
    assert str(raised.value).startswith("layers.0.attn: ")
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "ulysses", "heads": 6, "kv_heads": 6}, ["6 query heads", "[1, 2, 3, 6] ranks", "'ring'"]),
        ({"dropout_p": 0.1}, ["dropout_p=0.1", "'ring'", "'ulysses' or 'allgather'", "dropout_p=0"]),
        ({"attn_mask": torch.zeros(16, 16, requires_grad=True)}, ["requires grad", "'allgather'", "detach"]),
        ({"rows": 5}, ["(1, 4, 5, 8)", "holds 4 rows", "padding included"]),
        ({"attn_mask": torch.ones(4, 16, dtype=torch.bool)}, ["(4, 16)", "(1, 4, 16, 16)", "whole sequence"]),
        ({"attn_mask": torch.zeros(16, 16, dtype=torch.float64)}, ["float64", "float32", "Cast it"]),
        ({"kv_heads": 3}, ["(1, 3, 4, 8)", "divide"]),
        ({"ranks": 2, "rows": 8}, ["layout over 2 ranks", "group of 4"]),
        ({"method": "star"}, ["'star'", "'allgather'"]),
    ],
)
def test_says_what_does_not_fit_before_anything_is_sent(options: dict[str, Any], said: list[str]) -> None:
    message = refusal(**options)
    assert all(part in message for part in said), message


def seen_by(layout: Layout, rank: int, *, causal: bool, mask: Tensor | None) -> Tensor:
    """Pairs of positions that the pieces of ``rank`` compute; each at most once."""
    count = torch.zeros(layout.length, layout.length, dtype=torch.long)
    rows = layout.positions(rank)
    found = pieces(layout, rank, causal=causal, mask=mask)
    for source, piece in ((source, piece) for source, each in enumerate(found) for piece in each):
        assert piece.rows.stop <= layout.num_valid(rank) and piece.cols.stop <= layout.num_valid(source), "padding"
        here = torch.ones(piece.rows.stop - piece.rows.start, piece.cols.stop - piece.cols.start).bool()
        if piece.masked:
            assert mask is not None
            here = piece.mask(mask)[0, 0]
        elif piece.causal:
            here = here.tril()
        count[rows[piece.rows].unsqueeze(-1), layout.positions(source)[piece.cols]] += here
    assert count.max() <= 1
    return count.bool()


@pytest.mark.parametrize("kind", ["balanced", "plain", "documents"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_pieces_are_what_is_seen_and_no_more(size: int, causal: bool, kind: str) -> None:
    for length in LENGTHS:
        i = torch.arange(length)
        window = ((i.unsqueeze(-1) - i).abs() < 4).view(1, 1, length, length)
        everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        packed = (length // 2, length - length // 2) if kind == "documents" and length > 1 else ()
        which = i >= length // 2
        apart = (which.unsqueeze(-1) == which).view(1, 1, length, length)
        for mask in (None, window, window.tril(), everything, ~everything, apart, apart.tril()):
            layout = Layout(length, size, kind != "plain", packed)
            wanted = torch.ones(length, length).bool() if mask is None else mask[0, 0].expand(length, length)
            wanted = wanted.tril() if causal else wanted
            got = torch.stack([seen_by(layout, rank, causal=causal, mask=mask) for rank in range(size)])
            assert got.sum(0).equal(wanted.long()), "each pair on one rank"


def test_a_mask_that_hides_nothing_of_a_piece_is_no_mask() -> None:
    mask = torch.ones(16, 16).tril().bool().view(1, 1, 16, 16)
    for causal in (True, False):  # a mask that is causal is taken for that
        assert pieces(Layout(16, 4), 1, causal=causal, mask=mask) == pieces(Layout(16, 4), 1, causal=True)
    mask[..., 0, 1] = True
    assert any(piece.masked for found in pieces(Layout(16, 4), 0, causal=False, mask=mask) for piece in found)


@pytest.mark.parametrize("bias", ["none", "finite", "blind rows", "float32"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_kernels_agree(dtype: torch.dtype, groups: int, bias: str) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn((2, heads, rows, 8), generator=generator).to(dtype)
        for heads, rows in ((4, 6), (4 // groups, 9), (4 // groups, 9), (4, 6))
    )
    added = None if bias == "none" else torch.randn((1, 4, 6, 9), generator=generator)
    if added is not None:
        added = added.to(torch.promote_types(dtype, torch.float32) if bias == "float32" else dtype)
    if added is not None and bias == "blind rows":
        added[..., 2, :] = -torch.inf
    own = choose_kernel(q, k, v, biased=added is not None)
    with sdpa_kernel(SDPBackend.MATH):
        math = choose_kernel(q, k, v, biased=added is not None)
    assert own.compute is not math.compute
    options: dict[str, Any] = {"bias": added, "causal": False, "scale": 0.3}
    results = []
    for kernel in (own, math):
        out, lse = kernel.forward(q, k, v, **options)
        assert bool((lse[:, :, 2] == -torch.inf).all()) == (bias == "blind rows")
        finite = lse.masked_fill(lse == -torch.inf, 0)
        # As if there were other blocks: their share of the weights is the other half.
        grads = kernel.backward(grad, q, k, v, out.to(dtype), finite + 0.7, **options)
        results.append([out, lse, *grads])
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance)
    assert results[0][1].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_blocks_in_float32_are_computed_in_float64_where_there_is_one(dtype: torch.dtype) -> None:
    query = torch.randn(1, 2, 4, 8, dtype=dtype)
    assert (choose_exact(query) is not None) == (dtype == torch.float32)
    with patch.object(kernels, "_has_float64", lambda device: False):
        assert choose_exact(query) is None


def test_heads_that_no_fused_kernel_takes_are_plain_math() -> None:
    q, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 6)
    out, _ = choose_kernel(q, q, v, biased=False).forward(q, q, v, bias=None, causal=True, scale=0.5)
    wanted = (q @ q.mT * 0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(out, wanted)
