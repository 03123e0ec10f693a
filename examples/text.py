"""Bytes of real text that every Python has: the source of its own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Installed packages are not the standard library; tests and generated tables are not prose about programming.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_EVERY = 25


def stdlib_files() -> list[Path]:
    """The standard library's source files, sorted by path.

    The list depends on the Python version alone, so every process of a job reads the same text.

    Raises:
        FileNotFoundError: This Python has no source files (a frozen or zipped installation).
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if not EXCLUDED_FOLDERS & set(p.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"No .py files under {root}: this example reads the standard library's source.")
    return files


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Divide into training and validation files: every 25th file is held out, whole."""
    return [f for i, f in enumerate(files) if i % HELD_OUT_EVERY], files[::HELD_OUT_EVERY]


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of a text and, for each byte, the byte that comes next.

    Item: inputs and targets, both int64 of shape (context,), with values below 256.
    """

    def __init__(self, files: list[Path], context: int) -> None:
        text = b"\n".join(file.read_bytes() for file in files)
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.data[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class StdlibText(L.LightningDataModule):
    """The standard library's source, cut into windows of bytes.

    Args:
        context: Bytes in a window.
        batch_size: Windows in a batch of one data-parallel replica.
    """

    def __init__(self, context: int = 128, batch_size: int = 8) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the files, once in a process."""
        if not hasattr(self, "train"):
            train, held_out = split_files(stdlib_files())
            self.train, self.held_out = ByteWindows(train, self.context), ByteWindows(held_out, self.context)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled windows; Lightning gives each data-parallel replica its share."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Windows of the held-out files, in order."""
        return DataLoader(self.held_out, batch_size=self.batch_size)
