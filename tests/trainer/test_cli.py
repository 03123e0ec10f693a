"""Strategies by registry name, and by LightningCLI: class path, flags, and nested."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from lightning.pytorch.cli import LightningCLI

import lightning_parallel
from lightning_parallel import (
    DataParallel,
    FullyShardedDataParallel,
    HybridParallel,
    PipelineParallel,
    TensorParallel,
)
from tests.support.models import NanoGPT
from tests.support.pool import WorkerPool
from tests.trainer.common import Data


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("data_parallel", DataParallel),
        ("fully_sharded_data_parallel", FullyShardedDataParallel),
        ("tensor_parallel", TensorParallel),
        ("pipeline_parallel", PipelineParallel),
        ("hybrid_parallel", HybridParallel),
    ],
)
def test_registry_names(name: str, kind: type) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, strategy=name, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is kind


class Tiny(NanoGPT):
    """Types that a command line can fill in."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__(dim=dim)


def parse(*arguments: str) -> Any:
    options = [
        "accelerator=cpu",
        "devices=1",
        "logger=false",
        "enable_checkpointing=false",
        "enable_progress_bar=false",
    ]
    cli = LightningCLI(
        Tiny, Data, run=False, args=[f"--trainer.{option}" for option in options] + [*arguments],
        save_config_callback=None, seed_everything_default=False,
    )  # fmt: skip
    return cli.trainer.strategy


def test_flags() -> None:
    strategy = parse(
        "--trainer.strategy=lightning_parallel.HybridParallel",
        "--trainer.strategy.tp=2",
        "--trainer.strategy.fsdp=auto",
        "--trainer.strategy.timeout=0:10:00",
        "--trainer.strategy.save_distributed_checkpoint=false",
    )
    assert isinstance(strategy, HybridParallel)
    assert strategy._requested.tp == 2
    assert strategy._requested.fsdp == "auto"
    assert strategy._timeout == timedelta(minutes=10)
    assert strategy._save_distributed_checkpoint is False


YAML = """
trainer:
  strategy:
    class_path: lightning_parallel.HybridParallel
    init_args:
      ddp: 2
      fsdp:
        class_path: lightning_parallel.FullyShardedDataParallel
        init_args:
          size: 3
          reshard_after_forward: false
          prefetch: 2
          mp_policy: {param_dtype: bfloat16}
      tp:
        class_path: lightning_parallel.TensorParallel
        init_args: {size: 4, sequence_parallel: false}
      pp:
        class_path: lightning_parallel.PipelineParallel
        init_args: {size: 2, schedule: ZBVZeroBubble, microbatches: 8, batch_dims: {lengths: null}, boundaries: [h.2]}
      plan:
        model.h.*: block
        model.wte: vocab_in
"""


def test_class_paths_nested(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(YAML)
    strategy = parse(f"--config={tmp_path / 'config.yaml'}")
    assert isinstance(strategy, HybridParallel)
    sizes = strategy._requested
    assert (sizes.pp, sizes.ddp, sizes.fsdp, sizes.tp) == (2, 2, 3, 4)
    pipeline = strategy._pipeline
    assert (pipeline.schedule, pipeline.microbatches) == ("ZBVZeroBubble", 8)
    assert pipeline.batch_dims == {"lengths": None}
    assert pipeline.boundaries == ["h.2"]
    assert strategy._fully_sharded.reshard_after_forward is False
    assert strategy._fully_sharded.prefetch == 2
    assert str(strategy._fully_sharded.mp_policy.param_dtype) == "torch.bfloat16"
    assert strategy._sequence_parallel is False
    assert dict(strategy._plan) == {"model.h.*": "block", "model.wte": "vocab_in"}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["DataParallel", "FullyShardedDataParallel", "TensorParallel", "PipelineParallel"])
def test_each_strategy_by_flags(name: str) -> None:
    strategy = parse(f"--trainer.strategy=lightning_parallel.{name}", "--trainer.strategy.size=2")
    assert type(strategy) is getattr(lightning_parallel, name)
    assert strategy.requested_size == 2


def fit_by_command_line() -> list[int]:
    world = 4
    cli = LightningCLI(
        Tiny, Data, save_config_callback=None, seed_everything_default=3,
        args=[
            "fit", "--trainer.accelerator=cpu", f"--trainer.devices={world}", "--trainer.logger=false",
            "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false", "--trainer.max_steps=2", "--trainer.strategy=hybrid_parallel",
        ],
    )  # fmt: skip
    strategy = cli.trainer.strategy
    assert isinstance(strategy, HybridParallel)
    return [cli.trainer.global_step, *strategy.mesh_sizes.values()]


def test_fit_by_command_line(pool: WorkerPool) -> None:
    assert pool.run(fit_by_command_line) == [[2, 1, 1, 4, 1, 1]] * 4
