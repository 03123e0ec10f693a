"""How many bytes attention over a spread sequence sends, exactly."""

from __future__ import annotations

from lightning_parallel.schemes.context.layout import Layout
from lightning_parallel.schemes.context.ulysses import Heads


def bytes_sent(
    method: str,
    *,
    layout: Layout,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    value_dim: int | None = None,
    rank: int = 0,
    gathers_again: bool = True,
) -> tuple[int, int]:
    """Bytes that ``rank`` sends in forward and in backward of one call.

    With b sequences of s = size × ``num_local`` positions (padding included) over P ranks, and h_kv key elements a
    position, ring and all-gather send 2·b·s·h_kv·(P-1)/P elements in forward: a collective is counted as its ring
    algorithm. Backward sends them again, and as many gradients in float32 (float64 for float64). Ulysses sends
    (2h + 2·h_kv)·b·s·(P-1)/P² elements each way, and more where a key head is used on several ranks.

    Args:
        itemsize: Bytes of an element of query, key and value.
        value_dim: ``head_dim`` unless given.
        rank: Matters to Ulysses alone, where key heads do not divide.
        gathers_again: False for all-gather with dropout or a mask that learns: keys and values are kept then.
    """
    value_dim = head_dim if value_dim is None else value_dim
    rows, others = batch * layout.num_local, [r for r in range(layout.size) if r != rank]
    if method == "ulysses":
        split = Heads(heads, kv_heads, layout.size)
        query_and_out = len(others) * heads // layout.size * (head_dim + value_dim)
        sent = sum(split.num_keys(r) for r in others) * (head_dim + value_dim)
        returned = len(others) * split.num_keys(rank) * (head_dim + value_dim)
        return rows * (query_and_out + sent) * itemsize, rows * (query_and_out + returned) * itemsize
    elements = len(others) * rows * kv_heads * (head_dim + value_dim)
    again = itemsize if gathers_again else 0
    return elements * itemsize, elements * (again + max(itemsize, 4))
