"""Reading and writing the shards of a folder with torch's distributed checkpoint."""

from __future__ import annotations

import pickle
import warnings
from pathlib import PurePosixPath
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_parallel._torch import shards_behind_url
from lightning_parallel.checkpoint.planner import BlockLoadPlanner, BlockSavePlanner
from lightning_parallel.checkpoint.storage import INDEX_FILE, PathOrURL, resolve
from lightning_parallel.checkpoint.tree import Path


def write_shards(folder: str, flat: dict[str, tuple[Path, Any]]) -> None:
    """Write this rank's part of every value. A collective of all ranks.

    Args:
        folder: A local path or a URL.
        flat: The values by name, each with its path in the checkpoint.

    Raises:
        RuntimeError: A rank could not write; raised on every rank.
    """
    fs, where = resolve(folder)
    writer = FileSystemWriter(where) if isinstance(fs, LocalFileSystem) else shards_behind_url(folder)[1]
    planner = BlockSavePlanner({name: path for name, (path, _) in flat.items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process: as meant
        try:
            save({name: value for name, (_, value) in flat.items()}, storage_writer=writer, planner=planner)
        except CheckpointException as error:  # a BaseException, which would pass by every handler of errors
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            shown = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
            raise RuntimeError(f"The checkpoint could not be written to {folder}: {shown}") from causes[min(causes)]


def read_shards(path: PathOrURL, index: Metadata, targets: dict[str, Any], *, weights_only: bool | None) -> None:
    """Fill the tensors of ``targets`` in place and replace its other values. No communication.

    This is ``dcp.load`` without the collectives, which reading does not need, and without its reading of the index.
    """
    fs, where = resolve(path)
    reader = FileSystemReader(where) if isinstance(fs, LocalFileSystem) else shards_behind_url(str(path))[0]
    planner = BlockLoadPlanner(weights_only=weights_only)
    planner.set_up_planner(targets, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def read_index(path: PathOrURL, *, weights_only: bool | None) -> Metadata:
    """The index of a folder's shards.

    torch unpickles it without restriction; here it may hold nothing but torch's own records, unless
    ``weights_only`` is False.
    """
    fs, where = resolve(path)
    with fs.open(f"{where}/{INDEX_FILE}", "rb") as file:
        index = pickle.load(file) if weights_only is False else _IndexUnpickler(file).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"{path}/{INDEX_FILE} holds {type(index).__name__}, not the index of shards.")
    return index


def path_of(name: str, index: Metadata) -> Path:
    """Where a stored value belongs in the checkpoint: as noted in the index, else as its name says."""
    noted = (index.planner_data or {}).get(name)
    if noted is not None:
        return tuple(noted)
    root, _, rest = name.partition(".")
    kind, _, inner = rest.partition(".")
    if root == "state_dict" or not inner:
        return (root, rest) if rest else (root,)
    return (root, kind, *inner.rpartition(".")[::2]) if kind == "state" else (root, kind, inner)


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles the records that torch writes into the index, and nothing that could run code."""

    _RECORDS = frozenset(
        {"Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"}
        | {"TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo"}
    )

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "pathlib":
            return PurePosixPath  # where it was saved: only a note, and perhaps of another system
        records = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        layout = (module, name) == ("torch.serialization", "_get_layout")
        if (records and name in self._RECORDS) or layout or (module, name) == ("collections", "OrderedDict"):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype | torch.layout)):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"The index of the shards asks for {module}.{name}, which could run code. If you trust the checkpoint, "
            "load it with weights_only=False."
        )
