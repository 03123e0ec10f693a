"""The picture of memory against extra time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_parallel.schemes.checkpointing.budget import Plan


def draw_frontier(path: Path, plans: Sequence[Plan]) -> None:
    """Bytes of activations at the worst moment against seconds of recomputation in a step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), layout="constrained")  # without pyplot: no state, and no window
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([plan.peak / 2**20 for plan in plans], [1e3 * plan.seconds for plan in plans], marker="o")
    axes.set_xlabel("activations in the blocks at the worst moment, MiB")
    axes.set_ylabel("recomputation a step, ms")
    axes.set_ylim(bottom=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
