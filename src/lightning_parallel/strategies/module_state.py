"""What a step leaves on the LightningModule itself: a list that it appends to, a counter, a running total.

In a pipeline every stage runs parts of a step, for every microbatch, and only the last runs it to the end. So each
run's changes are taken back, and those of the last stage are merged over microbatches and made once on every stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_parallel.schemes.context.shard import gathered
from lightning_parallel.schemes.pipeline.ghost import is_ghost
from lightning_parallel.schemes.pipeline.microbatches import merge_outputs

_PLAIN = (bool, int, float, str, Tensor, type(None))
_ABSENT = object()


@dataclass(slots=True)
class Changes:
    """Of one run: items appended to lists, and attributes that were given another value."""

    appended: dict[str, list[Any]] = field(default_factory=dict)
    assigned: dict[str, Any] = field(default_factory=dict)


class ModuleState:
    """The public attributes of a module that hold numbers, tensors, texts or lists, as they are now.

    Changes in place of a tensor or a dict are not seen: they stay where they were made.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = dict(module.__dict__)
        self._lengths = {name: len(value) for name, value in self._values.items() if isinstance(value, list)}

    def take_back(self) -> Changes:
        """Undo what was changed since, and tell it."""
        changes, attributes = Changes(), self._module.__dict__
        for name, value in list(attributes.items()):
            before = self._values.get(name, _ABSENT)
            if value is before:
                if isinstance(value, list) and not name.startswith("_") and len(value) > self._lengths[name]:
                    changes.appended[name] = [kept(item) for item in value[self._lengths[name] :]]
                    del value[self._lengths[name] :]
            elif _is_watched(name, value) and not (isinstance(value, int | str) and value == before):
                changes.assigned[name] = kept(value)
                if before is _ABSENT:
                    del attributes[name]
                else:
                    attributes[name] = before
        return changes


def make_changes(module: nn.Module, runs: Sequence[Changes], sizes: Sequence[int], weights: Sequence[float]) -> None:
    """Change ``module`` once by what the runs on all microbatches did.

    Items appended by each run are merged as outputs of a step are. Of a number that each run added to, the mean by
    weight is added; the sum where a run added the number of its samples.
    """
    for name in {name for run in runs for name in run.appended}:
        lists = [run.appended.get(name, []) for run in runs]
        if len({len(items) for items in lists}) == 1:
            lists = [[merge_outputs(entry, sizes, weights) for entry in zip(*lists, strict=True)]]
        getattr(module, name).extend(chain.from_iterable(lists))
    for name in {name for run in runs for name in run.assigned}:
        values = [run.assigned[name] for run in runs if name in run.assigned]
        before = module.__dict__.get(name)
        if isinstance(before, int) and len(values) == len(sizes) and _are_counts(values, before, sizes):
            setattr(module, name, before + sum(sizes))
        elif len(values) == len(sizes) and not isinstance(values[0], int):
            setattr(module, name, merge_outputs(values, sizes, weights))
        else:
            setattr(module, name, values[-1])


def _are_counts(values: Sequence[Any], before: int, sizes: Sequence[int]) -> bool:
    added = [value - before for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return added == list(sizes)


def _is_watched(name: str, value: Any) -> bool:
    return not name.startswith("_") and isinstance(value, (*_PLAIN, list)) and not isinstance(value, nn.Module)


def kept(value: Any) -> Any:
    """A copy of a step's value without its graph; ``None`` for one that another stage has."""
    if is_ghost(value):
        return None
    if isinstance(value, Tensor):
        return gathered(value).detach().clone()
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(kept(item) for item in value)
    return value
