"""What the package must know about a model: globs of module names mapped to roles.

A role says what a module *is* (a column-parallel projection, an embedding over the vocabulary, a repeated
block), not how it is placed: one declaration serves tensor parallel, sequence parallel and fully sharded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_parallel.errors import PlanError

ROLES: Mapping[str, str] = {
    "colwise": "linear layer, output features split; colwise(heads=N) splits in whole heads",
    "rowwise": "linear layer, input features split, outputs summed",
    "fused": "linear layer of several column-wise parts in one: fused(3) equal parts, fused(4, 1, 1) by ratio",
    "vocab_in": "embedding, rows (vocabulary) split",
    "vocab_out": "output head, vocabulary split, feeds cross entropy",
    "norm": "normalisation over the last dim, or anything else that treats each token apart",
    "block": "one of the repeated layers: a unit of sharding and of sequence parallelism",
    "stem": "used before the blocks: on the first pipeline stage",
    "head": "used after the blocks: on the last pipeline stage",
    "replicate": "kept whole on every tensor-parallel rank",
    "local": "its code uses no global sizes, so it may run on plain local shards",
}


@dataclass(frozen=True, slots=True)
class Role:
    """A parsed role: ``fused(4, 1, 1)`` is ``Role("fused", (4, 1, 1))``; ``colwise(heads=2)`` has ``heads=2``."""

    name: str
    parts: tuple[int, ...] = ()
    heads: int | None = None

    @classmethod
    def parse(cls, text: str) -> Role:
        """Read a role as it stands in a plan.

        >>> Role.parse("fused(3)")
        Role(name='fused', parts=(1, 1, 1), heads=None)

        Raises:
            PlanError: Unknown name or arguments; the message has the nearest role.
        """
        match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", str(text))  # YAML may hold something else
        if match is None or match[1] not in ROLES:
            seen = match[1] if match else str(text)
            near = difflib.get_close_matches(seen, ROLES, n=1)
            raise PlanError(
                f"Unknown role {text!r}. "
                + (f"Did you mean {near[0]!r}? " if near else "")
                + f"Roles: {', '.join(ROLES)}."
            )
        name, body = match[1], (match[2] or "").replace(" ", "")
        if name == "fused":
            numbers = [int(n) if n.isdecimal() else 0 for n in body.split(",")]
            if min(numbers) < 1 or numbers == [1]:
                raise PlanError(
                    f"{text!r}: fused takes the number of equal parts, fused(3), or a ratio, fused(4, 1, 1)."
                )
            return cls(name, (1,) * numbers[0] if len(numbers) == 1 else tuple(numbers))
        if name == "colwise" and (heads := re.fullmatch(r"heads=([1-9]\d*)", body)):
            return cls(name, heads=int(heads[1]))
        if body:
            takes = "nothing, or a number of heads, colwise(heads=8)" if name == "colwise" else "no arguments"
            raise PlanError(f"{text!r}: {name} takes {takes}.")
        return cls(name)

    def __str__(self) -> str:
        if self.parts:
            return f"{self.name}({', '.join(map(str, self.parts))})"
        return f"{self.name}(heads={self.heads})" if self.heads else self.name


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Globs of module names mapped to roles; plain data that a YAML file can hold.

    Names are those of the LightningModule's ``named_modules()``. ``*`` stands for one part between dots (or for a
    piece of one: ``*_proj``), ``**`` for any number of parts.

    Args:
        roles: Glob to role, for example ``{"model.h.*.attn.c_attn": "fused(3)", "model.h.*": "block"}``.
        source: Where the plan came from, for messages.
    """

    roles: Mapping[str, str]
    source: str = "plan="
    parsed: Mapping[str, Role] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.roles, Mapping):
            raise PlanError(f"A plan maps globs of module names to roles, got {type(self.roles).__name__}.")
        for glob in self.roles:
            if type(glob) is not str:  # YAML reads 0: as a number
                raise PlanError(
                    f"{self.source}: {glob!r} is no glob. A plan maps globs of module names (text) to roles."
                )
        object.__setattr__(self, "parsed", {glob: Role.parse(text) for glob, text in self.roles.items()})

    @classmethod
    def of(cls, plan: ParallelPlan | Mapping[str, str], source: str) -> ParallelPlan:
        """The same roles, known to come from ``source``."""
        return cls(plan.roles if isinstance(plan, ParallelPlan) else plan, source)

    def resolve(self, module: nn.Module) -> dict[str, Role]:
        """Module name to role, for every module that a glob matches.

        The roles ``replicate``, ``stem`` and ``head`` also take the name of a parameter, for one that a module with
        parallel layers below it holds itself (learnt positions, say), or whose module has another role.

        Raises:
            PlanError: A glob matches nothing (with the nearest names), or two globs give one module two roles.
        """
        names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
        parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        found: dict[str, tuple[str, Role]] = {}
        for glob, role in self.parsed.items():
            matched = [name for name in names if matches(name, glob)]
            if not matched and role.name in ("replicate", "stem", "head"):
                matched = [name for name in parameters if matches(name, glob)]
            if not matched:
                raise PlanError(f"{self.source}: {glob!r} ({role}) matches no module. {_nearest(glob, names)}")
            for name in matched:
                other, other_role = found.get(name, (glob, role))
                if other_role != role:
                    raise PlanError(
                        f"{self.source}: {name!r} is {other_role} by {other!r} and {role} by {glob!r}. "
                        "Narrow one of the globs: a module has one role."
                    )
                found[name] = (glob, role)
        return {name: role for name, (_, role) in found.items()}


def matches(name: str, glob: str) -> bool:
    """Whether a dotted name matches, part by part; ``**`` takes any number of parts."""
    return _match_parts(name.split("."), glob.split("."))


def _match_parts(parts: list[str], globs: list[str]) -> bool:
    if not globs:
        return not parts
    if globs[0] == "**":
        return any(_match_parts(parts[i:], globs[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], globs[0]) and _match_parts(parts[1:], globs[1:])


def _nearest(glob: str, names: list[str]) -> str:
    """Names with numbers folded to ``*``, the closest ones first."""
    folded = sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names})
    near = difflib.get_close_matches(glob, folded, n=3, cutoff=0.4)
    return f"Nearest names: {', '.join(near)}." if near else f"Modules: {', '.join(folded[:8])}."


def repeated_blocks(module: nn.Module, roles: Mapping[str, Role]) -> list[str]:
    """Names of the repeated layers: those with the role ``block``, else the outermost homogeneous lists.

    A list counts when it is a ``ModuleList`` or ``Sequential`` of two or more modules of one class that holds at
    least a twentieth of all parameters.
    """
    named = [name for name, role in roles.items() if role.name == "block"]
    if named:
        return [name for name, _ in module.named_modules() if name in named]
    total = sum(p.numel() for p in module.parameters())
    found: list[str] = []
    for name, candidate in module.named_modules():
        if any(name.startswith(f"{block}.") for block in found) or not is_homogeneous(candidate):
            continue
        if sum(p.numel() for p in candidate.parameters()) * 20 >= total:
            prefix = f"{name}." if name else ""
            found += [f"{prefix}{child}" for child, _ in candidate.named_children()]
    return found


def is_homogeneous(module: nn.Module) -> bool:
    """Whether a module is a list of repeated layers: two or more of one class, all with parameters."""
    children = list(module._modules.values())
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(children) > 1
        and len({type(child) for child in children}) == 1
        and not isinstance(children[0], (nn.Linear, nn.Embedding))
        and all(next(child.parameters(), None) is not None for child in children if child is not None)
    )


def find_plan(
    explicit: ParallelPlan | Mapping[str, str] | None,
    module: nn.Module,
    *,
    published: Callable[[nn.Module], ParallelPlan | None] | None = None,
) -> tuple[ParallelPlan | None, str]:
    """The first of: the strategy's ``plan=``, the module's ``parallel_plan()``, what ``published`` finds.

    Args:
        explicit: The strategy's argument.
        module: The LightningModule.
        published: Reads the plan that the model came with. Leave it out where nothing is split: such plans speak of
            tensor parallelism only, and may hold what this package cannot follow.

    Returns:
        The plan (or ``None``) and where it came from. Inference from the structure is the seam left open here.
    """
    if explicit is not None:
        return ParallelPlan.of(explicit, "plan="), "plan="
    own: Any = getattr(module, "parallel_plan", None)
    if callable(own):
        source = f"{type(module).__name__}.parallel_plan()"
        return ParallelPlan.of(own(), source), source
    plan = published(module) if published else None
    return (plan, plan.source) if plan else (None, "no plan")


def iter_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """``(module name, owner, attribute, parameter)`` for every place that holds a parameter, tied ones twice."""
    for name, owner in module.named_modules(remove_duplicate=False):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield name, owner, attribute, parameter
