"""Which block each parameter and buffer goes with.

A tensor in a block goes with that block. One outside goes with the first block if it is used before the blocks, with
the last one if after, with all of them if each stage needs it. What decides, in this order: declared roles, Hugging
Face's ``_pp_plan``, the code (``uses.py``), the type (an embedding is used before the blocks), the order of
registration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_parallel.errors import PlanError
from lightning_parallel.huggingface import published_order
from lightning_parallel.plan import Role
from lightning_parallel.schemes.pipeline.uses import BESIDE, CodeReader, Key, Uses

_FIRST, _LAST = frozenset({"stem", "vocab_in"}), frozenset({"head", "vocab_out"})
# Methods of these packages' classes are not about one model.
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "transformers.")


@dataclass(frozen=True, slots=True)
class Site:
    """An attribute that holds a tensor; ``module`` is its owner's name as ``named_modules()`` gives it."""

    module: str
    name: str
    is_buffer: bool


def place_sites(module: nn.Module, blocks: Sequence[str], roles: Mapping[str, Role]) -> dict[Site, frozenset[int]]:
    """Positions of the blocks that each tensor goes with.

    Args:
        module: The root.
        blocks: Names of the blocks, in order of execution.
        roles: Module (or parameter) name to role.

    Raises:
        PlanError: A part of a block has the role ``stem`` or ``head``.
    """
    places = _Places(module, blocks, roles)
    canonical = {id(owner): name for name, owner in module.named_modules()}
    found: dict[Site, frozenset[int]] = defaultdict(frozenset)
    chains: dict[str, tuple[nn.Module, ...]] = {}
    for name, owner in module.named_modules(remove_duplicate=False):
        chain = chains[name] = (*chains[name.rpartition(".")[0]], owner) if name else (owner,)
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                found[Site(canonical[id(owner)], attribute, False)] |= places.of_parameter(name, chain, attribute)
        for attribute, buffer in owner._buffers.items():
            if buffer is not None:
                found[Site(canonical[id(owner)], attribute, True)] |= places.of_buffer(name, chain, attribute)
    return dict(found)


class _Places:
    """Decides for one tensor at a time.

    A *chain* holds the modules from the root to the tensor's owner. Until the end a place is a count, of the blocks
    that have run before the tensor is used.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[str], roles: Mapping[str, Role]) -> None:
        self._roles = roles
        objects = [module.get_submodule(name) for name in blocks]
        self._positions: dict[int, set[int]] = defaultdict(set)  # of a block: several if it is repeated
        for position, block in enumerate(objects):
            self._positions[id(block)].add(position)
        self._all = frozenset(range(len(blocks)))
        self._reader = CodeReader(module, objects)
        self._path = self._reader.path
        self._published = self._read_published()
        self._read: list[Uses] = []
        self._unread = self._iter_uses(module)
        for name, role in roles.items():
            around = next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)
            if role.name in ("stem", "head") and around is not None:
                raise PlanError(
                    f"{name!r} has the role {role}, but it is in the block {around!r}: a block and its parts are on "
                    "one stage. Give the role to what is outside the blocks, or declare other modules as blocks."
                )

    def of_parameter(self, name: str, chain: Sequence[nn.Module], attribute: str) -> frozenset[int]:
        """Positions of the blocks that the parameter ``name``.``attribute`` goes with."""
        for owner in chain:
            if id(owner) in self._positions:
                return frozenset(self._positions[id(owner)])
        return self._by_role(name, attribute) or self._outside(chain, attribute)

    def of_buffer(self, name: str, chain: Sequence[nn.Module], attribute: str) -> frozenset[int]:
        """The same for a buffer: outside the blocks every stage has it, unless it goes with a module's parameters."""
        owner, buffer = chain[-1], chain[-1]._buffers[attribute]
        in_block = any(id(outer) in self._positions for outer in chain)
        is_statistic = owner._buffers.get("running_mean") is not None  # with num_batches_tracked
        is_saved = attribute not in owner._non_persistent_buffers_set and _has_parameters(owner)
        is_state = is_saved and buffer is not None and buffer.is_floating_point()
        return self.of_parameter(name, chain, attribute) if in_block or is_statistic or is_state else self._all

    def _by_role(self, name: str, attribute: str) -> frozenset[int]:
        """The nearest role: the tensor's own, its module's, or that of a module around it."""
        outer = f"{name}.{attribute}" if name else attribute
        while outer:
            role = self._roles.get(outer)
            if role is not None and role.name in _FIRST | _LAST:
                return self._at({0 if role.name in _FIRST else len(self._all)})
            outer = outer.rpartition(".")[0]
        return frozenset()

    def _outside(self, chain: Sequence[nn.Module], attribute: str) -> frozenset[int]:
        owner = chain[-1]
        for outer in chain:
            if id(outer) in self._published:
                return self._at({self._published[id(outer)]})
        keys: list[Key] = [(id(owner), attribute), *(id(outer) for outer in chain if id(outer) not in self._path)]
        if counts := self._by_code(keys):
            return self._at(counts)
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            return self._at({0})
        return self._at({self._registered_after(chain)})

    def _at(self, counts: Iterable[int]) -> frozenset[int]:
        """What runs after n blocks runs on the stage of the next one, which the n-th one's output is sent to."""
        last = len(self._all) - 1
        return frozenset[int]().union(*(self._all if n == BESIDE else {min(n, last)} for n in counts))

    def _read_published(self) -> dict[int, int]:
        places: dict[int, int] = {}
        for outer in self._path.values():
            order = published_order(outer)
            blocks = next((i for i, part in enumerate(order) if id(part) in self._path), -1)
            for i, part in enumerate(order):
                if id(part) not in self._path:
                    places.setdefault(id(part), 0 if i < blocks else len(self._all))
        return places

    def _by_code(self, keys: Sequence[Key]) -> set[int]:
        """The uses in the first method that has any; methods are read when they are needed."""
        for uses in self._iter_read():
            if counts := set[int]().union(*(uses.get(key, ()) for key in keys)):
                return counts
        return set()

    def _iter_read(self) -> Iterator[Uses]:
        yield from self._read
        for uses in self._unread:
            self._read.append(uses)
            yield uses

    def _iter_uses(self, module: nn.Module) -> Iterator[Uses]:
        """Of the step, of the forwards from the root to the blocks, then of the other methods of their classes."""
        methods = [(module, "training_step"), *((outer, "forward") for outer in self._path.values())]
        for outer in self._path.values():
            own = [kind for kind in type(outer).__mro__ if not kind.__module__.startswith(_LIBRARIES)]
            methods += [(outer, name) for kind in own for name in vars(kind) if not name.startswith("__")]
        for outer, name in methods:
            if uses := self._reader.read(outer, name):
                yield uses

    def _registered_after(self, chain: Sequence[nn.Module]) -> int:
        """How many blocks are registered before the outermost module that leads to none; a container's own: 0."""
        depth = next((i for i, outer in enumerate(chain) if id(outer) not in self._path), None)
        if not depth:
            return 0
        before = 0
        for sibling in chain[depth - 1]._modules.values():
            if sibling is chain[depth]:
                break
            if id(sibling) in self._path:
                before = len(self._all)
            before = max([before, *(position + 1 for position in self._positions.get(id(sibling), ()))])
        return before


def _has_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())
