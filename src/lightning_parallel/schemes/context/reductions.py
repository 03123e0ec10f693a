"""Sums, means and losses of tensors in rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from lightning_parallel.schemes.context.elementwise import bound, elementwise, wrap
from lightning_parallel.schemes.context.shard import SequenceShard, gathered, shards_in


def reduced(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Over other dims, row by row; a sum or a mean over the sequence too, from parts."""
    if not isinstance(x, SequenceShard):
        return NotImplemented
    given = bound(func, x, args, kwargs)
    dims, keep, dtype = given.get("dim"), given.get("keepdim", False), given.get("dtype")
    if isinstance(dims, Tensor) or isinstance(given.get("keepdim"), Tensor):  # torch.maximum by another name
        return NotImplemented
    is_all = dims is None or dims == []
    listed: Sequence[Any] = range(x.ndim) if is_all else [dims] if isinstance(dims, int) else list(dims or ())
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in listed):
        return NotImplemented
    over = {d % x.ndim for d in listed}
    if x.sequence_dim not in over:
        gone = 0 if keep else sum(1 for d in over if d < x.sequence_dim)
        return wrap(func(x.local, *args, **kwargs), x, x.sequence_dim - gone)
    name = getattr(func, "__name__", "")
    if name not in ("sum", "mean") or (name == "mean" and not (dtype or x.dtype).is_floating_point):
        return NotImplemented
    options = {} if is_all else {"dim": sorted(over), "keepdim": keep}
    total = x.rows.masked(x.local, x.sequence_dim).sum(**options, dtype=dtype)
    total = x.rows.sum(total)
    return total if name == "sum" else total / math.prod(x.size(d) for d in over)


def class_loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Cross entropy and NLL over classes (dim 1 where there is a batch, else the only one) with class indices."""
    call = _signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    logits, target, weight = given["input"], given["target"], given["weight"]
    legacy = given["size_average"] is not None or given["reduce"] is not None
    is_rows = isinstance(logits, SequenceShard) and logits.ndim > 1 and logits.sequence_dim != 1
    if not is_rows or legacy or target.is_floating_point() or shards_in(weight):
        return NotImplemented
    rows, dim = logits.rows, logits.sequence_dim
    target_dim = dim if dim == 0 else dim - 1
    if target.ndim != logits.ndim - 1 or target.size(target_dim) != rows.size:
        return NotImplemented  # torch's own error
    full = gathered(target)
    local, ignore = rows.take(full, target_dim), given["ignore_index"]
    if rows.is_partial:
        shape = [1] * local.ndim
        shape[target_dim] = -1
        local = local.where(rows.valid.view(shape), local.new_full((), ignore))
    how = given["reduction"]
    given |= {"input": logits.local, "target": local, "reduction": "none" if how == "none" else "sum"}
    result = func(*call.args, **call.kwargs)
    if how == "none":
        return SequenceShard(result, rows, target_dim)
    total = rows.sum(result)
    if how == "sum":
        return total
    counted = full != ignore
    return total / (counted if weight is None else weight[full.where(counted, 0)] * counted).sum()


def pair_loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss between two tensors of one shape, element by element."""
    call = _signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    how = given.get("reduction")
    first, second = given["input"], given["target"]
    legacy = given.get("size_average") is not None or given.get("reduce") is not None
    if how not in ("mean", "sum", "none") or legacy or first.shape != second.shape:
        return NotImplemented
    given["reduction"] = "none"
    each = elementwise(func, *call.args, **call.kwargs)
    if each is NotImplemented or how == "none":
        return each
    return reduced(getattr(Tensor, how), each)


@cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)
