"""The recipe: an ordinary module in, the same module out, on the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_parallel.errors import ParallelConfigError, PlanError
from lightning_parallel.materialize import Materializer
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.plan import ParallelPlan, repeated_blocks
from lightning_parallel.schemes.data import (
    FullyShardedOptions,
    GradientReducer,
    cannot_be_sharded,
    set_prefetch,
    shard_unit,
)
from lightning_parallel.schemes.tensor import TensorSplit

_REDUCER = "_lightning_parallel_reducer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What to do to a module, apart from the mesh."""

    plan: ParallelPlan | None = None
    fully_sharded: FullyShardedOptions = field(default_factory=FullyShardedOptions)
    sequence_parallel: bool = True
    find_unused_parameters: bool = False
    compile: bool | dict[str, Any] = False


@dataclass(slots=True)
class Parallelized:
    """What the step needs to know about a module that went through ``parallelize``.

    Attributes:
        blocks: The repeated layers.
        is_sharded: Parameters are in FSDP shards.
        is_split: Parameters are split over ``tp``.
        keeps_whole: Gathered parameters stay so through an accumulation window.
        unsharded: The parameters that FSDP does not hold.
        reducer: Averages their gradients over the data ranks.
    """

    blocks: list[nn.Module]
    is_sharded: bool
    is_split: bool
    keeps_whole: bool
    unsharded: list[nn.Parameter]
    reducer: GradientReducer | None


def parallelize(
    module: nn.Module, mesh: ParallelMesh, recipe: Recipe, *, device: torch.device, seed: int
) -> Parallelized:
    """Materialise, split over ``tp``, compile, and shard or replicate ``module``, in place.

    Args:
        module: The LightningModule; whole, on the host or on the meta device.
        mesh: Where.
        recipe: How.
        device: Of this rank.
        seed: The same on every rank; meta-device parameters are drawn from it.

    Raises:
        PlanError: The plan does not fit the module.
        ParallelConfigError: The module was wrapped or sharded before, or ``tp`` has no plan.
    """
    check_untouched(module)
    roles = recipe.plan.resolve(module) if recipe.plan else {}
    names = repeated_blocks(module, roles)
    blocks = _distinct([module.get_submodule(name) for name in names])
    is_sharded = mesh.sizes.fsdp > 1 or recipe.fully_sharded.cpu_offload
    split = None
    if mesh.sizes.tp > 1:
        if recipe.plan is None:
            raise PlanError(
                f"tp={mesh.sizes.tp} needs to know what the modules of {type(module).__name__} are. Pass plan= (glob "
                "of module name to role), define parallel_plan() on the LightningModule, or use a Hugging Face model "
                "that publishes one."
            )
        split = TensorSplit(
            module, roles, names, mesh.tp, device,
            sequence_parallel=recipe.sequence_parallel, source=recipe.plan.source,
        )  # fmt: skip
    materializer = Materializer(module, device, seed)
    shared = shared_parameters(module, blocks)
    apart = [block for block in blocks if not shared & {id(p) for p in block.parameters()}]
    for unit in [*blocks, module]:  # the root last: it takes what the blocks left
        materializer.bring(unit)
        if split:
            split.store_parameters(unit)
        if recipe.compile and unit is not module:  # after the split, before FSDP's hooks: as torchtitan does
            unit.compile(**(recipe.compile if isinstance(recipe.compile, dict) else {}))
        if is_sharded and (unit is module or unit in apart):
            shard_unit(unit, mesh.fully_shard, recipe.fully_sharded, is_root=unit is module)
    if split:
        split.install()
    set_prefetch(blocks, recipe.fully_sharded.prefetch)
    reducer = None
    if (previous := module.__dict__.pop(_REDUCER, None)) is not None:  # of an earlier Trainer
        previous.remove()
    unsharded = [p for p in module.parameters() if not is_sharded or cannot_be_sharded(p)]
    if mesh.sizes.data > 1 and unsharded:
        reducer = GradientReducer(unsharded, mesh.data_group, find_unused_parameters=recipe.find_unused_parameters)
        module.__dict__[_REDUCER] = reducer
    keeps_whole = recipe.fully_sharded.optimizer_state_only
    return Parallelized(blocks, is_sharded, split is not None, keeps_whole, unsharded, reducer)


def check_untouched(module: nn.Module) -> None:
    """Refuse a module that something else has wrapped, sharded or split.

    Raises:
        ParallelConfigError: Names what was found.
    """
    for name, child in module.named_modules():
        kind = type(child).__name__
        wrapped = isinstance(child, FSDPModule) or kind in ("DistributedDataParallel", "FullyShardedDataParallel")
        if wrapped or any(isinstance(p, DTensor) for p in child._parameters.values()):
            raise ParallelConfigError(
                f"{name or 'The LightningModule'} ({kind}) is already wrapped or sharded. The strategy takes the "
                "plain module: remove fully_shard, parallelize_module or the wrapper from configure_model, or build a "
                "new one."
            )


def shared_parameters(module: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """Ids of parameters that a block shares with another block or with the rest: they belong to the root's unit."""
    owner_of: dict[int, int] = {}
    shared: set[int] = set()
    inside: set[int] = set()
    for index, block in enumerate(blocks):
        inside.update(id(child) for child in block.modules())
        for parameter in block.parameters():
            if owner_of.setdefault(id(parameter), index) != index:
                shared.add(id(parameter))
    for child in module.modules():
        if id(child) not in inside:
            shared.update(id(p) for p in child._parameters.values() if p is not None and id(p) in owner_of)
    return shared


def _distinct(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Each module once: a list may repeat one block (shared layers)."""
    return list({id(module): module for module in modules}.values())
