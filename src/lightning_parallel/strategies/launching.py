"""The processes that the script starts for the other ranks of its node, none of which may outlive a dead peer.

[Note: who notices a death]  A child that fails is seen by rank 0's observer (Lightning's own), which ends the rest. A
child must see for itself that rank 0 is gone: in a collective on an accelerator it would wait until the timeout. So
rank 0 holds a connection to each child. It says goodbye on it when it ends well; when it ends otherwise, however
suddenly, the system closes the connection. Other launchers (torchrun, SLURM) watch their processes themselves.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time

from typing_extensions import override

from lightning_parallel._lightning import SubprocessScriptLauncher

_PORT = "LIGHTNING_PARALLEL_WATCH_PORT"
_GRACE = 5.0  # seconds for a rank to show its own error first


class ScriptLauncher(SubprocessScriptLauncher):
    """Starts the script once more for every other rank of this node, and ties their lives to this process."""

    @override
    def _call_children_scripts(self) -> None:
        server = socket.create_server(("127.0.0.1", 0), backlog=self.num_processes)
        os.environ[_PORT] = str(server.getsockname()[1])
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[_PORT]
        atexit.register(_say_goodbye, server, self.num_processes - 1)


def watch_rank_zero() -> None:
    """In a process that ``ScriptLauncher`` started: end it if rank 0 dies. Does nothing in any other, or again."""
    port = os.environ.pop(_PORT, None)
    if port is None:
        return
    try:
        connection = socket.create_connection(("127.0.0.1", int(port)), timeout=_GRACE)
        connection.settimeout(None)
    except OSError:
        connection = None
    threading.Thread(target=_watch, args=(connection,), daemon=True, name="rank-zero-watch").start()


def _watch(connection: socket.socket | None) -> None:
    try:
        said = connection.recv(1) if connection else b""
    except OSError:
        said = b""
    if said:
        return
    time.sleep(_GRACE)
    print(f"Process {os.getpid()} ends: the process of rank 0 is gone.", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread may be in a collective that never returns


def _say_goodbye(server: socket.socket, num_children: int) -> None:
    """At exit: free the children, unless an exception ends this process."""
    if getattr(sys, "last_value", None) is not None:
        return
    server.setblocking(False)
    for _ in range(num_children):
        try:
            connection, _ = server.accept()
            connection.send(b"\n")
        except OSError:  # a child that never came, or is gone
            return
