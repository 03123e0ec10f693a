"""What a step through the Trainer costs over the same work by hand, and over Lightning's own strategies.

    python benchmarks/overhead.py [--rounds 7] [--steps 12] [--case fsdp …]

Each case runs its arms in turn, round after round, in the same processes, so that all see the same machine. A step is
timed from batch to batch, data loading and optimizer included; the first steps of a round are left out. The figure is
the median over rounds of the ratio of the two medians of one round. Only ratios of one run mean anything.

By hand means torch's own API on the same mesh: DistributedDataParallel, fully_shard for each block, parallelize_module
with sequence parallel and a loss on split logits.
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
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

STEPS_SKIPPED = 3
BATCH, SEQ = 4, 64


def batches(count: int) -> Any:
    import torch
    from model import VOCAB
    from torch.utils.data import DataLoader, TensorDataset

    tokens = torch.randint(0, VOCAB, (count * BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone()), batch_size=BATCH)


def time_by_hand(prepare: Callable[[Any], Any], steps: int) -> list[float]:
    """Seconds of each step of a plain torch loop over what ``prepare`` makes of the module."""
    from model import LanguageModel

    module = LanguageModel()
    loss_of = prepare(module)
    optimizer = module.configure_optimizers()
    stamps = []
    for batch in batches(steps + 1):
        stamps.append(time.perf_counter())
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [b - a for a, b in pairwise(stamps)][STEPS_SKIPPED:]


def time_trainer(strategy: Any, steps: int, module: Any = None) -> list[float]:
    """Seconds of each step of ``Trainer.fit``."""
    from lightning import Callback, Trainer
    from model import LanguageModel

    stamps: list[float] = []

    class Stamp(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            stamps.append(time.perf_counter())

    trainer = Trainer(
        accelerator="auto", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=steps + 1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[Stamp()],
    )  # fmt: skip
    trainer.fit(module or LanguageModel(), batches(steps + 1))
    return [b - a for a, b in pairwise(stamps)][STEPS_SKIPPED:]


def ddp_by_hand(module: Any) -> Any:
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(module.model)
    return lambda batch: F.cross_entropy(wrapped(batch[0]).flatten(0, 1), batch[1].flatten())


def shard(module: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in module.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module.model, mesh=mesh)


def split(module: Any, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    parallelize_module(module.model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    })  # fmt: skip
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in module.model.blocks:
        parallelize_module(block, mesh, {
            "norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gather, "mlp": gather,
            "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        })  # fmt: skip


def split_loss(module: Any) -> Callable[[Any], Any]:
    """Loss and backward of logits split over the vocabulary, as torchtitan's users write it."""
    from torch.distributed.tensor.parallel import loss_parallel

    class Loss:
        def __init__(self, batch: Any) -> None:
            with loss_parallel():
                self.value = module.loss(batch)

        def backward(self) -> None:
            with loss_parallel():
                self.value.backward()

    return Loss


def mesh_of(**axes: int) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def fsdp_by_hand(module: Any) -> Any:
    shard(module, mesh_of(fsdp=int(os.environ["WORLD_SIZE"])))
    return module.loss


def tp_by_hand(module: Any) -> Any:
    split(module, mesh_of(tp=int(os.environ["WORLD_SIZE"])))
    return split_loss(module)


def fsdp_tp_by_hand(module: Any) -> Any:
    mesh = mesh_of(fsdp=2, tp=2)
    split(module, mesh["tp"])
    shard(module, mesh["fsdp"])
    return split_loss(module)


def lightning_model_parallel(**sizes: int) -> tuple[Any, Any]:
    """Lightning's strategy and a module that shards itself in ``configure_model``, as that strategy asks."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from model import LanguageModel

    class SelfSharded(LanguageModel):
        def configure_model(self) -> None:
            if sizes["data_parallel_size"] > 1:
                shard(self, self.device_mesh["data_parallel"])

    return ModelParallelStrategy(**sizes), SelfSharded()


def cases() -> dict[str, tuple[int, dict[str, Callable[[int], list[float]]]]]:
    """Name to (processes, arms); the first arm is ours."""
    from lightning.pytorch.strategies import DDPStrategy
    from model import PLAN

    import lightning_parallel as lp

    def model_parallel(steps: int) -> list[float]:
        strategy, module = lightning_model_parallel(data_parallel_size=2, tensor_parallel_size=1)
        return time_trainer(strategy, steps, module)

    return {
        "ddp": (2, {
            "DataParallel": lambda n: time_trainer(lp.DataParallel(), n),
            "by hand": lambda n: time_by_hand(ddp_by_hand, n),
            "DDPStrategy": lambda n: time_trainer(DDPStrategy(), n),
        }),
        "fsdp": (2, {
            "FullyShardedDataParallel": lambda n: time_trainer(lp.FullyShardedDataParallel(), n),
            "by hand": lambda n: time_by_hand(fsdp_by_hand, n),
            "ModelParallelStrategy": model_parallel,
        }),
        "tp": (2, {
            "TensorParallel": lambda n: time_trainer(lp.TensorParallel(plan=PLAN), n),
            "by hand": lambda n: time_by_hand(tp_by_hand, n),
        }),
        "fsdp×tp": (4, {
            "HybridParallel": lambda n: time_trainer(lp.HybridParallel(fsdp=2, tp=2, plan=PLAN), n),
            "by hand": lambda n: time_by_hand(fsdp_tp_by_hand, n),
        }),
    }  # fmt: skip


def work(name: str, rounds: int, steps: int) -> None:
    """One process of a case."""
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    _, arms = cases()[name]
    dist.init_process_group()
    medians: dict[str, list[float]] = {arm: [] for arm in arms}
    for round_number in range(rounds + 1):  # the first warms up
        order = list(arms) if round_number % 2 else list(arms)[::-1]
        for arm in order:
            dist.barrier()
            seconds = statistics.median(arms[arm](steps))
            if round_number:
                medians[arm].append(seconds)
    if dist.get_rank() == 0:
        for line in report(name, medians):
            print(line, flush=True)
    dist.destroy_process_group()


def report(name: str, medians: dict[str, list[float]]) -> Iterator[str]:
    ours, *others = medians
    milliseconds = ", ".join(f"{arm} {1000 * statistics.median(values):.1f} ms" for arm, values in medians.items())
    yield f"{name}: {milliseconds}"
    for other in others:
        ratios = sorted(a / b for a, b in zip(medians[ours], medians[other], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        yield f"  {ours} / {other}: {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--case", nargs="*", default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.rounds, args.steps)
        return
    for name, (processes, _) in cases().items():
        if args.case and name not in args.case:
            continue
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={processes}",
            "--standalone",
            __file__,
        ]
        command += ["--worker", name, f"--rounds={args.rounds}", f"--steps={args.steps}"]
        subprocess.run(command, check=True, env=dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"))


if __name__ == "__main__":
    main()
