"""However the processes are started: who they are, and that none outlives a dead peer.

Real launchers start real scripts here (`tests/support/launched.py`), so this file is slow: two interpreters each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_parallel import HybridParallel
from tests.support.models import Classifier
from tests.support.pool import WorkerPool
from tests.support.training import GlobalBatches

START_LIMIT = 150  # seconds for interpreters to start and train on a busy machine
DEATH_LIMIT = 15  # seconds that a dead rank's peers may live: the promise
SCRIPT = "tests.support.launched"


@dataclass
class Launched:
    """Processes that one test started; each in a session of its own, so that all of it can be ended."""

    folder: Path
    stack: ExitStack

    def start(self, command: Sequence[str], **env: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **env},
            )
        self.stack.callback(_end, process)
        return process, log

    def ranks(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank-*.json"))]


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    with ExitStack() as stack:
        yield Launched(tmp_path, stack)


def script(*options: str) -> list[str]:
    """The command that a user types: rank 0 starts the others."""
    return [sys.executable, "-m", SCRIPT, *options]


def torchrun(*options: str, nodes: int = 1, node: int = 0, per_node: int = 2, port: int | None = None) -> list[str]:
    where = ["--standalone"] if nodes == 1 else ["--master-addr=127.0.0.1", f"--master-port={port}"]
    agent = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={per_node}"]
    return [sys.executable, *agent, *where, "-m", SCRIPT, *options]


def test_a_plain_script_starts_its_other_ranks(launched: Launched) -> None:
    process, log = launched.start(script(str(launched.folder)))
    assert process.wait(START_LIMIT) == 0, log.read_text()
    zero, one = launched.ranks()
    assert zero["environment"] == one["environment"] == "LightningEnvironment"
    assert (zero["launcher"], one["launcher"]) == ("ScriptLauncher", "NoneType")
    _assert_two_ranks_trained(zero, one)


def test_torchrun_on_one_node(launched: Launched) -> None:
    process, log = launched.start(torchrun(str(launched.folder)))
    assert process.wait(START_LIMIT) == 0, log.read_text()
    zero, one = launched.ranks()
    assert zero["environment"] == one["environment"] == "TorchElasticEnvironment"
    assert zero["launcher"] == one["launcher"] == "NoneType"
    assert (one["node"], one["local"]) == (0, 1)
    _assert_two_ranks_trained(zero, one)


def test_torchrun_on_two_nodes(launched: Launched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = (str(launched.folder), "--devices", "1", "--nodes", "2")
    agents = [launched.start(torchrun(*options, nodes=2, node=node, per_node=1, port=port)) for node in range(2)]
    for process, log in agents:
        assert process.wait(START_LIMIT) == 0, log.read_text()
    zero, one = launched.ranks()
    assert (zero["node"], zero["local"]) == (0, 0)
    assert (one["node"], one["local"]) == (1, 0)
    _assert_two_ranks_trained(zero, one)


def _assert_two_ranks_trained(zero: dict[str, Any], one: dict[str, Any]) -> None:
    assert zero["world"] == one["world"] == 2
    assert zero["steps"] == one["steps"] == 4
    assert zero["mesh"] == one["mesh"] == {"pp": 1, "ddp": 1, "fsdp": 2, "cp": 1, "tp": 1}
    assert zero["weights"] == one["weights"]


# --- environments that start processes themselves ---------------------------------------------------------------------


def _fit_under_slurm() -> dict[str, Any]:
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "GROUP_RANK"))]:
        del os.environ[name]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ |= {
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": world,
        "SLURM_NTASKS_PER_NODE": world,
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "localhost",
    }
    # The workers' store plays the part of rank 0's: SLURM has none, and would let rank 0 make one at this address.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    strategy = HybridParallel()
    trainer = Trainer(
        accelerator="cpu", devices=int(world), strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    environment = strategy.cluster_environment
    launcher = trainer.strategy.launcher
    module = Classifier()
    trainer.fit(module, datamodule=GlobalBatches(module, count=8, batch=4, seq=1))
    return {
        "environment": type(environment) is SLURMEnvironment and strategy.cluster_environment is environment,
        "launcher": launcher,
        "rank": (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size),
        "mesh": strategy.mesh_sizes["fsdp"],
    }


def test_slurm_is_recognised_and_left_alone(pool: WorkerPool) -> None:
    for rank, seen in enumerate(pool.run(_fit_under_slurm, world=2)):
        assert seen == {"environment": True, "launcher": None, "rank": (rank, rank, 0, 2), "mesh": 2}


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "rank", "when", "options"),
    [
        ("raise", 1, "setup", []),
        ("kill", 0, "apart", []),
        ("raise", 0, "apart", ["--save-on-exception"]),
    ],
)
def test_a_death_ends_all_ranks_of_a_script(
    launched: Launched, fail: str, rank: int, when: str, options: list[str]
) -> None:
    arguments = ["--fail", fail, "--rank", str(rank), "--when", when, *options]
    process, log = launched.start(script(str(launched.folder), *arguments))
    _assert_all_end(launched, process, log)
    if fail == "raise":
        _assert_shows_cause(log, rank)
    elif rank == 1:
        assert "terminated with code 7" in log.read_text()
    else:
        assert "the process of rank 0 is gone" in log.read_text()
    if options:
        assert "No checkpoint is saved after this exception: only rank 0" in log.read_text()


@pytest.mark.parametrize(("fail", "when"), [("raise", "step"), ("kill", "step")])
def test_a_death_ends_all_ranks_of_torchrun(launched: Launched, fail: str, when: str) -> None:
    process, log = launched.start(torchrun(str(launched.folder), "--fail", fail, "--when", when))
    _assert_all_end(launched, process, log)
    if fail == "raise":
        _assert_shows_cause(log, 1)
    else:
        assert "SIGKILL" in log.read_text() or "exitcode: -9" in log.read_text()


def _assert_all_end(launched: Launched, process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.wait(START_LIMIT) != 0, log.read_text()
    pids = [int(path.read_text()) for path in launched.folder.glob("pid-*")]
    assert len(pids) == 2, log.read_text()
    failed = float((launched.folder / "failed").read_text())
    while any(map(_is_running, pids)) and time.time() < failed + DEATH_LIMIT:
        time.sleep(0.1)
    assert not any(map(_is_running, pids)), log.read_text()
    assert time.time() - failed < DEATH_LIMIT, log.read_text()
    assert not launched.ranks()


def _assert_shows_cause(log: Path, rank: int) -> None:
    text = log.read_text()
    assert f"RuntimeError: rank {rank} had enough" in text
    assert "in fail_in" in text  # the traceback, not the message alone


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
