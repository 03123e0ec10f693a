"""Sharding rules that DTensor lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

aten = torch.ops.aten

# Host devices have a flash kernel of their own, for which torch 2.13 has no rule.
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register_attention() -> None:
    """Let the host's attention kernel run on shards of the batch (dim 0) or of the heads (dim 1)."""
    register_sharding(_FORWARD)(_forward_rule)
    register_sharding(_BACKWARD)(_backward_rule)


def _dims(query: Any, key: Any) -> list[int]:
    size = query.mesh.size()
    return [dim for dim in (0, 1) if query.shape[dim] % size == 0 and key.shape[dim] % size == 0]


def _mask(attn_mask: Any, dim: int) -> Any:
    """A mask (batch, heads, query, key) that broadcasts over ``dim`` stays whole."""
    if attn_mask is None:
        return None
    ndim = len(attn_mask.shape)
    position = dim - (4 - ndim)
    return Shard(position) if position >= 0 and attn_mask.shape[position] > 1 else Replicate()


def _forward_rule(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> list[tuple[list[Any], list[Any]]]:
    rules = []
    for dim in [None, *_dims(query, key)]:
        whole = Replicate() if dim is None else Shard(dim)
        mask = _mask(attn_mask, dim) if dim is not None else (None if attn_mask is None else Replicate())
        # The log-sum-exp is (batch, heads, query) whatever the kernel's memory order.
        rules.append(([whole, whole], [whole, whole, whole, None, None] + ([mask] if attn_mask is not None else [])))
    return rules


def _backward_rule(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: Any, is_causal: Any,
    *, attn_mask: Any = None, scale: Any = None,
) -> list[tuple[list[Any], list[Any]]]:  # fmt: skip
    rules = []
    for dim in [None, *_dims(query, key)]:
        whole = Replicate() if dim is None else Shard(dim)
        mask = _mask(attn_mask, dim) if dim is not None else (None if attn_mask is None else Replicate())
        inputs = [whole] * 6 + [None, None] + ([mask] if attn_mask is not None else [])
        rules.append(([whole] * 3, inputs))
    return rules
