"""SIGTERM on rank 0 reaches every rank before the same batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parallel.strategies.sigterm import SigtermFlag
from tests.support.models import NanoGPT
from tests.support.pool import WorkerPool
from tests.support.training import GlobalBatches
from tests.trainer.common import DDP, make_trainer


def ended_before(signalled_at: int, rank_with_signal: int) -> int:
    dist.init_process_group("gloo")
    trainer = SimpleNamespace(received_sigterm=False)
    flag = SigtermFlag(cast(Any, trainer), torch.device("cpu"))
    for batch in range(10):
        trainer.received_sigterm = batch >= signalled_at and dist.get_rank() == rank_with_signal
        try:
            flag()
        except SIGTERMException:
            return batch
    return 10


def test_all_ranks_end_one_batch_later(pool: WorkerPool) -> None:
    assert pool.run(ended_before, 3, 0, world=2) == [4, 4]


def test_rank_0_decides(pool: WorkerPool) -> None:
    assert pool.run(ended_before, 3, 1, world=2) == [10, 10]


def installed() -> str:
    module = NanoGPT(layers=1)
    trainer = make_trainer(DDP, use_distributed_sampler=False)
    trainer.fit(module, datamodule=GlobalBatches(module, count=4, batch=4, seq=4))
    return type(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor).__name__


def test_takes_the_place_of_lightnings_broadcast(pool: WorkerPool) -> None:
    assert pool.run(installed, world=2) == ["SigtermFlag"] * 2
