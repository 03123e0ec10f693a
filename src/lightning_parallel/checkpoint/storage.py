"""Files and folders of checkpoints, local or behind a URL that fsspec knows."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Callable
from os import PathLike
from pathlib import PurePosixPath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_parallel._torch import HOST

PathOrURL = str | PathLike[str]
T = TypeVar("T")

META_FILE = "meta.pt"  # Lightning's name for what is not in the shards
INDEX_FILE = ".metadata"  # torch's name for the index of the shards


def resolve(path: PathOrURL) -> tuple[AbstractFileSystem, str]:
    """The file system of a path or URL, and the path within it."""
    fs, where = url_to_fs(os.fspath(path))
    if not isinstance(fs, LocalFileSystem):
        fs.invalidate_cache()  # another rank may have written since
    return fs, str(where).rstrip("/")


def is_sharded_checkpoint(path: PathOrURL) -> bool:
    """Whether ``path`` is a folder of shards, of this package or of Lightning's own strategies."""
    fs, where = resolve(path)
    return bool(fs.isdir(where) and fs.isfile(f"{where}/{META_FILE}"))


def exists(path: PathOrURL) -> bool:
    """Whether there is anything at ``path``."""
    fs, where = resolve(path)
    return bool(fs.exists(where))


def is_folder(path: PathOrURL) -> bool:
    """Whether ``path`` is a folder."""
    fs, where = resolve(path)
    return bool(fs.isdir(where))


def remove(path: PathOrURL) -> None:
    """Remove a file, a folder, or a link but not what it points to. Nothing there is no error."""
    fs, where = resolve(path)
    if isinstance(fs, LocalFileSystem):
        if os.path.islink(where) or os.path.isfile(where):
            os.remove(where)
        elif os.path.isdir(where):
            shutil.rmtree(where)
    elif fs.exists(where):
        fs.rm(where, recursive=True)


def read_file(path: PathOrURL, *, weights_only: bool | None = None) -> Any:
    """``torch.load`` a file into host memory; a local one is mapped, so that only what is used is read.

    Args:
        path: A local path or a URL.
        weights_only: As for ``torch.load``: unless False, nothing but tensors and plain data is unpickled.
    """
    fs, where = resolve(path)
    if isinstance(fs, LocalFileSystem):
        # A file in torch's format from before 1.6 cannot be mapped.
        with contextlib.suppress(RuntimeError):
            return torch.load(where, map_location=HOST, weights_only=weights_only, mmap=True)
        return torch.load(where, map_location=HOST, weights_only=weights_only)
    with fs.open(where, "rb") as file:
        return torch.load(file, map_location=HOST, weights_only=weights_only)


def write_file(path: PathOrURL, content: Any) -> None:
    """``torch.save`` so that a local ``path`` has the old file or the new one, whole, at every moment."""
    fs, where = resolve(path)
    staged = _beside(where, "partial") if isinstance(fs, LocalFileSystem) else where
    fs.makedirs(where.rpartition("/")[0], exist_ok=True)
    try:
        with fs.open(staged, "wb") as file:
            torch.save(content, file)
        if staged != where:
            os.replace(staged, where)
    except BaseException:
        if staged != where:
            remove(staged)
        raise


def prepare_folder(path: PathOrURL) -> str:
    """Make ready to write a folder of shards that will replace what is at ``path``; see `publish_folder`.

    Returns:
        The folder to write to. It lies beside ``path`` if that is local or taken, so that a run that is killed
        leaves the old checkpoint whole, and shards of a larger world are not left among the new ones.

    Raises:
        FileExistsError: ``path`` is a folder with other things than a checkpoint.
    """
    fs, where = resolve(path)
    refuse_other_folder(path)
    is_local = isinstance(fs, LocalFileSystem)
    target = where if is_local else os.fspath(path).rstrip("/")
    staged = _beside(target, "partial")
    remove(staged)
    if not is_local and not fs.exists(where):
        staged = target
    fs.makedirs(resolve(staged)[1], exist_ok=True)
    return staged


def publish_folder(staged: str, path: PathOrURL) -> None:
    """Put the finished folder ``staged`` in the place of what is at ``path``."""
    fs, where = resolve(path)
    _, source = resolve(staged)
    if source == where:
        return
    if not isinstance(fs, LocalFileSystem):
        remove(path)
        fs.mv(source, where, recursive=True)
        return
    old = _beside(where, "old")
    remove(old)
    if os.path.lexists(where):
        os.rename(where, old)
    os.rename(source, where)
    remove(old)


def refuse_other_folder(path: PathOrURL) -> None:
    """Raise FileExistsError if ``path`` is a folder that is not a checkpoint and so must not be replaced."""
    fs, where = resolve(path)
    if not fs.isdir(where) or is_sharded_checkpoint(path):
        return
    names = {PurePosixPath(name).name for name in fs.ls(where, detail=False)}
    if any(not (name.startswith(INDEX_FILE) or name.endswith(".distcp")) for name in names):
        raise FileExistsError(
            f"{path} is a folder with other things than a checkpoint ({', '.join(sorted(names)[:3])}, …), so it will "
            "not be replaced. Give a path that is free."
        )


def on_first_rank(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 alone and give every rank what it returned or raised. A collective."""
    distributed = dist.is_available() and dist.is_initialized()
    outcome: list[Any] = [None, None]
    if not distributed or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error if _survives_pickling(error) else RuntimeError(f"{type(error).__name__}: {error}")
    if distributed:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def _beside(where: str, word: str) -> str:
    parent, _, name = where.rpartition("/")
    return f"{parent}/.{name}.{word}"


def _survives_pickling(error: Exception) -> bool:
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return True
    return False
