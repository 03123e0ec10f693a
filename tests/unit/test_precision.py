"""Precision plugins in front of sharded parameters: one verdict on overflow, and tables that keep their dtype."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_parallel.precision import adapt_precision
from tests.support.pool import WorkerPool


def mixed(**options: Any) -> MixedPrecision:
    # Lightning makes bf16-mixed of precision="16-mixed" on a CPU, so a scaler there comes in a plugin.
    return MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler(device="cpu", **options))


@pytest.mark.parametrize(
    "plugin",
    [Precision(), HalfPrecision("bf16-true"), DoublePrecision(), MixedPrecision("bf16-mixed", device="cpu"), mixed()],
)
def test_plugin_and_scaler_stay_the_same_objects_of_the_same_name(plugin: Precision) -> None:
    before, scaler = type(plugin), getattr(plugin, "scaler", None)

    adapted = adapt_precision(adapt_precision(plugin))

    assert adapted is plugin
    assert isinstance(plugin, before)
    assert type(plugin).__qualname__ == before.__qualname__, "a key in Lightning's checkpoints"
    assert getattr(plugin, "scaler", None) is scaler
    assert len(type(plugin).__mro__) == len(before.__mro__) + 2, "adapted once"


def test_scaler_keeps_its_options_and_state() -> None:
    plugin = mixed(init_scale=128.0, growth_interval=7)
    state = plugin.state_dict()
    adapt_precision(plugin)
    assert plugin.state_dict() == state
    plugin.load_state_dict({**state, "scale": 32.0})
    assert copy.deepcopy(plugin.scaler).get_scale() == 32.0


# --- one verdict on overflow ---


def sharded_parameters(kind: str) -> list[nn.Parameter]:
    """Three parameters of 5 × 4 elements with gradients of ones: fully sharded, tensor parallel, plain or a mixture."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    placements = {
        "plain": [None] * 3,
        "sharded": [(Shard(0), Shard(1))] * 3,
        "mixture": [(Shard(0), Shard(1)), (Shard(0), Replicate()), None],
        "meshes": [(Shard(0), Shard(1)), "fsdp", "tp"],
    }[kind]
    parameters = []
    for sharding in placements:
        ones = torch.ones(5, 4)
        if sharding is None:
            parameter, grad = nn.Parameter(ones.clone()), ones
        else:
            own_mesh, own = (mesh[sharding], [Shard(0)]) if isinstance(sharding, str) else (mesh, list(sharding))
            parameter = nn.Parameter(distribute_tensor(ones, own_mesh, own))
            grad = distribute_tensor(ones, own_mesh, own)
        parameter.grad = grad
        parameters.append(parameter)
    return parameters


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step_where_one_rank_overflows(kind: str, bad_rank: int, with_clipping: bool) -> tuple[float, bool, float]:
    plugin = adapt_precision(mixed(init_scale=16.0), error_if_nonfinite=True)
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    parameters = sharded_parameters(kind)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    plugin.scaler.scale(torch.ones(()))
    if dist.get_rank() == bad_rank:
        assert parameters[0].grad is not None
        local(parameters[0].grad)[0, 0] = math.inf
    before = [local(p.detach()).clone() for p in parameters]
    plugin.scaler.unscale_(optimizer)
    # The first element may be the bad one.
    unscaled = local(parameters[1].grad).flatten()[-1].item()  # type: ignore[arg-type]
    if with_clipping:
        plugin.clip_gradients(optimizer, 1e6)
    plugin.scaler.step(optimizer)
    plugin.scaler.update()
    is_unchanged = all(torch.equal(local(p.detach()), b) for p, b in zip(parameters, before, strict=True))
    return plugin.scaler.get_scale(), is_unchanged, unscaled


@pytest.mark.parametrize("kind", ["plain", "sharded", "mixture", "meshes"])
@pytest.mark.parametrize("with_clipping", [False, True])
def test_all_ranks_skip_the_step_and_halve_the_scale(pool: WorkerPool, kind: str, with_clipping: bool) -> None:
    assert pool.run(step_where_one_rank_overflows, kind, 1, with_clipping) == [(8.0, True, 1 / 16)] * 4


@pytest.mark.parametrize("kind", ["plain", "mixture"])
def test_without_overflow_all_ranks_step(pool: WorkerPool, kind: str) -> None:
    assert pool.run(step_where_one_rank_overflows, kind, -1, False) == [(16.0, False, 1 / 16)] * 4


def step_without_gradients_on_some_ranks(is_finite: bool) -> tuple[float, bool]:
    """As with a pipeline stage or an expert that got nothing to do."""
    plugin = adapt_precision(mixed(init_scale=16.0))
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    parameter = nn.Parameter(torch.ones(3))
    if dist.get_rank() == 1:
        parameter.grad = torch.full((3,), 1.0 if is_finite else math.nan)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    plugin.scaler.scale(torch.ones(()))
    plugin.scaler.step(optimizer)
    plugin.scaler.update()
    return plugin.scaler.get_scale(), bool((parameter == 1).all())


@pytest.mark.parametrize("is_finite", [True, False])
def test_ranks_without_gradients_take_part(pool: WorkerPool, is_finite: bool) -> None:
    dist_results = pool.run(with_gloo, "step_without_gradients_on_some_ranks", is_finite, world=2)
    assert dist_results == [(16.0 if is_finite else 8.0, True), (16.0 if is_finite else 8.0, not is_finite)]


def with_gloo(name: str, *args: Any) -> Any:
    dist.init_process_group("gloo")
    return globals()[name](*args)


def fused_step_where_one_rank_overflows(bad_rank: int) -> tuple[float, bool]:
    """Fused optimizers unscale by themselves, and take the verdict from the scaler."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = nn.Linear(4, 3)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    plugin = adapt_precision(mixed(init_scale=16.0))
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    plugin.scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if dist.get_rank() == bad_rank:
        local(model.weight.grad)[0, 0] = math.inf  # type: ignore[arg-type]
    before = local(model.weight.detach()).clone()
    plugin.scaler.step(optimizer)
    plugin.scaler.update()
    return plugin.scaler.get_scale(), torch.equal(local(model.weight.detach()), before)


@pytest.mark.parametrize(("bad_rank", "expected"), [(1, (8.0, True)), (-1, (16.0, False))])
def test_fused_optimizer(pool: WorkerPool, bad_rank: int, expected: tuple[float, bool]) -> None:
    assert pool.run(fused_step_where_one_rank_overflows, bad_rank, world=2) == [expected] * 2


def test_one_process_without_a_group() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), math.inf)
    plugin = adapt_precision(mixed(init_scale=16.0))
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    plugin.scaler.scale(torch.ones(()))
    plugin.scaler.step(torch.optim.SGD([parameter], lr=1.0))
    plugin.scaler.update()
    assert plugin.scaler.get_scale() == 8.0
    assert (parameter == 1).all()


def test_subclasses_of_the_scaler_keep_what_they_do() -> None:
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=ShardedGradScaler(device="cpu", init_scale=4.0))
    adapt_precision(plugin)
    assert isinstance(plugin.scaler, ShardedGradScaler)


def test_clipping_by_norm_and_by_value_without_a_scaler() -> None:
    plugin = adapt_precision(Precision(), error_if_nonfinite=True)
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    plugin.clip_gradients(optimizer, 1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    plugin.clip_gradients(optimizer, 0.7, gradient_clip_algorithm="value")  # type: ignore[arg-type]
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.7]))
    parameter.grad = torch.tensor([3.0, math.nan])
    with pytest.raises(RuntimeError, match="not finite"):
        plugin.clip_gradients(optimizer, 1.0)


# --- half precision ---


class Rotary(nn.Module):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        table = torch.arange(1000, dtype=torch.float32, device=device) / 3
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("phases", torch.polar(torch.ones_like(table), table), persistent=False)
        self.register_buffer("ids", torch.arange(4, device=device), persistent=False)
        self.register_buffer("mean", torch.zeros(4, device=device))
        self.weight = nn.Parameter(torch.ones(4, 4, device=device))


class Net(nn.Module):
    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.rotary = Rotary(device)
        self.body = nn.Linear(4, 4, device=device)
        self.head = nn.Linear(4, 4, device=device)
        self.head.weight = self.body.weight


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in [*module.named_parameters(), *module.named_buffers()]}


def expected_dtypes(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {
        "rotary.weight": dtype,
        "body.weight": dtype,
        "body.bias": dtype,
        "head.bias": dtype,
        "rotary.table": torch.float32,
        "rotary.phases": torch.complex64,
        "rotary.ids": torch.int64,
        "rotary.mean": dtype,
    }


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
@pytest.mark.parametrize("device", [None, "meta"])
def test_tables_keep_their_dtype(precision: Any, dtype: torch.dtype, device: str | None) -> None:
    plugin = adapt_precision(HalfPrecision(precision))
    net = plugin.convert_module(Net(device))

    assert dtypes(net) == expected_dtypes(dtype)
    assert net.head.weight is net.body.weight
    if device is None:
        torch.testing.assert_close(net.rotary.table, torch.arange(1000.0) / 3, rtol=0, atol=0)
    assert "rotary.table" not in net.state_dict(), "still not persistent"


def test_other_precisions_convert_as_lightning_does() -> None:
    net = adapt_precision(DoublePrecision()).convert_module(Net())
    assert net.rotary.table.dtype == torch.float64
    net = adapt_precision(Precision()).convert_module(Net())
    assert set(dtypes(net).values()) == {torch.float32, torch.complex64, torch.int64}


def convert_sharded() -> tuple[dict[str, torch.dtype], bool, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    net = Net()
    tied = nn.Parameter(distribute_tensor(net.body.weight.detach(), mesh["tp"], [Shard(0)]))
    net.body.weight = net.head.weight = tied
    net.body.bias = nn.Parameter(distribute_tensor(net.body.bias.detach(), mesh["tp"], [Shard(0)]))
    net.head.bias = nn.Parameter(distribute_tensor(net.head.bias.detach(), mesh["tp"], [Replicate()]))
    fully_shard(net.rotary, mesh=mesh["fsdp"])
    adapt_precision(HalfPrecision("bf16-true")).convert_module(net)
    is_sharded = all(isinstance(p, DTensor) for p in net.parameters())
    return dtypes(net), is_sharded, net.head.weight is net.body.weight


def test_sharded_modules_convert(pool: WorkerPool) -> None:
    for got in pool.run(convert_sharded):
        assert got == (expected_dtypes(torch.bfloat16), True, True)
