"""Train an ordinary LightningModule on an n-dimensional device mesh."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_parallel.registry import register

if TYPE_CHECKING:
    from lightning_parallel.callbacks import ActivationCheckpointing as ActivationCheckpointing
    from lightning_parallel.callbacks import MFUMonitor as MFUMonitor
    from lightning_parallel.errors import ParallelConfigError as ParallelConfigError
    from lightning_parallel.errors import PlanError as PlanError
    from lightning_parallel.plan import ParallelPlan as ParallelPlan
    from lightning_parallel.strategies import ContextParallel as ContextParallel
    from lightning_parallel.strategies import DataParallel as DataParallel
    from lightning_parallel.strategies import FullyShardedDataParallel as FullyShardedDataParallel
    from lightning_parallel.strategies import HybridParallel as HybridParallel
    from lightning_parallel.strategies import PipelineParallel as PipelineParallel
    from lightning_parallel.strategies import TensorParallel as TensorParallel

# Loaded when they are asked for: who imports the package for a callback does not wait for every strategy.
_HOMES = {
    "ActivationCheckpointing": "callbacks",
    "MFUMonitor": "callbacks",
    "ParallelConfigError": "errors",
    "PlanError": "errors",
    "ParallelPlan": "plan",
    "ContextParallel": "strategies",
    "DataParallel": "strategies",
    "FullyShardedDataParallel": "strategies",
    "HybridParallel": "strategies",
    "PipelineParallel": "strategies",
    "TensorParallel": "strategies",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


register()
