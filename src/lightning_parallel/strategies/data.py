"""Replicas alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from lightning_parallel.mesh import MeshSizes
from lightning_parallel.strategies.base import MeshStrategy
from lightning_parallel.strategies.ranks import DEFAULT_TIMEOUT


class DataParallel(MeshStrategy):
    """Every rank holds the whole model; gradients are averaged in buckets while backward runs.

    Args:
        size: Number of replicas; ``"auto"`` is every device.
        find_unused_parameters: The parameters that get a gradient change from step to step or from rank to rank.
            Parameters that are never used need nothing.
        compile: Compile each block; a dict is passed to ``torch.compile``.
        token_weighted_loss: Weight a mean cross entropy by its number of valid tokens over the ranks.
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
        find_unused_parameters: bool = False,
        compile: bool | dict[str, Any] = False,
        token_weighted_loss: bool = False,
        error_if_nonfinite: bool = False,
        save_distributed_checkpoint: bool = True,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        self.requested_size = size
        self.options = {"find_unused_parameters": find_unused_parameters}
        super().__init__(
            MeshSizes(ddp=size),
            compile=compile,
            token_weighted_loss=token_weighted_loss,
            error_if_nonfinite=error_if_nonfinite,
            save_distributed_checkpoint=save_distributed_checkpoint,
            weights_only=weights_only,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **self.options,
        )
