"""FLOPs of single operations that torch's counter has no formula for, or one that does not fit.

A multiplication and an addition are 2 FLOPs. Fused attention is apart from the rest: what of it has to be computed
depends on the mask, which torch's formulas do not look at, and its backward recomputes the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Causal = Literal["half", "full"]

# Kernels of scaled_dot_product_attention; all name their tensors alike. Shape: (batch, heads, length, head_dim).
ATTENTION = tuple(
    f"aten._scaled_dot_product_{kind}"
    for kind in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)
ATTENTION_BACKWARD = tuple(f"{name}_backward" for name in ATTENTION)
GROUPED = ("aten._grouped_mm", "aten._scaled_grouped_mm")

# In units of the forward's two products of matrices. The backward of attention has four; a fused kernel computes the
# scores a second time, which is recomputation.
BACKWARD_PRODUCTS = 2.0
RECOMPUTED_PRODUCTS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What a module says about the attention inside it.

    Attributes:
        causal: Whether a query sees earlier keys only, where the kernel is given a mask and so cannot tell.
        window: Keys that a query sees at most, in positions; ``None``: no limit.
    """

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """One call of a fused kernel.

    Attributes:
        shape: Batch, heads, queries, keys, head size of the keys and of the values.
        causal: A query sees earlier keys only.
        window: Keys that it sees at most.
    """

    shape: tuple[int, int, int, int, int, int]
    causal: bool
    window: int | None

    def flops(self, convention: Causal) -> float:
        """Of the forward: a product for the scores, and one with the values."""
        batch, heads, queries, keys, key_dim, value_dim = self.shape
        pairs = visible_pairs(queries, keys, causal=self.causal, window=self.window, convention=convention)
        return 2.0 * batch * heads * pairs * (key_dim + value_dim)


def read_attention(arguments: Mapping[str, Any], sight: Sight) -> Attention:
    """The call, from the arguments of a kernel's forward or backward.

    Grouped queries are counted by the heads of the queries.
    """
    query, key, value = (arguments[name].shape for name in ("query", "key", "value"))
    masked = any(arguments.get(name) is not None for name in ("attn_mask", "attn_bias"))
    causal = bool(arguments.get("is_causal", False)) or (masked and sight.causal and query[2] == key[2])
    shape = (int(query[0]), int(query[1]), int(query[2]), int(key[2]), int(query[3]), int(value[3]))
    return Attention(shape=shape, causal=causal, window=sight.window if causal else None)


def visible_pairs(queries: int, keys: int, *, causal: bool, window: int | None, convention: Causal) -> float:
    """Pairs of a query and a key that are counted in one sequence.

    Args:
        queries: Their number.
        keys: Their number.
        causal: A query sees earlier keys only.
        window: Keys that a query sees at most.
        convention: ``"half"``: what a causal mask hides is not counted; ``"full"``: it is.
    """
    if not causal or queries != keys or (convention == "full" and (window is None or window >= keys)):
        return float(queries * keys)
    if window is not None and window < keys:
        # The first queries see less than a window; counted in full they count as if they saw one.
        return float(window * keys if convention == "full" else window * keys - window * (window - 1) / 2)
    return queries * keys / 2


def grouped_flops(arguments: Mapping[str, Any]) -> float:
    """Products of the rows of each expert with its matrix: every row once, whatever the number of experts.

    Shape: (rows, k) and (experts, k, n); or (experts, m, k) and (k, columns); or both in two dims, or both in three.
    """
    left, right = arguments["self"].shape, arguments["mat2"].shape
    experts = left[0] if len(left) == len(right) == 3 else 1
    return 2.0 * int(experts) * int(left[-2]) * int(left[-1]) * int(right[-1])
