"""Lightning's precision plugins, made right for sharded parameters.

The plugin object that the trainer chose, or the user passed, is kept: a method or two are put in front of its own.
Its class keeps its name, since Lightning stores a scaler's state in checkpoints under that name, so that a checkpoint
resumes with another strategy.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_parallel.schemes.clipping import Stages, clip_grad_norm, clip_grad_value


def adapt_precision(
    plugin: Precision, *, group: dist.ProcessGroup | None = None, error_if_nonfinite: bool = False
) -> Precision:
    """Adapt ``plugin`` in place, whatever its class. Adapting again only sets the options.

    - Clipping by norm and by value takes plain parameters and DTensors of any meshes (`schemes.clipping`).
    - A scaler's verdict on overflow is one for all ranks of ``group``: all skip the step, all lower the scale.
    - ``bf16-true`` and ``16-true`` leave non-persistent buffers in their own dtype. They are computed, not learnt,
      and a rotary table in bf16 is off by whole positions.

    Args:
        plugin: What Lightning hands to ``Strategy.precision_plugin``. No process group is needed yet.
        group: The ranks that step together; the default group where None.
        error_if_nonfinite: Clipping by norm raises on every rank, before any change, where the norm is not finite.
            With a scaler it does not: there an overflow is expected now and then, and skips the step.

    Returns:
        The same object.
    """
    if not isinstance(plugin, _ParallelPrecision):
        plugin.__class__ = _in_front(_ParallelPrecision, type(plugin))
    assert isinstance(plugin, _ParallelPrecision)
    plugin.error_if_nonfinite = error_if_nonfinite
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        if not isinstance(plugin.scaler, _AgreedGradScaler):
            plugin.scaler.__class__ = _in_front(_AgreedGradScaler, type(plugin.scaler))
        assert isinstance(plugin.scaler, _AgreedGradScaler)
        plugin.scaler.group = group
    return plugin


class _ParallelPrecision(Precision):
    """What goes in front of a plugin's class. Never instantiated."""

    error_if_nonfinite: bool
    stages: Stages | None = None

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        has_scaler = getattr(self, "scaler", None) is not None
        clip_grad_norm(
            self.main_params(optimizer),
            clip_val,
            error_if_nonfinite=self.error_if_nonfinite and not has_scaler,
            stages=self.stages,
        )

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value(self.main_params(optimizer), clip_val)

    def convert_module(self, module: Module) -> Module:
        kept = _non_persistent_buffers(module) if isinstance(self, HalfPrecision) else []
        for owner, name, _ in kept:  # out of the way of the conversion
            setattr(owner, name, None)
        try:
            return super().convert_module(module)
        finally:
            for owner, name, buffer in kept:
                setattr(owner, name, buffer)


class _AgreedGradScaler(torch.amp.GradScaler):
    """What goes in front of a scaler's class. Never instantiated.

    Only the search for inf and nan is replaced, the one step that ``unscale_`` and the fused optimizers share. It is
    torch's extension point in all but name: ``ShardedGradScaler``, which has no answer to DTensors of several meshes,
    replaces it too.
    """

    group: dist.ProcessGroup | None

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Local shards: DTensor's own rule takes no mixture, and costs a collective for each mesh axis and dtype.
        local: Any = SimpleNamespace(param_groups=[{"params": [*map(_local_view, _parameters(optimizer))]}])
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        is_bad = torch.zeros_like(found_inf)
        for value in found.values():  # none on a rank without gradients
            is_bad = torch.maximum(is_bad, value.to(is_bad.device))
        if dist.is_initialized():
            dist.all_reduce(is_bad, dist.ReduceOp.MAX, self.group)
        return {device: is_bad.to(device) for device in (found or [is_bad.device])}


def _in_front(part: type, whole: type) -> type:
    """``whole`` with the methods of ``part`` first, under the name of ``whole``."""
    names = {"__qualname__": whole.__qualname__, "__module__": whole.__module__, "__doc__": whole.__doc__}
    return type(whole.__name__, (part, whole), names)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for param_group in optimizer.param_groups for parameter in param_group["params"]]


def _local_view(parameter: Tensor) -> Tensor:
    """A stand-in whose gradient is this rank's shard, in the same memory."""
    if not isinstance(parameter.grad, DTensor):
        return parameter
    with torch.no_grad():
        shard = parameter.grad.to_local()
        stand_in = Parameter(shard, requires_grad=False)
    stand_in.grad = shard
    return stand_in


def _non_persistent_buffers(module: Module) -> list[tuple[Module, str, Tensor]]:
    """All that ``Module.to(dtype)`` would convert: owner, name there, value."""
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
        # Private, and the only record: a state_dict shows hooks' names.
        if name in owner._non_persistent_buffers_set and (buffer.is_floating_point() or buffer.is_complex())
    ]
