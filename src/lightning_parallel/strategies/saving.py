"""Checkpoints: one folder of shards, or one whole file."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import checkpoint as checkpoints
from lightning_parallel._lightning import Path
from lightning_parallel._torch import all_ranks_reach
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.step import EagerStep
from lightning_parallel.strategies.ranks import RankStrategy


class SavingStrategy(RankStrategy):
    """Saves and loads what is spread over the ranks."""

    _save_distributed_checkpoint: bool
    _weights_only: bool | None
    _step: EagerStep | None = None
    _num_interrupts = 0
    _has_averages = False  # a callback keeps a running average of the weights

    @property
    def step(self) -> EagerStep:
        """Who runs forward and backward."""
        assert self._step is not None, "the module is parallelised in setup"
        return self._step

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._wait_for_interrupted_ranks()
        full = not self._save_distributed_checkpoint
        state = checkpoints.model_state_dict(self.lightning_module, full=full, is_writer=self._writes_stage)
        return self._whole(state) if full else state

    @property
    def _writes_stage(self) -> bool:
        """Whether this rank keeps what is gathered from its stage: rank 0, and its peers on the other stages."""
        return self.global_rank % (self.mesh.sizes.world // self.mesh.sizes.pp) == 0

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """What the stages gathered, together on rank 0."""
        if self.mesh.sizes.pp > 1 and self._writes_stage:
            return checkpoints.collect_stages(state, self.mesh.pp.get_group(), self.root_device)  # type: ignore[no-any-return]
        return state

    def _wait_for_interrupted_ranks(self) -> None:
        """An exception on one rank must not start to save alone: its peers are in other collectives, or gone.

        Raises:
            RuntimeError: After an exception here, where the other ranks do not stop with one of their own.
        """
        if self._trainer is None or self._trainer.state.status != TrainerStatus.INTERRUPTED:
            return
        waited = timedelta(seconds=5)
        if not all_ranks_reach(f"interrupted {self._num_interrupts}", waited):
            raise RuntimeError(
                f"No checkpoint is saved after this exception: only rank {self.global_rank} is known to have stopped "
                f"within {waited.seconds} s, and every rank must take part in saving."
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._num_interrupts += 1
        super().on_exception(exception)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        full = not self._save_distributed_checkpoint
        state = checkpoints.optimizer_state_dict(
            optimizer, self.lightning_module, full=full, is_writer=self._writes_stage
        )
        return self._whole(state) if full else state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Path, storage_options: Any | None = None) -> None:
        path = self.broadcast(filepath)  # ranks may disagree: a timestamp, say
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(
                checkpoints.to_host(checkpoint, is_writer=self.is_global_zero), path, storage_options
            )
            return
        if storage_options is not None:
            raise ParallelConfigError(
                "storage_options go to a CheckpointIO, which writes one file. Use save_distributed_checkpoint=False."
            )
        checkpoints.save_sharded(path, checkpoint)

    @override
    def load_checkpoint(self, checkpoint_path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        # Lightning drops the Trainer's weights_only when it restores after setup.
        weights_only = self._weights_only if weights_only is None else weights_only
        self.step.reshard()
        if checkpoints.is_sharded_checkpoint(path):
            return checkpoints.load_sharded(
                path, self.lightning_module, weights_only=weights_only, optimizers=bool(self.optimizers)
            )
        checkpoint = super().load_checkpoint(path, weights_only=weights_only)
        if self._has_averages:  # the callback loads its average, and the module's weights, itself
            assert self.lightning_module is not None
            checkpoint = checkpoints.lay_out(checkpoint, self.lightning_module)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self.step.reshard()
        checkpoints.load_model_state_dict(self.lightning_module, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            checkpoints.load_optimizer_state_dict(optimizer, self.lightning_module, state)

    @override
    def remove_checkpoint(self, filepath: Path) -> None:
        if self.is_global_zero:
            checkpoints.remove(filepath)
