"""What DTensor's own rules lack for code that runs in the global view."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

_ATTENTION = F.scaled_dot_product_attention  # context parallelism replaces the name during a backward
_RESHAPES = frozenset(
    {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten}
)
_REPEATS = frozenset({Tensor.repeat_interleave, torch.repeat_interleave})


class GlobalView(TorchFunctionMode):
    """Inside it, three things work on DTensors over ``tp`` that torch 2.13 refuses.

    - A plain tensor beside one may need a gradient: it becomes a replica where autograd sees it.
    - A reshape that would cut whole heads apart (fewer key/value heads than ranks) gathers the tensor first; forward,
      and backward where heads were repeated.
    - Attention with ``enable_gqa`` takes key/value heads that the ranks cannot share out.
    """

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        self._tp = tp

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _any_dtensor(args) and not _any_dtensor(kwargs.values()):
            return func(*args, **kwargs)
        if func is _ATTENTION:
            return _attention(*args, **kwargs)
        if func in _RESHAPES:
            return _reshape(func, args, kwargs)
        if func in _REPEATS:
            return _WholeGradient.apply(func(*args, **kwargs))  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            args = tuple(self._replica(value) for value in args)
            kwargs = {name: self._replica(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _replica(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._replica, value)) if type(value) in (list, tuple) else value
        if type(value) in (Tensor, torch.nn.Parameter) and value.requires_grad:
            return DTensor.from_local(value, self._tp, [Replicate()], run_check=False)
        return value


class _WholeGradient(torch.autograd.Function):
    """Nothing forward; the gradient of a replica is gathered before it is reshaped back."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        ctx.is_whole = isinstance(x.placements[0], Replicate)
        same: Any = x.view_as(x)
        return same  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return grad.redistribute(placements=[Replicate()]) if ctx.is_whole else grad


def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    try:
        y = func(*args, **kwargs)
    except RuntimeError:  # "unevenly sharded"; the gathered tensor raises again where the sizes are wrong
        y = func(x.redistribute(placements=[Replicate()]), *args[1:], **kwargs)
    # A merge of dims, one of which may be a repetition (``x[:, :, None].expand(…).reshape(…)``).
    is_merge = isinstance(y, DTensor) and y.ndim < x.ndim and isinstance(y.placements[0], Replicate)
    return _WholeGradient.apply(y) if is_merge and y.requires_grad else y  # type: ignore[no-untyped-call]


def _any_dtensor(values: Any) -> bool:
    return any(
        isinstance(value, DTensor) or (isinstance(value, (list, tuple)) and any(isinstance(v, DTensor) for v in value))
        for value in values
    )


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Tensor:
    groups = query.size(-3) // key.size(-3)
    if enable_gqa and groups > 1:
        # Repeated as torch does it; each rank then takes the heads that its queries need.
        key, value = (_WholeGradient.apply(x.repeat_interleave(groups, dim=-3)) for x in (key, value))  # type: ignore[no-untyped-call]
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
