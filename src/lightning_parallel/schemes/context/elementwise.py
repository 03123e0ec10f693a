"""What goes element by element, or token by token, on rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_parallel._torch import tree_map
from lightning_parallel.schemes.context.random import own_numbers
from lightning_parallel.schemes.context.shard import SequenceShard, shards_in


def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Operands are aligned from the last dim, as broadcasting does; a full one gives its rows."""
    shards = shards_in((args, kwargs))
    lead = max(shards, key=lambda shard: shard.ndim)
    dim = lead.sequence_dim - lead.ndim
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    ndim = max(v.ndim for v in tensors)
    if lead.rows.size == 1 and any(v.ndim >= -dim and v.size(dim) > 1 for v in tensors):
        return NotImplemented

    def local(value: Any) -> Any:
        if isinstance(value, SequenceShard):
            if value.rows is lead.rows and value.sequence_dim - value.ndim == dim:
                return value.local
            value = value.full()
        if isinstance(value, Tensor) and value.ndim >= -dim and value.size(dim) == lead.rows.size:
            return lead.rows.take(value, dim)
        return value

    if _is_in_place(func):
        target = args[0]
        if not isinstance(target, SequenceShard) or target.rows is not lead.rows or target.ndim != ndim:
            return NotImplemented
        func(target.local, *map(local, args[1:]), **{key: local(value) for key, value in kwargs.items()})
        return target
    result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    return wrap(result, lead, ndim + dim)


def wrap(result: Any, lead: SequenceShard, dim: int) -> Any:
    """Tensors of ``result`` in the rows of ``lead``, at ``dim``."""
    return tree_map(lambda v: lead.like(v, dim) if isinstance(v, Tensor) else v, result)


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def converted(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Of ``x`` alone; other tensors give a dtype or a device."""
    if not isinstance(x, SequenceShard):
        return func(x, *(_sample(v) for v in args), **{k: _sample(v) for k, v in kwargs.items()})
    result = func(x.local, *(_sample(v) for v in args), **{k: _sample(v) for k, v in kwargs.items()})
    if not isinstance(result, Tensor):
        return result
    return x.like(result) if result.device == x.device else NotImplemented  # rows come together where they are


def _sample(value: Any) -> Any:
    return value.local if isinstance(value, SequenceShard) else value


def like_local(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """``x.new_zeros(…)``: of the dtype and device of ``x``."""
    return func(_sample(x), *args, **kwargs)


def drawn(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Each rank draws for its own rows."""
    if not isinstance(x, SequenceShard):
        return NotImplemented
    with own_numbers(x.rows.context):
        return x.like(func(x.local, *args, **kwargs))


def linear(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """``F.linear`` with a weight that all ranks hold."""
    if not isinstance(x, SequenceShard) or shards_in((weight, bias)) or x.sequence_dim == x.ndim - 1:
        return NotImplemented
    return x.like(F.linear(x.local, weight, bias))


def matmul(func: Any, x: Any, other: Any) -> Any:
    """With a matrix that all ranks hold."""
    if not isinstance(x, SequenceShard) or isinstance(other, SequenceShard) or x.sequence_dim == x.ndim - 1:
        return NotImplemented
    if not isinstance(other, Tensor) or other.ndim != 2:
        return NotImplemented
    return x.like(func(x.local, other))


def normed(func: Any, x: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """A normalisation over the last dims."""
    if not isinstance(x, SequenceShard) or x.sequence_dim >= x.ndim - len(normalized_shape):
        return NotImplemented
    return x.like(func(x.local, normalized_shape, *args, **kwargs))


def dropped(func: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout: each rank draws for its own rows."""
    if not isinstance(x, SequenceShard):
        return NotImplemented
    if not training or p == 0:
        return x
    with own_numbers(x.rows.context):
        return x.like(func(x.local, p, training, inplace))


def embedded(func: Any, ids: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """A look-up of ids that are in rows."""
    if not isinstance(ids, SequenceShard) or isinstance(weight, SequenceShard):
        return NotImplemented
    return ids.like(func(ids.local, weight, *args, **kwargs))


def bound(func: Any, x: Tensor, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of a reduction by name: torch's own have no signature to ask."""
    names = _POSITIONS.get(getattr(func, "__name__", ""), ("dim", "keepdim"))
    return {**dict(zip(names, args, strict=False)), **kwargs}


_POSITIONS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "norm": ("p", "dim", "keepdim"), "split": ("size", "dim"), "chunk": ("chunks", "dim"), "unbind": ("dim",),
    "softmax": ("dim",), "log_softmax": ("dim",), "topk": ("k", "dim"), "sort": ("dim",), "argsort": ("dim",),
    "cumsum": ("dim",), "normalize": ("p", "dim"), "tensor_split": ("sections", "dim"), "glu": ("dim",),
})  # fmt: skip
