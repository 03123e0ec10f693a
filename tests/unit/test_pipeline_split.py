"""Which stage holds what: the trunk, the cut, roles, buffers, ties."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import ParallelConfigError, PlanError
from lightning_parallel.schemes.pipeline.split import Site, pipeline_blocks, split_stages
from tests.support.models import EncoderLM, HandLlama, NanoGPT
from tests.support.networks import GPTBlock
from tests.support.stages import DIM, Nested, check_blocks, outside, roles_of

# Language models written by hand, and torch's own encoder.


class DictGPT(nn.Module):
    """nanoGPT as it stands: all but the head in a ModuleDict, which has no code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(16, DIM),
                "wpe": nn.Embedding(16, DIM),
                "ln_f": nn.LayerNorm(DIM),  # registered before the blocks, used after
                "h": nn.ModuleList(GPTBlock(DIM, 2, 0.0) for _ in range(4)),
            }
        )
        self.lm_head = nn.Linear(DIM, 16, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.transformer.wte(idx) + self.transformer["wpe"](torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_nanogpt(tied: bool, num_stages: int) -> None:
    module = NanoGPT(layers=4, tied=tied)
    split = split_stages(module, num_stages)
    last = num_stages - 1
    assert split.num_stages == num_stages
    check_blocks(split, "model.h", [4 // num_stages] * num_stages)
    assert outside(split) == {"model.wte": [0], "model.wpe": [0], "model.ln_f": [last], "model.lm_head": [last]}
    holders = split.holders(module)
    assert holders[id(module.model.wte.weight)] == ({0, last} if tied else {0})
    assert holders[id(module.model.lm_head.weight)] == ({0, last} if tied else {last})
    assert holders[id(module.model.h[0].ln_1.weight)] == {0}
    assert set(holders) == {id(p) for p in module.parameters()}


def test_modules_in_a_container_without_code() -> None:
    module = DictGPT()
    split = split_stages(module, 2)
    check_blocks(split, "transformer.h", [2, 2])
    assert outside(split) == {"transformer.wte": [0], "transformer.wpe": [0], "transformer.ln_f": [1], "lm_head": [1]}
    assert split.holders(module)[id(module.lm_head.weight)] == {0, 1}


@pytest.mark.parametrize("num_stages", [2, 4])
def test_torch_encoder(num_stages: int) -> None:
    """The head's name is loaded before the blocks run, and its own parameter is used between two of them."""
    with torch.device("meta"):
        split = split_stages(EncoderLM(layers=4), num_stages)
    check_blocks(split, "model.encoder.layers", [4 // num_stages] * num_stages)
    assert outside(split) == {"model.position": [0], "model.embed": [0], "model.head": [num_stages - 1]}


def test_tables_are_everywhere() -> None:
    split = split_stages(HandLlama(layers=4), 2)
    assert outside(split) == {
        "model.embed": [0],
        "model.norm": [1],
        "model.output": [1],
        "model.table": [0, 1],
    }
    assert split.sites[Site("model", "table", True)] == {0, 1}


# Roles


def test_declared_roles_win() -> None:
    module = Nested()
    plan = {"a": "head", "c": "stem", "scale": "head", "d.weight": "stem", "blocks.*": "block"}
    split = split_stages(module, 2, roles=roles_of(module, plan))
    held = {(site.module, site.name): set(stages) for site, stages in split.sites.items()}
    assert held["a", "weight"] == held["", "scale"] == {1}
    assert held["c", "weight"] == held["c", "bias"] == held["d", "weight"] == {0}
    assert held["d", "bias"] == {1}  # by the code


@pytest.mark.parametrize("glob", ["blocks.1", "blocks.*.0"])
def test_parts_of_a_block_have_no_place_of_their_own(glob: str) -> None:
    module = Nested()
    with pytest.raises(PlanError, match=r"'blocks\.\d(\.0)?' has the role head, but it is in the block 'blocks\.\d'"):
        split_stages(module, 2, roles=roles_of(module, {glob: "head"}))


# Buffers, and modules in several places


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4, affine=False))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)) for _ in range(2))
        self.quantizer = nn.Linear(4, 4)
        self.quantizer.register_buffer("average", torch.zeros(4))
        self.quantizer.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.quantizer.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.positions = nn.Module()
        self.positions.register_buffer("table", torch.zeros(4))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.positions.table
        for block in self.blocks:
            x = block(x)
        return self.quantizer(x - self.quantizer.average)


def test_buffers_go_with_parameters_or_everywhere() -> None:
    split = split_stages(Buffers(), 2)
    buffers = {f"{s.module}.{s.name}": sorted(stages) for s, stages in split.sites.items() if s.is_buffer}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert buffers == {
        **{f"stem.1.{name}": [0] for name in statistics},
        **{f"blocks.{i}.1.{name}": [i] for i in range(2) for name in statistics},
        "quantizer.average": [1],
        "quantizer.scratch": [0, 1],
        "quantizer.step": [0, 1],
        "positions.table": [0, 1],
    }


def test_a_repeated_block_is_a_block_at_each_position() -> None:
    module = Nested()
    module.blocks[3] = module.blocks[0]
    split = split_stages(module, 2)
    assert split.blocks == (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))
    assert split.sites[Site("blocks.0.0", "weight", False)] == {0, 1}
    assert Site("blocks.3.0", "weight", False) not in split.sites
    assert split.holders(module)[id(module.blocks[0][0].weight)] == {0, 1}


def test_what_blocks_share_is_held_by_each() -> None:
    module = Nested()
    module.blocks[1][0].weight = module.blocks[2][0].weight  # one parameter
    module.blocks[3].add_module("2", module.a)  # one module, also outside the blocks
    split = split_stages(module, 4)
    assert split.sites[Site("blocks.1.0", "weight", False)] == {1}
    holders = split.holders(module)
    assert holders[id(module.blocks[1][0].weight)] == {1, 2}
    assert split.sites[Site("blocks.3.2", "weight", False)] == holders[id(module.a.weight)] == {0, 3}


# The trunk


def test_the_largest_list_is_the_trunk() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cnn = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1))
            self.small = nn.ModuleList(GPTBlock(4, 2, 0.0) for _ in range(9))
            self.large = nn.ModuleList(GPTBlock(16, 2, 0.0) for _ in range(3))

    module = Two()
    assert pipeline_blocks(module) == ["large.0", "large.1", "large.2"]
    declared = roles_of(module, {"small.*": "block"})
    assert pipeline_blocks(module, declared) == [f"small.{i}" for i in range(9)]
    assert outside(split_stages(module, 3))["cnn.0"] == [0]
    with pytest.raises(PlanError, match="9 in 'small'; 3 in 'large'"):
        pipeline_blocks(module, roles_of(module, {"small.*": "block", "large.*": "block"}))


def test_experts_in_layers_of_several_kinds_are_no_trunk() -> None:
    class Dense(GPTBlock):
        pass

    class Sparse(GPTBlock):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 64)) for _ in range(8))

    module = nn.Module()
    module.layers = nn.ModuleList((Dense, Sparse)[i % 2](DIM, 2, 0.0) for i in range(4))
    assert pipeline_blocks(module) == [f"layers.{i}" for i in range(4)]


def test_lists_of_lists_cannot_be_called() -> None:
    module = nn.Module()
    module.towers = nn.ModuleList(nn.ModuleList(GPTBlock(DIM, 2, 0.0) for _ in range(n)) for n in (2, 3))
    assert pipeline_blocks(module) == ["towers.1.0", "towers.1.1", "towers.1.2"]


def test_a_convolutional_network_in_a_sequential() -> None:
    module = nn.Module()
    module.net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), nn.Linear(4, 2)
    )
    module.loss = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    split = split_stages(module, 2)
    assert split.blocks == (("net.0", "net.1", "net.2"), ("net.3", "net.4"))  # also what has no parameters
    assert split.sites[Site("net.1", "running_mean", True)] == {0}
    assert pipeline_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ["0", "1"]  # the root itself


def test_no_trunk() -> None:
    with pytest.raises(PlanError, match=r"Linear has no repeated layers .* Give the modules .* the role \"block\""):
        split_stages(nn.Linear(2, 2), 2)


# The cut


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "sizes"),
    [
        (4, 1, [4]),
        (5, 2, [3, 2]),
        (4, 4, [1, 1, 1, 1]),
        (5, 4, [1, 2, 1, 1]),  # one more in the middle: the ends have embeddings, head and loss
        (6, 4, [1, 2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (32, 5, [6, 7, 7, 6, 6]),
    ],
)
def test_even_numbers(num_blocks: int, num_stages: int, sizes: list[int]) -> None:
    with torch.device("meta"):
        split = split_stages(NanoGPT(layers=num_blocks), num_stages)
    check_blocks(split, "model.h", sizes)
    assert outside(split)["model.wte"] == [0] and outside(split)["model.lm_head"] == [num_stages - 1]


class Uneven(nn.Module):
    """Blocks of widths 1, 1, 1, 4, 1, 1 (times eight), an embedding and a head."""

    def __init__(self, head: int = 1, vocab: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM * n, bias=False), nn.ReLU()) for n in (1, 1, 1, 4, 1, 1)
        )
        self.head = nn.Linear(DIM, DIM * head, bias=False)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [3, 1, 2]),
        ({"head": 2}, [3, 1, 2]),
        ({"head": 6}, [3, 2, 1]),  # a large head leaves its stage one block
        ({"vocab": 100}, [3, 1, 2]),  # 800 parameters, but only looked up
        ({"vocab": 40_000}, [1, 3, 2]),  # at some size that counts too
    ],
)
def test_costs_are_balanced(options: dict[str, int], sizes: list[int]) -> None:
    check_blocks(split_stages(Uneven(**options), 3, balance="cost"), "blocks", sizes)


def test_costs_of_ones_own() -> None:
    def cost(module: nn.Module) -> float:
        return 10.0 if isinstance(module, nn.Embedding) else 1.0

    module = Uneven()
    check_blocks(split_stages(module, 2, balance="cost", cost=cost), "blocks", [1, 5])
    check_blocks(split_stages(module, 6, balance="cost", cost=cost), "blocks", [1] * 6)
    check_blocks(split_stages(module, 1, balance="cost", cost=cost), "blocks", [6])
    with pytest.raises(ParallelConfigError, match=r"cost= returned nan; a cost is a number, 0 or more"):
        split_stages(module, 2, balance="cost", cost=lambda _: float("nan"))


def test_no_cut_is_better_than_the_one_by_cost() -> None:
    costs = [3.0, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    module = nn.Sequential(*(nn.Sequential(nn.Linear(1, int(c), bias=False)) for c in costs))
    for num_stages in range(1, 8):
        split = split_stages(module, num_stages, balance="cost")
        dearest = max(sum(costs[int(name)] for name in stage) for stage in split.blocks)
        best = min(
            max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs))))
            for cut in itertools.combinations(range(1, len(costs)), num_stages - 1)
        )
        assert dearest == best


def test_boundaries() -> None:
    split = split_stages(NanoGPT(layers=5), 3, boundaries=["model.h.1", "model.h.2"])
    check_blocks(split, "model.h", [1, 1, 3])
    check_blocks(split_stages(NanoGPT(layers=2), 1, boundaries=[]), "model.h", [2])


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (["model.h.1"], r"3 stages need 2 names"),
        ("model.h.1", r"3 stages need 2 names"),
        (["model.h.1", "model.h.12"], r"'model.h.12' is no block. Nearest names: model.h.[123]"),
        (["model.h.0", "model.h.2"], r"'model.h.0' is the first block, where the first stage begins. Nearest names: m"),
        (["model.h.3", "model.h.1"], r"not in the order of the blocks.* Use \['model.h.1', 'model.h.3'\]"),
        (["model.h.1", "model.h.1"], r"not in the order of the blocks, each once"),
    ],
)
def test_boundaries_that_are_none(boundaries: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split_stages(NanoGPT(layers=4), 3, boundaries=boundaries)


@pytest.mark.parametrize(
    ("num_stages", "options", "message"),
    [
        (5, {}, r"5 pipeline stages, but NanoGPT has 4 blocks \(model.h.0 to model.h.3\).* Use 1 to 4 stages"),
        (0, {}, r"0 pipeline stages"),
        (2, {"balance": "memory"}, r"balance='memory': use 'even'"),
        (2, {"boundaries": ["model.h.1"], "balance": "cost"}, r"Pass boundaries=, or balance='cost'"),
        (2, {"cost": lambda _: 1.0}, r"cost= is for the latter only"),
    ],
)
def test_options_that_do_not_fit(num_stages: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        split_stages(NanoGPT(layers=4), num_stages, **options)
