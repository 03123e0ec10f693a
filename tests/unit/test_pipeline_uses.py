"""Where a module's code uses what is outside the blocks, and what decides where the code is silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.schemes.pipeline.split import split_stages
from tests.support.networks import GPTBlock
from tests.support.stages import DIM, Nested, Net, check_blocks, outside, record_run, roles_of


class Helpers(Net):
    def embed(self, x: Tensor) -> Tensor:
        return self.b(self.scale + self.a(x))

    @property
    def top(self) -> nn.Module:
        return self.d

    def finish(self, x: Tensor) -> Tensor:
        return self.top(self.c(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.run_blocks(self.embed(x)))


class Aliases(Net):
    def forward(self, x: Tensor) -> Tensor:
        first, last = self.a, self.c
        trunk = self.blocks
        y = first(x) * self.scale + self.b(x)
        for i in range(len(trunk)):
            y = trunk[i](y)
        z = last(y)
        return z + self.d(z)


class Looks(Net):
    """Reads sizes, types and whether things are there before it runs anything."""

    def prepare(self) -> None:
        for block in self.blocks:
            block.extra = [self.c]

    def forward(self, x: Tensor) -> Tensor:
        assert len(self.blocks) == 4 and self.c is not None and isinstance(self.d, nn.Linear)
        width = self.d.weight.shape[0] + self.c.in_features + self.blocks[0][0].weight.size(0)
        kinds = [type(block) for block in self.blocks]
        self.prepare()
        for block in self.blocks:
            kinds.append(block.extra)
        x = self.a(x[:width]).to(self.d.weight.dtype)
        x = self.b(x * self.scale)
        count = 0
        while count < len(self.blocks):
            x = self.blocks[count](x)
            count += 1
        return self.d(self.c(x)) if self.training else self.d(x)


class Branches(Net):
    def forward(self, x: Tensor, deep: bool = True) -> Tensor:
        with torch.no_grad():
            x = self.a(x)
        try:
            x = self.b(x) if deep else self.b(-x)
        except ValueError:
            x = self.d(x)
        x *= self.scale
        if deep:
            for block in self.blocks[:2]:
                x = checkpoint(block, x, use_reentrant=False)
            x = self.blocks[2:][0](x)
            x = self.blocks[-1](x)
        else:
            x = x + sum(block(x) for block in self.blocks)
        return (lambda y: self.d(y))(self.c(x))


class Inner(Net):
    """An inner function, and modules handed to functions."""

    def forward(self, x: Tensor) -> Tensor:
        def finish(y: Tensor) -> Tensor:
            return self.d(y)

        def start(y: Tensor) -> Tensor:
            return self.a(y) + self.scale

        x = checkpoint(start, x, use_reentrant=False)
        x = next(checkpoint(layer, x, use_reentrant=False) for layer in (self.b,))
        for _, block in enumerate(self.blocks):
            x = block(x)
        return finish(checkpoint(self.c, x, use_reentrant=False))


class Base(Net):
    def start(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.run_blocks(self.start(x)))


class Derived(Base):
    def start(self, x: Tensor) -> Tensor:
        return super().start(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.d(super().forward(x))


@pytest.mark.parametrize("kind", [Nested, Helpers, Aliases, Looks, Branches, Inner, Derived])
def test_code_decides(kind: type[Net]) -> None:
    module = kind()
    split = split_stages(module, 2)
    found = outside(split)
    assert {name: stages for name, stages in found.items() if "gates" not in name} == {
        "a": [0], "b": [0], "scale": [0], "c": [1], "d": [1],
    }  # fmt: skip
    before, among, after = record_run(module, split, lambda: module(torch.randn(2, DIM)))
    assert set(before) == {"a", "b"} and not among and set(after) == {"c", "d"}


class Twice(Net):
    """`a` before and after, `b` used as a module before and by its weight after; `scale` and a gate at each block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        for i, block in enumerate(self.blocks):
            x = block(x * self.gates[i]) + self.scale
        return F.linear(self.a(self.c(x)), self.b.weight)


def test_what_is_used_on_several_sides_is_held_there() -> None:
    split = split_stages(Twice(), 4)
    held = {(site.module, site.name): set(stages) for site, stages in split.sites.items()}
    assert held["b", "weight"] == held["a", "weight"] == held["a", "bias"] == {0, 3}
    assert held["b", "bias"] == {0} and held["c", "weight"] == {3}
    assert held["", "scale"] == held["gates", "2"] == {0, 1, 2, 3}


class Between(nn.Module):
    """Stages of a network that are attributes; what runs after one of them is used where its output goes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.layer1, self.layer2, self.layer3 = (nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(3))
        self.mid, self.fc = nn.Conv2d(4, 4, 1), nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.layer1(self.conv(x)))
        return self.fc(self.layer3(self.layer2(x)).mean((2, 3)))


def test_declared_blocks_need_no_list() -> None:
    module = Between()
    split = split_stages(module, 3, roles=roles_of(module, {"layer*": "block"}))
    assert split.blocks == (("layer1",), ("layer2",), ("layer3",))
    assert outside(split) == {"conv": [0], "mid": [1], "fc": [2], "unused": [2]}


class Lit(nn.Module):
    """A LightningModule as far as this goes: the step is spread over helpers, and an unused forward is misleading."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 4)
        self.criterion = nn.ModuleDict({"scale": nn.Linear(4, 4)})
        self.model = Nested()
        self.encoder = nn.Sequential(nn.Linear(4, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.register_buffer("class_weights", torch.ones(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.shared_step(batch)
        self.log("loss", loss)
        return loss

    def shared_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.criterion["scale"](self.predict(x)), y, self.class_weights)

    def predict(self, x: Tensor) -> Tensor:
        return self.head(self.model(self.encode(x)))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.head(x))

    def log(self, name: str, value: Tensor) -> None:
        self.last = self.head(value)


def test_step_and_its_helpers() -> None:
    module = Lit()
    split = split_stages(module, 2)
    check = {name: stages for name, stages in outside(split).items() if not name.startswith("model.")}
    assert check == {"head": [1], "criterion.scale": [1], "encoder.0": [0], "encoder.2": [0], "class_weights": [0, 1]}
    batch = torch.randn(2, 4), torch.zeros(2, dtype=torch.long)
    before, among, after = record_run(module, split, lambda: module.shared_step(batch))
    assert before == ["encoder.0", "encoder.2", "model.a", "model.b"] and not among
    assert after == ["model.d", "model.c", "head", "criterion.scale"]


def test_step_that_reaches_into_the_model() -> None:
    class Reaching(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            m = self.model
            h = m.d(m.a(batch))
            for block in m.blocks:
                h = block(h)
            return m.c(m.b(h)) * m.scale

    found = outside(split_stages(Reaching(), 2))
    assert {name: found[f"model.{name}"] for name in "abcd"} == {"a": [0], "b": [1], "c": [1], "d": [0]}
    assert found["model.scale"] == [1]


class Silent(nn.Module):
    """Code that says nothing: the order of registration does, and an embedding comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.free = nn.Linear(DIM, DIM), nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM)) for _ in range(4))
        self.embed, self.end = nn.Embedding(4, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        parts = dict(self.named_children())
        for name in ("embed", "start", "blocks", "end"):
            x = self.apply_part(parts, name, x)
        return x

    def apply_part(self, parts: dict[str, Any], name: str, x: Tensor) -> Tensor:
        return parts[name](x) if name != "blocks" else x


def test_without_code_the_order_of_registration_decides() -> None:
    assert outside(split_stages(Silent(), 2)) == {"start": [0], "free": [0], "embed": [0], "end": [1]}


def test_an_embedding_used_after_the_blocks_is_head() -> None:
    class Late(Silent):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.embed(x.argmax(-1))

    assert outside(split_stages(Late(), 2))["embed"] == [1]


class Ensemble(nn.Sequential):
    """A Sequential around the trunk runs its children in order."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(16, DIM), nn.Linear(DIM, DIM), EncoderTrunk(), nn.LayerNorm(DIM))


class EncoderTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GPTBlock(DIM, 2, 0.0) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_sequential_around_the_trunk() -> None:
    split = split_stages(Ensemble(), 2)
    check_blocks(split, "2.layers", [2, 2])
    assert outside(split) == {"0": [0], "1": [0], "3": [1]}


def test_the_nearest_role_counts() -> None:
    module = Lit()
    plan = {"encoder": "head", "encoder.2": "stem", "model": "stem", "model.c": "vocab_out", "model.d": "vocab_in"}
    found = outside(split_stages(module, 2, roles=roles_of(module, plan)))
    assert found["encoder.0"] == [1] and found["encoder.2"] == [0]
    assert found["model.c"] == [1] and found["model.d"] == found["model.b"] == [0]
