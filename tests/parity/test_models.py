"""Models of many kinds train on tensor parallel meshes as on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.parity.test_randomness import set_up
from tests.support.failures import RankError
from tests.support.models import NANOGPT_PLAN, Classifier, EncoderLM, HandLlama, HuggingFaceLM, NanoGPT, llama_plan
from tests.support.packed import ENCODER_PLAN, FORMS, Packed, packed_plan
from tests.support.parity import Tolerance, assert_same_training
from tests.support.pool import WorkerPool

TP = ("TensorParallel", {})
FSDP_TP = ("HybridParallel", {"fsdp": 2, "tp": 2})
# Rounding of deep normalisations, in the models' own float32.
ROUNDING = Tolerance(gradient=2e-6)


def check(pool: WorkerPool, model: Any, strategy: Any, *, world: int = 2, steps: int = 2, **options: Any) -> Any:
    return assert_same_training(pool, model, strategy, world=world, steps=steps, tolerance=ROUNDING, **options)


PUBLISHED = ["Qwen3", "Gemma2", "GPTNeoX", "Olmo2", "Phi3", "Mistral", "Cohere", "Starcoder2", "Phi"]


@pytest.mark.parametrize("arch", PUBLISHED)
def test_hugging_face_models(pool: WorkerPool, arch: str) -> None:
    check(pool, HuggingFaceLM, TP, model_kwargs={"arch": arch})


@pytest.mark.parametrize(("arch", "tied"), [("Qwen3", True), ("Gemma2", False), ("GPTNeoX", True), ("Phi3", False)])
def test_hugging_face_models_in_shards(pool: WorkerPool, arch: str, tied: bool) -> None:
    model_kwargs = {"arch": arch, "tie_word_embeddings": tied}
    check(pool, HuggingFaceLM, FSDP_TP, world=4, steps=2, model_kwargs=model_kwargs)


def test_hugging_face_biases(pool: WorkerPool) -> None:
    model_kwargs = {"arch": "Llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    check(pool, HuggingFaceLM, FSDP_TP, world=4, model_kwargs=model_kwargs)


@pytest.mark.parametrize("arch", ["StableLm", "GPT2", "OPT"])
def test_models_without_a_published_plan_say_so(pool: WorkerPool, arch: str) -> None:
    with pytest.raises(RankError, match=r"PlanError: tp=2 needs to know .* HuggingFaceLM.* Pass plan="):
        check(pool, HuggingFaceLM, TP, model_kwargs={"arch": arch})


def test_experts_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(RankError, match=r"PlanError: MixtralForCausalLM publishes the style 'packed_colwise'"):
        check(pool, HuggingFaceLM, TP, model_kwargs={"arch": "Mixtral"})


@pytest.mark.parametrize("form", FORMS)
def test_packed_projections_taken_apart(pool: WorkerPool, form: str) -> None:
    check(pool, Packed, TP, plan=packed_plan(), model_kwargs={"form": form})


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("enable_gqa", [True, False], ids=["gqa", "repeated"])
def test_packed_by_ratio(pool: WorkerPool, world: int, kv_heads: int, enable_gqa: bool) -> None:
    """With fewer key/value heads than ranks, too."""
    model_kwargs = {"kv_heads": kv_heads, "enable_gqa": enable_gqa, "form": "split" if enable_gqa else "slices"}
    check(pool, Packed, TP, world=world, plan=packed_plan(kv_heads=kv_heads), model_kwargs=model_kwargs)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", ["parallel", "scaled", "auxiliary", "keywords", "mixing", "unused"])
def test_blocks(pool: WorkerPool, kind: str, sequence_parallel: bool) -> None:
    strategy = ("TensorParallel", {"sequence_parallel": sequence_parallel})
    # In float64: the gradient of a scalar is one long sum, and all rounding in float32.
    check(pool, Packed, strategy, plan=packed_plan(), model_kwargs={"kind": kind}, precision="64-true")


@pytest.mark.parametrize("kind", ["scaled", "unused"])
def test_blocks_in_shards(pool: WorkerPool, kind: str) -> None:
    check(pool, Packed, FSDP_TP, world=4, plan=packed_plan(), model_kwargs={"kind": kind, "tied": True})


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_value_heads_than_ranks_in_the_global_view(pool: WorkerPool, kv_heads: int) -> None:
    roles = llama_plan(kv_heads=kv_heads)
    del roles["model.layers.*.attention"]
    check(pool, HandLlama, TP, world=4, plan=roles, model_kwargs={"kv_heads": kv_heads})


def test_hugging_face_with_one_key_value_head(pool: WorkerPool) -> None:
    check(pool, HuggingFaceLM, TP, model_kwargs={"arch": "Llama", "kv_heads": 1})


@pytest.mark.parametrize("mesh", [TP, FSDP_TP], ids=["tp", "fsdp-tp"])
def test_torch_encoder(pool: WorkerPool, mesh: Any) -> None:
    world = 2 if mesh == TP else 4
    check(pool, EncoderLM, mesh, world=world, plan=ENCODER_PLAN)


def evaluate_encoder(sizes: dict[str, int]) -> float:
    """How far logits in evaluation are from those of the plain module."""
    torch.manual_seed(0)
    module, tokens = EncoderLM().eval(), torch.arange(64).view(4, 16)
    with torch.no_grad():
        expected = module.logits(tokens)
        step = set_up(module, sizes, ENCODER_PLAN)
        seen = step.run("training", lambda: module.logits(tokens), (), {}, keep_gathered=False)
    return float((seen - expected).abs().max())


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_torch_encoder_in_evaluation(pool: WorkerPool, sizes: dict[str, int]) -> None:
    """torch's fused layer, which it takes in evaluation only, reads weights past their modules."""
    assert torch.backends.mha.get_fastpath_enabled()
    assert max(pool.run(evaluate_encoder, sizes, world=2 * len(sizes))) < 1e-6


@pytest.mark.parametrize("split", [(0, 2), (2, 4)])
def test_a_model_without_blocks(pool: WorkerPool, split: tuple[int, int]) -> None:
    """Two-dimensional inputs: nothing to shard along a sequence."""
    roles = {f"model.{index}": "replicate" for index in (0, 2, 4)}
    roles |= {f"model.{split[0]}": "colwise", f"model.{split[1]}": "rowwise"}
    check(pool, Classifier, TP, plan=roles)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [(("DataParallel", {}), 2), (("FullyShardedDataParallel", {}), 2), (TP, 2), (FSDP_TP, 4)],
    ids=["ddp", "fsdp", "tp", "fsdp-tp"],
)
@pytest.mark.parametrize("options", [{"kind": "unused"}, {"frozen": "mlp"}, {"frozen": "weight"}], ids=str)
def test_unused_and_frozen_weights(pool: WorkerPool, strategy: Any, world: int, options: dict[str, str]) -> None:
    roles = packed_plan() if strategy[0] in ("TensorParallel", "HybridParallel") else None
    parity = check(pool, Packed, strategy, world=world, plan=roles, model_kwargs={**options, "tied": True})
    still = options.get("frozen", "spare")
    names = [name for name in parity.reference.initial if still in name]
    assert names
    for name in names:
        if still != "spare":
            assert all(np.array_equal(rank.initial[name], rank.final[name]) for rank in parity.ranks), name


@pytest.mark.parametrize("mesh", [{"ddp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}, {"tp": 4}], ids=str)
def test_norms_agree_over_tp_after_five_steps(pool: WorkerPool, mesh: dict[str, int]) -> None:
    sizes = {"fsdp": 1, **mesh}
    parity = check(pool, Packed, ("HybridParallel", sizes), world=4, steps=5, plan=packed_plan())
    norms = [name for name in parity.reference.gradients[-1] if "norm" in name]
    assert len(norms) == 10
    for name in norms:
        first, *others = (rank.gradients[-1][name] for rank in parity.ranks)
        assert all(np.array_equal(first, other) for other in others), name
        assert np.abs(first).max() > 0


def test_a_wrong_published_plan_is_noticed(pool: WorkerPool) -> None:
    """The proof that these tests can fail: rows of a sum cut as if they were columns."""
    with pytest.raises((RankError, AssertionError)):
        check(pool, WronglyPublished, TP)


class WronglyPublished(HuggingFaceLM):
    def __init__(self, **options: Any) -> None:
        super().__init__("Llama", **options)
        wrong = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise"}  # and no down_proj
        for model in (self.model.model, self.model):
            prefix = "model." if model is self.model else ""
            model._tp_plan = {prefix + name: style for name, style in wrong.items()}


def test_a_residual_in_a_local_region_is_refused(pool: WorkerPool) -> None:
    roles = {"model.1": "local", "model.1.up": "colwise", "model.1.down": "rowwise", "model.0": "replicate"}
    with pytest.raises(RankError, match=r"PlanError: A module with the role local adds its input"):
        check(pool, Residual, TP, plan={**roles, "model.2": "replicate"})
    del roles["model.1"]
    check(pool, Residual, TP, plan={**roles, "model.2": "replicate"})


class ResidualMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Residual(Classifier):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model = nn.Sequential(nn.Linear(16, 16), ResidualMLP(), nn.Linear(16, self.classes))


def test_positions_come_from_the_whole_sequence(pool: WorkerPool) -> None:
    """`arange(t)` with `idx.size()`: no shard may start at position 0 again."""
    parity = check(pool, NanoGPT, FSDP_TP, world=4, plan=NANOGPT_PLAN, seq=12)
    gradient = torch.from_numpy(parity.ranks[-1].gradients[0]["model.wpe.weight"])
    assert (gradient.abs().sum(1) > 0).tolist() == [True] * 12 + [False] * 52
