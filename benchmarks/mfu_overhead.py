"""What MFUMonitor costs a training step.

    python benchmarks/mfu_overhead.py [--rounds 5] [--steps 60] [--dim 256] [--every 50]

Two figures. *Inside*: seconds spent in the callback's hooks and in what it listens with, summed, over the seconds of
the steps; this is what it costs, and other work on the machine hardly changes it. *Step over step*: the median over
rounds of the ratio of median steps with and without it, in turn; on a busy machine it says little. Counting, which
happens once for each shape of batch, is in neither and printed apart. Runs on one device, the
accelerator if there is one.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from model import VOCAB, Decoder, LanguageModel
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import MFUMonitor
from lightning_parallel.flops.meter import Meter

SKIPPED = 5
BATCH, SEQ = 4, 128
HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step")
MARKS = ("wait", "got")


class Stamps(Callback):
    """When each batch ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.at.append(time.perf_counter())

    def steps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.at)][SKIPPED:]


class Timed:
    """Adds up the seconds inside functions, by the number of the call."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def around(self, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args, **kwargs)
            self.seconds.append(time.perf_counter() - begin)
            return result

        setattr(owner, name, timed)


def fit(dim: int, steps: int, every: int, folder: str, *callbacks: Callback) -> list[float]:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, ((steps + SKIPPED + 1) * BATCH, SEQ + 1))
    loader = DataLoader(TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone()), batch_size=BATCH)
    stamps = Stamps()
    trainer = Trainer(
        max_epochs=1, devices=1, logger=CSVLogger(folder), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=every, callbacks=[stamps, *callbacks],
    )  # fmt: skip
    module = LanguageModel()
    module.model = Decoder(dim)
    trainer.fit(module, loader)
    return stamps.steps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--folder", default="/tmp/mfu_overhead")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    ratios, inside, counting, step = [], [], [], []
    for _ in range(options.rounds):
        without = fit(options.dim, options.steps, options.every, options.folder)
        monitor = MFUMonitor(peak_flops=1e12, summary=False)
        with_it = fit(options.dim, options.steps, options.every, options.folder, monitor)
        ratios.append(statistics.median(with_it) / statistics.median(without))
        counting.append(monitor.state_dict()["paused"]["counting"])

        # Once more, with a stopwatch around all that the callback does.
        timed, monitor = Timed(), MFUMonitor(peak_flops=1e12, summary=False)
        for name in HOOKS:
            timed.around(monitor, name)
        originals = {name: getattr(Meter, name) for name in MARKS}
        for name in MARKS:
            timed.around(Meter, name)
        try:
            steps = fit(options.dim, options.steps, options.every, options.folder, monitor)
        finally:
            for name, original in originals.items():
                setattr(Meter, name, original)
        calls = len(HOOKS) + len(MARKS)  # a step
        spent = sum(timed.seconds[SKIPPED * calls :]) / len(steps)  # the log every so many steps included
        inside.append(spent)
        step.append(statistics.fmean(steps))
    microseconds, whole = 1e6 * statistics.median(inside), 1e3 * statistics.median(step)
    print(f"step            {whole:8.2f} ms")
    print(f"inside          {microseconds:8.1f} µs a step = {microseconds / whole / 10:.3f} % of it (target 0.5 %)")
    spread = f"rounds: {min(ratios):.3f} … {max(ratios):.3f}"
    print(f"step over step  {100 * (statistics.median(ratios) - 1):+8.2f} %  ({spread})")
    print(f"counting        {1e3 * statistics.median(counting):8.1f} ms, once for a shape")


if __name__ == "__main__":
    main()
