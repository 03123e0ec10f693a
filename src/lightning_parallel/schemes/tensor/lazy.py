"""A tensor that is split over ``tp`` and stays so for the operations that allow it, and is gathered for the rest.

Code outside the parallel layers is the user's: it may hand logits to ``F.cross_entropy``, but as well to a metric, to
``argmax`` or to ``numpy``. A ``LazyShard`` stands in for the full tensor, with its shape, dtype and device.
An operation on the list below keeps the split; any other sees the full, plain tensor. One that changes the tensor in
place makes it whole from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_parallel._torch import tree_map

Handler = Callable[..., Any]

# Element by element, or reshaping: the layout of the result follows from that of the input.
_POINTWISE = (
    Tensor.float, Tensor.to, Tensor.double, Tensor.bfloat16, Tensor.half, Tensor.type, Tensor.contiguous,
    Tensor.__truediv__, Tensor.__mul__, Tensor.__rmul__, Tensor.mul, Tensor.div, torch.mul, torch.div,
    torch.tanh, Tensor.tanh, Tensor.__neg__,
)  # fmt: skip
_RESHAPING = (
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.transpose, torch.transpose,
    Tensor.permute, Tensor.movedim, torch.movedim, Tensor.__getitem__, Tensor.unsqueeze, Tensor.squeeze,
)  # fmt: skip
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS)])
PROPERTIES = frozenset({
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size,
    Tensor.__len__, Tensor.stride, Tensor.is_contiguous,
})  # fmt: skip


class LazyShard(Tensor):
    """Stand-in for a full tensor of which each ``tp`` rank holds a part along one dim.

    Args:
        sharded: DTensor over ``tp``; carries the autograd graph.
        handlers: Functions that have a split version, called with the arguments as they are (a ``LazyShard`` among
            them); a handler returns ``NotImplemented`` to fall back on the full tensor.
    """

    _sharded: DTensor
    _handlers: Mapping[Any, Handler]
    _seen_in: weakref.ref[LazyShard] | None  # what this is another shape of, or a part
    __slots__ = ["_handlers", "_seen_in", "_sharded"]

    @staticmethod
    def __new__(cls, sharded: DTensor, handlers: Mapping[Any, Handler]) -> LazyShard:
        """Without storage of its own."""
        self = Tensor._make_wrapper_subclass(
            cls, sharded.shape, strides=sharded.stride(), dtype=sharded.dtype, device=sharded.device
        )
        self._sharded, self._handlers, self._seen_in = sharded, handlers, None
        return self

    def __init__(self, sharded: DTensor, handlers: Mapping[Any, Handler]) -> None:
        super().__init__()

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Of the tensor that this one stands for."""
        return self._sharded.requires_grad

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Of the tensor that this one stands for."""
        return self._sharded.grad_fn

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {self._sharded.placements[0]})"

    def full(self) -> Tensor:
        """The plain tensor, gathered over ``tp``; the same on every rank."""
        return self._sharded.to_local() if not self.is_split() else self.replicated().to_local()

    def replicated(self) -> DTensor:
        """The gathered tensor as a DTensor."""
        return self._sharded.redistribute(placements=[Replicate()])

    def is_split(self) -> bool:
        """Whether nothing has made it whole yet."""
        return not isinstance(self._sharded.placements[0], Replicate)

    def split_dim(self) -> int | None:
        """The dim that is split, or ``None``."""
        placement = self._sharded.placements[0]
        return placement.dim if isinstance(placement, Shard) else None

    def like(self, sharded: DTensor) -> LazyShard:
        """The same layout for other values."""
        return LazyShard(sharded, self._handlers)

    def reshaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyShard | None:
        """``func`` by DTensor's own rules when they keep the split, else ``None``."""
        try:
            result = func(self._sharded, *args[1:], **kwargs)
        except (RuntimeError, NotImplementedError, IndexError):
            return None  # the full tensor decides: it works, or raises torch's own error
        if not (isinstance(result, DTensor) and isinstance(result.placements[0], Shard)):
            return None
        shape = LazyShard(result, self._handlers)
        shape._seen_in = weakref.ref(self)
        return shape

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], LazyShard) else None
        if first is not None and _is_in_place(func):
            return first._change(func, args, kwargs)
        handlers = first._handlers if first is not None else {}
        for lazy in (value for value in (*args, *kwargs.values()) if isinstance(value, LazyShard)):
            handlers = handlers or lazy._handlers
        if func in handlers:
            result = handlers[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        others = (*args[1:], *kwargs.values())
        if first is not None and not any(isinstance(other, Tensor) and not _is_constant(other) for other in others):
            if func in _POINTWISE:
                return cls._apply(first, func, args, kwargs)
            if func in _RESHAPING and (result := first.reshaped(func, args, kwargs)) is not None:
                return result
        args, kwargs = tree_map(_whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for a method of instances
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} reached a tensor split over tp; call .full() on it first.")

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyShard:
        """``func``, which writes into this tensor, on the full one, which takes the place of the shards."""
        if self._seen_in is not None and self._seen_in() is not None:
            raise RuntimeError(
                f"{func.__name__} writes into a part, or another shape, of a tensor that is split over tp and still in "
                "use: the change would not show there. Write into a copy: call .clone() first."
            )
        whole = self.full().clone()
        args, kwargs = tree_map(_whole, (args[1:], kwargs))
        func(whole, *args, **kwargs)
        self._sharded = DTensor.from_local(whole, self._sharded.device_mesh, [Replicate()], run_check=False)
        return self

    @classmethod
    def _apply(cls, lazy: LazyShard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Element-wise ``func`` on the local part."""
        sharded = lazy._sharded
        args, kwargs = tree_map(_local_scalar, (args[1:], kwargs))
        local = func(sharded.to_local(), *args, **kwargs)
        if not isinstance(local, Tensor):
            return local  # ``x.type()`` is a name
        return lazy.like(
            DTensor.from_local(
                local,
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
        )


def _is_in_place(func: Any) -> bool:
    """Whether ``func`` is ``x.mul_``, ``x *= …`` or ``x[…] = …``."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.startswith("_")) or name in _IN_PLACE


def _whole(value: Any) -> Any:
    return value.full() if isinstance(value, LazyShard) else value


def _is_constant(other: Tensor) -> bool:
    """A number, or a scalar parameter (a learnt temperature): the same for every part."""
    return other.ndim == 0 and (isinstance(other, DTensor) or not other.requires_grad)


def _local_scalar(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    # Each rank's gradient is of its part alone, to be summed.
    return value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
