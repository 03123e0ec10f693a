"""Where the elements that this rank holds lie in the whole tensor.

torch keeps the same knowledge, but not exactly enough to save by. It takes every local tensor for one block,
while a packed projection is several; and where ``fully_shard`` splits a tensor-parallel shard into parts of
different sizes, its formula names rows that another rank holds (a vocabulary of 50257 over ``fsdp=4, tp=2``).
So the blocks are worked out here, from the order in which the splits were really made, and held against the
shape of the local tensor before anything is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_parallel._torch import StridedShard
from lightning_parallel.errors import ParallelConfigError


class Span(NamedTuple):
    """Consecutive indices along one dim."""

    start: int
    length: int


class Block(NamedTuple):
    """A box of elements: its first index in the whole tensor and in the local one, and its size, per dim."""

    offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    size: tuple[int, ...]

    def of_whole(self, tensor: Tensor) -> Tensor:
        """The view of the block in the whole tensor."""
        return _narrow(tensor, self.offset, self.size)

    def of_local(self, tensor: Tensor) -> Tensor:
        """The view of the block in the local tensor."""
        return _narrow(tensor, self.local_offset, self.size)


class Split(NamedTuple):
    """One split: of dim ``dim``, over mesh axis number ``axis``, after cutting the dim into ``pieces``."""

    axis: int
    dim: int
    pieces: int

    def spans(self, length: int, parts: int) -> list[list[Span]]:
        """The indices of each part when a dim of ``length`` is split into ``parts`` as ``torch.chunk`` does."""
        pieces = [_chunk(span, parts) for span in _chunk(Span(0, length), self.pieces)]
        return [[piece[part] for piece in pieces] for part in range(parts)]


def splits(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[Split]:
    """The splits in the order in which they were made.

    A strided shard over an axis says that the dim was first cut into ``split_factor`` pieces. If the axes to
    its right that split the same dim have as many ranks, those *are* the pieces: the axis came after them, as
    ``fully_shard`` comes after tensor parallelism. Otherwise they are the parts of a packed tensor.

    Raises:
        ParallelConfigError: A placement that no stored tensor can have, such as a pending sum.
    """
    order: list[Split] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, Replicate) or mesh_shape[axis] == 1:
            continue
        if not isinstance(placement, Shard | StridedShard):
            raise ParallelConfigError(
                f"A tensor placed as {placement} cannot be saved or loaded: its elements are on no rank. "
                "Redistribute it to Shard or Replicate placements first."
            )
        pieces = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        made = 1
        position = 0
        for before, split in enumerate(order, start=1):
            if made != pieces and split.dim == placement.dim:
                made, position = made * mesh_shape[split.axis], before
        if made == pieces:
            order.insert(position, Split(axis, placement.dim, 1))
        else:
            order.insert(0, Split(axis, placement.dim, pieces))
    return order


def local_spans(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[list[Span]]:
    """Per dim, the indices that the rank at ``coordinate`` of the mesh holds, in its local order."""
    spans = [[Span(0, length)] for length in shape]
    for split in splits(mesh_shape, placements):
        held = spans[split.dim]
        parts = split.spans(sum(span.length for span in held), mesh_shape[split.axis])
        spans[split.dim] = _select(held, parts[coordinate[split.axis]])
    return spans


def blocks(tensor: Tensor) -> list[Block]:
    """The blocks of the whole tensor that this rank holds; one for a plain tensor, none off the mesh.

    Raises:
        ParallelConfigError: The local tensor is not of the size that its placements give.
    """
    if not isinstance(tensor, DTensor):
        origin = (0,) * tensor.dim()
        return [Block(origin, origin, tuple(tensor.shape))]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    spans = local_spans(tensor.shape, tensor.device_mesh.shape, tensor.placements, coordinate)
    expected = tuple(sum(span.length for span in held) for held in spans)
    observed = tuple(local(tensor).shape)
    if observed != expected:
        raise ParallelConfigError(
            f"A tensor of shape {tuple(tensor.shape)} placed as {tensor.placements} over a mesh of "
            f"{tuple(tensor.device_mesh.shape)} has {expected} elements at {tuple(coordinate)}, but the local tensor "
            f"there is {observed}. Shard it with fully_shard or distribute_tensor, which follow torch.chunk."
        )
    return [
        Block(tuple(s.start for s, _ in part), tuple(at for _, at in part), tuple(s.length for s, _ in part))
        for part in product(*(list(_with_position(held)) for held in spans))
    ]


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without autograd and without communication; a plain tensor is its own."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy into ``target`` this rank's part of the plain tensor ``whole``. No communication.

    Shape: both have the same global shape. Dtype and device are converted.
    """
    part = local(target)
    for block in blocks(target):
        block.of_local(part).copy_(block.of_whole(whole))


@torch.no_grad()
def gather(tensor: DTensor) -> Tensor:
    """The whole tensor, on the mesh's device, on every rank of its mesh. A collective.

    Bit for bit what the ranks hold: bytes are moved, nothing is added up. Splits are undone last to first.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ParallelConfigError("This rank is not on the tensor's mesh, so it cannot gather it.")
    blocks(tensor)  # checks the local shape
    # Weights that are offloaded to the host are gathered over the mesh's own device.
    part = local(tensor).to(mesh.device_type)
    order = splits(mesh.shape, tensor.placements)
    lengths = [_lengths(split.dim, tensor.shape, mesh.shape, order[:i], coordinate) for i, split in enumerate(order)]
    for split, length in zip(reversed(order), reversed(lengths), strict=True):
        spans = split.spans(length, mesh.shape[split.axis])
        held_lengths = [sum(span.length for span in held) for held in spans]
        peers = _all_gather(part, split.dim, held_lengths, mesh.get_group(split.axis))
        part = part.new_empty([length if dim == split.dim else size for dim, size in enumerate(part.shape)])
        for held, peer in zip(spans, peers, strict=True):
            for span, at in _with_position(held):
                part.narrow(split.dim, *span).copy_(peer.narrow(split.dim, at, span.length))
    return part


def _lengths(
    dim: int, shape: Sequence[int], mesh_shape: Sequence[int], order: Sequence[Split], coordinate: Sequence[int]
) -> int:
    """The length of ``dim`` here after the splits of ``order``."""
    length = shape[dim]
    for split in order:
        if split.dim == dim:
            length = sum(s.length for s in split.spans(length, mesh_shape[split.axis])[coordinate[split.axis]])
    return length


def _all_gather(part: Tensor, dim: int, lengths: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Every peer's part; they differ only in the length of ``dim``."""
    shapes = [torch.Size((*part.shape[:dim], length, *part.shape[dim + 1 :])) for length in lengths]
    longest = max(shape.numel() for shape in shapes)
    if longest == 0:
        return [part.new_empty(shape) for shape in shapes]
    # As bytes: not every backend knows every dtype.
    sent = part.new_zeros(longest)
    sent[: part.numel()] = part.flatten()
    received = [torch.empty_like(sent) for _ in shapes]
    dist.all_gather([flat.view(torch.uint8) for flat in received], sent.view(torch.uint8), group=group)
    return [flat[: shape.numel()].view(shape) for flat, shape in zip(received, shapes, strict=True)]


def _chunk(span: Span, parts: int) -> list[Span]:
    """The span cut as ``torch.chunk`` cuts, with empty spans at the end when there are too few indices."""
    size = -(-span.length // parts)
    cuts = [min(part * size, span.length) for part in range(parts + 1)]
    return [Span(span.start + start, end - start) for start, end in pairwise(cuts)]


def _select(held: Sequence[Span], positions: Sequence[Span]) -> list[Span]:
    """The indices that stand at ``positions`` of the list of indices ``held``. Neighbours are joined."""
    chosen: list[Span] = []
    for wanted in positions:
        for span, at in _with_position(held):
            start, end = max(wanted.start, at), min(wanted.start + wanted.length, at + span.length)
            if start >= end:
                continue
            part = Span(span.start + start - at, end - start)
            if chosen and sum(chosen[-1]) == part.start:
                part = Span(chosen[-1].start, chosen.pop().length + part.length)
            chosen.append(part)
    return chosen or [Span(0, 0)]


def _with_position(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Each span with the number of indices before it."""
    position = 0
    for span in spans:
        yield span, position
        position += span.length


def _narrow(tensor: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
