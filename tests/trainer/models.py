"""LightningModules written in the less usual ways that Lightning allows. Nothing here knows of a mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import Classifier, LanguageModel, NanoGPT, OptimizerOptions
from tests.support.networks import GPTBlock


class SkipsBatches(NanoGPT):
    """`training_step` returns None on some batches, as one does to skip a bad one."""

    def __init__(self, skipped: tuple[int, ...] = (1, 2, 5), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.skipped = skipped

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.skipped else loss


class ReturnsDict(NanoGPT):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        logits = self.logits(batch[0])
        loss = F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss, "logits": logits.detach(), "note": "kept"}


class UsesItsParts(LanguageModel):
    """No network of its own: `training_step` uses parameters and modules one by one, through methods of any name."""

    def __init__(self, *, dim: int = 32, layers: int = 2, optimizer: OptimizerOptions | str = "adamw") -> None:
        super().__init__(optimizer)
        self.vocab = 96
        self.embed = nn.Embedding(self.vocab, dim)
        self.pos = nn.Parameter(torch.randn(64, dim) * 0.1)
        self.blocks = nn.ModuleList(GPTBlock(dim, 4, 0.0) for _ in range(layers))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def encode(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.pos[: x.size(1)]
        for block in self.blocks:
            hidden = hidden + self.scale * block(hidden)
        return hidden

    def decode(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embed.weight.t()

    def logits(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Tempered(NanoGPT):
    """A learnt temperature, and a gate in each block: parameters without a dim."""

    def __init__(self, gated: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        for block in self.model.h if gated else []:
            block.mlp = Gated(block.mlp)

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.temperature


class Gated(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate.tanh() * self.inner(x)


class ByHand(NanoGPT):
    """Manual optimisation: two backward passes a batch, added up over two batches, clipped by hand."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        penalty = self.logits(batch[0]).square().mean() * 1e-2
        self.manual_backward(penalty)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log("train_loss", loss + penalty, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return self.options.build(self)


class TwoOptimizers(Classifier):
    """Manual optimisation: two halves, each with its optimizer, one loss, both step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2 == 0:
            second.step()
        # The second forward of the batch sees what the first optimizer has changed.
        self.log("train_loss", loss + self.loss(batch).detach(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        halves = self.model[0], self.model[2:]
        return [torch.optim.Adam(half.parameters(), lr=1e-2, eps=1e-3) for half in halves]


class Unfrozen(NanoGPT):
    """For `BackboneFinetuning`: the backbone is frozen at first."""

    @property
    def backbone(self) -> nn.Module:
        return self.model.h

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)


class FreezesEmbeddings(NanoGPT):
    """Freezes in the second epoch, thaws in the third."""

    def on_train_epoch_start(self) -> None:
        self.model.wpe.requires_grad_(self.current_epoch != 1)
        self.model.h[0].requires_grad_(self.current_epoch != 1)


class OwnParameterByHand(UsesItsParts):
    """Manual optimisation: a second forward, after a backward, uses a parameter of the LightningModule itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        again = self.loss(batch) + self.pos.square().mean()
        self.manual_backward(again)
        optimizer.step()
        self.log("train_loss", loss + again, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return self.options.build(self)
