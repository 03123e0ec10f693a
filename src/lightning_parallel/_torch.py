"""The private torch names that this package needs, each with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Operations as a dispatch mode sees them; types that torch.ops hands out under no public name.
from torch._ops import OpOverload, OpOverloadPacket

# Shapes and dtypes of values that this rank does not compute, autocast included. torch.compile's own, not exported.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

# A stage whose microbatches are steps of a LightningModule, not calls of a module on tensors of one shape: the exported
# ``PipelineStage`` takes only the latter. The base class is what torch's schedules are written against, and the three
# functions are how they run backward, whole or split into inputs and weights. The runtime takes a schedule from a file.
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import _Action as PipelineAction
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase
from torch.distributed.tensor import DTensor

# A packed projection (query, key and value in one matrix) is split part by part. The placement that says so is
# not exported yet, though ``fully_shard`` itself produces it for FSDP × TP.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.attention import SDPBackend

# Sees every operation of a forward; torch documents it, in a module with an underscore.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

# Walks what a forward or a step takes and returns; the public torch.utils.pytree is another implementation, and newer.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

__all__ = [
    "CUDNN",
    "CUDNN_BACKWARD",
    "EFFICIENT",
    "EFFICIENT_BACKWARD",
    "FAKE_ERRORS",
    "FLASH",
    "FLASH_BACKWARD",
    "HOST",
    "HOST_FLASH",
    "HOST_FLASH_BACKWARD",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "PipelineAction",
    "PipelineScheduleRuntime",
    "PipelineStageBase",
    "StridedShard",
    "TorchDispatchMode",
    "all_gather_single",
    "all_ranks_reach",
    "attention_backend",
    "before_compile",
    "default_generator",
    "fake_mode",
    "flatten_mesh",
    "has_kernel",
    "install_rng_tracker",
    "is_in_backward",
    "local_of",
    "memory_of",
    "operation_counter",
    "plain_tensors_as_replicas",
    "queue_backward_callback",
    "reduce_fully_sharded",
    "reduce_scatter_single",
    "shards_behind_url",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_dispatch_modes",
]

# Memory that files are read into and written from: the same on every machine, whatever trains there.
HOST = torch.device("cpu")


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis over all ranks of ``mesh``: torch has no public name for it (torchtitan uses the same)."""
    return mesh._flatten(name)


def default_store() -> Any:
    """The store behind the default group, which ranks can write to without waiting for each other."""
    return dist.distributed_c10d._get_default_store()


def all_ranks_reach(place: str, timeout: timedelta) -> bool:
    """Whether every rank calls this in time; says no instead of hanging, as a collective would.

    Only the store behind the default group can be asked that, and torch has no public name for it.
    """
    store, rank = default_store(), dist.get_rank()
    try:
        store.set(f"{place}: {rank}", "1")
        store.wait([f"{place}: {other}" for other in range(dist.get_world_size())], timeout)
    except RuntimeError:  # in time they did not, or the store is gone with rank 0
        return False
    return True


def shards_behind_url(url: str) -> tuple[StorageReader, StorageWriter]:
    """torch's reader and writer of shards behind a URL: ``dcp.save`` finds them by itself, but exports neither."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    return FsspecReader(url), FsspecWriter(url)


def install_rng_tracker(mesh: DeviceMesh, fallback: object) -> None:
    """Make DTensor's random operations right on every device.

    Where torch has a tracker (accelerators) it is installed without its synchronisation of all ranks, which would
    give every data replica the same dropout masks. Elsewhere torch has none and every shard would draw the same
    numbers, so ``fallback`` is installed, an object with ``_distribute_region``.
    """
    from torch.distributed.tensor import _random

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        supported = _random.is_rng_supported_mesh(mesh)
    tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False) if supported else fallback
    setattr(_random, "_rng_tracker", tracker)  # noqa: B010 - typed as torch's own class


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the backward that is under way, as DDP and FSDP do."""
    Variable._execution_engine.queue_callback(callback)


@contextmanager
def plain_tensors_as_replicas() -> Iterator[None]:
    """``implicit_replication``, which may be nested: torch's own switches it off for the outer one too."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


# What an operation on fake tensors raises where the result depends on values.
FAKE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@lru_cache
def fake_mode() -> FakeTensorMode:
    """The one mode that all fake tensors of this process belong to; a context manager."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def reduce_fully_sharded(root: nn.Module) -> None:
    """Reduce the gradients that several backwards without synchronisation left on gathered parameters.

    torch's own pipeline stages do the same at the end of a schedule; there is no public call for it.
    """
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for each in state._state_ctx.all_states:
        groups = getattr(each, "_fsdp_param_groups", None)  # one group, under another name, before torch 2.13
        if groups is None:
            groups = [each._fsdp_param_group] if each._fsdp_param_group else []
        for group in groups:
            group.post_backward()
    state._root_post_backward_final_callback()


# Names of torch 2.13; the old ones warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Fused attention with the log-sum-exp of each row, and its backward from that, which is what attention in blocks needs:
# scaled_dot_product_attention neither returns nor takes one.
HOST_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
HOST_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def attention_backend(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, enable_gqa: bool
) -> SDPBackend:
    """The kernel that scaled_dot_product_attention would take for these tensors, ``sdpa_kernel`` respected."""
    return SDPBackend(torch._fused_sdp_choice(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa))


def has_kernel(operator: OpOverload, device: torch.device) -> bool:
    """Whether an operator is written for a kind of device: there is no public way to ask."""
    key = torch._C._dispatch_key_for_device(device.type)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))


def before_compile(function: FunctionType) -> Any:
    """What ``torch.compile`` made a function of, or the function itself: only an attribute of its own tells."""
    return vars(function).get("_torchdynamo_orig_callable", function)


def operation_counter(see: Callable[[str, int | None, dict[str, Any]], None]) -> AbstractContextManager[Any]:
    """Calls ``see(name, flops, arguments)`` for each operation: torch's own FLOPs, ``None`` where it has no formula.

    torch's public counter has one number a module for all of them, forward, backward and recomputation together; the
    method replaced here is where it adds them up.
    """
    from torch.utils.flop_counter import FlopCounterMode

    class Counter(FlopCounterMode):
        def __init__(self) -> None:
            super().__init__(display=False)
            self.mod_tracker = nullcontext()  # type: ignore[assignment]  # its hooks are confused by recomputation

        def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
            formula = self.flop_registry.get(func_packet)
            flops = None
            if formula is not None:
                with suppress(AssertionError, ValueError):  # shapes that the formula does not know
                    flops = int(formula(*args, **kwargs, out_val=out))
            schema = getattr(getattr(func_packet, "default", None), "_schema", None)
            names = [argument.name for argument in schema.arguments] if schema else []
            see(str(func_packet), flops, {**dict(zip(names, args, strict=False)), **kwargs})
            return out

    return Counter()


def is_in_backward() -> bool:
    """Whether a backward runs on this thread: what computes with gradients on in there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Which memory a tensor has on this rank, and its bytes. ``to_local`` of a DTensor would be an operation."""
    local, _ = local_of(tensor)
    try:
        storage = local.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return id(local), local.numel() * local.element_size()


def local_of(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What a tensor is on this rank, and what makes a DTensor like it of another such part."""
    if not isinstance(tensor, DTensor):
        return tensor, lambda local: local
    spec = tensor._spec
    return tensor._local_tensor, lambda local: DTensor(local, spec, requires_grad=False)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that modules on ``device`` draw from."""
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    return generators[device.index or 0] if generators else torch.default_generator
