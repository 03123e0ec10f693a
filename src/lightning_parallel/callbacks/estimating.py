"""FLOPs of each batch of a run: counted on a copy, else on a real step, else by the parameters; or the user's own."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_parallel._torch import FakeTensorMode
from lightning_parallel.callbacks.batches import Extent
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.flops.counting import (
    Counted,
    FlopCounter,
    count_step,
    fake_copy,
    follow,
    is_checkpointed,
)
from lightning_parallel.flops.formulas import (
    TransformerSizes,
    matmul_flops_per_token,
    palm_flops_per_token,
    transformer_sizes,
)
from lightning_parallel.flops.operations import Causal
from lightning_parallel.schemes.checkpointing.apply import Checkpointing, checkpointing_of, take_out
from lightning_parallel.schemes.checkpointing.budget import Plan

log = logging.getLogger(__name__)

Flops = Literal["count", "palm", "palm-causal"] | float | Callable[[Any], float]

# Shapes that are counted one by one; of later ones, the nearest is scaled.
_MOST_SHAPES = 64
_TRUE_PRECISIONS = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


class Estimator:
    """Gives the FLOPs of batches.

    Attributes:
        convention: What is counted, in words, for the log.
        is_split: Ranks share samples, so that a real step of one rank is only a part.
    """

    def __init__(self, flops: Flops, causal: Causal) -> None:
        if isinstance(flops, str) and flops not in ("count", "palm", "palm-causal"):
            raise ParallelConfigError(
                f'flops={flops!r}: use "count", "palm", "palm-causal", the FLOPs of a sample, or a function of a batch.'
            )
        if causal not in ("half", "full"):
            raise ParallelConfigError(f'causal={causal!r}: use "half" or "full".')
        self._flops, self._causal = flops, causal
        self.convention = ""
        self.is_split = False
        self._copy: nn.Module | None = None
        self._of: weakref.ref[nn.Module] | None = None
        self._per_token = 0.0
        self._sizes: TransformerSizes | None = None
        self._known: dict[tuple[Any, ...], tuple[Extent, Counted]] = {}
        self._checkpointed: set[str] = set()
        self._counts_real_steps = False
        self._by_parameters = False
        self._said: set[str] = set()
        self._state: tuple[Any, ...] = ()
        self._checkpointing: Checkpointing | None = None
        self._plan: Plan | None = None
        self._real: tuple[ExitStack, FlopCounter, Extent] | None = None

    def prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Keep what is needed of the whole module, before a strategy splits or wraps it."""
        if self._of is not None and self._of() is module:  # an earlier fit has split it
            return
        self._of = weakref.ref(module)
        self._known, self._copy, self._checkpointed = {}, None, set()
        self._counts_real_steps = self._by_parameters = False
        if self._flops in ("palm", "palm-causal"):
            self._sizes = transformer_sizes(module)
            half = ", the causal half of attention" if self._flops == "palm-causal" else ", attention in full"
            self.convention = f"PaLM's formula, 6·N + 12·L·H·Q·T{half}"
        elif callable(self._flops):
            self.convention = "by the function that was given"
        elif self._flops != "count":
            self.convention = "the number that was given for each sample"
        else:
            half = "the causal half" if self._causal == "half" else "in full"
            self.convention = f"counted by operation, fused causal attention {half}, without recomputation"
            try:
                self._per_token = matmul_flops_per_token(module)
                dtype = _TRUE_PRECISIONS.get(str(trainer.precision))
                self._copy = fake_copy(module, trainer.strategy.root_device, dtype)
                take_out(self._copy)
            except Exception as error:  # anything may be in a user's module
                log.debug("MFUMonitor cannot copy %s: %r", type(module).__name__, error)

    def knows(self, extent: Extent) -> bool:
        """Whether nothing has to be counted for a batch of this extent."""
        return self._flops != "count" or self._by_parameters or extent.key in self._known or self._is_full

    @property
    def _is_full(self) -> bool:
        return len(self._known) >= _MOST_SHAPES

    @property
    def has_another_plan(self) -> bool:
        """Whether a memory budget has been solved since ``refresh``."""
        return self._checkpointing is not None and self._checkpointing.plan is not self._plan

    def refresh(self, module: nn.Module) -> None:
        """Count anew where another part is frozen, or checkpointed, than when it was counted."""
        checkpointing = self._checkpointing = checkpointing_of(module)
        self._plan = checkpointing.plan if checkpointing is not None else None
        state = (
            checkpointing,
            self._plan,
            *(parameter.requires_grad for parameter in module.parameters()),
            *(name for name, child in module.named_modules() if is_checkpointed(child)),
        )
        if state != self._state:
            self._state, self._known = state, {}

    def count(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int, at: Extent) -> None:
        """Count a batch now, or say that the step has to be watched (see :meth:`watch`)."""
        if self._copy is not None and not self._counts_real_steps:
            try:
                follow(self._copy, module, self._checkpointed)
                take_out(self._copy)
                if (checkpointing := checkpointing_of(module)) is not None:
                    checkpointing.put_into_copy(self._copy)
                with quiet(self._copy, trainer), isolate_rng(include_cuda=False), _no_traces():
                    step = _step(self._copy, trainer, batch_idx)
                    counted = count_step(self._copy, step, batch, causal=self._causal)
                if counted.model:
                    self._keep(at, counted)
                    return
                reason = "no operation with a known formula ran"
            except Exception as error:  # anything may be in a user's step
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.debug("MFUMonitor cannot count %s without running it: %s", type(module).__name__, reason)
        if not self._counts_real_steps:
            self._counts_real_steps = True
            self.convention += ", while a real step runs"
        if self.is_split:
            self._by_parameters = True
            self.convention = "6 FLOPs for each matrix entry and token (4 or 2 where frozen), without attention"
            log.warning(
                "MFUMonitor cannot run training_step of %s on a copy without storage, and ranks hold parts of it only: "
                "FLOPs are by its parameters, without attention. Pass flops= for an exact figure.",
                type(module).__name__,
            )

    def watch(self, module: nn.Module, at: Extent) -> bool:
        """Count the real step that follows, where there is no other way. Returns whether it does."""
        if not self._counts_real_steps or self.knows(at):
            return False
        counter, stack = FlopCounter(self._causal), ExitStack()
        stack.enter_context(counter.counting(module))
        self._real = stack, counter, at
        return True

    def _keep(self, at: Extent, counted: Counted) -> None:
        self._known[at.key] = at, counted
        if new := sorted(set(counted.unknown) - self._said):
            self._said.update(new)
            log.warning(
                "MFUMonitor has no formula for %s, which count nothing: MFU is too low. Register one with "
                "torch.utils.flop_counter.register_flop_formula, or pass flops=.",
                ", ".join(new),
            )

    def ignore_optimizer(self) -> None:
        """What the optimizer computes is none of the model's."""
        if self._real is not None:
            self._real[1].stopped = True

    def unwatch(self, *, keep: bool = True) -> None:
        """The step is over."""
        if self._real is not None:
            stack, counter, at = self._real
            self._real = None
            stack.close()
            if keep:
                self._keep(at, counter.result())

    def of(self, batch: Any, at: Extent) -> Counted | None:
        """FLOPs of a batch on this rank; ``None`` where they are not known (yet)."""
        if self._sizes is not None:
            length = at.tokens // max(1, at.samples)
            causal = self._flops == "palm-causal"
            dense = palm_flops_per_token(self._sizes, 0) * at.tokens
            whole = palm_flops_per_token(self._sizes, length, causal=causal) * at.tokens
            return Counted(dense=dense, attention=whole - dense)
        if callable(self._flops):
            return Counted(dense=float(self._flops(batch)))
        if not isinstance(self._flops, str):
            return Counted(dense=float(self._flops) * at.samples)
        if self._by_parameters:
            return Counted(dense=self._per_token * (at.tokens or at.samples))
        if (known := self._known.get(at.key)) is not None:
            return known[1]
        return self._scaled(at) if self._is_full else None

    def _scaled(self, at: Extent) -> Counted:
        """Of the nearest batch that was counted: attention by pairs of positions, the rest by positions."""
        there, counted = min(
            self._known.values(), key=lambda pair: (abs(_length(pair[0]) - _length(at)), -pair[0].samples)
        )
        tokens = (at.tokens or at.samples) / (there.tokens or there.samples or 1)
        pairs = tokens * _length(at) / _length(there)
        return Counted(
            dense=counted.dense * tokens,
            attention=counted.attention * pairs,
            recomputed=counted.recomputed * tokens,
            dtype=counted.dtype,
        )

    @property
    def dtype(self) -> torch.dtype | None:
        """In which most of the FLOPs are, where operations were counted."""
        return next((counted.dtype for _, counted in self._known.values() if counted.dtype), None)


def _length(at: Extent) -> float:
    return at.tokens / at.samples if at.tokens and at.samples else 1.0


def _step(copy: Any, trainer: pl.Trainer, batch_idx: int) -> Callable[[Any], Any]:
    """The user's training_step as Lightning calls it."""
    takes_index = "batch_idx" in inspect.signature(copy.training_step).parameters

    def step(batch: Any) -> Any:
        with trainer.precision_plugin.train_step_context():
            return copy.training_step(batch, batch_idx) if takes_index else copy.training_step(batch)

    return step


@contextmanager
def _no_traces() -> Iterator[None]:
    """Fake tensors log the trace of each operation that they cannot do; there is another way to count then."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _NoOptimizer:
    """Steps nothing, for a step with manual optimisation."""

    param_groups: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


class _QuietTrainer:
    """The Trainer, apart from its loggers."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.logger = DummyLogger()
        self.loggers = [self.logger]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""


@contextmanager
def quiet(copy: nn.Module, trainer: pl.Trainer) -> Iterator[None]:
    """Let a copy's training_step log, gather and optimise as if, without an effect outside it."""
    optimizers = [_NoOptimizer() for _ in trainer.optimizers]
    own: dict[str, Any] = {
        "_trainer": _QuietTrainer(trainer),
        "log": _nothing,
        "log_dict": _nothing,
        "print": _nothing,
        "all_gather": lambda data, *args, **kwargs: data,
        "optimizers": lambda *args, **kwargs: optimizers if len(optimizers) != 1 else optimizers[0],
        "lr_schedulers": lambda *args, **kwargs: _NoOptimizer(),
        "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        "clip_gradients": _nothing,
        "toggle_optimizer": _nothing,
        "untoggle_optimizer": _nothing,
    }
    before = dict(vars(copy))
    vars(copy).update(own)
    try:
        yield
    finally:
        for name in own:
            vars(copy).pop(name, None)
        vars(copy).update({name: before[name] for name in own if name in before})
