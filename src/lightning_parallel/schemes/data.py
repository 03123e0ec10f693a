"""The data axes: replicas (``ddp``) with gradients reduced in buckets, and shards (``fsdp``) by ``fully_shard``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils.hooks import RemovableHandle

from lightning_parallel._torch import queue_backward_callback
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.pipeline.ghost import is_ghost
from lightning_parallel.schemes.tensor.storage import shard_dim_for_fsdp

BUCKET_BYTES = 25 * 2**20  # DDP's own default


@dataclass(frozen=True, kw_only=True, slots=True)
class FullyShardedOptions:
    """How ``fully_shard`` is used; the strategy's docstring explains each."""

    reshard_after_forward: bool | int = True
    optimizer_state_only: bool = False
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    cpu_offload: bool = False
    prefetch: int = 0


def mixed_precision_policy(given: MixedPrecisionPolicy | Mapping[str, Any] | None) -> MixedPrecisionPolicy:
    """The policy itself, or one made of a mapping in which dtypes are names, as a YAML file has them.

    Raises:
        ParallelConfigError: An unknown option or dtype.
    """
    if not isinstance(given, Mapping):
        return given or MixedPrecisionPolicy()
    known = {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}
    values = dict(given)
    for name, value in values.items():
        dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        if name not in known or (name.endswith("dtype") and not isinstance(dtype, torch.dtype | None)):
            raise ParallelConfigError(
                f"mp_policy: {name}={value!r}. It takes {', '.join(sorted(known))}; dtypes by name, bfloat16 for one."
            )
        values[name] = dtype
    return MixedPrecisionPolicy(**values)


def cannot_be_sharded(parameter: nn.Parameter) -> bool:
    """Whether ``fully_shard`` refuses the parameter: it takes no scalars (a learnt temperature, a gate).

    They stay whole on every rank, and their gradients are averaged as replicas' are.
    """
    return parameter.ndim == 0


def shard_unit(unit: nn.Module, mesh: DeviceMesh, options: FullyShardedOptions, *, is_root: bool) -> None:
    """Fully shard what ``unit`` holds and nothing below it has taken.

    Args:
        unit: A block, or the LightningModule as the last one.
        mesh: ``(fsdp,)`` or ``(ddp, fsdp)``.
        options: Of the strategy.
        is_root: The root's inputs are cast by the strategy, and its parameters stay gathered through a step.
    """
    size = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard:
        dim = shard_dim_for_fsdp(parameter, size)
        if dim is None:
            raise ParallelConfigError(
                f"fsdp={size} divides no free dim of a parameter of shape {tuple(parameter.shape)} that tp splits. "
                "Use an fsdp size that divides it, or give its module the role replicate."
            )
        return Shard(dim)

    policy = options.mp_policy
    if is_root:
        policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, None, cast_forward_inputs=False)
    fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=False if is_root or options.optimizer_state_only else options.reshard_after_forward,
        shard_placement_fn=placement,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        if options.cpu_offload
        else OffloadPolicy(),
        ignored_params={p for p in unit.parameters() if is_ghost(p) or cannot_be_sharded(p)},
    )


def set_prefetch(blocks: Sequence[nn.Module], depth: int) -> None:
    """Gather ``depth`` blocks ahead, in forward and in backward; 0 leaves FSDP's own single look-ahead."""
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for i, unit in enumerate(units if depth else []):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(i - depth, 0) : i][::-1])


class _Bucket:
    """Parameters whose gradients travel together, and the state of one backward."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.waiting = len(parameters)
        self.flat: Tensor | None = None
        self.work: dist.Work | None = None

    def reset(self) -> None:
        self.waiting, self.flat, self.work = len(self.parameters), None, None


def _fill_buckets(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Buckets of about ``BUCKET_BYTES``, of one dtype and device each, last parameters first."""
    pending: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets: list[_Bucket] = []
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.device)
        pending.setdefault(key, []).append(parameter)
        sizes[key] = sizes.get(key, 0) + _local(parameter).numel() * parameter.element_size()
        if sizes[key] >= BUCKET_BYTES:
            buckets.append(_Bucket(pending.pop(key)))
            del sizes[key]
    return buckets + [_Bucket(rest) for rest in pending.values()]


class GradientReducer:
    """Averages gradients over replicas, bucket by bucket, while backward still runs.

    Buckets fill in the reverse order of the parameters and are sent in that order on every rank, so that ranks
    which use different parameters still pair the same collectives; a gradient that one rank lacks counts as zero.
    Frozen parameters are left out; when some are frozen or unfrozen, the buckets follow.

    [Note: unused parameters]  A parameter without a gradient on any rank keeps ``None``, as on one device. After the
    first window the ranks exchange which parameters were used. While they agree nothing more is exchanged, and a rank
    that departs from it raises; if they differ, or with ``find_unused_parameters``, they exchange it every time.

    Args:
        parameters: All parameters, in the same order on every rank; DTensors are reduced shard by shard.
        group: The replicas.
        find_unused_parameters: The parameters used change from backward to backward.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, find_unused_parameters: bool = False
    ) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.enabled = True
        self._always = find_unused_parameters
        self._parameters = list(parameters)
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._buckets_of: dict[tuple[bool, ...], list[_Bucket]] = {}  # by which parameters are trained
        self._expected: dict[tuple[bool, ...], list[bool]] = {}
        self._layouts: dict[nn.Parameter, tuple[Placement, ...]] = {}  # of gradients that are DTensors, as last seen
        self._trained: tuple[bool, ...] = ()
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._next = 0
        self._running = self._queued = False
        # A parameter's hooks are out of sight of Python's collector: one that held this would keep the model for ever.
        self._hook = partial(_on_gradient, weakref.ref(self))
        self._follow()

    def _follow(self) -> None:
        """Take the buckets of the parameters that are trained now."""
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        if trained == self._trained:
            return
        self._trained = trained
        parameters = [p for p in self._parameters if p.requires_grad]
        if trained not in self._buckets_of:
            self._buckets_of[trained] = _fill_buckets(parameters)
        self._buckets = self._buckets_of[trained]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        for parameter in parameters:
            if parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module (for weight averaging, say) is not trained and has nothing to reduce."""

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks.values():
            hook.remove()

    def start(self) -> None:
        """Called before a backward: even a rank without any gradient takes part."""
        if self.enabled and not self._running:
            self._follow()
            self._running = True

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self.enabled:
            return
        self.start()
        if not self._queued:
            self._queued = True
            queue_backward_callback(self.finish)
        bucket = self._bucket_of[parameter]
        bucket.waiting -= 1
        if bucket.flat is not None:
            raise RuntimeError(
                f"A parameter of shape {tuple(parameter.shape)} got a second gradient in one backward, after its "
                "bucket was sent. Use checkpointing with use_reentrant=False."
            )
        while self._next < len(self._buckets) and self._buckets[self._next].waiting <= 0:
            self._send(self._buckets[self._next])
            self._next += 1

    def _send(self, bucket: _Bucket) -> None:
        pieces = [
            torch.zeros_like(_local(p)).flatten() if p.grad is None else _local(p.grad).flatten()
            for p in bucket.parameters
        ]
        bucket.flat = torch.cat(pieces).div_(self.size)
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def finish(self) -> None:
        """Send what is left, wait, and put the averages in place; runs at the end of each backward."""
        if not self._running or not self.enabled:
            return
        self._running = self._queued = False
        used = [p.grad is not None for bucket in self._buckets for p in bucket.parameters]
        for bucket in self._buckets[self._next :]:
            self._send(bucket)
        anywhere = iter(self._used_anywhere(used))
        for bucket in self._buckets:
            assert bucket.work is not None and bucket.flat is not None
            bucket.work.wait()
            averages = bucket.flat.split([_local(p).numel() for p in bucket.parameters])
            for parameter, average in zip(bucket.parameters, averages, strict=True):
                if isinstance(parameter.grad, DTensor):
                    self._layouts[parameter] = parameter.grad.placements
                if next(anywhere):
                    _set_gradient(parameter, average, self._layouts.get(parameter))
            bucket.reset()
        self._next = 0

    def _used_anywhere(self, used: list[bool]) -> list[bool]:
        expected = self._expected.get(self._trained)
        if expected is not None and not self._always:
            if used != expected:
                raise RuntimeError(
                    "The parameters that got a gradient are not those of the first step. With replicas that is right "
                    "only with DataParallel(find_unused_parameters=True)."
                )
            return used
        device = self._buckets[0].flat.device if self._buckets and self._buckets[0].flat is not None else None
        counts = torch.tensor(used, dtype=torch.int32, device=device)
        dist.all_reduce(counts, group=self.group)
        agree = bool(((counts == 0) | (counts == self.size)).all())
        self._expected[self._trained], self._always = used, self._always or not agree
        return (counts > 0).tolist()


def _on_gradient(reducer: weakref.ref[GradientReducer], parameter: nn.Parameter) -> None:
    found = reducer()
    if found is not None:
        found._on_gradient(parameter)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _set_gradient(parameter: nn.Parameter, local: Tensor, layout: tuple[Placement, ...] | None) -> None:
    """Put a reduced local gradient in place; a DTensor's gradient has ``layout`` or else that of the parameter."""
    with torch.no_grad():
        if parameter.grad is not None:
            _local(parameter.grad).copy_(local.view_as(_local(parameter.grad)))
        elif isinstance(parameter, DTensor):
            grad = local.view_as(parameter.to_local()).clone()
            parameter.grad = DTensor.from_local(
                grad, parameter.device_mesh, layout or parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        else:
            parameter.grad = local.view_as(parameter).clone()


def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients that are partial over ``tp`` (norms on sequence shards, say), all in one message a dtype.

    FSDP does it for what it shards; this is for the rest, once a window.
    """
    pending: dict[tuple[DeviceMesh, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(isinstance(placement, Partial) for placement in grad.placements):
            pending.setdefault((grad.device_mesh, grad.dtype), []).append(parameter)
    for (mesh, _), group in pending.items():
        flat = torch.cat([_local(p.grad).flatten() for p in group if p.grad is not None])
        dist.all_reduce(flat, group=mesh.get_group())
        for parameter, total in zip(group, flat.split([_local(p).numel() for p in group]), strict=True):
            assert isinstance(parameter.grad, DTensor)
            parameter.grad = DTensor.from_local(
                total.view_as(parameter.grad.to_local()), mesh, [Replicate()], run_check=False
            )


def sum_over(group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
    """Add up, over ``group``, the gradients of parameters of which each rank has a copy, in one message a dtype.

    Every rank gets the same bits. A parameter without a gradient on any rank keeps ``None``.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        return
    device = _local(parameters[0]).device
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used, group=group)
    pending: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if count:
            pending.setdefault(parameter.dtype, []).append(parameter)
    for same in pending.values():
        sizes = [_local(p).numel() for p in same]
        flat = torch.cat([
            torch.zeros_like(_local(p)).flatten() if p.grad is None else _local(p.grad).flatten() for p in same
        ])  # fmt: skip
        dist.all_reduce(flat, group=group)
        for parameter, total in zip(same, flat.split(sizes), strict=True):
            _set_gradient(parameter, total, None)
