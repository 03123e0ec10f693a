"""Who runs forward and backward: here, Lightning does, and ``EagerStep`` prepares the module around it.

[Note: the root's life]  What no block holds (embeddings, head, final norm) is one FSDP unit, the root's. It is gathered
when a step begins, so that ``training_step`` may use any part of the module in any way, and given back when backward
ends. FSDP learns of a backward from the *output* of the root's forward. A step whose backward comes after it (automatic
optimisation) is therefore run as the root's forward. A backward inside the step (manual optimisation) gets its loss
passed through a forward of its own, ``EagerStep.seen_by_root``. After it, and outside any step (a hook that samples
from the model), each module that uses the root's parameters gathers them on demand; outside, it gives them back.
``reshard`` drops the copies after every optimizer step, lest a later forward computes with old weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel._torch import reduce_fully_sharded, tree_map
from lightning_parallel.errors import ParallelConfigError, PlanError
from lightning_parallel.recipe import Parallelized
from lightning_parallel.schemes.context.shard import gathered
from lightning_parallel.schemes.data import reduce_partial_gradients, sum_over
from lightning_parallel.schemes.pipeline.ghost import is_ghost
from lightning_parallel.schemes.pipeline.step import Outcome, Runner
from lightning_parallel.schemes.tensor.lazy import LazyShard
from lightning_parallel.schemes.tensor.modules import global_view
from lightning_parallel.schemes.token_weighting import TokenWeighting

_ROOT_FORWARD = "_lightning_parallel_root_forward"


class EagerStep:
    """Runs steps and backwards of a parallelised module.

    Args:
        module: The LightningModule, after ``parallelize``.
        parallelized: What ``parallelize`` returned.
        token_group: The data ranks, to weight the loss by tokens over them.
    """

    def __init__(
        self, module: nn.Module, parallelized: Parallelized, token_group: dist.ProcessGroup | None = None
    ) -> None:
        self.module, self.parallelized, self._token_group = module, parallelized, token_group
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        self._root = module if isinstance(module, FSDPModule) else None
        self._job: Callable[[], Any] | None = None
        self._depth = self._owners_running = 0
        self._sync = True
        if self._root is not None:
            self._prepare_root(self._root)

    def _prepare_root(self, root: FSDPModule) -> None:
        assert isinstance(root, nn.Module)
        setattr(root, _ROOT_FORWARD, self._run_job)
        register_fsdp_forward_method(root, _ROOT_FORWARD)
        self._as_root_forward(lambda: None)  # the first unit that runs becomes FSDP's root: this one
        self.reshard()
        below = {
            id(child)
            for block in self.parallelized.blocks
            if isinstance(block, FSDPModule)
            for child in block.modules()
        }
        for owner in root.modules():
            if owner is not root and id(owner) not in below and any(p is not None for p in owner._parameters.values()):
                owner.register_forward_pre_hook(self._enter_owner, prepend=True)
                owner.register_forward_hook(self._leave_owner, always_call=True)

    def _enter_owner(self, *_: Any) -> None:
        assert self._root is not None
        self._owners_running += 1
        self._root.unshard()

    def _leave_owner(self, *_: Any) -> None:
        self._owners_running -= 1
        is_sampling = not self._depth and not torch.is_grad_enabled()
        if is_sampling and not self._owners_running:
            self.reshard()  # the next hook wants shards and their gradients from parameters()

    def _run_job(self) -> Any:
        job, self._job = self._job, None
        return job() if job else None

    def _as_root_forward(self, job: Callable[[], Any]) -> Any:
        """Run ``job`` as the root's forward. It takes no tensor: FSDP would tie the end of backward to it."""
        if context := self.parallelized.context:
            context.begin_forward()
        if self._root is None:
            return job()
        self._job = job
        return getattr(self._root, _ROOT_FORWARD)()

    @contextmanager
    def _rules(self, batch: Any = None, *, has_backward: bool = False) -> Iterator[None]:
        """What must hold while the module computes, on a new batch or still on the last."""
        context = self.parallelized.context
        with (
            global_view() if self.parallelized.is_split else nullcontext(),
            context.running(has_backward=has_backward, batch=batch) if context else nullcontext(),
        ):
            yield

    def run(
        self, kind: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keep_gathered: bool
    ) -> Any:
        """One step of the user's; DTensors in what it returns become plain tensors.

        Args:
            kind: Training, validation, test or predict.
            step: What runs it.
            args: Its arguments, the batch first.
            kwargs: Its arguments.
            keep_gathered: A backward follows, which gives the root's parameters back; otherwise it is done here.
        """
        self._depth += 1
        try:
            with self._rules((args, kwargs)), TokenWeighting(self._token_group) if self._token_group else nullcontext():
                output = tree_map(plain, self._as_root_forward(partial(step, *args, **kwargs)))
        finally:
            self._depth -= 1
        if not keep_gathered or not _has_graph(output):
            self.reshard()
        return output

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward: reductions are started and, at the end, complete."""
        reducer = self.parallelized.reducer
        if reducer:
            reducer.start()
        with self._rules(has_backward=True):
            yield
        if reducer:
            reducer.finish()
        if self._sync and self.parallelized.is_split and self.parallelized.unsharded:
            # FSDP sums over tp what it shards; this is for the rest.
            reduce_partial_gradients(self.parallelized.unsharded)

    def seen_by_root(self, loss: Tensor) -> Tensor:
        """The loss of a backward inside a step, as an output of the root."""
        return self._as_root_forward(lambda: loss) if self._depth else loss

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Backwards in here add up gradients on each rank; the next one outside reduces the sum."""
        reducer, sharded = self.parallelized.reducer, self._root
        self._sync = False
        if reducer:
            reducer.enabled = False
        if sharded is not None:
            sharded.set_requires_gradient_sync(False)
            sharded.set_reshard_after_backward(not self.parallelized.keeps_whole)
        try:
            yield
        finally:
            self._sync = True
            if reducer:
                reducer.enabled = True
            if sharded is not None:
                sharded.set_requires_gradient_sync(True)
                sharded.set_reshard_after_backward(True)

    def reshard(self) -> None:
        """Drop gathered copies of parameters, so that ``parameters()`` are the shards and nothing is stale."""
        for unit in self._units:
            unit.reshard()

    def before_optimizer_step(self) -> None:
        """A second optimizer of one step: hooks find gradients on ``parameters()``, which the first had gathered."""
        if self._depth:
            self.reshard()

    def after_optimizer_step(self) -> None:
        """Weights changed: gathered copies are old."""
        self.reshard()
        if self._depth and self._root is not None:
            self._root.unshard()


class PipelineStep(EagerStep):
    """Runs each step as a schedule over microbatches, forward and backward in one go.

    [Note: set aside]  Lightning calls ``training_step``, then ``zero_grad``, then ``backward``. By then a schedule has
    run backward already. So what it added to plain parameters is set aside when ``training_step`` ends, and given back
    in ``backward``; what FSDP holds lies on gathered parameters, which ``zero_grad`` does not see, until it is reduced
    there. The returned loss has a graph of one node, which tells by what the loss was scaled on the way.

    Args:
        module: The LightningModule, after ``parallelize``.
        parallelized: What ``parallelize`` returned.
        make_runner: Makes the `Runner`, given what runs a forward as FSDP's root forward.
        tie_groups: Ranks of one pipeline to the group that sums the gradients of what they share.
        loss_scale: What Lightning will have multiplied the loss by before backward.
        evaluation_microbatches: Into how many a batch is cut where nothing is trained.
        reduces_each_step: FSDP reduces gradients in each step, not once a window: each has a factor of its own.
        reduces_each_microbatch: FSDP reduces gradients in each backward.
    """

    def __init__(
        self,
        module: nn.Module,
        parallelized: Parallelized,
        make_runner: Callable[[Callable[[Callable[[], Any]], Any]], Runner],
        *,
        tie_groups: Mapping[frozenset[int], dist.ProcessGroup],
        loss_scale: Callable[[], float],
        evaluation_microbatches: int = 1,
        reduces_each_step: bool = False,
        reduces_each_microbatch: bool = False,
    ) -> None:
        super().__init__(module, parallelized)
        self._reduces_each_step = reduces_each_step or reduces_each_microbatch
        self._reduces_each_microbatch = reduces_each_microbatch
        self.runner = make_runner(self._run_forward)
        self._tie_groups, self._loss_scale = tie_groups, loss_scale
        self._evaluation_microbatches = evaluation_microbatches
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._graph: _Scale | None = None
        self.runner.staged.call_outside = self._call_outside
        self.on_outcome: Callable[[Outcome], None] = lambda outcome: None
        if parallelized.reducer:
            parallelized.reducer.enabled = False  # until a window ends

    def run(
        self, kind: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keep_gathered: bool
    ) -> Any:
        """One step of the user's on all microbatches; what it returns is the same on every stage."""
        self._depth += 1
        is_training = kind == "training"
        plain_ones = self.parallelized.unsharded
        if self._reduces_each_step:
            self.reshard()
            plain_ones = [p for p in self.module.parameters() if not is_ghost(p)]
        before = [(p, p.grad) for p in plain_ones] if is_training else []
        for parameter, _ in before:
            parameter.grad = None
        try:
            with self._rules((args, kwargs), has_backward=True), self._gathered():
                if is_training:
                    scale = self._loss_scale()
                    outcome = self.runner.train(step, args, kwargs, scale)
                    if self._reduces_each_step:
                        self._reduce_sharded()
                        self.reshard()
                else:
                    most = 1 if kind == "call" else self._evaluation_microbatches
                    outcome = self.runner.evaluate(kind, step, args, kwargs, most)
        finally:
            self._depth -= 1
            if is_training:
                self._aside = [(p, p.grad) for p, _ in before if p.grad is not None]
            for parameter, gradient in before:
                parameter.grad = gradient
        self.on_outcome(outcome)
        if not is_training:
            self.reshard()
            return outcome.output
        for _, gradient in self._aside if outcome.factor != 1 else []:
            gradient.mul_(outcome.factor)
        return self._with_graph(outcome.output, scale)

    def _call_outside(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model, called by every rank outside of a step (a callback that samples): its output on every stage."""
        if torch.is_grad_enabled():
            raise PlanError(
                "The model was called outside of a step with gradients enabled. It is split into pipeline stages, and "
                "what it returns there has no graph: call it under torch.no_grad()."
            )
        return self.run("call", lambda given: model(*given[0], **given[1]), ((args, kwargs),), {}, keep_gathered=False)

    def _with_graph(self, output: Any, scale: float) -> Any:
        self._graph = _Scale(scale)
        if isinstance(output, Mapping):
            return {**output, "loss": self._graph.attach(output["loss"])}
        return self._graph.attach(output)

    def _run_forward(self, job: Callable[[], Any]) -> Any:
        """A forward of one microbatch. FSDP need not see its output: the schedule's end reduces what backwards left."""
        output: list[Any] = []
        self._as_root_forward(lambda: output.append(job()))
        if self._root is not None and torch.is_grad_enabled():
            # A step that calls self(batch) has ended the root's forward twice, and FSDP drops gathered parameters at
            # the second. A backward for weights alone would not find them.
            self._root.unshard()
        return output.pop()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Parameters stay gathered, and gradients unreduced, until the schedule has ended."""
        for unit in self._units:
            unit.unshard()
        if self._root is not None:
            self._root.set_is_last_backward(self._reduces_each_microbatch)
            self._root.set_reshard_after_backward(False)
            self._root.set_requires_gradient_sync(self._reduces_each_microbatch)
        yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of the loss: gives back what the schedule computed, reduced where a window ends."""
        yield
        assert self._graph is not None
        factor = self._graph.factor()
        for parameter, gradient in self._aside:
            if factor != 1:
                gradient.mul_(factor)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._aside = []
        if factor != 1 and self._root is not None and not self._reduces_each_step:
            raise ParallelConfigError(
                f"The loss was multiplied by {factor} between training_step and backward. With pp and fsdp the "
                "gradients exist by then: multiply it in training_step."
            )
        if self._sync:
            self._reduce()
        self.reshard()

    def _reduce_sharded(self) -> None:
        if self._root is not None:
            self._root.set_is_last_backward(True)
            self._root.set_reshard_after_backward(True)
            self._root.set_requires_gradient_sync(True)
            reduce_fully_sharded(self._root)

    def _reduce(self) -> None:
        if not self._reduces_each_step:
            self._reduce_sharded()
        if (reducer := self.parallelized.reducer) is not None:
            reducer.enabled = True
            reducer.start()
            reducer.finish()
            reducer.enabled = False
        if self.parallelized.is_split and self.parallelized.unsharded:
            reduce_partial_gradients(self.parallelized.unsharded)
        for ranks, parameters in self.parallelized.ties.items():
            sum_over(self._tie_groups[ranks], parameters)

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Backwards in here add up gradients on each rank; the next one outside reduces the sum."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def seen_by_root(self, loss: Tensor) -> Tensor:
        """The loss as it is."""
        return loss


class _Scale:
    """A graph of one node in front of a loss that has been through backward; knows what the loss was multiplied by."""

    def __init__(self, expected: float) -> None:
        self._expected = expected
        self._seen: Tensor | None = None

    def attach(self, loss: Tensor) -> Tensor:
        """The same value, as if a backward were to come."""
        leaf = torch.ones((), device=loss.device, requires_grad=True)
        leaf.register_hook(self._see)
        return loss.detach() + (leaf - leaf.detach()).to(loss.dtype)

    def _see(self, gradient: Tensor) -> None:
        self._seen = gradient

    def factor(self) -> float:
        """What the gradients still have to be multiplied by."""
        if self._seen is None:
            raise ParallelConfigError(
                "backward was called on something else than the loss that training_step returned. A pipelined step has "
                "run its backward already; return the loss to be trained."
            )
        ratio = self._seen.item() / self._expected
        return 1.0 if abs(ratio - 1) < 1e-6 else ratio


def plain(value: Any) -> Any:
    """A DTensor, or a tensor in rows, as the plain full tensor, the same on every rank; anything else as it is."""
    value = gathered(value)
    if isinstance(value, LazyShard):
        return value.full()
    if isinstance(value, DTensor):
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
    return value


def _has_graph(output: Any) -> bool:
    values = output.values() if isinstance(output, dict) else [output]
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)
