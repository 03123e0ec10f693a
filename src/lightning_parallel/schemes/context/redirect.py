"""Attention inside a block, redirected while the block runs: the user's code calls torch's, the ranks exchange rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from lightning_parallel.errors import PlanError
from lightning_parallel.schemes.context.attention import attend
from lightning_parallel.schemes.context.flex import flex_over_ranks, flex_rows
from lightning_parallel.schemes.context.rows import Rows
from lightning_parallel.schemes.context.weighed import both, weighed_attention

# As they are before `Recomputation` puts something in their place.
_ATTENTION, _MULTI_HEAD = F.scaled_dot_product_attention, F.multi_head_attention_forward
_MULTI_HEAD_ARGUMENTS = inspect.signature(_MULTI_HEAD)


class AttentionOverRanks(TorchFunctionMode):
    """Inside it, ``F.scaled_dot_product_attention`` and torch's multi-head attention run over the context ranks.

    Args:
        rows: Of the sequence that queries, keys and values are rows of.
        name: Of the block, for messages.
        others: Lengths of tensors that the block got whole: attention to those needs no exchange.
    """

    def __init__(self, rows: Rows, name: str, others: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._rows, self._name, self._others = rows, name, others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            return self.attention(*args, **(kwargs or {}))
        if func is _MULTI_HEAD:
            return self.multi_head(*args, **(kwargs or {}))
        if func is weighed_attention:
            return self._weighed(*args, **(kwargs or {}))
        if func is flex_over_ranks:
            return self.flex(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def flex(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As torch's ``flex_attention``; masks and scores are of positions in the whole sequence."""
        return flex_rows(self._rows, self._name, original, *args, **kwargs)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As torch's, of queries (…, heads, rows, head_dim); ``attn_mask`` is of the whole sequence."""
        if isinstance(query, DTensor):
            return _by_heads(
                partial(self.attention, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa),
                query, key, value, attn_mask,
            )  # fmt: skip
        rows, context = self._rows, self._rows.context
        num_rows, num_keys = query.size(-2), key.size(-2)
        if num_rows == rows.num_local and num_keys in self._others and num_keys != rows.num_local:
            return self._to_others(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if num_rows != rows.num_local or num_keys != rows.num_local or num_keys in self._others:
            raise PlanError(
                f"{self._name}: attention of {num_rows} queries to {num_keys} keys, where each context rank holds "
                f"{rows.num_local} rows of {rows.size} tokens. Under cp keys and queries are those of the sequence: a "
                "key/value cache, or another sequence of the same length, cannot be told from it. Use use_cache=False, "
                "or cp=1."
            )
        batch = query.shape[:-3]
        query, key, value = (_four_dims(x) for x in (query, key, value))
        result: Tensor = attend(
            query, key, value, layout=rows.layout or context.layout(rows.size), group=context.group,
            method=context.method, attn_mask=self._whole_mask(attn_mask), is_causal=is_causal, dropout_p=dropout_p,
            scale=scale, name=self._name,
        )  # fmt: skip
        return result.view(*batch, *result.shape[1:]) if len(batch) != 1 else result

    def _whole_mask(self, mask: Tensor | None) -> Tensor | None:
        """A mask over keys that the block made from its own rows is gathered; any other must be whole."""
        rows = self._rows
        if mask is None or (mask.size(-1) in (1, rows.size) and (mask.ndim < 2 or mask.size(-2) in (1, rows.size))):
            return mask
        if mask.size(-1) == rows.num_local and (mask.ndim < 2 or mask.size(-2) == 1):
            return rows.gather(mask, -1)
        raise PlanError(
            f"{self._name}: the attention mask has the shape {tuple(mask.shape)}, where the sequence has {rows.size} "
            f"tokens, {rows.num_local} of them on each context rank. Inside a block a mask cannot be built for all "
            "tokens: pass is_causal=True, build it outside of the blocks and hand it on, or use cp=1."
        )

    def _weighed(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, **options: Any
    ) -> Tensor:
        """Keys and values are gathered, and each rank has the weights of its own rows."""
        rows = self._rows
        if query.size(-2) != rows.num_local or key.size(-2) != rows.num_local or isinstance(query, DTensor):
            raise PlanError(f"{self._name}: attention with a soft cap or sinks, over a cache or split by tp. Use cp=1.")
        mask = self._whole_mask(mask)
        if mask is not None and mask.ndim > 1 and mask.size(-2) == rows.size:
            mask = rows.take(mask, -2)
        if is_causal:
            seen = rows.own[:, None] >= torch.arange(rows.size, device=query.device)
            mask = seen if mask is None else both(mask, seen)
        return weighed_attention(query, rows.gather(key, -2), rows.gather(value, -2), mask, is_causal=False, **options)

    def _to_others(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
        scale: float | None, enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        """Attention to a whole sequence (an encoder's memory), which every rank has: each does its own queries."""
        if is_causal:
            own = self._rows.own[:, None] >= torch.arange(key.size(-2), device=query.device)
            mask = own if mask is None else mask & own
        elif mask is not None and mask.ndim > 1 and mask.size(-2) == self._rows.size:
            mask = self._rows.take(mask, -2)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa)

    def multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """`torch.nn.functional.multi_head_attention_forward` with masks of the whole sequence."""
        call = _MULTI_HEAD_ARGUMENTS.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        for name in ("bias_k", "bias_v", "static_k", "static_v"):
            if given[name] is not None or given["add_zero_attn"]:
                raise PlanError(
                    f"{self._name}: nn.MultiheadAttention with add_bias_kv, add_zero_attn or static keys adds keys "
                    "that belong to no rank. Use cp=1, or do without."
                )
        heads = given["num_heads"]
        query, key, value = given["query"], given["key"], given["value"]
        is_batched = query.ndim == 3
        if not is_batched:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        q, k, v = _project(query, key, value, given)
        q, k, v = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))  # (batch, heads, rows, dim)
        mask = self._join_masks(given["attn_mask"], given["key_padding_mask"], q)
        dropout_p = given["dropout_p"] if given["training"] else 0.0
        # torch takes is_causal for a hint that the mask is that one, and uses it where no weights are wanted.
        is_hint = given["is_causal"] and given["key_padding_mask"] is None and not given["need_weights"]
        out = self.attention(q, k, v, None if is_hint else mask, dropout_p, is_hint)
        out = out.permute(2, 0, 1, 3).flatten(2)
        out = F.linear(out, given["out_proj_weight"], given["out_proj_bias"])
        return (out if is_batched else out.squeeze(1)), _NoWeights(self._name) if given["need_weights"] else None

    def _join_masks(self, mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
        """torch's masks say True where a key does *not* take part; padding is (batch, keys)."""
        parts = []
        if mask is not None:
            parts.append(mask.view(-1, query.size(1), *mask.shape[-2:]) if mask.ndim == 3 else mask)
        if padding is not None:
            if padding.size(-1) == self._rows.num_local != self._rows.size:
                padding = self._rows.gather(padding, -1)
            parts.append(padding.view(-1, 1, 1, padding.size(-1)))
        if not parts:
            return None
        if all(part.dtype == torch.bool for part in parts):
            hidden = parts[0] if len(parts) == 1 else parts[0] | parts[1]
            return ~hidden
        total: Tensor | None = None
        for part in parts:
            if part.dtype == torch.bool:
                part = torch.zeros_like(part, dtype=query.dtype).masked_fill(part, float("-inf"))
            total = part if total is None else total + part
        return total


def _by_heads(
    attention: Callable[..., Tensor], query: DTensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> DTensor:
    """Attention of tensors that are split over ``tp`` besides: each rank of it takes its own heads."""
    mesh, heads = query.device_mesh, query.ndim - 3
    size, rank = mesh.size(), mesh.get_local_rank()
    is_split = query.size(heads) % size == 0 and key.size(heads) % size == 0
    placement = Shard(heads) if is_split else Replicate()

    def local(x: Tensor) -> Tensor:
        spread = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return spread.redistribute(placements=[placement]).to_local()

    if isinstance(mask, DTensor):
        mask = mask.redistribute(placements=[Replicate()]).to_local()
    if mask is not None and is_split and mask.ndim > 2 and mask.size(-3) > 1:
        mask = mask.chunk(size, dim=-3)[rank]
    out = attention(local(query), local(key), local(value), mask)
    return DTensor.from_local(out, mesh, [placement], run_check=False)


class _NoWeights:
    """In the place of attention weights that a block asked for, perhaps by default: an error where it uses them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise PlanError(
            f"{self._name} uses the weights of nn.MultiheadAttention, which under cp no rank has for all keys. Call it "
            "with need_weights=False, or use cp=1."
        )


def _four_dims(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.ndim == 3 else x.flatten(0, -4) if x.ndim > 4 else x


def _project(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """The projections of queries, keys and values, packed in one matrix or apart."""
    bias = given["in_proj_bias"]
    biases = bias.chunk(3) if bias is not None else (None, None, None)
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        packed = given["in_proj_weight"]
        if query is key and key is value:
            return F.linear(query, packed, bias).chunk(3, dim=-1)
        weights = list(packed.chunk(3))
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


class Recomputation:
    """Attention that activation checkpointing runs again in a backward, when no block is being called.

    A mode does not reach that far: torch takes it away while it runs a backward. So torch's names stand for something
    else meanwhile.
    """

    def __init__(self) -> None:
        self._reached: AttentionOverRanks | None = None

    def reach(self, attention: AttentionOverRanks | None) -> None:
        """Where the backward is: in a block that had this attention, or in none."""
        self._reached = attention

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a backward."""
        F.scaled_dot_product_attention = partial(self._call, _ATTENTION, "attention")
        F.multi_head_attention_forward = partial(self._call, _MULTI_HEAD, "multi_head")
        try:
            yield
        finally:
            F.scaled_dot_product_attention, F.multi_head_attention_forward = _ATTENTION, _MULTI_HEAD

    def call_flex(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of torch's ``flex_attention``, from anywhere."""
        return self._call(flex_over_ranks, "flex", original, *args, **kwargs)

    def _call(self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        reached, self._reached = self._reached, None  # it calls torch's own
        try:
            return getattr(reached, name)(*args, **kwargs) if reached else function(*args, **kwargs)
        finally:
            self._reached = reached
