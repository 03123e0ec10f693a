"""The callback that checkpoints activations under any strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_parallel._torch import memory_of
from lightning_parallel.callbacks.frontier import draw_frontier
from lightning_parallel.callbacks.observing import before_setup, forget_peak_memory
from lightning_parallel.callbacks.report import check_plot
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.flops.peaks import is_accelerator
from lightning_parallel.schemes.checkpointing.apply import Checkpointing
from lightning_parallel.schemes.checkpointing.budget import Plan, table
from lightning_parallel.schemes.checkpointing.policy import COSTLY, Kind, Operation, Policy


class ActivationCheckpointing(pl.Callback):
    """Keeps fewer values of a forward for backward, and computes the others again.

    Works with Lightning's strategies and with this package's. Nothing is renamed: checkpoints of runs with and without
    it load each other. Gradients are those of a run without it, bit for bit in eager float32. A budget is measured on
    the first batch (``"fit"``: the first optimizer step), which recomputes everything, and solved for the following
    ones, on each pipeline stage for itself: start with a batch of the largest shape.

    Args:
        policy: ``"full"`` keeps the inputs of each block; ``"selective"`` also what products of matrices and attention
            return; ``"budget"`` what a memory budget has room for, the least time recomputed.
        every: Checkpoint each n-th of the modules only.
        modules: Which: globs of module names, names of classes or classes. By default the repeated blocks.
        operations: What ``"selective"`` keeps, as ``torch.ops.aten.mm`` or ``"aten.mm"``.
        budget: Bytes (an int), a fraction of what no checkpointing would hold (a float up to 1), or ``"fit"``: what the
            device has left beside parameters, gradients and the optimizer's state.
        offload: Operations whose outputs are kept in host memory, in any policy, and ``"inputs"``: those of the blocks.

    Raises:
        ParallelConfigError: An argument that no policy has.
        PlanError: In ``fit``, where no module is chosen.
    """

    def __init__(
        self,
        policy: Kind = "full",
        *,
        every: int = 1,
        modules: str | type | Iterable[str | type] | None = None,
        operations: Iterable[Operation] = COSTLY,
        budget: float | int | Literal["fit"] | None = None,
        offload: str | Iterable[Operation] = (),
    ) -> None:
        chosen = (modules,) if isinstance(modules, str | type) else tuple(modules or ())
        self.policy = Policy(
            kind=policy,
            every=every,
            modules=chosen,
            operations=tuple(operations),
            budget=budget,
            offload=(offload,) if isinstance(offload, str) else tuple(offload),
        )
        self._checkpointing = Checkpointing(self.policy)
        self._state_before = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if self.policy.budget == "fit":
            _check_memory(strategy.root_device)
        if _knows_when(strategy):
            strategy.activation_checkpointing = self._checkpointing
        before_setup(strategy, lambda: self._install(trainer, pl_module))

    def _install(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._checkpointing.is_in(module):
            self._checkpointing.put_back()
        elif not _knows_when(trainer.strategy):
            self._checkpointing.install(module)

    @property
    def frontier(self) -> Sequence[Plan]:
        """Least extra time for each of eleven amounts of memory on this rank, from what a step has measured.

        Raises:
            ParallelConfigError: No training step has run, or its blocks are compiled.
        """
        return self._checkpointing.model().frontier()

    def table(self) -> str:
        """The frontier in text."""
        return table(self.frontier)

    def save_plot(self, path: str | Path) -> None:
        """The frontier as a ``.png`` or ``.svg``; needs the extra ``plot``."""
        draw_frontier(check_plot(path), self.frontier)

    # --- the run ------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._checkpointing.ledger.is_watched:
            self._checkpointing.ledger.begin()
            if self.policy.budget == "fit":
                forget_peak_memory(trainer.strategy.root_device)
                self._state_before = _state_bytes(trainer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        checkpointing = self._checkpointing
        if not checkpointing.ledger.is_watched:
            return
        if self.policy.kind == "budget" and checkpointing.plan is None:
            if self.policy.budget != "fit":
                checkpointing.solve()
            elif trainer.global_step:  # there is an optimizer's state by now
                checkpointing.solve(self._room(trainer))
            return
        checkpointing.ledger.is_watched = False
        if checkpointing.ledger.profiles:
            rank_zero_info(self.report())

    def report(self) -> str:
        """What is recomputed on this rank, what that saves and what it costs."""
        checkpointing = self._checkpointing
        peak, seconds, flops = checkpointing.predicted()
        none, plan = checkpointing.model().without_checkpointing(), checkpointing.plan
        how = "" if plan is None else ", solved exactly" if plan.is_exact else ", greedily: install scipy for the best"
        return (
            f"Activation checkpointing: {self.policy.text}{how}, in {len(checkpointing.names)} blocks. They hold "
            f"{peak:,} bytes at most by prediction, {checkpointing.ledger.peak:,} measured, {none:,} without; "
            f"recomputation takes {flops:,} FLOPs ({1e3 * seconds:,.3g} ms) a batch."
        )

    def _room(self, trainer: pl.Trainer) -> int:
        """Bytes for the blocks' activations: 95 % of what the device has, less all that is not theirs."""
        device = trainer.strategy.root_device
        module = torch.get_device_module(device)
        total = int(module.get_device_properties(device).total_memory)
        new = _state_bytes(trainer) - self._state_before  # made after the most was allocated
        others = int(module.max_memory_allocated(device)) - self._checkpointing.ledger.peak + new
        return int(0.95 * total) - others

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._checkpointing.remove()


def _knows_when(strategy: Any) -> bool:
    """Whether a strategy puts the policy in itself, between what else it does to the module."""
    return hasattr(strategy, "activation_checkpointing")


def _state_bytes(trainer: pl.Trainer) -> int:
    """Of the optimizers, on their device."""
    states = [state for o in trainer.optimizers for state in o.state.values() if isinstance(state, dict)]
    found = [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and is_accelerator(v.device)]
    return sum(dict(map(memory_of, found)).values())


def _check_memory(device: torch.device) -> None:
    if not is_accelerator(device) or not hasattr(torch.get_device_module(device), "max_memory_allocated"):
        raise ParallelConfigError(
            f'budget="fit" asks the device what memory it has, which {device} does not tell. Give bytes or a fraction.'
        )
