"""A transformer whose projections are packed, taken apart in any way that people write, with blocks of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import VOCAB, LanguageModel, OptimizerOptions

Parts = tuple[Tensor, Tensor, Tensor]


def _slices(y: Tensor, sizes: list[int]) -> Parts:
    a, b = sizes[0], sizes[0] + sizes[1]
    return y[..., :a], y[..., a:b], y[..., b:]


def _slices_of_all_dims(y: Tensor, sizes: list[int]) -> Parts:
    a, b = sizes[0], sizes[0] + sizes[1]
    return y[:, :, :a], y[:, :, a:b], y[:, :, b:]


def _narrow(y: Tensor, sizes: list[int]) -> Parts:
    a, b, c = sizes
    return y.narrow(-1, 0, a), y.narrow(-1, a, b), y.narrow(-1, a + b, c)


# How to take the packed projection apart: (batch, seq, sizes summed) to three parts; `h` heads.
FORMS: dict[str, Callable[[Tensor, list[int], int], Any]] = {
    "split": lambda y, sizes, h: y.split(sizes, -1),
    "torch.split": lambda y, sizes, h: torch.split(y, sizes, dim=2),
    "chunk": lambda y, sizes, h: y.chunk(3, -1),
    "slices": lambda y, sizes, h: _slices(y, sizes),
    "slices of all dims": lambda y, sizes, h: _slices_of_all_dims(y, sizes),
    "view": lambda y, sizes, h: y.view(*y.shape[:2], 3, h, -1).unbind(2),
    # The reshape that einops makes of "b t (three h d) -> three b h t d".
    "permute": lambda y, sizes, h: (
        y.reshape((*y.shape[:2], 3, h, sizes[0] // h)).permute(2, 0, 3, 1, 4).transpose(2, 3)
    ),
    "unflatten": lambda y, sizes, h: y.unflatten(-1, (3, h, sizes[0] // h)).unbind(2),
    # No way to keep these split: right all the same.
    "tensor_split": lambda y, sizes, h: y.tensor_split(3, dim=-1),
    "narrow": lambda y, sizes, h: _narrow(y, sizes),
    "heads first": lambda y, sizes, h: y.view(*y.shape[:2], h, -1).chunk(3, -1),
}


class PackedAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, form: str, enable_gqa: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.form, self.enable_gqa = heads, kv_heads, form, enable_gqa
        self.sizes = [dim, dim // heads * kv_heads, dim // heads * kv_heads]
        self.qkv, self.out = nn.Linear(dim, sum(self.sizes)), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = FORMS[self.form](self.qkv(x), self.sizes, self.heads)
        q = q.reshape(B, T, self.heads, -1).transpose(1, 2)
        k, v = (t.reshape(B, T, self.kv_heads, -1).transpose(1, 2) for t in (k, v))
        if not self.enable_gqa:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.enable_gqa)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class GatedMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """`kind`: "plain", "parallel" (attention beside MLP), "scaled" (parameters of its own), "auxiliary" (returns a
    second value), "keywords" (takes a mask and a tensor by name), "frozen" (unused and frozen weights), "mixing" (a
    convolution along the sequence and a norm over it)."""

    def __init__(self, dim: int, heads: int, kv_heads: int, form: str, enable_gqa: bool, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = PackedAttention(dim, heads, kv_heads, form, enable_gqa), GatedMLP(dim)
        if kind == "scaled":
            self.scale, self.gate = nn.Parameter(torch.full((dim,), 0.5)), nn.Parameter(torch.tensor(0.7))
            self.attn.scale = nn.Parameter(torch.ones(dim))
        if kind == "unused":
            self.spare = nn.Linear(dim, 2)
        if kind == "mixing":
            self.conv = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)
            self.over_sequence = nn.LayerNorm([16, dim])
            self.groups = nn.GroupNorm(2, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, extra: Tensor | None = None) -> Any:
        if self.kind == "parallel":
            normed = self.norm_1(x)
            return x + self.attn(normed) + self.mlp(normed)
        if self.kind == "scaled":
            x = x + self.scale * self.attn(self.norm_1(x))
            return x + self.gate * self.mlp(self.norm_2(x))
        x = x + self.attn(self.norm_1(x))
        x = x + self.mlp(self.norm_2(x))
        if self.kind == "mixing":
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
            x = x + self.groups(x.transpose(1, 2)).transpose(1, 2)
            return self.over_sequence(x)
        if self.kind == "auxiliary":
            return x, x.pow(2).mean()
        if self.kind == "keywords":
            assert mask is not None and extra is not None
            return x * mask[..., None] + extra
        return x


class PackedNet(nn.Module):
    def __init__(
        self, *, vocab: int, dim: int, heads: int, kv_heads: int, form: str, enable_gqa: bool, kind: str, tied: bool
    ) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Parameter(torch.randn(64, dim) * 0.1)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, form, enable_gqa, kind) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=not tied)
        nn.init.normal_(self.embed.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx) + self.position[: idx.size(1)]
        auxiliary: Any = 0.0
        for block in self.blocks:
            if self.kind == "auxiliary":
                x, loss = block(x)
                auxiliary = auxiliary + loss
            elif self.kind == "keywords":
                x = block(x, mask=(idx != 3).float(), extra=x * 0.1)
            else:
                x = block(x)
        return self.head(self.norm(x)) + 0.01 * auxiliary


class Packed(LanguageModel):
    def __init__(
        self,
        *,
        heads: int = 4,
        kv_heads: int = 4,
        form: str = "split",
        enable_gqa: bool = False,
        kind: str = "plain",
        tied: bool = False,
        frozen: str = "",
        optimizer: OptimizerOptions | str = "adamw",
    ) -> None:
        super().__init__(optimizer)
        self.vocab = VOCAB
        self.model = PackedNet(
            vocab=VOCAB, dim=32, heads=heads, kv_heads=kv_heads, form=form, enable_gqa=enable_gqa, kind=kind, tied=tied
        )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in name)


def packed_plan(*, heads: int = 4, kv_heads: int = 4) -> dict[str, str]:
    """The plan of a `Packed` of these head counts."""
    return {
        "model.embed": "vocab_in",
        "model.position": "replicate",
        "model.blocks.*": "block",
        "model.blocks.*.norm_1": "norm",
        "model.blocks.*.norm_2": "norm",
        "model.blocks.*.attn.qkv": "fused(3)" if heads == kv_heads else f"fused({heads}, {kv_heads}, {kv_heads})",
        "model.blocks.*.attn.out": "rowwise",
        "model.blocks.*.mlp.up": "fused(2)",
        "model.blocks.*.mlp.down": "rowwise",
        "model.norm": "norm",
        "model.head": "vocab_out",
    }


ENCODER_PLAN: dict[str, str] = {
    "model.embed": "vocab_in",
    "model.position": "replicate",
    "model.encoder.layers.*": "block",
    "model.encoder.layers.*.self_attn": "replicate",
    "model.encoder.layers.*.linear1": "colwise",
    "model.encoder.layers.*.linear2": "rowwise",
    "model.head": "vocab_out",
}
