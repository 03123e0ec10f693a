"""Context parallel alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.mesh import MeshSizes
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.recipe import ContextOptions
from lightning_parallel.strategies.base import MeshStrategy
from lightning_parallel.strategies.ranks import DEFAULT_TIMEOUT

_METHODS = ("ring", "allgather", "ulysses")


class ContextParallel(MeshStrategy):
    """The sequence split over the ranks, which all work on the same samples and exchange keys and values.

    Outside of the repeated blocks the module sees whole sequences, as on one device: positions, masks, losses and
    metrics mean what they mean there. Inside, attention is exchanged, and a block in which anything else mixes tokens
    is refused when it first runs.

    Args:
        size: Number of ranks that share a sequence; ``"auto"`` is every device.
        method: How attention is exchanged: ``"ring"`` sends keys and values round while it computes (arXiv:2310.01889),
            ``"allgather"`` gathers them, ``"ulysses"`` splits the heads instead (arXiv:2309.14509; needs as many heads
            as divide by the ranks).
        balanced: Each rank holds a part from the head and one from the tail of the sequence, or of each document where
            the batch tells them (``position_ids`` that begin anew, or ``cu_seqlens``), so that under a causal mask all
            have the same work; otherwise one part in order.
        plan: Glob of module name to role, or a ``ParallelPlan``; of roles, only ``block`` matters here.
        compile: Compile each block; a dict is passed to ``torch.compile``.
        error_if_nonfinite: Raise on every rank, before the step, where the norm that gradients are clipped by is not
            finite.
        save_distributed_checkpoint: A folder with each rank's shards, or one whole file written by rank 0.
        weights_only: As for ``torch.load``, where a checkpoint is restored by ``fit``.
        process_group_backend: Backend of the default process group; by default the device's.
        timeout: Of collectives.

    Raises:
        ParallelConfigError: An unknown method.
    """

    def __init__(
        self,
        size: int | Literal["auto"] = "auto",
        *,
        method: Literal["ring", "allgather", "ulysses"] = "ring",
        balanced: bool = True,
        plan: dict[str, str] | ParallelPlan | None = None,
        compile: bool | dict[str, Any] = False,
        error_if_nonfinite: bool = False,
        save_distributed_checkpoint: bool = True,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        if method not in _METHODS:
            raise ParallelConfigError(f"method={method!r}: attention is exchanged by one of {', '.join(_METHODS)}.")
        self.requested_size, self.requested_plan = size, plan
        self.options = {"context": ContextOptions(method=method, balanced=balanced)}
        super().__init__(
            MeshSizes(cp=size),
            plan=plan,
            compile=compile,
            error_if_nonfinite=error_if_nonfinite,
            save_distributed_checkpoint=save_distributed_checkpoint,
            weights_only=weights_only,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **self.options,
        )
