"""The recipe: an ordinary module in, the same module out, on the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_parallel.errors import ParallelConfigError, PlanError
from lightning_parallel.materialize import Materializer, agree
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.plan import ParallelPlan, Role, repeated_blocks
from lightning_parallel.schemes.checkpointing.apply import Checkpointing
from lightning_parallel.schemes.context.apply import ContextSplit
from lightning_parallel.schemes.context.operations import HANDLERS
from lightning_parallel.schemes.context.rows import Context, Method
from lightning_parallel.schemes.data import (
    FullyShardedOptions,
    GradientReducer,
    cannot_be_sharded,
    set_prefetch,
    shard_unit,
)
from lightning_parallel.schemes.pipeline.ghost import is_ghost
from lightning_parallel.schemes.pipeline.schedules import ScheduleSpec
from lightning_parallel.schemes.pipeline.split import split_stages
from lightning_parallel.schemes.pipeline.stages import StagedModule
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
    pipeline: PipelineOptions | None = None
    context: ContextOptions | None = None
    checkpointing: Checkpointing | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextOptions:
    """How a sequence is split; the strategy's docstring explains each."""

    method: Method = "ring"
    balanced: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """How a pipeline runs; the strategy's docstring explains each."""

    spec: ScheduleSpec
    balance: Literal["even", "cost"] = "even"
    boundaries: Sequence[str] | None = None


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
        staged: This rank's pipeline stages of the module.
        context: The module's sequences over ``cp``.
        ties: Positions on the ``pp`` axis to the parameters that these ranks each have a copy of.
    """

    blocks: list[nn.Module]
    is_sharded: bool
    is_split: bool
    keeps_whole: bool
    unsharded: list[nn.Parameter]
    reducer: GradientReducer | None
    staged: StagedModule | None = None
    context: ContextSplit | None = None
    ties: dict[frozenset[int], list[nn.Parameter]] = field(default_factory=dict)


def parallelize(
    module: nn.Module, mesh: ParallelMesh, recipe: Recipe, *, device: torch.device, seed: int
) -> Parallelized:
    """Split into stages, materialise, split over ``tp`` and ``cp``, checkpoint, compile, and shard or replicate.

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
    staged = None
    if recipe.pipeline:
        staged = stage_module(module, roles, recipe.pipeline, mesh, device)
    here = [name for name in names if not any(map(is_ghost, module.get_submodule(name).parameters()))]
    blocks = _distinct([module.get_submodule(name) for name in here])
    is_sharded = mesh.sizes.fsdp > 1 or recipe.fully_sharded.cpu_offload
    split = None
    if mesh.sizes.tp > 1:
        if recipe.plan is None:
            raise PlanError(
                f"tp={mesh.sizes.tp} needs to know what the modules of {type(module).__name__} are. Pass plan= (glob "
                "of module name to role), define parallel_plan() on the LightningModule, or use a Hugging Face model "
                "that publishes one."
            )
        places = ("stem", "head")  # which stage a module is on says nothing of how it is split
        split = TensorSplit(
            module, {name: role for name, role in roles.items() if role.name not in places}, names, mesh.tp, device,
            sequence_parallel=recipe.sequence_parallel, source=recipe.plan.source,
        )  # fmt: skip
    materializer = Materializer(module, device, seed, agreed=staged is not None)
    options = recipe.fully_sharded
    if staged:  # gathered once a step, not once a microbatch
        options = replace(options, reshard_after_forward=False)
    shared = shared_parameters(module, blocks)
    apart = [block for block in blocks if not shared & {id(p) for p in block.parameters()}]
    for unit in [*blocks, module]:  # the root last: it takes what the blocks left
        materializer.bring(unit)
        if split:
            split.store_parameters(unit)
        if recipe.compile and unit is not module:  # after the split, before FSDP's hooks: as torchtitan does
            unit.compile(**(recipe.compile if isinstance(recipe.compile, dict) else {}))
        if is_sharded and (unit is module or unit in apart):
            shard_unit(unit, mesh.fully_shard, options, is_root=unit is module)
    if split:
        split.install()
    if recipe.checkpointing:  # outside of tp's forwards; torch.compile traces it at a block's first call
        recipe.checkpointing.install(module, names)
    context = None
    if mesh.sizes.cp > 1:
        options_of = recipe.context or ContextOptions()
        axis = Context(mesh.cp.get_group(), device, HANDLERS, options_of.method, options_of.balanced)
        context = ContextSplit(module, names, axis, is_split=split is not None)
        context.install()
    set_prefetch(blocks, recipe.fully_sharded.prefetch)
    reducer = None
    if (previous := module.__dict__.pop(_REDUCER, None)) is not None:  # of an earlier Trainer
        previous.remove()
    own = [p for p in module.parameters() if not is_ghost(p)]
    unsharded = [p for p in own if not is_sharded or cannot_be_sharded(p)]
    if mesh.sizes.data * mesh.sizes.cp > 1 and unsharded:
        reducer = GradientReducer(unsharded, mesh.averaged_group, find_unused_parameters=recipe.find_unused_parameters)
        module.__dict__[_REDUCER] = reducer
    keeps_whole = recipe.fully_sharded.optimizer_state_only
    ties = {}
    if staged and recipe.pipeline:
        staged.install()
        ties = staged.ties(recipe.pipeline.spec.rank_of)
    return Parallelized(blocks, is_sharded, split is not None, keeps_whole, unsharded, reducer, staged, context, ties)


def stage_module(
    module: nn.Module, roles: Mapping[str, Role], options: PipelineOptions, mesh: ParallelMesh, device: torch.device
) -> StagedModule:
    """Turn what other stages hold into ghosts.

    Raises:
        PlanError: There is no trunk of blocks to cut, or a boundary is none of them.
        ParallelConfigError: Fewer blocks than stages.
    """
    spec = options.spec
    split = split_stages(
        module, spec.num_stages, roles=roles, boundaries=options.boundaries, balance=options.balance
    )  # fmt: skip
    agree(module, device)
    return StagedModule(module, split, spec.stages_of[mesh.pp.get_local_rank()], device)


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
