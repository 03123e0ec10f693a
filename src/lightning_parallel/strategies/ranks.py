"""Who a process is, where it lies on the mesh, and what processes say to each other."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_parallel import _lightning as adapter
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.mesh import MeshSizes, ParallelMesh, ResolvedSizes
from lightning_parallel.schemes.checkpointing.apply import Checkpointing
from lightning_parallel.strategies.launching import ScriptLauncher, watch_rank_zero
from lightning_parallel.strategies.lockstep import DataRanks, PeerCheck, gather_over
from lightning_parallel.strategies.samplers import sampler_kwargs
from lightning_parallel.strategies.sigterm import SigtermFlag

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT: timedelta = default_pg_timeout


class RankStrategy(ParallelStrategy):
    """The processes of a run and their mesh.

    Args:
        sizes: Of the axes.
        process_group_backend: Backend of the default process group; by default the device's.
        timeout: Of collectives.

    Attributes:
        activation_checkpointing: What the callback of that name wants done to the module.
    """

    activation_checkpointing: Checkpointing | None = None

    def __init__(self, sizes: MeshSizes, *, process_group_backend: str | None, timeout: timedelta | None) -> None:
        super().__init__()
        self._requested = sizes
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self.num_nodes = 1
        self._mesh: ParallelMesh | None = None
        self._trainer: pl.Trainer | None = None
        self._accelerator_in_use: Accelerator | None = None
        self._is_in_use = False
        self._sigterm_flag: SigtermFlag | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        # Not in the base's attribute: a second Trainer would read it and complain of that, not of the strategy.
        return self._accelerator_in_use

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Accelerator | None) -> None:
        self._accelerator_in_use = accelerator

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Lightning asks: without it no sampler is injected and ``sync_dist`` is ignored."""
        return True

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group; ``None`` until it is chosen by the device."""
        return self._process_group_backend

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh and its views.

        Raises:
            RuntimeError: Before the Trainer has set up the processes.
        """
        if self._mesh is None:
            raise RuntimeError("The mesh exists once trainer.fit, validate, test or predict has set up the processes.")
        return self._mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's device mesh with the axes ``pp``, ``ddp``, ``fsdp`` and ``tp``."""
        return self.mesh.device_mesh

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Axis name to size, outermost first; what ``"auto"`` became included."""
        return self.mesh.sizes.as_dict()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Peers on the tp axis hold the same samples.
        return sampler_kwargs(self.mesh.data_rank, self.mesh.sizes.data)

    @override
    def _configure_launcher(self) -> None:
        if self._is_in_use:  # each Trainer calls this once, when it is made
            raise ParallelConfigError(
                f"This {type(self).__name__} already belongs to another Trainer, whose mesh and module it holds. "
                "Make a new strategy for each Trainer."
            )
        self._is_in_use = True
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        watch_rank_zero()

    @override
    def connect(self, model: pl.LightningModule) -> None:
        self._trainer = model.trainer
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        sizes = self._resolve_sizes()  # first: there may be no device for this process
        super().setup_environment()
        adapter.reset_seed()
        self._process_group_backend = self._process_group_backend or adapter.default_backend(self.root_device)
        assert self.cluster_environment is not None
        adapter.init_process_group(
            self.cluster_environment, self._process_group_backend, self.root_device, self._timeout
        )
        if self._mesh is None:
            self._mesh = ParallelMesh(self.root_device.type, sizes)
            self._data_ranks = DataRanks(
                rank=self.global_rank,
                data_ranks=tuple(map(sizes.data_rank, range(sizes.world))),
                gather=gather_over(None, self.root_device),
            )
            self._peer_check = PeerCheck(self._data_ranks)
            log.info("Mesh: %s", sizes)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh.device_mesh

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers who this process is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        adapter.set_rank(self.global_rank)

    def _resolve_sizes(self) -> ResolvedSizes:
        """Final sizes, after a look at whether the launcher and the Trainer agree."""
        assert self.cluster_environment is not None
        world, asked = self.cluster_environment.world_size(), self.num_processes * self.num_nodes
        if self.local_rank >= self.num_processes or world != asked:
            raise ParallelConfigError(
                f"The launcher started {world} processes, the Trainer was asked for {asked} (devices="
                f"{self.num_processes} × num_nodes={self.num_nodes}). They must agree: set devices to the number of "
                "processes on each node, and num_nodes to the number of nodes."
            )
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        return self._requested.resolve(world)

    def _watch_sigterm(self, trainer: pl.Trainer) -> None:
        self._sigterm_flag = SigtermFlag(trainer, self.root_device)
        adapter.set_sigterm_flag(trainer, self._sigterm_flag)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._sigterm_flag is not None:
            self._sigterm_flag.wait()  # a rank that ends first would leave the others' without a peer

    # --- what ranks say to each other ---------------------------------------------------------------------------

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        # Peers on the tp axis hold the same samples: count them once.
        return adapter.reduce(tensor, self._data_group(group), reduce_op) if isinstance(tensor, Tensor) else tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return adapter.all_gather(tensor, self._data_group(group), sync_grads)

    def _data_group(self, group: Any | None) -> Any:
        """Lightning passes the world, or nothing, where it means every rank with its own samples."""
        return self.mesh.data_group if group is None or group is dist.group.WORLD else group

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            adapter.barrier(self.root_device)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]
