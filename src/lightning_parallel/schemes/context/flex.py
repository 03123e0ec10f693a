"""FlexAttention inside a block: this rank's queries at their positions, the keys and values of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from lightning_parallel._torch import before_compile
from lightning_parallel.errors import PlanError
from lightning_parallel.schemes.context.rows import Rows

_MODULE = "torch.nn.attention.flex_attention"


def flex_over_ranks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What calls of ``flex_attention`` become: ``original``, or what the mode around them makes of it."""
    tensors = (*args[:3], *(kwargs.get(name) for name in ("query", "key", "value")))
    if has_torch_function(tensors):
        return handle_torch_function(flex_over_ranks, tensors, original, *args, **kwargs)
    return original(*args, **kwargs)


class FlexNames:
    """The names that loaded modules, and a module and its layers, have for ``flex_attention``, compiled or not.

    It has no hook of its own, and user code has usually imported it by name. So these names stand for something else
    while a step runs. Where one is not found, the block that uses it fails its proof.

    Args:
        module: Of the user.
        call: Called with the function and its arguments.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._depth = 0
        self._places: list[tuple[Any, str, Any, Any]] = []
        if (torchs := sys.modules.get(_MODULE)) is None:
            return
        children = list(module.modules())
        owners: list[Any] = [*sys.modules.values(), *children, *{type(child) for child in children}]
        for owner in owners:
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                function = value.__func__ if type(value) is staticmethod else value
                if type(function) is FunctionType and before_compile(function) is torchs.flex_attention:
                    ours: Any = wraps(function)(_bound(call, function))
                    self._places.append((owner, name, value, staticmethod(ours) if function is not value else ours))

    @contextmanager
    def redirected(self) -> Iterator[None]:
        """Around a step, or its backward."""
        self._depth += 1
        try:
            for owner, name, _, ours in self._places if self._depth == 1 else []:
                setattr(owner, name, ours)
            yield
        finally:
            self._depth -= 1
            for owner, name, value, _ in self._places if not self._depth else []:
                setattr(owner, name, value)


def _bound(call: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``partial(call, function)`` as a function, which a class may have among its attributes."""

    def redirected(*args: Any, **kwargs: Any) -> Any:
        return call(function, *args, **kwargs)

    return redirected


class FirstTokens(TorchFunctionMode):
    """Inside it, a block mask of a whole sequence is taken for that of the first tokens, which there are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not flex_over_ranks:
            return func(*args, **(kwargs or {}))
        return _first_tokens(*args, **(kwargs or {}))


def _first_tokens(
    original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None,
    block_mask: Any = None, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    if block_mask is not None and block_mask.shape[-2] > query.size(-2):
        block_mask = _masked(block_mask, torch.arange(query.size(-2), device=query.device), key.size(-2))
    return original(query, key, value, score_mod, block_mask, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flex_rows(
    rows: Rows, name: str, original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor,
    score_mod: Any = None, block_mask: Any = None, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """``flex_attention`` of this rank's rows to the gathered keys and values, for every method of exchange.

    Args:
        rows: Of the sequence.
        name: Of the block.
        original: The user's ``flex_attention``.
        query: Shape (batch, heads, rows, head_dim).
        key: Shape (batch, kv_heads, rows, head_dim).
        value: As ``key``.
        score_mod: Of positions in the whole sequence.
        block_mask: Of the whole sequence.
        args: As for ``flex_attention``.
        kwargs: As for ``flex_attention``.

    Raises:
        PlanError: Something else than the block's rows, a mask made of them, split by ``tp``, or what torch refuses.
    """
    if {type(x) for x in (query, key, value)} != {Tensor} or {x.size(-2) for x in (query, key)} != {rows.num_local}:
        raise PlanError(
            f"{name}: flex_attention of {query.size(-2)} queries to {key.size(-2)} keys, as {type(query).__name__}, "
            f"where each context rank holds {rows.num_local} rows of {rows.size} tokens. Under cp it takes the rows of "
            "a block as plain tensors: no cache, and no layer split by tp. Use F.scaled_dot_product_attention there, "
            "or cp=1."
        )
    if block_mask is not None and min(block_mask.shape[-2:]) < rows.size:
        raise PlanError(
            f"{name}: a block mask for {tuple(block_mask.shape[-2:])} queries and keys, where the sequence has "
            f"{rows.size} tokens, {rows.num_local} of them on each context rank. Inside a block a mask cannot be built "
            "for all tokens: build it outside of the blocks and hand it on, or use cp=1."
        )
    local_mask = None
    if block_mask is not None:  # all layers have the same one
        local_mask = rows.keep(block_mask, lambda: _masked(block_mask, rows.own, rows.size))
    local_score = None if score_mod is None else _scored(score_mod, rows.own)
    try:
        whole_key, whole_value = rows.gather(key, -2), rows.gather(value, -2)
        return original(query, whole_key, whole_value, local_score, local_mask, *args, **kwargs)
    except NotImplementedError as error:
        raise PlanError(
            f"{name}: torch refuses flex_attention here, on one device too: {error} Use F.scaled_dot_product_attention "
            "with an attn_mask."
        ) from error


def _masked(whole: Any, positions: Tensor, num_keys: int) -> Any:
    """The block mask of the queries at ``positions``: of what ``whole`` lets through, block by block and in blocks."""
    create: Callable[..., Any] = sys.modules[_MODULE].create_block_mask
    blocks, mask_mod = whole.to_dense().bool(), whole.mask_mod
    (batch, heads), (block_rows, block_cols) = blocks.shape[:2], whole.BLOCK_SIZE
    positions = positions.to(torch.int32)

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = positions[q_idx]
        inside = blocks[b % batch, h % heads, position // block_rows, kv_idx // block_cols]
        seen: Tensor = inside & mask_mod(b, h, position, kv_idx)
        return seen

    return create(mask, batch, heads, len(positions), num_keys, positions.device, BLOCK_SIZE=whole.BLOCK_SIZE)


def _scored(score_mod: Callable[..., Tensor], positions: Tensor) -> Callable[..., Tensor]:
    """``score_mod`` of the queries at ``positions``."""
    positions = positions.to(torch.int32)

    def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, positions[q_idx], kv_idx)

    return score
