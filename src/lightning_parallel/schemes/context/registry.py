"""Hugging Face's attention while a step runs."""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.errors import PlanError
from lightning_parallel.schemes.context.weighed import weighed_attention


class Registered:
    """Hugging Face models call attention by a name in a registry: while a step runs, by ours.

    Args:
        configs: Of the models.
    """

    KEY = "lightning_parallel"

    def __init__(self, configs: list[Any]) -> None:
        self._configs = configs
        self._saved: list[tuple[Any, str, Any]] = []
        self._depth = 0

    @property
    def is_entered(self) -> bool:
        """Whether a step runs."""
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1 or not self._configs:
            return
        sys.modules["transformers.modeling_utils"].AttentionInterface.register(self.KEY, _registered_attention)
        masks = sys.modules["transformers.masking_utils"]
        masks.AttentionMaskInterface.register(self.KEY, masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        for config in self._configs:
            for name, value in (("_attn_implementation", self.KEY), ("use_cache", False)):
                if hasattr(config, name):
                    self._saved.append((config, name, getattr(config, name)))
                    setattr(config, name, value)

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        while self._saved:
            config, name, value = self._saved.pop()
            setattr(config, name, value)


_UNKNOWN = ("position_bias",)


def _registered_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a Hugging Face layer calls, query (batch, heads, rows, head_dim); returns (batch, rows, heads, head_dim)."""
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise PlanError(
                f"{type(module).__name__}: attention with {name}, which cp does not know how to exchange. Use cp=1."
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is not None or sinks is not None:
        out = weighed_attention(
            query, key, value, attention_mask, is_causal=causal and attention_mask is None, scale=scaling,
            dropout_p=dropout, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None
    out = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, causal and attention_mask is None, scale=scaling,
        enable_gqa=query.size(1) != key.size(1),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
