"""Which rows of a dim each rank of the context axis holds, and how they come together.

[Note: the mean convention]  Context ranks average the gradients of parameters, as data ranks do. So the gradient of
anything is right when the mean over the ranks is: a tensor that all ranks hold may have another gradient on each, and
one whose rows lie apart has, row by row, ``size`` times the true gradient. Going from rows to the full tensor and back
keeps that: what gathers forward adds up backward, and a rank that takes its rows of a full tensor gives zero to the
others. Nothing has to know what a gradient was computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.schemes.context.layout import Layout

Method = Literal["ring", "allgather", "ulysses"]
Handler = Callable[..., Any]
_MOST_LAYOUTS = 256


@dataclass(slots=True, eq=False)
class Context:
    """The context axis of one model.

    Args:
        group: Its ranks.
        device: Of this rank.
        method: How attention is exchanged.
        handlers: Functions of which a tensor in rows stays in rows, to what computes them; see `operations`.
        balanced: Head and tail of the sequence on one rank; see `Layout`.
        documents: Lengths of the documents that the batch says it is packed of; empty where it does not.
    """

    group: dist.ProcessGroup
    device: torch.device
    handlers: Mapping[Any, Handler]
    method: Method = "ring"
    balanced: bool = True
    documents: tuple[int, ...] = ()
    _known: dict[Layout, Rows] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Of this process on the axis."""
        return self.group.rank()

    def layout(self, length: int) -> Layout:
        """Of a sequence of ``length`` tokens.

        Balanced for each document where the batch tells them, unless most would be too short to give each rank a head
        and a tail: attention is computed document by document, and short ones cost more to start than to compute.
        """
        fits = sum(self.documents) == length and len(self.documents) * 2 * self.size <= length
        return Layout(length, self.size, self.balanced, self.documents if self.balanced and fits else ())

    def rows(self, length: int) -> Rows:
        """The rows of a sequence of ``length`` tokens; the same object every time."""
        layout = self.layout(length)
        if layout not in self._known:
            if len(self._known) >= _MOST_LAYOUTS:
                self._known.clear()
            index = torch.stack([layout.positions(rank) for rank in range(self.size)])
            for rank in range(self.size):
                index[rank, layout.num_valid(rank) :] = -1
            self._known[layout] = Rows(self, index, length, layout=layout)
        return self._known[layout]


class Rows:
    """Of a dim of ``size``, the rows that each rank holds: as many on each, some of which may stand for nothing.

    Args:
        context: The axis.
        index: Of each rank's rows in the dim, -1 for one that stands for nothing (padding, or cut off since), shape
            (ranks, rows); on the host.
        size: Of the dim.
        merged: Where the dim is several in one: the rows of the middle one, and the sizes before and after it.
        layout: Where the dim is a sequence as the blocks get it.
    """

    def __init__(
        self,
        context: Context,
        index: Tensor,
        size: int,
        merged: tuple[Rows, int, int] | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.context, self.index, self.size, self.merged, self.layout = context, index, size, merged, layout
        self._derived: dict[Any, Rows] = {}
        self._kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        own = index[context.rank]
        self.num_local = own.numel()
        self.is_partial = bool((own < 0).any())
        self.valid = (own >= 0).to(context.device)
        # Rows that stand for nothing hold some real one, so that nothing that is computed from them overflows.
        self.own = own.clamp(min=0).to(context.device)
        flat = index.flatten()
        order = torch.zeros(size, dtype=torch.long)
        order[flat[flat >= 0]] = (flat >= 0).nonzero().flatten()
        self._order = order.to(context.device)

    def keep(self, made_of: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` makes for these rows, once while ``made_of`` lives, to which it must not refer."""
        if made_of not in self._kept:
            with torch.inference_mode(False):  # a training step may use it too
                self._kept[made_of] = make()
        return self._kept[made_of]

    # --- other shapes of the dim ----------------------------------------------------------------------------------

    def part(self, start: int, stop: int, step: int) -> Rows:
        """After a slice with a positive step."""
        count = len(range(start, stop, step))

        def index() -> Tensor:
            shifted = self.index - start
            inside = (self.index >= start) & (self.index < stop) & (shifted % step == 0)
            return torch.where(inside, shifted // step, -1)

        return self._derive(("part", start, stop, step), index, count)

    def merge(self, before: int, after: int) -> Rows:
        """Where the dims around this one, of these sizes, become one with it."""
        if before == after == 1:
            return self

        def index() -> Tensor:
            own = self.index[:, None, :, None]
            outer = torch.arange(before)[None, :, None, None]
            inner = torch.arange(after)[None, None, None, :]
            return torch.where(own >= 0, (outer * self.size + own) * after + inner, -1).flatten(1)

        size = before * self.size * after
        return self._derive(("merge", before, after), index, size, (self, before, after))

    def _derive(
        self, key: Any, index: Callable[[], Tensor], size: int, merged: tuple[Rows, int, int] | None = None
    ) -> Rows:
        if key not in self._derived:
            if len(self._derived) >= _MOST_LAYOUTS:
                self._derived.clear()
            self._derived[key] = Rows(self.context, index(), size, merged)
        return self._derived[key]

    # --- between rows and the full tensor; see [Note: the mean convention] -----------------------------------------

    def take(self, full: Tensor, dim: int) -> Tensor:
        """This rank's rows of a tensor that every rank holds."""
        return full.index_select(dim, self.own)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """The full tensor of which each rank holds ``local``."""
        full: Tensor = _Gather.apply(local, self, dim % local.ndim)  # type: ignore[no-untyped-call]
        return full

    def masked(self, local: Tensor, dim: int) -> Tensor:
        """``local`` with zeros in the rows that stand for nothing."""
        if not self.is_partial:
            return local
        shape = [1] * local.ndim
        shape[dim] = -1
        return local.where(self.valid.view(shape), local.new_zeros(()))

    def sum(self, local: Tensor) -> Tensor:
        """Over the ranks, each of which holds a part of a sum."""
        total: Tensor = _Sum.apply(local, self.context.group)  # type: ignore[no-untyped-call]
        return total

    def select(self, local: Tensor, dim: int, row: int) -> Tensor:
        """One row of the dim, on every rank."""
        where = int(self._order[row])
        owner, position = divmod(where, self.num_local)
        is_here = owner == self.context.rank
        own = local.select(dim, position if is_here else 0)
        # Elsewhere zeros with a graph: a backward reaches the sum on every rank, or on none.
        elsewhere = torch.tensor(not is_here, device=own.device)
        return self.sum(own.masked_fill(elsewhere, 0))

    def head(self, local: Tensor, dim: int, few: int) -> Tensor:
        """The first ``few`` rows of the dim, on every rank; without a graph."""
        own = self.index[self.context.rank]
        held = ((own >= 0) & (own < few)).nonzero().flatten()
        rows = local.detach().movedim(dim, 0)
        found = rows.new_zeros((few, *rows.shape[1:]))
        found[own[held].to(found.device)] = rows[held.to(rows.device)]
        dist.all_reduce(found, group=self.context.group)
        return found.movedim(0, dim).contiguous()

    def collect(self, local: Tensor, dim: int) -> Tensor:
        """As `gather`, without a graph."""
        local = local.movedim(dim, 0).contiguous()
        everyone = local.new_empty((self.context.size, *local.shape))
        dist.all_gather([*everyone.unbind()], local, group=self.context.group)
        return everyone.flatten(0, 1).index_select(0, self._order).movedim(0, dim).contiguous()  # user code calls view

    def spread(self, full: Tensor, dim: int) -> Tensor:
        """Of the sum of ``full`` over the ranks, this rank's rows: the transpose of `collect`."""
        full = full.movedim(dim, 0)
        flat = self.index.flatten().to(full.device)
        rows = full.index_select(0, flat.clamp(min=0))
        rows = rows.where((flat >= 0).view(-1, *[1] * (rows.ndim - 1)), rows.new_zeros(()))
        parts = rows.unflatten(0, (self.context.size, -1)).contiguous()
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, [*parts.unbind()], group=self.context.group)
        return own.movedim(0, dim).contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: Rows, dim: int) -> Tensor:
        ctx.rows, ctx.dim = rows, dim
        return rows.collect(local, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rows.spread(gradient, ctx.dim), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = local.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
