"""Runs one stage of an unchanged module: its own blocks for real, what comes before as ghosts, nothing after.

[Note: one stage of a step]  Every stage runs the user's whole step. Blocks of earlier stages return ghosts of the right
shapes without computing. At the stage's first own block the call's arguments are complete but for the values that
are ghosts: these are the *slots*, and the earlier stage sends them. The first block of the next stage ends the run: at
that moment its arguments are what has to be sent. Only the last stage runs to the end of the step. So whatever the
code does around and between the blocks, it runs where it belongs, and what crosses a boundary is found, not declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.errors import PlanError
from lightning_parallel.schemes.pipeline.arguments import Path, replace, shown, walk
from lightning_parallel.schemes.pipeline.buffers import SharedBuffers
from lightning_parallel.schemes.pipeline.foreign import ForeignBlocks
from lightning_parallel.schemes.pipeline.ghost import Ghost, ghost_like, ghosts_in_step, is_ghost
from lightning_parallel.schemes.pipeline.split import Site, StageSplit

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Slot:
    """One value that crosses a boundary: where it stands among the arguments of the next block, and what it is."""

    path: Path
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class _Boundary(BaseException):
    """The first block of the next stage was called. No ``Exception``: a user's handler must not take it."""

    def __init__(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.arguments = arguments


class _Found(BaseException):
    """The first own block was called while slots were looked for."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots


@dataclass(slots=True)
class _Run:
    """One microbatch on one stage."""

    stage: int
    signature: Any
    received: Mapping[Path, Tensor] | None  # None: find the slots
    on_enter: Callable[[], None]
    position: int = 0
    entered: bool = False


class StagedModule:
    """A module of which this rank holds some stages.

    The constructor turns what other stages hold into ghosts, so that it is never materialised. ``install`` comes last,
    after the blocks were compiled and sharded.

    Args:
        module: The LightningModule.
        split: What belongs to which stage.
        stages: Those of this rank.
        device: Of this rank.
    """

    def __init__(self, module: nn.Module, split: StageSplit, stages: Sequence[int], device: torch.device) -> None:
        self.module, self.split, self.stages = module, split, sorted(stages)
        self._run: _Run | None = None
        self._backward_of: int | None = None
        self.call_outside: Callable[[Callable[..., Any], Any, Any], Any] | None = None  # of the model, not in a step
        self.buffers = SharedBuffers(module, split)
        self._foreign = ForeignBlocks(device)
        self._results: dict[Any, Tensor] = {}
        self._modules = dict(module.named_modules(remove_duplicate=False))
        names = [name for stage in split.blocks for name in stage]
        self._stage_of = [number for number, stage in enumerate(split.blocks) for _ in stage]
        self._blocks = [self._modules[name] for name in names]
        self._names = {id(block): name for block, name in zip(reversed(self._blocks), reversed(names), strict=True)}
        self._ghosts: dict[int, Ghost] = {}
        self._own: dict[int, list[tuple[nn.Module, str]]] = {stage: [] for stage in self.stages}
        self._shared: dict[Site, frozenset[int]] = {}
        self._kept: list[Tensor] = []  # ids are looked up while tensors are replaced
        holders = split.holders(module)
        self._all_shared = {stages for stages in holders.values() if len(stages) > 1}
        # What is here for one stage, or is tied to what is, is hidden while a stage runs that does not hold it.
        self._switched: list[tuple[frozenset[int], dict[str, Any], str, Any]] = []
        for site, held in split.sites.items():
            store = self._store(site)
            tensor = store[site.name]
            if tensor is None:
                continue
            self._kept.append(tensor)
            if not holders[id(tensor)] & set(self.stages):
                store[site.name] = self._ghost(tensor, site, device)
                continue
            if not site.is_buffer:
                for stage in held & set(self.stages):
                    self._own[stage].append((self._modules[site.module], site.name))
                if len(holders[id(tensor)]) > 1:
                    self._shared[site] = holders[id(tensor)]
        self._prepare_switches(device)

    def _prepare_switches(self, device: torch.device) -> None:
        """Before the module is changed: ghosts of what this rank holds, and the forwards that go with them."""
        owners: dict[str, frozenset[int]] = {}
        for site, held in self.split.sites.items():
            store = self._store(site)
            is_here = store[site.name] is not None and not is_ghost(store[site.name])
            if is_here and not set(self.stages) <= held and self._block_of(site) is None:
                origin = f"{site.module}.{site.name}".lstrip(".")
                ghost = ghost_like(store[site.name], origin, is_parameter=not site.is_buffer, device=device)
                self._switched.append((held, store, site.name, ghost))
                owners[site.module] = owners.get(site.module, frozenset()) | held
        for name, held in owners.items():
            values = self._modules[name].__dict__
            self._switched.append((held, values, "forward", values.get("forward", _ABSENT)))
        for position, block in enumerate(self._blocks if len(self.stages) > 1 else []):
            if self._stage_of[position] in self.stages:
                self._foreign.shadow(block, self._names[id(block)])

    def _store(self, site: Site) -> dict[str, Any]:
        owner = self._modules[site.module]
        store: dict[str, Any] = owner._buffers if site.is_buffer else owner._parameters
        return store

    def _ghost(self, tensor: Tensor, site: Site, device: torch.device) -> Ghost:
        """One ghost a tensor: ties stay ties."""
        if id(tensor) not in self._ghosts:
            origin = f"{site.module}.{site.name}".lstrip(".")
            self._ghosts[id(tensor)] = ghost_like(tensor, origin, is_parameter=not site.is_buffer, device=device)
        return self._ghosts[id(tensor)]

    def install(self) -> None:
        """Take over the calls of the blocks."""
        self._kept.clear()
        self._ghosts.clear()
        for block in {id(block): block for block in self._blocks}.values():
            inner = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = partial(self._call, block, inner)
        trunk = self.split.blocks[0][0].split(".")[:-1]
        for name in (".".join(trunk[:depth]) for depth in range(len(trunk) + 1)):
            container = self._modules[name]
            container._compiled_call_impl = partial(self._call_around, container._call_impl)

    def _call_around(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._run is None and self.call_outside is not None:
            return self.call_outside(inner, args, kwargs)
        return inner(*args, **kwargs)

    def _block_of(self, site: Site) -> str | None:
        return next((n for n in self._names.values() if site.module == n or site.module.startswith(f"{n}.")), None)

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """What ``stage`` computes with, as it lies in the modules now (gathered or in shards), each once."""
        found = (owner._parameters[name] for owner, name in self._own[stage])
        return list({id(p): p for p in found if p is not None}.values())

    def ties(self, rank_of: Mapping[int, int]) -> dict[frozenset[int], list[nn.Parameter]]:
        """Ranks of the pipeline to the parameters of which they each hold a copy; those with this rank in it."""
        found: dict[frozenset[int], dict[int, nn.Parameter]] = {}
        for site, stages in self._shared.items():
            ranks = frozenset(rank_of[stage] for stage in stages)
            parameter = self._store(site)[site.name]
            if len(ranks) > 1 and not is_ghost(parameter):
                found.setdefault(ranks, {})[id(parameter)] = parameter
        return {ranks: list(same.values()) for ranks, same in found.items()}

    def tied_ranks(self, rank_of: Mapping[int, int]) -> set[frozenset[int]]:
        """All sets of ranks that share a parameter, whether this rank is in them or not."""
        return {ranks for stages in self._all_shared if len(ranks := frozenset(rank_of[s] for s in stages)) > 1}

    def counted_elsewhere(self, rank_of: Mapping[int, int]) -> frozenset[int]:
        """Ids of the parameters of which an earlier rank of the pipeline has a copy."""
        mine = rank_of[self.stages[0]]
        return frozenset(
            id(parameter)
            for ranks, parameters in self.ties(rank_of).items()
            if min(ranks) < mine
            for parameter in parameters
        )

    # --- running ------------------------------------------------------------------------------------------------

    def find_slots(self, stage: int, call: Callable[[], Any], signature: Any) -> list[Slot]:
        """What ``stage`` must receive before its first block. Nothing is computed.

        Raises:
            PlanError: The step never calls the blocks, or needs a value of another stage before them.
        """
        with self._running(_Run(stage, signature, None, lambda: None)), self.buffers.unchanged():
            try:
                call()
            except _Found as found:
                return found.slots
            except _Boundary:
                pass
        raise self._never_called(stage)

    def run(
        self,
        stage: int,
        call: Callable[[], Any],
        signature: Any,
        *,
        received: Mapping[Path, Tensor],
        sends: Sequence[Slot] | None,
        on_enter: Callable[[], None],
    ) -> Any:
        """Run one microbatch.

        Args:
            stage: Which of this rank's stages.
            call: The user's step.
            signature: Equal for calls whose ghosts have the same shapes.
            received: Values of the slots.
            sends: What the next stage must receive; ``None`` on the last stage.
            on_enter: Called before the first own block.

        Returns:
            The tensors to send, in the order of ``sends``; on the last stage what ``call`` returned.
        """
        run = _Run(stage, signature, received, on_enter)
        with self._running(run):
            try:
                output = call()
            except _Boundary as boundary:
                if sends is None:
                    raise AssertionError("the last stage has no boundary") from None
                return [self._sent(slot, boundary.arguments, stage) for slot in sends]
        if sends is not None or not run.entered:
            raise self._never_called(stage)
        return output

    def _never_called(self, stage: int) -> PlanError:
        first, last = self.split.blocks[stage][0], self.split.blocks[-1][-1]
        return PlanError(
            f"The step ended without a call of the pipelined blocks ({self.split.blocks[0][0]} … {last}): stage "
            f"{stage} waits for a call of {first}. A pipelined step calls its model exactly once. Give the blocks that "
            "the step does call the role block, or do not pipeline this module."
        )

    @contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        saved = []
        for held, store, name, value in self._switched:
            if run.stage not in held:
                saved.append((store, name, store.get(name, _ABSENT)))
                _set(store, name, value)
        self._run = run
        try:
            with ghosts_in_step(self._results, self._is_kept):
                yield
        finally:
            self._run = None
            for store, name, value in saved:
                _set(store, name, value)

    @contextmanager
    def running_backward(self, stage: int) -> Iterator[None]:
        """Blocks of ``stage`` may run again: activation checkpointing."""
        self._backward_of = stage
        try:
            with ghosts_in_step(self._results):
                yield
        finally:
            self._backward_of = None

    def _is_kept(self, tensor: Tensor) -> bool:
        return any(own is tensor for own in (*self.module.parameters(), *self.module.buffers()))

    def _call(self, block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None and self._backward_of is not None:
            return self._call_again(block, inner, args, kwargs)
        if run is None:
            raise PlanError(
                f"{self._names[id(block)]} was called outside of its model. The model is split into pipeline stages: "
                "outside of the steps call the whole of it, on every rank."
            )
        position = next((p for p in range(run.position, len(self._blocks)) if self._blocks[p] is block), None)
        if position is None:
            raise PlanError(
                f"{self._names[id(block)]} was called a second time in one step. A pipelined step calls its model "
                "exactly once: join the inputs into one batch, or do not pipeline this module."
            )
        run.position = position + 1
        stage = self._stage_of[position]
        if stage > run.stage:
            raise _Boundary((args, kwargs))
        if stage < run.stage:
            return self._pass_by(run, block, position, args, kwargs)
        if not run.entered:
            run.entered = True
            if run.stage > 0:
                args, kwargs = self._enter(run, args, kwargs)
                run.on_enter()
            return inner(*args, **kwargs)
        args, kwargs = replace((args, kwargs), _received)  # autograd functions, FSDP's too, look past a ghost's class
        return inner(*args, **kwargs)

    def _call_again(self, block: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._names[id(block)] not in self.split.blocks[self._backward_of or 0]:
            raise PlanError(
                f"{self._names[id(block)]} ran again in the backward of another stage: activation checkpointing spans "
                "blocks of two stages. Checkpoint each block, or let boundaries= be where checkpointed parts begin."
            )
        args, kwargs = replace((args, kwargs), _received)
        return inner(*args, **kwargs)

    def _enter(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lacking = {path: value for path, value in walk((args, kwargs)) if is_ghost(value)}
        first: dict[int, Path] = {}
        for path, ghost in lacking.items():
            first.setdefault(id(ghost), path)
        if run.received is None:
            raise _Found([
                Slot(path, value.shape, value.dtype, value.requires_grad)
                for path, value in lacking.items()
                if first[id(value)] == path
            ])  # fmt: skip
        for path, ghost in lacking.items():
            if first[id(ghost)] == path:
                if path not in run.received:
                    raise PlanError(
                        f"{self.split.blocks[run.stage][0]} is called with other arguments than when its shapes were "
                        f"looked at: {shown(path)} was not a value of an earlier stage then. Batches of one shape must "
                        "take one way through the model."
                    )
                ghost.become(run.received[path])
        return replace((args, kwargs), _received)

    def _sent(self, slot: Slot, arguments: Any, stage: int) -> Tensor:
        value = dict(walk(arguments)).get(slot.path)
        if isinstance(value, Ghost):
            origin, value = value.origin, value.received
            if value is None:
                raise PlanError(
                    f"Stage {stage + 1} needs {shown(slot.path)} of its first block "
                    f"({self.split.blocks[stage + 1][0]}), which stage {stage} neither computes nor receives: it "
                    f"comes from {origin}. Values that skip a stage are not sent: use fewer stages, boundaries= that "
                    "keep both ends on neighbouring stages, or roles (stem, head) for what is on a wrong one."
                )
        if isinstance(value, Tensor) and value.is_nested:
            raise PlanError(
                f"{shown(slot.path)} of {self.split.blocks[stage + 1][0]} is a nested tensor, which cannot be sent "
                "to the next stage. Build nn.TransformerEncoder with enable_nested_tensor=False."
            )
        if not isinstance(value, Tensor) or value.shape != slot.shape or value.dtype != slot.dtype:
            found = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise PlanError(
                f"{shown(slot.path)} of {self.split.blocks[stage + 1][0]} is {found} on stage {stage}, where stage "
                f"{stage + 1} expects {tuple(slot.shape)} {slot.dtype}. The shape must follow from the batch's shapes."
            )
        if value.requires_grad and not slot.requires_grad:
            raise PlanError(
                f"{shown(slot.path)} of {self.split.blocks[stage + 1][0]} needs a gradient on stage {stage}, and stage "
                f"{stage + 1} would send none back: it calls the block where gradients are disabled, as "
                "torch.utils.checkpoint does with use_reentrant=True. Use use_reentrant=False."
            )
        return value

    def _pass_by(self, run: _Run, block: nn.Module, position: int, args: Any, kwargs: Any) -> Any:
        """What a block of an earlier stage returns, in ghosts. Blocks inside it are its own business."""
        self._run = None
        try:
            key = (run.stage, position, run.signature)
            return self._foreign.call(block, self._names[id(block)], key, args, kwargs)
        finally:
            self._run = run


def _received(value: Any) -> Any:
    return value.received if isinstance(value, Ghost) and value.received is not None else value


def _set(store: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        store.pop(name, None)
    else:
        store[name] = value
