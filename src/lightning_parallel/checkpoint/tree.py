"""Nested checkpoints: dicts, lists and tuples with tensors among the leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.errors import ParallelConfigError

Path = tuple[str | int, ...]
"""Dict keys and list positions from the root to a value."""


def map_children(convert: Callable[[Any], Any], value: Any) -> Any:
    """A dict, list or tuple of the same type with ``convert`` applied to its values; anything else as it is."""
    if isinstance(value, OrderedDict):
        copy = OrderedDict((key, convert(child)) for key, child in value.items())
        vars(copy).update(vars(value))  # the versions of modules that torch attaches to a state dict
        return copy
    if isinstance(value, dict):
        return {key: convert(child) for key, child in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(convert, value))
    if type(value) in (list, tuple):
        return type(value)(map(convert, value))
    return value


def has_shards(value: Any) -> bool:
    """Whether there is a sharded tensor anywhere in ``value``."""
    if isinstance(value, dict):
        return any(map(has_shards, value.values()))
    return isinstance(value, DTensor) or (isinstance(value, list | tuple) and any(map(has_shards, value)))


def flatten(tree: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    """Name every leaf by its path, joined with dots, as torch's distributed checkpoint does.

    A dict with text keys and something in it is followed, and so is a list of dicts or tensors. Whatever else is a
    leaf, to be stored in one piece.

    Raises:
        ParallelConfigError: A sharded tensor in a leaf, or two leaves of one name.
    """
    flat: dict[str, tuple[Path, Any]] = {}
    for path, value in _leaves((), tree):
        name = ".".join(map(str, path))
        if not isinstance(value, Tensor) and has_shards(value):
            raise ParallelConfigError(
                f"The checkpoint has a sharded tensor in {name!r}, inside a tuple or under a key that is not text, "
                "where it cannot be stored as shards. Use lists, and dicts with text keys."
            )
        if name in flat:
            raise ParallelConfigError(f"The checkpoint has two values named {name!r}. Rename one of them.")
        flat[name] = (path, value)
    return flat


def set_at(root: Any, path: Path, value: Any) -> None:
    """Set the value at ``path``, making the dicts and lists on the way."""
    for part, following in zip(path, (*path[1:], None), strict=True):
        child: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(root, list):
            root.extend([None] * (int(part) + 1 - len(root)))
        if following is None:
            root[part] = value
        elif isinstance(root, list):
            root[int(part)] = child if root[int(part)] is None else root[int(part)]
            root = root[int(part)]
        else:
            root = root.setdefault(part, child)


def take_shards(value: Any) -> tuple[Any, Any]:
    """Split a value into what has sharded tensors and the rest. `put_back` joins them.

    Returns:
        The part with sharded tensors, lists in it as dicts by position, or None; and the rest, or None.
    """
    if not has_shards(value):
        return None, value
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else ((str(i), child) for i, child in enumerate(value))
        parts = {key: take_shards(child) for key, child in items}
        taken = {key: shards for key, (shards, _) in parts.items() if shards is not None}
        if isinstance(value, list):
            return taken, [rest for _, rest in parts.values()]
        left = {key: rest for key, (shards, rest) in parts.items() if shards is None or rest is not None}
        return taken, left or None
    return value, None


def put_back(rest: Any, taken: Any) -> Any:
    """Join what `take_shards` split."""
    if isinstance(rest, list) and isinstance(taken, dict):
        return [put_back(child, taken[str(i)]) if str(i) in taken else child for i, child in enumerate(rest)]
    if isinstance(rest, dict) and isinstance(taken, dict):
        return {**rest, **{key: put_back(rest.get(key), child) for key, child in taken.items()}}
    return taken


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and (not path or (value and all(isinstance(key, str) for key in value))):
        for key, child in value.items():
            yield from _leaves((*path, key), child)
    elif isinstance(value, list) and any(isinstance(child, dict | Tensor) for child in value):
        for position, child in enumerate(value):
            yield from _leaves((*path, position), child)
    else:
        yield path, value
