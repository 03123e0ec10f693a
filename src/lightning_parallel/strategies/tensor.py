"""Tensor parallel alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from lightning_parallel.mesh import MeshSizes
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.base import MeshStrategy
from lightning_parallel.strategies.ranks import DEFAULT_TIMEOUT


class TensorParallel(MeshStrategy):
    """Each layer split over the ranks, which all work on the same samples (Megatron-LM, arXiv:1909.08053).

    Args:
        size: Number of ranks that share a layer; ``"auto"`` is every device.
        plan: Glob of module name to role, or a ``ParallelPlan``. Default: the module's ``parallel_plan()``, else what a
            Hugging Face model publishes.
        sequence_parallel: Between the projections, split norms, dropout and the residual stream along the sequence
            (arXiv:2205.05198): the same bytes sent, less memory.
        compile: Compile each block; a dict is passed to ``torch.compile``.
        error_if_nonfinite: Raise on every rank, before the step, where the norm that gradients are clipped by is not
            finite.
        save_distributed_checkpoint: A folder with each rank's shards, or one whole file written by rank 0.
        weights_only: As for ``torch.load``, where a checkpoint is restored by ``fit``.
        process_group_backend: Backend of the default process group; by default the device's.
        timeout: Of collectives.
    """

    def __init__(
        self,
        size: int | Literal["auto"] = "auto",
        *,
        plan: dict[str, str] | ParallelPlan | None = None,
        sequence_parallel: bool = True,
        compile: bool | dict[str, Any] = False,
        error_if_nonfinite: bool = False,
        save_distributed_checkpoint: bool = True,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        self.requested_size, self.requested_plan = size, plan
        self.options = {"sequence_parallel": sequence_parallel}
        super().__init__(
            MeshSizes(tp=size),
            plan=plan,
            compile=compile,
            error_if_nonfinite=error_if_nonfinite,
            save_distributed_checkpoint=save_distributed_checkpoint,
            weights_only=weights_only,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **self.options,
        )
