"""Attention of this rank's queries over the keys of all ranks, one block after the other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.schemes.context.kernels import Kernel
from lightning_parallel.schemes.context.layout import Layout
from lightning_parallel.schemes.context.pieces import Piece

_SMALL = 64 * 64  # pairs of a query and a key


class RunningSoftmax:
    """Attention over the blocks so far (online softmax, arXiv:1805.02867), float32 at least: bf16 loses small blocks.

    Attributes:
        out: Shape (batch, heads, rows, value_dim); zeros for a row that has seen nothing.
        lse: Natural log-sum-exp of the scores, shape (batch, heads, rows); -inf for a row that has seen nothing.
    """

    def __init__(self, query: Tensor, value_dim: int) -> None:
        dtype = wide(query.dtype)
        self.out = query.new_zeros((*query.shape[:-1], value_dim), dtype=dtype)
        self.lse = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)

    def fold(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Take in a block that some rows see."""
        before, lse = self.lse[..., rows], lse.to(self.lse.dtype)
        # Not by exp: so the two weights sum to 1 exactly. A row that the block hides would be NaN if nothing was seen.
        weight = torch.sigmoid(lse - before).masked_fill_(lse == -torch.inf, 0).unsqueeze(-1)
        self.out[..., rows, :] = torch.lerp(self.out[..., rows, :], out.to(self.out.dtype), weight)
        self.lse[..., rows] = torch.logaddexp(before, lse)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp as backward wants it: finite.

        A row that has seen nothing has scores of -inf in backward too, and exp(-inf - 0) is 0.
        """
        return self.out.to(dtype), self.lse.masked_fill(self.lse == -torch.inf, 0)


@dataclass(frozen=True, slots=True)
class Engine:
    """Attention of the queries of one rank.

    Attributes:
        layout: Of the sequence.
        group: Ranks of the context axis.
        pieces: What is seen of each rank's keys, by rank.
        scale: Of the scores.
        plain: For blocks without a mask.
        biased: For blocks with one.
        exact: For backward of small blocks, if there is one.
    """

    layout: Layout
    group: dist.ProcessGroup
    pieces: list[list[Piece]]
    scale: float
    plain: Kernel
    biased: Kernel
    exact: Kernel | None = None

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return dist.get_rank(self.group)

    def forward(
        self, running: RunningSoftmax, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, source: int
    ) -> None:
        """Fold in the keys of rank ``source``: shape (batch, kv_heads, layout.num_local, dim), padding included."""
        for piece in self.pieces[source]:
            bias = _bias(piece, mask, query.dtype)
            out, lse = (self.plain if bias is None else self.biased).forward(
                query[:, :, piece.rows],
                key[:, :, piece.cols],
                value[:, :, piece.cols],
                bias=bias,
                causal=piece.causal and bias is None,
                scale=self.scale,
            )
            running.fold(piece.rows, out, lse)

    def backward(
        self,
        grads: tuple[Tensor, Tensor, Tensor],
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        *,
        source: int,
    ) -> None:
        """Add what comes from the keys of rank ``source`` to the gradients of query, of these keys and their values.

        Args:
            grads: Float32 (float64 for float64), in the shapes of ``query``, ``key`` and ``value``.
            out: Over the keys of all ranks, as ``lse``, which is finite.
        """
        for piece in self.pieces[source]:
            bias = _bias(piece, mask, query.dtype)
            parts = self._differentiating(piece, bias).backward(
                grad_out[:, :, piece.rows],
                query[:, :, piece.rows],
                key[:, :, piece.cols],
                value[:, :, piece.cols],
                out[:, :, piece.rows],
                lse[:, :, piece.rows],
                bias=bias,
                causal=piece.causal and bias is None,
                scale=self.scale,
            )
            for grad, part, where in zip(grads, parts, (piece.rows, piece.cols, piece.cols), strict=True):
                grad[:, :, where] += part

    def _differentiating(self, piece: Piece, bias: Tensor | None) -> Kernel:
        if self.exact is not None and piece.num_rows * piece.num_cols <= _SMALL:
            return self.exact
        return self.plain if bias is None else self.biased


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums are kept."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products in the dtype of their factors: the inputs are cast already."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _bias(piece: Piece, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or not piece.masked:
        return None
    part = piece.mask(mask)
    if part.dtype == torch.bool:
        return torch.zeros_like(part, dtype=dtype).masked_fill(~part, -torch.inf)
    return part.to(torch.promote_types(part.dtype, dtype))
