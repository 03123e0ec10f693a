"""Other shapes of a tensor in rows, and parts of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.schemes.context.elementwise import bound, wrap
from lightning_parallel.schemes.context.shard import SequenceShard


def permuted(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Dims in another order, or new ones of size 1: where the sequence went, a small tensor tells."""
    if not isinstance(x, SequenceShard):
        return NotImplemented
    probe = func(torch.empty([7 if d == x.sequence_dim else 1 for d in range(x.ndim)]), *args, **kwargs)
    at = [dim for dim, size in enumerate(probe.shape) if size == 7]
    return x.like(func(x.local, *args, **kwargs), at[0]) if len(at) == 1 else NotImplemented


def squeezed(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Without some dims of size 1."""
    if not isinstance(x, SequenceShard) or x.rows.size == 1 or x.rows.num_local == 1:
        return NotImplemented
    probe = func(torch.empty(x.shape, device="meta"), *args, **kwargs)
    local = func(x.local, *args, **kwargs)
    gone = sum(1 for d in range(x.sequence_dim) if x.size(d) == 1) if not (args or kwargs) else None
    if gone is None:
        dims = args[0] if args else kwargs["dim"]
        dims = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]
        gone = sum(1 for d in dims if d < x.sequence_dim and x.size(d) == 1)
    return x.like(local, x.sequence_dim - gone) if probe.ndim == local.ndim else NotImplemented


def reshaped(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A view: the sequence is a dim of the result as well, or becomes one with dims around it, or comes out again."""
    if not isinstance(x, SequenceShard) or not _all_ints(args) or kwargs.keys() - {"shape", "size"}:
        return NotImplemented
    target = _target(kwargs.get("shape", kwargs.get("size", args)), x.numel())
    local, rows, dim = x.local, x.rows, x.sequence_dim
    shape = list(x.shape)
    if rows.merged and target is not None:
        if dim < len(target) and target[dim] == rows.size and target[:dim] == shape[:dim]:
            pass  # still in one
        else:
            inner, before, after = rows.merged
            parts = [before, inner.num_local, after]
            local = local.reshape(*local.shape[:dim], *parts, *local.shape[dim + 1 :])
            shape[dim : dim + 1] = [before, inner.size, after]
            rows, dim = inner, dim + 1
    place = _place(shape, dim, target) if target is not None else None
    if place is None or target is None:
        return NotImplemented
    at, before, after = place
    rows = rows.merge(before, after)
    sizes = [*target[:at], rows.num_local, *target[at + 1 :]]
    make = local.view if func is Tensor.view else local.reshape
    return SequenceShard(make(sizes), rows, at)


def _all_ints(args: Any) -> bool:
    return all(isinstance(v, int) or (isinstance(v, list | tuple) and all(isinstance(w, int) for w in v)) for v in args)


def _target(given: Any, numel: int) -> list[int] | None:
    sizes = list(given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given)
    if sizes.count(-1) == 1:
        rest = math.prod(size for size in sizes if size != -1)
        if rest == 0 or numel % rest:
            return None
        sizes[sizes.index(-1)] = numel // rest
    return sizes if math.prod(sizes) == numel else None


def _place(shape: Sequence[int], dim: int, target: Sequence[int]) -> tuple[int, int, int] | None:
    """Where ``dim`` goes when ``shape`` is viewed as ``target``: the new dim, and what comes before and after in it."""
    ahead, size, behind = math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
    merged = None
    for at, new in enumerate(target):
        before, after = math.prod(target[:at]), math.prod(target[at + 1 :])
        if before == ahead and after == behind and new == size:
            return at, 1, 1
        if new % size == 0 and before and ahead % before == 0 and after and behind % after == 0 and merged is None:
            inside = ahead // before, behind // after
            # What comes before and after must be whole dims, not parts of one.
            if inside[0] * size * inside[1] == new and before in _products(shape[:dim]) and (
                after in _products(list(reversed(shape[dim + 1 :])))
            ):  # fmt: skip
                merged = (at, *inside)
    return merged


def _products(sizes: Sequence[int]) -> set[int]:
    return {math.prod(sizes[:count]) for count in range(len(sizes) + 1)}


def flattened(func: Any, x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """``flatten``."""
    if not isinstance(x, SequenceShard):
        return NotImplemented
    first, last = start_dim % x.ndim, end_dim % x.ndim
    sizes = [*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]]
    return reshaped(Tensor.reshape, x, *sizes)


def unflattened(func: Any, x: Any, dim: int, sizes: Any) -> Any:
    """``unflatten``."""
    if not isinstance(x, SequenceShard):
        return NotImplemented
    dim %= x.ndim
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.size(dim) // -math.prod(sizes)
    return reshaped(Tensor.reshape, x, *x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def expanded(func: Any, x: Any, *sizes: Any) -> Any:
    """Other dims repeated, or new ones in front."""
    if not isinstance(x, SequenceShard) or not _all_ints(sizes):
        return NotImplemented
    wanted = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes)
    at = x.sequence_dim - x.ndim
    if wanted[at] not in (-1, x.rows.size) or x.rows.size == 1:
        return NotImplemented
    wanted[at] = -1
    return x.like(x.local.expand(wanted), len(wanted) + at)


def indexed(func: Any, x: Any, index: Any) -> Any:
    """Slices, numbers, ``None`` and ``…``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(x, SequenceShard) or not all(
        part is None or (isinstance(part, int) and not isinstance(part, bool)) or isinstance(part, slice | EllipsisType)
        for part in parts
    ):
        return NotImplemented
    taken = sum(1 for part in parts if isinstance(part, int | slice))
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    parts[at : at + 1] = [slice(None)] * (x.ndim - taken)
    rows, dim, new_dim, place = x.rows, -1, 0, 0
    for position, part in enumerate(parts):
        if part is not None:
            dim += 1
            if dim == x.sequence_dim:
                place = position
                break
        new_dim += not isinstance(part, int)
    own = parts[place]
    if isinstance(own, int):
        if not -rows.size <= own < rows.size:
            return NotImplemented  # the full tensor raises torch's own error
        rest = [slice(None) if position == place else part for position, part in enumerate(parts)]
        return rows.select(x.local[tuple(rest)], new_dim, own % rows.size)
    start, stop, step = own.indices(rows.size)
    if step < 1 or start >= stop:
        return NotImplemented
    if (start, stop, step) != (0, rows.size, 1):
        rows = rows.part(start, stop, step)
    parts[place] = slice(None)
    return SequenceShard(x.local[tuple(parts)], rows, new_dim)


def narrowed(func: Any, x: Any, dim: int, start: int, length: int) -> Any:
    """``narrow``."""
    if not isinstance(x, SequenceShard) or not isinstance(start, int):
        return NotImplemented
    dim %= x.ndim
    return indexed(None, x, (slice(None),) * dim + (slice(start, start + length),))


def along(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Split, chunk, softmax and the like along one dim that is not the sequence; the other dims stay."""
    if not isinstance(x, SequenceShard):
        return NotImplemented
    given = bound(func, x, args, kwargs)
    dim = given.get("dim", 0 if getattr(func, "__name__", "") in ("split", "chunk", "tensor_split") else None)
    if not isinstance(dim, int) or isinstance(dim, bool) or dim % x.ndim == x.sequence_dim:
        return NotImplemented
    return wrap(func(x.local, *args, **kwargs), x, x.sequence_dim)


def joined(func: Any, tensors: Any, dim: int = 0) -> Any:
    """``torch.cat`` along another dim, of tensors in the same rows."""
    shards = [t for t in tensors if isinstance(t, SequenceShard)]
    lead = shards[0]
    dim %= lead.ndim
    if dim == lead.sequence_dim or any(
        t.ndim != lead.ndim or t.size(lead.sequence_dim) != lead.rows.size for t in tensors
    ):
        return NotImplemented

    def local(value: Tensor) -> Tensor:
        if isinstance(value, SequenceShard):
            if value.rows is lead.rows and value.sequence_dim == lead.sequence_dim:
                return value.local
            value = value.full()
        return lead.rows.take(value, lead.sequence_dim)

    return lead.like(func([local(t) for t in tensors], dim=dim))


def transposed(func: Any, x: Any, *args: Any) -> Any:
    """The properties ``T`` and ``mT``."""
    return permuted(Tensor.transpose, x, -2, -1) if x.ndim == 2 or "m" in func.__self__.__name__ else NotImplemented
