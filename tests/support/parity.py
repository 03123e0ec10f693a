"""One question for every scheme: does a mesh train as one device does?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning import LightningModule

from tests.support.comparison import Parity as Parity
from tests.support.comparison import Tolerance as Tolerance
from tests.support.comparison import compare as compare
from tests.support.models import OptimizerOptions
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, describe
from tests.support.training import Training, train


def assert_same_training(
    pool: WorkerPool,
    model_factory: Callable[..., LightningModule],
    strategy_factory: Spec,
    *,
    world: int,
    steps: int = 3,
    batch: int = 8,
    seq: int = 16,
    accumulate: int = 1,
    clip_val: float | None = None,
    clip_algorithm: str = "norm",
    precision: str = "32-true",
    optimizer: OptimizerOptions | str | None = None,
    plan: Mapping[str, str] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
    parallel_trainer_kwargs: Mapping[str, Any] | None = None,
    seed_apart: bool = False,
    tolerance: Tolerance | None = None,
    timeout: float = 120.0,
) -> Parity:
    """Train on one device and on `world` ranks from the same global batches, and compare every number.

    Compared on every rank: the starting weights (bit for bit), each logged loss, each whole gradient before
    each optimizer step and, with clipping, after it, the total gradient norm, weights and buffers after the last step;
    and the weights of the ranks with each other (bit for bit). One device's record is kept for the session.

    Args:
        model_factory: Makes the LightningModule in the worker; importable.
        strategy_factory: `("HybridParallel", {"fsdp": 2})`, nested as needed, or an importable function.
        batch: Samples in a global batch; each of `steps` optimizer steps takes `accumulate` of them.
        optimizer: Given to the model factory as `optimizer=`; None leaves it out.
        plan: Given to the strategy as `plan=`.
        trainer_kwargs: More arguments of both Trainers; callbacks as specs.
        parallel_trainer_kwargs: The same, of the parallel one only.
        seed_apart: Each rank draws other weights before the strategy starts; rank 0's must win.

    Raises:
        AssertionError: With the tensor, the step, the rank, the mesh and the error.
    """
    if plan is not None:
        if callable(strategy_factory):
            raise TypeError("plan= needs a strategy given by name")
        strategy_factory = (strategy_factory[0], {**strategy_factory[1], "plan": dict(plan)})
    one_device = Training(
        model=model_factory,
        model_kwargs={**(model_kwargs or {}), **({} if optimizer is None else {"optimizer": optimizer})},
        strategy=None,
        steps=steps,
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        clip_val=clip_val,
        clip_algorithm=clip_algorithm,
        precision=precision,
        trainer_kwargs=dict(trainer_kwargs or {}),
    )
    on_mesh = replace(
        one_device,
        strategy=strategy_factory,
        seed_apart=seed_apart,
        trainer_kwargs={**one_device.trainer_kwargs, **(parallel_trainer_kwargs or {})},
    )
    [reference] = pool.run_once(train, one_device, world=1, timeout=timeout)
    ranks = pool.run(train, on_mesh, world=world, timeout=timeout)
    title = f"{describe(strategy_factory)} on {world} ranks, {describe(model_factory)}"
    return compare(reference, ranks, tolerance or Tolerance(), title=title)
