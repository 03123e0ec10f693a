"""A walk over a function's bytecode that runs nothing and keeps track of the values that are known.

Written for CPython 3.11 and later: loads, stores, attributes, items, loops and calls are understood; what any other
instruction consumes follows from its effect on the stack's depth. All branches are taken, each with what had run
before it. A value that cannot be known is left out, so no use is invented.
"""

from __future__ import annotations

import dis
from dataclasses import dataclass, field
from itertools import chain
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lightning_parallel.schemes.pipeline.uses import CodeReader

_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME")  # and their variants
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME")
_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", *_JUMPS)
_NOTHING = frozenset({
    "NOP", "RESUME", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS", "EXTENDED_ARG", "CACHE", "PRECALL", "NOT_TAKEN",
    "PUSH_NULL", "TO_BOOL", "RETURN_GENERATOR", "GET_YIELD_FROM_ITER", *_JUMPS,
})  # fmt: skip
_PUSH_NOTHING = ("STORE_", "POP_", "LIST_", "SET_", "MAP_", "DICT_", "DELETE_", "JUMP_", "END_")
# They only move a value, drop it or look whether it is there.
_NO_USE = (*_ENDS, "STORE_", "POP_", "DELETE_", "JUMP_", "END_", "IS_OP", "CONTAINS_OP", "COMPARE_OP", "UNARY_NOT")


@dataclass(frozen=True, slots=True)
class Function:
    """Python code to be called: a method (``owner`` is its first argument) or a nested function."""

    code: CodeType
    scope: dict[str, Any]
    owner: nn.Module | None = None


@dataclass(slots=True)
class _State:
    """Before an instruction: the stack's depth, how many blocks have run, the known values by their place from 1."""

    depth: int
    ran: int
    stack: dict[int, Any] = field(default_factory=dict)

    def at(self, depth: int) -> _State:
        return _State(depth, self.ran, {place: value for place, value in self.stack.items() if place <= depth})

    def joined(self, other: _State) -> _State:
        return _State(self.depth, max(self.ran, other.ran), {**other.stack, **self.stack})


def walk(reader: CodeReader, code: CodeType, scope: dict[str, Any], ran: int) -> tuple[int, Any]:
    """Tell ``reader`` of every use in ``code``.

    Args:
        reader: Knows what attributes and items are, and follows calls.
        code: Of a function or a comprehension.
        scope: The local variables that are known.
        ran: How many blocks have run before.

    Returns:
        How many have run after, and the result where it is known.
    """
    frame = _Frame(reader, scope)
    state: _State | None = _State(0, ran)
    arrivals: dict[int, list[tuple[int, _State]]] = {}  # by target, the jumps there: from where, in which state
    events_at: dict[int, int] = {}
    loops: list[tuple[int, int]] = []
    result: Any = None
    ops = list(dis.get_instructions(code))
    for op, following in zip(ops, [*ops[1:], None], strict=True):
        frame.is_dropped = following is not None and following.opname == "POP_TOP"
        events_at[op.offset] = reader.num_events
        for _, arrived in arrivals.pop(op.offset, []):
            state = state.joined(arrived) if state else arrived
        if state is None:  # a handler of exceptions, or what follows a return
            continue
        before = state
        if op.opname == "RETURN_VALUE":
            ran, result = max(ran, before.ran), before.stack.get(before.depth, result)
        elif op.opname == "RETURN_CONST":
            ran = max(ran, before.ran)
        if op.opcode in dis.hasjrel and op.argval > op.offset:
            there = before.at(before.depth + dis.stack_effect(op.opcode, op.arg, jump=True))
            arrivals.setdefault(op.argval, []).append((op.offset, there))
        elif op.opcode in dis.hasjrel:
            loops.append((op.argval, op.offset))
            for source, left in chain.from_iterable(arrivals.values()):
                if source >= op.argval:  # after the loop, its body has run
                    left.ran = max(left.ran, before.ran)
        state = frame.step(op, before, before.depth + dis.stack_effect(op.opcode, op.arg, jump=False))
        if op.opname in _ENDS:
            state = None
    for start, end in sorted(loops, key=lambda loop: loop[1] - loop[0]):  # the innermost first
        reader.end_loop(events_at[start], events_at[end])
    return ran, result


class _Frame:
    """What one instruction does to the stack and the local variables."""

    def __init__(self, reader: CodeReader, scope: dict[str, Any]) -> None:
        self.reader, self.scope = reader, scope
        self.is_dropped = False  # the result of this instruction
        self._named = False  # the next call has keyword arguments (3.11, 3.12)

    def step(self, op: dis.Instruction, state: _State, depth: int) -> _State:
        """The state after ``op``; ``depth`` is the stack's then."""
        name, before, ran = op.opname, state.depth, state.ran
        stack = dict(state.stack)
        if name in _NOTHING:
            self._named |= name == "KW_NAMES"
            return _State(depth, ran, stack)  # PRECALL: the arguments stay known
        top = stack.get(before)
        pushed: dict[int, Any] = {}
        if name.startswith(_LOADS):
            names = op.argval if isinstance(op.argval, tuple) else (op.argval,)
            pushed = {before + i: self.scope.get(n) for i, n in enumerate(names, 1)}
        elif name == "LOAD_GLOBAL":  # with the empty place that a call wants, before it or (from 3.13) after
            pushed = dict.fromkeys(range(before + 1, depth + 1), self.reader.builtin(op.argval))
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            pushed = {depth: op.argval if isinstance(op.argval, (CodeType, str, int, slice)) else None}
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            ran, pushed[before] = self.reader.attribute(top, op.argval, ran)
        elif name == "LOAD_SUPER_ATTR":
            ran, pushed[before - 2] = self.reader.attribute(self.reader.super_of(self.scope), op.argval, ran)
        elif name.startswith(_STORES):
            names = op.argval if isinstance(op.argval, tuple) else (op.argval,)
            self.scope[names[0]] = None if isinstance(top, int) else top  # a counter changes in its loop
            if "LOAD" in name:
                pushed[before] = self.scope.get(names[1])
            elif len(names) > 1:
                self.scope[names[1]] = stack.get(before - 1)
        elif name == "SWAP":
            other = before - op.arg + 1  # type: ignore[operator]
            pushed = {before: stack.get(other), other: top}
        elif name == "COPY":
            pushed[depth] = stack.get(before - op.arg + 1)  # type: ignore[operator]
        elif name in ("UNPACK_SEQUENCE", "UNPACK_EX"):
            ran, item = self.reader.iterate(top, ran)
            pushed = dict.fromkeys(range(before, depth + 1), item)
        elif name == "GET_ITER":
            ran, pushed[depth] = self.reader.iterate(top, ran)
        elif name in ("FOR_ITER", "SET_FUNCTION_ATTRIBUTE"):
            pushed[depth] = top
        elif name == "MAKE_FUNCTION":
            pushed[depth] = Function(top, self.scope) if isinstance(top, CodeType) else None
        elif name in ("BUILD_SLICE", "BINARY_SLICE", "BINARY_SUBSCR") or (name == "BINARY_OP" and "[" in op.argrepr):
            index = slice(None) if name.endswith("SLICE") else stack.get(before)
            container = None if name == "BUILD_SLICE" else stack.get(depth)
            ran, pushed[depth] = (ran, index) if name == "BUILD_SLICE" else self.reader.item(container, index, ran)
        elif name in _CALLS:
            ran, pushed[depth] = self._call(name, op.arg or 0, stack, before, depth, ran)
        elif not name.startswith(_NO_USE):
            for place in range(depth + name.startswith(_PUSH_NOTHING), before + 1):
                ran = self.reader.use(stack.get(place), ran)
        if not pushed and not name.startswith(_PUSH_NOTHING):
            pushed[depth] = None  # a result that is not known
        kept = {place: value for place, value in stack.items() if place <= depth}
        kept |= pushed
        return _State(depth, ran, {place: value for place, value in kept.items() if value is not None})

    def _call(
        self, name: str, num_arguments: int, stack: dict[int, Any], before: int, place: int, ran: int
    ) -> tuple[int, Any]:
        """The called is at ``place`` (a method, or from 3.13 anything) or above it; arguments follow from two above."""
        callee = stack.get(place, stack.get(place + 1))
        named, self._named = self._named or name != "CALL", False
        num_arguments = before - place - 1 if name == "CALL_FUNCTION_EX" else num_arguments
        arguments = [stack.get(i) for i in range(place + 2, place + 2 + num_arguments)]
        beside = stack.get(place + 1)
        if not arguments and place in stack and beside is not callee:
            arguments = [beside]  # a comprehension's iterator
        if self.is_dropped and isinstance(callee, (Function, nn.Module)):
            return ran, None  # it sets something, as the step needs no value from it
        return self.reader.call(callee, arguments, named, self.scope, ran)
