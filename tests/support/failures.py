"""What went wrong on the ranks of a pool call, told in the order in which it happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """One rank's part in a failed call.

    Attributes:
        rank: The rank.
        when: Monotonic seconds, comparable between the processes of one machine.
        kind: The rank raised, its process ended, it did not finish, or it left something patched behind.
        summary: One line.
        detail: Traceback, stacks or the end of the rank's output.
        exception: What it raised, where that survives pickling.
    """

    rank: int
    when: float
    kind: Literal["raised", "died", "hung", "leaked"]
    summary: str
    detail: str = ""
    exception: BaseException | None = None


class RankError(RuntimeError):
    """A function failed on at least one rank. `failures` is ordered by time, the cause first."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        # A rank that hangs hung all along: whatever another rank did before the limit is nearer to the cause.
        self.failures = tuple(sorted(failures, key=lambda failure: (failure.kind == "hung", failure.when)))
        super().__init__(self._message())

    @property
    def first(self) -> RankFailure:
        return self.failures[0]

    @property
    def exceptions(self) -> dict[int, BaseException]:
        """What each rank raised; a rank that did not raise, or whose exception does not pickle, is absent."""
        return {f.rank: f.exception for f in self.failures if f.exception is not None}

    def _message(self) -> str:
        head = f"rank {self.first.rank} {self.first.kind} first: {self.first.summary}"
        parts, shown = [], {}
        for f in self.failures:
            detail = f.detail.rstrip()
            same_as = shown.setdefault(detail, f.rank)
            if detail and same_as != f.rank:
                detail = f"(the traceback of rank {same_as}, line for line)"
            parts.append(f"--- rank {f.rank} {f.kind}: {f.summary}\n{detail}")
        return "\n".join([head, *parts])


class RankDied(RankError):
    """A rank's process ended in the middle of a call."""


class RankTimeout(RankError):
    """The call did not end in time, and no rank had raised."""
