"""Train an ordinary LightningModule on an n-dimensional device mesh."""

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
from lightning_parallel.strategies import register

register()
