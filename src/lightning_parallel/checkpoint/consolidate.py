"""One ordinary Lightning file from a folder of shards, in one process without a process group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_parallel.checkpoint.optimizer import is_named, number_parameters
from lightning_parallel.checkpoint.sharded import load_sharded
from lightning_parallel.checkpoint.storage import (
    META_FILE,
    PathOrURL,
    exists,
    is_folder,
    is_sharded_checkpoint,
    write_file,
)
from lightning_parallel.errors import ParallelConfigError


def consolidate(
    source: PathOrURL, target: PathOrURL, *, weights_only: bool | None = None, overwrite: bool = False
) -> None:
    """Make one file of a folder of shards: whole tensors, and optimizer states in torch's own form.

    The file is what one device would have written: ``load_from_checkpoint`` and a plain Trainer take it. Tensors are
    read one at a time, so host memory for one checkpoint is enough.

    Args:
        source: The folder, a local path or a URL.
        target: The file to write.
        weights_only: As for ``torch.load``, for every pickle in the folder.
        overwrite: Whether a file at ``target`` may be replaced.

    Raises:
        ParallelConfigError: ``source`` is not a folder of shards, or ``target`` is taken.
    """
    if not exists(source):
        raise ParallelConfigError(f"There is nothing at {source}.")
    if not is_folder(source):
        raise ParallelConfigError(f"{source} is one file already; only a folder of shards needs to be consolidated.")
    if not is_sharded_checkpoint(source):
        raise ParallelConfigError(
            f"{source} is not a checkpoint folder: it has no {META_FILE}. Give the folder that a strategy with "
            "save_distributed_checkpoint=True wrote."
        )
    if is_folder(target):
        raise ParallelConfigError(f"{target} is a folder; give the name of the file to write, say {target}/model.ckpt.")
    if exists(target) and not overwrite:
        raise ParallelConfigError(f"{target} exists. Give another name, or allow to overwrite it.")
    write_file(target, whole_checkpoint(load_sharded(source, None, weights_only=weights_only)))


def whole_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint with its optimizer states turned into torch's own form where they are named."""
    if "optimizer_states" not in checkpoint:
        return dict(checkpoint)
    states = [number_parameters(state) if is_named(state) else state for state in checkpoint["optimizer_states"]]
    return {**checkpoint, "optimizer_states": states}
