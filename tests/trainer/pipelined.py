"""LightningModules for pipelines: blocks of every signature, batches of every kind. Nothing here knows of a mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import VOCAB, LanguageModel, NanoGPT, OptimizerOptions

DIM = 16


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class TupleBlock(Mixing):
    """Returns the hidden state and the sum of what all blocks before it have said."""

    def forward(self, x: Tensor, said: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        x = super().forward(x)
        return x, {"said": said["said"] + x.mean(-1)}


class KeywordBlock(Mixing):
    """Takes all that it can by name: a table, a mask that does not need a gradient, a number, and None."""

    def forward(  # type: ignore[override]
        self, x: Tensor, *, table: Tensor, keep: Tensor, scale: float, cache: None = None
    ) -> Tensor:
        assert cache is None
        return super().forward((x + table) * scale) * keep.unsqueeze(-1)


class DecoderBlock(Mixing):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + self.attention(x, memory, memory, need_weights=False)[0])


class Blocks(LanguageModel):
    """An embedding, four blocks of a kind, a head."""

    def __init__(self, kind: str = "tuple", *, calls: int = 1, optimizer: OptimizerOptions | str = "adamw") -> None:
        super().__init__(optimizer)
        self.vocab, self.kind, self.calls = VOCAB, kind, calls
        block = {"tuple": TupleBlock, "keywords": KeywordBlock, "memory": DecoderBlock}[kind]
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Parameter(torch.randn(32, DIM) * 0.1)
        self.encoder = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(DIM, VOCAB)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        match self.kind:
            case "tuple":
                said = {"said": torch.zeros_like(x[..., 0])}
                for block in self.blocks:
                    x, said = block(x, said)
                x = x + said["said"].unsqueeze(-1)
            case "keywords":
                for block in self.blocks:
                    x = block(x, table=self.position[: ids.size(1)], keep=ids % 7 != 0, scale=0.9, cache=None)
            case "memory":
                memory = self.encoder(x.flip(1)[:, ::2])
                for block in self.blocks:
                    x = block(x, memory)
        return self.head(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = [super(Blocks, self).loss(batch) for _ in range(self.calls)]
        return torch.stack(losses).mean() if losses else self.head.weight.square().mean()


class ManyEntries(NanoGPT):
    """Batches are dicts with entries of every kind. Rows weigh alike, however many labels they have."""

    def __init__(self, rows: list[int] | None = None, **kwargs: Any) -> None:
        super().__init__(**{"dim": DIM, "heads": 2, "layers": 4, **kwargs})
        self.encoder = nn.TransformerEncoderLayer(DIM, 2, DIM, dropout=0.0, batch_first=True)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:  # type: ignore[override]
        ids, labels = batch["ids"], batch["labels"]
        rows = len(ids)
        assert batch["none"] is None
        assert batch["epoch"] == 3
        assert [*batch["nested"][0]] == [f"row {row}" for row in batch["row"].tolist()]
        assert len(batch["mask"]) == len(labels) == rows
        assert batch["whole"].shape == (5, 2)
        assert batch["scalar"].ndim == 0
        losses = F.cross_entropy(self.logits(ids).transpose(1, 2), labels, reduction="none") * batch["mask"]
        loss = (losses.sum(1) / batch["mask"].sum(1) * batch["scalar"] + batch["whole"].mean()).mean()
        self.log("train_loss", loss)
        return loss


class Groups(NanoGPT):
    """Embeddings, which the last stage does not have, and a frozen part, are groups of their own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"tied": False, **kwargs})
        self.unused = nn.Linear(4, 4)
        self.model.h[1].ln_1.requires_grad_(False)
        self.model.wpe.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        embeddings = [*self.model.wte.parameters(), *self.model.wpe.parameters()]
        last = [*self.model.ln_f.parameters(), *self.model.lm_head.parameters()]
        middle = [*self.model.h.parameters()]
        optimizer = torch.optim.AdamW(
            [
                {"params": embeddings, "lr": 3e-2},
                {"params": middle},
                {"params": last, "weight_decay": 0.3},
                {"params": [*self.unused.parameters()]},
            ],
            lr=1e-2,
            eps=1e-3,
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
