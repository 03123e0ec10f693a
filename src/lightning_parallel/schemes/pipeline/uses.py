"""When a module's code uses its children: before its blocks run, after them, between two, or beside each of them.

Nothing runs and no source text is needed: a walk over the bytecode of ``forward`` or ``training_step`` (``frames.py``)
knows which values on the interpreter's stack are modules, parameters or methods, follows methods and the forwards of
the modules that lead to the blocks, and notes each use *when the value is consumed*. The order of names would not do:
``self.head(self.blocks(self.embed(x)))`` names the head first and calls it last.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_parallel.schemes.pipeline.frames import Function, walk

BESIDE = -1

# A module (its id) or one tensor (its owner's id and the attribute) to its uses: how many blocks had run before, or
# BESIDE for one in the body of a loop over the blocks.
Key = int | tuple[int, str]
Uses = dict[Key, set[int]]

# Built-ins that hand on the modules they are given, those that only look, and a container's methods that hand it on.
_HAND_ON = frozenset({"enumerate", "zip", "reversed", "list", "tuple", "iter", "next", "tqdm"})
_LOOK = frozenset({"len", "isinstance", "issubclass", "type", "hasattr", "id", "callable", "print", "str", "repr"})
_VIEWS = frozenset({"values", "items", "children", "named_children"})
# Reading these needs no values.
_SIZES = frozenset({"dtype", "device", "shape", "ndim", "size", "dim", "numel", "stride", "requires_grad", "is_cuda"})
# What every module inherits says nothing about this one.
_INHERITED = ("torch.nn.modules.module", "lightning.pytorch.core", "pytorch_lightning.core", "lightning.fabric")

_LISTS = (nn.Sequential.forward, nn.Module.forward)  # of containers that run their children or leave it to others
_CLAIMED = 0  # the key of a block's run that a loop has accounted for
_MAX_FRAMES = 1000


@dataclass(frozen=True, slots=True)
class _Tensor:
    owner: nn.Module
    name: str


@dataclass(frozen=True, slots=True)
class _Element:
    """One of a container's modules, or a part of one; which is not known, ``like`` is the first one's."""

    container: nn.Module
    like: nn.Module


@dataclass(frozen=True, slots=True)
class _Super:
    owner: nn.Module
    after: type


@dataclass(frozen=True, slots=True)
class _Builtin:
    name: str
    value: Any = None  # the container, for its views


class CodeReader:
    """Reads methods of the modules that lead to ``blocks``.

    Args:
        module: The root.
        blocks: Modules of the pipelined trunk, in order of execution.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.num_blocks = len(blocks)
        self.path = modules_around(module, blocks)
        self._index = _parts_of_blocks(module, blocks)
        self._events: list[tuple[Key | None, int]] = []  # key None: one block, in a loop over them perhaps
        self._active: list[tuple[nn.Module | None, CodeType]] = []
        self._num_frames = 0
        self._iterating_runs = self._has_run = False

    def read(self, owner: nn.Module, method: str) -> Uses | None:
        """The uses in a method and in all that it calls; ``None`` if the blocks do not run there."""
        function = _method_of(owner, method)
        if function is None:
            return None
        for self._iterating_runs in (False, True):  # a loop that only looks at the blocks does not run them
            self._events, self._num_frames, self._has_run = [], 0, False
            ran, _ = self.run(function, {}, 0)
            if self._has_run:
                break
        uses: Uses = {}
        for key, count in self._events:
            if key is not None and key != _CLAIMED:
                uses.setdefault(key, set()).add(count)
        return uses if ran else None

    def use(self, value: Any, ran: int) -> int:
        """Something needs ``value``. Returns how many blocks have run then."""
        if isinstance(value, _Tensor):
            if id(value.owner) not in self._index:
                self._events.append(((id(value.owner), value.name), ran))
        elif isinstance(value, _Element):
            if id(value.container) in self.path:
                self._events.append((None, ran))
                self._has_run = True
                return self.num_blocks
            self._events.append((id(value.container), ran))
        elif isinstance(value, Function):
            return self.run(value, {}, ran)[0]
        elif isinstance(value, nn.Module):
            if id(value) in self._index:
                self._has_run = True
                return max(ran, self._index[id(value)] + 1)
            if id(value) not in self.path:
                self._events.append((id(value), ran))
            elif not any(owner is value for owner, _ in self._active):  # else: self, handed to some function
                return self._run_path(value, ran)
        return ran

    def call(self, callee: Any, arguments: list[Any], named: bool, scope: dict[str, Any], ran: int) -> tuple[int, Any]:
        """Something calls ``callee``, by keyword if ``named``. Returns how many blocks have run, and the result."""
        if isinstance(callee, _Builtin):
            return self._call_builtin(callee, arguments, scope, ran)
        if isinstance(callee, Function) and not named:
            names = callee.code.co_varnames[callee.owner is not None : callee.code.co_argcount]
            return self.run(callee, dict(zip(names, arguments, strict=False)), ran)
        for argument in arguments:
            ran = self.use(argument, ran)
        if isinstance(callee, Function):
            return self.run(callee, {}, ran)
        if isinstance(callee, nn.Module) and id(callee) in self.path:  # also self(batch)
            return self._run_path(callee, ran), None
        return self.use(callee, ran), None

    def run(self, function: Function, arguments: dict[str, Any], ran: int) -> tuple[int, Any]:
        """Walk through a function's code."""
        if any(owner is function.owner and code is function.code for owner, code in self._active):
            return ran, None
        self._num_frames += 1
        if self._num_frames > _MAX_FRAMES:
            return ran, None
        scope = {**function.scope, **arguments}
        if function.owner is not None:
            scope |= {function.code.co_varnames[0]: function.owner, "super()": function.owner}
        self._active.append((function.owner, function.code))
        try:
            return walk(self, function.code, scope, ran)
        finally:
            self._active.pop()

    @property
    def num_events(self) -> int:
        """How many uses were noted so far."""
        return len(self._events)

    def end_loop(self, start: int, end: int) -> None:
        """These events are in a loop. If one block runs in it, it is a loop over the blocks."""
        if any(key is None for key, _ in self._events[start:end]):
            self._events[start:end] = [(_CLAIMED if key is None else key, BESIDE) for key, _ in self._events[start:end]]

    def attribute(self, value: Any, name: str, ran: int) -> tuple[int, Any]:
        """``value.name``, where it can be known."""
        if isinstance(value, _Element):
            return self._attribute_of_element(value, name, ran)
        if isinstance(value, _Tensor):
            return (ran, None) if name in _SIZES else (self.use(value, ran), None)
        if isinstance(value, _Super):
            order = type(value.owner).__mro__
            later = order[order.index(value.after) + 1 :] if value.after in order else ()
            return ran, next((_function_of(vars(c)[name], value.owner) for c in later if name in vars(c)), None)
        if not isinstance(value, nn.Module):
            return ran, None
        if name in value._modules:
            return ran, value._modules[name]
        if value._parameters.get(name) is not None or value._buffers.get(name) is not None:
            return ran, _Tensor(value, name)
        if name in ("forward", "__call__"):
            return ran, value
        found = vars(value).get(name, inspect.getattr_static(type(value), name, None))
        if isinstance(found, (nn.Module, str)):
            return ran, found
        if name in _VIEWS:
            return ran, _Builtin("iter", value)
        method = _function_of(found.fget, value) if isinstance(found, property) else _method_of(value, name)
        if method is None or id(value) in self._index:
            return ran, value if method else None  # a method of a block: the block runs
        return self.run(method, {}, ran) if isinstance(found, property) else (ran, method)

    def item(self, value: Any, index: Any, ran: int) -> tuple[int, Any]:
        """``value[index]``."""
        if isinstance(value, _Tensor):
            return self.use(value, ran), None
        if not isinstance(value, nn.Module):
            return ran, self._element(value.container, value.like) if isinstance(value, _Element) else None
        children = value._modules
        if isinstance(index, str) and index in children:
            return ran, children[index]
        if isinstance(index, int) and -len(children) <= index < len(children):
            return ran, list(children.values())[index]
        return ran, value if isinstance(index, slice) else self._element(value, value)

    def iterate(self, value: Any, ran: int) -> tuple[int, Any]:
        """``iter(value)`` in a loop, or its items one by one."""
        if isinstance(value, _Element):
            return ran, self._element(value.container, value.like)
        if not isinstance(value, nn.Module):
            return ran, None
        if id(value) not in self.path or self._iterating_runs:
            ran = self.use(value, ran)
        return ran, self._element(value, value)

    def builtin(self, name: str) -> Any:
        """A global name, if it is one of the functions that are understood."""
        return _Builtin(name) if name in _HAND_ON or name in _LOOK or name in ("getattr", "super") else None

    def super_of(self, scope: dict[str, Any]) -> Any:
        """What ``super()`` is in a method."""
        owner, after = scope.get("super()"), scope.get("__class__")
        return _Super(owner, after) if owner is not None and isinstance(after, type) else None

    def _element(self, container: nn.Module, of: nn.Module) -> _Element:
        children = [child for child in of._modules.values() if child is not None]
        if not children or type(of).forward not in _LISTS:  # the unpacked item of an enumerate, say
            return _Element(container, of)
        return _Element(container, next((c for c in children if id(c) in self.path), children[0]))

    def _attribute_of_element(self, value: _Element, name: str, ran: int) -> tuple[int, Any]:
        child = value.like._modules.get(name)
        if child is not None:
            return ran, _Element(value.container, child)
        if name in value.like._parameters or name in value.like._buffers:
            return (ran, None) if id(value.container) in self.path else (self.use(value, ran), None)
        if name in _VIEWS:
            return ran, _Builtin("iter", value)
        return ran, value if name in ("forward", "__call__") or _method_of(value.like, name) else None

    def _run_path(self, module: nn.Module, ran: int) -> int:
        is_list = type(module).forward in _LISTS and "forward" not in vars(module)
        if function := None if is_list else _method_of(module, "forward"):
            self.run(function, {}, ran)
        else:
            for child in module._modules.values():
                ran = self.use(child, ran)
        return self.num_blocks

    def _call_builtin(self, callee: _Builtin, arguments: list[Any], scope: dict[str, Any], ran: int) -> tuple[int, Any]:
        if callee.name == "super":
            return ran, self.super_of(scope)
        if callee.name == "getattr":
            known = len(arguments) > 1 and isinstance(arguments[1], str)
            return self.attribute(arguments[0], arguments[1], ran) if known else (ran, None)
        if callee.name in _LOOK:
            return ran, None
        handed = [v for v in (callee.value, *arguments) if isinstance(v, (nn.Module, _Element))]
        blocks = next((v for v in handed if id(getattr(v, "container", v)) in self.path), None)
        for other in handed:
            if blocks is not None and other is not blocks:  # a list that runs along with the blocks
                self._events.append((id(getattr(other, "container", other)), BESIDE))
            elif len(handed) > 1:
                ran = self.use(other, ran)
        return ran, handed[0] if len(handed) == 1 else blocks


def modules_around(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """By id, the modules that hold ``blocks``, the outermost first."""
    ids = {id(block) for block in blocks}
    outside = _outside(module, ids)
    return {key: m for key, m in outside.items() if any(id(below) in ids for below in m.modules())}


def _outside(module: nn.Module, blocks: set[int]) -> dict[int, nn.Module]:
    """By id, the modules that can be reached without passing through a block."""
    found: dict[int, nn.Module] = {}
    todo = [module]
    while todo:
        top = todo.pop()
        if id(top) not in found and id(top) not in blocks:
            found[id(top)] = top
            todo += [child for child in reversed(top._modules.values()) if child is not None]
    return found


def _parts_of_blocks(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, int]:
    """Position of the block that a module is (in), for modules that nothing else holds."""
    index: dict[int, int] = {}
    outside = _outside(module, {id(block) for block in blocks})
    for position, block in enumerate(blocks):
        for part in block.modules():
            if id(part) not in outside:
                index.setdefault(id(part), position)
    return index


def _method_of(owner: nn.Module, name: str) -> Function | None:
    if name in vars(owner):
        return _function_of(vars(owner)[name], None)
    return _function_of(inspect.getattr_static(type(owner), name, None), owner)


def _function_of(found: Any, owner: nn.Module | None) -> Function | None:
    """Code that a user wrote, decorators taken off; ``owner`` is what a function of the class is bound to."""
    if isinstance(found, (staticmethod, classmethod)):
        owner = None
    function = inspect.unwrap(found) if callable(found) else None
    if isinstance(function, MethodType):
        owner = function.__self__ if isinstance(function.__self__, nn.Module) else None
        function = inspect.unwrap(function.__func__)
    if not isinstance(function, FunctionType) or str(function.__module__).startswith(_INHERITED):
        return None
    scope: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return Function(function.__code__, scope, owner if function.__code__.co_argcount else None)
