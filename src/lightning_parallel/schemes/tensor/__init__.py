"""Tensor parallelism for an unchanged module: split its parameters over ``tp`` and give each role its forward."""

from lightning_parallel.schemes.tensor.apply import TensorSplit as TensorSplit
from lightning_parallel.schemes.tensor.storage import shard_dim_for_fsdp as shard_dim_for_fsdp
