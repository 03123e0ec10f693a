"""An error on one stage, raised on every rank of the pipeline.

[Note: to the end]  A stage that fails goes on with its schedule and sends zeros, or its neighbours would wait for it.
It leaves word behind the process group first. The last stage, which the zeros reach, looks there before it tells the
others how the step went.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch.distributed as dist

from lightning_parallel._torch import default_store
from lightning_parallel.errors import ParallelConfigError, PlanError

_number = count()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as another rank can be told of it."""

    stage: int
    kind: str
    message: str
    trace: str

    @classmethod
    def of(cls, stage: int, error: Exception) -> Failure:
        """Of an error that was caught."""
        return cls(stage, type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def error(self, own: Exception | None = None) -> Exception:
        """What to raise: on the rank that failed its own, with the traceback."""
        if own is not None:
            return own
        known = {"PlanError": PlanError, "ParallelConfigError": ParallelConfigError}
        if self.kind in known:
            return known[self.kind](self.message)
        return RuntimeError(f"The step failed on pipeline stage {self.stage}:\n{self.trace}")


class Failures:
    """Of one step after the other. Ranks of a pipeline make it, and begin steps, alike.

    Args:
        group: The ranks of one pipeline.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name = f"pipeline {dist.get_global_rank(group, 0)}, {next(_number)}"
        self._step = 0
        self.own: dict[int, Exception] = {}

    def begin(self) -> None:
        """A step."""
        self._step += 1
        self.own.clear()

    def add(self, stage: int, error: Exception) -> None:
        """Something failed on a stage of this rank."""
        if isinstance(error.__cause__, ParallelConfigError):  # from inside a backward, say
            error = error.__cause__
        self.own.setdefault(stage, error)
        if self.first() is None:
            default_store().set(self._place, pickle.dumps(Failure.of(stage, error)))

    def first(self) -> Failure | None:
        """Of this step, as far as word has come."""
        store = default_store()
        return pickle.loads(store.get(self._place)) if store.check([self._place]) else None

    @property
    def _place(self) -> str:
        return f"{self._name}: step {self._step}"

    def raise_own(self, told: Any = None) -> None:
        """Raise what failed here, or what the last stage told."""
        if isinstance(told, Failure):
            raise told.error(self.own.get(told.stage))
        for error in self.own.values():
            raise error
