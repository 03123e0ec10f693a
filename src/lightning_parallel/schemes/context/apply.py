"""Puts context parallelism into a module: its blocks on rows, and what is around them on tensors in rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel._torch import tree_map
from lightning_parallel.errors import PlanError
from lightning_parallel.schemes.context.blocks import Blocks
from lightning_parallel.schemes.context.documents import documents_of
from lightning_parallel.schemes.context.flex import FlexNames
from lightning_parallel.schemes.context.registry import Registered
from lightning_parallel.schemes.context.rows import Context
from lightning_parallel.schemes.context.shard import SequenceShard, gathered, shards_in
from lightning_parallel.schemes.pipeline.ghost import is_ghost


class ContextSplit:
    """One module over the context axis. The batch is the same on all its ranks, and so is what a step computes.

    Args:
        module: The LightningModule.
        blocks: Names of the repeated blocks.
        context: The axis.
        is_split: The module is split over ``tp`` besides.

    Raises:
        PlanError: There are no blocks.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[str], context: Context, *, is_split: bool) -> None:
        if not blocks:
            raise PlanError(
                f"cp={context.size} needs the repeated blocks of {type(module).__name__}, in which sequences lie in "
                "rows, and there is no list of layers. Give them the role block in plan=."
            )
        self._module, self.context, self._is_split = module, context, is_split
        self._names = list(blocks)
        configs = {
            id(child.config): child.config
            for child in module.modules()
            if hasattr(getattr(child, "config", None), "_attn_implementation")
        }
        self._registered = Registered([*configs.values()])

    def install(self) -> None:
        """Take over the calls of the blocks, of embeddings, and of what tensor parallelism has taken over."""
        modules = dict(self._module.named_modules())
        blocks = {id(modules[name]): name for name in self._names}
        self._blocks = runner = Blocks(self.context, blocks)
        self._flex = FlexNames(self._module, runner.recomputation.call_flex)
        inside = {id(child) for name in self._names for child in modules[name].modules()}
        for child in modules.values():
            if id(child) in blocks:
                _take_over(child, partial(runner.call, child))
            elif id(child) in inside:
                continue
            elif isinstance(child, nn.Embedding):
                _take_over(child, partial(self._embed, child))
            elif self._is_split and any(p is not None for p in child._parameters.values()):
                _take_over(child, self._by_rows)

    def _embed(self, embedding: nn.Embedding, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Ids (…, sequence) become rows: only those are looked up, unless a subclass makes something of all of them."""
        ids = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(ids, Tensor) or is_ghost(ids) or any(map(is_ghost, embedding._parameters.values())):
            return inner(*args, **kwargs)
        looks_up = type(embedding).forward is nn.Embedding.forward
        if isinstance(ids, SequenceShard):
            return ids.like(inner(ids.local)) if looks_up else inner(gathered(ids))
        if ids.ndim == 0 or ids.size(-1) < 2:
            return inner(ids)
        rows, dim = self.context.rows(ids.size(-1)), ids.ndim - 1
        if looks_up:
            return SequenceShard(inner(rows.take(ids, -1)), rows, dim)
        found = inner(ids)
        is_one_each = isinstance(found, Tensor) and found.shape[: ids.ndim] == ids.shape
        return SequenceShard(rows.take(found, dim), rows, dim) if is_one_each else found

    def _by_rows(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer outside of the blocks that tensor parallelism runs: it gets rows as plain tensors."""
        shards = shards_in((args, kwargs))
        if not shards:
            return inner(*args, **kwargs)
        lead = shards[0]
        if any(s.rows is not lead.rows or s.sequence_dim != lead.sequence_dim for s in shards) or (
            lead.sequence_dim == lead.ndim - 1
        ):
            args, kwargs = tree_map(gathered, (args, kwargs))
            return inner(*args, **kwargs)
        args, kwargs = tree_map(lambda v: v.local if isinstance(v, SequenceShard) else v, (args, kwargs))
        return tree_map(lambda v: lead.like(v) if isinstance(v, Tensor) else v, inner(*args, **kwargs))

    def begin_forward(self) -> None:
        """What a backward has left of where it was."""
        self._blocks.leave()

    @contextmanager
    def running(self, *, has_backward: bool, batch: Any = None) -> Iterator[None]:
        """Around a step, or its backward, in which blocks or parts of them may run again, on the same rows.

        Args:
            has_backward: There is one inside.
            batch: What a step is called with, the same on all ranks. It tells the documents of its sequences.
        """
        if batch is not None and not self._registered.is_entered and self.context.balanced:
            self.context.documents = documents_of(batch)
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # a kernel for whole layers, which nothing can redirect
        try:
            with (
                self._registered,
                self._flex.redirected(),
                self._blocks.recomputation.running() if has_backward else nullcontext(),
            ):
                yield
        finally:
            self._blocks.leave()
            torch.backends.mha.set_fastpath_enabled(fast)


def _take_over(module: nn.Module, call: Callable[..., Any]) -> None:
    """Outside of all hooks on the module, FSDP's among them, which want plain tensors."""
    inner = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = partial(call, inner)
