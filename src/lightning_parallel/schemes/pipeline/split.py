"""Which parameters and buffers of an unchanged module belong to which pipeline stage."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_parallel.errors import ParallelConfigError, PlanError
from lightning_parallel.plan import Role, is_homogeneous
from lightning_parallel.schemes.pipeline.places import Site as Site
from lightning_parallel.schemes.pipeline.places import place_sites
from lightning_parallel.schemes.pipeline.uses import modules_around

EMBEDDING_COST = 0.01  # of a matmul's, for each parameter: looked up, not multiplied; but it is updated all the same


@dataclass(frozen=True, slots=True)
class StageSplit:
    """The stages of a module.

    Attributes:
        blocks: For each stage the names of its blocks, in order of execution; every block once.
        sites: The stages that hold each parameter and buffer. Usually one; all for what every stage needs.
    """

    blocks: tuple[tuple[str, ...], ...]
    sites: Mapping[Site, frozenset[int]]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.blocks)

    def holders(self, module: nn.Module) -> dict[int, frozenset[int]]:
        """Stages by the tensor's id: the union over its sites, so that tied weights may have several."""
        found: dict[int, frozenset[int]] = {}
        modules = dict(module.named_modules())
        for site, stages in self.sites.items():
            owner = modules[site.module]
            tensor = (owner._buffers if site.is_buffer else owner._parameters)[site.name]
            found[id(tensor)] = found.get(id(tensor), frozenset()) | stages
        return found


def split_stages(
    module: nn.Module,
    num_stages: int,
    *,
    roles: Mapping[str, Role] | None = None,
    boundaries: Sequence[str] | None = None,
    balance: Literal["even", "cost"] = "even",
    cost: Callable[[nn.Module], float] | None = None,
) -> StageSplit:
    """Cut the trunk of ``module`` into stages and say which of them holds each parameter and buffer.

    Args:
        module: The LightningModule, or any other; it may be on the meta device and is not changed.
        num_stages: Over all ranks: a schedule with two stages a rank has twice as many stages as ranks.
        roles: Module (or parameter) name to role: ``block``, ``stem``, ``head``, ``vocab_in`` and ``vocab_out`` count.
        boundaries: Names of the blocks at which the second and later stages begin, instead of ``balance``.
        balance: ``"even"``: numbers of blocks differ by one at most. ``"cost"``: the dearest stage is as cheap as can
            be; what is outside the blocks counts too.
        cost: What a module costs, for ``balance="cost"``. Its number of parameters by default (FLOPs of matrix products
            per token are proportional to that), those of embeddings at a hundredth (they are looked up).

    Raises:
        PlanError: No trunk, or roles or boundaries that do not fit it.
        ParallelConfigError: More stages than blocks, or options that do not go together.
    """
    roles = roles or {}
    names = pipeline_blocks(module, roles)
    if not 1 <= num_stages <= len(names):
        raise ParallelConfigError(
            f"{num_stages} pipeline stages, but {type(module).__name__} has {len(names)} blocks ({names[0]} to "
            f"{names[-1]}): each stage needs one at least. Use 1 to {len(names)} stages (stages are ranks of the "
            "pipeline times stages a rank), or declare smaller modules as blocks."
        )
    if balance not in ("even", "cost"):
        raise ParallelConfigError(f"balance={balance!r}: use 'even' (numbers of blocks) or 'cost'.")
    if (boundaries is not None and balance != "even") or (cost is not None and balance != "cost"):
        raise ParallelConfigError(
            "boundaries= says where stages begin, balance='cost' finds out, and cost= is for the latter only. "
            "Pass boundaries=, or balance='cost' with or without cost=, or none of them."
        )
    places = place_sites(module, names, roles)
    if boundaries is not None:
        starts = _find_starts(names, num_stages, boundaries)
    elif balance == "cost":
        starts = _balance_costs(_block_costs(module, names, places, cost or count_cost), num_stages)
    else:
        starts = _balance_numbers(len(names), num_stages)
    ends = [*starts[1:], len(names)]
    stage_of = [stage for stage, (start, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(start, end)]
    return StageSplit(
        tuple(tuple(names[start:end]) for start, end in zip(starts, ends, strict=True)),
        {site: frozenset(stage_of[position] for position in positions) for site, positions in places.items()},
    )


def pipeline_blocks(module: nn.Module, roles: Mapping[str, Role] | None = None) -> list[str]:
    """Names of the blocks of the one trunk that is pipelined, in order of execution.

    Modules with the role ``block`` if there are any. Else the children of the largest list of layers, by parameters: a
    ``ModuleList`` or ``Sequential`` of one class, or a ``ModuleList`` in which some class is repeated. Else those of
    the largest ``Sequential``. Other trunks (an encoder, a small CNN) count as stem or head. A module that a list
    repeats is a block at each position.

    Raises:
        PlanError: There is no trunk, or the declared blocks are in several lists.
    """
    declared = [name for name, role in (roles or {}).items() if role.name == "block"]
    if declared:
        return _declared_blocks(module, set(declared))
    for is_trunk in (_is_layers, _is_sequential):
        lists = [(name, child) for name, child in module.named_modules() if is_trunk(child)]
        if lists:  # the first of the largest is the outermost one
            name, trunk = max(lists, key=lambda named: sum(p.numel() for p in named[1].parameters()))
            keys = [key for key, child in trunk._modules.items() if child is not None]
            return [f"{name}.{key}" if name else key for key in keys]
    raise PlanError(
        f"{type(module).__name__} has no repeated layers to cut into pipeline stages: no ModuleList or Sequential of "
        'two or more. Give the modules that run one after the other the role "block": '
        "plan={'model.layers.*': 'block'}."
    )


def count_cost(module: nn.Module) -> float:
    """Parameters below ``module``, those of embeddings at a hundredth."""
    return sum(
        p.numel() * (EMBEDDING_COST if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) else 1)
        for owner in module.modules()
        for p in owner._parameters.values()
        if p is not None
    )


def _declared_blocks(module: nn.Module, declared: set[str]) -> list[str]:
    lists: dict[str, list[str]] = {}
    for name, _ in module.named_modules(remove_duplicate=False):
        if name in declared:
            lists.setdefault(name.rpartition(".")[0], []).append(name)
    owners = {id(module.get_submodule(parent)): parent for parent in reversed(lists)}  # a list may have two names
    if len(owners) > 1:
        found = "; ".join(f"{len(lists[name])} in {name or 'the root'!r}" for name in reversed(owners.values()))
        raise PlanError(
            f"Modules of several lists have the role block: {found}. One trunk is cut into pipeline stages. Give the "
            "role to the children of one module only; the other lists run whole, on the first or the last stage."
        )
    return lists[next(iter(owners.values()))]


def _is_layers(module: nn.Module) -> bool:
    """A list of layers, of one class or (every third one has experts, say) of a few."""
    children = [child for child in module._modules.values() if child is not None]
    if any(type(child) in (nn.ModuleList, nn.ModuleDict) for child in children):  # they cannot be called
        return False
    mixed = (
        isinstance(module, nn.ModuleList)
        and len({type(child) for child in children}) < len(children)
        and not any(isinstance(child, (nn.Linear, nn.Embedding)) for child in children)
        and all(next(child.parameters(), None) is not None for child in children)
    )
    return mixed or is_homogeneous(module)


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and len(module._modules) > 1


def _find_starts(names: Sequence[str], num_stages: int, boundaries: Sequence[str]) -> list[int]:
    if isinstance(boundaries, str) or len(boundaries) != num_stages - 1:
        raise PlanError(
            f"boundaries={boundaries!r}: {num_stages} stages need {num_stages - 1} names, of the blocks at which the "
            "second and later stages begin."
        )
    for name in boundaries:
        if name not in names[1:]:
            near = difflib.get_close_matches(name, names[1:], n=3, cutoff=0.4) or names[1:4]
            raise PlanError(
                f"boundaries: {name!r} is "
                + ("the first block, where the first stage begins. " if name == names[0] else "no block. ")
                + f"Nearest names: {', '.join(near)}."
            )
    starts = [0, *(names.index(name) for name in boundaries)]
    if sorted(set(starts)) != starts:
        raise PlanError(
            f"boundaries={list(boundaries)!r} are not in the order of the blocks, each once, as stages are. "
            f"Use {sorted(set(boundaries), key=names.index)!r}."
        )
    return starts


def _balance_numbers(num_blocks: int, num_stages: int) -> list[int]:
    """Where stages begin. The stages that get one more are the middle ones, then the first, never the last.

    The last has the head and the loss, often worth several blocks; the first has the embeddings and, under 1F1B, the
    most microbatches in flight.
    """
    sizes = [num_blocks // num_stages] * num_stages
    for stage in [*range(1, num_stages - 1), 0][: num_blocks % num_stages]:
        sizes[stage] += 1
    return [sum(sizes[:stage]) for stage in range(num_stages)]


def _block_costs(
    module: nn.Module,
    names: Sequence[str],
    places: Mapping[Site, frozenset[int]],
    cost: Callable[[nn.Module], float],
) -> list[float]:
    """Of each block, with the modules outside that go with it alone. What all stages do does not count."""
    blocks = [module.get_submodule(name) for name in names]
    costs = [cost(block) for block in blocks]
    around = modules_around(module, blocks)
    counted = {id(block) for block in blocks}

    def add(outer: nn.Module, name: str) -> None:
        for key, child in outer._modules.items():
            if child is None or id(child) in counted:
                continue
            counted.add(id(child))
            full = f"{name}{key}"
            at = {place for site, place in places.items() if f"{site.module}.".startswith(f"{full}.")}
            if id(child) not in around and len(at) == 1 and len(only := next(iter(at))) == 1:
                costs[min(only)] += cost(child)
            else:
                add(child, f"{full}.")

    add(module, "")
    if bad := next((c for c in costs if not (math.isfinite(c) and c >= 0)), None):
        raise ParallelConfigError(f"cost= returned {bad}; a cost is a number, 0 or more.")
    return costs


def _balance_costs(costs: Sequence[float], num_stages: int) -> list[int]:
    """Where stages begin so that the dearest one is as cheap as can be; dynamic programming over contiguous cuts.

    Of equal cuts the evener one, by the sum of squares.
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best: list[tuple[float, float, list[int]]] = [(total[end], total[end] ** 2, [0]) for end in range(len(total))]
    for stage in range(1, num_stages):
        longer = list(best)
        for end in range(stage + 1, len(total)):
            cuts = []
            for start in range(stage, end):
                dearest, squares, starts = best[start]
                last = total[end] - total[start]
                cuts.append((max(dearest, last), squares + last**2, [*starts, start]))
            longer[end] = min(cuts)
        best = longer
    return best[-1][2]
