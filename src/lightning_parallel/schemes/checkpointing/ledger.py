"""What checkpointed blocks hold now, and held at most; how many calls of each wait for their backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_parallel.schemes.checkpointing.profile import Profile


class Ledger:
    """Counts regions, the calls of blocks, from their forward until autograd lets go of them.

    Attributes:
        profiles: By name of the block, in the order of the first calls.
        calls: Of each block since ``begin``.
        live: Regions of each block when those that waited would have held the most without checkpointing.
        peak: Bytes held at most since ``begin``.
        is_watched: Somebody reads it: blocks are measured when they are called first.
    """

    def __init__(self) -> None:
        self.profiles: dict[str, Profile] = {}
        self.calls: Counter[str] = Counter()
        self.live: Mapping[str, int] = {}
        self.peak = 0
        self.is_watched = True
        self._now: Counter[str] = Counter()
        self._bytes: dict[int, int] = {}
        self._held = self._most = 0
        self._number = 0

    def begin(self) -> None:
        """A step begins."""
        self.calls.clear()
        self.peak, self._most = self._held, 0

    def enter(self, region: Any, name: str) -> int:
        """A region begins; returns its number."""
        number = self._number = self._number + 1
        self.calls[name] += 1
        self._now[name] += 1
        weight = sum(n * self.profiles[other].saved for other, n in self._now.items() if other in self.profiles)
        if weight > self._most:
            self._most, self.live = weight, dict(self._now)
        weakref.finalize(region, self._leave, number, name).atexit = False
        return number

    def hold(self, number: int, size: int) -> None:
        """A region holds ``size`` bytes from now on."""
        self._held += size - self._bytes.get(number, 0)
        self._bytes[number] = size
        self.peak = max(self.peak, self._held)

    def _leave(self, number: int, name: str) -> None:
        self._now[name] -= 1
        self._held -= self._bytes.pop(number, 0)
