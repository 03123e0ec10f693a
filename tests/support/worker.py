"""One process of the pool: `python -X faulthandler -m tests.support.worker FD RANK`.

Imports the heavy libraries once, then answers calls from the connection on FD until it closes. Messages are
pickled tuples: `Call` and `"release"` come in; `ready`, `returned` or `raised`, and `clean` go out.

[Note: two steps to end a call] A rank that is done keeps its process group until every rank is, because
peers may still be inside a collective; the pool then says `release`. A rank that raised drops its group at once,
so that peers waiting for it fail instead of hanging.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import pickle
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a worker runs: the environment of its rank, and pickled `(fn, args, kwargs)`."""

    env: Mapping[str, str]
    payload: bytes


def serve(connection: Connection) -> None:
    """Answer calls until the pool closes the connection."""
    # Late, so that the classes above load without torch.
    from tests.support.isolation import Snapshot

    gc.freeze()  # the libraries' objects live as long as the process: later collections need not walk them
    _send(connection, "ready")
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        before = Snapshot()
        os.environ.update(call.env)
        failed = not _answer(connection, call)
        replaced = before.restore() if failed else []
        if pickle.loads(connection.recv_bytes()) != "release":
            raise RuntimeError("the pool sent a call before it released the last one")
        if not failed:
            replaced = before.restore()
        _send(connection, "clean", replaced)


def _answer(connection: Connection, call: Call) -> bool:
    """Run the call, send what came of it, and say whether it returned."""
    try:
        fn, args, kwargs = pickle.loads(call.payload)
        value = pickle.dumps(fn(*args, **kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as error:
        summary = traceback.format_exception_only(error)[-1].strip()
        detail = "".join(traceback.format_exception(error))
        _send(connection, "raised", time.monotonic(), summary, detail, _pickle_exception(error))
        for shown in _chain(error):
            traceback.clear_frames(shown.__traceback__)  # frames keep process groups alive
            shown.__traceback__ = None
        return False
    _send(connection, "returned", time.monotonic(), value)
    return True


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _pickle_exception(error: BaseException) -> bytes | None:
    # Exceptions with their own __init__ often pickle and then fail to load: try both ways here.
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    return None


def _send(connection: Connection, *message: Any) -> None:
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _die_with_parent() -> None:
    # Linux: a worker stuck in a collective must not outlive a test run that was killed.
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _import_libraries() -> None:
    warnings.simplefilter("ignore")
    import lightning  # noqa: F401
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "transformers", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)


def _seed_apart(rank: int) -> None:
    """Ranks that were not seeded must not agree by luck."""
    import numpy as np
    import torch

    seed = 1000 + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main() -> None:
    descriptor, rank = (int(argument) for argument in sys.argv[1:3])
    _die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the pool asks for stacks with SIGABRT: no core files
    _import_libraries()
    _seed_apart(rank)
    serve(Connection(descriptor))


if __name__ == "__main__":
    # Under its importable name, so that `Call` is the class that the pool pickled.
    from tests.support import worker

    worker.main()
