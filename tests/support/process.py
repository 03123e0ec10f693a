"""The pool's end of one worker process."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any


class WorkerProcess:
    """Starts `tests.support.worker` and talks to it.

    A separate interpreter: a fork of a process in which torch has started threads is unsafe.
    """

    def __init__(self, rank: int, log: Path) -> None:
        self.rank = rank
        self.connection, child = Pipe()
        self._log = log
        self._log_start = 0
        self._is_ready = False
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                # [Note: stacks of a hung rank] faulthandler prints every thread on SIGABRT without needing the
                # interpreter. Installed by -X, before the signal module looks, it also survives Lightning, which on
                # teardown sets every signal back to the handler that Python knows of.
                [sys.executable, "-X", "faulthandler", "-m", "tests.support.worker", str(child.fileno()), str(rank)],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads, **quiet, "PYTHONPATH": path},
                start_new_session=True,  # so that its own children can be ended with it
            )
        child.close()

    def wait_ready(self, timeout: float) -> None:
        """Return once the worker has imported everything."""
        if self._is_ready:
            return
        message = self.receive() if self.connection.poll(timeout) else None
        if message != ("ready",):
            raise RuntimeError(f"worker {self.rank} did not start within {timeout:.0f} s:\n{self.output()}")
        self._is_ready = True

    def send(self, message: object) -> None:
        self.connection.send_bytes(pickle.dumps(message))

    def receive(self) -> tuple[Any, ...] | None:
        """The next message, or None when the process has ended."""
        try:
            message: tuple[Any, ...] = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return message

    def begin(self, message: object) -> None:
        """Send a call; `output` shows what the worker prints from here on."""
        self._log_start = self._log.stat().st_size
        self.send(message)

    @property
    def num_threads(self) -> int:
        """Of the process; 0 where the system does not tell."""
        threads = Path(f"/proc/{self._process.pid}/task")
        return len(list(threads.iterdir())) if threads.is_dir() else 0

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_status(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def output(self, limit: int = 6000) -> str:
        """The end of what the worker printed since `begin`."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")[-limit:].strip()

    def ask_for_stacks(self) -> None:
        """Make the process print the stack of each of its threads and end (see [Note: stacks of a hung rank])."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGABRT)

    def stacks(self, timeout: float = 3.0) -> str:
        """What `ask_for_stacks` printed."""
        deadline = time.monotonic() + timeout
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(0.01)
        text = self.output(limit=20_000)
        found = re.search(r"^(Fatal Python error: Aborted.*)", text, re.MULTILINE | re.DOTALL)
        return found.group(1).split("\nExtension modules:")[0].strip() if found else text

    def kill(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
