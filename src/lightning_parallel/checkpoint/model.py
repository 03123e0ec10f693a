"""The weights of a module as a state dict, and back, on any mesh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_parallel._torch import HOST
from lightning_parallel.checkpoint.layout import copy_whole, gather
from lightning_parallel.checkpoint.names import plain_name
from lightning_parallel.checkpoint.tree import map_children
from lightning_parallel.schemes.pipeline.ghost import ghosts_in_step, is_ghost


def model_state_dict(module: nn.Module, *, full: bool, is_writer: bool = True) -> dict[str, Any]:
    """``module.state_dict()`` with the names of the module without wrappers.

    Every key of the one-device module is there, tied weights under each of their names. State that is no tensor
    passes through.

    Args:
        module: The module, sharded or not.
        full: Gather each sharded tensor, one at a time (a collective of all ranks), and keep it in host memory
            on the writer; the other ranks get ``{}``. Otherwise tensors stay as they are: shards that share
            memory with the module.
        is_writer: Whether this rank keeps the gathered tensors.
    """
    # With the parameters themselves, so that a tied weight is seen to be one.
    kept = module.state_dict(keep_vars=True)
    detached: dict[int, Tensor] = {}
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in kept.items():
        if isinstance(value, Tensor):
            value = detached.setdefault(id(value), value.detach())
        state[plain_name(name)] = value
    if hasattr(kept, "_metadata"):
        # Versions of the modules' formats, which torch keeps for its own upgrades.
        versions = {plain_name(name): version for name, version in kept._metadata.items()}
        state._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return to_host(state, is_writer=is_writer) if full else state


def load_model_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load a state dict in place: parameters keep their identity and their sharding.

    Args:
        module: The module, sharded on any mesh or not at all.
        state: Plain tensors of the whole shape, of which each rank copies its own part without communication, or
            tensors sharded like the module's. Names may have the components that wrappers add.
        strict: As for ``module.load_state_dict``, which does the loading: its hooks run and its errors are raised.

    Returns:
        What ``module.load_state_dict`` returns: the missing and the unexpected keys.
    """
    own = {plain_name(name): name for name in module.state_dict()}
    renamed: OrderedDict[str, Any] = OrderedDict(
        (own.get(plain_name(name), name), value) for name, value in state.items()
    )
    if hasattr(state, "_metadata"):
        versions = {plain_name(name): version for name, version in state._metadata.items()}
        renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name, versions[plain_name(name)]) for name, _ in module.named_modules() if plain_name(name) in versions
        )
    with ShardedCopy(), ghosts_in_step():  # torch warns where it copies into a tensor on the meta device
        return module.load_state_dict(renamed, strict=strict)


class ShardedCopy(TorchFunctionMode):
    """Inside it, ``sharded.copy_(whole)`` copies this rank's part of a plain tensor of the same shape.

    This is what ``load_state_dict`` calls for every parameter, so modules' own loading code and hooks work on
    whole tensors as they do on one device.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle ``copy_`` into a sharded tensor; run anything else unchanged."""
        if func == Tensor.copy_ and len(args) > 1:
            target, source = args[:2]
            whole = isinstance(source, Tensor) and not isinstance(source, DTensor)
            if isinstance(target, DTensor) and whole and target.shape == source.shape:
                copy_whole(target, source)
                return target
        return func(*args, **(kwargs or {}))


def to_host(tree: Any, *, is_writer: bool) -> Any:
    """Gather every sharded tensor in nested dicts, lists and tuples, one at a time. A collective.

    Returns:
        The same tree of whole tensors in host memory on the writer; ``{}`` on the other ranks. A tensor that occurs
        twice is gathered once.
    """
    seen: dict[int, Tensor] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen[id(value)] = _to_host(value, is_writer)
            return seen[id(value)]
        return map_children(convert, value)

    result = convert(tree)
    return result if is_writer else {}


def _to_host(value: Tensor, is_writer: bool) -> Tensor:
    if is_ghost(value):
        return value
    if not isinstance(value, DTensor):
        return value.detach().to(HOST) if is_writer else value
    whole = gather(value)
    if not is_writer:
        return torch.empty(0)  # the gathered tensor is freed at once
    whole = whole.to(HOST)
    # FSDP pads its shards: a view of the padded storage would be saved with the padding.
    return whole.clone() if whole.untyped_storage().nbytes() != whole.nbytes else whole
