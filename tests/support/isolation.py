"""Puts a worker process back to the state it was in before a call."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

# What a strategy could be tempted to replace; a replacement that outlives the call would poison later references.
_PATCHABLE = (torch.nn.functional, torch.Tensor, torch.nn.Module, dist)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGALRM)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Process-wide state, taken on construction."""

    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: str = field(default_factory=os.getcwd)
    random_state: Any = field(default_factory=random.getstate)
    numpy_state: Any = field(default_factory=np.random.get_state)
    torch_state: torch.Tensor = field(default_factory=torch.get_rng_state)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    num_threads: int = field(default_factory=torch.get_num_threads)
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)
    signals: dict[signal.Signals, Any] = field(default_factory=lambda: {s: signal.getsignal(s) for s in _SIGNALS})
    attributes: tuple[dict[str, Any], ...] = field(default_factory=lambda: tuple(dict(vars(o)) for o in _PATCHABLE))

    def restore(self) -> list[str]:
        """Undo what a call changed, and name the torch functions that it left replaced."""
        end_process_groups()
        clear_torch_caches()
        restore_env(self.env)
        os.chdir(self.cwd)
        random.setstate(self.random_state)
        np.random.set_state(self.numpy_state)
        torch.set_rng_state(self.torch_state)
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.num_threads)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        for number, handler in self.signals.items():
            signal.signal(number, handler)
        rank_zero_only.rank = 0
        gc.collect()
        return self._restore_attributes()

    def _restore_attributes(self) -> list[str]:
        replaced = []
        for owner, attributes in zip(_PATCHABLE, self.attributes, strict=True):
            for name, original in attributes.items():
                now = vars(owner).get(name)
                if callable(original) and now is not original and not _is_of_compiler(now):
                    setattr(owner, name, original)
                    replaced.append(f"{owner.__name__}.{name}")
        return replaced


def _is_of_compiler(function: Any) -> bool:
    """Whether torch's compiler put it there, once for the life of the process: it counts modules that change."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.endswith("mutation_guard.py")


def restore_env(env: Mapping[str, str]) -> None:
    """Make `os.environ` equal `env`, touching only what differs."""
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update({name: value for name, value in env.items() if os.environ.get(name) != value})


def end_process_groups() -> None:
    """Destroy every process group, the default one included."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def clear_torch_caches() -> None:
    """Drop what torch keeps for the life of a process and that refers to meshes or groups now gone.

    The sharding caches are keyed by meshes that compare equal from call to call, and hold mesh objects whose
    process groups were destroyed. Private names of torch 2.13: there is no public way.
    """
    from torch.distributed import device_mesh
    from torch.distributed.tensor import DTensor, _random, _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _random._rng_tracker = None
    device_mesh._mesh_resources.mesh_stack.clear()
    DTensor._op_dispatcher._allow_implicit_replication = False
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
