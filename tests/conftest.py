"""Fixtures for all tests: the pool of workers, and guards against tests that leak into later ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.guards import guard_env, guard_process_group
from tests.support.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes, started by the first call and kept for the session (see `WorkerPool.run`)."""
    with WorkerPool() as workers:
        yield workers


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    with guard_env(), guard_process_group():
        yield
