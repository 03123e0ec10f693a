"""Buffers outside the blocks, which every stage has: a step that changes them changes them on all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_parallel.schemes.pipeline.ghost import is_ghost
from lightning_parallel.schemes.pipeline.split import StageSplit


class SharedBuffers:
    """What each microbatch does to them on the last stage, the others take over when the step has ended.

    Args:
        module: The LightningModule.
        split: What belongs to which stage.
    """

    def __init__(self, module: nn.Module, split: StageSplit) -> None:
        self._places: dict[str, tuple[dict[str, Tensor | None], str]] = {
            f"{site.module}.{site.name}".lstrip("."): (module.get_submodule(site.module)._buffers, site.name)
            for site, stages in split.sites.items()
            if site.is_buffer and len(stages) == split.num_stages > 1
        }

    def _now(self) -> dict[str, Tensor]:
        found = {name: store.get(attribute) for name, (store, attribute) in self._places.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None and not is_ghost(buffer)}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around a run that only looks."""
        before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in self._now().items()}
        try:
            yield
        finally:
            for name, (buffer, version, values) in before.items():
                store, attribute = self._places[name]
                store[attribute] = buffer if buffer._version == version else values

    @contextmanager
    def changes(self) -> Iterator[dict[str, Tensor]]:
        """Around a run: gives what it changed, once it has come to its end."""
        before = {name: (buffer, buffer._version) for name, buffer in self._now().items()}
        found: dict[str, Tensor] = {}
        yield found
        for name, buffer in self._now().items():
            old, version = before.get(name, (None, 0))
            if buffer is not old or buffer._version != version:
                found[name] = buffer.detach()

    def follow(self, values: Mapping[str, Tensor]) -> None:
        """Take over what the last stage has."""
        with torch.no_grad():
            for name, value in values.items():
                store, attribute = self._places[name]
                buffer = store.get(attribute)
                if buffer is not None and buffer.shape == value.shape and not is_ghost(buffer):
                    buffer.copy_(value)
                else:
                    store[attribute] = value
