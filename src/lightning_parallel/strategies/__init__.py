"""Lightning strategies: arguments turned into a mesh and a recipe."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_parallel.strategies.context import ContextParallel as ContextParallel
from lightning_parallel.strategies.data import DataParallel as DataParallel
from lightning_parallel.strategies.fully_sharded import FullyShardedDataParallel as FullyShardedDataParallel
from lightning_parallel.strategies.hybrid import HybridParallel as HybridParallel
from lightning_parallel.strategies.pipeline import PipelineParallel as PipelineParallel
from lightning_parallel.strategies.tensor import TensorParallel as TensorParallel


def register() -> None:
    """Make ``Trainer(strategy="hybrid_parallel")`` and the like work; Lightning has no entry point for it."""
    for name, strategy in {
        "context_parallel": ContextParallel,
        "data_parallel": DataParallel,
        "fully_sharded_data_parallel": FullyShardedDataParallel,
        "hybrid_parallel": HybridParallel,
        "pipeline_parallel": PipelineParallel,
        "tensor_parallel": TensorParallel,
    }.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, strategy, description=(strategy.__doc__ or "").partition("\n")[0])
