"""Shards alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_parallel.mesh import MeshSizes
from lightning_parallel.schemes.data import FullyShardedOptions, mixed_precision_policy
from lightning_parallel.strategies.base import MeshStrategy
from lightning_parallel.strategies.ranks import DEFAULT_TIMEOUT


class FullyShardedDataParallel(MeshStrategy):
    """Parameters, gradients and optimizer state in shards (torch's ``fully_shard``), block by block.

    The equivalents of ZeRO's stages (arXiv:1910.02054): 3 is the default, 2 is ``reshard_after_forward=False``, 1 is
    ``optimizer_state_only=True``.

    Args:
        size: Number of shards; ``"auto"`` is every device.
        reshard_after_forward: Give a block's gathered parameters back after its forward and gather them again for its
            backward (less memory, half as much again to send). An int: keep them in shards of that many ranks.
        optimizer_state_only: Keep whole parameters and gradients through an accumulation window; only the optimizer
            state and its parameters are sharded.
        mp_policy: Dtypes of parameters, reductions and outputs; a mapping such as ``{param_dtype: bfloat16}`` will do.
            The Trainer's ``precision="bf16-mixed"`` is autocast, and needs none.
        cpu_offload: Keep shards, gradients and optimizer state in host memory.
        prefetch: Blocks to gather ahead; 0 leaves it to FSDP (one).
        plan: Glob of module name to role; only ``block`` matters here. Default: the largest lists of equal modules.
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
        reshard_after_forward: bool | int = True,
        optimizer_state_only: bool = False,
        mp_policy: MixedPrecisionPolicy | dict[str, Any] | None = None,
        cpu_offload: bool = False,
        prefetch: int = 0,
        plan: dict[str, str] | None = None,
        compile: bool | dict[str, Any] = False,
        token_weighted_loss: bool = False,
        error_if_nonfinite: bool = False,
        save_distributed_checkpoint: bool = True,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        self.requested_size = size
        self.options = {
            "fully_sharded": FullyShardedOptions(
                reshard_after_forward=reshard_after_forward,
                optimizer_state_only=optimizer_state_only,
                mp_policy=mixed_precision_policy(mp_policy),
                cpu_offload=cpu_offload,
                prefetch=prefetch,
            )
        }
        super().__init__(
            MeshSizes(fsdp=size),
            plan=plan,
            compile=compile,
            token_weighted_loss=token_weighted_loss,
            error_if_nonfinite=error_if_nonfinite,
            save_distributed_checkpoint=save_distributed_checkpoint,
            weights_only=weights_only,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **self.options,
        )
