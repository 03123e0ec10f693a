"""A tensor that is split over tp does for the user's code what the whole one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics.functional as metrics
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_parallel.schemes.tensor.lazy import LazyShard
from tests.support.pool import WorkerPool
from tests.support.shards import difference, split_columns, tp_mesh

ROWS, COLUMNS = 6, 97  # 97 does not divide
TARGET = torch.arange(ROWS) * 19
MASK = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 3 == 0


def in_place(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of a copy, as a function."""

    def run(x: Any) -> Any:
        copy = x * 1.0
        change(copy)
        return copy + 0

    return run


def _set(x: Any, index: Any, value: Any) -> None:
    x[index] = value


def _keep_best(x: Any) -> Any:
    """As samplers do it."""
    logits = x[-1:, :] / 0.7
    best, _ = torch.topk(logits, 5)
    with torch.no_grad():
        logits = logits.detach()
        logits[logits < best[:, [-1]]] = -float("inf")
        return F.softmax(logits, dim=-1)


KEEPS: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(dtype=torch.float64),
    "scaled": lambda x: 2 * x / 3 * torch.tensor(1.5),
    "capped": lambda x: 30 * torch.tanh(x / 30),
    "rows": lambda x: x[1:4],
    "a row": lambda x: x[0],
    "new dim": lambda x: x[None],
    "view": lambda x: x.view(2, 3, -1),
    "reshape": lambda x: x.reshape(-1, COLUMNS),
    "transpose": lambda x: x.transpose(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0).contiguous(),
}

FALLS_BACK: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "max": lambda x: x.max(-1).values,
    "topk": lambda x: x.topk(3)[0],
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "nll": lambda x: F.nll_loss(F.log_softmax(x, -1), TARGET),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "one column": lambda x: x[:, 3],
    "columns": lambda x: x[:, :50],
    "columns of a shard": lambda x: x[:, 3:5],
    "last": lambda x: x[..., -1],
    "an element": lambda x: x[0, 3],
    "columns by index": lambda x: x[:, torch.tensor([1, 96])],
    "mask": lambda x: x[MASK],
    "gather": lambda x: x.gather(1, TARGET[:, None]),
    "flatten": lambda x: x.flatten(),
    "view over columns": lambda x: x.view(COLUMNS, ROWS),
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split(50, -1)[0],
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "add itself": lambda x: x + x,
    "add a tensor": lambda x: torch.ones(COLUMNS) + x,
    "times a tensor": lambda x: x * torch.ones(ROWS, COLUMNS),
    "minus": lambda x: 1 - x,
    "power": lambda x: x**2,
    "matmul": lambda x: x @ torch.ones(COLUMNS, 2),
    "linear": lambda x: F.linear(x, torch.ones(3, COLUMNS)),
    "layer norm": lambda x: F.layer_norm(x, (COLUMNS,)),
    "cat": lambda x: torch.cat([x, x]),
    "where": lambda x: torch.where(MASK, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(MASK, 0.0),
    "einsum": lambda x: torch.einsum("bc->b", x),
    "kl": lambda x: F.kl_div(F.log_softmax(x, -1), torch.full((ROWS, COLUMNS), 1 / COLUMNS), reduction="batchmean"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, MASK.float()),
    "mse": lambda x: F.mse_loss(x, MASK.float()),
    "checkpointed": lambda x: checkpoint(lambda y: F.softmax(y, -1), x, use_reentrant=False),
    "numpy": lambda x: x.detach().numpy().sum().item(),
    "forced numpy": lambda x: x.numpy(force=True).max().item(),
    "tolist": lambda x: x.tolist(),
    "a float": lambda x: float(x.mean()),
    "a format": lambda x: f"{x.sum():.4f}",
    "all finite": lambda x: bool(x.isfinite().all()),
    "no item": lambda x: x.item(),
    "accuracy": lambda x: metrics.accuracy(x, TARGET, task="multiclass", num_classes=COLUMNS, top_k=3),
    "shape": lambda x: (tuple(x.shape), x.size(-1), x.ndim, len(x), x.numel(), x.dtype, x.device, x.stride()),
    "kind": lambda x: (isinstance(x, Tensor), torch.is_tensor(x), x.requires_grad, x.type()),
    "in place": in_place(lambda x: x.div_(2)),
    "in place by operator": in_place(lambda x: x.__imul__(3)),
    "write a column": in_place(lambda x: _set(x, (slice(None), 3), 0.0)),
    "write under a mask": in_place(lambda x: _set(x, MASK, -1.0)),
    "write another": in_place(lambda x: x.masked_fill_(MASK, 7.0)),
    "sample": _keep_best,
}


def compare_all() -> dict[str, str]:
    mesh = tp_mesh()
    cases = KEEPS | FALLS_BACK
    wrong = {name: difference(fn, (ROWS, COLUMNS), mesh) for name, fn in cases.items()}
    lazy, _ = split_columns(torch.randn(ROWS, COLUMNS), mesh)
    for name, fn in cases.items():
        kept = isinstance(_try(fn, lazy), LazyShard)
        if kept != (name in KEEPS):
            wrong[name] = "stays split" if kept else "was gathered"
    return {name: text for name, text in wrong.items() if text}


def _try(fn: Callable[[Any], Any], x: Any) -> Any:
    try:
        return fn(x)
    except RuntimeError:
        return None


@pytest.mark.parametrize("world", [2, 4])
def test_every_use_is_that_of_the_whole_tensor(pool: WorkerPool, world: int) -> None:
    assert pool.run(compare_all, world=world) == [{}] * world


def change_parts() -> list[str]:
    mesh = tp_mesh()
    lazy, _ = split_columns(torch.ones(ROWS, COLUMNS), mesh)
    messages = []
    last = lazy[-1]
    try:
        last.zero_()
    except RuntimeError as error:
        messages.append(str(error))
    copy = lazy[-1].clone()
    copy.zero_()
    lazy.mul_(2)  # whole from now on, and still itself
    assert (copy.sum().item(), lazy.sum().item(), lazy[0].sum().item()) == (0, 2 * ROWS * COLUMNS, 2 * COLUMNS)
    return messages


def test_a_write_that_would_be_lost_is_refused(pool: WorkerPool) -> None:
    for [message] in pool.run(change_parts, world=2):
        assert message.startswith("zero_ writes into a part")
        assert "call .clone() first" in message
