"""Tensors split over ``tp`` beside the whole ones that they stand for, and the comparison of what is done to both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel.schemes.tensor.lazy import LazyShard
from lightning_parallel.schemes.tensor.loss import LOGITS_HANDLERS


def tp_mesh() -> DeviceMesh:
    """All ranks on one axis; starts torch.distributed."""
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def share(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's columns, perhaps none."""
    chunk = -(-whole.size(-1) // mesh.size())
    start = mesh.get_local_rank() * chunk
    return whole[..., start : start + chunk]


def split_columns(whole: Tensor, mesh: DeviceMesh) -> tuple[LazyShard, Tensor]:
    """The stand-in for ``whole``, and this rank's leaf behind it."""
    local = share(whole, mesh).detach().clone().requires_grad_()
    sharded = DTensor.from_local(
        local, mesh, [Shard(whole.ndim - 1)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return LazyShard(sharded, LOGITS_HANDLERS), local


def difference(
    fn: Callable[[Any], Any],
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    tol: float = 1e-6,
) -> str | None:
    """How ``fn`` of split logits, or its gradient, differs from ``fn`` of whole ones; ``None`` if it does not."""
    torch.manual_seed(0)
    whole = torch.randn(shape, dtype=dtype)
    reference = whole.clone().requires_grad_()
    lazy, local = split_columns(whole, mesh)
    expected, seen = _outcome(fn, reference), _outcome(fn, lazy)
    if isinstance(expected, Exception) or isinstance(seen, Exception):
        return None if type(expected) is type(seen) else f"{seen!r} instead of {expected!r}"
    seen = seen.full() if isinstance(seen, LazyShard) else seen
    if isinstance(seen, DTensor):
        return "a DTensor came out"
    if not isinstance(expected, Tensor):
        return None if expected == seen else f"{seen} instead of {expected}"
    if (seen.shape, seen.dtype, seen.requires_grad) != (expected.shape, expected.dtype, expected.requires_grad):
        return f"{seen.shape} {seen.dtype} instead of {expected.shape} {expected.dtype}, or without gradient"
    if not torch.allclose(seen.double(), expected.double(), rtol=tol, atol=tol, equal_nan=True):
        return f"{seen} instead of {expected}"
    if not expected.requires_grad:
        return None
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (seen * weights).sum().backward()
    assert reference.grad is not None
    assert local.grad is not None
    wrong = (share(reference.grad, mesh).double() - local.grad.double()).abs()
    return None if wrong.numel() == 0 or wrong.max() <= tol else f"gradient off by {wrong.max():.3g}"


def _outcome(fn: Callable[[Any], Any], value: Any) -> Any:
    try:
        return fn(value)
    except Exception as error:
        return error
