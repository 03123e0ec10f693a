"""A small module with every way of sharding that a checkpoint meets, and optimizers that step alike on every mesh."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

from lightning_parallel._torch import StridedShard
from lightning_parallel.checkpoint import model_state_dict, optimizer_state_dict
from lightning_parallel.checkpoint.layout import blocks, copy_whole, gather, local

META = {"epoch": 3, "global_step": 7, "lr_schedulers": [{"last_epoch": 7}], "hyper_parameters": {"width": 8}}
VOCABULARY = 97  # a prime: uneven on every axis
WIDTH = 8

TENSOR_PARALLEL: dict[str, Placement] = {
    "embedding.weight": Shard(0),
    "block.packed.weight": StridedShard(0, split_factor=3),
    "block.packed.bias": StridedShard(0, split_factor=3),
    "block.up.weight": Shard(0),
    "block.up.bias": Shard(0),
    "block.down.weight": Shard(1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)


class Toy(nn.Module):
    """Tied weights, a packed projection, a parameter without a gradient, buffers, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.empty(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.note: Any = {}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def fill(module: nn.Module, seed: str = "weights") -> None:
    """Give every tensor the values that its name and ``seed`` determine."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            copy_whole(parameter, named_values(f"{seed}.{name}", parameter.shape))
        if isinstance(module, Toy):
            module.seen.fill_(zlib.crc32(seed.encode()) % 1000)
            module.note = {"seed": seed, 3: (1, 2), "empty": {}}


def named_values(name: str, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def make_mesh(**axes: int) -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel first, then replicas and shards over what is left of the mesh."""
    axes = mesh.mesh_dim_names or ()
    if "tp" in axes:
        for name, parameter in list(module.named_parameters()):
            distributed = distribute_tensor(
                parameter.detach(), mesh["tp"], [TENSOR_PARALLEL.get(name, Replicate())], src_data_rank=None
            )
            _replace(module, name, nn.Parameter(distributed))
        if isinstance(module, Toy):
            module.head.weight = module.embedding.weight
    data_axes = tuple(axis for axis in axes if axis != "tp")
    if data_axes == ("ddp",):
        for name, parameter in list(module.named_parameters()):
            _replace(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, src_data_rank=None)))
        if isinstance(module, Toy):
            module.head.weight = module.embedding.weight
    elif data_axes:
        for child in module.children():
            if isinstance(child, Block):
                fully_shard(child, mesh=mesh[data_axes])
        fully_shard(module, mesh=mesh[data_axes])
    return module


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(path), attribute, parameter)


def make_optimizer(module: nn.Module, kind: str) -> Optimizer:
    if kind == "sgd":
        return SGD(module.parameters(), lr=0.5)
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return AdamW(groups, lr=1e-2, foreach=False)


def step(module: nn.Module, optimizer: Optimizer, number: int) -> None:
    """One step with gradients that the parameters' names determine: element by element, so the same on every mesh."""
    for name, parameter in module.named_parameters():
        if name != "unused":
            gradient = torch.empty_like(parameter.detach())
            copy_whole(gradient, named_values(f"gradient {number}.{name}", parameter.shape))
            parameter.grad = gradient
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5


def trained(module: nn.Module, kind: str, steps: int = 2) -> Optimizer:
    fill(module)
    optimizer = make_optimizer(module, kind)
    for number in range(steps):
        step(module, optimizer, number)
    return optimizer


def assert_holds(observed: Any, expected: Any, where: str = "") -> None:
    """Each sharded tensor of ``observed`` holds this rank's part of ``expected``; the rest is the same."""
    if isinstance(observed, DTensor):
        assert (observed.shape, observed.dtype) == (expected.shape, expected.dtype), where
        for block in blocks(observed):
            assert torch.equal(block.of_local(local(observed)), block.of_whole(expected)), where
    elif isinstance(observed, dict):
        assert observed.keys() == expected.keys(), where
        for key in expected:
            assert_holds(observed[key], expected[key], f"{where}.{key}")
    elif isinstance(observed, list):
        for i, (left, right) in enumerate(zip(observed, expected, strict=True)):
            assert_holds(left, right, f"{where}.{i}")
    else:
        assert_same(observed, expected, where)


def whole(value: Any) -> Any:
    """Gathered tensors in nested dicts and lists."""
    if isinstance(value, DTensor):
        return gather(value)
    if isinstance(value, dict):
        return {key: whole(child) for key, child in value.items()}
    if isinstance(value, list):
        return [whole(child) for child in value]
    return value


def assert_same(observed: Any, expected: Any, where: str = "") -> None:
    """Equal bit for bit, types of tensors included."""
    if isinstance(expected, dict):
        assert isinstance(observed, dict), where
        assert observed.keys() == expected.keys(), where
        for key in expected:
            assert_same(observed[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(observed) is type(expected), where
        assert len(observed) == len(expected), where
        for i, (left, right) in enumerate(zip(observed, expected, strict=True)):
            assert_same(left, right, f"{where}.{i}")
    elif isinstance(expected, Tensor):
        assert isinstance(observed, Tensor), where
        assert not isinstance(observed, DTensor), where
        assert (observed.shape, observed.dtype) == (expected.shape, expected.dtype), where
        assert torch.equal(observed, expected), where
    else:
        assert observed == expected, where


def build(axes: dict[str, int]) -> Toy:
    module = Toy()
    if axes:
        shard(module, make_mesh(**axes))
    return module


def checkpoint_of(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    states = [optimizer_state_dict(optimizer, module, full=False) for optimizer in optimizers]
    return {**META, "state_dict": model_state_dict(module, full=False), "optimizer_states": states}
