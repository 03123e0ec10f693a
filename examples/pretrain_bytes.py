"""Pretrain a byte-level GPT on the standard library's source, on a mesh of processes.

Run it with `make train`, or

    python examples/pretrain_bytes.py fit                                  # pretrain_bytes.yaml as it is
    python examples/pretrain_bytes.py fit --trainer.strategy.tp=4 --trainer.strategy.fsdp=1
    python examples/pretrain_bytes.py fit --ckpt_path=… --trainer.max_steps=300

Nothing in the module below knows of a mesh: it is the code one would write for one device. How its layers
may be divided is said in `pretrain_bytes.yaml`, under `trainer.strategy.init_args.plan`.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from text import StdlibText

VOCABULARY = 256  # every byte is a token


def rotary_angles(context: int, head_dim: int, base: float = 10_000.0) -> Tensor:
    """Angle of each position and frequency, in radians: float32 of shape (context, head_dim / 2)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return torch.outer(torch.arange(context, dtype=torch.float32), frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864): turn each half-and-half pair of (…, time, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)  # the tables may be wider


class Attention(nn.Module):
    """Causal self-attention with one packed projection for queries, keys and values."""

    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape; `cos` and `sin` are (time, head_dim / 2)."""
        batch, time, width = x.size()
        q, k, v = (
            part.view(batch, time, self.n_head, width // self.n_head).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """A transformer block, normalised before each half."""

    def __init__(self, width: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(width)
        self.attn = Attention(width, n_head)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape; `cos` and `sin` are (time, head_dim / 2)."""
        x = x + self.dropout(self.attn(self.norm_attn(x), cos, sin))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """A decoder-only transformer over bytes, with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, *, context: int, n_layer: int, n_head: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, n_head, dropout) for _ in range(n_layer))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        angles = rotary_angles(context, width // n_head)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The projections that add to the residual stream start smaller the more of them there are.
                residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layer) if residual else 0.02)

    def forward(self, bytes_in: Tensor) -> Tensor:
        """Logits of the next byte: (batch, time) int64 to (batch, time, 256)."""
        time = bytes_in.size(1)
        x = self.token(bytes_in)
        for block in self.blocks:
            x = block(x, self.cos[:time], self.sin[:time])
        return self.head(self.norm(x))


class ByteLM(L.LightningModule):
    """Next-byte prediction with AdamW, a linear warm-up and then an inverse square root decay.

    The rate at a step does not depend on how many steps are asked for, so a resumed run that goes on for
    longer continues on the same curve.

    Args:
        context: Longest sequence the model can read, in bytes.
        n_layer: Transformer blocks.
        n_head: Attention heads; must divide `width`.
        width: Size of the residual stream.
        dropout: Probability of dropping an element of what a block adds.
        lr: Peak learning rate, reached after `warmup_steps` optimizer steps.
        warmup_steps: Optimizer steps of linear warm-up.
        weight_decay: Of the weight matrices; norms have none.
    """

    def __init__(
        self,
        context: int = 128,
        n_layer: int = 4,
        n_head: int = 8,
        width: int = 256,
        dropout: float = 0.0,
        lr: float = 2e-3,
        warmup_steps: int = 30,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.model = GPT(context=context, n_layer=n_layer, n_head=n_head, width=width, dropout=dropout)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross entropy in nats a byte; `batch` is inputs and targets, each (batch, time) int64."""
        inputs, targets = batch
        logits = self.model(inputs)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean number of bits that one held-out byte costs."""
        self.log("val_bits_per_byte", self.loss(batch) / math.log(2), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with decay on matrices only, scheduled each step."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.lr,
            betas=(0.9, 0.95),
        )
        warmup = self.warmup_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Run LightningCLI with the YAML beside this file as the default configuration."""
    # Lightning 2.6 asks torch 2.13 in a way that torch has a newer one for, once in every process.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    defaults = [str(Path(__file__).with_suffix(".yaml"))]
    LightningCLI(
        ByteLM,
        StdlibText,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={name: {"default_config_files": defaults} for name in ("fit", "validate")},
    )


if __name__ == "__main__":
    main()
