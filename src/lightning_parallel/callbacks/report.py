"""The names under which figures are logged, the table at the end, and the curve."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

# Name in a logger to the figure. TensorBoard makes a group of what is in front of the stroke.
NAMES: Mapping[str, str] = {
    "utilization/mfu": "mfu",
    "utilization/hfu": "hfu",
    "utilization/tflops_per_device": "tflops_per_device",
    "utilization/hardware_tflops_per_device": "hardware_tflops_per_device",
    "throughput/tokens_per_second": "tokens_per_second",
    "throughput/tokens_per_second_per_device": "tokens_per_second_per_device",
    "throughput/samples_per_second": "samples_per_second",
    "throughput/samples_per_second_per_device": "samples_per_second_per_device",
    "time/step_seconds": "step_seconds",
    "time/data_share": "data_share",
    "time/validation_seconds": "validation_seconds",
    "time/checkpoint_seconds": "checkpoint_seconds",
    "memory/peak_allocated_gib": "peak_allocated_gib",
    "memory/peak_reserved_gib": "peak_reserved_gib",
    "memory/peak_fraction": "peak_fraction",
}

_LABELS: Mapping[str, tuple[str, str]] = {
    "mfu": ("MFU", "{:.1%}"),
    "hfu": ("HFU (with recomputation)", "{:.1%}"),
    "tflops_per_device": ("TFLOP/s per device", "{:,.3g}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "tokens_per_second_per_device": ("tokens/s per device", "{:,.0f}"),
    "samples_per_second": ("samples/s", "{:,.4g}"),
    "samples_per_second_per_device": ("samples/s per device", "{:,.4g}"),
    "step_seconds": ("step, s", "{:.4g}"),
    "data_share": ("of it waiting for data", "{:.1%}"),
    "validation_seconds": ("validation, s (kept out)", "{:.4g}"),
    "checkpoint_seconds": ("checkpoints, s (kept out)", "{:.4g}"),
    "peak_allocated_gib": ("most memory allocated, GiB", "{:.2f}"),
    "peak_reserved_gib": ("most memory reserved, GiB", "{:.2f}"),
    "peak_fraction": ("of the device's memory", "{:.1%}"),
}


def named(figures: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Figures under the names that loggers get."""
    return {prefix + name: figures[key] for name, key in NAMES.items() if key in figures}


def lines(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and value of each figure that there is."""
    return [(label, style.format(figures[key])) for key, (label, style) in _LABELS.items() if key in figures]


def show(figures: Mapping[str, float], notes: Sequence[str]) -> None:
    """Print a table; in plain text where rich is not installed."""
    rows = lines(figures)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            log.info("%s  %s", label.ljust(width), value)
        for note in notes:
            log.info("%s", note)
        return
    table = Table(title="Throughput of the run", caption="\n".join(notes), caption_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    for label, value in rows:
        table.add_row(label, value)
    Console().print(table)


def check_plot(path: str | Path) -> Path:
    """The path of a picture that can be drawn.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: It is neither a PNG nor an SVG.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"plot={str(path)!r}: the picture is a .png or an .svg.")
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ImportError("plot= needs matplotlib: pip install 'lightning-parallel[plot]'.")
    return path


def draw(path: Path, steps: Sequence[int], curves: Mapping[str, Sequence[float]], caption: str) -> None:
    """Curves over optimizer steps, in percent of the peak."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")  # without pyplot: no state, and no window
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, values in curves.items():
        axes.plot(steps, [100 * value for value in values], label=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("% of peak")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.set_title(caption, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
