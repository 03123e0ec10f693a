"""Floating point operations of a training step, what a device can do at most, and the ratio of the two."""

from lightning_parallel.flops.metrics import ModelFlopsUtilization as ModelFlopsUtilization
from lightning_parallel.flops.metrics import TokensPerSecond as TokensPerSecond
