"""Where a callback listens in on a run, because Lightning has no hook there; all of it is undone at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_parallel import _lightning as adapter
from lightning_parallel.flops.peaks import is_accelerator


def before_setup(strategy: Any, action: Callable[[], None]) -> None:
    """Call ``action`` once, before a strategy's ``setup``: the module is complete, and not yet split or wrapped.

    A callback's own ``setup`` comes before ``configure_model``, and its ``on_fit_start`` after the strategy's part.
    """
    original = strategy.setup

    def setup(trainer: pl.Trainer) -> None:
        vars(strategy).pop("setup", None)
        action()
        original(trainer)

    strategy.setup = setup


class Listener:
    """Tells of waits for batches and of checkpoints.

    Args:
        wait: The host begins to wait for a batch.
        got: It has it.
        pause: A checkpoint begins.
        resume: It is written, or its writing is on its way.
    """

    def __init__(
        self,
        *,
        wait: Callable[[], None],
        got: Callable[[], None],
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self._wait, self._got, self._pause, self._resume = wait, got, pause, resume
        self._undo: list[Callable[[], None]] = []

    def start(self, trainer: pl.Trainer) -> None:
        """Listen to a Trainer."""
        if self._undo:
            return
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        start, stop, save = profiler.start, profiler.stop, trainer.save_checkpoint

        def started(action_name: str) -> None:
            start(action_name)
            if action_name == adapter.WAIT_FOR_BATCH:
                self._wait()

        def stopped(action_name: str) -> None:
            if action_name == adapter.WAIT_FOR_BATCH:
                self._got()
            stop(action_name)

        def saved(*args: Any, **kwargs: Any) -> None:
            self._pause()
            try:
                save(*args, **kwargs)
            finally:
                self._resume()

        for owner, name, function in (
            (profiler, "start", started),
            (profiler, "stop", stopped),
            (trainer, "save_checkpoint", saved),
        ):
            self._replace(owner, name, function)

    def _replace(self, owner: Any, name: str, function: Callable[..., None]) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, function)

        def undo() -> None:
            if before is None:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def stop(self) -> None:
        """Leave everything as it was."""
        while self._undo:
            self._undo.pop()()


def memory(device: torch.device) -> Mapping[str, float]:
    """The most that was allocated and reserved on an accelerator, in GiB, and the share of what it has."""
    module = torch.get_device_module(device)
    if not is_accelerator(device) or not hasattr(module, "max_memory_reserved"):
        return {}
    allocated, reserved = module.max_memory_allocated(device), module.max_memory_reserved(device)
    found = {"peak_allocated_gib": allocated / 2**30, "peak_reserved_gib": reserved / 2**30}
    if hasattr(module, "get_device_properties"):
        found["peak_fraction"] = reserved / module.get_device_properties(device).total_memory
    return found


def forget_peak_memory(device: torch.device) -> None:
    """Start to measure anew."""
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if is_accelerator(device) and reset is not None:
        reset(device)
