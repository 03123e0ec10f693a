"""What Lightning's loops need around a pipelined step: what it logged, its metrics, and what it cannot do.

[Note: what a step did]  Only the last stage runs the user's step to its end, once for each microbatch. What it logged
there is merged over microbatches and logged again, once and on every rank, so that callbacks decide alike. A metric is
updated on the last stage only; its state follows to the other stages when it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torchmetrics import Metric

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.pipeline.ghost import is_ghost
from lightning_parallel.schemes.pipeline.schedules import ScheduleSpec
from lightning_parallel.schemes.pipeline.step import Outcome
from lightning_parallel.strategies.module_state import Changes, ModuleState, kept, make_changes
from lightning_parallel.strategies.stage_metrics import StageMetrics, Updates, mean


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """The options of ``PipelineParallel``, which explains them."""

    schedule: str = "1F1B"
    microbatches: int | None = None
    virtual_stages: int | None = None
    balance: Literal["even", "cost"] = "even"
    boundaries: Sequence[str] | None = None
    batch_dims: Mapping[str, int | None] | None = None
    evaluation_microbatches: int = 1
    reduce_every_microbatch: bool = False
    measure: bool = False

    def spec(self, size: int, *, compiles: bool) -> ScheduleSpec:
        """The schedule on ``size`` ranks.

        Raises:
            ParallelConfigError: Options that do not go together, or as `ScheduleSpec.of`.
        """
        spec = ScheduleSpec.of(self.schedule, size, virtual=self.virtual_stages, microbatches=self.microbatches)
        if self.reduce_every_microbatch and spec.splits_backward:
            raise ParallelConfigError(
                f"reduce_every_microbatch: schedule={spec.name!r} computes the gradients of weights after the backward "
                "that would reduce them. Leave it False, or use 1F1B or Interleaved1F1B."
            )
        if compiles and spec.splits_backward:
            raise ParallelConfigError(
                f"schedule={spec.name!r} computes gradients of inputs and of weights apart, which a compiled block "
                "cannot. Use compile=False, or 1F1B or Interleaved1F1B."
            )
        return spec


def check_supported(module: pl.LightningModule, callbacks: Sequence[Callback]) -> None:
    """Refuse what a schedule cannot do.

    Raises:
        ParallelConfigError: Names it, with the reason.
    """
    if not module.automatic_optimization:
        raise ParallelConfigError(
            f"{type(module).__name__} uses manual optimisation. A pipeline runs the forwards and backwards of all "
            "microbatches in an order of its own, so training_step cannot call backward or step itself. Set "
            "automatic_optimization = True, or use pp=1."
        )
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            raise ParallelConfigError(
                f"{type(callback).__name__} averages the whole module on each rank, and with pp a rank has only its "
                "stages. Use pp=1, or average the weights of checkpoints after training."
            )


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Refuse more than one optimizer.

    Raises:
        ParallelConfigError: There are several.
    """
    if len(optimizers) > 1:
        raise ParallelConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers. A pipeline runs one backward for a whole "
            "batch, so one optimizer steps after it: give it parameter groups instead, or use pp=1."
        )


@dataclass(slots=True)
class Note:
    """What one microbatch did.

    Attributes:
        logged: Name, value and options of each call of ``self.log``; a metric is given by its name.
        metrics: What it did to them.
        changes: Of attributes of the module.
    """

    logged: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    metrics: Updates = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)


@dataclass(frozen=True, slots=True)
class _MetricName:
    name: str


class StepNotes:
    """Takes notes of microbatches, and replays them as one step.

    Args:
        module: The LightningModule.
        group: The ranks of one pipeline.
        source: The one with the last stage, in the world.
    """

    def __init__(self, module: pl.LightningModule, group: dist.ProcessGroup, source: int) -> None:
        self._module = module
        self._metrics = StageMetrics(module, group, source)

    @contextmanager
    def collect(self) -> Iterator[Note]:
        """Around one run of the user's step."""
        names = self._metrics.names

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            options = dict(zip(_LOG_OPTIONS, args, strict=False)) | kwargs
            if isinstance(value, Metric):
                options["metric_attribute"] = names.get(id(value), options.get("metric_attribute"))
            note.logged.append((name, _kept(value, names), options))

        with self._metrics.run() as updates:
            note = Note(metrics=updates)
            state = ModuleState(self._module)
            before = self._module.__dict__.get("log")
            self._module.__dict__["log"] = log
            try:
                yield note
            finally:
                del self._module.__dict__["log"]
                if before is not None:
                    self._module.__dict__["log"] = before
                note.changes = state.take_back()

    def replay(self, outcome: Outcome) -> None:
        """Log what the microbatches logged, once, and tell metrics that they were updated."""
        self._metrics.replay([note.metrics for note in outcome.notes], outcome.weights)
        make_changes(self._module, [note.changes for note in outcome.notes], outcome.sizes, outcome.weights)
        for name, values, options, weights in _aligned(outcome):
            self._module.log(name, self._merged(values, options, weights), **options)

    def _merged(self, values: list[Any], options: dict[str, Any], weights: list[float]) -> Any:
        first = values[0]
        if isinstance(first, _MetricName):
            return self._metrics[first.name]
        if isinstance(first, Mapping):
            return {key: self._merged([value[key] for value in values], options, weights) for key in first}
        how = options.get("reduce_fx", "mean")
        how = how if isinstance(how, str) else getattr(how, "__name__", "mean")
        if len(values) == 1:
            return first
        if how in ("sum", "max", "min"):
            stacked = torch.stack([torch.as_tensor(value) for value in values])
            return getattr(stacked, "a" + how if how != "sum" else "sum")()
        return mean(values, weights)


_LOG_OPTIONS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip


def _aligned(outcome: Outcome) -> Iterator[tuple[str, list[Any], dict[str, Any], list[float]]]:
    """Each call of ``self.log`` with its values in the microbatches that made it."""
    calls: dict[tuple[str, int], list[tuple[Any, dict[str, Any], float]]] = {}
    for note, weight in zip(outcome.notes, outcome.weights, strict=True):
        seen: dict[str, int] = {}
        for name, value, options in note.logged:
            turn = seen[name] = seen.get(name, -1) + 1
            calls.setdefault((name, turn), []).append((value, options, weight))
    for (name, _), made in calls.items():
        options = dict(made[-1][1])
        if (sizes := [o.get("batch_size") for _, o, _ in made]) and all(isinstance(size, int) for size in sizes):
            options["batch_size"] = sum(sizes)
        made_of_all = sum(weight for _, _, weight in made) / (sum(outcome.weights) or 1.0)
        weights = [weight / made_of_all if made_of_all else 0.0 for _, _, weight in made]
        yield name, [value for value, _, _ in made], options, weights


def _kept(value: Any, names: Mapping[int, str]) -> Any:
    if isinstance(value, Metric):
        if id(value) not in names:
            raise ParallelConfigError(
                "A metric was logged that is no attribute of the LightningModule, so its state has no name on the "
                "other pipeline stages. Assign it in __init__."
            )
        return _MetricName(names[id(value)])
    if isinstance(value, Mapping):
        return {key: _kept(item, names) for key, item in value.items()}
    return kept(value)


def drop_foreign_state(optimizers: Sequence[Any]) -> None:
    """State that an optimizer made at once for parameters of other stages."""
    for optimizer in optimizers:
        for parameter in [p for p in optimizer.state if is_ghost(p)]:
            del optimizer.state[parameter]
