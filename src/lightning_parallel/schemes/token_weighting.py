"""A mean over tokens that stays one over ranks with unequal numbers of valid tokens.

The mean of per-rank means weights a token on a rank with few valid ones more. With this option each rank's loss is its
sum divided by the mean number of valid tokens a rank, so that the average over ranks, of losses and of gradients, is
what one device computes on the whole batch. A rank without any valid token contributes zero, not NaN.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_parallel.errors import ParallelConfigError

_SIGNATURE = inspect.signature(F.cross_entropy)


class TokenWeighting(TorchFunctionMode):
    """Inside it, ``F.cross_entropy(…, reduction="mean")`` with class indices averages over the tokens of all ranks.

    Args:
        group: The data ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group, self._size = group, dist.get_world_size(group)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        parts = _sum_and_count(func, args, kwargs or {})
        if parts is None:
            return func(*args, **(kwargs or {}))
        total, count = parts
        dist.all_reduce(count, group=self._group)
        return (total * self._size / count).to(total.dtype)


class TokenCounting(TorchFunctionMode):
    """Inside it, a mean cross entropy tells how many tokens it is over, and is zero where there are none.

    For a loss that is put together from microbatches: how much each counts is known when all have been seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        parts = _sum_and_count(func, args, kwargs or {})
        if parts is None:
            return func(*args, **(kwargs or {}))
        if self.count is not None:
            raise ParallelConfigError(
                "token_weighted_loss: the step takes more than one mean cross entropy, so it is not clear by whose "
                "tokens a microbatch counts. Take one, with reduction='mean', or do without the option."
            )
        total, self.count = parts
        return (total / self.count.clamp(min=1)).to(total.dtype)


def _sum_and_count(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Of a mean cross entropy with class indices: its sum, and the number of valid tokens (or their weight)."""
    if func is not F.cross_entropy:
        return None
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    target, weight = given["target"], given["weight"]
    legacy = given["size_average"] is not None or given["reduce"] is not None
    if given["reduction"] != "mean" or target.is_floating_point() or legacy:
        return None
    given["reduction"] = "sum"
    total = func(*call.args, **call.kwargs)
    valid = target != given["ignore_index"]
    counted = valid if weight is None else weight[target.where(valid, 0)] * valid
    return total, counted.sum().to(torch.promote_types(total.dtype, torch.float32))
