"""The private Lightning names that this package needs, each with the reason.

Lightning offers no public hook for these, and its own distributed strategies use the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities import types
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.distributed import (
    DistributedSamplerWrapper as DistributedSamplerWrapper,
)
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _DatasetSamplerWrapper,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.fabric.utilities.seed import reset_seed as reset_seed
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSamplerWrapper as UnrepeatedDistributedSamplerWrapper,
)
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

__all__ = ["SubprocessScriptLauncher"]

# What Lightning annotates its strategies with.
Path: TypeAlias = types._PATH


def default_backend(device: torch.device) -> str:
    """The process group backend that goes with ``device``."""
    return _get_default_process_group_backend_for_device(device)


def init_process_group(
    environment: ClusterEnvironment, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Join the default process group; does nothing if it exists."""
    kwargs: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if device.index is not None:
        kwargs["device_id"] = device
    _init_dist_connection(environment, backend, **kwargs)


def set_rank(rank: int) -> None:
    """Who logs: Lightning keeps the rank on a function."""
    setattr(rank_zero_only, "rank", rank)  # noqa: B010 - the function's type does not say so


def evaluation_loops(trainer: pl.Trainer) -> list[Any]:
    """The loops that may run under inference mode."""
    return [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]


def set_sigterm_flag(trainer: pl.Trainer, flag: Callable[[], None]) -> None:
    """What tells ranks of a SIGTERM, before each batch; older Lightning has nothing of the kind."""
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = flag  # type: ignore[method-assign]


def callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """The Trainer's callbacks (an attribute that the class does not declare)."""
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def optimizers_to_device(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move optimizer state to where the parameters are."""
    _optimizers_to_device(optimizers, device)


def set_device(module: nn.Module, device: torch.device) -> None:
    """What ``module.to(device)`` would note for ``LightningModule.device``; its tensors are there already."""
    for child in module.modules():
        if isinstance(child, _DeviceDtypeModuleMixin):
            child._device = device


def reduce(tensor: Tensor, group: dist.ProcessGroup, reduce_op: Any) -> Tensor:
    """All-reduce, with Lightning's names of operations (``"mean"`` for one)."""
    if reduce_op in ("mean", "avg") and not tensor.is_floating_point() and not tensor.is_complex():
        # Lightning cuts the mean of integers to an integer, and divides sums over 3.5 samples a rank by 3.
        tensor = tensor.to(torch.get_default_dtype())
    return _sync_ddp(tensor, group, reduce_op)


def all_gather(tensor: Tensor, group: dist.ProcessGroup, sync_grads: bool) -> Tensor:
    """Stack every rank's tensor. Shape: (…) to (ranks, …)."""
    return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)


def barrier(device: torch.device) -> None:
    """Wait for all ranks; an accelerator's backend must be told the device."""
    if device.index is not None:
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def collect_random_states(device: torch.device) -> dict[str, Any]:
    """The state of torch, the device, numpy and Python."""
    states = _collect_rng_states(include_cuda=False)
    if device.index is not None:
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Undo ``collect_random_states``, on this rank's device."""
    on_device = states.pop("device", None)
    _set_rng_states(states)
    if on_device is not None:
        torch.get_device_module(device).set_rng_state(on_device, device)


def seed_all(seed: int) -> None:
    """Seed torch on every device, numpy and Python, leaving Lightning's environment variables alone."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(seed % 2**32)


def cast_floating(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in a batch as ``dtype``."""
    return apply_to_collection(inputs, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)


# Lightning puts these, and the two wrappers imported above, into a user's DataLoader and says nowhere that it did. They
# repeat samples in an evaluation and give ranks unequal numbers of batches to predict, so they are replaced.
DatasetSamplerWrapper = _DatasetSamplerWrapper
IndexBatchSamplerWrapper = _IndexBatchSamplerWrapper


def is_as_the_hook_returned_it(loader: object) -> bool:
    """Whether ``loader`` was built in a ``*_dataloader`` hook, and so not by Lightning around a sampler of its own.

    Lightning notes the arguments of whatever a hook builds, under this name, to build it again with another sampler.
    """
    return hasattr(loader, "__pl_saved_args")


# WeightAveraging has no public way to give it another model to average.
def average_of(callback: WeightAveraging) -> AveragedModel | None:
    """The running average, from the callback's ``setup`` for fitting on."""
    return callback._average_model


def device_of_average(callback: WeightAveraging) -> torch.device | None:
    """Where the user wants the average, if they said so."""
    return None if callback._device is None else torch.device(callback._device)


# What the loop tells its profiler around the wait for a batch; nothing else says how long it was.
WAIT_FOR_BATCH = "[_TrainingEpochLoop].train_dataloader_next"


def should_log(trainer: pl.Trainer) -> bool:
    """Whether ``log_every_n_steps`` has come round, as for what a module logs."""
    return bool(trainer._logger_connector.should_update_logs)


def logged_step(trainer: pl.Trainer) -> int:
    """The step that Lightning gives loggers: one a batch that stepped, whatever the number of optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
