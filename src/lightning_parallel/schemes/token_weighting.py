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
from torch.overrides import TorchFunctionMode

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
        kwargs = kwargs or {}
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        call = _SIGNATURE.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        target, weight = given["target"], given["weight"]
        legacy = given["size_average"] is not None or given["reduce"] is not None
        if given["reduction"] != "mean" or target.is_floating_point() or legacy:
            return func(*args, **kwargs)
        given["reduction"] = "sum"
        total = func(*call.args, **call.kwargs)
        valid = target != given["ignore_index"]
        counted = valid if weight is None else weight[target.where(valid, 0)] * valid
        count = counted.sum().to(torch.promote_types(total.dtype, torch.float32))
        dist.all_reduce(count, group=self._group)
        return (total * self._size / count).to(total.dtype)
