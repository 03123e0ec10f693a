"""Norm and clipping over mixtures of plain tensors and DTensors, against torch on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.clipping import clip_grad_norm, clip_grad_value, total_norm
from tests.support.failures import RankError
from tests.support.pool import WorkerPool

ORDERS = [2.0, 1.0, 3.0, math.inf]
R, S0, S1 = Replicate(), Shard(0), Shard(1)

# Axes of the mesh, and what each gradient is sharded as: placements on the whole mesh, on a part of it (with the
# axis in front), or None for a plain tensor. Shape (5, 6): no axis of 2 or 4 divides the first dim, and the last of
# four ranks holds nothing of it.
CASES: dict[str, tuple[dict[str, int], list[Sequence[Placement] | tuple[str, Placement] | None]]] = {
    "fsdp": ({"fsdp": 4}, [(S0,), (S0,), None]),
    "tp": ({"tp": 4}, [(S0,), (S1,), (R,), None]),
    "fsdp-tp": (
        {"fsdp": 2, "tp": 2},
        [(S0, S1), (S0, S0), (S0, R), (R, S0), (R, R), ("fsdp", S0), ("fsdp", S1), ("tp", S0), ("tp", R), None],
    ),
    "hsdp": ({"ddp": 2, "fsdp": 2}, [(R, S0), (R, S1), (R, R), ("fsdp", S0), ("ddp", R), None]),
}


def whole_gradients(num: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num)
    return [torch.randn(5, 6, generator=generator, dtype=torch.float64).to(dtype) for _ in range(num)]


def reference(num: int, order: float, max_norm: float, dtype: torch.dtype) -> tuple[float, list[Tensor]]:
    parameters = [nn.Parameter(torch.zeros(5, 6, dtype=dtype)) for _ in range(num)]
    for parameter, grad in zip(parameters, whole_gradients(num, dtype), strict=True):
        parameter.grad = grad
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, order)
    return norm.item(), [parameter.grad for parameter in parameters if parameter.grad is not None]


def build(case: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters of the case with gradients, and one without."""
    axes, shardings = CASES[case]
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parameters = []
    for sharding, grad in zip(shardings, whole_gradients(len(shardings), dtype), strict=True):
        zeros = torch.zeros_like(grad)
        if sharding is None:
            parameter = nn.Parameter(zeros)
            parameter.grad = grad
        else:
            own_mesh: DeviceMesh = mesh
            placements: list[Placement] = [p for p in sharding if isinstance(p, Placement)]
            if isinstance(sharding[0], str):
                own_mesh = mesh[sharding[0]]
            parameter = nn.Parameter(distribute_tensor(zeros, own_mesh, placements))
            parameter.grad = distribute_tensor(grad, own_mesh, placements)
        parameters.append(parameter)
    parameters.append(nn.Parameter(distribute_tensor(torch.zeros(5, 6, dtype=dtype), mesh, [R] * mesh.ndim)))
    return parameters


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_all(case: str, dtype: torch.dtype) -> list[tuple[float, list[Tensor]]]:
    results = []
    for order in ORDERS:
        parameters = build(case, dtype)
        norm = clip_grad_norm(parameters, 0.5, order)
        assert not isinstance(norm, DTensor)
        results.append((norm.item(), [whole(p.grad) for p in parameters[:-1]]))
        assert parameters[-1].grad is None
    return results


@pytest.mark.parametrize("case", CASES)
def test_norm_and_clipped_gradients_equal_one_device(pool: WorkerPool, case: str) -> None:
    results = pool.run(clip_all, case, torch.float32)

    for index, order in enumerate(ORDERS):
        norm, grads = reference(len(CASES[case][1]), order, 0.5, torch.float32)
        assert {ranks[index][0] for ranks in results} == {results[0][index][0]}, "the same bits on every rank"
        assert results[0][index][0] == pytest.approx(norm, rel=1e-6)
        for got, expected in zip(results[0][index][1], grads, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def test_bf16_gradients_are_summed_in_float32(pool: WorkerPool) -> None:
    (got, grads), *_ = pool.run(clip_all, "fsdp-tp", torch.bfloat16)[0]

    num = len(CASES["fsdp-tp"][1])
    exact = torch.stack(whole_gradients(num, torch.bfloat16)).double().norm().item()
    assert got == pytest.approx(exact, rel=1e-6)
    assert {grad.dtype for grad in grads} == {torch.bfloat16}


def count_collectives(case: str) -> tuple[int, int]:
    parameters = build(case)
    with CommDebugMode() as counted:
        clip_grad_norm(parameters, 0.5)
    with CommDebugMode() as by_value:
        clip_grad_value(parameters, 0.5)
    return counted.get_total_counts(), by_value.get_total_counts()


@pytest.mark.parametrize(("case", "expected"), [("fsdp", 1), ("tp", 1), ("fsdp-tp", 2), ("hsdp", 1)])
def test_one_collective_a_sharding_axis(pool: WorkerPool, case: str, expected: int) -> None:
    assert pool.run(count_collectives, case) == [(expected, 0)] * 4


def clip_by_value(case: str) -> list[Tensor]:
    parameters = build(case)
    clip_grad_value(parameters, 0.3)
    return [whole(p.grad) for p in parameters[:-1]]


@pytest.mark.parametrize("case", CASES)
def test_clip_by_value(pool: WorkerPool, case: str) -> None:
    grads = pool.run(clip_by_value, case)[0]

    for got, grad in zip(grads, whole_gradients(len(CASES[case][1])), strict=True):
        torch.testing.assert_close(got, grad.clamp(-0.3, 0.3), rtol=0, atol=0)


def poison(where: str, order: float) -> tuple[str, bool, bool]:
    """A nan on rank 1 alone, in a shard or in a plain gradient."""
    parameters = build("fsdp-tp")
    grads = [p.grad for p in parameters if p.grad is not None]
    if dist.get_rank() == 1:
        victim = grads[0].to_local() if where == "shard" and isinstance(grads[0], DTensor) else grads[-1]
        victim[0, 0] = math.nan
    before = [(grad.to_local() if isinstance(grad, DTensor) else grad).clone() for grad in grads]
    message = ""
    try:
        clip_grad_norm(parameters, 0.5, order, error_if_nonfinite=True)
    except RuntimeError as error:
        message = str(error)
    after = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    is_unchanged = all(torch.equal(a, b) or a.isnan().any() for a, b in zip(after, before, strict=True))
    return message, is_unchanged, total_norm(parameters, order).isfinite().item() is True


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("where", ["shard", "plain"])
def test_error_if_nonfinite_raises_on_every_rank_before_any_change(pool: WorkerPool, where: str, order: float) -> None:
    results = pool.run(poison, where, order)

    assert all("not finite" in message and is_unchanged for message, is_unchanged, _ in results)
    if where == "shard":
        assert not any(is_finite for *_, is_finite in results), "a nan in one shard is everyone's"


def clip_partial() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [R]))
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    clip_grad_norm([parameter], 1.0)


def test_partial_gradient_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(RankError, match="mesh axis 'tp'") as caught:
        pool.run(clip_partial, world=2)
    assert isinstance(caught.value.first.exception, ParallelConfigError)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def fsdp_times_tp(is_parallel: bool) -> tuple[float, dict[str, Tensor]]:
    """`fully_shard` over `parallelize_module`, whose norm layer stays off the tp axis and out of its mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if is_parallel:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["fsdp"])
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    norm = clip_grad_norm(model.parameters(), 0.05)
    return norm.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


def test_fully_shard_over_tensor_parallel(pool: WorkerPool) -> None:
    norm, grads = fsdp_times_tp(is_parallel=False)
    for got_norm, got_grads in pool.run(fsdp_times_tp, is_parallel=True):
        assert got_norm == pytest.approx(norm, rel=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(got_grads[name], grad, rtol=1e-5, atol=1e-7, msg=name)


def test_without_process_groups_equals_torch() -> None:
    parameters = [nn.Parameter(torch.zeros(5, 6, dtype=torch.float64)) for _ in range(3)]
    for parameter, grad in zip(parameters, whole_gradients(3, torch.float64), strict=True):
        parameter.grad = grad
    norm = clip_grad_norm(iter(parameters), 0.5, error_if_nonfinite=True)

    expected, grads = reference(3, 2.0, 0.5, torch.float64)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(expected, rel=1e-12)
    for parameter, grad in zip(parameters, grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_nothing_to_clip() -> None:
    assert clip_grad_norm([], 1.0).item() == 0
    assert clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0).item() == 0


@pytest.mark.parametrize("order", [0, -1.0, math.nan])
def test_order_must_be_positive(order: float) -> None:
    with pytest.raises(ParallelConfigError, match=r"Use 2\.0"):
        total_norm([], order)
