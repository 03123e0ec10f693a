"""Rows between the ranks of the context axis: several tensors in one message, and back into order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel._torch import all_gather_single, reduce_scatter_single
from lightning_parallel.schemes.context.layout import Layout


def pack(*tensors: Tensor) -> Tensor:
    """Several tensors as one flat one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(packet: Tensor, *shapes: Sequence[int]) -> list[Tensor]:
    """Views of the tensors in a flat one."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(*shape) for part, shape in zip(packet.split(sizes), shapes, strict=True)]


class Hop:
    """A packet on its way to the next rank, and that of the rank before on its way here.

    Args:
        packet: Flat; not to be changed before ``wait``.
        tag: Tells apart what is under way at the same time.
    """

    def __init__(self, packet: Tensor, group: dist.ProcessGroup, *, tag: int) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._sent, self._received = packet, torch.empty_like(packet)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, packet, group=group, group_peer=(rank + 1) % size, tag=tag),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % size, tag=tag),
            ]
        )

    def wait(self) -> Tensor:
        """What the rank before sent."""
        for work in self._works:
            work.wait()
        return self._received


def gather(packet: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The packets of all ranks, shape (size, numel)."""
    whole = packet.new_empty((dist.get_world_size(group), packet.numel()))
    if whole.shape[0] == 1:
        return whole.copy_(packet)
    all_gather_single(whole.view(-1), packet, group=group)
    return whole


def scatter_sum(packets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of what each has for this one.

    Args:
        packets: For each rank, shape (size, numel).
    """
    if packets.shape[0] == 1:
        return packets[0]
    total = torch.empty_like(packets[0])
    reduce_scatter_single(total, packets.view(-1), group=group)
    return total


def exchange(packets: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Send each rank its packet, and return those from each.

    Args:
        sizes: Elements that each rank sends here.
    """
    if len(packets) == 1:
        return packets
    received = packets[0].new_empty(sum(sizes))
    sent = [packet.numel() for packet in packets]
    dist.all_to_all_single(received, torch.cat(list(packets)), list(sizes), sent, group=group)
    parts: tuple[Tensor, ...] = received.split(list(sizes))
    return parts


def layout_to_order(ranks: Sequence[Tensor], layout: Layout) -> Tensor:
    """The rows of the sequence in order, without padding, out of those of each rank: dim 2."""
    return torch.cat(list(ranks), 2).index_select(2, layout.order(ranks[0].device))


def order_to_layout(whole: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """The rows of each rank out of those of the sequence (dim 2), padding zero."""
    rows = whole.new_zeros((*whole.shape[:2], layout.size * layout.num_local, whole.shape[-1]))
    parts: tuple[Tensor, ...] = rows.index_copy_(2, layout.order(whole.device), whole).split(layout.num_local, 2)
    return parts
