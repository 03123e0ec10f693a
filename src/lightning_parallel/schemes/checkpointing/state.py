"""A recomputation leaves no trace: buffers and attributes of modules are as they were, and are used as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class ChangingBuffers:
    """Which buffers a block changes in its forward: running statistics, counters of tokens an expert got.

    The first call copies every buffer and looks which have changed; later calls copy those.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._known: set[tuple[int, str]] | None = None

    @contextmanager
    def noted(self, before: dict[tuple[int, str], Tensor]) -> Iterator[None]:
        """Around a forward: puts the values that changing buffers had into ``before``."""
        seen: dict[tuple[int, str], Tensor] = {}
        for owner in self._block.modules():
            for name, buffer in owner._buffers.items():
                place = (id(owner), name)
                if buffer is not None and (self._known is None or place in self._known):
                    seen[place] = buffer
                    before[place] = buffer.detach().clone()
        yield
        if self._known is not None:
            return
        now = {(id(owner), name): b for owner in self._block.modules() for name, b in owner._buffers.items()}
        self._known = {  # by value: what batch norm does to its statistics bumps no version
            place
            for place, buffer in seen.items()
            if now.get(place) is not buffer or not torch.equal(buffer, before[place])
        }
        for place in seen.keys() - self._known:
            del before[place]


@contextmanager
def as_it_was(block: nn.Module, before: dict[tuple[int, str], Tensor]) -> Iterator[None]:
    """Around a recomputation of ``block``: it starts from ``before``, and what it does to modules is undone."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for owner in block.modules():
        saved.append((vars(owner), dict(vars(owner))))
        if owner._buffers:
            saved.append((owner._buffers, dict(owner._buffers)))
        for name in owner._buffers:
            if (value := before.get((id(owner), name))) is not None:
                owner._buffers[name] = value.clone()
    try:
        yield
    finally:
        for store, values in saved:
            for name in [name for name in store if name not in values]:
                del store[name]
            for name, value in values.items():
                if store.get(name) is not value:
                    store[name] = value
