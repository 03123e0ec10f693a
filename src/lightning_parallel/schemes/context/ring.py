"""Ring attention (arXiv:2310.01889): keys and values go round, the next block under way while one is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_parallel.schemes.context.engine import Engine, RunningSoftmax, wide, without_autocast
from lightning_parallel.schemes.context.exchange import Hop, pack, unpack

# Of what is under way at the same time.
_BLOCKS, _GRADS = 0, 1


def ring_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, engine: Engine) -> Tensor:
    """Attention of this rank's rows.

    Block s is at rank s + i at step i. Keys and values make P - 1 hops, in backward once more, and their gradients
    P - 1 hops from the rank after the owner's on, float32 on the wire: the owner adds its own part last.
    """
    out: Tensor = _RingAttention.apply(query, key, value, mask, engine)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, engine: Engine) -> Tensor:
        rank, size = engine.rank, engine.layout.size
        running = RunningSoftmax(query, value.shape[-1])
        packet = pack(key, value) if size > 1 else key
        block = [key, value]
        with without_autocast(query.device):
            for step in range(size):
                hop = Hop(packet, engine.group, tag=_BLOCKS) if step < size - 1 else None
                engine.forward(running, query, block[0], block[1], mask, source=(rank - step) % size)
                if hop is not None:
                    packet = hop.wait()
                    block = unpack(packet, key.shape, value.shape)
        out, lse = running.result(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        ctx.engine = engine
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, mask = ctx.saved_tensors
        engine: Engine = ctx.engine
        rank, size = engine.rank, engine.layout.size
        grad_out = grad_out.contiguous()
        grad_query = torch.zeros_like(query, dtype=wide(query.dtype))
        packet = pack(key, value)
        own: Tensor | None = None
        travelling: Hop | None = None
        with without_autocast(query.device):
            for step in range(size):
                hop = Hop(packet, engine.group, tag=_BLOCKS) if step < size - 1 else None
                grads = torch.zeros_like(packet, dtype=grad_query.dtype)
                grad_keys, grad_values = unpack(grads, key.shape, value.shape)
                keys, values = unpack(packet, key.shape, value.shape)
                source = (rank - step) % size
                engine.backward(
                    (grad_query, grad_keys, grad_values), grad_out, query, keys, values, out, lse, mask, source=source
                )
                if own is None:
                    own = grads
                else:
                    grads = grads if travelling is None else grads.add_(travelling.wait())
                    travelling = Hop(grads, engine.group, tag=_GRADS)
                packet = packet if hop is None else hop.wait()
        assert own is not None
        grads = own if travelling is None else own + travelling.wait()
        grad_key, grad_value = unpack(grads, key.shape, value.shape)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None
