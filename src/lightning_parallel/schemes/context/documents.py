"""Which documents a batch says that its sequences are packed of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_POSITIONS = frozenset({"position_ids", "positions"})
_EDGES = frozenset({"cu_seqlens", "cu_seqlens_q", "cu_seq_lens", "cu_seq_lens_q"})


def documents_of(batch: Any) -> tuple[int, ...]:
    """Lengths of the documents of every sample, or nothing where the batch does not tell, or samples differ.

    It tells by an entry ``position_ids``, shape (length,) or (batch, length), in which a document begins wherever
    positions do not go on by one, or by one of cumulated lengths (``cu_seqlens``, ``cu_seq_lens_q``), at any depth of
    mappings, lists, named tuples and dataclasses.
    """
    for name, value in _named(batch):
        if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
            continue
        if name in _EDGES and value.numel() > 1:
            edges = value.flatten().tolist()
        elif name in _POSITIONS and value.ndim in (1, 2) and value.numel():
            starts = value.diff(dim=-1) != 1
            first = starts.view(-1, starts.size(-1))[0]
            if bool((starts != first).any()):
                continue
            edges = [0, *(first.nonzero().flatten() + 1).tolist(), value.size(-1)]
        else:
            continue
        lengths = tuple(stop - start for start, stop in pairwise(edges))
        if edges[0] == 0 and min(lengths) >= 0:
            return tuple(length for length in lengths if length)
    return ()


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name), each
            yield from _named(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _named(each)
