"""Which stage holds what in Hugging Face models: by what they publish, by their code, and as they really run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_parallel.huggingface import published_order
from lightning_parallel.schemes.pipeline import places
from lightning_parallel.schemes.pipeline.split import StageSplit, split_stages
from tests.support.stages import check_blocks, outside, record_run, roles_of

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_HEADS = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": _SIZES,
    "GPT2": {"vocab_size": 96, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "GPTNeoX": _HEADS,
    "OPT": {**_HEADS, "ffn_dim": 64, "word_embed_proj_dim": 16},  # projections in and out
    "Bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    "Phi": _SIZES,
    "Gemma2": {**_SIZES, "head_dim": 8},
    "Qwen3": {**_SIZES, "head_dim": 8},
    "Falcon": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    "StableLm": _SIZES,
    "Granite": _SIZES,
    "Mixtral": {**_SIZES, "num_local_experts": 2},
}
# Name of the blocks' list; names of what is on the first stage; on the last; on all.
_ROTARY = ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
_LLAMA = ("model.layers", ["model.embed_tokens"], ["model.norm", "lm_head"], _ROTARY)
_GPT2 = ("transformer.h", ["transformer.wte", "transformer.wpe"], ["transformer.ln_f", "lm_head"], [])
FAMILIES: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "Llama": _LLAMA,
    "GPT2": _GPT2,
    "GPTNeoX": (
        "gpt_neox.layers",
        ["gpt_neox.embed_in"],
        ["gpt_neox.final_layer_norm", "lm_head"],
        ["gpt_neox.rotary_emb.inv_freq", "gpt_neox.rotary_emb.original_inv_freq"],
    ),
    "OPT": (
        "model.decoder.layers",
        ["model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"],
        ["model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"],
        [],
    ),
    "Bloom": (
        "transformer.h",
        ["transformer.word_embeddings", "transformer.word_embeddings_layernorm"],
        ["transformer.ln_f", "lm_head"],
        [],
    ),
    "Phi": ("model.layers", ["model.embed_tokens"], ["model.final_layernorm", "lm_head"], _ROTARY),
    "Gemma2": (*_LLAMA[:3], [*_ROTARY, "model.embed_tokens.embed_scale"]),
    "Qwen3": _LLAMA,
    "Falcon": (
        "transformer.h",
        ["transformer.word_embeddings"],
        ["transformer.ln_f", "lm_head"],
        ["transformer.rotary_emb.inv_freq", "transformer.rotary_emb.original_inv_freq"],
    ),
    "StableLm": _LLAMA,
    "Granite": _LLAMA,
    "Mixtral": _LLAMA,
}


def build(arch: str, **options: Any) -> Any:
    import transformers

    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    try:
        config = getattr(transformers, f"{arch}Config")(**CONFIGS[arch], **tokens, use_cache=False, **options)
        return transformers.AutoModelForCausalLM.from_config(config).eval()
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        pytest.skip(f"this version of transformers does not build {arch}: {error}")


def check_family(arch: str, split: StageSplit, num_stages: int) -> None:
    blocks, first, last, everywhere = FAMILIES[arch]
    check_blocks(split, blocks, [4 // num_stages] * num_stages)
    expected = {name: [0] for name in first} | {name: [num_stages - 1] for name in last}
    assert outside(split) == expected | {name: list(range(num_stages)) for name in everywhere}


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("arch", FAMILIES)
def test_families(arch: str, num_stages: int) -> None:
    with torch.device("meta"):
        module = build(arch)
    check_family(arch, split_stages(module, num_stages), num_stages)


@pytest.mark.parametrize("arch", ["Llama", "GPTNeoX", "Phi", "Gemma2", "Qwen3", "Granite", "Mixtral"])
def test_what_is_published(arch: str) -> None:
    """For each model its own children only: the outer ones hold a merged plan that is in no order."""
    with torch.device("meta"):
        module = build(arch)
    names = {id(child): name for name, child in module.named_modules()}
    base = "gpt_neox" if arch == "GPTNeoX" else "model"
    blocks, first, last, _ = FAMILIES[arch]
    order = [names[id(child)] for child in published_order(module.get_submodule(base))]
    assert [name for name in order if "dropout" not in name] == [first[0], blocks, last[0]]
    assert [names[id(child)] for child in published_order(module)] == ["lm_head"]
    assert published_order(module.lm_head) == []


@pytest.mark.parametrize("arch", FAMILIES)
def test_families_by_their_code_alone(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "published_order", lambda model: [])
    with torch.device("meta"):
        module = build(arch)
    check_family(arch, split_stages(module, 2), 2)


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_ties_have_two_holders(arch: str, tied: bool) -> None:
    module = build(arch, tie_word_embeddings=tied)
    split = split_stages(module, 4)
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    assert (embedding is head) == tied
    holders = split.holders(module)
    assert holders[id(embedding)] == ({0, 3} if tied else {0})
    assert holders[id(head)] == ({0, 3} if tied else {3})


@pytest.mark.parametrize("arch", FAMILIES)
def test_families_run_as_split(arch: str) -> None:
    module = build(arch)
    split = split_stages(module, 2)
    before, among, after = record_run(module, split, lambda: module(torch.zeros(2, 4, dtype=torch.long)))
    stages = {site.module: stage for site, stage in split.sites.items() if not site.is_buffer}
    assert sorted(before) == sorted(FAMILIES[arch][1])
    assert sorted(after) == sorted(FAMILIES[arch][2])
    assert not among
    assert all(stages[name] == {0} for name in before) and all(stages[name] == {1} for name in after)


def test_head_of_a_base_model_found_by_its_prefix() -> None:
    """``getattr(self, self.base_model_prefix)`` in the code that all classifiers of transformers share."""
    import transformers

    with torch.device("meta"):
        module = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**_SIZES, pad_token_id=0))
    assert outside(split_stages(module, 2))["score"] == [1]


def test_an_encoder_counts_as_stem() -> None:
    import transformers

    config = transformers.T5Config(
        vocab_size=96, d_model=16, d_ff=32, d_kv=8, num_layers=2, num_decoder_layers=4, num_heads=2
    )
    with torch.device("meta"):
        module = transformers.T5ForConditionalGeneration(config)
    split = split_stages(module, 2)
    check_blocks(split, "decoder.block", [2, 2])
    found = outside(split)
    assert found.pop("decoder.final_layer_norm") == found.pop("lm_head") == [1]
    assert set(map(tuple, found.values())) == {(0,)} and any(name.startswith("encoder.block.1") for name in found)
    assert split.holders(module)[id(module.shared.weight)] == {0, 1}


def test_published_order_gives_way_to_roles() -> None:
    with torch.device("meta"):
        module = build("Llama")
    split = split_stages(module, 2, roles=roles_of(module, {"model.norm": "stem"}))
    assert outside(split)["model.norm"] == [0]
