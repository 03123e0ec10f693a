"""Every collective of a step, with its size: what is sent is counted, not estimated.

torch's own `CommDebugMode` counts calls but not sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.specs import Spec, build_strategy
from tests.support.training import GlobalBatches

# Of torch.distributed's own operators, and of the functional ones that DTensor uses: what they do, and which tensor
# argument is the whole one (the first argument, or the result).
_KINDS: Mapping[str, tuple[str, str]] = {
    "c10d::allreduce_": ("all_reduce", "first"),
    "c10d::allreduce_coalesced_": ("all_reduce", "first"),
    "c10d::_allgather_base_": ("all_gather", "first"),
    "c10d::allgather_": ("all_gather", "first"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "first"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "second"),
    "c10d::reduce_scatter_": ("reduce_scatter", "second"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "second"),
    "c10d::alltoall_base_": ("all_to_all", "first"),
    "c10d::alltoall_": ("all_to_all", "first"),
    "c10d::broadcast_": ("broadcast", "first"),
    "c10d::scatter_": ("scatter", "second"),
    "c10d::gather_": ("gather", "second"),
    "c10d::send": ("send", "first"),
    "c10d::recv_": ("recv", "first"),
    "_c10d_functional::all_reduce": ("all_reduce", "first"),
    "_c10d_functional::all_reduce_": ("all_reduce", "first"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "result"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "first"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "first"),
    "_c10d_functional::broadcast": ("broadcast", "first"),
    "_dtensor::shard_dim_alltoall": ("all_to_all", "first"),
}
# Operators of the same libraries that send nothing.
_SILENT = frozenset(
    {
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
        "c10d::barrier",
        "c10d::monitored_barrier_",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One call on this rank.

    Attributes:
        numel: Elements of the whole tensor: gathered, to be scattered, or reduced.
        axis: Name of the mesh axis, where the group is one.
    """

    kind: str
    numel: int
    dtype: torch.dtype
    axis: str
    num_ranks: int

    @property
    def sent(self) -> float:
        """Elements that each rank sends, by the ring algorithms that the formulas are about."""
        part = self.numel * (self.num_ranks - 1) / self.num_ranks
        return 2 * part if self.kind == "all_reduce" else part


class CollectiveRecorder(TorchDispatchMode):
    """Records collectives while it is on.

    Args:
        axes: Group name to mesh axis.
    """

    def __init__(self, axes: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.axes = dict(axes or {})
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: its collectives come back here
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _KINDS:
            self._record(*_KINDS[name], args, result)
        elif func.namespace in ("c10d", "_c10d_functional", "_dtensor") and name not in _SILENT:
            raise AssertionError(f"{name} is a collective that the recorder does not know")
        return result

    def _record(self, kind: str, whole: str, args: Any, result: Any) -> None:
        tensors = _tensors({"first": args[0], "second": args[1], "result": result}[whole])
        group = next(found for arg in args if (found := _group(arg)) is not None)
        self.calls.append(
            Collective(
                kind=kind,
                numel=sum(tensor.numel() for tensor in tensors),
                dtype=tensors[0].dtype,
                axis=self.axes.get(group.group_name, group.group_name),
                num_ranks=dist.get_world_size(group),
            )
        )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _group(value: Any) -> Any:
    if isinstance(value, torch.ScriptObject):
        return dist.ProcessGroup.unbox(value)
    if isinstance(value, str):
        with suppress(Exception):
            return dist.distributed_c10d._resolve_process_group(value)
    return value if isinstance(value, dist.ProcessGroup) else None


@dataclass(kw_only=True, slots=True)
class Traffic:
    """Collectives of a training, batch by batch.

    Attributes:
        numel: Elements of all parameters, whole; a tied one once.
    """

    batches: list[list[Collective]] = field(default_factory=list)
    numel: int = 0

    def of(self, batch: int, axis: str | None = None, kind: str | None = None) -> list[Collective]:
        """Those of one batch, of one axis and kind where given."""
        return [c for c in self.batches[batch] if axis in (None, c.axis) and kind in (None, c.kind)]

    def sent(self, batch: int, axis: str | None = None) -> float:
        """Elements that a rank sends in one batch."""
        return sum(c.sent for c in self.of(batch, axis))


class TrafficCallback(Callback):
    """Records every batch of a fit, optimizer step included."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        mesh: Any = trainer.strategy.mesh  # type: ignore[attr-defined]
        axes = {mesh.device_mesh[axis].get_group().group_name: axis for axis in ("ddp", "fsdp", "tp")}
        self.traffic.numel = sum(p.numel() for p in pl_module.parameters())
        self._recorder = CollectiveRecorder(axes)
        self._recorder.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._recorder.__exit__(None, None, None)
        self.traffic.batches.append(self._recorder.calls)


def record_traffic(
    model: Callable[..., LightningModule],
    strategy: Spec,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    steps: int = 2,
    accumulate: int = 1,
    batch: int = 8,
    seq: int = 16,
    precision: str = "32-true",
) -> Traffic:
    """Fit without logging, and return what this rank sent. Runs on every rank."""
    torch.manual_seed(1)
    module = model(**(model_kwargs or {}))
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # a logged loss is reduced too
    callback = TrafficCallback()
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=build_strategy(strategy),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        precision=precision,  # type: ignore[arg-type]
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    count = batch * steps * accumulate
    trainer.fit(module, datamodule=GlobalBatches(module, count=count, batch=batch, seq=seq))
    return callback.traffic
