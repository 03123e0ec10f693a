"""The arithmetic as torchmetrics metrics, for a training loop of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class _Rate(Metric):
    """Something per second: both are summed over updates and ranks, so that ranks are averaged."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    amount: Tensor
    seconds: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("amount", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("seconds", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, amount: float | Tensor, seconds: float | Tensor) -> None:
        self.amount += amount
        self.seconds += seconds

    def _rate(self) -> Tensor:
        return self.amount / self.seconds


class ModelFlopsUtilization(_Rate):
    """Model FLOPs per second over what the devices can do; a share of 1.

    Args:
        peak_flops: Dense FLOP/s of one device in the dtype of the computation.
        devices: Devices that work together on the FLOPs that one rank reports: the size of its tensor, context and
            pipeline axes together; 1 where each rank has samples of its own.
        kwargs: Of ``torchmetrics.Metric``.

    Example::

        mfu = ModelFlopsUtilization(peak_flops=989e12)
        mfu.update(flops, seconds)  # after each step; of this rank's samples, without recomputation
        mfu.compute()
    """

    def __init__(self, *, peak_flops: float, devices: int = 1, **kwargs: Any) -> None:
        if peak_flops <= 0 or devices < 1:
            raise ValueError(f"peak_flops={peak_flops}, devices={devices}: both are positive.")
        super().__init__(**kwargs)
        self._peak = peak_flops * devices

    @override
    def update(self, flops: float | Tensor, seconds: float | Tensor) -> None:
        """Add work.

        Args:
            flops: Forward and backward.
            seconds: That they took.
        """
        self._add(flops, seconds)

    @override
    def compute(self) -> Tensor:
        """So far."""
        return self._rate() / self._peak


class TokensPerSecond(_Rate):
    """Tokens per second of all data ranks together.

    Args:
        data_ranks: Ranks that see different samples.
        kwargs: Of ``torchmetrics.Metric``.
    """

    def __init__(self, *, data_ranks: int = 1, **kwargs: Any) -> None:
        if data_ranks < 1:
            raise ValueError(f"data_ranks={data_ranks}: at least 1.")
        super().__init__(**kwargs)
        self._data_ranks = data_ranks

    @override
    def update(self, tokens: float | Tensor, seconds: float | Tensor) -> None:
        """Add work.

        Args:
            tokens: Of this rank.
            seconds: That they took.
        """
        self._add(tokens, seconds)

    @override
    def compute(self) -> Tensor:
        """So far."""
        return self._rate() * self._data_ranks
