"""Attention of one block with the log-sum-exp of each row, and its backward from that of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from lightning_parallel._torch import (
    CUDNN,
    CUDNN_BACKWARD,
    EFFICIENT,
    EFFICIENT_BACKWARD,
    FLASH,
    FLASH_BACKWARD,
    HOST_FLASH,
    HOST_FLASH_BACKWARD,
    attention_backend,
    has_kernel,
)

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute a block.

    Attributes:
        compute: ``(query, key, value, bias, causal, scale) -> (out, lse)``.
        differentiate: ``(grad_out, query, key, value, out, lse, bias, causal, scale)`` to the three gradients.
        takes_groups: Several query heads may share a key head.
    """

    compute: Forward
    differentiate: Backward
    takes_groups: bool

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention within the block.

        A row that sees nothing here has zeros and a log-sum-exp of -inf. Only a bias can bring that about.

        Args:
            query: Shape (batch, heads, rows, head_dim).
            key: Shape (batch, kv_heads, cols, head_dim); ``kv_heads`` divides ``heads``.
            value: Shape (batch, kv_heads, cols, value_dim).
            bias: Additive mask, shape (1 | batch, 1 | heads, rows, cols).
            causal: Of a square block: row i sees the columns up to i.

        Returns:
            Output, shape (batch, heads, rows, value_dim), and natural log-sum-exp of the scaled and biased scores,
            shape (batch, heads, rows), float32 (float64 for float64).
        """
        key, value = self._repeat(query, key), self._repeat(query, value)
        out, lse = self.compute(query, key, value, bias, causal, scale)
        if bias is not None:  # kernels do not agree on what such a row gives: 0, inf, perhaps NaN
            blind = (bias == -torch.inf).all(-1).expand_as(lse)
            out, lse = out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, -torch.inf)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value that come from this block.

        Args:
            out: Attention over all blocks, of the same rows.
            lse: Log-sum-exp over all blocks, finite: any number does for a row that sees nothing anywhere.
        """
        repeated = self._repeat(query, key), self._repeat(query, value)
        grad_query, grad_key, grad_value = self.differentiate(
            grad_out, query, *repeated, out, lse.contiguous(), bias, causal, scale
        )
        return grad_query, _sum_heads(grad_key, key.shape[1]), _sum_heads(grad_value, value.shape[1])

    def _repeat(self, query: Tensor, tensor: Tensor) -> Tensor:
        groups = query.shape[1] // tensor.shape[1]
        return tensor if self.takes_groups or groups == 1 else tensor.repeat_interleave(groups, 1)


def choose_kernel(query: Tensor, key: Tensor, value: Tensor, *, biased: bool) -> Kernel:
    """The kernel for blocks of these tensors: what scaled_dot_product_attention itself would take, or plain math.

    Args:
        biased: A block has a bias.
    """
    mask = query.new_zeros(()).expand(*query.shape[:-1], key.shape[2]) if biased else None
    backend = SDPBackend.MATH
    if query.shape[1] != key.shape[1]:
        backend = attention_backend(query, key, value, attn_mask=mask, enable_gqa=True)
        key, value = (tensor[:, :1].expand(-1, query.shape[1], -1, -1) for tensor in (key, value))
    if backend != SDPBackend.FLASH_ATTENTION:  # the one that takes groups wherever there is one
        backend = attention_backend(query, key, value, attn_mask=mask, enable_gqa=False)
    if backend == SDPBackend.FLASH_ATTENTION:
        if has_kernel(HOST_FLASH, query.device):
            return Kernel(_host_flash, _host_flash_backward, takes_groups=True)
        if not biased:
            return Kernel(_flash, _flash_backward, takes_groups=True)
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        return Kernel(_efficient, _efficient_backward, takes_groups=False)
    if backend == SDPBackend.CUDNN_ATTENTION:
        return Kernel(_cudnn, _cudnn_backward, takes_groups=False)
    return Kernel(_math, _math_backward, takes_groups=False)


def choose_exact(query: Tensor) -> Kernel | None:
    """The kernel for backward of small blocks in float32: in float64, where the device has it.

    Where few keys are seen, gradients of scores are small differences of large numbers, and roundings do not average
    out: torch's own kernels in float32 then are up to 2e-6 from the truth, in parts of the largest gradient.
    """
    if query.dtype != torch.float32 or not _has_float64(query.device):
        return None
    return Kernel(_math, _exact_backward, takes_groups=False)


@lru_cache
def _has_float64(device: torch.device) -> bool:
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def _sum_heads(grad: Tensor, num_heads: int) -> Tensor:
    """The gradient of heads before they were repeated."""
    if grad.shape[1] == num_heads:
        return grad
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    total: Tensor = grad.unflatten(1, (num_heads, -1)).sum(2, dtype=wide)
    return total


def _host_flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = HOST_FLASH(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _host_flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = HOST_FLASH_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    size = v.shape[-1]
    out, lse, *_ = FLASH(*_pad_dims(q, k, v), 0.0, causal, False, scale=scale)
    return out[..., :size], lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    size = q.shape[-1]
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # where dropout started
    grad, q, k, v, out = _pad_dims(grad, q, k, v, out)
    dq, dk, dv = FLASH_BACKWARD(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
    )
    return dq[..., :size], dk[..., :size], dv[..., :size]


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = EFFICIENT(q, k, v, _align_bias(q, bias), True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # the kernel rounds the number of rows up


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # where dropout started
    if torch.version.hip is None:  # rows are rounded up to 32, those without scores at infinity
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    dq, dk, dv, _ = EFFICIENT_BACKWARD(
        grad,
        q,
        k,
        v,
        _align_bias(q, bias),
        out,
        lse,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, dk, dv


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = CUDNN(q, k, v, _align_bias(q, bias), True, 0.0, causal, False, scale=scale)
    return out, lse.reshape(q.shape[:3])  # it keeps the last dim, of size 1


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # where dropout started
    dq, dk, dv = CUDNN_BACKWARD(
        grad,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        unused,
        unused,
        _align_bias(q, bias),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return dq, dk, dv


def _math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, bias, causal, scale)
    lse = torch.logsumexp(scores, -1)
    seen = lse.masked_fill(lse == -torch.inf, 0)
    return torch.exp(scores - seen.unsqueeze(-1)) @ v.to(scores.dtype), lse


def _math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.exp(_scores(q, k, bias, causal, scale) - lse.unsqueeze(-1))
    grad, q, k, v, out = (tensor.to(weights.dtype) for tensor in (grad, q, k, v, out))
    grad_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad


def _exact_backward(grad: Tensor, q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _math_backward(grad, q.double(), *others)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Scaled and biased, at least float32: shape (batch, heads, rows, cols)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).mT * scale
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(scores.new_ones(scores.shape[-2:]).triu(1).bool(), -torch.inf) if causal else scores


def _pad_dims(*tensors: Tensor) -> list[Tensor]:
    """Heads of a multiple of 8, as the kernel wants them: scaled_dot_product_attention does the same."""
    return [F.pad(tensor, (0, -tensor.shape[-1] % 8)) for tensor in tensors]


def _align_bias(query: Tensor, bias: Tensor | None) -> Tensor | None:
    """One row after the other at a multiple of 16 elements, as the kernels want it, for all heads."""
    if bias is None:
        return None
    cols = bias.shape[-1]
    padded = F.pad(bias.to(query.dtype), (0, -cols % 16))[..., :cols]
    return padded.expand(*query.shape[:3], cols)
