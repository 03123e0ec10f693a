"""Callbacks for any Lightning strategy, ours or another."""

from lightning_parallel.callbacks.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
from lightning_parallel.callbacks.mfu import MFUMonitor as MFUMonitor
