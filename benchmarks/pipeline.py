"""What a pipelined step through the Trainer costs over the same torch schedule driven by hand, and its bubble.

    python benchmarks/pipeline.py [--rounds 5] [--steps 4] [--part 25] [--case 1F1B …]

Four ranks, on any number of cores: blocks compute next to nothing and sleep, one part in forward, one in the backward
of their input and one in that of their weight, which zero-bubble schedules run apart. So a step has an ideal time, that
of a rank's microbatches one after the other, and what it takes beyond that is bubble and overhead.

Arms and ratios as in `overhead.py`; by hand means torch's schedule over torch's PipelineStage. All cases have the same
blocks, cut into as many stages as the schedule needs. A bubble is the share of a step in which a rank idles: by the
formula, by the schedule's own table of actions, and measured as 1 - ideal / step, overheads included. (The formula of
ZBV leaves out that later ranks start later: its steps overlap. That of DualPipe takes F&B for F + B.)
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import PipelineParallel
from lightning_parallel.schemes.pipeline.schedules import SCHEDULES, ScheduleSpec, actions_of
from lightning_parallel.schemes.pipeline.timeline import Timeline

RANKS, BLOCKS, MICROBATCHES, DIM, STEPS_SKIPPED = 4, 8, 8, 16, 1
PARTS_A_STEP = MICROBATCHES * BLOCKS // RANKS * 3
part = 0.025  # seconds


class SleepForInput(torch.autograd.Function):
    """Sleeps in forward, and in backward on the way to the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(part)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(part)
        return grad


class SleepForWeight(torch.autograd.Function):
    """Sleeps in backward on the way to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(part)
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(SleepForInput.apply(x), SleepForWeight.apply(self.weight))


class Sleeper(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def batches(count: int) -> DataLoader[Any]:
    x, y = torch.randn(2, count * MICROBATCHES, DIM, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, y), batch_size=MICROBATCHES)


def build_by_hand(spec: ScheduleSpec) -> tuple[nn.Module, Any]:
    """This rank's part of the model, and torch's schedule over it."""
    model, size = Sleeper(), BLOCKS // spec.num_stages
    parts = nn.ModuleDict()
    for index in spec.stages_of[dist.get_rank()]:
        blocks = model.blocks[index * size : (index + 1) * size]
        parts[str(index)] = nn.Sequential(*([model.stem] if index == 0 else []), *blocks)
    device = torch.device("cpu")
    stages = [PipelineStage(part, int(index), spec.num_stages, device) for index, part in parts.items()]
    return parts, spec.build(stages, F.mse_loss)


def time_by_hand(spec: ScheduleSpec, steps: int) -> list[float]:
    """Seconds of each step of a plain torch loop."""
    parts, schedule = build_by_hand(spec)
    schedule.scale_grads = True
    optimizer = torch.optim.SGD(parts.parameters(), lr=1e-3)
    stages = spec.stages_of[dist.get_rank()]
    stamps = []
    for x, y in batches(steps + STEPS_SKIPPED + 1):
        stamps.append(time.perf_counter())
        inputs = (x,) if 0 in stages else ()
        has_last = spec.num_stages - 1 in stages
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(*inputs, **({"target": y, "losses": losses} if has_last else {}), return_outputs=False)
        optimizer.step()
    return [b - a for a, b in pairwise(stamps)][STEPS_SKIPPED:]


def time_trainer(spec: ScheduleSpec, steps: int) -> list[float]:
    """Seconds of each step of ``Trainer.fit``."""
    stamps: list[float] = []

    class Stamp(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            stamps.append(time.perf_counter())

    strategy = PipelineParallel(schedule=spec.name, microbatches=spec.microbatches)
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, logger=False, callbacks=[Stamp()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Sleeper(), batches(steps + STEPS_SKIPPED + 1))
    return [b - a for a, b in pairwise(stamps)][STEPS_SKIPPED:]


def formula(spec: ScheduleSpec) -> float:
    """Share of a step. Time in forwards of a rank on a microbatch; a backward takes two (input 1, weight 1)."""
    p, v, f, b, w = spec.size, spec.virtual, 1, 2, 1
    bubble = {
        "GPipe": (p - 1) * (f + b),
        "1F1B": (p - 1) * (f + b),
        "Interleaved1F1B": (p - 1) * (f + b) / v,
        "LoopedBFS": (p - 1) * (f + b) / v,
        "InterleavedZeroBubble": (p - 1) * (f + b - 2 * w) / v,  # ZB-H1's, of stages v times as short
        "ZBVZeroBubble": 0,
        "DualPipeV": (p - 1) * (f + b + b - 3 * w) / v,  # DualPipe's of 2p stages
    }[spec.name]
    return bubble / (bubble + spec.microbatches * (f + b))


@contextmanager
def processes(store: dist.Store, turn: str) -> Iterator[None]:
    """A process group of its own for each arm: threads of earlier ones would slow the later."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore(turn, store), rank=rank, world_size=size)
    dist.barrier()
    yield
    dist.barrier()
    dist.destroy_process_group()


def work(names: list[str], rounds: int, steps: int, part_ms: float) -> None:
    """One process."""
    global part
    part = part_ms / 1000
    ideal = PARTS_A_STEP * part
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    store, rank, _ = next(dist.rendezvous("env://"))
    arms = {"Trainer": time_trainer, "by hand": time_by_hand}
    if rank == 0:
        print(HEADER.format(ranks=RANKS, microbatches=MICROBATCHES, ideal=1000 * ideal), flush=True)
    for name in names:
        spec = ScheduleSpec.of(name, RANKS, microbatches=MICROBATCHES)
        medians: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(rounds):
            for arm in list(arms)[:: 1 if turn % 2 else -1]:
                with processes(store, f"{name}/{turn}/{arm}"):
                    medians[arm].append(statistics.median(arms[arm](spec, steps)))
        with processes(store, name):
            planned = Timeline.plan(actions_of(spec, build_by_hand(spec)[1])).bubble_fraction
        if rank == 0:
            print(report(spec, medians, planned, ideal), flush=True)


HEADER = """\
{ranks} ranks, {microbatches} microbatches, ideal step {ideal:.0f} ms
                       Trainer / by hand         step in ms           bubble
schedule               ratio (quartiles)         Trainer   by hand    formula   table   Trainer   by hand"""


def report(spec: ScheduleSpec, medians: dict[str, list[float]], planned: float, ideal: float) -> str:
    ours, by_hand = (statistics.median(values) for values in medians.values())
    ratios = sorted(a / b for a, b in zip(*medians.values(), strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return (
        f"{spec.name:<22} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) "
        f"{1000 * ours:>9.0f} {1000 * by_hand:>9.0f} {formula(spec):>10.1%} {planned:>7.1%} "
        f"{1 - ideal / ours:>9.1%} {1 - ideal / by_hand:>9.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--part", type=float, default=25, help="milliseconds of each sleep")
    parser.add_argument("--case", nargs="*", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.case, args.rounds, args.steps, args.part)
        return
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone", __file__]
    command += ["--worker", f"--rounds={args.rounds}", f"--steps={args.steps}"]
    command += [f"--part={args.part}", "--case", *args.case]
    subprocess.run(command, check=True, env=dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"))


if __name__ == "__main__":
    main()
