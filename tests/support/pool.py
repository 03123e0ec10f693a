"""A pool of worker processes that tests run functions on, one process a rank.

A fresh process needs seconds to import torch and Lightning; a worker that is kept needs a fraction of one for a whole
`Trainer.fit`. So the pool starts once a session, is put back to its first state after every call, and is
rebuilt only when a rank died or hung.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch.distributed import TCPStore

from tests.support.failures import RankDied, RankError, RankFailure, RankTimeout
from tests.support.process import WorkerProcess
from tests.support.worker import Call

T = TypeVar("T")

_TICK = 0.25  # seconds between looks at processes that say nothing
_CLEAN_UP_LIMIT = 60.0  # seconds; far more than it takes on a busy machine


# A process group that something still refers to keeps three threads, which wake up again and again: hundreds slow all.
_MOST_THREADS = 200


class WorkerPool:
    """Runs a function on several ranks at once.

    Args:
        size: Workers to start at the first call. A call on more ranks adds what is missing.
        start_timeout: Seconds that a worker may take to import everything.
        grace: Seconds that the other ranks have to end once one has raised.
    """

    def __init__(self, *, size: int = 4, start_timeout: float = 180.0, grace: float = 10.0) -> None:
        self._size = size
        self._start_timeout = start_timeout
        self._grace = grace
        self._workers: list[WorkerProcess] = []
        self._remembered: dict[tuple[bytes, int], list[Any]] = {}
        self._resources = ExitStack()
        self._folder = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="pool-")))
        self._num_started = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(
        self, fn: Callable[..., T], /, *args: Any, world: int = 4, timeout: float = 120.0, **kwargs: Any
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on ranks 0 … world-1 and return what each returned, by rank.

        With more than one rank, each sees the environment that torchrun gives (`RANK`, `MASTER_PORT`, …), so
        Lightning starts no processes of its own; and as under torchrun, torch.distributed can be initialised once a
        call. With one rank there is no such environment: a plain process.

        Args:
            fn: A function that workers can import, so defined at the top level of a module.
            world: Number of ranks.
            timeout: Seconds for the whole call, without the time to start workers.

        Raises:
            RankError: `fn` raised somewhere, or returned with torch's own functions still replaced.
            RankDied: A process ended. The pool is rebuilt by the next call.
            RankTimeout: The call did not end in time. The pool is rebuilt by the next call.
        """
        return self._run(_pickle_call(fn, args, kwargs), world, timeout)

    def run_once(
        self, fn: Callable[..., T], /, *args: Any, world: int = 4, timeout: float = 120.0, **kwargs: Any
    ) -> list[T]:
        """As `run`, but the same call a second time returns the first one's values. Do not change them."""
        payload = _pickle_call(fn, args, kwargs)
        if (payload, world) not in self._remembered:
            self._remembered[payload, world] = self._run(payload, world, timeout)
        return self._remembered[payload, world]

    def close(self) -> None:
        """End all workers. A closed pool cannot be used again."""
        self._kill()
        self._resources.close()

    def _run(self, payload: bytes, world: int, timeout: float) -> list[Any]:
        workers = self._start(world)
        try:
            # The pool hosts the store, as torchrun's agent does: no race for a port, and no rank ends it early.
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world > 1 else None
            for worker in workers:
                env = {} if store is None else _torchrun_env(worker.rank, world, store.port)
                worker.begin(Call(env=env, payload=payload))
            values, failures = self._collect(workers, timeout)
            failures += self._release(workers)
        except BaseException:
            self._kill()  # ranks in an unknown state, after an interrupt too
            raise
        if failures:
            raise RankError(failures)
        return [values[worker.rank] for worker in workers]

    def _start(self, world: int) -> list[WorkerProcess]:
        if any(worker.has_ended or worker.num_threads > _MOST_THREADS for worker in self._workers):
            self._kill()
        target = max(world, self._size)
        try:
            while len(self._workers) < target:
                log = self._folder / f"{self._num_started:03}.log"
                self._workers.append(WorkerProcess(len(self._workers), log))
                self._num_started += 1
            for worker in self._workers[:world]:
                worker.wait_ready(self._start_timeout)
        except BaseException:
            self._kill()
            raise
        return self._workers[:world]

    def _collect(self, workers: Sequence[WorkerProcess], timeout: float) -> tuple[dict[int, Any], list[RankFailure]]:
        """What each rank returned or raised. A rank that ends or hangs raises here."""
        values: dict[int, Any] = {}
        failures: list[RankFailure] = []
        pending = list(workers)
        deadline = time.monotonic() + timeout
        while pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                hung = _stop_hung(
                    pending, f"did not end within {timeout:.0f} s" if not failures else "was left waiting"
                )
                raise (RankError if failures else RankTimeout)([*failures, *hung])
            speaking = wait([worker.connection for worker in pending], timeout=min(remaining, _TICK))
            for worker in [w for w in pending if w.connection in speaking or w.has_ended]:
                pending.remove(worker)
                match worker.receive():
                    case ("returned", _, value):
                        values[worker.rank] = pickle.loads(value)
                    case ("raised", when, summary, detail, exception):
                        failures.append(_raised(worker.rank, when, summary, detail, exception))
                        deadline = min(deadline, time.monotonic() + self._grace)
                    case _:
                        died = _died(worker)
                        raise RankDied([*failures, died, *_stop_hung(pending, "was running when it died")])
        return values, failures

    def _release(self, workers: Sequence[WorkerProcess]) -> list[RankFailure]:
        """Let every rank clean up (see [Note: two steps to end a call]), and say what a call left replaced."""
        for worker in workers:
            worker.send("release")
        leaks = []
        for worker in workers:
            if not worker.connection.poll(_CLEAN_UP_LIMIT):
                raise RankTimeout(_stop_hung([worker], f"did not clean up within {_CLEAN_UP_LIMIT:.0f} s"))
            match worker.receive():
                case ("clean", []):
                    pass
                case ("clean", replaced):
                    summary = f"left replaced: {', '.join(replaced)}"
                    leaks.append(RankFailure(rank=worker.rank, when=time.monotonic(), kind="leaked", summary=summary))
                case _:
                    raise RankDied([_died(worker)])
        return leaks

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{fn!r} or its arguments cannot be sent to a worker ({error}). "
            "Use functions and classes from the top level of a module, and plain data."
        ) from error


def _torchrun_env(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "pool",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _raised(rank: int, when: float, summary: str, detail: str, exception: bytes | None) -> RankFailure:
    loaded = None if exception is None else pickle.loads(exception)
    return RankFailure(rank=rank, when=when, kind="raised", summary=summary, detail=detail, exception=loaded)


def _died(worker: WorkerProcess) -> RankFailure:
    # Peers notice a broken connection as fast as the pool does: their errors are the effect, this is the cause.
    when = time.monotonic() - 2 * _TICK
    return RankFailure(rank=worker.rank, when=when, kind="died", summary=worker.exit_status(), detail=worker.output())


def _stop_hung(workers: Sequence[WorkerProcess], summary: str) -> list[RankFailure]:
    """Each rank's stacks. The processes end by giving them."""
    now = time.monotonic()
    for worker in workers:
        worker.ask_for_stacks()
    return [
        RankFailure(rank=worker.rank, when=now, kind="hung", summary=summary, detail=worker.stacks())
        for worker in workers
    ]
