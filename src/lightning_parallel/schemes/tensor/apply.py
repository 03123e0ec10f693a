"""Reads a plan for one module, checks it, and applies it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel._torch import install_rng_tracker
from lightning_parallel.errors import PlanError
from lightning_parallel.huggingface import share_heads
from lightning_parallel.mesh import divisors
from lightning_parallel.plan import Role, iter_parameters
from lightning_parallel.schemes.pipeline.ghost import is_ghost
from lightning_parallel.schemes.tensor import modules as forwards
from lightning_parallel.schemes.tensor.modules import Context, ModuleState, Place
from lightning_parallel.schemes.tensor.ops import register_attention
from lightning_parallel.schemes.tensor.random import SplitStreams
from lightning_parallel.schemes.tensor.storage import Storage, plan_heads, plan_split, store

SPLIT_ROLES = frozenset({"colwise", "rowwise", "fused", "vocab_in", "vocab_out"})
LARGE = 0.05  # a share of all parameters that must not be left to chance


class TensorSplit:
    """One module's parameters over ``tp``.

    The constructor checks everything and changes nothing; ``store_parameters`` may then be called part by part (each
    part just after it was materialised), and ``install`` last.

    Args:
        module: The LightningModule.
        roles: Module name to role.
        blocks: Names of the repeated blocks.
        tp: The one-dimensional mesh.
        device: The device that modules draw random numbers on.
        sequence_parallel: Shard the residual stream inside the blocks along the sequence.
        source: Where the plan came from, for messages.

    Raises:
        PlanError: A role on a module of the wrong kind, sizes that do not divide, a large parameter without a role,
            tied parameters with different roles.
    """

    def __init__(
        self,
        module: nn.Module,
        roles: Mapping[str, Role],
        blocks: Sequence[str],
        tp: DeviceMesh,
        device: torch.device,
        *,
        sequence_parallel: bool,
        source: str,
    ) -> None:
        self.module, self.blocks, self.tp, self.source = module, list(blocks), tp, source
        names = {name for name, _ in module.named_modules(remove_duplicate=False)}
        self.roles = {name: role for name, role in roles.items() if name in names}
        self._whole = set(roles) - names  # single parameters
        self.device = device
        self.context = Context(tp, SplitStreams(device, tp.get_local_rank()), sequence_parallel)
        self._names = {id(child): name for name, child in module.named_modules()}
        self._check_roles()
        self._check_heads()
        self._check_large()
        self._storages = self._plan_storages()
        self._stored: dict[int, nn.Parameter] = {}
        self._replaced: list[nn.Parameter] = []

    def store_parameters(self, part: nn.Module) -> None:
        """Replace the parameters below ``part`` by DTensors over ``tp``; tied ones stay one parameter."""
        for _, owner, attribute, parameter in iter_parameters(part):
            if isinstance(parameter, DTensor) or is_ghost(parameter):
                continue
            if id(parameter) not in self._stored:
                stored = store(parameter, self._storages[self._names[id(owner)], attribute], self.tp)
                stored.__dict__.update(parameter.__dict__)
                # The old parameter is kept so that its id is not given to another one while ties are looked up.
                self._stored[id(parameter)] = stored
                self._replaced.append(parameter)
            owner._parameters[attribute] = self._stored[id(parameter)]

    def install(self) -> None:
        """Give every module the forward of its role."""
        self._replaced.clear()
        register_attention()
        install_rng_tracker(self.tp, self.context.streams)
        own = {name for name, child in self.module.named_modules() if not _is_elsewhere(child)}
        local = {n: r for n, r in self.roles.items() if n in own and self._in_local(n)}
        share_heads(self.module, local, self.tp.size())
        regions = self._regions()
        for name, child in self.module.named_modules():
            if child is self.module or name not in own:
                continue
            role = self.roles.get(name)
            state = ModuleState(
                self.context,
                role.name if role else ("norm" if _is_norm(child) else None),
                {
                    attribute: self._storages[name, attribute]
                    for attribute, p in child._parameters.items()
                    if p is not None
                },
                role.parts if role else (),
                in_local=any(_inside(name, region) for region, local in regions.items() if local),
                in_block=any(_inside(name, block) for block in self.blocks),
                in_region=any(_inside(name, region) for region in regions),
            )
            self._install_one(name, child, state, regions)

    def _install_one(self, name: str, child: nn.Module, state: ModuleState, regions: Mapping[str, bool]) -> None:
        if state.role in ("colwise", "fused", "vocab_out"):
            child.forward = partial(forwards.column_linear, child, state)
            return
        if state.role == "rowwise":
            child.forward = partial(forwards.row_linear, child, state)
            return
        if state.role == "vocab_in":
            child.forward = forwards.embedding_forward(child, state)
            return
        apart = self._has_parallel_layers(name, child)
        places = self._whole_places(name, child, apart)
        if places:
            by_rules = apart or isinstance(child, (nn.Linear, nn.Embedding))
            child.forward = partial(forwards.whole_forward, child.forward, state, places, by_rules)
        if name in regions:
            child.forward = partial(forwards.region_forward, child.forward, state)
        if name in self.blocks:
            last = name == self.blocks[-1] or name.rpartition(".")[0] != self._next_block(name).rpartition(".")[0]
            child.forward = partial(forwards.block_forward, child.forward, state, last)

    def _next_block(self, name: str) -> str:
        return self.blocks[self.blocks.index(name) + 1]

    def _has_parallel_layers(self, name: str, child: nn.Module) -> bool:
        below = [n for n, _ in child.named_modules(prefix=name)]
        split = any(n in self.roles and self.roles[n].name in SPLIT_ROLES | {"local", "block"} for n in below)
        return split or any(block in below for block in self.blocks)

    def _whole_places(self, name: str, child: nn.Module, apart: bool) -> list[Place]:
        """Where a module left whole holds parameters: its own, and those below it if nothing below has a role."""
        owners = [(name, child)] if apart else list(child.named_modules(prefix=name))
        return [
            (owner, attribute, self._storages[owner_name, attribute])
            for owner_name, owner in owners
            for attribute, parameter in owner._parameters.items()
            if parameter is not None
        ]

    def _regions(self) -> dict[str, bool]:
        """Names of the modules that stand between a block and its projections, and whether they are ``local``."""
        regions = {name: True for name, role in self.roles.items() if role.name == "local"}
        modules = dict(self.module.named_modules())
        for name, role in self.roles.items():
            block = next((block for block in self.blocks if _inside(name, block)), None)
            if role.name not in ("rowwise", "colwise", "fused") or block is None or block == name:
                continue
            parts = name.removeprefix(f"{block}.").split(".")
            for depth in range(1, len(parts)):
                candidate = ".".join([block, *parts[:depth]])
                if not isinstance(modules[candidate], (nn.ModuleDict, nn.ModuleList)):
                    regions.setdefault(candidate, False)
                    break
        return regions

    def _check_roles(self) -> None:
        for name, role in self.roles.items():
            child = self.module.get_submodule(name)
            wants = _wanted_kind(child, role)
            if wants:
                raise PlanError(f"{self.source}: {name!r} is a {type(child).__name__}; the role {role} takes {wants}.")

    def _check_large(self) -> None:
        total = sum(p.numel() for p in self.module.parameters())
        left: dict[str, int] = defaultdict(int)
        seen: set[int] = {id(p) for name in self.roles for p in self.module.get_submodule(name)._parameters.values()}
        covered = [name for name, role in self.roles.items() if role.name in ("replicate", "norm")]
        for name, _, attribute, parameter in iter_parameters(self.module):
            if id(parameter) in seen or parameter.ndim < 2 or any(_inside(name, top) for top in covered):
                continue
            if f"{name}.{attribute}" in self._whole:
                continue
            seen.add(id(parameter))
            left[re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", f"{name}.{attribute}")] += parameter.numel()
        for name, numel in left.items():
            if numel > LARGE * total:
                owner = name.rpartition(".")[0]
                raise PlanError(
                    f"{self.source}: {name} ({numel:,} parameters, {numel / total:.0%} of the model) has no role, "
                    f"so every tp rank would hold and compute it whole. Give {owner!r} a role (colwise, rowwise, "
                    f"fused(n), vocab_in, vocab_out), or {name!r} the role replicate."
                )

    def _plan_storages(self) -> dict[tuple[str, str], Storage]:
        storages: dict[tuple[str, str], Storage] = {}
        first: dict[int, tuple[str, str]] = {}
        for name, owner in self.module.named_modules():
            role = self.roles.get(name)
            for attribute, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                key = (name, attribute)
                storages[key] = self._storage(name, owner, attribute, parameter, role)
                other = first.setdefault(id(parameter), key)
                if storages[other] != storages[key]:
                    raise PlanError(
                        f"{self.source}: {'.'.join(other)} and {'.'.join(key)} are one tied parameter but have roles "
                        f"{self.roles.get(other[0])} and {role}. Give both one placement (vocab_in with vocab_out)."
                    )
        return storages

    def _storage(
        self, name: str, owner: nn.Module, attribute: str, parameter: nn.Parameter, role: Role | None
    ) -> Storage:
        if role is None or role.name not in SPLIT_ROLES or attribute not in ("weight", "bias"):
            return Storage(Replicate())
        if role.name == "rowwise" and attribute == "bias":
            return Storage(Replicate())
        features_out = 1 if attribute == "weight" and forwards.is_transposed(owner) else 0
        dim = 1 - features_out if role.name == "rowwise" else features_out
        if role.name == "vocab_in":
            dim = 0
        size, what = parameter.size(dim), "in_features" if role.name == "rowwise" else "out_features"
        if size % self.tp.size() and not role.heads and self._in_local(name):
            raise self._indivisible(name, what, size)
        try:
            if role.heads and self._in_local(name):
                return plan_heads(parameter, dim, role.heads, self.tp)
            return plan_split(parameter, dim, role.parts or (1,), self.tp)
        except ValueError as error:
            raise self._indivisible(name, "heads" if role.heads else what, role.heads or size, str(error)) from error

    def _in_local(self, name: str) -> bool:
        return any(role.name == "local" and _inside(name, top) for top, role in self.roles.items())

    def _check_heads(self) -> None:
        """Key/value heads may be fewer than ranks, query heads not: each rank computes its own."""
        most: dict[str, tuple[int, str]] = {}
        for name, role in self.roles.items():
            if role.heads and self._in_local(name):
                parent = name.rpartition(".")[0]
                most[parent] = max(most.get(parent, (0, "")), (role.heads, name))
        for heads, name in most.values():
            if heads % self.tp.size():
                raise self._indivisible(name, "heads", heads)

    def _indivisible(self, name: str, what: str, size: int, detail: str = "") -> PlanError:
        return PlanError(
            f"{self.source}: tp={self.tp.size()} does not divide {what}={size} of {name!r}"
            f"{f' ({detail})' if detail else ''}. Use a tp size of {divisors(size)}."
        )


def _is_elsewhere(module: nn.Module) -> bool:
    """Whether another pipeline stage holds the module: all of it, or what it owns itself."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    every = list(module.parameters())
    return any(map(is_ghost, own)) or (bool(every) and all(map(is_ghost, every)))


def _inside(name: str, top: str) -> bool:
    return name == top or name.startswith(f"{top}.")


def _is_norm(module: nn.Module) -> bool:
    """Whether a module without a role normalises over the last dim only."""
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm")) and next(module.children(), None) is None
    return named and not _normalises_more(module)


def _normalises_more(module: nn.Module) -> bool:
    """Whether statistics are taken over more than each token's features."""
    shape = getattr(module, "normalized_shape", ())
    several = isinstance(shape, tuple) and len(shape) > 1
    return several or isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._NormBase))


def _wanted_kind(module: nn.Module, role: Role) -> str | None:
    """What the role takes, if the module is something else."""
    if role.name == "vocab_in":
        if not isinstance(module, nn.Embedding):
            return "an nn.Embedding"
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return "an nn.Embedding without max_norm, sparse or scale_grad_by_freq"
    elif role.name == "norm" and _normalises_more(module):
        return "a normalisation over the last dim alone (replicate is for others)"
    elif role.name in ("colwise", "rowwise", "fused", "vocab_out"):
        plain = type(module).forward is nn.Linear.forward
        conv1d = type(module).__name__ == "Conv1D" and getattr(module, "nf", None) is not None
        if not plain and not conv1d:
            return "an nn.Linear (or Hugging Face's Conv1D) with its own forward"
    return None
