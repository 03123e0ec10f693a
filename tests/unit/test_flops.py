"""Counted FLOPs equal what is written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.flops.counting import Counted, FlopCounter, count_step, fake_copy, follow, plain_name
from lightning_parallel.flops.formulas import (
    TransformerSizes,
    matmul_flops_per_token,
    palm_flops_per_token,
    transformer_sizes,
)
from lightning_parallel.flops.operations import Causal, grouped_flops, visible_pairs
from tests.support.models import HandLlama, HuggingFaceLM, NanoGPT

B, T, D = 2, 8, 16
HOST = torch.get_default_device()


def count(
    module: nn.Module, *inputs: Tensor, causal: Causal = "half", step: Callable[[Any, Any], Any] | None = None
) -> Counted:
    fake = fake_copy(module, HOST)

    def run(batch: Any) -> Any:
        if step is not None:
            return step(fake, batch)
        output = fake(*batch)
        return output.sum() if isinstance(output, Tensor) else output.logits.sum()

    return count_step(fake, run, inputs, causal=causal)


def features() -> Tensor:
    return torch.zeros(B, T, D)


def ids() -> Tensor:
    return torch.zeros(B, T, dtype=torch.long)


# --- matrices


def test_six_four_two() -> None:
    # Below, in the middle, and above the first trained layer.
    layers = nn.Sequential(*[nn.Linear(D, D) for _ in range(3)])
    one = 2 * B * T * D * D
    assert count(layers, features()).model == 3 * 3 * one - one  # nothing wants the gradient of the input
    layers[0].requires_grad_(False)
    assert count(layers, features()).model == one + 2 * 3 * one - one
    layers.requires_grad_(True)[2].requires_grad_(False)
    assert count(layers, features()).model == 2 * one + 3 * one + 2 * one
    layers.requires_grad_(False)
    assert count(layers, features()).model == 3 * one


class Adapted(nn.Module):
    """LoRA of rank 2 around a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(D, D, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def test_adapters() -> None:
    # VeOmni: 4 for what is frozen above something trained, 6 for the adapters.
    found = count(nn.Sequential(Adapted(), Adapted()), features())
    tokens, frozen, adapter = B * T, D * D, 4 * D
    first = 2 * frozen + 6 * adapter - 2 * (D * 2)  # no gradient of the input
    assert found.model == tokens * (first + 4 * frozen + 6 * adapter)


def test_embeddings_look_up_and_tied_heads_multiply() -> None:
    tied, untied = NanoGPT(tied=True), NanoGPT(tied=False)
    assert count(tied.model, ids()).model == count(untied.model, ids()).model
    matrices = sum(p.numel() for p in untied.model.parameters() if p.ndim > 1)
    tables = untied.model.wte.weight.numel() + untied.model.wpe.weight.numel()
    assert count(tied.model, ids()).dense == 6 * (matrices - tables) * B * T


def test_convolutions() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    forward = 2 * B * 4 * 3 * 9 * 8 * 8
    found = count(conv, torch.zeros(B, 3, 8, 8))
    assert found.model == 2 * forward  # the input is data
    assert found.attention == found.recomputed == 0


def test_batch_scales() -> None:
    layers = nn.Linear(D, D)
    assert count(layers, torch.zeros(6, T, D)).model == 3 * count(layers, features()).model


# --- attention


class Attention(nn.Module):
    def __init__(self, *, causal: bool = True, masked: bool = False, kv_heads: int = 2) -> None:
        super().__init__()
        self.causal, self.masked, self.kv_heads = causal, masked, kv_heads

    def forward(self, q: Tensor) -> Tensor:
        q = q.unflatten(-1, (2, D // 2)).transpose(1, 2)
        kv = q[:, : self.kv_heads]
        mask = torch.ones(T, T, dtype=torch.bool).tril() if self.masked else None
        return F.scaled_dot_product_attention(
            q, kv, kv, attn_mask=mask, is_causal=self.causal and not self.masked, enable_gqa=True
        )


def attended(module: nn.Module, causal: Causal) -> Counted:
    return count(module, features().requires_grad_(), causal=causal, step=lambda m, b: m(b[0].requires_grad_()).sum())


FULL = 4 * B * T * T * D  # of the forward


def test_fused_attention_in_full_and_the_causal_half() -> None:
    full, half = attended(Attention(), "full"), attended(Attention(), "half")
    assert (full.dense, full.attention) == (0, 3 * FULL)
    assert half.attention == 3 * FULL / 2
    # The kernel's backward computes the scores once more: in HFU, not in MFU.
    assert full.recomputed == FULL / 2
    assert half.hardware == half.model + FULL / 4


def test_bidirectional_attention_has_no_half() -> None:
    assert attended(Attention(causal=False), "half").attention == 3 * FULL


def test_grouped_queries_count_by_their_queries() -> None:
    assert attended(Attention(kv_heads=1), "full").attention == 3 * FULL


def test_a_mask_alone_does_not_say_that_it_is_causal() -> None:
    assert attended(Attention(masked=True), "half").attention == 3 * FULL
    told = Attention(masked=True)
    told.is_causal = True  # type: ignore[assignment]  # as Hugging Face's layers say it
    assert attended(told, "half").attention == 3 * FULL / 2


def test_sliding_windows() -> None:
    # torchtitan#4300
    windowed = Attention(masked=True)
    windowed.is_causal, windowed.sliding_window = True, 3  # type: ignore[assignment]
    pairs = sum(min(i + 1, 3) for i in range(T))
    assert attended(windowed, "half").attention == 3 * FULL * pairs / T**2
    assert attended(windowed, "full").attention == 3 * FULL * 3 / T
    assert visible_pairs(T, T, causal=True, window=T, convention="half") == T * T / 2


def test_windows_alternate_with_full_attention() -> None:
    options = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
    model = HuggingFaceLM("Gemma3Text", attn_implementation="sdpa", **options).model
    found = count(model, ids()).attention
    layer = 3 * 4 * B * T * T * 32
    pairs = sum(min(i + 1, 4) for i in range(T))
    assert found == pytest.approx(layer / 2 + layer * pairs / T**2)


@pytest.mark.parametrize("arch", ["Llama", "Qwen3", "GPT2", "Mistral"])
def test_hugging_face_models(arch: str) -> None:
    found = count(HuggingFaceLM(arch, attn_implementation="sdpa").model, ids(), causal="full")
    assert found.attention == 2 * 12 * 4 * 8 * T * B * T  # 12·L·H·Q·T a token


def test_palm_and_counting_agree() -> None:
    model = HuggingFaceLM("Llama", tie_word_embeddings=True).model
    sizes = transformer_sizes(model)
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    for causal, convention in ((False, "full"), (True, "half")):
        by_formula = palm_flops_per_token(sizes, T, causal=causal) - 6 * norms
        # PaLM's N has a tied matrix once, as the head; the products of rotary tables are what it leaves out.
        assert count(model, ids(), causal=convention).model == pytest.approx(by_formula * B * T, rel=2e-3)


def test_llama_8b_by_formula() -> None:
    # Of the reference: 474.4 TFLOP for 8192 tokens, the input embedding left out.
    parameters = 8_030_261_248 - 128_256 * 4096
    sizes = TransformerSizes(parameters=parameters, layers=32, heads=32, head_dim=128)
    assert palm_flops_per_token(sizes, 8192) * 8192 / 1e12 == pytest.approx(474.4, abs=0.1)


def test_sizes_need_a_config() -> None:
    with pytest.raises(ParallelConfigError, match="num_hidden_layers"):
        transformer_sizes(nn.Linear(2, 2))


def test_parameters_by_six_four_two() -> None:
    layers = nn.Sequential(nn.Embedding(5, D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D))
    assert matmul_flops_per_token(layers) == 18 * D * D
    layers[2].requires_grad_(False)
    assert matmul_flops_per_token(layers) == 16 * D * D
    layers[:2].requires_grad_(False)
    assert matmul_flops_per_token(layers) == (2 + 2 + 6) * D * D
    assert matmul_flops_per_token(NanoGPT(tied=True)) == matmul_flops_per_token(NanoGPT(tied=False))


# --- mixtures


def test_only_active_experts_count() -> None:
    rows, experts = 64, 8
    assert grouped_flops({"self": torch.empty(rows, D), "mat2": torch.empty(experts, D, 3)}) == 2 * rows * D * 3
    assert grouped_flops({"self": torch.empty(D, rows), "mat2": torch.empty(rows, 3)}) == 2 * rows * D * 3
    both = {"self": torch.empty(experts, 5, D), "mat2": torch.empty(experts, D, 3)}
    assert grouped_flops(both) == 2 * experts * 5 * D * 3


class Routed(nn.Module):
    """Sends each token to one of four experts, which only a real run can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        chosen = torch.arange(len(x)) % 2  # never two of them
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            out = out.index_add(0, rows, self.experts[number](x[rows]))
        return out


def test_a_real_step_counts_the_experts_that_ran() -> None:
    module, counter = Routed(), FlopCounter("half")
    with counter.counting(module):
        module(features()).sum().backward()
    assert counter.result().model == 2 * 2 * B * T * D * D


@pytest.mark.parametrize("arch", ["Mixtral", "Qwen3Moe"])
def test_mixtures_of_hugging_face(arch: str) -> None:
    sizes = {"num_local_experts": 8} if arch == "Mixtral" else {"num_experts": 8, "moe_intermediate_size": 32}
    options: dict[str, Any] = {"num_experts_per_tok": 2, **sizes}
    model = HuggingFaceLM(arch, experts_implementation="grouped_mm", **options).model
    found = count(model, ids())
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    others = [p for name, p in model.named_parameters() if "experts" not in name and "embed" not in name and p.ndim > 1]
    active = sum(p.numel() for p in experts) * 2 / 8
    assert found.dense == pytest.approx(6 * B * T * (active + sum(p.numel() for p in others)), rel=5e-3)
    assert found.dtype == torch.float32
    one_by_one, counter = HuggingFaceLM(arch, experts_implementation="eager", **options).model, FlopCounter("half")
    with counter.counting(one_by_one):
        one_by_one(torch.randint(0, 96, (B, T))).logits.sum().backward()
    assert counter.result().dense == found.dense


def test_kernels_without_a_formula_are_named() -> None:
    with torch.library._scoped_library("lp_test", "FRAGMENT") as library:
        library.define("kernel(Tensor x) -> Tensor")
        library.impl("kernel", lambda x: x.clone(), "CompositeExplicitAutograd")
        counter = FlopCounter("half")
        with counter.counting(nn.Linear(D, D)):
            torch.ops.lp_test.kernel(features())
    assert counter.result().unknown == ("lp_test.kernel",)


# --- recomputation


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.how == "none":
                x = layer(x)
            elif self.how == "selective":
                save = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

                def contexts(save: Any = save) -> Any:
                    return create_selective_checkpoint_contexts(
                        lambda ctx, op, *a, **k: (
                            CheckpointPolicy.MUST_SAVE if op in save else CheckpointPolicy.PREFER_RECOMPUTE
                        )
                    )

                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            else:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
        return x


@pytest.mark.parametrize(
    ("how", "products"),
    [
        ("none", 0),
        ("reentrant", 4),  # all that is in the layers, once more
        ("non-reentrant", 2),  # stops where all that backward needs is there: before the second product of a layer
        ("selective", 0),
    ],
)
def test_recomputation_is_what_was_really_recomputed(how: str, products: int) -> None:
    step = lambda m, b: m(b[0].requires_grad_()).sum()  # noqa: E731
    plain, found = count(Checkpointed("none"), features(), step=step), count(Checkpointed(how), features(), step=step)
    assert found.model == plain.model
    assert found.recomputed == products * 2 * B * T * D * D
    # And the same where real tensors run.
    module, counter = Checkpointed(how), FlopCounter("half")
    with counter.counting(module):
        module(features().requires_grad_()).sum().backward()
    assert counter.result() == found


def test_wrappers_that_a_strategy_puts_on_later_are_followed() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = Checkpointed("none")
    fake = fake_copy(module, HOST)
    module.layers[1] = checkpoint_wrapper(module.layers[1])
    follow(fake, module, set())
    found = count_step(fake, lambda batch: fake(batch[0].requires_grad_()).sum(), (features(),))
    assert found.recomputed == 2 * B * T * D * D
    assert plain_name("model._fsdp_wrapped_module.h.0._checkpoint_wrapped_module.mlp") == "model.h.0.mlp"


# --- how it is run


def test_no_storage_is_needed() -> None:
    with torch.device("meta"):
        module = HandLlama(dim=4096, heads=32, kv_heads=8, layers=2, vocab=1000).model
    found = count(module, ids())
    assert found.model > 1e10
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_autocasts(dtype: torch.dtype) -> None:
    def step(module: Any, batch: Any) -> Tensor:
        with torch.autocast(HOST.type, dtype):
            return module(batch[0]).float().sum()

    model = NanoGPT().model
    assert count(model, ids(), step=step).dtype == dtype
    assert count(model, ids()).dtype == torch.float32
    assert count(model, ids(), step=step).model == count(model, ids()).model


def test_a_copy_follows_what_is_frozen() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    fake = fake_copy(module, HOST)
    module[0].requires_grad_(False)
    follow(fake, module, set())
    found = count_step(fake, lambda batch: fake(batch[0]).sum(), (features(),))
    assert found.model == (1 + 2) * 2 * B * T * D * D  # a forward; a forward and a gradient of weights


def test_compiled_parts_are_counted() -> None:
    module = nn.Sequential(nn.Linear(D, D))
    module[0].compile()
    assert count(module, features()).model == 4 * B * T * D * D
    counter = FlopCounter("half")
    with counter.counting(module):
        module(features()).sum().backward()
    assert counter.result().model == 4 * B * T * D * D


def test_random_numbers_are_as_before() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5))
    before = torch.get_rng_state()
    count(module, features(), step=lambda fake, batch: (fake(batch[0]) * torch.rand(1)).sum())
    assert torch.equal(before, torch.get_rng_state())


def test_useful_work() -> None:
    counted = Counted(dense=10, attention=8, recomputed=4)
    assert (counted.model, counted.hardware, counted.useful(0.5, 0.25)) == (18, 22, 7)
