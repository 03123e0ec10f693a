"""Deliberately wrong strategies and modules: parity must reject each, and say where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_parallel import PipelineParallel
from lightning_parallel.step import PipelineStep
from tests.support.models import Classifier, NanoGPT


class UnsyncedDDP(DDPStrategy):
    """Replicas that never exchange gradients."""

    def configure_ddp(self) -> None:
        pass


class OneGradientByRank(NanoGPT):
    """Scales the gradient of one weight by the rank, after it was reduced."""

    def on_after_backward(self) -> None:
        gradient = self.model.h[1].mlp.c_fc.weight.grad
        assert gradient is not None
        gradient.mul_(1.0 + 1e-4 * self.global_rank)


class InitialisedByRank(Classifier):
    """Moves a weight apart on each rank once the strategy has made the ranks one."""

    def on_fit_start(self) -> None:
        self.model[0].bias.data.add_(float(self.global_rank))


class LossOfTheRank(Classifier):
    """Logs a rank's own loss where the mean over ranks is meant."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=False)
        return loss


class ForgetsTies(PipelineParallel):
    """Each stage trains its copy of a tied weight on its own gradient."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.step.parallelized.ties.clear()


class DoublesAMicrobatch(PipelineParallel):
    """Gives the first microbatch twice its weight."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert isinstance(self.step, PipelineStep)
        runner = self.step.runner
        use = runner._use_output
        for stage in runner.stages:
            stage._use_output = lambda index, output: use(index, output) * (2.0 if index == 0 else 1.0)


class CountsTiesTwice(PipelineParallel):
    """The global norm has each copy of a tied weight in it."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        plugin: Any = self.precision_plugin
        plugin.stages = replace(plugin.stages, counted_elsewhere=frozenset())
