"""Guards that fail a test which would steer the tests after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from tests.support.isolation import end_process_groups, restore_env

# Set for the life of a process by pytest, or by libraries when first imported.
_MAY_CHANGE = {"PYTEST_CURRENT_TEST", "PYTEST_VERSION", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "CRC32C_SW_MODE"}


@contextmanager
def guard_env() -> Iterator[None]:
    """Put `os.environ` back and complain if it changed: a left `RANK` or `MASTER_PORT` looks like a launcher."""
    before = dict(os.environ)
    yield
    kept = {name: os.environ[name] for name in _MAY_CHANGE if name in os.environ}
    names = {*before, *os.environ} - _MAY_CHANGE
    changed = sorted(name for name in names if before.get(name) != os.environ.get(name))
    restore_env({name: value for name, value in before.items() if name not in _MAY_CHANGE} | kept)
    assert not changed, f"the test left environment variables changed: {', '.join(changed)}"


@contextmanager
def guard_process_group() -> Iterator[None]:
    """End torch.distributed in this process and complain if it was left initialised."""
    yield
    leaked = dist.is_available() and dist.is_initialized()
    end_process_groups()
    assert not leaked, "the test left a process group: end it with torch.distributed.destroy_process_group()"
