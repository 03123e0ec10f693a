"""Modules that do with sequences what users do; nothing in them knows of context parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from tests.support.models import VOCAB, HuggingFaceLM, LanguageModel, OptimizerOptions, Supervised


class InnerLoss(HuggingFaceLM):
    """Hugging Face's own loss, which shifts the labels inside, with what a batch may bring besides."""

    def __init__(self, *, extra: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.extra = extra

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        batch_size, length = x.shape
        labels, options = x.clone(), {}
        position = torch.arange(length, device=x.device)
        # So that it holds for each data rank's part of a batch too.
        cut = length - (x[:, :1] % max(1, length // 2))
        if self.extra == "padding":
            options["attention_mask"] = (position < cut).long()
            labels = labels.masked_fill(position >= cut, -100)
        elif self.extra == "padding on the left":
            options["attention_mask"] = (position >= length - cut).long()
            options["position_ids"] = (position - (length - cut)).clamp(min=0)
            labels = labels.masked_fill(position < length - cut, -100)
        elif self.extra == "packed":
            options["position_ids"] = (position % max(2, length // 3)).expand(batch_size, -1)
        elif self.extra == "shifted by hand":
            logits = self.model(input_ids=x).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
        return self.model(input_ids=x, labels=labels, **options).loss


class Masked(Supervised):
    """A bidirectional encoder of torch's, with padding and without; sequence first or second."""

    def __init__(self, *, batch_first: bool = True, causal: bool = False, padded: bool = True) -> None:
        super().__init__(OptimizerOptions(name="sgd"))
        self.batch_first, self.causal, self.padded = batch_first, causal, padded
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def make_samples(self, count: int, seq: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(1, VOCAB, (count, seq), generator=generator)
        return x, (x + 1) % VOCAB

    def logits(self, x: Tensor) -> Tensor:
        length = x.size(1)
        hidden = self.embed(x) + torch.sin(torch.arange(length, device=x.device)[:, None] * torch.arange(32.0))
        padding = torch.arange(length, device=x.device) >= length - x[:, :1] % max(1, length // 2)
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        if not self.batch_first:
            hidden = hidden.transpose(0, 1)
        out = self.encoder(hidden, mask=mask, src_key_padding_mask=padding if self.padded else None)
        out = out if self.batch_first else out.transpose(0, 1)
        return self.head(out.masked_fill(padding[..., None], 0.0))


class Translator(Supervised):
    """Attends to another, shorter sequence, which goes through no blocks of its own."""

    def __init__(self) -> None:
        super().__init__(OptimizerOptions(name="sgd"))
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def make_samples(self, count: int, seq: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, VOCAB, (count, seq), generator=generator)
        return x, x.roll(1, 1)

    def logits(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.head(self.decoder(self.embed(x), self.embed(x[:, :3]), tgt_mask=mask, tgt_is_causal=True))


class Pooled(LanguageModel):
    """Classifies whole sequences: by their last token, by their mean, by a token that it puts in front."""

    def __init__(self, *, how: str) -> None:
        super().__init__(OptimizerOptions(name="sgd"))
        self.vocab, self.how = VOCAB, how
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, 5)
        self.front = nn.Parameter(torch.linspace(-1, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)])
        self.accuracy = MulticlassAccuracy(5, average="micro")

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        hidden = self.embed(x)
        if self.how == "token":
            hidden = torch.cat([self.front.expand(len(x), 1, -1), hidden], dim=1)
        for layer in self.layers:
            hidden = layer(hidden)
        pooled = {"last": hidden[:, -1], "mean": hidden.mean(1), "token": hidden[:, 0]}[self.how]
        logits = self.head(pooled)
        self.accuracy.update(logits, y[:, 0] % 5)
        self.log("accuracy", self.accuracy)
        return F.cross_entropy(logits, y[:, 0] % 5)


class Block(nn.Module):
    """One layer, of which a subclass makes something that cannot lie in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def mix(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.mix(x)).chunk(3, -1))
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Convolving(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class ByHand(Block):
    """nanoGPT's slow attention: a mask in a buffer, cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) / 8**0.5
        length = q.size(-2)
        return scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf")).softmax(-1) @ v


class CountingPositions(Block):
    def mix(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.size(1), device=x.device)[:, None] * 0.1


class MaskInside(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.size(-2)
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class TableInside(Block):
    """A table of more positions than there are tokens, in a buffer of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.sin(torch.arange(64.0)[:, None] * torch.linspace(0.1, 1, 32)))

    def mix(self, x: Tensor) -> Tensor:
        return x + self.table[: x.size(1)]


class Dropping(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = 0.1 if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)


BLOCKS = {
    kind.__name__: kind for kind in (Block, Convolving, ByHand, CountingPositions, MaskInside, TableInside, Dropping)
}


class Stack(LanguageModel):
    """Layers of one kind between an embedding and a head."""

    def __init__(self, *, kind: str = "Block", checkpoint: bool = False, layers: int = 2) -> None:
        super().__init__(OptimizerOptions(name="sgd"))
        self.vocab, self.checkpoint = VOCAB, checkpoint
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.layers = nn.ModuleList(BLOCKS[kind]() for _ in range(layers))

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            if self.checkpoint:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return self.head(hidden)
