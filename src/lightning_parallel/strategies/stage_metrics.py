"""Metrics of torchmetrics in a pipeline: those of the last stage count, and their state follows to the other stages.

Every stage runs what a step does before it calls the model, and some run it several times. So what a run did to metrics
is undone, unless it came to the step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric

from lightning_parallel.strategies.module_state import kept

# Name of a metric to how often it was updated and its last batch value.
Updates = dict[str, tuple[int, Any]]
_OF_ALL: dict[type[Metric], Callable[..., Tensor]] = {
    SumMetric: torch.sum,
    MaxMetric: torch.amax,
    MinMetric: torch.amin,
}


class StageMetrics:
    """The metrics of a module.

    Args:
        module: The LightningModule.
        group: The ranks of one pipeline.
        source: The one with the last stage, in the world.
    """

    def __init__(self, module: LightningModule, group: dist.ProcessGroup, source: int) -> None:
        self._metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
        self._has_last = dist.get_rank() == source
        self._is_running = False
        self.names = {id(metric): name for name, metric in self._metrics.items()}
        for metric in self._metrics.values():
            _follow_last_stage(metric, self)
        self._group, self._source = group, source

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    @contextmanager
    def run(self) -> Iterator[Updates]:
        """Around one run of the user's step: fills in what it updated, or undoes it where the run did not end."""
        updates: Updates = {}
        before = {name: _state(metric) for name, metric in self._metrics.items()}
        self._is_running = True
        try:
            yield updates
        except BaseException:
            for name, state in before.items():
                self._metrics[name].__dict__.update(state)
            raise
        finally:
            self._is_running = False
        for name, metric in self._metrics.items():
            if metric._update_count != before[name]["_update_count"]:
                updates[name] = (metric._update_count, kept(metric._forward_cache))

    def replay(self, runs: Sequence[Updates], weights: Sequence[float]) -> None:
        """On every stage: metrics were updated by all ``runs``, and their last batch is the whole batch."""
        for name in {name for updates in runs for name in updates}:
            metric = self._metrics[name]
            seen = [updates[name] for updates in runs if name in updates]
            if all(value is not None for _, value in seen) and len(seen) == len(weights):
                metric._forward_cache = _of_batch(metric, [value for _, value in seen], weights)
            if not self._has_last:
                metric._update_count, metric._computed = seen[-1][0], None

    def share(self, metric: Metric) -> None:
        """The state of the last stage for all. Not in a step, whose end the last stage runs alone."""
        if self._is_running:
            return
        state = [({name: getattr(metric, name) for name in metric._defaults}, metric._update_count)]
        dist.broadcast_object_list(state, self._source, group=self._group, device=metric.device)
        if not self._has_last:
            values, metric._update_count = state[0]
            for name, value in values.items():
                setattr(metric, name, _to(value, metric.device))


class _FollowsLastStage(Metric):
    """What goes in front of a metric's class. Never instantiated."""

    _pipeline: StageMetrics

    def sync(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> None:
        """The state of the last stage, then the base's: over the data ranks."""
        if should_sync and not self._is_synced:
            self._pipeline.share(self)
        super().sync(dist_sync_fn, process_group, should_sync, distributed_available)


def _follow_last_stage(metric: Metric, pipeline: StageMetrics) -> None:
    if not isinstance(metric, _FollowsLastStage):
        kind = type(metric)
        names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__, "__doc__": kind.__doc__}
        metric.__class__ = type(kind.__name__, (_FollowsLastStage, kind), names)
    metric.__dict__["_pipeline"] = pipeline


def _state(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: kept(getattr(metric, name)) for name in names}


def _to(value: Any, device: torch.device) -> Any:
    return [item.to(device) for item in value] if isinstance(value, list) else value.to(device)


def _of_batch(metric: Metric, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """A batch's value from those of its microbatches: of a mean over samples, exactly; of a score, about."""
    reduce = next((reduce for kind, reduce in _OF_ALL.items() if isinstance(metric, kind)), None)
    if reduce is not None:
        return reduce(torch.stack([torch.as_tensor(value) for value in values]), dim=0)
    return mean(values, weights)


def mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted mean of numbers or tensors, in dicts too; the last of what has none."""
    if isinstance(values[0], Mapping):
        return {key: mean([value[key] for value in values], weights) for key in values[0]}
    if len(values) == 1 or not all(
        isinstance(v, int | float) or (isinstance(v, Tensor) and not v.is_complex()) for v in values
    ):
        return values[-1]
    shapes = {tuple(v.shape) if isinstance(v, Tensor) else () for v in values}
    return sum(v * w for v, w in zip(values, weights, strict=True)) if len(shapes) == 1 else values[-1]
