"""The Lightning side that every strategy of this package shares; the mesh, the recipe and the step do the work."""

from __future__ import annotations

import hashlib
import logging
import random
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_parallel import _lightning as adapter
from lightning_parallel._torch import tree_map
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.huggingface import published_plan
from lightning_parallel.materialize import describe
from lightning_parallel.mesh import MeshSizes, ResolvedSizes, Size
from lightning_parallel.plan import ParallelPlan, find_plan
from lightning_parallel.precision import adapt_precision
from lightning_parallel.recipe import ContextOptions, Parallelized, PipelineOptions, Recipe, parallelize
from lightning_parallel.schemes.clipping import Stages
from lightning_parallel.schemes.data import FullyShardedOptions
from lightning_parallel.schemes.pipeline.ghost import ghosts_in_step
from lightning_parallel.schemes.pipeline.schedules import ScheduleSpec
from lightning_parallel.schemes.pipeline.step import Runner
from lightning_parallel.schemes.pipeline.timeline import Timeline
from lightning_parallel.schemes.pipeline.wire import Wire
from lightning_parallel.step import EagerStep, PipelineStep, plain
from lightning_parallel.strategies.loaders import prepare_loader
from lightning_parallel.strategies.pipelining import (
    PipelineSettings,
    StepNotes,
    check_optimizers,
    check_supported,
    drop_foreign_state,
)
from lightning_parallel.strategies.plain_callbacks import prepare_callbacks, shard_averages
from lightning_parallel.strategies.ranks import DEFAULT_TIMEOUT
from lightning_parallel.strategies.saving import SavingStrategy
from lightning_parallel.strategies.sequence import SequenceHelpers

log = logging.getLogger(__name__)


class MeshStrategy(SequenceHelpers, SavingStrategy):
    """Trains an unchanged LightningModule on a mesh. Use one of the public strategies, which give it its sizes.

    Attributes:
        requested_size: Of the axis, where the strategy stands for one.
        options: What a ``HybridParallel`` takes from the strategy, as keyword arguments of this class.
        shared_options: What it has arguments of its own for.
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
        pipeline: dict[str, Any] | None = None,
        context: ContextOptions | None = None,
        compile: bool | dict[str, Any] = False,
        token_weighted_loss: bool = False,
        error_if_nonfinite: bool = False,
        save_distributed_checkpoint: bool = True,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        self.shared_options = {
            "compile": compile,
            "token_weighted_loss": token_weighted_loss,
            "error_if_nonfinite": error_if_nonfinite,
            "save_distributed_checkpoint": save_distributed_checkpoint,
            "weights_only": weights_only,
            "process_group_backend": process_group_backend,
            "timeout": timeout,
        }
        self._error_if_nonfinite = error_if_nonfinite  # read by the setter that the base calls
        super().__init__(sizes, process_group_backend=process_group_backend, timeout=timeout)
        self._plan = plan
        self._fully_sharded = fully_sharded or FullyShardedOptions()
        self._sequence_parallel = sequence_parallel
        self._find_unused_parameters = find_unused_parameters
        self._pipeline = PipelineSettings(**(pipeline or {}))
        self._context = context
        self._compile = compile
        self._token_weighted_loss = token_weighted_loss
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._weights_only = weights_only
        self._spec: ScheduleSpec | None = None
        self._parallelized: weakref.ref[Module] | None = None
        self._random_is_synced = False

    @override
    def _resolve_sizes(self) -> ResolvedSizes:
        sizes = super()._resolve_sizes()
        if sizes.pp > 1:
            self._spec = self._pipeline.spec(sizes.pp, compiles=bool(self._compile))
        return sizes

    # --- set-up -------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        assert self._trainer is not None
        if self._spec:
            check_supported(self.lightning_module, adapter.callbacks(self._trainer))
        prepare_callbacks(
            adapter.callbacks(self._trainer),
            self.lightning_module,
            is_parallel=self._is_parallel(self.lightning_module),
        )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        for loop in adapter.evaluation_loops(trainer):
            # A first forward of FSDP under inference mode breaks later training.
            loop.inference_mode = False
        self._watch_sigterm(trainer)
        module = self.lightning_module
        if not self._is_parallel(module):
            self._parallelize(module)
        self.step.reshard()
        self._has_averages = shard_averages(adapter.callbacks(trainer), module, self.root_device)
        for child in [*module.modules()]:
            if isinstance(child, Metric):
                child.process_group = child.process_group or self.mesh.data_group
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            adapter.optimizers_to_device(self.optimizers, self.root_device)

    def _is_parallel(self, module: Module) -> bool:
        return self._parallelized is not None and self._parallelized() is module

    def _parallelize(self, module: pl.LightningModule) -> None:
        plan, source = find_plan(self._plan, module, published=published_plan if self.mesh.sizes.tp > 1 else None)
        self._check_agreement(module, plan)
        self._sync_random()
        pipeline = None
        if self._spec:
            pipeline = PipelineOptions(
                spec=self._spec, balance=self._pipeline.balance, boundaries=self._pipeline.boundaries
            )
        module = self.precision_plugin.convert_module(module)  # type: ignore[assignment]
        recipe = Recipe(
            plan=plan,
            fully_sharded=self._fully_sharded,
            sequence_parallel=self._sequence_parallel,
            # With manual optimisation each backward is of other parameters.
            find_unused_parameters=self._find_unused_parameters or not module.automatic_optimization,
            compile=self._compile,
            pipeline=pipeline,
            context=self._context,
            checkpointing=self.activation_checkpointing,
        )
        seed = self.broadcast(torch.initial_seed() % 2**63)
        result = parallelize(module, self.mesh, recipe, device=self.root_device, seed=seed)
        adapter.set_device(module, self.root_device)
        by_token = self._token_weighted_loss and self.mesh.sizes.data > 1
        tokens = self.mesh.data_group if by_token else None
        self._step = self._make_pipeline(module, result) if self._spec else EagerStep(module, result, tokens)
        self._parallelized = weakref.ref(module)
        log.info("Plan: %s; %d blocks", source, len(result.blocks))

    def _make_pipeline(self, module: pl.LightningModule, result: Parallelized) -> PipelineStep:
        assert self._spec is not None and result.staged is not None
        settings, spec, group = self._pipeline, self._spec, self.mesh.pp.get_group()
        last = dist.get_global_rank(group, spec.rank_of[spec.num_stages - 1])
        notes = StepNotes(module, group, last)
        wire = Wire(
            self.mesh.tp if result.is_split else None,
            self._sequence_parallel,
            result.context.context if result.context else None,
        )

        def make_runner(run_as_root: Callable[[Callable[[], Any]], Any]) -> Runner:
            assert result.staged is not None
            return Runner(
                result.staged, spec, group, self.root_device, wire=wire, run_as_root=run_as_root,
                collect=notes.collect, batch_dims=settings.batch_dims, plain=partial(tree_map, plain),
                tokens=self.mesh.data_group if self._token_weighted_loss else None, measure=settings.measure,
            )  # fmt: skip

        step = PipelineStep(
            module, result, make_runner,
            tie_groups=self.mesh.pipeline_groups(result.staged.tied_ranks(spec.rank_of)),
            loss_scale=self._loss_scale, evaluation_microbatches=settings.evaluation_microbatches,
            reduces_each_step=self._token_weighted_loss and result.is_sharded,
            reduces_each_microbatch=settings.reduce_every_microbatch and result.is_sharded,
        )  # fmt: skip
        step.on_outcome = notes.replay
        self.precision_plugin.stages = Stages(group, result.staged.counted_elsewhere(spec.rank_of))  # type: ignore[attr-defined]
        return step

    def pipeline_timeline(self, *, measured: bool = False) -> Timeline:
        """The pipeline's schedule as a picture: ``.text()``, ``.save("it.svg")`` (.html, .json for Perfetto, .txt).

        Args:
            measured: The last training step, in seconds, where ``PipelineParallel(measure=True)``; every rank must call
                it. Otherwise the plan, in units of one forward.

        Raises:
            ParallelConfigError: There is no pipeline, or nothing was measured.
        """
        if not isinstance(self._step, PipelineStep):
            raise ParallelConfigError("There is no pipeline: it exists from fit on, where pp is larger than 1.")
        return self._step.runner.measured() if measured else self._step.runner.planned()

    def _loss_scale(self) -> float:
        """What Lightning will have multiplied the loss by before backward."""
        assert self._trainer is not None
        scaler = getattr(self.precision_plugin, "scaler", None)
        return (scaler.get_scale() if scaler is not None else 1.0) / self._trainer.accumulate_grad_batches

    def _check_agreement(self, module: Module, plan: ParallelPlan | None) -> None:
        """Every rank must have built the same module, and read the same plan."""
        lines = describe(module) + [f"the role {glob}: {role}" for glob, role in (plan.roles if plan else {}).items()]
        digests: list[Any] = [None] * self.world_size
        dist.all_gather_object(digests, hashlib.sha256("\n".join(lines).encode()).hexdigest())
        odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if odd is None:
            return
        here, there = self.broadcast(lines), self.broadcast(lines, src=odd)
        pairs = zip_longest(here, there, fillvalue="nothing more")
        mine, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise ParallelConfigError(
            f"Ranks do not hold the same module: rank 0 has {mine}, rank {odd} has {other}. Build the same module on "
            "every rank; what differs must not depend on the rank."
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
        with ghosts_in_step():
            super().setup_optimizers(trainer)
        if self._spec:
            check_optimizers(self.optimizers)
            drop_foreign_state(self.optimizers)

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
        keep = self.lightning_module.automatic_optimization
        return self._run("training", super().training_step, args, kwargs, keep_gathered=keep)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("validation", super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("test", super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("predict", super().predict_step, args, kwargs)

    def _run(self, kind: str, step: Callable[..., Any], args: Any, kwargs: Any, *, keep_gathered: bool = False) -> Any:
        args, kwargs = self._cast_inputs(args), self._cast_inputs(kwargs)
        return self.step.run(kind, step, args, kwargs, keep_gathered=keep_gathered)

    def _cast_inputs(self, inputs: Any) -> Any:
        """What ``fully_shard`` does to the inputs of a root: the policy's parameter dtype for floating tensors."""
        policy = self._fully_sharded.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs or not self.step.parallelized.is_sharded:
            return inputs
        return adapter.cast_floating(inputs, policy.param_dtype)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # As the base does it, but gradients are complete when on_after_backward is called.
        assert self.lightning_module is not None
        plugin, module = self.precision_plugin, self.lightning_module
        self.pre_backward(closure_loss)
        loss: Tensor = plugin.pre_backward(closure_loss, module)
        with self.step.backward():
            # A manual backward runs inside the step. See [Note: the root's life].
            plugin.backward(self.step.seen_by_root(loss), module, optimizer, *args, **kwargs)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

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

    @override
    def teardown(self) -> None:
        # The base moves the module to the host, which sharded parameters cannot do, and would hide the first error.
        assert self.cluster_environment is not None
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            try:
                part.teardown()  # type: ignore[union-attr]
            except Exception:
                log.exception("%s failed in teardown", type(part).__name__)
