"""One model to start from: the same weights bit for bit on every mesh, whatever the ranks were seeded with.

A module that was built with real weights is broadcast from rank 0. One that was built on the meta device is
initialised here, module by module, each from a generator seeded with its name, so the result depends neither on the
mesh nor on the order, and no rank ever holds more than one unit of it whole.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.errors import ParallelConfigError

Owner = tuple[str, nn.Module]


class Materializer:
    """Brings the parameters and buffers of one module to their device with one value on every rank.

    Args:
        module: The LightningModule.
        device: Where the tensors go.
        seed: The same on every rank; what meta-device parameters are drawn from.
    """

    def __init__(self, module: nn.Module, device: torch.device, seed: int) -> None:
        self.module, self.device, self.seed = module, device, seed
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}  # id of the old tensor: (old, new); keeps the id alive
        self._done: set[int] = set()
        self._names = {id(child): name for name, child in module.named_modules()}
        self._check_initialisers()

    def bring(self, unit: nn.Module) -> None:
        """Materialise what ``unit`` holds and no earlier unit had; tied tensors stay tied."""
        owners = [owner for owner in unit.modules() if id(owner) not in self._done]
        self._done.update(map(id, owners))
        for owner in owners:
            fresh = self._move(owner)
            if fresh:
                self._initialise(owner, fresh)

    def _move(self, owner: nn.Module) -> list[str]:
        """Move own tensors, broadcast the real ones; returns the names of those that came from the meta device."""
        fresh = []
        stores: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in self._moved:
                    self._moved[id(tensor)] = (tensor, self._new(tensor))
                    if tensor.is_meta:
                        fresh.append(name)
                store[name] = self._moved[id(tensor)][1]
        return fresh

    def _new(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            data = torch.empty_like(tensor, device=self.device)
        else:
            data = tensor.detach().to(self.device).contiguous()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(data, src=0)
        if not isinstance(tensor, nn.Parameter):
            return data
        if not tensor.is_meta and data.data_ptr() == tensor.data_ptr():
            return tensor
        new = nn.Parameter(data, requires_grad=tensor.requires_grad)
        # What libraries hang on a parameter goes with it, but not the note that it already has its values.
        new.__dict__.update({k: v for k, v in tensor.__dict__.items() if k != "_is_hf_initialized"})
        return new

    def _initialise(self, owner: nn.Module, fresh: list[str]) -> None:
        """Run the module's own initialiser and keep from it only what came from the meta device."""
        kept = {n: t.detach().clone() for n, t in _own_tensors(owner) if n not in fresh}
        initialise = self._initialiser(owner)
        assert initialise is not None
        seed = zlib.crc32(f"{self.seed}:{self._names.get(id(owner), '')}".encode())
        on_host = self.device.type == torch.default_generator.device.type
        fork: dict[str, Any] = {} if on_host else {"device_type": self.device.type}
        with torch.random.fork_rng([] if on_host else [self.device], **fork), torch.no_grad():
            torch.manual_seed(seed)
            with torch.device(self.device):
                initialise()
        with torch.no_grad():
            for name, tensor in _own_tensors(owner):
                if name in kept:
                    tensor.copy_(kept[name])

    def _initialiser(self, owner: nn.Module) -> Callable[[], Any] | None:
        """``reset_parameters``, torch's convention, else what a Hugging Face model does for the modules in it."""
        own: Any = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
        if callable(own):
            return own  # type: ignore[no-any-return]
        for model in self.module.modules():
            initialise: Any = getattr(model, "_init_weights", None)
            if callable(initialise) and hasattr(model, "config") and any(child is owner for child in model.modules()):
                return partial(initialise, owner)
        return None

    def _check_initialisers(self) -> None:
        lacking = [
            f"{name or 'the module itself'} ({type(owner).__name__}: {', '.join(meta)})"
            for name, owner in self.module.named_modules()
            if (meta := [n for n, t in _own_tensors(owner) if t.is_meta]) and self._initialiser(owner) is None
        ]
        if lacking:
            raise ParallelConfigError(
                f"Built on the meta device, without a way to give these their values: {'; '.join(lacking[:5])}. Define "
                "reset_parameters() in each class (it sets the parameters and buffers that it owns), or build the module "
                "off the meta device."
            )


def _own_tensors(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for store in (owner._parameters, owner._buffers):
        for name, tensor in store.items():
            if tensor is not None:
                yield name, tensor


def fingerprint(module: nn.Module) -> str:
    """A digest of names, shapes, dtypes and devices of everything the module holds: what ranks must agree on."""
    lines = [f"{name} {tuple(t.shape)} {t.dtype} {t.is_meta} {t.requires_grad}" for name, t in _all_tensors(module)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _all_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
