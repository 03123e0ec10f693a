"""Names of the strategies for ``Trainer(strategy="hybrid_parallel")``: Lightning has no entry point for them."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

_NAMES = {
    "context_parallel": "ContextParallel",
    "data_parallel": "DataParallel",
    "fully_sharded_data_parallel": "FullyShardedDataParallel",
    "hybrid_parallel": "HybridParallel",
    "pipeline_parallel": "PipelineParallel",
    "tensor_parallel": "TensorParallel",
}


def _make(name: str, **arguments: Any) -> Strategy:
    """A strategy, which is loaded now."""
    strategy: Strategy = getattr(import_module("lightning_parallel.strategies"), name)(**arguments)
    return strategy


def register() -> None:
    """Make the names known."""
    for name, strategy in _NAMES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, partial(_make, strategy), description=f"lightning_parallel.{strategy}")
