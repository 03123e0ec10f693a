"""A summary of a run that a person can read: the mesh, the losses, the speed, and some generated text."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from torch import Tensor, nn
from typing_extensions import override


def draw_mesh(sizes: Mapping[str, int]) -> str:
    """Ranks laid out by axis: the last axis to the right, the one before it downwards, the others as headings.

    Args:
        sizes: Axis name to size, outermost first; axes of size 1 are left out of the picture.

    >>> print(draw_mesh({"ddp": 1, "fsdp": 2, "tp": 2}))
             tp 0  tp 1
    fsdp 0 │    0     1
    fsdp 1 │    2     3
    """
    axes = [(name, size) for name, size in sizes.items() if size > 1] or [("device", 1)]
    while len(axes) < 2:
        axes.insert(0, ("", 1))
    *outer, (row_name, rows), (column_name, columns) = axes
    labels = [f"{row_name} {row} │ " if row_name else "" for row in range(rows)]
    margin = max(map(len, labels))
    heads = [f"{column_name} {column}" for column in range(columns)]
    width = max(map(len, heads))
    rank = itertools.count()
    lines = []
    for place in itertools.product(*(range(size) for _, size in outer)):
        if outer:
            lines.append(", ".join(f"{name} {index}" for (name, _), index in zip(outer, place, strict=True)))
        lines.append(" " * margin + "  ".join(head.rjust(width) for head in heads))
        for label in labels:
            lines.append(label.rjust(margin) + "  ".join(str(next(rank)).rjust(width) for _ in range(columns)))
    return "\n".join(lines)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    *,
    num_bytes: int,
    context: int,
    temperature: float,
    seed: int,
    device: torch.device | None = None,
) -> bytes:
    """Continue `prompt` by sampling one byte after the other from `model`, a causal map of bytes to logits.

    Every rank that holds a part of the model must call it: each runs the same forwards and, from a generator of
    its own with the same seed, draws the same bytes. The input always has `context` bytes, padded behind the text
    where a causal model cannot see it, so that its length divides on every mesh that training ran on.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        window = text[-context:]
        inputs = torch.tensor([window + [0] * (context - len(window))], device=device)
        logits = model(inputs)[0, len(window) - 1].float().cpu()
        text.append(int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)))
    return bytes(text)


class RunReport(L.Callback):
    """Prints a summary on rank 0 when `fit` is over.

    Expects a LightningModule with `model` (bytes to logits) and `hparams.context`, whose batches are
    (inputs, targets) of equal shape (batch, time).

    Args:
        prompt: What the sample starts with.
        num_bytes: Length of the continuation.
        temperature: Of the sampling; lower is more cautious.
    """

    def __init__(self, prompt: str = "def ", num_bytes: int = 128, temperature: float = 0.7) -> None:
        self.prompt = prompt
        self.num_bytes = num_bytes
        self.temperature = temperature
        self.losses: list[Tensor] = []
        self.step_ends: list[float] = []
        self.tokens_per_batch = 0
        self.sample = b""

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].detach())
        self.step_ends.append(time.perf_counter())
        self.tokens_per_batch = batch[0].numel()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # On every rank, while the model is still in place.
        was_training = pl_module.training
        pl_module.eval()
        self.sample = generate(
            pl_module.model,  # type: ignore[arg-type]
            self.prompt.encode(),
            num_bytes=self.num_bytes,
            context=pl_module.hparams["context"],
            temperature=self.temperature,
            seed=0,
            device=pl_module.device,
        )
        pl_module.train(was_training)
        if self.losses:
            self.losses = list(trainer.strategy.reduce(torch.stack(self.losses), reduce_op="mean").cpu())

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # After every callback has saved what it saves at the end.
        if trainer.is_global_zero:
            console = Console(width=110, markup=False, highlight=False)
            console.print(Panel(self._table(trainer), title="The run", border_style="green"))
            saved = trainer.checkpoint_callback
            path = (saved.last_model_path or saved.best_model_path) if isinstance(saved, ModelCheckpoint) else ""
            if path:
                path = os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
                longer = f"make train ARGS='--ckpt_path={path} --trainer.max_steps={2 * trainer.global_step}'"
                console.print(f"checkpoint   {path}", soft_wrap=True)
                console.print(f"go on        {longer}", soft_wrap=True)
                tool = f"{os.path.relpath(sys.executable)} -m lightning_parallel"
                console.print(f"as one file  {tool} consolidate {path} model.ckpt", soft_wrap=True)

    def _table(self, trainer: L.Trainer) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        sizes = getattr(trainer.strategy, "mesh_sizes", {"device": trainer.world_size})
        table.add_row("mesh", " × ".join(f"{axis} {size}" for axis, size in sizes.items()))
        table.add_row("ranks", draw_mesh(sizes))
        step = trainer.global_step
        if len(self.losses) > 1:
            first, span = float(self.losses[0]), min(20, len(self.losses) // 2)
            last = statistics.fmean(map(float, self.losses[-span:]))
            table.add_row("training loss", f"{first:.3f} nats a byte at step {step - len(self.losses) + 1}")
            table.add_row("", f"{last:.3f} at step {step} (mean of the last {span})")
            table.add_row("speed", f"{self._tokens_per_second(trainer):,.0f} tokens/s, all ranks together")
        if "val_bits_per_byte" in trainer.callback_metrics:
            table.add_row("validation", f"{float(trainer.callback_metrics['val_bits_per_byte']):.3f} bits a byte")
        text = self.sample.decode(errors="replace")
        table.add_row("sample", "".join(c if c.isprintable() or c == "\n" else "·" for c in text))
        return table

    def _tokens_per_second(self, trainer: L.Trainer) -> float:
        """Over all ranks, by the median step: a pause for validation or a checkpoint does not count."""
        seconds = statistics.median(b - a for a, b in itertools.pairwise(self.step_ends))
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1})
        replicas: int = sampler["num_replicas"]
        return self.tokens_per_batch * replicas / seconds
