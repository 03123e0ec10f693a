"""All axes on one mesh."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.mesh import MeshSizes, Size
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.base import MeshStrategy
from lightning_parallel.strategies.context import ContextParallel
from lightning_parallel.strategies.data import DataParallel
from lightning_parallel.strategies.fully_sharded import FullyShardedDataParallel
from lightning_parallel.strategies.pipeline import PipelineParallel
from lightning_parallel.strategies.ranks import DEFAULT_TIMEOUT
from lightning_parallel.strategies.tensor import TensorParallel


class HybridParallel(MeshStrategy):
    """Pipeline × replicas × shards × context × tensor parallel on one device mesh, for an unchanged LightningModule.

    Each axis takes a size, ``"auto"`` (at most one: the devices left over), or the scheme's own strategy object with
    its options.

    Args:
        ddp: Replicas: each holds a whole copy (of its shards) and gradients are averaged.
        fsdp: Shards of parameters, gradients and optimizer state. With ``ddp`` this is hybrid sharding (HSDP).
        pp: Pipeline parallel: the layers split into stages, each batch into microbatches.
        cp: Context parallel: the ranks of one such group share a sample and split its sequence.
        tp: Tensor parallel: the ranks of one such group share a sample and split each layer.
        plan: Glob of module name to role, or a ``ParallelPlan``. Default: the module's ``parallel_plan()``, else what a
            Hugging Face model publishes.
        compile: Compile each block; a dict is passed to ``torch.compile``.
        token_weighted_loss: Weight a mean cross entropy by its number of valid tokens over data ranks and microbatches,
            so that unequal numbers of ignored labels give one device's loss and gradients.
        error_if_nonfinite: Raise on every rank, before the step, where the norm that gradients are clipped by is not
            finite.
        save_distributed_checkpoint: A folder with each rank's shards, or one whole file written by rank 0.
        weights_only: As for ``torch.load``, where a checkpoint is restored by ``fit`` (Lightning passes none).
        process_group_backend: Backend of the default process group; by default the device's.
        timeout: Of collectives.

    Raises:
        ParallelConfigError: Sizes that are no positive integers, or two ``"auto"``.
    """

    def __init__(
        self,
        *,
        ddp: int | Literal["auto"] | DataParallel = 1,
        fsdp: int | Literal["auto"] | FullyShardedDataParallel = "auto",
        tp: int | Literal["auto"] | TensorParallel = 1,
        cp: int | Literal["auto"] | ContextParallel = 1,
        pp: int | Literal["auto"] | PipelineParallel = 1,
        plan: dict[str, str] | ParallelPlan | None = None,
        compile: bool | dict[str, Any] = False,
        token_weighted_loss: bool = False,
        error_if_nonfinite: bool = False,
        save_distributed_checkpoint: bool = True,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        sizes = {"pp": _size(pp), "ddp": _size(ddp), "fsdp": _size(fsdp), "cp": _size(cp), "tp": _size(tp)}
        others = [size for axis, size in sizes.items() if axis != "fsdp"]
        if fsdp == "auto" and "auto" in others:
            sizes["fsdp"] = 1  # the default gives way to an axis that asks for the rest
        options: dict[str, Any] = {}
        for axis, given, kind in (
            ("ddp", ddp, DataParallel),
            ("fsdp", fsdp, FullyShardedDataParallel),
            ("cp", cp, ContextParallel),
            ("tp", tp, TensorParallel),
            ("pp", pp, PipelineParallel),
        ):
            if isinstance(given, kind):
                _check_shared_options(axis, given)
                options |= given.options
            elif isinstance(given, MeshStrategy):
                raise ParallelConfigError(f"{axis}={type(given).__name__}(…): this axis takes a {kind.__name__}.")
        for part in (tp, cp, pp):
            if plan is None and isinstance(part, TensorParallel | ContextParallel | PipelineParallel):
                plan = part.requested_plan
        super().__init__(
            MeshSizes(**sizes),
            plan=plan,
            compile=compile,
            token_weighted_loss=token_weighted_loss,
            error_if_nonfinite=error_if_nonfinite,
            save_distributed_checkpoint=save_distributed_checkpoint,
            weights_only=weights_only,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **options,
        )


def _check_shared_options(axis: str, given: MeshStrategy) -> None:
    """An option of the whole run on one axis would be lost."""
    defaults = type(given)().shared_options  # type: ignore[call-arg]  # each has a default for every argument
    for name, value in given.shared_options.items():
        if value != defaults[name]:
            raise ParallelConfigError(
                f"{axis}={type(given).__name__}({name}={value!r}): this is for the whole mesh. Give {name} to "
                "HybridParallel."
            )


def _size(given: Size | MeshStrategy) -> Any:
    return given.requested_size if isinstance(given, MeshStrategy) else given
