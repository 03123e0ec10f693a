"""Lightning strategies: arguments turned into a mesh and a recipe."""

from lightning_parallel.strategies.context import ContextParallel as ContextParallel
from lightning_parallel.strategies.data import DataParallel as DataParallel
from lightning_parallel.strategies.fully_sharded import FullyShardedDataParallel as FullyShardedDataParallel
from lightning_parallel.strategies.hybrid import HybridParallel as HybridParallel
from lightning_parallel.strategies.pipeline import PipelineParallel as PipelineParallel
from lightning_parallel.strategies.tensor import TensorParallel as TensorParallel
