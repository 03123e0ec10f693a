"""What torch's distributed checkpoint reads and writes for each tensor: the blocks that this rank holds."""

from __future__ import annotations

import io
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_parallel._torch import HOST
from lightning_parallel.checkpoint.layout import Block, blocks, local
from lightning_parallel.checkpoint.tree import Path
from lightning_parallel.schemes.pipeline.ghost import is_ghost


class BlockSavePlanner(DefaultSavePlanner):
    """torch's planner with several blocks a tensor where it has them, and with exact ones.

    The base class does the rest: names for nested dicts, each replica written by one rank, and the check that
    the blocks of all ranks cover every tensor once.

    Args:
        paths: Where each stored value belongs in the nested checkpoint, which is kept in the index.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._paths = dict(paths)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the flat dict of what to store."""
        self.state_dict, self.mappings, self.is_coordinator = state_dict, self._paths, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Offer every block of every tensor, and every other value, that this rank has."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, Tensor):
                items += [_write_item(name, value, block) for block in _stored_blocks(value)]
            else:
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The block of the local tensor that starts at ``index.offset`` of the whole one."""
        value = self.state_dict[index.fqn]
        return _at(value, index) if isinstance(value, Tensor) else value


class BlockLoadPlanner(LoadPlanner):
    """Reads into the blocks that this rank holds, from whatever blocks the file has.

    Args:
        weights_only: Passed to ``torch.load`` for values that are no tensors.
    """

    def __init__(self, *, weights_only: bool | None) -> None:
        self._weights_only = weights_only
        self._targets: dict[str, Any] = {}
        self._index: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the flat dict whose tensors are to be filled, and whose other values are to be replaced."""
        self._targets, self._index = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        """Ask for the parts of the stored blocks that overlap this rank's.

        Raises:
            RuntimeError: The stored blocks leave a part of a tensor open.
        """
        assert self._index is not None
        items: list[ReadItem] = []
        for name, target in self._targets.items():
            stored = self._index.state_dict_metadata[name]
            if isinstance(stored, BytesStorageMetadata):
                items.append(_read_bytes(name))
            elif isinstance(stored, TensorStorageMetadata):
                wanted = _stored_blocks(target)
                chunks = [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.size)) for b in wanted]
                found = create_read_items_for_chunk_list(name, stored, chunks)
                found = [item for item in found if prod(item.lengths)]
                if sum(prod(item.lengths) for item in found) < sum(prod(block.size) for block in wanted):
                    raise RuntimeError(f"The checkpoint has only a part of {name!r}: it is damaged or incomplete.")
                items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a value that is no tensor."""
        self._targets[read_item.dest_index.fqn] = torch.load(value, map_location=HOST, weights_only=self._weights_only)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The view to copy into."""
        block = _at(self._targets[read_item.dest_index.fqn], read_item.dest_index)
        return Block((), tuple(read_item.dest_offsets), tuple(read_item.lengths)).of_local(block)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Not used by torch's readers of files."""
        raise NotImplementedError

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the view was written in place."""


def _stored_blocks(tensor: Tensor) -> list[Block]:
    """The blocks with elements; of a tensor without any, the one that says it is there. Of a ghost none."""
    if is_ghost(tensor):
        return []
    held = blocks(tensor)
    return [block for block in held if prod(block.size)] if tensor.numel() else held[:1]


def _at(tensor: Tensor, index: MetadataIndex) -> Tensor:
    block = next(block for block in _stored_blocks(tensor) if torch.Size(block.offset) == index.offset)
    return block.of_local(local(tensor))


def _write_item(name: str, tensor: Tensor, block: Block) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(block.offset), torch.Size(block.size))
    return WriteItem(
        MetadataIndex(name, chunk.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), tensor.size()),
    )


def _read_bytes(name: str) -> ReadItem:
    start = torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), start, MetadataIndex(name), start, start)
