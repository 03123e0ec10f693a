"""Attention over a sequence whose rows are spread over ranks: tensors and a process group in, local rows out."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.schemes.context.allgather import gathered_attention, general_attention
from lightning_parallel.schemes.context.engine import Engine
from lightning_parallel.schemes.context.inputs import cast_inputs, cast_mask, check_inputs, check_method, learns
from lightning_parallel.schemes.context.kernels import choose_exact, choose_kernel
from lightning_parallel.schemes.context.layout import Layout
from lightning_parallel.schemes.context.pieces import pieces
from lightning_parallel.schemes.context.ring import ring_attention
from lightning_parallel.schemes.context.ulysses import ulysses_attention

AttentionMethod = Literal["ring", "allgather", "ulysses"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: Layout,
    group: dist.ProcessGroup,
    method: AttentionMethod,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    name: str = "attention",
) -> Tensor:
    """What scaled_dot_product_attention gives for this rank's rows of the whole sequence.

    Differentiable: each rank gives the gradient of its own rows' output, and gets that of its own rows of query, key
    and value, whichever rank's rows they went into. That of a mask is this rank's part, to be summed over ranks.

    Args:
        query: Shape (batch, heads, rows, head_dim): ``layout.num_local`` rows in the layout's order, with padding,
            which is no key for any row and takes no gradient. Its rows of the result are zero.
        key: Shape (batch, kv_heads, rows, head_dim), where ``kv_heads`` divides ``heads``.
        value: Shape (batch, kv_heads, rows, value_dim).
        layout: Which positions each rank holds.
        group: Ranks of the context axis.
        method: ``ring`` sends keys and values round, ``allgather`` gathers them, ``ulysses`` splits heads instead.
        attn_mask: Of the whole sequence and the same on all ranks, broadcastable to (batch, heads, length, length):
            bool (True takes part) or additive. A row that sees nothing gives zeros.
        is_causal: No position sees a later one; beside a mask, both apply.
        dropout_p: Probability that a weight is dropped, drawn by the ambient generator on each rank.
        scale: Of the scores; by default 1 / sqrt(head_dim).
        name: Of the calling module, for errors.

    Raises:
        ParallelConfigError: Sizes or options that do not fit, before anything is sent.
    """
    query, key, value = cast_inputs(query, key, value)
    check_inputs(query, key, value, attn_mask, layout=layout, group=group, name=name)
    check_method(method, query, attn_mask, size=layout.size, dropout_p=dropout_p, name=name)
    mask = cast_mask(attn_mask, query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if method == "ulysses" or (method == "allgather" and (dropout_p > 0 or learns(mask))):
        whole = ulysses_attention if method == "ulysses" else general_attention
        return whole(
            query, key, value, mask, layout=layout, group=group, is_causal=is_causal, dropout_p=dropout_p, scale=scale
        )
    engine = Engine(
        layout=layout,
        group=group,
        pieces=pieces(layout, dist.get_rank(group), causal=is_causal, mask=mask),
        scale=scale,
        plain=choose_kernel(query, key, value, biased=False),
        biased=choose_kernel(query, key, value, biased=True),
        exact=choose_exact(query),
    )
    blockwise = ring_attention if method == "ring" else gathered_attention
    return blockwise(query, key, value, mask, engine)
