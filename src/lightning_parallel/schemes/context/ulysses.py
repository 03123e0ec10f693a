"""Ulysses attention (arXiv:2309.14509): sequence shards become head shards and back, by two all-to-alls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from lightning_parallel.schemes.context.engine import wide
from lightning_parallel.schemes.context.exchange import exchange, layout_to_order, order_to_layout, pack, unpack
from lightning_parallel.schemes.context.layout import Layout
from lightning_parallel.schemes.context.pieces import causal_mask


@dataclass(frozen=True, slots=True)
class Heads:
    """Which heads each rank has. Query heads divide evenly; a key head goes to every rank whose query heads use it.

    Args:
        num_heads: Of the query, on all ranks together.
        num_kv_heads: Of key and value.
        size: Ranks.
    """

    num_heads: int
    num_kv_heads: int
    size: int

    def queries(self, rank: int) -> slice:
        """Query heads of ``rank``."""
        count = self.num_heads // self.size
        return slice(rank * count, (rank + 1) * count)

    def keys(self, rank: int) -> slice:
        """Key heads that the query heads of ``rank`` use."""
        heads, groups = self.queries(rank), self.num_heads // self.num_kv_heads
        return slice(heads.start // groups, (heads.stop - 1) // groups + 1)

    def num_keys(self, rank: int) -> int:
        """Key heads of ``rank``."""
        return len(set(self.key_of_query(rank)))

    def key_of_query(self, rank: int) -> list[int]:
        """Of each query head of ``rank``, which of the rank's key heads it uses."""
        heads, groups = self.queries(rank), self.num_heads // self.num_kv_heads
        return [head // groups - self.keys(rank).start for head in range(heads.start, heads.stop)]


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    layout: Layout,
    group: dist.ProcessGroup,
    is_causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """Attention of this rank's rows: of all rows, for this rank's heads, by scaled_dot_product_attention itself."""
    rank = dist.get_rank(group)
    heads = Heads(query.shape[1], key.shape[1], layout.size)
    query, key, value = _RowsToHeads.apply(query, key, value, heads, layout, group)  # type: ignore[no-untyped-call]
    of_query = heads.key_of_query(rank)
    groups = len(of_query) // heads.num_keys(rank)
    if of_query != [head // groups for head in range(len(of_query))]:  # groups of unequal sizes
        index = torch.tensor(of_query, device=key.device)
        key, value = key.index_select(1, index), value.index_select(1, index)
    if mask is not None:
        mask = mask[:, heads.queries(rank)] if mask.shape[1] > 1 else mask
        if is_causal:
            whole = ((0, layout.length),)
            mask = causal_mask(mask, whole, whole, query.device)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    rows: Tensor = _HeadsToRows.apply(out, [heads.queries(r) for r in range(layout.size)], layout, group)  # type: ignore[no-untyped-call]
    return rows


class _RowsToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, heads: Heads, layout: Layout, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        queries, keys = [heads.queries(r) for r in range(layout.size)], [heads.keys(r) for r in range(layout.size)]
        ctx.args = [queries, keys, keys], layout, group
        return tuple(_to_heads([query, key, value], *ctx.args))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_to_rows(list(grads), *ctx.args), None, None, None


class _HeadsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, heads: list[slice], layout: Layout, group: dist.ProcessGroup) -> Tensor:
        ctx.args = [heads], layout, group
        return _to_rows([out], *ctx.args)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _to_heads([grad], *ctx.args)[0], None, None, None


def _to_heads(
    tensors: list[Tensor], heads: list[list[slice]], layout: Layout, group: dist.ProcessGroup
) -> list[Tensor]:
    """This rank's rows of all heads to all rows, in order and without padding, of this rank's heads.

    Args:
        tensors: Shape (batch, heads, num_local, dim) each.
        heads: Of each tensor, those of each rank, which may overlap.
    """
    parts = [[tensor[:, of[r]] for tensor, of in zip(tensors, heads, strict=True)] for r in range(layout.size)]
    shapes = [part.shape for part in parts[dist.get_rank(group)]]
    received = exchange([pack(*part) for part in parts], [sum(shape.numel() for shape in shapes)] * layout.size, group)
    ranks = [unpack(packet, *shapes) for packet in received]
    return [layout_to_order(rows, layout) for rows in zip(*ranks, strict=True)]


def _to_rows(wholes: list[Tensor], heads: list[list[slice]], layout: Layout, group: dist.ProcessGroup) -> list[Tensor]:
    """The way back of `_to_heads`; a head that several ranks have is summed, and padding is zero."""
    parts = [order_to_layout(whole, layout) for whole in wholes]
    shapes = [
        [
            (part[0].shape[0], of[r].stop - of[r].start, *part[0].shape[2:])
            for part, of in zip(parts, heads, strict=True)
        ]
        for r in range(layout.size)
    ]
    received = exchange(
        [pack(*part) for part in zip(*parts, strict=True)],
        [sum(math.prod(shape) for shape in each) for each in shapes],
        group,
    )
    ranks = [unpack(packet, *each) for packet, each in zip(received, shapes, strict=True)]
    return [_join(list(rows), of) for rows, of in zip(zip(*ranks, strict=True), heads, strict=True)]


def _join(parts: list[Tensor], heads: list[slice]) -> Tensor:
    """The heads of all ranks, those of several ranks summed."""
    if all(before.stop == after.start for before, after in pairwise(heads)):
        return torch.cat(parts, 1)
    first = parts[0]
    total = first.new_zeros((first.shape[0], heads[-1].stop, *first.shape[2:]), dtype=wide(first.dtype))
    for part, of in zip(parts, heads, strict=True):
        total[:, of] += part
    return total.to(first.dtype)
