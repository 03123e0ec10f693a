"""All the ways to lay devices out over axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def factorisations(n: int, axes: Sequence[str]) -> list[dict[str, int]]:
    """Every `{axis: size}` over `axes` whose sizes multiply to `n`, sizes of 1 included.

    >>> factorisations(4, ["fsdp", "tp"])
    [{'fsdp': 1, 'tp': 4}, {'fsdp': 2, 'tp': 2}, {'fsdp': 4, 'tp': 1}]
    """
    if not axes:
        return [{}] if n == 1 else []
    first, *rest = axes
    return [
        {first: size, **others}
        for size in range(1, n + 1)
        if n % size == 0
        for others in factorisations(n // size, rest)
    ]


def mesh_id(mesh: dict[str, int]) -> str:
    """`fsdp2-tp2`, axes of size 1 left out."""
    return "-".join(f"{axis}{size}" for axis, size in mesh.items() if size > 1) or "one"


def mesh_params(n: int, axes: Sequence[str]) -> list[Any]:
    """`factorisations` for `pytest.mark.parametrize("mesh", …)`, with readable ids."""
    return [pytest.param(mesh, id=mesh_id(mesh)) for mesh in factorisations(n, axes)]
