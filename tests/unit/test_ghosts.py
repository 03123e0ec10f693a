"""Ghosts: what functions of them come to is looked up, and must be what it would be if computed anew."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.errors import PlanError
from lightning_parallel.schemes.pipeline.ghost import Ghost, ghost_like, ghosts_in_step, is_ghost

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


def test_a_ghost_is_a_parameter_without_memory() -> None:
    w = weight()
    assert isinstance(w, torch.nn.Parameter)
    assert (tuple(w.shape), w.dtype, w.requires_grad, w.numel(), w.is_meta) == ((4, 8), torch.float32, True, 32, True)
    with ghosts_in_step():
        assert (w.device, w.is_meta) == (torch.device("cpu"), False)
    assert "of='weight'" in repr(w)
    w.requires_grad_(False)
    assert not w.requires_grad


def test_a_module_may_hold_ghosts() -> None:
    module = torch.nn.Linear(8, 4)
    module.weight = weight()  # type: ignore[assignment]
    assert [name for name, p in module.named_parameters() if is_ghost(p)] == ["weight"]
    twin = copy.deepcopy(module)
    assert is_ghost(twin.weight)
    assert twin.weight is not module.weight
    with ghosts_in_step():
        out = module(ONES)
    assert is_ghost(out)
    assert out.shape == (4, 4)


def test_what_depends_on_the_shape_alone_is_real() -> None:
    w = weight()
    with ghosts_in_step():
        for real in (torch.zeros_like(w), w.new_ones(3), torch.full_like(w, 2, dtype=torch.long), w.new_tensor([1.0])):
            assert not is_ghost(real)
            assert real.device == torch.device("cpu")
        assert torch.zeros_like(w).shape == (4, 8)
        assert w.size(0) == len(w) == 4
        assert is_ghost(ONES + w)
        assert torch.arange(w.size(1)).sum() == 28


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: float(x.detach().max()),
        lambda x: torch.ones(4, 8)[x > 0],
    ],
    ids=["item", "bool", "tolist", "numpy", "nonzero", "float", "mask"],
)
def test_reading_a_value_names_what_is_missing(read: Callable[[Tensor], Any]) -> None:
    with ghosts_in_step(), pytest.raises(PlanError, match="computed from weight, which another stage holds"):
        read(weight() * 2)


def test_it_cannot_be_saved() -> None:
    with pytest.raises(PlanError, match="has no values to save"):
        pickle.dumps(weight())


def test_it_becomes_what_is_received() -> None:
    w = weight()
    view = (w * 1).unsqueeze(0)
    real = torch.arange(32.0).view(1, 4, 8).requires_grad_()
    view.become(real)
    assert view.received is real
    total = (view * 2).sum()
    assert not is_ghost(total)
    assert total.item() == 2 * real.sum()
    total.backward()
    assert real.grad is not None
