"""Cross entropy on split logits is torch's, values and gradients, and sends no logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.collectives import CollectiveRecorder
from tests.support.pool import WorkerPool
from tests.support.shards import difference, split_columns, tp_mesh

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def targets(*shape: int, classes: int) -> Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(3))


def ignore_some(target: Tensor) -> Tensor:
    target = target.clone()
    target.flatten()[::3] = -100
    return target


def compare_options() -> dict[str, str]:
    mesh, wrong = tp_mesh(), {}
    grid = product([97, 3], ["mean", "sum", "none"], [0.0, 0.1], [False, True], TOLERANCE)
    for classes, reduction, smoothing, ignores, dtype in grid:
        target = targets(8, classes=classes)
        target = ignore_some(target) if ignores else target

        def loss(x: Any, target: Tensor = target, reduction: str = reduction, smoothing: float = smoothing) -> Any:
            return F.cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing)

        name = f"{classes} {reduction} {smoothing} {ignores} {dtype}"
        # torch sums 16-bit losses in 16 bits; this one does not.
        tol = TOLERANCE[dtype] * (8 if reduction == "sum" and dtype == torch.bfloat16 else 1)
        wrong[name] = difference(loss, (8, classes), mesh, dtype=dtype, tol=tol)
    return {name: text for name, text in wrong.items() if text}


@pytest.mark.parametrize("world", [2, 4])
def test_options_shapes_and_dtypes(pool: WorkerPool, world: int) -> None:
    """97 classes do not divide; of 3 on 4 ranks, one has none."""
    assert pool.run(compare_options, world=world) == [{}] * world


C = 97
T8, T24 = targets(8, classes=C), targets(2, 4, classes=C)
SHAPES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "module": ((8, C), lambda x: nn.CrossEntropyLoss()(x, T8)),
    "module that smooths": ((8, C), lambda x: nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum")(x, T8)),
    "keywords": ((8, C), lambda x: F.cross_entropy(input=x, target=T8, ignore_index=int(T8[0]))),
    "classes at 1": ((2, 4, C), lambda x: F.cross_entropy(x.transpose(1, 2), T24)),
    "classes at 1, none": ((2, 4, C), lambda x: F.cross_entropy(x.permute(0, 2, 1), T24, reduction="none")),
    "classes at 1 of 4": ((2, 2, 2, C), lambda x: F.cross_entropy(x.movedim(-1, 1), T8.view(2, 2, 2))),
    "one sample": ((C,), lambda x: F.cross_entropy(x, torch.tensor(5))),
    "flat view": ((2, 4, C), lambda x: F.cross_entropy(x.view(-1, x.size(-1)), T24.view(-1))),
    "flatten": ((2, 4, C), lambda x: F.cross_entropy(x.flatten(0, 1), T24.flatten())),
    "shifted": ((2, 4, C), lambda x: F.cross_entropy(x[:, :-1].reshape(-1, C), T24[:, 1:].reshape(-1))),
    "shifted, contiguous": (
        (2, 4, C),
        lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, C), T24[..., 1:].contiguous().view(-1)),
    ),
    "upcast and scaled": ((8, C), lambda x: F.cross_entropy(x.float() / 0.5, T8)),
    "capped": ((8, C), lambda x: F.cross_entropy(30 * torch.tanh(x / 30), T8)),
    "valid rows only": ((8, C), lambda x: F.cross_entropy(x[T8 > 20], T8[T8 > 20])),
    "all ignored": ((8, C), lambda x: F.cross_entropy(x, torch.full((8,), -100))),
    "all ignored, sum": ((8, C), lambda x: F.cross_entropy(x, torch.full((8,), -100), reduction="sum")),
    "large": ((8, C), lambda x: F.cross_entropy(x * 1e4, T8)),
    # By the whole tensor:
    "weights": ((8, C), lambda x: F.cross_entropy(x, T8, torch.arange(float(C)))),
    "probabilities": ((8, C), lambda x: F.cross_entropy(x, torch.full((8, C), 1 / C))),
    "classes at 0": ((8, C), lambda x: F.cross_entropy(x.t(), targets(C, classes=8))),
    "deprecated": ((8, C), lambda x: F.cross_entropy(x, T8, size_average=False)),
    "detached": ((8, C), lambda x: F.cross_entropy(x.detach(), T8)),
    # Refused alike:
    "out of range": ((8, C), lambda x: F.cross_entropy(x, T8 + C)),
    "negative": ((8, C), lambda x: F.cross_entropy(x, T8 * 0 - 1)),
    "other length": ((8, C), lambda x: F.cross_entropy(x, T8[:-1])),
    "other shape": ((2, 4, C), lambda x: F.cross_entropy(x.transpose(1, 2), T24.t())),
    "reduction": ((8, C), lambda x: F.cross_entropy(x, T8, reduction="median")),
    "smoothing": ((8, C), lambda x: F.cross_entropy(x, T8, label_smoothing=2.0)),
    "integers": ((8, C), lambda x: F.cross_entropy(x, T8.int())),
}


def compare_shapes() -> dict[str, str]:
    mesh = tp_mesh()
    wrong = {name: difference(fn, shape, mesh) for name, (shape, fn) in SHAPES.items()}
    with torch.autocast("cpu", torch.bfloat16):
        loss = SHAPES["flat view"][1]
        wrong["autocast"] = difference(loss, (2, 4, C), mesh, dtype=torch.bfloat16, tol=2e-2)
    return {name: text for name, text in wrong.items() if text}


def test_ways_to_call_it(pool: WorkerPool) -> None:
    wrong = pool.run(compare_shapes, world=2)
    for rank in wrong:
        # torch's kernels raise IndexError where the check here raises RuntimeError.
        for name in ("out of range", "negative"):
            assert "is neither -100 nor in [0, 97)" in rank.pop(name)
    assert wrong == [{}, {}]


def count_traffic() -> list[tuple[str, int]]:
    lazy, _ = split_columns(torch.randn(8, C), tp_mesh())
    with CollectiveRecorder() as recorder:
        F.cross_entropy(lazy, T8, label_smoothing=0.1).backward()
    return [(call.kind, call.numel) for call in recorder.calls]


def test_four_numbers_a_token_are_sent(pool: WorkerPool) -> None:
    assert pool.run(count_traffic, world=2) == [[("all_reduce", 8), ("all_reduce", 24)]] * 2
