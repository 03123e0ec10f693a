"""A callback that says how much of its devices a run uses, with any strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_parallel import _lightning as adapter
from lightning_parallel.callbacks.batches import Extent, measure_batch
from lightning_parallel.callbacks.estimating import Estimator, Flops
from lightning_parallel.callbacks.observing import Listener, before_setup, forget_peak_memory, memory
from lightning_parallel.callbacks.report import check_plot, draw, named, show
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.flops.meter import Clock, Filled, Fleet, Meter, Work, clock_for, rates
from lightning_parallel.flops.operations import Causal
from lightning_parallel.flops.peaks import Found, device_name, find_peak, measure_peak

log = logging.getLogger(__name__)

VALIDATION, CHECKPOINT, COUNTING = "validation", "checkpoint", "counting"


class MFUMonitor(Callback):
    """Model FLOPs utilisation, throughput and where the time goes, one figure an optimizer step.

    ``mfu`` = FLOPs that the model needs per second / (all devices × dense peak FLOP/s of the dtype it computes in).
    ``hfu`` counts recomputation (activation checkpointing, fused attention) and padding too. Figures are means over the
    last ``window`` steps. Time in validation and in checkpoints is kept out and reported apart; waiting for data is in.

    Args:
        window: Optimizer steps in the sliding window.
        skip_steps: First steps of a run that are left out: they compile and allocate.
        flops: ``"count"`` runs ``training_step`` and its backward once for each shape of batch, on a copy without
            storage, and counts each operation. ``"palm"`` and ``"palm-causal"`` are PaLM's formula without and with the
            causal half, for a module with a Hugging Face ``config``. A number is the FLOPs of one sample, forward and
            backward. A function gets a batch of one rank and returns the FLOPs of it.
        causal: What ``"count"`` does with fused causal attention: ``"half"`` counts what the mask leaves, as Megatron
            does; ``"full"`` all pairs, as PaLM and nanoGPT do. Attention written as products of matrices is in full.
        peak_flops: FLOP/s of one device, where it is not listed; ``"measure"`` times a large matrix product.
        tokens: Gives the tokens of one rank's batch. By default the positions of ``input_ids``, or of the first integer
            tensor in two dims, without those that an ``attention_mask`` hides.
        lengths: Gives the length of each packed document of one rank's batch, as a tensor. By default documents begin
            where ``position_ids`` begin anew.
        padding: ``"excluded"`` or ``"counted"`` among tokens and model FLOPs.
        reduce: At each log, average over ranks whose batches are not alike. Otherwise rank 0 stands for all. The table
            at the end always averages.
        progress_bar: Show ``mfu`` there (or samples per second, without a peak).
        summary: Print a table when training ends.
        plot: A ``.png`` or ``.svg`` to draw the curve into; needs the extra ``plot``.
        prefix: In front of the logged names.

    Raises:
        ParallelConfigError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        window: int = 50,
        skip_steps: int = 1,
        flops: Flops = "count",
        causal: Causal = "half",
        peak_flops: float | Literal["measure"] | None = None,
        tokens: Callable[[Any], int] | None = None,
        lengths: Callable[[Any], Tensor] | None = None,
        padding: Literal["excluded", "counted"] = "excluded",
        reduce: bool = False,
        progress_bar: bool = False,
        summary: bool = True,
        plot: str | Path | None = None,
        prefix: str = "",
    ) -> None:
        if window < 1 or skip_steps < 0:
            raise ParallelConfigError(f"window={window}, skip_steps={skip_steps}: at least 1 and 0 steps.")
        if isinstance(peak_flops, str) and peak_flops != "measure":
            raise ParallelConfigError(f'peak_flops={peak_flops!r}: use FLOP/s of one device, or "measure".')
        if padding not in ("excluded", "counted"):
            raise ParallelConfigError(f'padding={padding!r}: use "excluded" or "counted".')
        self._window, self._skip = window, skip_steps
        self._estimator = Estimator(flops, causal)
        self._requested_peak = peak_flops
        self._tokens, self._lengths, self._fill = tokens, lengths, padding == "excluded"
        self._reduce, self._progress_bar, self._summary = reduce, progress_bar, summary
        self._plot = None if plot is None else check_plot(plot)
        self._prefix = prefix
        self._meter: Meter | None = None
        self._listener: Listener | None = None
        self._fleet: Fleet | None = None
        self._peak: Found | None = None
        self._loaded: Mapping[str, Any] = {}
        self._last: dict[str, float] = {}
        self._curve: list[tuple[int, float, float]] = []
        self._extent: Extent | None = None
        self._discard = self._said_over = False
        self._stepped_at = 0

    @property
    def figures(self) -> Mapping[str, float]:
        """What was logged last, by short name (``"mfu"``, ``"tokens_per_second"`` …)."""
        return dict(self._last)

    @property
    def convention(self) -> str:
        """How FLOPs are counted, in words."""
        return self._estimator.convention

    def clock(self, device: torch.device) -> Clock:
        """What tells the time on a device. Override it to use another clock."""
        return clock_for(device)

    # --- the run ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            before_setup(trainer.strategy, lambda: self._estimator.prepare(trainer, pl_module))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        meter = self._meter = Meter(self.clock(device), self._window, self._skip)
        if self._loaded:
            meter.total = Work(*self._loaded["total"])
            meter.paused = dict(self._loaded["paused"])
        self._fleet, self._stepped_at = None, trainer.global_step
        self._listener = Listener(
            wait=meter.wait, got=meter.got, pause=lambda: meter.pause(CHECKPOINT), resume=meter.resume
        )
        self._listener.start(trainer)
        forget_peak_memory(device)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._estimator.refresh(pl_module)  # a finetuning callback may have thawed a part

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        meter, estimator = self._meter, self._estimator
        assert meter is not None
        meter.begin()
        estimator.unwatch(keep=False)  # of a batch that was skipped
        if estimator.has_another_plan:
            estimator.refresh(pl_module)
        at = self._extent = measure_batch(batch, self._lengths, fill=self._fill)
        if self._fleet is not None and estimator.knows(at):
            return
        meter.pause(COUNTING)
        data_ranks = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
        estimator.is_split = data_ranks < trainer.world_size
        if not estimator.knows(at):
            estimator.count(trainer, pl_module, batch, batch_idx, at)
        watched = estimator.watch(pl_module, at)
        if self._fleet is None and not watched:
            self._find_peak(trainer, pl_module, data_ranks)
        self._discard |= watched  # a step under the counter is slow
        meter.resume()

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if pl_module.automatic_optimization:
            self._estimator.ignore_optimizer()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        meter, at = self._meter, self._extent
        assert meter is not None and at is not None
        self._estimator.unwatch()
        counted = self._estimator.of(batch, at)
        filled = None
        if at.sums is not None and counted is not None:
            filled = Filled(counted, at.sums, at.positions, at.pairs)
        tokens = at.tokens if self._tokens is None else int(self._tokens(batch))
        meter.batch(counted, samples=at.samples, tokens=tokens, filled=filled)
        if trainer.global_step != self._stepped_at:
            self._stepped_at = trainer.global_step
            meter.step(keep=not self._discard)
            self._discard = False
            if adapter.should_log(trainer):
                self._log(trainer)
        if self._progress_bar:
            name = "mfu" if "mfu" in self._last else "samples_per_second"
            if name in self._last:
                pl_module.log(name, self._last[name], prog_bar=True, logger=False, on_step=True, batch_size=1)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._meter is not None:
            self._meter.pause(VALIDATION)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._meter is not None:
            self._meter.resume()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        meter = self._meter
        assert meter is not None
        meter.end()
        self._stop()
        work = self._mean(trainer, meter.total)
        if not work.steps or self._fleet is None:
            return
        self._last = self._figures(trainer, meter, work)
        if trainer.is_global_zero:
            if self._summary:
                show(self._last, self._notes())
            if self._plot is not None and self._curve:
                steps, mfu, hfu = zip(*self._curve, strict=True)
                draw(self._plot, steps, {"MFU": mfu, "HFU": hfu}, self.convention)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        self._estimator.unwatch(keep=False)
        if self._listener is not None:
            self._listener.stop()
        self._loaded = self.state_dict()
        self._listener = self._meter = None

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._meter is None:
            return dict(self._loaded)
        self._meter.resolve()
        return {"total": self._meter.total.numbers(), "paused": dict(self._meter.paused)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    # --- figures ------------------------------------------------------------------------------------------------

    def _find_peak(self, trainer: pl.Trainer, module: pl.LightningModule, data_ranks: int) -> None:
        device, dtype = trainer.strategy.root_device, compute_dtype(trainer, module, self._estimator.dtype)
        name = device_name(device)
        if self._requested_peak == "measure":
            self._peak = measure_peak(device, dtype)
        elif self._requested_peak is not None:
            self._peak = Found(flops=float(self._requested_peak), source="given")
        else:
            self._peak = find_peak(name, dtype)
        if self._peak is None and trainer.is_global_zero:
            log.warning(
                "MFUMonitor knows no peak for %s in %s: it logs throughput without MFU. Pass peak_flops= with the "
                'dense FLOP/s of one device, or peak_flops="measure".',
                name or f"the device {str(device)!r}",
                dtype,
            )
        peak = None if self._peak is None else self._peak.flops
        self._fleet = Fleet(devices=trainer.world_size, data_ranks=data_ranks, peak=peak)
        if trainer.is_global_zero:
            log.info("%s", ". ".join(self._notes()))

    def _notes(self) -> list[str]:
        notes = [f"FLOPs: {self.convention}"]
        if self._peak is not None and self._fleet is not None:
            number = self._fleet.devices
            devices = "1 device" if number == 1 else f"{number} devices"
            notes.append(f"Peak: {self._peak.flops / 1e12:,.4g} TFLOP/s × {devices} ({self._peak.source})")
        return notes

    def _mean(self, trainer: pl.Trainer, work: Work) -> Work:
        """Over the ranks. Peers that share their samples hold the same numbers, so that a mean over all is right."""
        device = trainer.strategy.root_device
        tensor = torch.tensor(work.numbers(), dtype=torch.float32, device=device)
        reduced = trainer.strategy.reduce(tensor, reduce_op="mean")
        return Work(*reduced.tolist()) if trainer.world_size > 1 and isinstance(reduced, Tensor) else work

    def _figures(self, trainer: pl.Trainer, meter: Meter, work: Work) -> dict[str, float]:
        assert self._fleet is not None
        paused = {f"{kind}_seconds": meter.paused.get(kind, 0.0) for kind in (VALIDATION, CHECKPOINT)}
        return {**rates(work, self._fleet), **paused, **memory(trainer.strategy.root_device)}

    def _log(self, trainer: pl.Trainer) -> None:
        assert self._meter is not None
        if self._fleet is None:
            return
        work = self._meter.resolve()
        if self._reduce:
            work = self._mean(trainer, work)
        if not work.steps:
            return
        self._last = self._figures(trainer, self._meter, work)
        if (mfu := self._last.get("mfu")) is not None:
            self._curve.append((trainer.global_step, mfu, self._last["hfu"]))
            self._complain(mfu)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(named(self._last, self._prefix), step=adapter.logged_step(trainer))

    def _complain(self, mfu: float) -> None:
        if mfu > 1 and not self._said_over:
            self._said_over = True
            log.error(
                "MFU is %.0f %%, more than the devices can do. Likely causes: peak_flops is of another device or dtype "
                "(%s); FLOPs are too many (%s): causal or windowed attention counted in full, or padding or samples "
                "that ranks share counted; or the run is timed wrongly.",
                100 * mfu,
                self._peak.source if self._peak else "unknown",
                self.convention,
            )


def compute_dtype(trainer: pl.Trainer, module: torch.nn.Module, counted: torch.dtype | None) -> torch.dtype:
    """The dtype of matrix products: autocast's, FSDP's for parameters, or the module's.

    Args:
        trainer: Its precision and strategy.
        module: The LightningModule.
        counted: In which most FLOPs were, on a copy that knows of autocast but not of FSDP.
    """
    precision = str(trainer.precision)
    if precision.startswith("transformer-engine") and "float16" not in precision:
        return torch.float8_e4m3fn
    options = getattr(trainer.strategy, "_fully_sharded", None)
    policy = getattr(options, "mp_policy", None) or getattr(trainer.strategy, "mixed_precision_config", None)
    if isinstance(of_policy := getattr(policy, "param_dtype", None), torch.dtype) and counted in (None, torch.float32):
        return of_policy
    if counted is not None:
        return counted
    for start, dtype in (("bf16", torch.bfloat16), ("16", torch.float16), ("64", torch.float64)):
        if precision.startswith(start):
            return dtype
    sizes: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
