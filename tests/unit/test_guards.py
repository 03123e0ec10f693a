from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.support.guards import guard_env, guard_process_group


def test_changed_env_is_reported_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(AssertionError, match="changed: KEPT, RANK"), guard_env():
        os.environ.update(RANK="3", KEPT="after")
    assert "RANK" not in os.environ
    assert os.environ["KEPT"] == "before"


def test_unchanged_env_passes() -> None:
    with guard_env():
        os.environ["RANK"] = "3"
        del os.environ["RANK"]


def test_left_process_group_is_reported_and_ended() -> None:
    with pytest.raises(AssertionError, match="left a process group"), guard_process_group():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()
