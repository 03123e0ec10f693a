"""What a call is made with: its tuples, lists and dicts, and the places in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import is_dataclass
from typing import Any

from lightning_parallel.schemes.pipeline.ghost import Ghost

Path = tuple[Any, ...]


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves of tuples, lists, dicts and dataclasses with where they stand; any other object is one leaf."""
    if isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from walk(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, (*path, key))
    elif is_dataclass(value) and not isinstance(value, type):
        for key in value.__dataclass_fields__:
            yield from walk(getattr(value, key), (*path, key))
    else:
        yield path, value


def replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists, dicts and dataclasses with ``change`` applied to their leaves."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replace(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(replace(item, change) for item in value)
    if type(value) is dict:
        return {key: replace(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type | dict):
        copied = copy(value)
        for key in value.__dataclass_fields__:
            object.__setattr__(copied, key, replace(getattr(value, key), change))
        return copied
    return change(value)


def shown(path: Path) -> str:
    """A slot's place, as a caller would write it: ``(0, 1)`` is the second positional argument."""
    kind, first, *rest = path
    head = f"argument {first}" if kind == 0 else f"argument {first!r}"
    return head + "".join(f"[{part!r}]" for part in rest)


def template(output: Any, arguments: Any) -> Callable[[Any], Any] | None:
    """How to make the same output again from other arguments; ``None`` where it holds something made for this call."""
    places = {id(value): path for path, value in walk(arguments) if value is not None and not isinstance(value, int)}
    for _, value in walk(output):
        known = value is None or isinstance(value, Ghost | bool | int | float | str)
        if not known and id(value) not in places:
            return None

    def make(current: Any) -> Any:
        here = dict(walk(current))

        def again(value: Any) -> Any:
            if id(value) in places:
                return here[places[id(value)]]
            return Ghost(value._fake, value._origin, is_shared=True) if isinstance(value, Ghost) else value

        return replace(output, again)

    return make
