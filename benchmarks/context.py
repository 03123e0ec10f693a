"""How even the work of context parallelism is over ranks, and what its three ways to attend cost beside each other.

    python benchmarks/context.py [--rounds 7] [--length 4096] [--case causal …]

Four ranks, on any number of cores, each with one thread. Balance is the slowest rank's time in attention kernels,
forward and backward, over the mean of the ranks: 1 is even, and what is above it, the others wait. It is counted in
processor time where the device is the host, so that ranks which share a core do not disturb it. A step is forward and
backward of one attention call, from barrier to barrier; arms run in turn, round after round, in the same processes. The
ratios are medians over rounds with quartiles, each against the first arm of the case. Only ratios of one run mean
anything.

torch's own context_parallel has no kernel for hosts: it is an arm where each rank has an accelerator.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.schemes.context.attention import attend
from lightning_parallel.schemes.context.kernels import Kernel
from lightning_parallel.schemes.context.layout import Layout

RANKS, BATCH, HEADS, KV_HEADS, DIM = 4, 1, 8, 4, 64
# Name to (is_causal, width of a sliding window or None).
CASES: dict[str, tuple[bool, int | None]] = {
    "causal": (True, None),
    "full": (False, None),
    "window": (True, 1024),
    "packed": (True, None),
}
PACKED = (0.4, 0.02, 0.1, 0.05, 0.25, 0.18)  # documents, in parts of the length
Arm = Callable[[], None]


def device() -> torch.device:
    """One accelerator a rank, or the host."""
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= RANKS:
        return torch.device(torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def random_rows(rows: int, heads: int) -> Tensor:
    dtype = torch.float32 if device().type == "cpu" else torch.bfloat16
    return torch.randn(BATCH, heads, rows, DIM, device=device(), dtype=dtype, requires_grad=True)


def ours(
    method: str,
    length: int,
    *,
    balanced: bool,
    causal: bool,
    window: int | None,
    documents: tuple[int, ...] = (),
    by_document: bool = False,
) -> Arm:
    layout = Layout(length, RANKS, balanced, documents if by_document else ())
    q, k, v = (random_rows(layout.num_local, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    i = torch.arange(length, device=device())
    mask = None if window is None else i.unsqueeze(-1) - i < window
    if documents:
        which = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)).to(device())
        mask = which.unsqueeze(-1) == which

    def step() -> None:
        out = attend(
            q, k, v, layout=layout, group=dist.group.WORLD, method=method, is_causal=causal, attn_mask=mask
        )  # fmt: skip
        out.sum().backward()

    return step


def torchs(length: int, *, causal: bool) -> Arm:
    """torch's context_parallel, which shards the buffers as it is entered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(device().type, (RANKS,))
    q, k, v = (random_rows(length, HEADS).detach() for _ in range(3))  # it takes no groups

    def step() -> None:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            local = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            F.scaled_dot_product_attention(*local, is_causal=causal).sum().backward()

    return step


def arms(case: str, length: int) -> dict[str, Arm]:
    causal, window = CASES[case]
    options: dict[str, Any] = {"causal": causal, "window": window}
    found = {
        f"{method} {'balanced' if balanced else 'plain'}": ours(method, length, balanced=balanced, **options)
        for method in ("ring", "allgather", "ulysses")
        for balanced in (True, False)
    }
    if case == "packed":
        parts = [round(part * length) for part in PACKED[1:]]
        options["documents"] = (length - sum(parts), *parts)
        found = {
            f"{method} {'by document' if by else 'of the whole'}": ours(
                method, length, balanced=True, by_document=by, **options
            )
            for method in ("ring", "allgather", "ulysses")
            for by in (True, False)
        }
    elif device().type != "cpu" and window is None:
        found["torch's context_parallel"] = torchs(length, causal=causal)
    return found


@contextmanager
def timed_kernels(seconds: list[float]) -> Iterator[None]:
    """Collects the time in attention kernels of blocks."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            seconds.append(clock() - start)
            return result

        return run

    with (
        patch.object(Kernel, "forward", timed(Kernel.forward)),
        patch.object(Kernel, "backward", timed(Kernel.backward)),
    ):
        yield


def clock() -> float:
    """Of this thread's work on the host; of everything that is queued, on an accelerator."""
    if device().type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def balance(step: Arm) -> float | None:
    """Slowest rank over mean; None where attention is not by blocks."""
    seconds: list[float] = []
    with timed_kernels(seconds):
        step()
    everyone = [torch.zeros(1, device=device()) for _ in range(RANKS)]
    dist.all_gather(everyone, torch.tensor([sum(seconds, 0.0)], device=device()))
    times = [float(each) for each in everyone]
    return max(times) / statistics.mean(times) if all(times) else None


def wall_time(step: Arm) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def work(names: list[str], rounds: int, length: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    if device().type != "cpu":
        torch.accelerator.set_device_index(device().index)
    dist.init_process_group()
    for name in names:
        steps = arms(name, length)
        times: dict[str, list[float]] = {arm: [] for arm in steps}
        balances: dict[str, list[float]] = {arm: [] for arm in steps}
        for round_number in range(rounds + 1):  # the first warms up
            for arm in list(steps) if round_number % 2 else list(steps)[::-1]:
                seconds, evenness = wall_time(steps[arm]), balance(steps[arm])
                if round_number:
                    times[arm].append(seconds)
                    balances[arm] += [] if evenness is None else [evenness]
        if dist.get_rank() == 0:
            print(report(name, times, balances), flush=True)
    if dist.get_rank() == 0 and device().type == "cpu":
        print("torch's context_parallel: not here, it needs an accelerator for each rank")
    dist.destroy_process_group()


def report(name: str, times: dict[str, list[float]], balances: dict[str, list[float]]) -> str:
    first, *_ = times
    lines = [f"{name}: step of {first} {1000 * statistics.median(times[first]):.0f} ms"]
    for arm, values in times.items():
        ratios = sorted(a / b for a, b in zip(values, times[first], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        even = f"slowest rank / mean {statistics.median(balances[arm]):.2f}" if balances[arm] else "by heads, even"
        lines.append(f"  {arm:26} step {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})   {even}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.case, args.rounds, args.length)
        return
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone", __file__]
    command += ["--worker", f"--rounds={args.rounds}", f"--length={args.length}", "--case", *args.case]
    subprocess.run(command, check=True, env=dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"))


if __name__ == "__main__":
    main()
