"""Strategies, and other objects that do not pickle, as plain data that a worker turns into the object."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

# ("HybridParallel", {"fsdp": 2, "tp": ("TensorParallel", {"size": 2})}), or a function that makes the object.
Spec = tuple[str, Mapping[str, Any]] | Callable[[], Any]

_HOMES = ("lightning.pytorch.strategies", "lightning.pytorch.callbacks", "lightning_parallel")


def build(value: Any) -> Any:
    """Make what a spec names, nested specs included; anything else is returned as it is.

    A name is looked up among Lightning's strategies and callbacks, then in lightning_parallel; `"module:Name"`
    names any other class.
    """
    if _is_spec(value):
        name, arguments = value
        return _find(name)(**{key: build(argument) for key, argument in arguments.items()})
    if isinstance(value, list):
        return [build(item) for item in value]
    return value


def build_strategy(spec: Spec) -> Any:
    return spec() if callable(spec) else build(spec)


def describe(spec: Any) -> str:
    """As one would write it: `HybridParallel(fsdp=2, tp=2)`."""
    if _is_spec(spec):
        name, arguments = spec
        shown = ", ".join(f"{key}={describe(value)}" for key, value in arguments.items() if key != "plan")
        return f"{name.rpartition(':')[2]}({shown})"
    return getattr(spec, "__name__", None) or repr(spec)


def _is_spec(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], Mapping)


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(":")
    for home in [module] if module else _HOMES:
        found = getattr(importlib.import_module(home), attribute, None)
        if found is not None:
            return found
    raise LookupError(f"{attribute!r} is in none of {', '.join([module] if module else _HOMES)}")
