"""Random numbers over the context axis: alike where ranks hold the same, apart where each holds its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_parallel.schemes.context.rows import Context


@contextmanager
def own_numbers(context: Context) -> Iterator[None]:
    """Each rank draws numbers of its own inside, and the common ones go on afterwards as if it had drawn one.

    What it starts from is drawn from the common ones, so that a recomputation draws the same again.
    """
    device = context.device
    host = torch.default_generator
    other: Tensor | None = None
    seed = int(torch.randint(2**62, ()))
    state = host.get_state()
    host.manual_seed(seed + context.rank)
    if device.index is not None:
        module = torch.get_device_module(device)
        other = module.get_rng_state(device)
        module.manual_seed(seed + context.rank)
    try:
        yield
    finally:
        host.set_state(state)
        if other is not None:
            torch.get_device_module(device).set_rng_state(other, device)
