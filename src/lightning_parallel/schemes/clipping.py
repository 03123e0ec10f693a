"""One gradient norm over parameters on different meshes, and clipping by it or by value.

``torch.nn.utils.clip_grad_norm_`` needs all parameters to be plain tensors, or all to be DTensors of one mesh. On a
mesh of several axes they are a mixture: matrices sharded over ``fsdp`` and ``tp``, norm layers over ``fsdp`` alone,
plain leftovers. So everything here works on local shards, and says itself what is reduced over which ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.pipeline.ghost import is_ghost


@dataclass(frozen=True, slots=True)
class Stages:
    """A pipeline, to a norm: every stage has parameters of its own.

    Attributes:
        group: The ranks of one pipeline.
        counted_elsewhere: Ids of the parameters of which an earlier stage has a copy too.
    """

    group: dist.ProcessGroup
    counted_elsewhere: frozenset[int] = frozenset()


def total_norm(
    parameters: Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    stages: Stages | None = None,
) -> Tensor:
    """The norm of all gradients together, as if they lay side by side on one device.

    Every rank of the meshes must call it with the same parameters; every rank gets the same value.

    Args:
        parameters: Plain tensors (the same on every rank) and DTensors on any meshes. A parameter without a
            gradient counts as zero.
        norm_type: The order p > 0, or ``math.inf``.
        error_if_nonfinite: Raise instead of returning ``nan`` or ``inf``, on every rank of the default group.
        stages: The norm is over the parameters of all pipeline stages.

    Returns:
        Plain, zero-dimensional, float32 (float64 where every gradient is), on the device of the meshes.

    Raises:
        ParallelConfigError: The order is not positive, or a gradient is a partial sum.
        RuntimeError: The norm is not finite on some rank and ``error_if_nonfinite``.
    """
    order = float(norm_type)
    if not order > 0:
        raise ParallelConfigError(f"norm_type={norm_type!r}: the order of a norm is positive. Use 2.0, or math.inf.")
    with torch.no_grad():
        norm = _total_norm([p for p in parameters if not is_ghost(p)], order, stages)
        if error_if_nonfinite:
            _raise_if_nonfinite(norm)
    return norm


def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    stages: Stages | None = None,
) -> Tensor:
    """Scale all gradients, in place, so that their norm is at most ``max_norm``.

    Arguments, result and errors are those of `total_norm`; the result is the norm before clipping. Where it raises,
    no gradient has changed.
    """
    parameters = list(parameters)
    norm = total_norm(parameters, norm_type, error_if_nonfinite=error_if_nonfinite, stages=stages)
    with torch.no_grad():
        # As torch: clamping instead of asking for the norm keeps the host from waiting for the device.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grads in _by_device_and_dtype(_local_grads(parameters)):
            torch._foreach_mul_(grads, factor.to(grads[0].device))
    return norm


def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every element of every gradient, in place, to ``[-clip_value, clip_value]``.

    Args:
        parameters: As for `total_norm`.
        clip_value: The largest magnitude left.

    Raises:
        ParallelConfigError: A gradient is a partial sum.
    """
    with torch.no_grad():
        for grads in _by_device_and_dtype(_local_grads(parameters)):
            torch._foreach_clamp_min_(grads, -float(clip_value))
            torch._foreach_clamp_max_(grads, float(clip_value))


# [Note: what is reduced over which ranks]
# A gradient's local part contributes to the norm once for every shard, so its sum of |x|^p is reduced over the mesh
# dims that shard it, and over no dim that replicates it: neither replicas of HSDP nor the copies of a norm layer on
# the tp axis are counted twice. Sums are kept apart by the set of process groups that still have to reduce them.
# Each group then reduces all sums that ask for it at once, so there are as many collectives as groups, however many
# parameters, placements and meshes there are. Groups are taken in the order in which the parameters bring them up,
# which is the same on all ranks; that is why parameters without a gradient take part in it.


def _total_norm(parameters: list[Tensor], order: float, stages: Stages | None) -> Tensor:
    groups: dict[str, dist.ProcessGroup] = {}
    shards: dict[frozenset[str], list[Tensor]] = {frozenset(): []}
    device = parameters[0].device if parameters else torch.get_default_device()
    for parameter in parameters:
        grad = parameter if parameter.grad is None else parameter.grad
        own_groups = {}
        if isinstance(grad, DTensor):
            own_groups = _sharding_groups(grad)
            # Offloaded gradients lie elsewhere, but collectives run where the mesh does.
            device = torch.device(grad.device_mesh.device_type)
        groups.update(own_groups)
        local = shards.setdefault(frozenset(own_groups), [])
        if parameter.grad is not None and not (stages and id(parameter) in stages.counted_elsewhere):
            local.append(_local(parameter.grad))

    sums = {names: _power_sum(grads, order).to(device) for names, grads in shards.items()}
    for name, group in groups.items():
        waiting = [names for names in sums if name in names]
        reduced = _reduce(torch.stack([sums.pop(names) for names in waiting]), order, group)
        for names, value in zip(waiting, reduced.unbind(), strict=True):
            rest = names - {name}
            sums[rest] = _add(sums[rest], value, order) if rest in sums else value

    (total,) = sums.values()
    if stages:
        (total,) = _reduce(total.unsqueeze(0), order, stages.group)
    norm = total if math.isinf(order) else total ** (1.0 / order)
    grads = [grad for local in shards.values() for grad in local]
    is_double = bool(grads) and all(grad.dtype == torch.float64 for grad in grads)
    return norm if is_double else norm.float()


def _power_sum(grads: list[Tensor], order: float) -> Tensor:
    """The sum of |x|^p over all elements, in float64, or their maximum where p is infinite."""
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    # The last ranks of an uneven dim hold nothing, and nothing has no maximum.
    for same in _by_device_and_dtype(grad for grad in grads if grad.numel() > 0):
        # bf16 squares summed in bf16 keep three digits.
        dtype = torch.float64 if same[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(same, order, dtype=dtype)).double()
        value = norms.max() if math.isinf(order) else (norms**order).sum()
        total = _add(total, value.to(total.device), order)
    return total


def _add(left: Tensor, right: Tensor, order: float) -> Tensor:
    return torch.maximum(left, right) if math.isinf(order) else left + right


def _reduce(sums: Tensor, order: float, group: dist.ProcessGroup) -> Tensor:
    if not math.isinf(order):
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        return sums
    # A maximum over ranks may lose a nan, depending on the backend and the order, so it is told apart.
    is_nan = sums.isnan()
    told = torch.cat([sums.nan_to_num(nan=0.0, posinf=math.inf), is_nan.double()])
    dist.all_reduce(told, dist.ReduceOp.MAX, group)
    values, is_nan_anywhere = told.chunk(2)
    return torch.where(is_nan_anywhere > 0, math.nan, values)


def _sharding_groups(grad: DTensor) -> dict[str, dist.ProcessGroup]:
    mesh = grad.device_mesh
    groups: dict[str, dist.ProcessGroup] = {}
    for dim, placement in enumerate(grad.placements):
        if placement.is_partial():
            axis = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else dim
            raise ParallelConfigError(
                f"A gradient of shape {tuple(grad.shape)} is {placement} on the mesh axis {axis!r}: a norm needs whole "
                "values. Reduce it first, for instance grad.redistribute(placements=[Replicate()])."
            )
        if not placement.is_replicate() and mesh.size(dim) > 1:
            group = mesh.get_group(dim)
            groups[group.group_name] = group
    return groups


def _local_grads(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if isinstance(parameter.grad, DTensor):
            _sharding_groups(parameter.grad)  # refuses partial sums
        yield _local(parameter.grad)


def _local(grad: Tensor) -> Tensor:
    """This rank's part, sharing memory with ``grad``."""
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists on which torch's foreach functions take their fast path."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())


def _raise_if_nonfinite(norm: Tensor) -> None:
    is_bad = (~norm.isfinite()).to(norm.dtype)
    # Plain gradients are this rank's own: one that differs must not make one rank raise and the others go on.
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
    if is_bad.item():
        raise RuntimeError(
            f"The gradient norm is not finite (here {norm.item()}), so gradients cannot be clipped to it. Look for the "
            "cause (a loss of inf or nan, a learning rate too high), or pass error_if_nonfinite=False to go on."
        )
