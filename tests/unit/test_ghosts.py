"""Ghosts: what functions of them come to is looked up, and must be what it would be if computed anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.errors import PlanError
from lightning_parallel.schemes.pipeline.ghost import Ghost, ghost_like, ghosts_in_step

ONES, IDS = torch.ones(4, 8), torch.tensor([[0, 3, 1]])


def weight(*, requires_grad: bool = True) -> Ghost:
    return ghost_like(torch.empty(4, 8, requires_grad=requires_grad), "weight", is_parameter=True)


def traits(value: Tensor) -> Any:
    return value.shape, value.stride(), value.dtype, value.device, value.requires_grad


@pytest.mark.parametrize(
    "function",
    [
        lambda w: F.linear(ONES, w),
        lambda w: F.embedding(IDS, w).transpose(1, 2) + 1,
        lambda w: (w * 1).unsqueeze_(0),
        lambda w: (w * 1).half().relu_(),
        lambda w: torch.cat([w, w], dim=1)[:, 1::2],
        lambda w: w.detach().sum(dim=1, keepdim=True),
        lambda w: F.layer_norm(w, (8,)).view(-1),
    ],
)
def test_results_are_the_same_however_often(function: Callable[[Tensor], Tensor]) -> None:
    w = weight()
    with ghosts_in_step():
        expected = traits(function(w))
    with ghosts_in_step({}):
        assert [traits(function(w)) for _ in range(3)] == [expected] * 3
        with torch.no_grad():
            assert not function(w).requires_grad


def test_results_follow_modes() -> None:
    w = weight()
    with ghosts_in_step({}):
        for _ in range(2):
            assert F.linear(ONES, w).dtype == torch.float32
            with torch.autocast("cpu", torch.bfloat16):
                assert F.linear(ONES, w).dtype == torch.bfloat16


def test_masks_count_by_what_they_take() -> None:
    w = weight()
    with ghosts_in_step({}):
        for kept in (1, 3, 1):
            assert w[torch.arange(4) < kept].shape == (kept, 8)


def test_a_change_in_place_stays_with_its_ghost() -> None:
    w, v = weight(requires_grad=False), weight()
    with ghosts_in_step({}):
        for _ in range(2):
            first, second = w + 1, w + 1
            first.requires_grad = True
            assert not second.requires_grad
            second.view(-1).mul_(v.view(-1))
            assert second.requires_grad, "what is done to a view is done to the whole"
            assert not (w + 1).requires_grad


def test_no_ghost_has_a_gradient() -> None:
    w = weight()
    w.grad = None
    assert w.grad is None
    with pytest.raises(PlanError, match="computed from weight"):
        w.grad = torch.ones(4, 8)
