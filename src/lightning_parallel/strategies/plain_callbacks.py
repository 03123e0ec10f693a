"""Lightning's own callbacks that take parameters for plain, whole tensors: made right, or refused with a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_parallel import _lightning as adapter
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.pipeline.ghost import is_ghost

_COPY = "__deepcopy__"
_FINETUNE = "finetune_function"


def prepare_callbacks(callbacks: Iterable[Callback], module: nn.Module, *, is_parallel: bool) -> None:
    """Called before the callbacks' ``setup``.

    Args:
        callbacks: The Trainer's.
        module: The LightningModule.
        is_parallel: It went through ``parallelize`` in an earlier run, so it holds shards.

    Raises:
        ParallelConfigError: A callback that cannot work.
    """
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ParallelConfigError(
                f"{type(callback).__name__} averages a copy of the whole module, and restores its schedule only with "
                "strategies that load a checkpoint before the module is set up. Use lightning.pytorch.callbacks."
                "WeightAveraging, which averages equally too (override should_update to do it once an epoch), and "
                "torch.optim.swa_utils.SWALR in configure_optimizers."
            )
        if isinstance(callback, WeightAveraging) and is_parallel:
            # It copies the module in its setup, which FSDP forbids. Only the weights are needed.
            module.__dict__[_COPY] = lambda memo: copy_weights(module)
        if isinstance(callback, BaseFinetuning) and _FINETUNE not in vars(callback):
            setattr(callback, _FINETUNE, partial(_finetune, callback))


def shard_averages(callbacks: Iterable[Callback], module: nn.Module, device: torch.device) -> bool:
    """Give each `WeightAveraging` the shards of the parallelised module to average, in place of its whole copy.

    Its copies of weights, swaps and updates then run shard by shard, without communication.

    Returns:
        Whether there is any.

    Raises:
        ParallelConfigError: The average is asked for on another device.
    """
    module.__dict__.pop(_COPY, None)
    found = False
    for callback in callbacks:
        if not isinstance(callback, WeightAveraging) or (average := adapter.average_of(callback)) is None:
            continue
        found = True
        wanted = adapter.device_of_average(callback)
        if wanted is not None and wanted.type != device.type:
            raise ParallelConfigError(
                f"{type(callback).__name__}(device={str(wanted)!r}): the average is sharded like the parameters, and "
                f"lies with them on {device.type!r}. Leave device=None."
            )
        average.module = copy_weights(module)
    return found


class _Weights(nn.Module):
    """The parameters and buffers of a module under their names, without its code."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self  # a move to the device where everything is; torch's own cannot swap shards


def copy_weights(module: nn.Module) -> nn.Module:
    """Copies of the shards below ``module``, in the same order and under the same names; ties stay ties."""
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def copy_tensor(tensor: Tensor) -> Tensor:
        if id(tensor) not in tensors:
            clone = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(clone, requires_grad=tensor.requires_grad) if is_parameter else clone
        return tensors[id(tensor)]

    def copy_module(source: nn.Module) -> nn.Module:
        if id(source) in modules:
            return modules[id(source)]
        target = modules[id(source)] = _Weights()
        stores: Any = ((source._parameters, target._parameters), (source._buffers, target._buffers))
        for store, copied in stores:
            for name, tensor in store.items():
                copied[name] = None if tensor is None else copy_tensor(tensor)
        # A record that only torch's private name gives: which buffers a checkpoint leaves out.
        target._non_persistent_buffers_set.update(source._non_persistent_buffers_set)
        for name, child in source._modules.items():
            target._modules[name] = None if child is None else copy_module(child)
        return target

    return copy_module(module)


class _EqualTensors(TorchFunctionMode):
    """Inside it, ``torch.equal`` takes DTensors of any shapes and layouts; torch's fails on unlike shapes.

    A parameter of another pipeline stage, whose values are not here, is equal to itself alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.equal or not all(isinstance(a, Tensor) for a in args):
            return func(*args, **(kwargs or {}))
        left, right = args
        if left is right or left.shape != right.shape or is_ghost(left) or is_ghost(right):
            return left is right
        if _layout(left) != _layout(right):
            left, right = (a.full_tensor() if isinstance(a, DTensor) else a for a in args)
        return func(left, right)


def _layout(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _finetune(callback: BaseFinetuning, *args: Any) -> None:
    # It looks for parameters that the optimizer has already by comparing their values.
    with _EqualTensors():
        type(callback).finetune_function(callback, *args)
