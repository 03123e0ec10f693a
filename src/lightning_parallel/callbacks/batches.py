"""How much work a batch is: its samples, its tokens, and where padding and packed documents make it less."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_parallel._torch import tree_leaves

_IDS = ("input_ids", "tokens", "ids")


@dataclass(frozen=True, slots=True)
class Extent:
    """A batch in numbers.

    Attributes:
        key: What the FLOPs depend on: the shapes and dtypes of its tensors.
        samples: Rows.
        tokens: Positions; 0 where the batch is not of tokens.
        sums: Tokens without padding and the sum of squared lengths of documents, on the device. Shape: (2,).
        positions: What the first is a share of.
        pairs: What the second is a share of.
    """

    key: tuple[Any, ...]
    samples: int
    tokens: int
    sums: Tensor | None = None
    positions: int = 0
    pairs: int = 0


def measure_batch(batch: Any, lengths: Callable[[Any], Tensor] | None = None, *, fill: bool = True) -> Extent:
    """Look at a batch, without waiting for the device.

    Args:
        batch: As ``training_step`` gets it.
        lengths: Gives the length of each document in it. Shape: (documents,).
        fill: Look at what is padding. Otherwise each position counts.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    key = tuple((leaf.shape, leaf.dtype) for leaf in tensors)
    ids = _ids(batch, tensors)
    rows = next((leaf for leaf in tensors if leaf.ndim), None) if ids is None else ids
    samples = 0 if rows is None else rows.shape[0]
    if ids is None:
        return Extent(key, samples, 0)
    sums = None
    if lengths is not None:
        length = lengths(batch).to(torch.float32)
        sums = torch.stack([length.sum(), length.square().sum()])
    elif fill and isinstance(batch, Mapping):
        sums = _sums(batch, ids)
    return Extent(key, samples, ids.numel(), sums, ids.numel(), ids.numel() * ids.shape[-1])


def _ids(batch: Any, tensors: list[Tensor]) -> Tensor | None:
    """Tokens: under a usual name, or the first integers in two dims."""
    if isinstance(batch, Mapping):
        named = next((batch[name] for name in _IDS if name in batch), None)
        if isinstance(named, Tensor) and named.ndim == 2:
            return named
    return next((t for t in tensors if t.ndim == 2 and t.dtype in (torch.int64, torch.int32)), None)


def _sums(batch: Mapping[Any, Any], ids: Tensor) -> Tensor | None:
    mask, position = (
        value if isinstance(value := batch.get(name), Tensor) and value.shape == ids.shape else None
        for name in ("attention_mask", "position_ids")
    )
    if mask is None and position is None:
        return None
    real = (mask != 0).to(torch.float32) if mask is not None else torch.ones_like(ids, dtype=torch.float32)
    if position is not None:
        # In a document of length l, positions are 0 … l-1, and Σ (2·position + 1) = l².
        squares = ((2 * position + 1) * real).sum()
    else:
        squares = real.sum(-1).square().sum()
    return torch.stack([real.sum(), squares])
