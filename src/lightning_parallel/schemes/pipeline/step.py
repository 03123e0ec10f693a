"""One training step of a pipeline: torch's schedule over microbatches of the user's step, and its gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel._torch import HOST
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.pipeline.failures import Failure, Failures
from lightning_parallel.schemes.pipeline.foreign import missing_loss
from lightning_parallel.schemes.pipeline.ghost import Ghost
from lightning_parallel.schemes.pipeline.microbatches import copied, merge_outputs, signature, split_batch
from lightning_parallel.schemes.pipeline.random import RandomState, seed_all
from lightning_parallel.schemes.pipeline.results import Results
from lightning_parallel.schemes.pipeline.schedules import ScheduleSpec, actions_of
from lightning_parallel.schemes.pipeline.stage import Microbatch, MicrobatchStage
from lightning_parallel.schemes.pipeline.stages import Slot, StagedModule
from lightning_parallel.schemes.pipeline.timeline import Event, Timeline
from lightning_parallel.schemes.pipeline.wire import Wire
from lightning_parallel.schemes.token_weighting import TokenCounting


@dataclass(slots=True)
class Outcome:
    """What a pipelined step gives on every rank: the same everywhere.

    Attributes:
        output: What one device's step would have returned, merged over microbatches.
        notes: What ``collect`` yielded on the last stage, one a microbatch.
        sizes: Samples in each microbatch.
        weights: Of each microbatch in a mean; they add up to 1, or with weights by token to that on average over data
            ranks.
        factor: What the gradients still have to be multiplied by.
    """

    output: Any
    notes: list[Any]
    sizes: list[int]
    weights: list[float]
    factor: float = 1.0


@dataclass(slots=True)
class _Work:
    """The step that is under way."""

    weights: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    scale: float = 1.0
    is_training: bool = False
    outputs: list[Any] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    left: int = 0  # microbatches of which the last stage has no output yet
    shared: Any = None
    reference: float = 0.0  # how many tokens count as one, until all microbatches have been seen

    def count(self, index: int, tokens: Tensor | None) -> None:
        """A microbatch has run: of how many tokens its loss is the mean."""
        if tokens is None and not self.is_training:
            self.counts[index] = float(self.sizes[index])
            return
        if tokens is None:
            raise ParallelConfigError(
                "token_weighted_loss: the step takes no F.cross_entropy with reduction='mean' and class indices, so "
                "nothing tells how many tokens its loss is over. Use one, or do without the option."
            )
        self.counts[index] = tokens.item()
        self.reference = self.reference or max(self.counts[index], 1.0)


class Runner:
    """Runs steps of a staged module, forward and backward or forward alone.

    Args:
        staged: The module, with this rank's stages.
        spec: The schedule.
        group: The ranks of one pipeline.
        device: Of this rank.
        wire: How values travel.
        run_as_root: Runs a forward as FSDP's root forward.
        collect: Gives a context manager around a run of the user's step on one microbatch, which notes what the run did
            (logged, say) in the value that it yields; that of the last stage is sent to every other.
        batch_dims: See `split_batch`.
        plain: Makes what the step returns plain tensors.
        tokens: The data ranks over which, and over microbatches, a mean cross entropy is weighted by valid tokens.
        measure: Note when each computation of a training step began and ended; an accelerator is waited for.
    """

    def __init__(
        self,
        staged: StagedModule,
        spec: ScheduleSpec,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        wire: Wire,
        run_as_root: Callable[[Callable[[], Any]], Any],
        collect: Callable[[], AbstractContextManager[Any]],
        batch_dims: Mapping[str, int | None] | None = None,
        plain: Callable[[Any], Any] = lambda value: value,
        tokens: dist.ProcessGroup | None = None,
        measure: bool = False,
    ) -> None:
        self.staged, self.spec, self.group, self.device = staged, spec, group, device
        self._collect, self._batch_dims, self._plain = collect, batch_dims, plain
        self._slots: dict[Any, dict[int, list[Slot]]] = {}
        self._work = _Work()
        self._tokens = tokens
        self._events: list[Event] = []
        self._measures = measure
        self._failures = Failures(group)
        self.stages = [
            MicrobatchStage(
                staged, index, device, group, wire=wire, run_as_root=run_as_root,
                seed=partial(seed_all, device=device),
                use_output=self._use_output, observe=self._observe, fail=self._failures.add,
            )
            for index in staged.stages
        ]  # fmt: skip
        self._results = Results(group, self.last_rank, device)
        self.schedule = spec.build(self.stages, lambda output, target: output)
        for stage in self.stages:
            stage.stage_index_to_group_rank = spec.rank_of

    @property
    def last_rank(self) -> int:
        """The rank, in the group, of the last stage."""
        return self.spec.rank_of[self.spec.num_stages - 1]

    @property
    def has_last(self) -> bool:
        """Whether the last stage is on this rank."""
        return dist.get_rank(self.group) == self.last_rank

    # --- a step ---------------------------------------------------------------------------------------------------

    def train(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scale: float) -> Outcome:
        """Forward and backward on every microbatch: gradients of ``scale`` times the loss are added to ``.grad``.

        Args:
            step: The user's step; its first argument is the batch.
            args: Its arguments.
            kwargs: Its arguments.
            scale: What the loss is multiplied by before backward.

        Raises:
            ParallelConfigError: A batch that cannot be cut. On every rank.
            PlanError: The step does not call the model as a pipeline needs it.
        """
        self._events.clear()
        with self._microbatches("train", step, args, kwargs, self.spec.microbatches, scale):
            losses: list[Tensor] = []
            self.schedule.step(target=torch.arange(self.spec.microbatches), losses=losses, return_outputs=False)
        return self._share()

    def evaluate(
        self, kind: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int
    ) -> Outcome:
        """Forward alone."""
        with self._microbatches(kind, step, args, kwargs, microbatches, 1.0) as count:
            sent = []
            by_index = {stage.stage_index: stage for stage in self.stages}
            for stage in self.stages:
                stage.has_backward = False
                stage.clear_runtime_states()
            for i in range(count):
                for index in range(self.spec.num_stages):
                    if index not in by_index:
                        continue
                    stage = by_index[index]
                    if index > 0 and index - 1 not in by_index:
                        for operation in stage.get_fwd_recv_ops(i):
                            _wait(operation)
                    output = stage.forward_one_chunk(i, ())
                    if index + 1 in by_index:
                        by_index[index + 1].set_local_fwd_input(output, i)
                    elif not stage.is_last:
                        sent += [_start(operation) for operation in stage.get_fwd_send_ops(i)]
                    stage.fwd_cache.pop(i, None)
            for work in sent:
                work.wait()
        return self._share()

    @contextmanager
    def _microbatches(
        self,
        kind: str,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        most: int,
        scale: float,
    ) -> Iterator[int]:
        self._failures.begin()
        batch, *rest = args or (kwargs.pop(next(iter(kwargs))),)
        pieces, sizes = split_batch(batch, most, self._batch_dims)
        seed = int(torch.randint(2**62, ()))  # the same on all stages, whose streams are kept in step
        state = RandomState.take(self.device)
        try:
            setting = (kind, self.staged.module.training, torch.is_grad_enabled())
            jobs = [
                Microbatch(
                    partial(self._collected, i, lambda piece: step(piece, *rest, **kwargs), piece),
                    (*setting, signature(piece)),
                    seed + i * 1_000_003,
                )
                for i, piece in enumerate(pieces)
            ]
            total = sum(sizes)
            self._work = _Work([size / total for size in sizes], sizes, scale, kind == "train")
            self._work.outputs, self._work.notes = [None] * len(jobs), [None] * len(jobs)
            self._work.counts, self._work.left = [0.0] * len(jobs), len(jobs)
            slots = [self._slots_of(job) for job in jobs]
            padded = [*jobs, *[None] * (most - len(jobs))]
            for stage in self.stages:
                stage.set_microbatches(
                    padded,
                    [*(s.get(stage.stage_index, []) for s in slots), *[[]] * (most - len(jobs))],
                    [*(s.get(stage.stage_index + 1, []) for s in slots), *[[]] * (most - len(jobs))],
                )
            yield len(jobs)
        finally:
            state.give_back()

    def _collected(self, index: int, step: Callable[[Any], Any], piece: Any) -> Any:
        counting = TokenCounting() if self._tokens else nullcontext()
        with self._collect() as taken, counting as tokens, self.staged.buffers.changes() as changed:
            output = step(copied(piece))
        self._work.buffers.update(changed)
        self._work.notes[index] = taken  # not reached where the next stage goes on
        if tokens is not None:
            self._work.count(index, tokens.count)
        return output

    def _slots_of(self, job: Microbatch) -> dict[int, list[Slot]]:
        """Stage to what it must receive; ranks tell each other where a kind of microbatch is new."""
        if job.signature not in self._slots:
            mine: dict[int, list[Slot] | Failure] = {}
            errors: dict[int, Exception] = {}
            for stage in self.staged.stages:
                if stage == 0:
                    continue
                seed_all(job.seed, self.device)
                try:
                    mine[stage] = self.staged.find_slots(stage, job.call, job.signature)
                except Exception as error:
                    mine[stage], errors[stage] = Failure.of(stage, error), error
            everyone: list[Any] = [None] * self.spec.size
            dist.all_gather_object(everyone, mine, group=self.group)
            found: dict[int, list[Slot]] = {}
            for part in everyone:
                for stage, slots in part.items():
                    if isinstance(slots, Failure):
                        raise slots.error(errors.get(stage))
                    found[stage] = slots
            if len(self._slots) > 1024:
                self._slots.clear()
            self._slots[job.signature] = found
        return self._slots[job.signature]

    def _use_output(self, index: int, output: Any) -> Tensor:
        """On the last stage: keep what the step returned, and give what to run backward from."""
        work = self._work
        output = self._plain(output)
        work.outputs[index] = _detached(output)
        work.left -= 1
        if not work.is_training:
            return torch.zeros(())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Ghost):
            raise missing_loss(loss.origin, [name for blocks in self.staged.split.blocks for name in blocks])
        if not isinstance(loss, Tensor):
            raise ParallelConfigError(
                f"training_step returned {type(output).__name__} for a microbatch. In a pipeline it returns the loss, "
                "or a dict with it under 'loss', for every batch."
            )
        if self._tokens:
            factor = work.counts[index] / work.reference * work.scale
        else:
            factor = work.weights[index] * work.scale
        # At once, so that no rank waits for the end of the last one. Not where an accelerator has yet to compute this,
        # or other data ranks have a say.
        if not work.left and self.device.index is None and not self._tokens:
            self._send()
        return loss if factor == 1 else loss * factor

    def _share(self) -> Outcome:
        """From the last stage to every other."""
        work = self._work
        if self.has_last and work.shared is None:
            self._send()
        shared = work.shared if self.has_last else self._results.receive()
        if isinstance(shared, Failure) and self.has_last:
            self._results.wait()  # before this process ends
        self._failures.raise_own(shared)
        output, notes, weights, factor, buffers = shared
        if not self.has_last:
            self.staged.buffers.follow(_on(buffers, self.device))
        return Outcome(_on(output, self.device), _on(notes, self.device), work.sizes, weights, factor)

    def _send(self) -> None:
        """On the last stage, after its last forward."""
        work = self._work
        if not (failure := self._failures.first()):
            try:
                factor = self._weigh_by_tokens() if self._tokens else 1.0
                merged = merge_outputs(work.outputs, work.sizes, work.weights)
                work.shared = _on((merged, work.notes, work.weights, factor, work.buffers), HOST)
            except Exception as error:
                self._failures.add(self.spec.num_stages - 1, error)
                failure = self._failures.first()
        work.shared = failure or work.shared
        self._results.send(work.shared)

    def _weigh_by_tokens(self) -> float:
        """Now that all have been seen: weights by tokens, and what turns the gradients into those of the mean."""
        work = self._work
        total = torch.tensor(sum(work.counts), dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self._tokens)
        mean = total.item() / dist.get_world_size(self._tokens)  # tokens of a data rank
        work.weights = [count / mean if mean else 0.0 for count in work.counts]
        return work.reference / mean if mean else 0.0

    def planned(self) -> Timeline:
        """The schedule as it is meant: a backward takes twice as long as a forward, sending nothing."""
        return Timeline.plan(actions_of(self.spec, self.schedule))

    def measured(self) -> Timeline:
        """The last training step. A collective of the pipeline's ranks."""
        if not self._measures:
            raise ParallelConfigError("Nothing was measured: pass PipelineParallel(measure=True).")
        everyone: list[Any] = [None] * self.spec.size
        dist.all_gather_object(everyone, self._events, group=self.group)
        return Timeline.measured([event for events in everyone for event in events])

    @contextmanager
    def _observe(self, stage: int, kind: str, microbatch: int) -> Iterator[None]:
        if not self._measures or not self._work.is_training:
            yield
            return
        start = time.time()  # the clock that processes share
        yield
        if self.device.index is not None:
            torch.get_device_module(self.device).synchronize(self.device)
        self._events.append(Event(self.spec.rank_of[stage], stage, kind, microbatch, start, time.time()))


def _detached(value: Any) -> Any:
    if isinstance(value, Ghost):
        return None
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_detached(item) for item in value)
    return value


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) is dict:
        return {key: _on(item, device) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_on(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):  # the notes of a microbatch
        return replace(value, **{part.name: _on(getattr(value, part.name), device) for part in fields(value)})
    return value


def _start(operation: dist.P2POp) -> Any:
    return operation.op(operation.tensor, group=operation.group, group_dst=operation.group_peer)


def _wait(operation: dist.P2POp) -> None:
    operation.op(operation.tensor, group=operation.group, group_src=operation.group_peer).wait()
