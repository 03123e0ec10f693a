"""Globs, roles, where a plan is found, and which layers are the repeated ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel import ParallelConfigError, ParallelPlan, PlanError
from lightning_parallel.huggingface import published_plan
from lightning_parallel.plan import ROLES, Role, find_plan, matches, repeated_blocks
from tests.support.models import (
    LLAMA_PLAN,
    NANOGPT_PLAN,
    Classifier,
    EncoderLM,
    HandLlama,
    HuggingFaceLM,
    NanoGPT,
)


@pytest.mark.parametrize(
    ("name", "glob", "expected"),
    [
        ("model.h.0.attn", "model.h.*.attn", True),
        ("model.h.10.attn", "model.h.*.attn", True),
        ("model.h.0", "model.h.*", True),
        ("model.h.0.attn", "model.h.*", False),  # one star, one part
        ("model.h", "model.h.*", False),
        ("model.h.0.attn.q_proj", "model.h.*.attn.*_proj", True),
        ("model.h.0.attn.q_norm", "model.h.*.attn.*_proj", False),
        ("model.h.0.attn.q_proj", "**.q_proj", True),
        ("q_proj", "**.q_proj", True),
        ("model", "model.**", True),
        ("model.h.0.attn", "model.**", True),
        ("models.h", "model.**", False),
        ("a.b.c.d", "a.**.d", True),
        ("a.d", "a.**.d", True),
        ("a.b.c", "a.**.d", False),
        ("a.b.c.b.d", "**.b.**.d", True),
        ("a.b", "**", True),
        ("layer.1", "layer.[12]", True),
        ("Layer.1", "layer.1", False),
        ("layerx1", "layer.1", False),  # a dot is a dot
    ],
)
def test_globs_match_part_by_part(name: str, glob: str, expected: bool) -> None:
    assert matches(name, glob) is expected


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("colwise", Role("colwise")),
        (" rowwise ", Role("rowwise")),
        ("colwise(heads=8)", Role("colwise", heads=8)),
        ("colwise( heads = 8 )", Role("colwise", heads=8)),
        ("fused(3)", Role("fused", (1, 1, 1))),
        ("fused(2)", Role("fused", (1, 1))),
        ("fused(4, 1, 1)", Role("fused", (4, 1, 1))),
        ("fused(4,1,1)", Role("fused", (4, 1, 1))),
        ("block()", Role("block")),
    ],
)
def test_roles_parse(text: str, role: Role) -> None:
    assert Role.parse(text) == role
    assert Role.parse(str(role)) == role


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colwize", "Unknown role 'colwize'. Did you mean 'colwise'?"),
        ("row_wise", "Did you mean 'rowwise'?"),
        ("vocab", "Did you mean 'vocab_"),
        ("experts!", "Roles: colwise, rowwise, fused"),
        ("colwise(8", "Unknown role"),
        ("", "Unknown role ''"),
        (None, "Unknown role None"),
        (3, "Unknown role 3"),
        (["colwise"], "Unknown role ['colwise']"),
        ("fused", "fused takes the number of equal parts, fused(3), or a ratio"),
        ("fused(1)", "fused takes the number of equal parts"),
        ("fused(0)", "fused takes the number of equal parts"),
        ("fused(4, 0, 1)", "fused takes the number of equal parts"),
        ("fused(a)", "fused takes the number of equal parts"),
        ("fused(²)", "fused takes the number of equal parts"),
        ("fused(3,)", "fused takes the number of equal parts"),
        ("colwise(heads=0)", "colwise takes nothing, or a number of heads, colwise(heads=8)"),
        ("colwise(8)", "colwise takes nothing, or a number of heads"),
        ("norm(2)", "norm takes no arguments"),
        ("rowwise(heads=2)", "rowwise takes no arguments"),
    ],
)
def test_roles_that_do_not_parse(text: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Role.parse(text)
    assert message in str(caught.value)


def test_every_role_without_arguments_parses() -> None:
    assert {Role.parse(name).name for name in ROLES if name != "fused"} == set(ROLES) - {"fused"}


def test_plan_errors_are_value_errors() -> None:
    assert issubclass(PlanError, ParallelConfigError)
    assert issubclass(ParallelConfigError, ValueError)


@pytest.mark.parametrize("roles", ["colwise", ["model.h.*"], None, 3])
def test_a_plan_is_a_mapping(roles: Any) -> None:
    with pytest.raises(PlanError, match="A plan maps globs of module names to roles, got"):
        ParallelPlan(roles)


def test_a_glob_is_text() -> None:
    with pytest.raises(PlanError, match="plan=: 0 is no glob"):
        ParallelPlan({0: "block"})  # type: ignore[dict-item]


# --- resolving --------------------------------------------------------------------------------------------------------


def test_resolve_gives_each_matched_module_its_role() -> None:
    with torch.device("meta"):
        module = NanoGPT(layers=3)
    roles = ParallelPlan(NANOGPT_PLAN).resolve(module)
    assert roles["model.h.2.attn.c_attn"] == Role("fused", (1, 1, 1))
    assert roles["model.wte"] == Role("vocab_in")
    assert sum(role.name == "block" for role in roles.values()) == 3
    assert "model.drop" not in roles
    assert len(roles) == 5 + 7 * 3 + 3 - 1  # embeddings, norm and head; eight a block, one of them the block


def test_the_same_role_twice_is_no_conflict() -> None:
    with torch.device("meta"):
        module = NanoGPT()
    roles = ParallelPlan({"model.h.*.ln_1": "norm", "**.ln_*": "norm"}).resolve(module)
    assert {role.name for role in roles.values()} == {"norm"}
    assert len(roles) == 5


@pytest.mark.parametrize(
    ("glob", "near"),
    [
        ("model.h.*.attn.c_atn", "model.h.*.attn.c_attn"),
        ("model.layers.*.mlp", "model.h.*.mlp"),
        ("h.*.attn.c_proj", "model.h.*.attn.c_proj"),
        ("lm_head", "model.lm_head"),
        ("0123", "Modules: model"),
    ],
)
def test_an_unmatched_glob_names_the_nearest_modules(glob: str, near: str) -> None:
    with torch.device("meta"):
        module = NanoGPT()
    with pytest.raises(PlanError) as caught:
        ParallelPlan({glob: "colwise"}).resolve(module)
    assert f"plan=: {glob!r} (colwise) matches no module." in str(caught.value)
    assert near in str(caught.value)


def test_conflicting_roles_name_both_globs() -> None:
    with torch.device("meta"):
        module = NanoGPT()
    with pytest.raises(PlanError) as caught:
        ParallelPlan({"model.h.*.mlp.*": "colwise", "**.c_proj": "rowwise"}).resolve(module)
    for shown in ("'model.h.0.mlp.c_proj' is colwise by 'model.h.*.mlp.*'", "rowwise by '**.c_proj'", "Narrow one"):
        assert shown in str(caught.value)


def test_one_role_with_other_arguments_is_a_conflict() -> None:
    with torch.device("meta"):
        module = HandLlama()
    with pytest.raises(PlanError, match=r"colwise\(heads=4\) by .* colwise\(heads=2\) by"):
        ParallelPlan({"**.wk": "colwise(heads=4)", "model.layers.0.**.wk": "colwise(heads=2)"}).resolve(module)


# --- where the plan is found ------------------------------------------------------------------------------------------


class Declaring(HuggingFaceLM):
    def parallel_plan(self) -> Any:
        return {"model.lm_head": "vocab_out"}


class DeclaringAPlan(HuggingFaceLM):
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan({"model.nothing": "vocab_out"})


def test_the_strategys_plan_comes_first_then_the_modules_then_the_published_one() -> None:
    explicit = {"model.model.norm": "norm"}
    with torch.device("meta"):
        declaring, plain, none = Declaring(), HuggingFaceLM(), NanoGPT()

    plan, source = find_plan(explicit, declaring, published=published_plan)
    assert plan is not None
    assert (plan.roles, source) == (explicit, "plan=")

    plan, source = find_plan(None, declaring, published=published_plan)
    assert plan is not None
    assert (dict(plan.roles), source) == ({"model.lm_head": "vocab_out"}, "Declaring.parallel_plan()")

    plan, source = find_plan(None, plain, published=published_plan)
    assert plan is not None
    assert plan.roles["model.model.layers.0.mlp.down_proj"] == "rowwise"
    assert source == "LlamaForCausalLM's published _tp_plan"

    assert find_plan(None, plain) == (None, "no plan")
    assert find_plan(None, none, published=published_plan) == (None, "no plan")


def test_errors_of_a_declared_plan_say_that_the_module_declared_it() -> None:
    with torch.device("meta"):
        module = DeclaringAPlan()
    plan, _ = find_plan(None, module)
    assert plan is not None
    with pytest.raises(
        PlanError, match=r"DeclaringAPlan\.parallel_plan\(\): 'model\.nothing' \(vocab_out\) matches no"
    ):
        plan.resolve(module)


# --- the repeated layers ----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)


class Stack(nn.Module):
    def __init__(self, kind: Any, count: int = 3) -> None:
        super().__init__()
        layers = [Layer() for _ in range(count)]
        self.layers = kind(layers) if kind is nn.ModuleList else kind(*layers)


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_blocks_are_a_list_of_equal_layers(kind: Any) -> None:
    assert repeated_blocks(Stack(kind), {}) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: NanoGPT(layers=2), ["model.h.0", "model.h.1"]),
        (lambda: HandLlama(layers=2), ["model.layers.0", "model.layers.1"]),
        (lambda: EncoderLM(layers=2), ["model.encoder.layers.0", "model.encoder.layers.1"]),
        (lambda: HuggingFaceLM("Llama"), ["model.model.layers.0", "model.model.layers.1"]),
        (lambda: HuggingFaceLM("GPT2"), ["model.transformer.h.0", "model.transformer.h.1"]),
        (Classifier, []),
        (lambda: NanoGPT(layers=1), []),  # one is not repeated
    ],
    ids=["nanogpt", "llama", "encoder", "hf-llama", "hf-gpt2", "classifier", "one-layer"],
)
def test_blocks_of_whole_models(build: Any, expected: list[str]) -> None:
    with torch.device("meta"):
        module = build()
    assert repeated_blocks(module, {}) == expected


def test_layers_of_two_kinds_are_no_blocks() -> None:
    mixed = nn.ModuleDict({"layers": nn.ModuleList([Layer(), nn.LayerNorm(8), Layer()])})
    assert repeated_blocks(mixed, {}) == []


def test_only_the_outermost_of_nested_lists() -> None:
    module = nn.ModuleDict({"stages": nn.ModuleList(Stack(nn.ModuleList) for _ in range(2))})
    assert repeated_blocks(module, {}) == ["stages.0", "stages.1"]


def test_two_lists_apart_are_both_blocks() -> None:
    module = nn.ModuleDict({"encoder": Stack(nn.ModuleList, 2), "decoder": Stack(nn.Sequential, 2)})
    assert repeated_blocks(module, {}) == [
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
    ]


def test_a_small_list_beside_a_big_one_is_no_block() -> None:
    module = nn.ModuleDict(
        {"big": nn.ModuleList(Layer(64) for _ in range(2)), "small": nn.ModuleList([Layer(2), Layer(2)])}
    )
    assert repeated_blocks(module, {}) == ["big.0", "big.1"]


def test_a_layer_used_twice_is_in_the_list_once() -> None:
    shared = Layer()
    module = nn.ModuleDict({"layers": nn.ModuleList([shared, shared, Layer()])})
    assert repeated_blocks(module, {}) == ["layers.0", "layers.2"]


def test_named_blocks_win_over_inferred_ones() -> None:
    with torch.device("meta"):
        module = EncoderLM(layers=2)
    roles = ParallelPlan({"model.encoder": "block"}).resolve(module)
    assert repeated_blocks(module, roles) == ["model.encoder"]


def test_plans_of_the_test_models_fit_them() -> None:
    with torch.device("meta"):
        assert repeated_blocks(HandLlama(), ParallelPlan(LLAMA_PLAN).resolve(HandLlama())) == [
            "model.layers.0",
            "model.layers.1",
        ]
