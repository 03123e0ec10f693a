"""Holds what ranks recorded of a training against one device's record, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.support.training import Arrays, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How far a mesh may be from one device. The defaults are float32's.

    Attributes:
        loss: Of a logged loss, times its size where that is above 1.
        gradient: Of each gradient, times its own scale: the largest entry of the reference's.
        later: Times `gradient` after the first step. Weights differ by their own rounding by then, and a gradient
            carries that on, by as much as AdamW makes of it: up to 5e-6 here, and what it is depends on the processor.
        floor: The least scale of a gradient, as a part of the largest scale of all gradients of that step. A gradient
            that is zero by mathematics is all rounding, and has no scale of its own.
        norm: Of the total gradient norm, relative.
        weight: Of weights and buffers after the last step, absolute.
    """

    loss: float = 1e-6
    gradient: float = 1e-6
    later: float = 10.0
    floor: float = 1e-3
    norm: float = 1e-6
    weight: float = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One number held against the reference; `error` and `allowed` are in the units of `Tolerance`.

    Attributes:
        time: From 0 (the strategy has set up) to 1 (the last step).
    """

    what: str
    where: str
    error: float
    allowed: float
    time: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.allowed  # a NaN is wrong

    @property
    def excess(self) -> float:
        return math.inf if math.isnan(self.error) else self.error / max(self.allowed, 1e-12)

    def __str__(self) -> str:
        limit = f"allowed {self.allowed:.3g}" if self.allowed >= 0 else "must be the same bit for bit"
        return f"{self.what} {self.where}: off by {self.error:.3g}, {limit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """What agreed, and how well: the largest error of each kind, in the units of `Tolerance`.

    Attributes:
        losses: The reference's, a batch.
        norms: The reference's total gradient norms before clipping, a step.
        reference: Everything the reference recorded.
        ranks: Everything each rank recorded.
    """

    loss_error: float
    gradient_error: float
    norm_error: float
    weight_error: float
    losses: list[float]
    norms: list[float]
    reference: Record
    ranks: list[Record]


def compare(reference: Record, ranks: list[Record], tolerance: Tolerance, *, title: str) -> Parity:
    """Hold what ranks recorded against one device's record; see `assert_same_training`."""
    checked = [c for rank, record in enumerate(ranks) for c in _compare_rank(reference, record, tolerance, rank)]
    checked += [*_compare_presence(reference, ranks), *_compare_replicas(ranks)]
    wrong = [c for c in checked if c.is_wrong]
    if wrong:
        raise AssertionError(_report(wrong, len(checked), title))

    def largest(kind: str) -> float:
        return max((c.error for c in checked if c.what.startswith(kind)), default=0.0)

    return Parity(
        loss_error=largest("loss"),
        gradient_error=max(largest("gradient"), largest("clipped gradient")),
        norm_error=largest("norm"),
        weight_error=largest("weight"),
        losses=reference.losses,
        norms=[total_norm(gradients) for gradients in reference.gradients],
        reference=reference,
        ranks=ranks,
    )


def _report(wrong: list[Comparison], num_checked: int, title: str) -> str:
    """The earliest mismatch is the nearest to the cause; then the worst, each tensor once."""
    first = min(wrong, key=lambda c: c.time)
    lines = [f"{title} does not train as one device does.", f"first: {first}"]
    told = {first.what}
    for comparison in sorted(wrong, key=lambda c: -c.excess):
        if comparison.what not in told and len(told) < 8:
            told.add(comparison.what)
            lines.append(f"worst: {comparison}")
    return "\n  ".join([*lines, f"{len(wrong)} of {num_checked} comparisons fail"])


def total_norm(gradients: Arrays) -> float:
    """The 2-norm of all gradients as one vector."""
    return float(np.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in gradients.values())))


def _compare_rank(reference: Record, seen: Record, tolerance: Tolerance, rank: int) -> Iterator[Comparison]:
    where = f"on rank {rank}"
    for name, array in seen.initial.items():
        if name in reference.initial:
            yield _exactly(f"initial {name}", where, array, reference.initial[name], time=0.0)
    for kind in ("losses", "gradients", "clipped"):
        count, expected_count = len(getattr(seen, kind)), len(getattr(reference, kind))
        off = float(abs(count - expected_count))
        yield Comparison(
            what=f"number of {kind} ({count}, not {expected_count})", where=where, error=off, allowed=0, time=0
        )
    for batch, (loss, expected) in enumerate(zip(seen.losses, reference.losses, strict=False)):
        yield Comparison(
            what="loss",
            where=f"of batch {batch} {where} ({loss:.7g}, not {expected:.7g})",
            error=abs(loss - expected) / max(1.0, abs(expected)),
            allowed=tolerance.loss,
            time=(batch + 1) / len(reference.losses),
        )
    for kind, attribute in (("gradient", "gradients"), ("clipped gradient", "clipped")):
        steps = list(zip(getattr(seen, attribute), getattr(reference, attribute), reference.gradients, strict=False))
        for step, (gradients, expected_gradients, unclipped) in enumerate(steps):
            time = (step + 1) / len(steps)
            place = f"at step {step} {where}"
            allowed = tolerance.gradient * (tolerance.later if step else 1.0)
            scales = {name: _scale(gradient, unclipped.get(name)) for name, gradient in expected_gradients.items()}
            least = max(tolerance.floor * max(scales.values(), default=0.0), 1e-30)
            for name, error in _gradient_errors(expected_gradients, gradients, seen.absent):
                missing = "" if name in gradients else " (missing)"
                what = f"{kind} of {name}{missing}"
                error /= max(scales.get(name, 0.0), least)
                yield Comparison(what=what, where=place, error=error, allowed=allowed, time=time)
            if not seen.absent:
                norm, expected = total_norm(gradients), total_norm(expected_gradients)
                off = abs(norm - expected) / max(expected, 1e-30)
                place += f" ({norm:.7g}, not {expected:.7g})"
                what = f"norm of every {kind}"
                yield Comparison(what=what, where=place, error=off, allowed=tolerance.norm, time=time)
    for name, array in seen.final.items():
        if name in reference.final:
            error = _max_error(array, reference.final[name])
            place = f"after the last step {where}"
            yield Comparison(what=f"weight {name}", where=place, error=error, allowed=tolerance.weight, time=1.0)


def _scale(gradient: np.ndarray, unclipped: np.ndarray | None) -> float:
    """The largest entry; of a clipped gradient, of what it was before, times the largest factor that clipping left.

    Clipping by value leaves small entries, and their rounding, as they were, and cuts off the large ones.
    """
    if unclipped is None:
        return float(np.abs(gradient).max(initial=0.0))
    factor = np.abs(np.divide(gradient, unclipped, out=np.zeros_like(gradient), where=unclipped != 0))
    return float(np.abs(unclipped).max(initial=0.0) * factor.max(initial=0.0))


def _gradient_errors(expected: Arrays, seen: Arrays, absent: set[str]) -> Iterator[tuple[str, float]]:
    """The largest error of each gradient. No gradient is a gradient of zero."""
    for name in [*expected, *(name for name in seen if name not in expected)]:
        if name not in absent:
            zeros = np.zeros_like(expected[name] if name in expected else seen[name])
            yield name, _max_error(seen.get(name, zeros), expected.get(name, zeros))


def _compare_presence(reference: Record, ranks: list[Record]) -> Iterator[Comparison]:
    """Each weight is held by some rank, under its own name, and no rank has one that the module does not."""

    def problem(what: str, where: str) -> Comparison:
        return Comparison(what=what, where=where, error=math.inf, allowed=0.0, time=0.0)

    for name in reference.final:
        holders = [rank for rank, record in enumerate(ranks) if name in record.final]
        without = [rank for rank, record in enumerate(ranks) if name not in record.final and name not in record.absent]
        if not holders or without:
            yield problem(f"weight {name} (missing)", f"on ranks {without or 'all'}")
    for rank, record in enumerate(ranks):
        for name in record.final:
            if name not in reference.final:
                yield problem(f"weight {name} that the module does not have (renamed, or untied?)", f"on rank {rank}")


def _compare_replicas(ranks: list[Record]) -> Iterator[Comparison]:
    first: dict[str, tuple[int, np.ndarray]] = {}
    for rank, record in enumerate(ranks):
        for name, array in record.final.items():
            holder, other = first.setdefault(name, (rank, array))
            yield _exactly(f"replica of {name}", f"on rank {rank}, beside rank {holder}'s", array, other, time=1.0)


def _exactly(what: str, where: str, seen: np.ndarray, expected: np.ndarray, *, time: float) -> Comparison:
    same = seen.shape == expected.shape and seen.tobytes() == expected.tobytes()
    error = 0.0 if same else _max_error(seen, expected)
    return Comparison(what=what, where=where, error=error, allowed=0.0 if same else -1.0, time=time)


def _max_error(seen: np.ndarray, expected: np.ndarray) -> float:
    if seen.shape != expected.shape:
        return math.inf
    if seen.size == 0:
        return 0.0
    return float(np.abs(seen.astype(np.float64) - expected.astype(np.float64)).max())
