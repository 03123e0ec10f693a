"""Callbacks for any Lightning strategy, ours or another."""

from lightning_parallel.callbacks.mfu import MFUMonitor as MFUMonitor
