"""Keeps the outputs of chosen operations of a region, and gives them back when the region is computed again.

torch has the same in ``create_selective_checkpoint_contexts``, which is used under ``torch.compile``. In eager code it
gives other dropout masks on recomputation where a kept operation drew random numbers (it is not run again, so what
follows draws its numbers), refuses operations in place on what is kept (``nn.ReLU(inplace=True)`` after a linear
layer), and allows one recomputation, where a backward in two parts (zero-bubble pipelines) needs more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_parallel._torch import (
    OpOverload,
    TorchDispatchMode,
    default_generator,
    memory_of,
    tree_leaves,
    tree_map,
    without_dispatch_modes,
)
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.checkpointing.offloading import OnHost

# An operation of a region: what, and the how manieth of them.
Key = tuple[Any, int]
Decide = Callable[[Key], bool]
Move = Callable[[Tensor], OnHost]
# Autograd's own bookkeeping: how often they run differs between a forward and a recomputation.
_NOT_COUNTED = frozenset({torch.ops.aten.detach.default, torch.ops.prim.device.default})
# Views that their schema does not tell of.
_VIEWS = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default})


@dataclass(slots=True)
class Kept:
    """One output, and what it needs to stand for the operation."""

    value: Any
    versions: list[int]
    after: list[tuple[torch.Generator, Tensor]]  # where a generator was left
    moved: list[tuple[int, OnHost]]  # from which memory, to the host


class Store:
    """What one call of a region has kept.

    Attributes:
        kept: By operation.
    """

    def __init__(self) -> None:
        self.kept: dict[Key, Kept] = {}

    def put(self, key: Key, output: Any, after: list[tuple[torch.Generator, Tensor]], move: Move | None = None) -> None:
        """Keep an output; with ``move``, in host memory."""
        value, moved = tree_map(_detached, output), []
        if move is not None:
            addresses = [memory_of(t)[0] for t in tensors_in(value)]
            value = tree_map(lambda leaf: move(leaf) if isinstance(leaf, Tensor) else leaf, value)
            moved = list(zip(addresses, (leaf for leaf in tree_leaves(value) if isinstance(leaf, OnHost)), strict=True))
        self.kept[key] = Kept(value, [t._version for t in tensors_in(value)], after, moved)

    def get(self, key: Key) -> Any:
        """An output as the operation returned it, with generators where it left them.

        Raises:
            ParallelConfigError: It was changed in place since, where nobody saw it.
        """
        kept = self.kept[key]
        if [t._version for t in tensors_in(kept.value)] != kept.versions:
            raise ParallelConfigError(
                f"What {key[0]} returned was kept for the recomputation, and changed in place outside of the block "
                "that is checkpointed. Change a copy of the block's output there, or leave the operation out of "
                "operations=."
            )
        for generator, state in kept.after:
            generator.set_state(state)
        return tree_map(lambda leaf: leaf.get() if isinstance(leaf, OnHost) else _detached(leaf), kept.value)

    def before_change(self, changed: list[Tensor]) -> None:
        """Tensors are about to be changed in place: what is kept in their memory is copied first."""
        places = {memory_of(t)[0] for t in changed}
        for kept in self.kept.values():
            for address, moved in kept.moved:
                if address in places:
                    moved.before_change()
            if any(memory_of(t)[0] in places for t in tensors_in(kept.value)):
                kept.value = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, kept.value)
                kept.versions = [t._version for t in tensors_in(kept.value)]

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept."""
        for kept in self.kept.values():
            yield from tensors_in(kept.value)


class Counting(TorchDispatchMode):
    """Numbers the operations of a region. A compiled part of it runs as it is, and is no operation."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts may run inside."""
        return True

    def __init__(self, store: Store) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store, self._counts = store, defaultdict[Any, int](int)

    def __enter__(self) -> Any:
        self._counts.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NOT_COUNTED:
            return func(*args, **kwargs)
        key = (func, self._counts[func])
        self._counts[func] += 1
        if self._store.kept and isinstance(func, OpOverload) and func._schema.is_mutable:
            self._store.before_change(_changed(func, args, kwargs))
        return self.operate(key, func, args, kwargs)

    def operate(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, or do not."""
        raise NotImplementedError


class Keeping(Counting):
    """In the forward: keeps outputs of what ``decide`` says.

    Args:
        store: Where.
        decide: Whether to keep the output of an operation.
        move: Of each kept operation, how its output gets into host memory; ``None`` where it stays.
    """

    def __init__(self, store: Store, decide: Decide, move: Callable[[Key], Move | None]) -> None:
        super().__init__(store)
        self._decide, self._move = decide, move

    def operate(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        """Run it."""
        if not self._decide(key) or not is_fresh(func):
            return func(*args, **kwargs)
        before = _generators(func, args, kwargs)
        output = func(*args, **kwargs)
        with without_dispatch_modes():
            after = [(g, state) for g, old in before if not torch.equal(state := g.get_state(), old)]
        self._store.put(key, output, after, self._move(key))
        return output


class Giving(Counting):
    """In the recomputation: gives back what is kept."""

    def operate(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        """Run it, unless its output is kept."""
        if key in self._store.kept:
            return self._store.get(key)
        return func(*args, **kwargs)


def is_fresh(func: Any) -> bool:
    """Whether an operation returns new memory: neither a view nor something changed in place."""
    if not isinstance(func, OpOverload):
        return True
    if func in _VIEWS:
        return False
    return not any(returned.alias_info is not None for returned in func._schema.returns)


def _generators(func: Any, args: Any, kwargs: Any) -> list[tuple[torch.Generator, Tensor]]:
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
    devices = {t.device for t in tensors_in((args, kwargs))}
    found = given or [default_generator(device) for device in devices]
    with without_dispatch_modes():  # among them the one that makes fake tensors of all
        return [(generator, generator.get_state()) for generator in found]


def _changed(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
