"""The random state of a microbatch: a seed of its own, and everything as it was afterwards."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def seed_all(seed: int, device: torch.device) -> None:
    """Seed torch on the host and on ``device``, Python, and numpy where it is in use."""
    # torch.manual_seed takes a stack trace for each kind of accelerator that is not in use: milliseconds.
    torch.default_generator.manual_seed(seed % 2**63)
    if device.index is not None:
        torch.get_device_module(device).manual_seed(seed % 2**63)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


@dataclass(slots=True)
class RandomState:
    """Of torch on the host and the device, Python and numpy."""

    host: Tensor
    device: tuple[torch.device, Tensor] | None
    python: Any
    numpy: Any

    @classmethod
    def take(cls, device: torch.device) -> RandomState:
        """As it is now."""
        numpy = sys.modules.get("numpy")
        on_device = None
        if device.index is not None:
            on_device = (device, torch.get_device_module(device).get_rng_state(device))
        return cls(
            torch.get_rng_state(), on_device, random.getstate(), numpy.random.get_state() if numpy is not None else None
        )

    def give_back(self) -> None:
        """Make it so again."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.get_device_module(self.device[0]).set_rng_state(self.device[1], self.device[0])
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
