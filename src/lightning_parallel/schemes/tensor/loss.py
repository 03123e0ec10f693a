"""Cross entropy on logits whose vocabulary is split over ``tp``, without gathering them.

Each rank computes the maximum, the sum of exponentials and the target's logit on its part; three numbers a token are
reduced. The gradient, softmax minus one-hot, needs no communication (Megatron-LM, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.schemes.tensor.lazy import LazyShard
from lightning_parallel.schemes.tensor.storage import split_evenly


class _VocabParallelNLL(torch.autograd.Function):
    """Per-token negative log likelihood, and the mean of the negative log probabilities for label smoothing.

    Shape: logits (tokens, vocabulary / tp), target (tokens,) in [0, vocabulary); both results (tokens,), float32 or
    the logits' dtype if wider.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, start: int, vocab_size: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if logits.size(-1):
            peak = wide.amax(dim=-1)
        else:  # more ranks than rows of the vocabulary
            peak = wide.new_full(target.shape, -torch.inf)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        shifted = wide - peak.unsqueeze(-1)
        position = target - start
        mine = (position >= 0) & (position < logits.size(-1))
        picked = torch.zeros_like(peak)
        if logits.size(-1):
            index = position.clamp(0, logits.size(-1) - 1).unsqueeze(-1)
            picked = shifted.gather(-1, index).squeeze(-1).where(mine, picked)
        exponentials = shifted.exp()
        sums = torch.stack((exponentials.sum(-1), picked, shifted.sum(-1)))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        total, chosen, everything = sums.unbind()
        log_total = total.log()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), position, mine)
        ctx.vocab_size, ctx.dtype = vocab_size, logits.dtype
        return log_total - chosen, log_total - everything / vocab_size

    @staticmethod
    def backward(ctx: Any, grad_nll: Tensor, grad_smooth: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, position, mine = ctx.saved_tensors
        grad = softmax * (grad_nll + grad_smooth).unsqueeze(-1) - (grad_smooth / ctx.vocab_size).unsqueeze(-1)
        if softmax.size(-1):
            index = position.clamp(0, softmax.size(-1) - 1).unsqueeze(-1)
            grad.scatter_add_(-1, index, (-grad_nll * mine).unsqueeze(-1))
        return grad.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy`` for logits split along the classes; the arguments are torch's.

    Shape: input (N, C) or (N, C, d1, …), a ``LazyShard`` split along C; target as torch wants it, class indices.

    Returns:
        A plain tensor, the same on every ``tp`` rank; ``NotImplemented`` where the full tensor must serve (class
        weights, probabilities as target, another dim split).
    """
    if not isinstance(input, LazyShard) or isinstance(target, LazyShard) or weight is not None:
        return NotImplemented
    class_dim = 1 if input.ndim > 1 else 0
    if input.split_dim() != class_dim or size_average is not None or reduce is not None:
        return NotImplemented
    # What torch refuses, it refuses on the full tensor, in its own words.
    is_usual = reduction in ("mean", "sum", "none") and 0 <= label_smoothing <= 1 and target.dtype == torch.int64
    if not is_usual or target.shape != input.shape[:class_dim] + input.shape[class_dim + 1 :]:
        return NotImplemented
    sharded = input._sharded
    tp, vocab_size = sharded.device_mesh, sharded.size(class_dim)
    valid = target != ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    torch._assert_async((in_range | ~valid).all(), f"a target is neither {ignore_index} nor in [0, {vocab_size})")
    logits = sharded.to_local().movedim(class_dim, -1)
    start, _ = split_evenly(vocab_size, tp.size(), tp.get_local_rank())
    rows = logits.flatten(0, -2) if logits.ndim > 1 else logits.unsqueeze(0)
    valid = valid.flatten()
    nll, smooth = _VocabParallelNLL.apply(rows, target.flatten().where(valid, 0), start, vocab_size, tp.get_group())  # type: ignore[no-untyped-call]
    loss = nll if label_smoothing == 0.0 else (1 - label_smoothing) * nll + label_smoothing * smooth
    loss = loss.where(valid, 0.0)
    if reduction == "none":
        loss = loss.reshape(target.shape)
    else:
        loss = loss.sum() / valid.sum() if reduction == "mean" else loss.sum()
    # Autocast computes this loss, and leaves it, in float32.
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


LOGITS_HANDLERS = {F.cross_entropy: vocab_parallel_cross_entropy}
