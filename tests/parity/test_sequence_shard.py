"""A tensor in rows means the full tensor: values and gradients of what user code does around the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.schemes.context.operations import HANDLERS
from lightning_parallel.schemes.context.rows import Context
from lightning_parallel.schemes.context.shard import SequenceShard
from tests.support.pool import WorkerPool

BATCH, FEATURES = 3, 4
Case = tuple[Callable[[Tensor, Tensor, Tensor], Any], bool]  # of x, a full tensor of its shape, ids; stays in rows


def cases(length: int) -> Mapping[str, Case]:
    weight = torch.linspace(-1, 1, 5 * FEATURES).view(5, FEATURES)
    table = torch.linspace(-1, 1, length * FEATURES).view(length, FEATURES)
    labels = (torch.arange(BATCH * length).view(BATCH, length) * 7) % FEATURES
    some = labels.masked_fill(labels == 2, -100)
    is_short = length < 3
    return {
        "arithmetic": (lambda x, y, i: (x * 2 + 1 - y) / (1 + y.abs()), True),
        "from the right": (lambda x, y, i: 1 - x, True),
        "a table": (lambda x, y, i: x + table, True),
        "a table with a batch": (lambda x, y, i: x * table[None], True),
        "by feature": (lambda x, y, i: x * weight[0], True),
        "by sample": (lambda x, y, i: x * torch.arange(BATCH).view(-1, 1, 1), True),
        "in place": (lambda x, y, i: (x * 1).add_(table).mul_(2).relu_(), True),
        "augmented": (_augmented, True),
        "with itself": (lambda x, y, i: torch.where(x > 0, x, x * 0.5) + torch.tanh(x), True),
        "comparison": (lambda x, y, i: ((x > y) & (x < 1)).float() * x, True),
        "dtype": (lambda x, y, i: x.double().float().to(torch.float64).to(x.dtype) + x.type_as(y), True),
        "linear": (lambda x, y, i: F.linear(x, weight), True),
        "matrix": (lambda x, y, i: x @ weight.t(), True),
        "norms": (lambda x, y, i: F.layer_norm(F.rms_norm(x, (FEATURES,)), (FEATURES,), weight[0]), True),
        "rms by hand": (lambda x, y, i: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5), True),
        "softmax": (lambda x, y, i: x.softmax(-1) + torch.log_softmax(x, dim=2), True),
        "softmax along": (lambda x, y, i: x.softmax(1), False),
        "reductions": (lambda x, y, i: x.sum(-1) + x.amax(dim=-1) + x.norm(dim=-1) + x.var(-1), True),
        "over samples": (lambda x, y, i: x.mean(0), True),
        "mean": (lambda x, y, i: x.mean() + x.sum() / 7, False),
        "pooled": (lambda x, y, i: x.mean(1) + x.sum(dim=(1,)), False),
        "pooled, kept": (lambda x, y, i: x - x.mean(dim=1, keepdim=True), True),
        "over two": (lambda x, y, i: x.sum((0, 1)), False),
        "largest": (lambda x, y, i: x.max(), False),
        "largest and where": (lambda x, y, i: x.max(-1).values, True),
        "classes": (lambda x, y, i: (x.argmax(-1) == labels).float().mean() * x.sum(), False),
        "norm of all": (lambda x, y, i: x.norm(), False),
        "transposed": (lambda x, y, i: x.transpose(1, 2), True),
        "transposed twice": (lambda x, y, i: x.transpose(0, 1).transpose(0, 1) + y, True),
        "matrix transposed": (lambda x, y, i: x.mT, True),
        "permuted": (lambda x, y, i: x.permute(2, 0, 1).unsqueeze(0), True),
        "view": (lambda x, y, i: x.view(-1, FEATURES), True),
        "view and back": (lambda x, y, i: x.view(-1, FEATURES).view(BATCH, length, FEATURES), True),
        "flattened": (lambda x, y, i: x.flatten(0, 1) * 2, True),
        "all in one": (lambda x, y, i: x.flatten(), True),
        "heads": (lambda x, y, i: x.view(BATCH, length, 2, 2).transpose(1, 2), True),
        "sequence first": (lambda x, y, i: x.transpose(0, 1).reshape(length * BATCH, FEATURES), True),
        "unflattened": (lambda x, y, i: x.unflatten(-1, (2, 2)).flatten(2), True),
        "odd view": (lambda x, y, i: x.reshape(length, BATCH, FEATURES), False),
        "cut": (lambda x, y, i: x[:, : length // 2 + 1], True),
        "all but the last": (lambda x, y, i: x[:, :-1], not is_short),
        "all but the first": (lambda x, y, i: x[..., 1:, :], not is_short),
        "every other": (lambda x, y, i: x[:, ::2, :3], True),
        "cut twice": (lambda x, y, i: x[:, 1:][:, :-1] + y[:, 1:-1], not is_short),
        "backwards": (lambda x, y, i: x.flip(1), False),
        "the last": (lambda x, y, i: x[:, -1], False),
        "the first of one": (lambda x, y, i: x[1, 0], False),
        "one sample": (lambda x, y, i: x[1], True),
        "new dims": (lambda x, y, i: x[:, None, ..., None], True),
        "picked": (lambda x, y, i: x[torch.arange(BATCH), i], False),
        "masked": (lambda x, y, i: x[labels > 1], False),
        "rolled": (lambda x, y, i: x.roll(1, 1), False),
        "sums along": (lambda x, y, i: x.cumsum(1), False),
        "sums across": (lambda x, y, i: x.cumsum(-1), True),
        "split": (lambda x, y, i: torch.cat([part * n for n, part in enumerate(x.split(2, -1))], -1), True),
        "chunks": (lambda x, y, i: sum(x.chunk(2, dim=-1)), True),
        "padded": (lambda x, y, i: F.pad(x, (0, 0, 1, 0)), False),
        "joined": (lambda x, y, i: torch.cat([x, y], dim=-1), True),
        "joined along": (lambda x, y, i: torch.cat([x, y], dim=1), False),
        "stacked": (lambda x, y, i: torch.stack([x, y]), False),
        "einsum": (lambda x, y, i: torch.einsum("btd,vd->btv", x, weight), False),
        "scores": (lambda x, y, i: x @ x.mT, False),
        "expanded": (lambda x, y, i: x[:, None].expand(-1, 2, -1, -1), True),
        "like": (lambda x, y, i: torch.zeros_like(x) + x + x.new_ones(1), True),
        "written": (_written, True),
        "neighbours": (lambda x, y, i: x[:, 1:] - x[:, :-1], not is_short),
        "cross entropy": (lambda x, y, i: F.cross_entropy(x.flatten(0, 1), some.flatten()), False),
        "cross entropy, classes second": (lambda x, y, i: F.cross_entropy(x.transpose(1, 2), labels), False),
        "cross entropy, shifted": (
            lambda x, y, i: F.cross_entropy(x[:, :-1].reshape(-1, FEATURES), labels[:, 1:].reshape(-1)),
            False,
        ),
        "cross entropy, options": (
            lambda x, y, i: F.cross_entropy(
                x.view(-1, FEATURES), some.view(-1), weight=weight[0].abs(), label_smoothing=0.1
            ),
            False,
        ),
        "cross entropy, each": (
            lambda x, y, i: F.cross_entropy(x.transpose(1, 2), some, reduction="none").sum(1),
            False,
        ),
        "cross entropy, sum": (
            lambda x, y, i: F.cross_entropy(x.view(-1, FEATURES), labels.view(-1), reduction="sum"),
            False,
        ),
        "cross entropy, soft": (lambda x, y, i: F.cross_entropy(x.flatten(0, 1), y.softmax(-1).flatten(0, 1)), False),
        "likelihood": (lambda x, y, i: F.nll_loss(x.log_softmax(-1).view(-1, FEATURES), labels.view(-1)), False),
        "squared error": (lambda x, y, i: F.mse_loss(x, y), False),
        "squared error, swapped": (lambda x, y, i: F.mse_loss(y, x, reduction="sum"), False),
        "binary": (lambda x, y, i: F.binary_cross_entropy_with_logits(x, y.sigmoid()), False),
        "embedded": (lambda x, y, i: x + F.embedding(_same_rows(x, labels), weight[:, :4]), True),
        "numbers": (lambda x, y, i: x * float(x.sum()) + x.detach().numpy().sum(), True),
        "shape": (lambda x, y, i: x * sum(x.shape) + len(x) + x.size(1) + x.dim() + x.numel(), True),
    }


def _augmented(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    out = x * 1
    out += y
    out *= 2
    return out


def _written(x: Tensor, y: Tensor, i: Tensor) -> Tensor:
    out = x * 1
    out[:, 0] = 5.0
    return out * 2


def _same_rows(x: Tensor, ids: Tensor) -> Tensor:
    return SequenceShard(x.rows.take(ids, 1), x.rows, 1) if isinstance(x, SequenceShard) else ids


def failures(length: int) -> list[str]:
    """Cases in which a tensor in rows gives something else than the full one."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, BATCH, length, FEATURES, generator=generator, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    ids = torch.arange(BATCH) % length
    rows = Context(dist.group.WORLD, torch.device("cpu"), HANDLERS).rows(length)
    wrong = []
    for name, (function, stays) in cases(length).items():
        full = x.clone().requires_grad_()
        try:
            expected = function(full, y, ids)
        except (RuntimeError, IndexError):
            continue  # not of this length
        if expected.numel() == 0 or not expected.requires_grad:
            continue
        probe = torch.linspace(1, 2, expected.numel()).view(expected.shape)
        (expected * probe).sum().backward()
        leaf = rows.take(x, 1).clone().requires_grad_()
        found = function(SequenceShard(leaf, rows, 1), y, ids)
        if isinstance(found, SequenceShard) != stays and length > 2:
            wrong.append(f"{name}: {'gathered' if stays else 'in rows'}")
        whole = found.full() if isinstance(found, SequenceShard) else found
        (whole * probe).sum().backward()
        gradient = rows.collect(leaf.grad, 1) / dist.get_world_size()  # [Note: the mean convention]
        for what, a, b in (("value", whole, expected), ("gradient", gradient, full.grad)):
            if a.shape != b.shape or not torch.allclose(a, b, atol=1e-12, equal_nan=True):
                wrong.append(f"{name}: {what} at length {length}")
    torch.set_default_dtype(torch.float32)
    return wrong


@pytest.mark.parametrize("length", [1, 2, 7, 8, 15])
@pytest.mark.parametrize("world", [2, 4])
def test_means_the_full_tensor(pool: WorkerPool, world: int, length: int) -> None:
    assert pool.run(failures, length, world=world) == [[]] * world
