"""Published Hugging Face plans read as roles, for tiny random models of several families."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import nn

from lightning_parallel import PlanError
from lightning_parallel.huggingface import published_plan, share_heads
from lightning_parallel.plan import Role
from tests.support.models import HuggingFaceLM

ATTENTION = {"q_proj": "colwise(heads=4)", "k_proj": "colwise(heads=2)", "v_proj": "colwise(heads=2)"}
GATED = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise", "mlp": "local"}
LLAMA = {
    **{f"self_attn.{name}": role for name, role in ATTENTION.items()},
    "self_attn.o_proj": "rowwise",
    "self_attn": "local",
    **GATED,
}
# A layer's roles, by architecture; what has global sizes in its code ("gather_output") must not become `local`.
LAYERS: dict[str, dict[str, str]] = {
    "Llama": LLAMA,
    "Gemma2": LLAMA,
    "Qwen3": {**LLAMA, "self_attn.q_norm": "norm", "self_attn.k_norm": "norm"},
    "Olmo2": {name: role for name, role in LLAMA.items() if name != "self_attn"},
    "Phi3": {
        "self_attn.qkv_proj": "colwise",
        "self_attn.o_proj": "rowwise",
        "mlp.gate_up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    },
    "GPTNeoX": {
        "attention.query_key_value": "colwise(heads=4)",
        "attention.dense": "rowwise",
        "attention": "local",
        "mlp.dense_h_to_4h": "colwise",
        "mlp.dense_4h_to_h": "rowwise",
        "mlp": "local",
    },
}


def build(arch: str, **options: Any) -> HuggingFaceLM:
    with torch.device("meta"):
        return HuggingFaceLM(arch, **options)


@pytest.mark.parametrize("arch", LAYERS)
def test_published_styles_become_roles(arch: str) -> None:
    module = build(arch)
    plan = published_plan(module)
    assert plan is not None
    assert plan.source == f"{arch}ForCausalLM's published _tp_plan"
    base = "model.gpt_neox" if arch == "GPTNeoX" else "model.model"
    embedding = f"{base}.{'embed_in' if arch == 'GPTNeoX' else 'embed_tokens'}"
    layers = {f"{base}.layers.{index}.{name}": role for index in range(2) for name, role in LAYERS[arch].items()}
    head = next(name for name, child in module.named_modules() if child is module.model.get_output_embeddings())
    assert dict(plan.roles) == {embedding: "vocab_in", head: "vocab_out", **layers}
    plan.resolve(module)  # every name is a module


@pytest.mark.parametrize(("arch", "style"), [("Mixtral", "packed_colwise"), ("Qwen3Moe", "packed_colwise")])
def test_a_style_that_cannot_keep_the_numbers_is_refused_by_name(arch: str, style: str) -> None:
    with pytest.raises(PlanError) as caught:
        published_plan(build(arch))
    for shown in (f"{arch}ForCausalLM publishes the style {style!r}", "experts", "Pass plan=", "tp=1"):
        assert shown in str(caught.value)


@pytest.mark.parametrize("arch", ["GPT2"])
def test_a_model_that_publishes_nothing(arch: str) -> None:
    assert published_plan(build(arch)) is None


def test_a_module_without_any_hugging_face_model() -> None:
    assert published_plan(nn.ModuleDict({"a": nn.Linear(2, 2)})) is None


class Two(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = HuggingFaceLM("Llama").model, HuggingFaceLM("Qwen3").model


def test_two_models_in_one_module() -> None:
    with torch.device("meta"):
        module = Two()
    plan = published_plan(module)
    assert plan is not None
    assert plan.roles["student.model.layers.0.mlp.down_proj"] == "rowwise"
    assert plan.roles["teacher.model.layers.1.self_attn.q_norm"] == "norm"


def test_query_and_key_heads_come_from_the_configuration() -> None:
    plan = published_plan(build("Llama", heads=8, kv_heads=1))
    assert plan is not None
    assert plan.parsed["model.model.layers.0.self_attn.q_proj"] == Role("colwise", heads=8)
    assert plan.parsed["model.model.layers.0.self_attn.v_proj"] == Role("colwise", heads=1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "groups"),
    [(8, 2, 2, 4), (8, 2, 4, 2), (8, 1, 4, 2), (8, 1, 8, 1), (8, 8, 4, 1), (4, 2, 1, 2)],
)
def test_ranks_that_share_a_head_serve_fewer_queries(heads: int, kv_heads: int, tp: int, groups: int) -> None:
    """8 query heads, 2 key/value heads over 4 ranks: each rank has 2 queries and one (shared) head, so 2 a head."""
    attention: Any = nn.Module()
    attention.num_key_value_groups = heads // kv_heads
    attention.q_proj, attention.k_proj = nn.Linear(2, 2), nn.Linear(2, 2)
    module = nn.ModuleDict({"attn": attention})
    roles = {"attn.q_proj": Role("colwise", heads=heads), "attn.k_proj": Role("colwise", heads=kv_heads)}
    share_heads(module, roles, tp)
    assert attention.num_key_value_groups == groups


def test_an_attention_without_roles_keeps_its_groups() -> None:
    attention: Any = nn.Module()
    attention.num_key_value_groups = 4
    share_heads(nn.ModuleDict({"attn": attention}), {}, 8)
    assert attention.num_key_value_groups == 4


def test_recognised_by_what_it_carries_not_by_its_class() -> None:
    class Foreign(nn.Module):
        config = SimpleNamespace()
        _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012 - as Hugging Face declares it

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def get_input_embeddings(self) -> None: ...

        def get_output_embeddings(self) -> None: ...

    plan = published_plan(nn.ModuleDict({"model": Foreign()}))
    assert plan is not None
    assert dict(plan.roles) == {"model.up": "colwise", "model.down": "rowwise"}
