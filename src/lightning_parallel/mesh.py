"""Sizes, ``"auto"``, and the named device mesh with the views that the rest asks for.

A mesh has axes, a tensor has dims. Axes, outermost first: ``pp`` (stages), ``ddp`` (replicas), ``fsdp`` (shards),
``cp`` (the sequence), ``tp``.
The *data rank* counts over ``ddp × fsdp``: ranks that share one see the same samples. Gradients are averaged over
``ddp × fsdp × cp``, and parameters are in shards over ``fsdp × cp``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_parallel._torch import flatten_mesh
from lightning_parallel.errors import ParallelConfigError

AXES = ("pp", "ddp", "fsdp", "cp", "tp")
Size = int | Literal["auto"]


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSizes:
    """How many devices each axis has; at most one of them ``"auto"``, the devices left over."""

    pp: Size = 1
    ddp: Size = 1
    fsdp: Size = 1
    cp: Size = 1
    tp: Size = 1

    def __post_init__(self) -> None:
        for axis, size in self.as_dict().items():
            if size != "auto" and (type(size) is not int or size < 1):  # a bool is no size
                raise ParallelConfigError(f'{axis}={size!r}: a size is a positive integer or "auto".')
        autos = [axis for axis, size in self.as_dict().items() if size == "auto"]
        if len(autos) > 1:
            shown = " and ".join(f'{axis}="auto"' for axis in autos)
            raise ParallelConfigError(
                f"{shown}: only one axis can take the devices left over. Give {' or '.join(autos)} a number."
            )

    def as_dict(self) -> dict[str, Size]:
        """Axis name to size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def resolve(self, world_size: int) -> ResolvedSizes:
        """Fill in ``"auto"``.

        Raises:
            ParallelConfigError: The sizes do not multiply to ``world_size``; the message names sizes that do.
        """
        sizes = self.as_dict()
        fixed = prod(size for size in sizes.values() if size != "auto")
        auto = next((axis for axis, size in sizes.items() if size == "auto"), None)
        shown = " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "1"
        if auto is not None and world_size % fixed == 0:
            sizes[auto] = world_size // fixed
        elif auto is not None or fixed != world_size:
            raise ParallelConfigError(
                f"{shown} does not fit {world_size} devices: "
                + (f"{world_size} is not a multiple of {fixed}. " if auto else f"the product is {fixed}. ")
                + self._remedy(world_size, fixed, has_auto=auto is not None)
            )
        return ResolvedSizes(**{axis: int(size) for axis, size in sizes.items()})

    def _remedy(self, world_size: int, fixed: int, *, has_auto: bool) -> str:
        """The sizes nearest to each given one that make the product right, and the devices that the given ones need."""
        choices = []
        for axis, size in self.as_dict().items():
            if size in (1, "auto") or world_size % (rest := fixed // int(size)):
                continue
            works = divisors(world_size // rest) if has_auto else [world_size // rest]
            below = [number for number in works if number < int(size)][-1:]
            above = [number for number in works if number > int(size)][:1]
            choices += [f"{axis}={number}" for number in below + above]
        devices = f"a multiple of {fixed} devices" if has_auto else f"{fixed} device{'s' if fixed > 1 else ''}"
        if choices:
            return f"Use {' or '.join(choices)}, or {devices}."
        return f"Use {devices}, or give one axis the size {world_size} and the others 1."


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedSizes:
    """Final sizes, one integer an axis."""

    pp: int = 1
    ddp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1

    def as_dict(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def data(self) -> int:
        """Number of data ranks: how many ways the samples are split."""
        return self.ddp * self.fsdp

    @property
    def world(self) -> int:
        """Number of devices."""
        return prod(self.as_dict().values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` lies on each axis (``tp`` innermost)."""
        where = {}
        for axis in reversed(AXES):
            rank, where[axis] = divmod(rank, getattr(self, axis))
        return {axis: where[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        """Position of ``rank`` among the data ranks."""
        return rank // (self.cp * self.tp) % self.data

    def __str__(self) -> str:
        return " × ".join(f"{axis}={size}" for axis, size in self.as_dict().items() if size > 1) or "one device"


class ParallelMesh:
    """The device mesh with every axis (size 1 included), and the views over it.

    Needs an initialised default process group whose world size is ``sizes.world``.
    """

    def __init__(self, device_type: str, sizes: ResolvedSizes) -> None:
        self.sizes = sizes
        self.device_mesh: DeviceMesh = init_device_mesh(
            device_type, tuple(sizes.as_dict().values()), mesh_dim_names=AXES
        )
        self._data = flatten_mesh(self.device_mesh["ddp", "fsdp"], "data")
        self._averaged = self._data
        if sizes.cp > 1:
            self._averaged = flatten_mesh(self.device_mesh["ddp", "fsdp", "cp"], "data_cp")
            self._sharded = flatten_mesh(self.device_mesh["fsdp", "cp"], "fsdp_cp")

    @property
    def pp(self) -> DeviceMesh:
        """The pipeline axis, one-dimensional."""
        return self.device_mesh["pp"]

    def pipeline_groups(self, parts: Iterable[frozenset[int]]) -> dict[frozenset[int], dist.ProcessGroup]:
        """For each set of positions on the ``pp`` axis, this rank's group of them; nothing where it is in none.

        A collective over the world: every rank gives the same sets, in any order.
        """
        groups: dict[frozenset[int], dist.ProcessGroup] = {}
        for part in sorted(set(parts), key=sorted):
            for column in self.device_mesh.mesh.flatten(1).t().tolist():
                ranks = [column[position] for position in sorted(part)]
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    groups[part] = group
        return groups

    @property
    def tp(self) -> DeviceMesh:
        """The tensor axis, one-dimensional."""
        return self.device_mesh["tp"]

    @property
    def cp(self) -> DeviceMesh:
        """The context axis, one-dimensional."""
        return self.device_mesh["cp"]

    @property
    def ddp(self) -> DeviceMesh:
        """The replica axis, one-dimensional."""
        return self.device_mesh["ddp"]

    @property
    def fully_shard(self) -> DeviceMesh:
        """What ``fully_shard`` takes: ``(fsdp,)``, or ``(ddp, fsdp)`` for hybrid sharding (HSDP); with ``cp`` in it."""
        if self.sizes.cp > 1:
            return self.device_mesh["ddp", "fsdp_cp"] if self.sizes.ddp > 1 else self._sharded
        return self.device_mesh["ddp", "fsdp"] if self.sizes.ddp > 1 else self.device_mesh["fsdp"]

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that hold different samples: what logged values and metrics are reduced over."""
        return self._data.get_group()

    @property
    def averaged_group(self) -> dist.ProcessGroup:
        """Ranks over which gradients are averaged: those of the data, and those of the sequence."""
        return self._averaged.get_group()

    @property
    def data_rank(self) -> int:
        """This rank's position among the data ranks."""
        return self._data.get_local_rank()
