"""The worker pool itself. What kills workers runs on a small pool of its own, so that the session's stays warm."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.failures import RankDied, RankError, RankTimeout
from tests.support.pool import WorkerPool


@pytest.fixture(scope="module")
def small_pool() -> Iterator[WorkerPool]:
    with WorkerPool(size=2, grace=5.0) as workers:
        yield workers


class NeedsTwoArgumentsError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def rank() -> int:
    return int(os.environ.get("RANK", -1))


def pid() -> int:
    return os.getpid()


def add_over_ranks(value: float) -> float:
    dist.init_process_group("gloo")
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def multiply_sharded(dims: tuple[int, ...]) -> list[float]:
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=tuple("ab"[: len(dims)]))
    placements = [Shard(0), *[Replicate()] * (len(dims) - 1)]
    x = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, placements)
    return (x @ x).sum(1).full_tensor().tolist()


def environment() -> dict[str, str]:
    prefixes = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "GROUP_")
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def detects_torchelastic() -> tuple[bool, bool]:
    environment = TorchElasticEnvironment()
    return environment.detect(), environment.creates_processes_externally


def random_numbers() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def disturb(folder: str) -> None:
    os.environ["LEFT_BEHIND"] = "1"
    del os.environ["RANK"]
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))


def state() -> tuple[object, ...]:
    return (
        os.environ.get("LEFT_BEHIND"),
        os.getcwd(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        dist.is_initialized(),
    )


def replace_cross_entropy() -> None:
    torch.nn.functional.cross_entropy = replace_cross_entropy


def raise_on(failing: int, then: str = "return") -> None:
    if rank() == failing:
        time.sleep(0.2)
        raise ValueError(f"refused by rank {failing}")
    if then == "wait":
        dist.init_process_group("gloo")
        dist.barrier()


def raise_after_init(failing: int) -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if rank() == failing:
        raise ValueError(f"refused by rank {failing}")
    dist.all_reduce(torch.ones(()))


def raise_needing_arguments() -> None:
    raise NeedsTwoArgumentsError("no", "pickle")


def sleep_for(seconds: float, sleeping: int) -> None:
    if rank() == sleeping:
        time.sleep(seconds)


def exit_on(failing: int) -> None:
    dist.init_process_group("gloo")
    if rank() == failing:
        print("last words", flush=True)
        os._exit(7)
    dist.barrier()


def return_unpicklable() -> object:
    return lambda: None


def test_returns_one_value_a_rank(pool: WorkerPool) -> None:
    assert pool.run(rank) == [0, 1, 2, 3]
    assert pool.run(rank, world=2) == [0, 1]
    assert pool.run(rank, world=1) == [-1]


def test_ranks_communicate_in_call_after_call(pool: WorkerPool) -> None:
    assert pool.run(add_over_ranks, 1.0, world=4) == [10.0] * 4
    assert pool.run(add_over_ranks, 0.0, world=2) == [1.0] * 2
    assert pool.run(add_over_ranks, value=1.0, world=4) == [10.0] * 4


def test_a_mesh_of_an_earlier_call_is_forgotten(pool: WorkerPool) -> None:
    expected = [float(v) for v in (torch.arange(16.0).reshape(4, 4) @ torch.arange(16.0).reshape(4, 4)).sum(1)]
    for dims in [(4,), (2, 2), (4,), (2, 2)]:
        assert pool.run(multiply_sharded, dims) == [expected] * 4


def test_keeps_its_processes_and_grows(pool: WorkerPool) -> None:
    first = pool.run(pid)
    assert pool.run(rank, world=8) == list(range(8))
    assert pool.run(pid, world=8)[:4] == first


def test_environment_is_that_of_torchrun(pool: WorkerPool) -> None:
    environments = pool.run(environment, world=2)
    ports = {e.pop("MASTER_PORT") for e in environments}
    assert len(ports) == 1
    assert environments == [
        {
            "RANK": str(r),
            "LOCAL_RANK": str(r),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }
        for r in range(2)
    ]
    assert pool.run(detects_torchelastic, world=2) == [(True, True)] * 2
    assert pool.run(environment, world=1) == [{}]
    assert pool.run(detects_torchelastic, world=1) == [(False, True)]


def test_state_is_restored(pool: WorkerPool, tmp_path: Path) -> None:
    before = pool.run(state, world=2)
    numbers = pool.run(random_numbers, world=2)
    pool.run(disturb, str(tmp_path), world=2)
    assert pool.run(state, world=2) == before
    assert pool.run(random_numbers, world=2) == numbers
    assert numbers[0] != numbers[1], "ranks that nobody seeded agree by luck"


def test_replaced_functions_are_reported_and_put_back(pool: WorkerPool) -> None:
    with pytest.raises(RankError, match=r"left replaced: torch\.nn\.functional\.cross_entropy"):
        pool.run(replace_cross_entropy, world=2)
    assert pool.run(rank, world=2) == [0, 1]


def test_run_once_remembers(pool: WorkerPool) -> None:
    first = pool.run_once(random_numbers, world=1)
    assert pool.run_once(random_numbers, world=1) is first
    assert len(pool.run_once(random_numbers, world=2)) == 2


def test_every_failing_rank_is_shown(pool: WorkerPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(raise_needing_arguments, world=2)
    assert [f.rank for f in sorted(caught.value.failures, key=lambda f: f.rank)] == [0, 1]
    assert "in raise_needing_arguments" in caught.value.first.detail
    assert "NeedsTwoArgumentsError: no pickle" in str(caught.value)
    assert caught.value.exceptions == {}, "this one cannot be unpickled, so only its text arrives"


def test_first_to_raise_comes_first(pool: WorkerPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 2 raised first: ValueError: refused by rank 2") as caught:
        pool.run(raise_after_init, 2)
    assert time.monotonic() - started < 5, "peers in a collective were not released"
    assert {f.rank for f in caught.value.failures} == {0, 1, 2, 3}, "peers fail in the collective"
    assert isinstance(caught.value.exceptions[2], ValueError)
    assert pool.run(add_over_ranks, 1.0) == [10.0] * 4


def test_peers_that_wait_for_a_failed_rank_are_stopped(small_pool: WorkerPool) -> None:
    with pytest.raises(RankError, match=r"^rank 1 raised first") as caught:
        small_pool.run(raise_on, 1, then="wait", world=2)
    hung = caught.value.failures[-1]
    assert (hung.rank, hung.kind) == (0, "hung")
    assert "in raise_on" in hung.detail, "the stack of the rank left waiting"
    assert not isinstance(caught.value, RankTimeout)


def test_timeout_shows_stacks_and_the_pool_recovers(small_pool: WorkerPool) -> None:
    before = small_pool.run(pid, world=2)
    with pytest.raises(RankTimeout, match="did not end within 1 s") as caught:
        small_pool.run(sleep_for, 60, sleeping=1, world=2, timeout=1.0)
    assert [f.rank for f in caught.value.failures] == [1]
    assert "in sleep_for" in caught.value.first.detail
    after = small_pool.run(pid, world=2)
    assert set(before).isdisjoint(after)
    assert small_pool.run(add_over_ranks, 0.0, world=2) == [1.0] * 2


def test_dead_rank_takes_the_call_down(small_pool: WorkerPool) -> None:
    with pytest.raises(RankDied, match=r"^rank 0 died first: exit status 7") as caught:
        small_pool.run(exit_on, 0, world=2)
    assert "last words" in caught.value.first.detail
    assert {f.rank for f in caught.value.failures} == {0, 1}


def test_what_cannot_be_pickled_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        pool.run(lambda: None)
    with pytest.raises(RankError, match="return_unpicklable"):
        pool.run(return_unpicklable, world=1)
