"""Looking at a split into pipeline stages, and a network to split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import ParallelPlan
from lightning_parallel.plan import Role
from lightning_parallel.schemes.pipeline.split import StageSplit

DIM = 8


def outside(split: StageSplit) -> dict[str, list[int]]:
    """Stages of the parameters and buffers that are in no block, weights only where a module has a bias too."""
    blocks = [block for stage in split.blocks for block in stage]
    found: dict[str, list[int]] = {}
    for site, stages in split.sites.items():
        if not any(f"{site.module}.".startswith(f"{block}.") for block in blocks):
            found[f"{site.module}.{site.name}".lstrip(".").removesuffix(".weight")] = sorted(stages)
    for name in [name for name in found if name.endswith(".bias")]:
        assert found[name.removesuffix(".bias")] == found.pop(name)
    return found


def stages_of_blocks(split: StageSplit) -> dict[str, set[frozenset[int]]]:
    """By block, what its parameters and buffers are held by."""
    return {
        block: {stages for site, stages in split.sites.items() if f"{site.module}.".startswith(f"{block}.")}
        for stage in split.blocks
        for block in stage
    }


def check_blocks(split: StageSplit, prefix: str, sizes: list[int]) -> None:
    names = [f"{prefix}.{i}" for i in range(sum(sizes))]
    assert [len(stage) for stage in split.blocks] == sizes
    assert [name for stage in split.blocks for name in stage] == names
    expected = [frozenset({stage}) for stage, size in enumerate(sizes) for _ in range(size)]
    assert stages_of_blocks(split) == {name: {stages} for name, stages in zip(names, expected, strict=True)}


def roles_of(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Role]:
    return ParallelPlan(plan).resolve(module)


def record_run(module: nn.Module, split: StageSplit, run: Callable[[], Any]) -> tuple[list[str], list[str], list[str]]:
    """Run for real: the modules with parameters of their own that run before the blocks, among them, after them."""
    blocks = [block for stage in split.blocks for block in stage]
    ran: list[str] = []
    for name, child in module.named_modules():
        around = any(f"{block}.".startswith(f"{name}." if name else "") for block in blocks)
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if name in blocks or (not around and not inside and child._parameters):
            child.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    with torch.no_grad():
        run()
    assert [name for name in ran if name in blocks] == blocks
    first, last = ran.index(blocks[0]), ran.index(blocks[-1])
    return ran[:first], [name for name in ran[first:last] if name not in blocks], ran[last + 1 :]


class Net(nn.Module):
    """A trunk of four blocks and some modules around it, registered in an order that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU()) for _ in range(4))
        self.a, self.b, self.c, self.d = (nn.Linear(DIM, DIM) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(DIM))
        self.gates = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(4))

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Nested(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.d(self.run_blocks(self.b(self.a(x) * self.scale))))
