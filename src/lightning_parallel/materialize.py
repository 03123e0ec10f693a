"""One model to start from: the same weights bit for bit on every mesh, whatever the ranks were seeded with.

A module that was built with real weights is broadcast from rank 0. One that was built on the meta device is
initialised here, module by module, each from a generator seeded with its name, so the result depends neither on the
mesh nor on the order, and no rank ever holds more than one unit of it whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.pipeline.ghost import is_ghost


class Materializer:
    """Brings the parameters and buffers of one module to their device with one value on every rank.

    Args:
        module: The LightningModule.
        device: Where the tensors go.
        seed: The same on every rank; what meta-device parameters are drawn from.
        agreed: Real weights are the same on every rank already: see `agree`.
    """

    def __init__(self, module: nn.Module, device: torch.device, seed: int, *, agreed: bool = False) -> None:
        self.module, self.device, self.seed, self._agreed = module, device, seed, agreed
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}  # id of the old tensor: (old, new); keeps the id alive
        self._done: set[int] = set()
        self._names = {id(child): name for name, child in module.named_modules()}
        # The innermost Hugging Face model around a module knows how to initialise it: named_modules goes inwards.
        self._pretrained: dict[int, Callable[[nn.Module], Any]] = {}
        for model in module.modules():
            initialise: Any = getattr(model, "_init_weights", None)
            if callable(initialise) and hasattr(model, "config"):
                self._pretrained.update({id(child): initialise for child in model.modules()})
        self._check_initialisers()

    def bring(self, unit: nn.Module) -> None:
        """Materialise what ``unit`` holds and no earlier unit had; tied tensors stay tied."""
        owners = [owner for owner in unit.modules() if id(owner) not in self._done]
        self._done.update(map(id, owners))
        fresh = {id(tensor) for owner in owners for tensor in self._move(owner)}
        if not fresh:
            return
        here = set(map(id, owners))
        # Children first: some initialisers (nn.MultiheadAttention, GPT-2) then change what lies below. Not where that
        # belongs to another unit, which is in shards by now.
        for owner in reversed(owners):
            below = list(owner.modules())
            whole = all(id(child) in here for child in below)
            self._initialise(owner, below if whole else [owner], fresh)
        for owner in owners:
            for name, tensor in _own_tensors(owner):
                if id(tensor) in fresh and tensor.dtype != torch.bool and _is_unset(tensor).any():
                    raise self._lacking([f"{self._place(owner)}: {name}"], "its initialiser leaves out")

    def _move(self, owner: nn.Module) -> list[Tensor]:
        """Move own tensors, broadcast the real ones; returns those that came from the meta device."""
        fresh = []
        stores: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is None or is_ghost(tensor):
                    continue
                if id(tensor) not in self._moved:
                    self._moved[id(tensor)] = (tensor, self._new(tensor))
                    if tensor.is_meta:
                        fresh.append(self._moved[id(tensor)][1])
                store[name] = self._moved[id(tensor)][1]
        return fresh

    def _new(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            data = torch.full_like(tensor, _unset(tensor.dtype), device=self.device)
        else:
            data = tensor.detach().to(self.device).contiguous()
            if not self._agreed and dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(data, src=0)
        if not isinstance(tensor, nn.Parameter):
            return data
        if not tensor.is_meta and data.data_ptr() == tensor.data_ptr():
            return tensor
        new = nn.Parameter(data, requires_grad=tensor.requires_grad)
        # What libraries hang on a parameter goes with it, but not the note that it already has its values.
        new.__dict__.update({k: v for k, v in tensor.__dict__.items() if k != "_is_hf_initialized"})
        return new

    def _initialise(self, owner: nn.Module, below: list[nn.Module], fresh: set[int]) -> None:
        """Run the module's own initialiser and keep from it only what came from the meta device."""
        initialise = self._initialiser(owner)
        tensors = [(child, name, tensor) for child in below for name, tensor in _own_tensors(child)]
        if initialise is None or not any(id(tensor) in fresh for _, _, tensor in tensors):
            return
        kept = [(child, name, t.detach().clone()) for child, name, t in tensors if id(t) not in fresh]
        seed = zlib.crc32(f"{self.seed}:{self._names[id(owner)]}".encode())
        on_host = self.device.type == torch.default_generator.device.type
        fork: dict[str, Any] = {} if on_host else {"device_type": self.device.type}
        with torch.random.fork_rng([] if on_host else [self.device], **fork), torch.no_grad():
            torch.manual_seed(seed)
            with torch.device(self.device):
                initialise()
            for child, name, value in kept:
                dict(_own_tensors(child))[name].copy_(value)

    def _initialiser(self, owner: nn.Module) -> Callable[[], Any] | None:
        """``reset_parameters``, torch's convention, and then what a Hugging Face model does for the modules in it."""
        own: Any = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
        steps: list[Callable[[], Any]] = [own] if callable(own) else []
        if id(owner) in self._pretrained:
            steps.append(partial(self._pretrained[id(owner)], owner))
        return partial(_call_all, steps) if steps else None

    def _check_initialisers(self) -> None:
        lacking = [
            f"{self._place(owner)}: {', '.join(meta)}"
            for owner in self.module.modules()
            if (meta := [n for n, t in _own_tensors(owner) if t.is_meta]) and self._initialiser(owner) is None
        ]
        if lacking:
            raise self._lacking(lacking, "there is no way to give values to")

    def _place(self, owner: nn.Module) -> str:
        return f"{self._names[id(owner)] or 'the module itself'} ({type(owner).__name__})"

    @staticmethod
    def _lacking(places: list[str], what: str) -> ParallelConfigError:
        shown = "; ".join(places[:5]) + ("; …" if len(places) > 5 else "")
        return ParallelConfigError(
            f"Built on the meta device, and {what} {shown}. Define reset_parameters() in the class (it sets every "
            "parameter and buffer that the module itself owns), or build the module off the meta device."
        )


def _call_all(steps: list[Callable[[], Any]]) -> None:
    for step in steps:
        step()


def _unset(dtype: torch.dtype) -> float | int | bool:
    """What a tensor holds until its initialiser has run, so that one which was left out shows."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(tensor: Tensor) -> Tensor:
    return tensor.isnan() if tensor.is_floating_point() or tensor.is_complex() else tensor == _unset(tensor.dtype)


def _own_tensors(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for store in (owner._parameters, owner._buffers):
        for name, tensor in store.items():
            if tensor is not None and not is_ghost(tensor):
                yield name, tensor


def agree(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's values of what was built off the meta device, one tensor at a time, in place."""
    with torch.no_grad():
        for tensor in {id(tensor): tensor for _, tensor in _all_tensors(module)}.values():
            if not tensor.is_meta:
                value = tensor.detach().to(device).contiguous()
                dist.broadcast(value, src=0)
                tensor.copy_(value)


def describe(module: nn.Module) -> list[str]:
    """One line a parameter or buffer, with all that ranks must agree on: a tied one names the first of its places."""
    first: dict[int, str] = {}
    lines = []
    for name, tensor in _all_tensors(module):
        line = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        line += " on meta" if tensor.is_meta else ""
        line += " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        other = first.setdefault(id(tensor), name)
        lines.append(line if other == name else f"{line} tied to {other}")
    return lines


def _all_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
