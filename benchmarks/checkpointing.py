"""Memory and time of checkpointing policies on one model, beside torch's compile-time memory budget.

    python benchmarks/checkpointing.py [--dim 256] [--layers 6] [--batch 4] [--seq 256] [--rounds 9] [--plot FILE]

Of each policy: the most bytes of activations and temporaries alive in a step, counted exactly by operation; extra FLOPs
of matrix products over a step without checkpointing; and the time of a step over that of one without, medians of
rounds in which all take turns. torch's ``activation_memory_budget`` is a fraction that its partitioner, run with the
same kernels (``aot_eager_decomp_partition``), makes what it can of; its time is over its own at 1.0. Then, for each of
its points, our plan for the memory that it took: the frontier is at or below torch's where neither column is larger,
or where torch took less than the least there is with whole blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from model import Decoder
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_parallel.callbacks.frontier import draw_frontier
from lightning_parallel.callbacks.report import check_plot
from lightning_parallel.schemes.checkpointing.apply import Checkpointing
from lightning_parallel.schemes.checkpointing.budget import table
from lightning_parallel.schemes.checkpointing.policy import Policy

FRACTIONS = (0.3, 0.45, 0.6, 0.8)
MIB = 2**20
_COMPILED: list[Any] = []


class Living(TorchDispatchMode):
    """Bytes of all that operations returned and that something holds."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.seen and key not in given:
                self.now += size
                self.peak = max(self.peak, self.now)
                self.seen[key] = weakref.ref(storage, lambda _, key=key, size=size: self.forget(key, size))
        return out

    def forget(self, key: int, size: int) -> None:
        self.now -= size
        del self.seen[key]


class Flops(FlopCounterMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@dataclass
class Arm:
    """One way to run a step."""

    name: str
    run: Callable[[Tensor], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    flops: int = 0

    def step(self, data: Tensor) -> None:
        with self.context():
            self.run(data).square().mean().backward()

    def count(self, data: Tensor) -> None:
        self.step(data)  # what is compiled is compiled, and gradients are there
        with Living() as living:
            self.step(data)
        self.peak = living.peak
        with Flops(display=False) as flops:
            self.step(data)
        self.flops = flops.get_total_flops()

    def time(self, data: Tensor) -> None:
        start = time.perf_counter()
        self.step(data)
        if data.device.index is not None:
            torch.get_device_module(data.device).synchronize()
        self.seconds.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def make_trunk(options: argparse.Namespace, device: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*Decoder(options.dim, options.layers).blocks).to(device)


def ours(options: argparse.Namespace, data: Tensor, name: str, policy: Policy, budget: int | None = None) -> Arm:
    trunk = make_trunk(options, data.device)
    checkpointing = Checkpointing(policy)
    checkpointing.install(trunk, [str(index) for index in range(options.layers)])
    arm = Arm(name, trunk)
    arm.step(data)
    if policy.kind == "budget":
        checkpointing.ledger.begin()
        arm.step(data)
        checkpointing.solve(budget)
    return arm


def torchs(options: argparse.Namespace, data: Tensor, fraction: float) -> Arm:
    trunk = make_trunk(options, data.device)

    def run(x: Tensor) -> Tensor:
        for block in trunk:
            x = block(x)
        return x

    # A code object of its own, with its own cache: of another arm's, dynamo would run what it has.
    own = FunctionType(run.__code__.replace(co_name=f"run_{len(_COMPILED)}"), run.__globals__, closure=run.__closure__)
    compiled = torch.compile(own, backend="aot_eager_decomp_partition")
    _COMPILED.append(compiled)

    def context() -> AbstractContextManager[Any]:
        return torch._functorch.config.patch(activation_memory_budget=fraction)  # whenever it is compiled anew

    return Arm(f"torch, activation_memory_budget={fraction}", compiled, context)


def measure(arms: list[Arm], data: Tensor, rounds: int) -> None:
    for arm in arms:
        arm.count(data)
    for _ in range(rounds):
        for arm in arms:
            arm.time(data)


def show(arm: Arm, base: Arm) -> None:
    print(
        f"{arm.name:<40} {arm.peak / MIB:>9.2f} {(arm.flops - base.flops) / base.flops:>11.3f}"
        f" {arm.median / base.median:>10.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dim", 256), ("layers", 6), ("batch", 4), ("seq", 256), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--plot", help="a .png or .svg for our frontier")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    data = torch.randn(options.batch, options.seq, options.dim, device=device, requires_grad=True)

    plain = Arm("none", make_trunk(options, data.device))
    arms = [
        plain,
        ours(options, data, "full", Policy()),
        ours(options, data, "selective", Policy(kind="selective")),
        *(ours(options, data, f"budget={f}", Policy(kind="budget", budget=f)) for f in FRACTIONS),
    ]
    theirs = [torchs(options, data, fraction) for fraction in (1.0, *reversed(FRACTIONS), 0.0)]
    measure([*arms, *theirs], data, options.rounds)
    print(f"{'policy':<40} {'peak MiB':>9} {'extra FLOPs':>11} {'time ratio':>10}")
    for arm in arms:
        show(arm, plain)
    for arm in theirs:
        show(arm, theirs[0])

    # What is alive besides what the blocks hold: temporaries of backward, gradients.
    checkpointing = Checkpointing(Policy())
    trunk = make_trunk(options, data.device)
    checkpointing.install(trunk, [str(index) for index in range(options.layers)])
    probe = Arm("", trunk)
    probe.count(data)
    least = checkpointing.predicted()[0]
    besides = probe.peak - least
    print("\nin the memory that torch's took, ours:")
    everything, matched = True, []
    for other in theirs:
        budget = max(other.peak - besides, least)
        name = f"in the memory of {other.name.rpartition('=')[2]}"
        for _ in range(3):  # what is alive besides depends a little on what is kept
            arm = ours(options, data, name, Policy(kind="budget", budget=budget), budget)
            arm.count(data)
            if arm.peak <= other.peak or budget == least:
                break
            budget = max(budget - (arm.peak - other.peak), least)
        matched.append(arm)
    measure([plain, *matched, *theirs], data, options.rounds)
    for arm, other in zip(matched, theirs, strict=True):
        show(arm, plain)
        extra, others_extra = arm.flops - plain.flops, other.flops - theirs[0].flops
        everything &= arm.peak <= max(other.peak, least + besides) and extra <= others_extra
    print(f"at or below torch's in bytes and FLOPs at every point: {'yes' if everything else 'no'}")
    print("\nour frontier, by prediction:")
    frontier = checkpointing.model().frontier()
    print(table(frontier))
    if options.plot:
        draw_frontier(check_plot(options.plot), frontier)


if __name__ == "__main__":
    main()
