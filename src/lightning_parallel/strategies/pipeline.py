"""Pipeline parallel alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from lightning_parallel.mesh import MeshSizes
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.base import MeshStrategy
from lightning_parallel.strategies.ranks import DEFAULT_TIMEOUT


class PipelineParallel(MeshStrategy):
    """The layers split into stages, and each batch into microbatches that flow through them.

    The LightningModule does not change: each stage runs its ``training_step`` with the parameters that it holds, and
    what crosses a boundary is found while it runs. Every pipeline schedule of torch is here (GPipe, arXiv:1811.06965;
    1F1B, arXiv:2104.04473; zero bubble, arXiv:2401.10241; DualPipeV, from DeepSeek's DualPipe).

    Args:
        size: Number of ranks in a pipeline; ``"auto"`` is every device.
        schedule: ``GPipe``, ``1F1B``, ``Interleaved1F1B``, ``LoopedBFS``, ``InterleavedZeroBubble``, ``ZBVZeroBubble``,
            ``DualPipeV``, or the path of a CSV file with the compute actions of each rank in a row (``0F0,0F1,0B0,…``).
        microbatches: Into how many microbatches a training batch is cut. A batch with fewer samples gives fewer; one
            that does not divide gives unequal ones, each weighted by its samples. Default: twice the stages.
        virtual_stages: Stages on each rank, for the schedules that have several. Default: what the schedule needs.
        balance: ``"even"`` gives every stage as many blocks, ``"cost"`` makes the costliest stage as cheap as possible,
            the stem and the head counted.
        boundaries: Names of the blocks with which the stages after the first begin.
        batch_dims: Glob of an entry of the batch (``"1"``, ``"attention_mask"``, ``"images.*"``) to the dim that counts
            its samples, ``None`` for an entry that every microbatch gets whole. Default: dim 0 of every tensor.
        evaluation_microbatches: The same for validation, test and predict. One keeps every number that a step computes
            from its whole batch; more keep the stages busy.
        reduce_every_microbatch: Beside ``fsdp``, reduce gradients in the backward of each microbatch and keep them in
            shards, where the default keeps them whole until the step's one reduction: less memory, more to send.
        measure: Note when each forward and backward of a training step began and ended, for
            ``trainer.strategy.pipeline_timeline(measured=True)``. An accelerator is waited for after each.
        plan: Glob of module name to role, or a ``ParallelPlan``: the roles ``block``, ``stem`` and ``head``.
        compile: Compile each block; a dict is passed to ``torch.compile``.
        token_weighted_loss: Weight a mean cross entropy by its number of valid tokens over microbatches, so that
            unequal numbers of ignored labels give one device's loss and gradients.
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
        schedule: str = "1F1B",
        microbatches: int | None = None,
        virtual_stages: int | None = None,
        balance: Literal["even", "cost"] = "even",
        boundaries: list[str] | None = None,
        batch_dims: dict[str, int | None] | None = None,
        evaluation_microbatches: int = 1,
        reduce_every_microbatch: bool = False,
        measure: bool = False,
        plan: dict[str, str] | ParallelPlan | None = None,
        compile: bool | dict[str, Any] = False,
        token_weighted_loss: bool = False,
        error_if_nonfinite: bool = False,
        save_distributed_checkpoint: bool = True,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        self.requested_size, self.requested_plan = size, plan
        self.options = {
            "pipeline": {
                "schedule": schedule,
                "microbatches": microbatches,
                "virtual_stages": virtual_stages,
                "balance": balance,
                "boundaries": boundaries,
                "batch_dims": batch_dims,
                "evaluation_microbatches": evaluation_microbatches,
                "reduce_every_microbatch": reduce_every_microbatch,
                "measure": measure,
            }
        }
        super().__init__(
            MeshSizes(pp=size),
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
