"""How a parameter is stored over the ``tp`` axis, and the local tensor that a rank computes with.

[Note: stored whole, used in part]  Some parameters cannot be stored in the parts they are used in: a vocabulary or
a bias that does not divide, fewer key/value heads than ranks, the bias of a packed projection under FSDP. They are
stored replicated over ``tp`` (FSDP still shards them) and each rank takes its rows when it computes; their gradient
is then a partial sum over ``tp``. Every other parameter of the module is a ``Replicate`` DTensor too, so that
optimizers and clipping see one kind of tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_parallel._torch import StridedShard


@dataclass(frozen=True, slots=True)
class Rows:
    """The half-open ranges ``[start, stop)`` of one dim that this rank computes with, in order."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def take(self, tensor: Tensor) -> Tensor:
        """Those ranges of ``tensor``, concatenated."""
        pieces = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)


@dataclass(frozen=True, slots=True)
class Storage:
    """Placement over ``tp``, the rows each rank uses, and the dim FSDP may shard (``None``: the whole rule)."""

    placement: Placement
    rows: Rows | None = None

    def local(self, parameter: Tensor, *, partial: bool = False) -> Tensor:
        """The plain tensor to compute with, connected to ``parameter`` for autograd.

        Args:
            parameter: DTensor over ``tp``.
            partial: Each rank contributes a part of a replicated parameter's gradient, to be summed.
        """
        assert isinstance(parameter, DTensor)
        if not isinstance(self.placement, Replicate):
            return parameter.to_local()
        partial = partial or self.rows is not None
        whole = parameter.to_local(grad_placements=[Partial() if partial else Replicate()])
        return self.rows.take(whole) if self.rows else whole


def split_evenly(size: int, tp: int, rank: int) -> tuple[int, int]:
    """The rows of ``rank`` as DTensor's ``Shard`` cuts them: whole chunks of ``ceil(size / tp)``."""
    chunk = -(-size // tp)
    return min(rank * chunk, size), min((rank + 1) * chunk, size)


def plan_split(parameter: Tensor, dim: int, parts: tuple[int, ...], tp: DeviceMesh) -> Storage:
    """Storage of a parameter split along ``dim`` in each of its ``parts`` (a ratio; ``(1,)`` for a plain split).

    Raises:
        ValueError: A part of a packed dim does not divide by the ``tp`` size.
    """
    size, rank = tp.size(), tp.get_local_rank()
    length = parameter.size(dim)
    if parts == (1,):
        if length % size == 0:
            return Storage(Shard(dim))
        return Storage(Replicate(), Rows(dim, (split_evenly(length, size, rank),)))
    unit, rest = divmod(length, sum(parts))
    if rest or any(part * unit % size for part in parts):
        raise ValueError(f"parts {[part * unit for part in parts]} of {length} do not divide by tp={size}")
    if len(set(parts)) == 1 and parameter.ndim > 1:
        return Storage(StridedShard(dim, split_factor=len(parts)))
    ranges, start = [], 0
    for part in parts:
        share = part * unit // size
        ranges.append((start + rank * share, start + (rank + 1) * share))
        start += part * unit
    return Storage(Replicate(), Rows(dim, tuple(ranges)))


def plan_heads(parameter: Tensor, dim: int, heads: int, tp: DeviceMesh) -> Storage:
    """Storage of a projection to ``heads`` whole heads; with fewer heads than ranks, several ranks use one head.

    Raises:
        ValueError: Neither number divides the other.
    """
    size, rank = tp.size(), tp.get_local_rank()
    if heads % size == 0:
        return plan_split(parameter, dim, (1,), tp)
    if size % heads:
        raise ValueError(f"{heads} heads over tp={size}")
    width = parameter.size(dim) // heads
    head = rank * heads // size
    return Storage(Replicate(), Rows(dim, ((head * width, (head + 1) * width),)))


def store(parameter: nn.Parameter, storage: Storage, tp: DeviceMesh) -> nn.Parameter:
    """The parameter as a DTensor over ``tp``. Every rank holds the same full tensor, so nothing is sent."""
    size, rank = tp.size(), tp.get_local_rank()
    data, placement = parameter.detach(), storage.placement
    if isinstance(placement, StridedShard):
        dim, factor = placement.dim, placement.split_factor
        pieces = data.unflatten(dim, (factor, size, -1))
        data = pieces.select(dim + 1, rank).flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)
    elif isinstance(placement, Shard):
        # A clone: a view would keep the whole tensor's memory alive.
        data = data.chunk(size, placement.dim)[rank].clone(memory_format=torch.contiguous_format)
    stride = torch.empty(parameter.shape, device="meta").stride()
    distributed = DTensor.from_local(
        data.contiguous(), tp, [placement], run_check=False, shape=parameter.shape, stride=stride
    )
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)


def shard_dim_for_fsdp(parameter: Tensor, fsdp_size: int) -> int | None:
    """The dim on which ``fully_shard`` may cut a parameter that is already placed over ``tp``.

    Shards of both axes on one dim are right only where they divide evenly, and never on top of a packed dim
    (torch 2.13 reads such a tensor back in the wrong order). Then another dim is taken.

    Returns:
        The dim, or ``None`` when no dim fits.
    """
    if not isinstance(parameter, DTensor):
        return 0
    placement = parameter.placements[0]
    local = parameter.to_local()
    if isinstance(placement, Replicate):
        return 0
    taken = placement.dim  # type: ignore[attr-defined]
    if taken != 0:
        return 0
    if isinstance(placement, Shard) and local.size(0) % fsdp_size == 0:
        return 0
    return next((dim for dim in range(1, local.ndim) if local.size(dim) % fsdp_size == 0), None)
