"""Attention with the keys and values of all ranks gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from lightning_parallel.schemes.context.engine import Engine, RunningSoftmax, wide, without_autocast
from lightning_parallel.schemes.context.exchange import (
    gather,
    layout_to_order,
    order_to_layout,
    pack,
    scatter_sum,
    unpack,
)
from lightning_parallel.schemes.context.layout import Layout
from lightning_parallel.schemes.context.pieces import causal_mask, cut


def gathered_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, engine: Engine) -> Tensor:
    """Attention of this rank's rows, block by block.

    Only its own rows are kept for backward, which gathers again; gradients are summed in float32.
    """
    out: Tensor = _GatheredAttention.apply(query, key, value, mask, engine)  # type: ignore[no-untyped-call]
    return out


def general_attention(
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
    """As `gathered_attention`, with what no block engine has: dropout, and a mask that learns.

    One call of scaled_dot_product_attention on the whole of keys and values, which are kept for backward, with this
    rank's rows of the mask, causality included.
    """
    ranges = tuple(layout.ranges(dist.get_rank(group)))
    num_valid = sum(stop - start for start, stop in ranges)
    whole_key, whole_value = _GatherRows.apply(key, value, layout, group)  # type: ignore[no-untyped-call]
    if not num_valid:  # the backward of the gathered takes part all the same
        inputs = (query, whole_key, whole_value) if mask is None else (query, whole_key, whole_value, mask)
        nothing = torch.stack([tensor[..., :0].sum().to(query.dtype) for tensor in inputs]).sum()
        return nothing.expand(*query.shape[:-1], value.shape[-1])
    rows = None if mask is None else cut(mask, -2, ranges)
    if is_causal:
        rows = causal_mask(rows, ranges, ((0, layout.length),), query.device)
    out = scaled_dot_product_attention(
        query[:, :, :num_valid],
        whole_key,
        whole_value,
        attn_mask=rows,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return F.pad(out, (0, 0, 0, query.shape[2] - num_valid))


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, engine: Engine) -> Tensor:
        running = RunningSoftmax(query, value.shape[-1])
        packets = gather(pack(key, value), engine.group)
        with without_autocast(query.device):
            for source, packet in enumerate(packets):
                keys, values = unpack(packet, key.shape, value.shape)
                engine.forward(running, query, keys, values, mask, source=source)
        out, lse = running.result(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        ctx.engine = engine
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, mask = ctx.saved_tensors
        engine: Engine = ctx.engine
        grad_out = grad_out.contiguous()
        grad_query = torch.zeros_like(query, dtype=wide(query.dtype))
        packets = gather(pack(key, value), engine.group)
        grads = torch.zeros_like(packets, dtype=grad_query.dtype)
        with without_autocast(query.device):
            for source, (packet, grad) in enumerate(zip(packets, grads, strict=True)):
                keys, values = unpack(packet, key.shape, value.shape)
                grad_keys, grad_values = unpack(grad, key.shape, value.shape)
                engine.backward(
                    (grad_query, grad_keys, grad_values), grad_out, query, keys, values, out, lse, mask, source=source
                )
        grad_key, grad_value = unpack(scatter_sum(grads, engine.group), key.shape, value.shape)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


class _GatherRows(torch.autograd.Function):
    """Keys and values of the whole sequence in order, without padding; their gradients summed back to the owners."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, layout: Layout, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.layout, ctx.group, ctx.shapes, ctx.dtype = layout, group, (key.shape, value.shape), key.dtype
        ranks = [unpack(packet, key.shape, value.shape) for packet in gather(pack(key, value), group)]
        whole_key, whole_value = (layout_to_order(rows, layout) for rows in zip(*ranks, strict=True))
        return whole_key, whole_value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks = [order_to_layout(grad.to(wide(ctx.dtype)), ctx.layout) for grad in grads]
        packets = torch.stack([pack(*rows) for rows in zip(*ranks, strict=True)])
        grad_key, grad_value = unpack(scatter_sum(packets, ctx.group), *ctx.shapes)
        return grad_key.to(ctx.dtype), grad_value.to(ctx.dtype), None, None
