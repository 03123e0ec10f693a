"""Plain LightningModules for tests, and the plans that say what tensor parallelism must know about two of them.

Nothing here knows of a mesh. Each module draws its own weights from the global generator, so seed before building
one, and makes samples of the kind that it trains on (`make_samples`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Generator, Tensor, nn

from tests.support.networks import GPT, Encoder, Llama

VOCAB = 96


def walk_tokens(count: int, seq: int, generator: Generator, *, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Inputs and next tokens of random walks: there is something to learn, so gradients are not all cancellation.

    Shape: both (count, seq).
    """
    steps = torch.randint(0, 3, (count, seq + 1), generator=generator)
    steps[:, 0] = torch.randint(0, vocab, (count,), generator=generator)
    tokens = steps.cumsum(1) % vocab
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerOptions:
    """How `configure_optimizers` builds the optimizer.

    The large `eps` keeps Adam from turning the rounding of a small gradient into a large part of a step.
    """

    name: str = "adamw"
    lr: float = 1e-2
    eps: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.0
    foreach: bool | None = None
    fused: bool | None = None
    decay_groups: bool = False
    step_lr: int | None = 2

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        parameters: Any = list(module.parameters())
        if self.decay_groups:
            parameters = [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ]
        shared: dict[str, Any] = {"lr": self.lr, "foreach": self.foreach, "fused": self.fused}
        match self.name:
            case "adamw":
                return torch.optim.AdamW(parameters, eps=self.eps, weight_decay=self.weight_decay, **shared)
            case "sgd":
                return torch.optim.SGD(parameters, momentum=self.momentum, **shared)
        raise ValueError(f"optimizer {self.name!r} is neither adamw nor sgd")


class Supervised(LightningModule):
    """A `model`, a cross entropy, one optimizer."""

    model: nn.Module

    def __init__(self, optimizer: OptimizerOptions | str = "adamw") -> None:
        super().__init__()
        self.options = OptimizerOptions(name=optimizer) if isinstance(optimizer, str) else optimizer

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.logits(x).flatten(0, -2), y.flatten())

    def logits(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.logits(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.options.build(self)
        if self.options.step_lr is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, self.options.step_lr, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LanguageModel(Supervised):
    """Next-token prediction; `x` and `y` are (batch, seq) token ids below `vocab`."""

    vocab: int

    def make_samples(self, count: int, seq: int, generator: Generator) -> tuple[Tensor, Tensor]:
        return walk_tokens(count, seq, generator, vocab=self.vocab)


class NanoGPT(LanguageModel):
    def __init__(
        self,
        *,
        vocab: int = VOCAB,
        dim: int = 32,
        heads: int = 4,
        layers: int = 2,
        max_seq: int = 64,
        tied: bool = True,
        dropout: float = 0.0,
        optimizer: OptimizerOptions | str = "adamw",
    ) -> None:
        super().__init__(optimizer)
        self.vocab = vocab
        self.model = GPT(vocab=vocab, dim=dim, heads=heads, layers=layers, max_seq=max_seq, tied=tied, dropout=dropout)


NANOGPT_PLAN: Mapping[str, str] = {
    "model.wte": "vocab_in",
    "model.wpe": "replicate",
    "model.h.*": "block",
    "model.h.*.ln_1": "norm",
    "model.h.*.attn.c_attn": "fused(3)",
    "model.h.*.attn.c_proj": "rowwise",
    "model.h.*.ln_2": "norm",
    "model.h.*.mlp": "local",
    "model.h.*.mlp.c_fc": "colwise",
    "model.h.*.mlp.c_proj": "rowwise",
    "model.ln_f": "norm",
    "model.lm_head": "vocab_out",
}


class HandLlama(LanguageModel):
    def __init__(
        self,
        *,
        vocab: int = VOCAB,
        dim: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        layers: int = 2,
        max_seq: int = 64,
        tied: bool = False,
        optimizer: OptimizerOptions | str = "adamw",
    ) -> None:
        super().__init__(optimizer)
        self.vocab = vocab
        self.model = Llama(
            vocab=vocab, dim=dim, heads=heads, kv_heads=kv_heads, layers=layers, max_seq=max_seq, tied=tied
        )


def llama_plan(*, heads: int = 4, kv_heads: int = 2) -> dict[str, str]:
    """The plan of a `HandLlama` of these head counts: half a head on a rank would be silently wrong."""
    return {
        "model.embed": "vocab_in",
        "model.layers.*": "block",
        "model.layers.*.attention_norm": "norm",
        "model.layers.*.attention": "local",
        "model.layers.*.attention.wq": f"colwise(heads={heads})",
        "model.layers.*.attention.wk": f"colwise(heads={kv_heads})",
        "model.layers.*.attention.wv": f"colwise(heads={kv_heads})",
        "model.layers.*.attention.wo": "rowwise",
        "model.layers.*.mlp_norm": "norm",
        "model.layers.*.mlp": "local",
        "model.layers.*.mlp.gate": "colwise",
        "model.layers.*.mlp.up": "colwise",
        "model.layers.*.mlp.down": "rowwise",
        "model.norm": "norm",
        "model.output": "vocab_out",
    }


LLAMA_PLAN: Mapping[str, str] = llama_plan()


class EncoderLM(LanguageModel):
    def __init__(
        self,
        *,
        vocab: int = VOCAB,
        dim: int = 32,
        heads: int = 4,
        layers: int = 2,
        max_seq: int = 64,
        dropout: float = 0.0,
        optimizer: OptimizerOptions | str = "adamw",
    ) -> None:
        super().__init__(optimizer)
        self.vocab = vocab
        self.model = Encoder(vocab=vocab, dim=dim, heads=heads, layers=layers, max_seq=max_seq, dropout=dropout)


class HuggingFaceLM(LanguageModel):
    """A tiny random model of a Hugging Face architecture, by the name of its config: "Llama", "Qwen3", "GPT2"."""

    def __init__(
        self,
        arch: str = "Llama",
        *,
        vocab: int = VOCAB,
        dim: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        layers: int = 2,
        optimizer: OptimizerOptions | str = "adamw",
        **config: Any,
    ) -> None:
        super().__init__(optimizer)
        import transformers

        if arch == "GPT2":
            sizes = {"n_embd": dim, "n_head": heads, "n_layer": layers, "n_positions": 64}
            sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        else:
            sizes = {"hidden_size": dim, "intermediate_size": 4 * dim, "max_position_embeddings": 64}
            sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": layers}
            sizes |= {"head_dim": dim // heads}
        tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        options = {"vocab_size": vocab, "use_cache": False, **tokens, **sizes, **config}
        self.vocab = vocab
        self.model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{arch}Config")(**options))

    def logits(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x).logits


class Classifier(Supervised):
    """A multilayer perceptron: no blocks, no tokens. `x` is (batch, 16) features, `y` (batch,) classes."""

    def __init__(
        self, *, features: int = 16, dim: int = 32, classes: int = 10, optimizer: OptimizerOptions | str = "adamw"
    ) -> None:
        super().__init__(optimizer)
        self.features, self.classes = features, classes
        self.model = nn.Sequential(
            nn.Linear(features, dim), nn.ReLU(), nn.Linear(dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, classes)
        )

    def make_samples(self, count: int, seq: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, self.features, generator=generator)
        return x, torch.randint(0, self.classes, (count,), generator=generator)


class BatchNormed(Supervised):
    """A convolutional `Sequential` with batch norm. `x` is (batch, 2, 8, 8), `y` (batch,) classes."""

    def __init__(self, *, layers: int = 8, optimizer: OptimizerOptions | str = "sgd") -> None:
        super().__init__(optimizer)
        widths = [2, *[4] * layers]
        self.model = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
                for before, after in pairwise(widths)
            ),
            nn.Flatten(),
            nn.Linear(4 * 64, 10),
        )

    def make_samples(self, count: int, seq: int, generator: Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 2, 8, 8, generator=generator), torch.randint(0, 10, (count,), generator=generator)


class GAN(LightningModule):
    """Manual optimisation: two optimizers, two backward passes a step, one of them through both networks."""

    def __init__(self, *, features: int = 16, latent: int = 8, dim: int = 32, lr: float = 1e-2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.features, self.latent, self.lr = features, latent, lr
        self.generator = nn.Sequential(nn.Linear(latent, dim), nn.Tanh(), nn.Linear(dim, features))
        self.discriminator = nn.Sequential(nn.Linear(features, dim), nn.Tanh(), nn.Linear(dim, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, noise = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()

        judged = self.discriminator(torch.cat([real, self.generator(noise).detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(noise), 1)]).to(judged)
        discriminator_loss = F.binary_cross_entropy_with_logits(judged, truth)
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()

        self.toggle_optimizer(generator_optimizer)
        judged = self.discriminator(self.generator(noise))
        generator_loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.log("train_loss", discriminator_loss + generator_loss, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(network.parameters(), lr=self.lr, eps=1e-3)
            for network in (self.generator, self.discriminator)
        ]

    def make_samples(self, count: int, seq: int, generator: Generator) -> tuple[Tensor, Tensor]:
        real = torch.randn(count, self.features, generator=generator)
        return real, torch.randn(count, self.latent, generator=generator)
