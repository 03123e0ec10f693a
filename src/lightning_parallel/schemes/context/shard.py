"""A tensor whose sequence lies in rows on the context ranks, to the code around the blocks a full tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel._torch import tree_leaves, tree_map
from lightning_parallel.schemes.context.rows import Rows

_NOT_OF_SHAPE = frozenset({"T", "H", "mT", "mH", "real", "imag", "data", "grad", "_base"})


class SequenceShard(Tensor):
    """Stands for a full tensor, with its shape, of which this rank holds the rows of one dim.

    What goes row by row stays in rows (`operations`); what does not sees the full tensor, gathered, on every rank.

    Args:
        local: This rank's rows; carries the autograd graph.
        rows: Which these are.
        dim: Where.
    """

    _local: Tensor
    _rows: Rows
    _dim: int
    __slots__ = ["_dim", "_local", "_rows"]

    @staticmethod
    def __new__(cls, local: Tensor, rows: Rows, dim: int) -> SequenceShard:
        """Without storage of its own."""
        dim %= local.ndim
        shape = (*local.shape[:dim], rows.size, *local.shape[dim + 1 :])
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self._local, self._rows, self._dim = local, rows, dim
        return self

    def __init__(self, local: Tensor, rows: Rows, dim: int) -> None:
        super().__init__()

    @property
    def local(self) -> Tensor:
        """This rank's rows."""
        return self._local

    @property
    def rows(self) -> Rows:
        """Which rows these are."""
        return self._rows

    @property
    def sequence_dim(self) -> int:
        """The dim that lies in rows, not negative."""
        return self._dim

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Of the tensor that this one stands for."""
        return self._local.requires_grad

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Of the tensor that this one stands for."""
        return self._local.grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Of the tensor that this one stands for."""
        return self._local.is_leaf

    def full(self) -> Tensor:
        """The plain tensor, gathered in order; the same on every rank."""
        return self._rows.gather(whole(self._local), self._dim)

    def like(self, local: Tensor, dim: int | None = None) -> SequenceShard:
        """The same rows of something else."""
        return SequenceShard(local, self._rows, self._dim if dim is None else dim)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SequenceShard(shape={tuple(self.shape)}, rows={self._rows.num_local} of dim {self._dim})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], SequenceShard) else shards_in((args, kwargs))[0]
        if (handler := first._rows.context.handlers.get(func)) is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        elif _is_about_shape(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _writes(func) and isinstance(args[0], SequenceShard):
            return _write(func, args, kwargs)
        args, kwargs = tree_map(gathered, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for a method of instances
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} reached a tensor in rows over cp; call .full() on it first.")


def gathered(value: Any) -> Any:
    """A tensor in rows as the full one, anything else as it is."""
    return value.full() if isinstance(value, SequenceShard) else value


def whole(local: Tensor) -> Tensor:
    """The rows of a tensor that is split over ``tp`` besides (logits over the vocabulary, a residual stream)."""
    if isinstance(local, DTensor):
        return local.redistribute(placements=[Replicate()]).to_local()
    full: Any = getattr(local, "full", None)
    return full() if callable(full) else local


def shards_in(values: Any) -> list[SequenceShard]:
    """Those among the leaves of ``values``."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, SequenceShard)]


def _is_about_shape(func: Any) -> bool:
    """Whether ``func`` reads what the stand-in knows: a property of shape, dtype or device."""
    if getattr(func, "__name__", "") != "__get__":
        return func in _ABOUT_SHAPE
    return getattr(getattr(func, "__self__", None), "__name__", "") not in _NOT_OF_SHAPE


_ABOUT_SHAPE = frozenset({
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.stride, Tensor.is_contiguous, Tensor.get_device,
    torch.is_floating_point, torch.is_complex, torch.numel, Tensor.is_signed,
})  # fmt: skip


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _write(func: Any, args: Any, kwargs: Any) -> SequenceShard:
    """``func``, which changes this tensor in a way that needs all of it: on the full one, of which rows are taken."""
    shard: SequenceShard = args[0]
    full = shard.full().clone()
    rest, kwargs = tree_map(gathered, (args[1:], kwargs))
    func(full, *rest, **kwargs)
    shard._local = shard._rows.take(full, shard._dim)
    return shard
