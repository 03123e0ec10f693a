"""Attention with its weights in memory, for what no kernel knows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def weighed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None,
    dropout_p: float = 0.0, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention with its weights in memory, for what no kernel knows; (batch, heads, queries, head_dim).

    Args:
        query: As for ``F.scaled_dot_product_attention``, as are the others.
        key: Its heads divide the query's.
        value: As many heads as the key's.
        mask: Boolean (True takes part) or additive.
        is_causal: Beside a mask both apply.
        scale: Of the scores; by default 1 / sqrt(head_dim).
        dropout_p: Of the weights.
        softcap: Scores are ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv:2408.00118).
        sinks: One score a head of a key without a value (GPT-OSS), shape (heads,).
    """
    if has_torch_function((query, key, value)):
        options: dict[str, Any] = {
            "is_causal": is_causal,
            "scale": scale,
            "dropout_p": dropout_p,
            "softcap": softcap,
            "sinks": sinks,
        }
        result: Tensor = handle_torch_function(weighed_attention, (query,), query, key, value, mask, **options)
        return result
    groups = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        mask = seen if mask is None else both(mask, seen)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if is_bool else scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.size(0), -1, scores.size(2), 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, scores.dtype)).to(query.dtype)
    return F.dropout(weights[..., : key.size(-2)], dropout_p) @ value


def both(mask: Tensor, seen: Tensor) -> Tensor:
    """A mask, and the keys that a query may see at all (boolean)."""
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
