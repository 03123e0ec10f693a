"""The Lightning side that every strategy of this package shares; the mesh, the recipe and the step do the work."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_parallel import _lightning as adapter
from lightning_parallel import checkpoint as checkpoints
from lightning_parallel._lightning import Path
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.huggingface import published_plan
from lightning_parallel.materialize import fingerprint
from lightning_parallel.mesh import MeshSizes, ParallelMesh, ResolvedSizes, Size
from lightning_parallel.plan import ParallelPlan, find_plan
from lightning_parallel.precision import adapt_precision
from lightning_parallel.recipe import Recipe, parallelize
from lightning_parallel.schemes.data import FullyShardedOptions
from lightning_parallel.step import EagerStep
from lightning_parallel.strategies.loaders import prepare_loader
from lightning_parallel.strategies.lockstep import DataRanks, PeerCheck, gather_over
from lightning_parallel.strategies.plain_callbacks import prepare_callbacks, shard_averages
from lightning_parallel.strategies.samplers import sampler_kwargs

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT: timedelta = default_pg_timeout


class MeshStrategy(ParallelStrategy):
    """Trains an unchanged LightningModule on a mesh. Use one of the public strategies, which give it its sizes.

    Attributes:
        requested_size: Of the axis, where the strategy stands for one.
        options: What a ``HybridParallel`` takes from the strategy, as keyword arguments of this class.
    """

    requested_size: Size = "auto"
    options: dict[str, Any]

    def __init__(
        self,
        sizes: MeshSizes,
        *,
        plan: ParallelPlan | Mapping[str, str] | None = None,
        fully_sharded: FullyShardedOptions | None = None,
        sequence_parallel: bool = True,
        find_unused_parameters: bool = False,
        compile: bool | dict[str, Any] = False,
        token_weighted_loss: bool = False,
        error_if_nonfinite: bool = False,
        save_distributed_checkpoint: bool = True,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        self._error_if_nonfinite = error_if_nonfinite  # read by the setter that the base calls
        super().__init__()
        self._requested = sizes
        self._plan = plan
        self._fully_sharded = fully_sharded or FullyShardedOptions()
        self._sequence_parallel = sequence_parallel
        self._find_unused_parameters = find_unused_parameters
        self._compile = compile
        self._token_weighted_loss = token_weighted_loss
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._weights_only = weights_only
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self.num_nodes = 1
        self._mesh: ParallelMesh | None = None
        self._step: EagerStep | None = None
        self._parallelized: weakref.ref[Module] | None = None
        self._trainer: pl.Trainer | None = None
        self._random_is_synced = False
        self._has_averages = False

    # --- where: ranks, mesh, launch -----------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

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
    def device_mesh(self) -> torch.distributed.device_mesh.DeviceMesh:
        """torch's device mesh with the axes ``ddp``, ``fsdp`` and ``tp``."""
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
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = adapter.subprocess_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        if self._trainer is not None and self._trainer is not model.trainer:
            raise ParallelConfigError(
                f"This {type(self).__name__} already belongs to another Trainer and holds its mesh and module. Make a new "
                "strategy for each Trainer."
            )
        self._trainer = model.trainer
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        adapter.reset_seed()
        self.set_world_ranks()
        sizes = self._resolve_sizes()
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
        assert self._trainer is not None
        prepare_callbacks(
            self._trainer.callbacks, self.lightning_module, is_parallel=self._is_parallel(self.lightning_module)
        )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers who this process is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        adapter.set_rank(self.global_rank)

    def _resolve_sizes(self) -> ResolvedSizes:
        """Final sizes, after a look at whether the launcher and the Trainer agree."""
        assert self.cluster_environment is not None
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        world, asked = self.cluster_environment.world_size(), self.num_processes * self.num_nodes
        if self.local_rank >= self.num_processes or world != asked:
            raise ParallelConfigError(
                f"The launcher started {world} processes, the Trainer was asked for {asked} (devices="
                f"{self.num_processes} × num_nodes={self.num_nodes}). They must agree: set devices to the number of "
                "processes on each node, and num_nodes to the number of nodes."
            )
        return self._requested.resolve(world)

    # --- set-up -------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        for loop in adapter.evaluation_loops(trainer):
            # A first forward of FSDP under inference mode breaks later training.
            loop.inference_mode = False
        module = self.lightning_module
        if not self._is_parallel(module):
            self._parallelize(module)
        self.step.reshard()
        self._has_averages = shard_averages(trainer.callbacks, module, self.root_device)
        for child in [*module.modules()]:
            if isinstance(child, Metric):
                child.process_group = child.process_group or self.mesh.data_group
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            adapter.optimizers_to_device(self.optimizers, self.root_device)

    @property
    def step(self) -> EagerStep:
        """Who runs forward and backward."""
        assert self._step is not None, "the module is parallelised in setup"
        return self._step

    def _is_parallel(self, module: Module) -> bool:
        return self._parallelized is not None and self._parallelized() is module

    def _parallelize(self, module: pl.LightningModule) -> None:
        plan, source = find_plan(self._plan, module, published=published_plan if self.mesh.sizes.tp > 1 else None)
        self._check_agreement(module)
        self._sync_random()
        module = self.precision_plugin.convert_module(module)  # type: ignore[assignment]
        recipe = Recipe(
            plan=plan,
            fully_sharded=self._fully_sharded,
            sequence_parallel=self._sequence_parallel,
            # With manual optimisation each backward is of other parameters.
            find_unused_parameters=self._find_unused_parameters or not module.automatic_optimization,
            compile=self._compile,
        )
        seed = self.broadcast(torch.initial_seed() % 2**63)
        result = parallelize(module, self.mesh, recipe, device=self.root_device, seed=seed)
        adapter.set_device(module, self.root_device)
        by_token = self._token_weighted_loss and self.mesh.sizes.data > 1
        self._step = EagerStep(module, result, self.mesh.data_group if by_token else None)
        self._parallelized = weakref.ref(module)
        log.info("Plan: %s; %d blocks", source, len(result.blocks))

    def _check_agreement(self, module: Module) -> None:
        """Every rank must have built the same module."""
        prints: list[Any] = [None] * self.world_size
        dist.all_gather_object(prints, fingerprint(module))
        odd = [rank for rank, other in enumerate(prints) if other != prints[0]]
        if odd:
            raise ParallelConfigError(
                f"Ranks {odd} built a module with other parameter names, shapes or dtypes than rank 0. Build the same "
                "module on every rank; what differs must not depend on the rank."
            )

    def _sync_random(self) -> None:
        """Rank 0's random state for data rank 0, another one for each further data rank; ``tp`` peers alike."""
        if self._random_is_synced:
            return
        self._random_is_synced = True
        states = self.broadcast(adapter.collect_random_states(self.root_device))
        adapter.set_random_states(states, self.root_device)
        if self.mesh.data_rank:
            seed = random.getrandbits(31)
            adapter.seed_all(seed + self.mesh.data_rank)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    @override
    def model_to_device(self) -> None:
        """Nothing to do: every tensor went to its device when the module was parallelised."""

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # None must stay None: Lightning takes anything else for the user's choice.
        self._precision_plugin = precision_plugin and adapt_precision(
            precision_plugin, error_if_nonfinite=self._error_if_nonfinite
        )

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with self.precision_plugin.tensor_init_context():
            if not empty_init:
                yield
                return
            with torch.device("meta"):  # materialised in setup
                yield

    # --- data ---------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._trainer is not None
        stage = self._trainer.state.stage
        assert stage is not None
        limit = getattr(self._trainer, f"limit_{stage.dataloader_prefix}_batches")
        return prepare_loader(dataloader, ranks=self._data_ranks, stage=stage, limit_batches=limit)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self._trainer is not None
        stage = self._trainer.state.stage
        key = (stage, dataloader_idx, self._trainer.current_epoch)
        self._peer_check(batch, key, f"{stage.dataloader_prefix if stage else 'a'}_dataloader")
        return super().batch_to_device(batch, device, dataloader_idx)

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        step = partial(super().training_step, *self._cast_inputs(args), **self._cast_inputs(kwargs))
        return self.step.run(step, keep_gathered=self.lightning_module.automatic_optimization)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(super().validation_step, *self._cast_inputs(args), **self._cast_inputs(kwargs))
        return self.step.run(step, keep_gathered=False)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(super().test_step, *self._cast_inputs(args), **self._cast_inputs(kwargs))
        return self.step.run(step, keep_gathered=False)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(super().predict_step, *self._cast_inputs(args), **self._cast_inputs(kwargs))
        return self.step.run(step, keep_gathered=False)

    def _cast_inputs(self, inputs: Any) -> Any:
        """What ``fully_shard`` does to the inputs of a root: the policy's parameter dtype for floating tensors."""
        policy = self._fully_sharded.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs or not self.step.parallelized.is_sharded:
            return inputs
        return adapter.cast_floating(inputs, policy.param_dtype)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # A manual backward runs inside the step. See [Note: the root's life].
        with self.step.backward():
            return super().backward(self.step.seen_by_root(closure_loss), optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def stepped() -> Any:
            result = closure()
            self.step.before_optimizer_step()
            return result

        output = super().optimizer_step(optimizer, stepped, model, **kwargs)
        self.step.after_optimizer_step()
        return output

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.step.without_sync():
            yield

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

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        full = not self._save_distributed_checkpoint
        return checkpoints.model_state_dict(self.lightning_module, full=full, is_writer=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        full = not self._save_distributed_checkpoint
        return checkpoints.optimizer_state_dict(
            optimizer, self.lightning_module, full=full, is_writer=self.is_global_zero
        )

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Path, storage_options: Any | None = None) -> None:
        path = self.broadcast(filepath)  # ranks may disagree: a timestamp, say
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(
                checkpoints.to_host(checkpoint, is_writer=self.is_global_zero), path, storage_options
            )
            return
        if storage_options is not None:
            raise ParallelConfigError(
                "storage_options go to a CheckpointIO, which writes one file. Use save_distributed_checkpoint=False."
            )
        checkpoints.save_sharded(path, checkpoint)

    @override
    def load_checkpoint(self, checkpoint_path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        # Lightning drops the Trainer's weights_only when it restores after setup.
        weights_only = self._weights_only if weights_only is None else weights_only
        self.step.reshard()
        if checkpoints.is_sharded_checkpoint(path):
            return checkpoints.load_sharded(
                path, self.lightning_module, weights_only=weights_only, optimizers=bool(self.optimizers)
            )
        checkpoint = super().load_checkpoint(path, weights_only=weights_only)
        if self._has_averages:  # the callback loads its average, and the module's weights, itself
            assert self.lightning_module is not None
            checkpoint = checkpoints.lay_out(checkpoint, self.lightning_module)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self.step.reshard()
        checkpoints.load_model_state_dict(self.lightning_module, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            checkpoints.load_optimizer_state_dict(optimizer, self.lightning_module, state)

    @override
    def remove_checkpoint(self, filepath: Path) -> None:
        if self.is_global_zero:
            checkpoints.remove(filepath)

    @override
    def teardown(self) -> None:
        # The base moves the module to the host, which sharded parameters cannot do, and would hide the first error.
        assert self.cluster_environment is not None
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            try:
                part.teardown()  # type: ignore[union-attr]
            except Exception:
                log.exception("%s failed in teardown", type(part).__name__)
