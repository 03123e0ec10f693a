"""The forward of each role over the ``tp`` axis.

[Note: what flows between modules]  Between the parallel layers activations are plain tensors, the same on every ``tp``
rank. With sequence parallelism the residual stream inside the blocks is a DTensor sharded along the sequence instead:
its sizes stay the global ones, so code between the layers means what it means on one device. A layer that receives
a DTensor gathers it; a row-wise layer returns one, reduced. Inside a ``local`` region tensors are plain local shards.

Every gradient follows from DTensor's own rules: a replicated input whose ``to_local`` has ``Partial`` gradients is
all-reduced in backward (Megatron's *f*), or reduce-scattered where it came from sequence shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_parallel._torch import plain_tensors_as_replicas, tree_map
from lightning_parallel.errors import PlanError
from lightning_parallel.schemes.tensor.fused import pack
from lightning_parallel.schemes.tensor.lazy import PROPERTIES, LazyShard
from lightning_parallel.schemes.tensor.loss import LOGITS_HANDLERS
from lightning_parallel.schemes.tensor.random import SplitStreams
from lightning_parallel.schemes.tensor.storage import Storage, split_evenly
from lightning_parallel.schemes.tensor.view import GlobalView

Forward = Callable[..., Any]
Place = tuple[nn.Module, str, Storage]  # who holds a parameter, under which name, and how it is stored


@dataclass(slots=True)
class Context:
    """What every parallel module of one model shares."""

    tp: DeviceMesh
    streams: SplitStreams
    sequence_parallel: bool


@dataclass(slots=True)
class ModuleState:
    """What one module needs to run in parallel.

    Attributes:
        role: Name of the role, or ``None`` for a module that the plan leaves whole.
        storages: Attribute name to storage, for the module's own parameters.
        parts: Ratio of the parts of a packed projection.
        in_local: Inside a ``local`` region: inputs and outputs are plain local shards.
        in_block: Inside a repeated block, where the residual stream may be sharded along the sequence.
        in_region: Inside a module that gathers its inputs for the projections below it.
    """

    context: Context
    role: str | None
    storages: dict[str, Storage] = field(default_factory=dict)
    parts: tuple[int, ...] = ()
    in_local: bool = False
    in_block: bool = False
    in_region: bool = False

    @property
    def shards_sequence(self) -> bool:
        """Whether outputs of row-wise layers are sharded along the sequence."""
        return self.in_block and self.context.sequence_parallel


def replicated(x: Tensor, tp: DeviceMesh) -> DTensor:
    """A plain tensor (the same on every rank) or any DTensor, as a replicated DTensor."""
    if isinstance(x, LazyShard):
        return x.replicated()
    if not isinstance(x, DTensor):
        return DTensor.from_local(x, tp, [Replicate()], run_check=False)
    if isinstance(x.placements[0], Replicate):
        return x  # a redistribution to what it is would all-reduce a partial gradient that its source may scatter
    return x.redistribute(placements=[Replicate()])


def enter(x: Tensor, tp: DeviceMesh) -> Tensor:
    """Full input, plain; each rank's backward contributes a part of its gradient."""
    return replicated(x, tp).to_local(grad_placements=[Partial()])


class _LocalInput(torch.autograd.Function):
    """Nothing forward; refuses the gradient of an input that met the summed output of a ``local`` region."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if isinstance(grad, DTensor):
            raise PlanError(
                "A module with the role local adds its input to the output of a rowwise layer (a residual, say). Its "
                "input's gradient is then whole, where those of the column-wise layers are parts. Take the role local "
                "away: the module then runs in the global view."
            )
        return grad


def leave(x: Any) -> Any:
    """A DTensor as a plain tensor, the same on every rank; anything else as it is."""
    if isinstance(x, LazyShard):
        return x
    return x.redistribute(placements=[Replicate()]).to_local() if isinstance(x, DTensor) else x


def wrap_shards(local: Tensor, tp: DeviceMesh, dim: int, size: int) -> DTensor:
    """Local shards along ``dim`` as the DTensor whose size there is ``size``."""
    dim %= local.ndim
    shape = torch.Size((*local.shape[:dim], size, *local.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, tp, [Shard(dim)], run_check=False, shape=shape, stride=stride)


@contextmanager
def global_view() -> Iterator[None]:
    """Let plain tensors count as replicas beside DTensors, as long as it lasts.

    torch's fused encoder layer is off meanwhile: it reads its submodules' weights itself, past their forwards.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with plain_tensors_as_replicas():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def sequence_dim(x: Tensor) -> int:
    """The dim that sequence parallelism shards: the one before the features."""
    return max(x.ndim - 2, 0)


def reduce_partial(local: Tensor, state: ModuleState) -> DTensor:
    """Sum a row-wise layer's local results: scattered along the sequence inside a block, else on every rank."""
    partial = DTensor.from_local(local, state.context.tp, [Partial()], run_check=False)
    scatter = state.shards_sequence and local.ndim > 2
    return partial.redistribute(placements=[Shard(sequence_dim(local)) if scatter else Replicate()])


def column_linear(module: nn.Module, state: ModuleState, x: Tensor) -> Tensor:
    """Output features split. Shape: (…, in) to (…, out), or to (…, out / tp) in a ``local`` region."""
    tp = state.context.tp
    if state.in_local:
        state.context.streams.enter()
    else:
        x = enter(x, tp)
    y = _linear(module, state, x, bias=True)
    if state.in_local:
        return y
    if len(state.parts) > 1:
        return pack(y, tp, _out_features(module), state.parts)
    sharded = wrap_shards(y, tp, -1, _out_features(module))
    return LazyShard(sharded, LOGITS_HANDLERS) if state.role == "vocab_out" else sharded


def row_linear(module: nn.Module, state: ModuleState, x: Tensor) -> Tensor:
    """Input features split, outputs summed over ``tp``. Shape: (…, in) to (…, out), the bias added once."""
    tp = state.context.tp
    if isinstance(x, LazyShard):
        x = x.full()
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Shard(x.ndim - 1)]).to_local()
    elif not state.in_local:
        x = replicated(x, tp).redistribute(placements=[Shard(x.ndim - 1)]).to_local()
    y: Tensor = reduce_partial(_linear(module, state, x, bias=False), state)
    state.context.streams.leave()
    bias = getattr(module, "bias", None)
    if bias is not None:
        y = y + bias
    return y if state.in_region or state.shards_sequence else leave(y)


def vocab_embedding(module: nn.Embedding, state: ModuleState, ids: Tensor) -> Tensor:
    """Rows (vocabulary) split; ids outside this rank's rows contribute zeros. Shape: ids (…) to (…, features)."""
    tp = state.context.tp
    if isinstance(ids, DTensor):
        ids = ids.full_tensor()
    weight = state.storages["weight"].local(module.weight)
    start, stop = split_evenly(module.num_embeddings, tp.size(), tp.get_local_rank())
    mine = (ids >= start) & (ids < stop)
    in_range = (ids >= 0) & (ids < module.num_embeddings)
    torch._assert_async(in_range.all(), f"an index of {type(module).__name__} is not in [0, {module.num_embeddings})")
    padding = module.padding_idx
    padding = padding - start if padding is not None and start <= padding < stop else None
    if weight.size(0):
        rows = F.embedding((ids - start).where(mine, 0), weight, padding)
        rows = rows * mine.unsqueeze(-1).to(rows.dtype)
    else:  # more ranks than rows
        rows = weight.sum() + weight.new_zeros((*ids.shape, weight.size(1)))
    return leave(DTensor.from_local(rows, tp, [Partial()], run_check=False))  # type: ignore[no-any-return]


def _linear(module: nn.Module, state: ModuleState, x: Tensor, *, bias: bool) -> Tensor:
    weight = state.storages["weight"].local(module.weight)  # type: ignore[arg-type]
    b = state.storages["bias"].local(module.bias) if bias and getattr(module, "bias", None) is not None else None  # type: ignore[arg-type]
    return F.linear(x, weight.t() if is_transposed(module) else weight, b)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (in, out), as in Hugging Face's ``Conv1D``."""
    return not isinstance(module, nn.Linear)


def _out_features(module: nn.Module) -> int:
    weight: Any = module.weight
    return int(weight.size(1 if is_transposed(module) else 0))


@contextmanager
def whole_parameters(places: Sequence[Place], *, partial: bool) -> Iterator[None]:
    """Parameters at ``places`` as plain tensors while a forward runs."""
    saved = [(owner, name, owner._parameters[name]) for owner, name, _ in places]
    for owner, name, storage in places:
        parameter = owner._parameters[name]
        if isinstance(parameter, DTensor):  # else an outer module has done it
            owner._parameters[name] = storage.local(parameter, partial=partial)
    try:
        yield
    finally:
        for owner, name, parameter in saved:
            owner._parameters[name] = parameter


def whole_forward(
    original: Forward, state: ModuleState, places: Sequence[Place], by_rules: bool, *args: Any, **kwargs: Any
) -> Any:
    """A module that the plan leaves whole: plain inputs meet plain parameters.

    With a DTensor as input a ``norm`` runs on the local tokens, a module that keeps the global view (``by_rules``: a
    linear layer, or one with parallel layers below) by DTensor's rules, and any other on the full tensors, like every
    other ``tp`` rank.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, (DTensor, LazyShard))]
    if not tensors:
        with whole_parameters(places, partial=state.in_local):
            return original(*args, **kwargs)
    x, tp = tensors[0], state.context.tp
    if by_rules:
        return original(*args, **kwargs)
    if isinstance(x, DTensor) and state.role == "norm" and len(tensors) == 1 and args and x is args[0]:
        placement = x.placements[0]
        if isinstance(placement, (Shard, Replicate)) and placement != Shard(x.ndim - 1):
            with whole_parameters(places, partial=isinstance(placement, Shard)):
                y = original(x.to_local(), *args[1:], **kwargs)
            return DTensor.from_local(y, tp, [placement], run_check=False, shape=x.shape, stride=x.stride())

    def whole(value: Any) -> Any:
        return replicated(value, tp).to_local() if isinstance(value, (DTensor, LazyShard)) else value

    args, kwargs = convert(whole, args, kwargs)
    with whole_parameters(places, partial=False):
        out = original(*args, **kwargs)
    return tree_map(lambda v: replicated(v, tp) if isinstance(v, Tensor) and v.is_floating_point() else v, out)


def convert(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``change`` to every leaf, once per object: ``attention(x, x, x)`` stays a call with one tensor."""
    seen: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in seen:
            seen[id(value)] = change(value)
        return seen[id(value)]

    return tree_map(once, (args, kwargs))  # type: ignore[no-any-return]


def region_forward(original: Forward, state: ModuleState, *args: Any, **kwargs: Any) -> Any:
    """The module between a block and its projections: gather its inputs once, for all of them."""
    tp, local = state.context.tp, state.in_local

    def come_in(x: Any) -> Any:
        if not isinstance(x, Tensor) or not (isinstance(x, (DTensor, LazyShard)) or x.requires_grad):
            return x
        return _LocalInput.apply(enter(x, tp)) if local else replicated(x, tp)  # type: ignore[no-untyped-call]

    args, kwargs = convert(come_in, args, kwargs)
    try:
        with nullcontext() if local else GlobalView(tp):
            out = original(*args, **kwargs)
    finally:
        state.context.streams.leave()
    return out if state.shards_sequence else tree_map(leave, out)


def block_forward(original: Forward, state: ModuleState, is_last: bool, *args: Any, **kwargs: Any) -> Any:
    """A repeated block: with sequence parallelism the residual stream enters sharded, and leaves whole at the end.

    It brings its own rules, so that it may be called outside a step too (a callback that samples from the model).
    """
    if not state.shards_sequence:
        with global_view():
            return original(*args, **kwargs)
    tp = state.context.tp
    hidden = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()), None)

    def come_in(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or not x.is_floating_point():
            return x
        if x is hidden and x.ndim > 2:
            return replicated(x, tp).redistribute(placements=[Shard(sequence_dim(x))])
        return replicated(x, tp) if x.requires_grad or isinstance(x, LazyShard) else x

    args, kwargs = convert(come_in, args, kwargs)
    with global_view():
        out = original(*args, **kwargs)

    def come_out(v: Any) -> Any:
        # What is no hidden state (a loss of the block's own) is for the code outside, at once.
        if not isinstance(v, DTensor) or not (is_last or v.ndim < 3):
            return v
        # A clone: an in-place operation on a view would lose the hook that FSDP puts on a block's output.
        return leave(v).clone()

    return tree_map(come_out, out)


def embedding_forward(module: nn.Module, state: ModuleState) -> Forward:
    """Forward for ``vocab_in``, keeping what a subclass does around the look-up (a scale, say)."""
    assert isinstance(module, nn.Embedding)
    if type(module).forward is nn.Embedding.forward:
        return partial(vocab_embedding, module, state)
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        saved = module._parameters["weight"]
        module._parameters["weight"] = LookupWeight(module, state)  # type: ignore[assignment]
        try:
            return original(*args, **kwargs)
        finally:
            module._parameters["weight"] = saved

    return forward


class LookupWeight(Tensor):
    """Stands for a split embedding weight inside a subclass's forward: knows ``F.embedding`` and nothing else."""

    _lookup: Callable[[Tensor], Any]
    _weight: Tensor

    @staticmethod
    def __new__(cls, module: nn.Embedding, state: ModuleState) -> LookupWeight:
        """Without storage of its own."""
        weight = module.weight
        self = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)
        self._lookup, self._weight = partial(vocab_embedding, module, state), weight
        return self

    def __init__(self, module: nn.Embedding, state: ModuleState) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding:
            weight = args[1]
            module = weight._lookup.args[0]
            saved, module._parameters["weight"] = module._parameters["weight"], weight._weight
            try:
                return weight._lookup(args[0])
            finally:
                module._parameters["weight"] = saved
        if func in PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise PlanError(f"vocab_in: the embedding's forward uses its weight in {func}; only a look-up can be split.")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for a method of instances
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PlanError(f"vocab_in: the embedding's forward uses its weight in {func}; only a look-up can be split.")
