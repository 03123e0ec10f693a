"""Modules built on the meta device get their values: each from its own initialiser, nothing left out, ties kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import ParallelConfigError
from lightning_parallel.materialize import Materializer, describe
from tests.support.models import HuggingFaceLM

HOST = torch.device("cpu")


class Rotary(nn.Module):
    """A table that no checkpoint holds, and that follows from a formula."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("table", torch.empty(dim), persistent=False)
        self.register_buffer("positions", torch.empty(4, dtype=torch.long), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(10_000.0 ** (-torch.arange(self.dim) / self.dim))
        self.positions.copy_(torch.arange(4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(10, 8), Rotary()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))
        self.head = nn.Linear(8, 10)
        self.head.weight = self.embed.weight


def materialize(module: Any, *, seed: int = 3, parts: bool = True) -> Any:
    materializer = Materializer(module, HOST, seed)
    for part in [*(module.layers if parts else []), module]:
        materializer.bring(part)
    return module


def on_meta(build: Any = Tied) -> Any:
    with torch.device("meta"):
        return build()


def values(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_the_same_weights_whatever_the_seed_of_the_process_and_the_order_of_units() -> None:
    torch.manual_seed(1)
    one = materialize(on_meta())
    torch.manual_seed(2)
    other = materialize(on_meta(), parts=False)
    assert not any(tensor.is_meta for tensor in values(one).values())
    assert_equal(values(one), values(other))


def test_another_seed_gives_other_weights_and_so_does_another_name() -> None:
    one, other = materialize(on_meta()), materialize(on_meta(), seed=4)
    assert not torch.equal(one.embed.weight, other.embed.weight)
    assert not torch.equal(one.layers[0][0].weight, one.layers[1][0].weight)


def test_random_numbers_of_the_process_go_on_as_if_nothing_was_drawn() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    materialize(on_meta())
    assert torch.equal(torch.rand(3), expected)


def test_each_module_is_initialised_as_it_would_initialise_itself() -> None:
    module = materialize(on_meta())
    assert torch.equal(module.layers[0][1].weight, torch.ones(8))
    bound = 8**-0.5
    assert 0.5 * bound < module.layers[0][0].weight.abs().max() <= bound
    assert 0.7 < module.embed.weight.std() < 1.3


def test_ties_are_kept_and_counted_once() -> None:
    module = materialize(on_meta())
    assert module.head.weight is module.embed.weight
    assert len(list(module.parameters())) == len(list(on_meta().parameters())) == 1 + 4 * 2 + 1


def test_non_persistent_buffers_follow_their_formula() -> None:
    module = materialize(on_meta())
    assert_equal(dict(module.rotary.named_buffers()), dict(Rotary().named_buffers()))
    assert "rotary.table" not in module.state_dict()


def test_what_has_values_keeps_them() -> None:
    """A loaded backbone under a head that is still on meta: one of a module's own tensors may be real, too."""
    module = Tied()
    with torch.device("meta"):
        module.layers[1] = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    module.head.bias = nn.Parameter(torch.empty(10, device="meta"))
    before = {name: tensor.detach().clone() for name, tensor in values(module).items() if not tensor.is_meta}
    materialize(module)
    assert not any(tensor.is_meta for tensor in values(module).values())
    assert_equal(before, {name: tensor for name, tensor in values(module).items() if name in before})
    assert module.head.weight is module.embed.weight


def test_frozen_stays_frozen() -> None:
    module = on_meta()
    module.embed.weight.requires_grad_(False)
    assert [p.requires_grad for p in materialize(module).parameters()].count(False) == 1


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)


class Forgetful(Bare):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class ForgetsIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(3))

    def reset_parameters(self) -> None:
        pass


class Holder(nn.Module):
    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        self.layers, self.inner = nn.ModuleList([nn.Linear(2, 2)]), inner()


def test_a_module_that_cannot_initialise_itself_is_refused_before_anything_changes() -> None:
    module = on_meta(lambda: Holder(Bare))
    with pytest.raises(ParallelConfigError) as caught:
        materialize(module)
    for shown in ("inner (Bare): scale, mask", "Define reset_parameters()", "build the module off the meta device"):
        assert shown in str(caught.value)
    assert all(tensor.is_meta for tensor in values(module).values())


@pytest.mark.parametrize(("inner", "left"), [(Forgetful, "mask"), (ForgetsIntegers, "ids")])
def test_an_initialiser_that_leaves_something_out_is_refused(inner: type[nn.Module], left: str) -> None:
    with pytest.raises(ParallelConfigError, match=rf"its initialiser leaves out inner \({inner.__name__}\): {left}"):
        materialize(on_meta(lambda: Holder(inner)))


def test_a_root_that_owns_parameters_is_named() -> None:
    with pytest.raises(ParallelConfigError, match=r"the module itself \(Bare\): scale, mask"):
        materialize(on_meta(Bare), parts=False)


@pytest.mark.parametrize("arch", ["Llama", "Gemma2", "GPTNeoX", "Qwen3", "Olmo2", "Phi3", "GPT2"])
def test_hugging_face_models(arch: str) -> None:
    """All of their values are those that the model gives itself, rotary tables among them."""
    torch.manual_seed(0)
    built = HuggingFaceLM(arch)
    module = materialize(on_meta(lambda: HuggingFaceLM(arch)), parts=False)
    assert_equal(dict(built.named_buffers()), dict(module.named_buffers()))
    theirs, ours = dict(built.named_parameters()), dict(module.named_parameters())
    assert theirs.keys() == ours.keys()  # tied where theirs are
    for name in ours:
        parameter, other = ours[name].detach(), theirs[name].detach()
        # The same distribution: constants are equal, and the spread of what is drawn is alike.
        assert float(parameter.std()) == pytest.approx(float(other.std()), rel=0.25, abs=1e-8), name
        assert float(parameter.mean()) == pytest.approx(float(other.mean()), abs=0.01), name


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)


def test_an_initialiser_that_changes_what_lies_below_comes_last() -> None:
    module = materialize(on_meta(Attention), parts=False)
    assert torch.equal(module.attention.out_proj.bias, torch.zeros(8))  # nn.Linear alone would draw it
    assert module.attention.out_proj.weight.std() > 0


def test_it_leaves_what_is_real_below_alone() -> None:
    module = Attention()
    module.attention.out_proj.bias.data.fill_(5)
    module.attention.in_proj_weight = nn.Parameter(torch.empty(24, 8, device="meta"))
    materialize(module, parts=False)
    assert torch.equal(module.attention.out_proj.bias, torch.full((8,), 5.0))
    assert module.attention.in_proj_weight.std() > 0


def test_describe_says_what_ranks_must_agree_on() -> None:
    module = on_meta()
    module.layers[0][1].bias.requires_grad_(False)
    lines = describe(module)
    assert "embed.weight (10, 8) torch.float32 on meta" in lines
    assert "head.weight (10, 8) torch.float32 on meta tied to embed.weight" in lines
    assert "layers.0.1.bias (8,) torch.float32 on meta frozen" in lines
    assert "rotary.positions (4,) torch.int64 on meta" in lines
