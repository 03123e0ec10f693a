"""The repeated blocks on rows of the sequence: what goes in, what comes out, and a proof that it may.

[Note: local inside]  A block runs the user's code on this rank's rows as plain tensors, so that it is as fast as on one
device. Its code then sees the number of rows where it asks for a length. That is right for all that goes token by token
and for attention, which is redirected. Whether it is right for this block is not guessed: the first call runs the block
on a few tokens both ways and compares (`Blocks._prove`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_parallel._torch import HOST, tree_flatten, tree_leaves, tree_map, tree_unflatten
from lightning_parallel.errors import ParallelConfigError, PlanError
from lightning_parallel.schemes.context.flex import FirstTokens
from lightning_parallel.schemes.context.random import own_numbers
from lightning_parallel.schemes.context.redirect import AttentionOverRanks, Recomputation
from lightning_parallel.schemes.context.rows import Context, Rows
from lightning_parallel.schemes.context.shard import SequenceShard, gathered, whole
from lightning_parallel.schemes.pipeline.ghost import is_ghost

# A proof takes as many tokens as give each rank a few.
_TOKENS_A_RANK = 4
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # of what a block adds to its input; 16-bit dtypes below
_COARSE = 0.1


class Blocks:
    """Runs the blocks of one model.

    Args:
        context: The axis.
        names: Id of each block to its name.
    """

    def __init__(self, context: Context, names: dict[int, str]) -> None:
        self._context, self._names = context, names
        self._ways: dict[int, _Way] = {}
        self.recomputation = Recomputation()
        self._around_reached = ExitStack()

    def call(self, block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``inner``, the call of ``block``, on this rank's rows.

        Raises:
            PlanError: The block does not go token by token (on every rank), or holds a cache.
        """
        leaves, spec = tree_flatten((args, kwargs))
        hidden = next((v for v in leaves if isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 1), None)
        if hidden is None or is_ghost(hidden):
            return inner(*args, **kwargs)
        entry = _Entry(self._context, hidden, _sequence_dim(block, hidden))
        if id(block) not in self._ways and entry.rows.size > 1:
            self._ways[id(block)] = self._prove(block, entry, leaves, spec)
        way = self._ways.get(id(block), _WAYS[0])
        dims = [entry.dim_of(value, way) for value in leaves]
        args, kwargs = tree_unflatten([entry.rows_of(v, dim) for v, dim in zip(leaves, dims, strict=True)], spec)
        with self._inside(block, entry, way):
            output = inner(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._reach, block, entry, way))
        return tree_map(entry.leave, output)

    def _reach(self, block: nn.Module, entry: _Entry, way: _Way, gradient: Tensor) -> None:
        """A backward has come to the output of ``block``: parts of it may run again, outside of a call."""
        self.leave()
        self.recomputation.reach(AttentionOverRanks(entry.rows, self._names[id(block)], entry.others))
        if way.has_tables:
            self._around_reached.enter_context(_tables_in_rows(block, entry.rows))

    def leave(self) -> None:
        """No backward is in a block now."""
        self.recomputation.reach(None)
        self._around_reached.close()

    @contextmanager
    def _inside(self, block: nn.Module, entry: _Entry, way: _Way) -> Iterator[None]:
        with (
            own_numbers(self._context),
            AttentionOverRanks(entry.rows, self._names[id(block)], entry.others),
            _tables_in_rows(block, entry.rows) if way.has_tables else nullcontext(),
        ):
            yield

    def _prove(self, block: nn.Module, entry: _Entry, leaves: list[Any], spec: Any) -> _Way:
        """Hold the block on rows against the block on the whole, on the first tokens.

        In evaluation mode (no dropout), without gradients, and with copies of what the block is given.

        Returns:
            The first way that gives the same.
        """
        name = self._names[id(block)]
        few = min(entry.rows.size, _TOKENS_A_RANK * self._context.size)
        if isinstance(block, FSDPModule):
            block.unshard()
        failure: Exception | None = None
        kind = self._context.device.type
        dtype = next((p.dtype for p in block.parameters() if p.is_floating_point()), entry.hidden.dtype)
        with (
            torch.no_grad(),
            torch.autocast(kind, enabled=False),  # so that differences are not lost among roundings
            _evaluating(block),
            _same_numbers(self._context.device),
        ):
            small = [entry.first(value, entry.dim_of(value, _WAYS[0]), few) for value in leaves]
            small = [v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for v in small]
            args, kwargs = tree_unflatten([_copied(value, name) for value in small], spec)
            with FirstTokens():
                expected = block.forward(*args, **kwargs)
            hidden = small[next(i for i, value in enumerate(leaves) if value is entry.hidden)]
            for way in _WAYS:
                proof = _Entry(self._context, hidden, entry.dim)
                dims = [entry.dim_of(value, way) for value in leaves]
                rows = [_copied(proof.rows_of(value, dim), name) for value, dim in zip(small, dims, strict=True)]
                args, kwargs = tree_unflatten(rows, spec)
                difference = float("inf")
                try:
                    with self._inside(block, proof, way):
                        difference = _difference(expected, block.forward(*args, **kwargs), proof, dtype)
                except Exception as error:
                    failure = failure or error
                worst = torch.tensor([difference], device=self._context.device, dtype=torch.float32)
                dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._context.group)
                if worst.item() <= _TOLERANCE.get(dtype, _COARSE):
                    return way
        if isinstance(failure, PlanError | ParallelConfigError):
            raise failure
        found = f"fails ({failure})" if failure else "gives other values"
        raise PlanError(
            f"{name} ({type(block).__name__}) {found} on rows of a sequence, and not on the whole of it, on {few} "
            "tokens: something in it mixes tokens, or counts them from 0. Under cp attention is exchanged where it is "
            "F.scaled_dot_product_attention, nn.MultiheadAttention or Hugging Face's registry; positions, masks and "
            "tables belong outside of the blocks, where the sequence is whole. Move them there, or use cp=1."
        ) from failure


@dataclass(frozen=True, slots=True)
class _Way:
    """What else than tensors as long as the sequence lies in rows: longer tables, of which a block takes the beginning.

    Args:
        takes_tables: Among the arguments.
        has_tables: Among its buffers.
    """

    takes_tables: bool = False
    has_tables: bool = False


_WAYS = (_Way(), _Way(takes_tables=True), _Way(has_tables=True), _Way(takes_tables=True, has_tables=True))


@contextmanager
def _tables_in_rows(block: nn.Module, rows: Rows) -> Iterator[None]:
    """The block's buffers that are at least as long as the sequence, in rows."""
    saved = []
    for child in block.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and (dim := _table_dim(buffer, rows.size)) is not None:
                saved.append((child, name, buffer))
                child._buffers[name] = rows.take(buffer, dim)
    try:
        yield
    finally:
        for child, name, buffer in saved:
            child._buffers[name] = buffer


def _table_dim(value: Tensor, length: int) -> int | None:
    return next((dim for dim in range(value.ndim) if value.size(dim) >= length), None)


class _Entry:
    """A block's arguments and results: from full tensors or rows to plain rows, and back.

    Args:
        context: The axis.
        hidden: The hidden state: the first floating tensor.
        dim: Of it, in which the sequence lies.
    """

    def __init__(self, context: Context, hidden: Tensor, dim: int) -> None:
        self.rows, self.dim, self.hidden = context.rows(hidden.size(dim)), dim, hidden
        self.others: frozenset[int] = frozenset()

    def dim_of(self, value: Any, way: _Way) -> int | None:
        """Where the sequence lies in an argument; ``None`` for a mask over it, and what has no sequence."""
        if not isinstance(value, Tensor) or is_ghost(value):
            return None
        if value is self.hidden or (value.is_floating_point() and value.shape == self.hidden.shape):
            return self.dim
        if isinstance(value, SequenceShard):
            return value.sequence_dim if value.rows is self.rows else None
        length = self.rows.size
        if length > 1 and value.ndim > 1 and value.size(-1) == value.size(-2) == length and _is_mask(value):
            return None
        places = [dim for dim in range(value.ndim) if value.size(dim) == length]
        # Tables (…, sequence, features); positions and padding (…, sequence).
        is_table = value.is_floating_point() or value.is_complex()
        if is_table and not places and way.takes_tables and value.ndim > 1:
            return _table_dim(value, length)
        preferred = [value.ndim - 2, self.dim] if is_table else [value.ndim - 1]
        return next((dim for dim in [*preferred, *places] if dim in places), None)

    def rows_of(self, value: Any, dim: int | None) -> Any:
        """This rank's rows of an argument along ``dim``; whole without one."""
        if isinstance(value, SequenceShard):
            if value.rows is self.rows and value.sequence_dim == dim:
                return value.local
            value = value.full()
        if not isinstance(value, Tensor) or is_ghost(value):
            return value
        if dim is not None:
            return self.rows.take(value, dim)
        if value.is_floating_point() and value.ndim == self.hidden.ndim:
            self.others |= {value.size(self.dim)}  # another sequence
        return value

    def leave(self, value: Any) -> Any:
        """A result in rows, for the code outside."""
        is_hidden = isinstance(value, Tensor) and value.ndim == self.hidden.ndim and not is_ghost(value)
        if is_hidden and not isinstance(value, SequenceShard) and value.size(self.dim) == self.rows.num_local:
            return SequenceShard(value, self.rows, self.dim)
        return value

    def first(self, value: Any, dim: int | None, few: int) -> Any:
        """Of an argument, what belongs to the first ``few`` tokens, whole."""
        if not isinstance(value, Tensor) or is_ghost(value):
            return value
        if isinstance(value, SequenceShard) and dim == value.sequence_dim:
            return value.rows.head(whole(value.local), dim, few)
        value = gathered(value)
        if dim is not None:
            return value.narrow(dim, 0, few)
        if value.ndim > 1 and value.size(-1) == value.size(-2) == self.rows.size:
            return value[..., :few, :few]
        return value


def _is_mask(square: Tensor) -> bool:
    """Whether a tensor (…, length, length) is over queries and keys, and no table with as many features as tokens."""
    if square.ndim != 3 or not square.is_floating_point():
        return True
    return square.size(0) > 1 or bool((square < -1000).any())


def _sequence_dim(block: nn.Module, hidden: Tensor) -> int:
    """Of a hidden state (batch, sequence, features), or what torch's own attention in the block says."""
    attention = next((child for child in block.modules() if isinstance(child, nn.MultiheadAttention)), None)
    if attention is not None and hidden.ndim > 2:
        return 1 if attention.batch_first else 0
    return hidden.ndim - 2


@contextmanager
def _evaluating(block: nn.Module) -> Iterator[None]:
    training = [child for child in block.modules() if child.training]
    for child in training:
        child.training = False
    try:
        yield
    finally:
        for child in training:
            child.training = True


@contextmanager
def _same_numbers(device: torch.device) -> Iterator[None]:
    accelerators = [] if device.type == HOST.type else [device]
    with torch.random.fork_rng(accelerators, device_type=device.type):
        yield


def _copied(value: Any, name: str) -> Any:
    """A proof changes copies."""
    if isinstance(value, Tensor):
        return value.clone()
    try:
        return value if callable(value) else copy.deepcopy(value)
    except Exception as error:
        raise PlanError(
            f"{name} is called with a {type(value).__name__}, which cannot be copied: under cp a block takes tensors "
            "and numbers, no cache. Use use_cache=False, or cp=1."
        ) from error


def _difference(expected: Any, found: Any, entry: _Entry, dtype: torch.dtype) -> float:
    """The largest difference between full results and results in rows, in parts of what the block has computed.

    That is what it adds to its input, if that is no less than a hundredth; in 16 bits it would be lost beside it.
    """
    full, local = ([leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in (expected, found))
    if len(full) != len(local):
        return float("inf")
    worst, own = 0.0, entry.rows.masked(entry.rows.take(entry.hidden, entry.dim), entry.dim)
    for a, b in zip(full, local, strict=True):
        if isinstance(entry.leave(b), SequenceShard):
            a, b = (entry.rows.masked(x, entry.dim) for x in (entry.rows.take(whole(a), entry.dim), whole(b)))
        if a.shape != b.shape:
            return float("inf")
        if a.is_floating_point():
            scale = a.abs().max()
            if dtype in _TOLERANCE and a.shape == own.shape:
                scale = torch.maximum((a - own).abs().max(), scale / 100)
            scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
            worst = max(worst, float(((a - b).abs().max() / scale).nan_to_num(float("inf"))))
        elif not torch.equal(a, b):
            return float("inf")
    return worst
