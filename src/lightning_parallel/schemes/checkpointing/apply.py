"""Puts a policy into the modules that it chooses: their ``forward`` is replaced, their names and parameters are not.

[Note: where the region is]  What is checkpointed is a block's ``forward`` as it stands, with what tensor parallelism
put there. Hooks are outside: FSDP gathers a block before its forward and, for its backward, before it is computed
again; context parallelism and pipelines take over the call of a block, hooks and all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_parallel._torch import is_in_backward, memory_of, tree_flatten, tree_unflatten
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.checkpointing.budget import Model, Plan, agree
from lightning_parallel.schemes.checkpointing.keeping import Decide, Giving, Keeping, Key, Move, Store
from lightning_parallel.schemes.checkpointing.ledger import Ledger
from lightning_parallel.schemes.checkpointing.offloading import Offloads
from lightning_parallel.schemes.checkpointing.policy import Policy, choose_modules, packet_of, resolve
from lightning_parallel.schemes.checkpointing.profile import mean_times, profile
from lightning_parallel.schemes.checkpointing.state import ChangingBuffers, as_it_was
from lightning_parallel.schemes.pipeline.ghost import is_ghost


class Checkpointing:
    """A policy, and the modules that it is in.

    Args:
        policy: What is recomputed.

    Attributes:
        names: Of the modules.
        ledger: What they hold.
        offloads: What they hold in host memory.
        plan: Under ``"budget"``, once it is solved. Until then all is recomputed, which is measured.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.names: list[str] = []
        self.ledger = Ledger()
        self.offloads = Offloads()
        self.plan: Plan | None = None
        self._forwards: list[Checkpointed] = []
        self._chosen: list[str] = []
        self._module: weakref.ref[nn.Module] | None = None
        self._operations = resolve(policy.operations) if policy.kind == "selective" else frozenset()
        self._offloaded = resolve(policy.offloaded_operations)

    def install(self, module: nn.Module, blocks: Sequence[str] | None = None) -> None:
        """Replace the forwards of what the policy chooses. A module that has it already gets it once.

        Args:
            module: The LightningModule.
            blocks: Names of its repeated blocks, where they are known.

        Raises:
            PlanError: The policy chooses nothing.
            ParallelConfigError: A budget or offloading for compiled blocks.
        """
        self.remove()
        self.ledger, self.offloads, self.plan = Ledger(), Offloads(), None
        self._put_into(module, choose_modules(module, self.policy, blocks))
        compiled = [f.name for f in self._forwards if f.block._compiled_call_impl is not None]
        if compiled and (self.policy.kind == "budget" or self.policy.offload):
            raise ParallelConfigError(
                f"A memory budget is measured operation by operation, and offloading moves what operations return; "
                f'{compiled[0]} is compiled. Use policy="selective" or "full" with compile, or torch\'s own '
                "torch._functorch.config.activation_memory_budget."
            )
        self.put_back()

    def _put_into(self, module: nn.Module, chosen: list[str]) -> None:
        self._chosen = chosen
        self.names = [n for n in chosen if not any(map(is_ghost, module.get_submodule(n).parameters()))]
        self._forwards = [Checkpointed(module.get_submodule(name), name, self) for name in self.names]
        self._module = weakref.ref(module)

    def put_into_copy(self, copy: nn.Module) -> Checkpointing:
        """The same policy and plan in a whole copy of the module, which is not measured."""
        twin = Checkpointing(self.policy)
        twin.plan, twin.ledger.is_watched = self.plan, False
        twin._put_into(copy, self._chosen)
        twin.put_back()
        return twin

    def __deepcopy__(self, memo: object) -> Checkpointing:
        """A copy of a module (an average of weights) follows the same policy."""
        return self

    def is_in(self, module: nn.Module) -> bool:
        """Whether it was installed in this module."""
        return self._module is not None and self._module() is module

    def put_back(self) -> None:
        """After ``remove``."""
        for forward in self._forwards:
            forward.install()

    def remove(self) -> None:
        """Give the modules back their forwards."""
        for forward in self._forwards:
            forward.remove()

    def decide(self, name: str) -> Decide | None:
        """Which operations of a block are kept; none at all: ``None``."""
        if self.policy.kind == "selective":
            return self._is_kept
        kept = self.plan.kept.get(name, frozenset()) if self.plan is not None else frozenset()
        if self._offloaded:
            return lambda key: key in kept or self.is_offloaded(key)
        return kept.__contains__ if kept else None

    def is_whole(self, name: str) -> bool:
        """Whether a block is left alone."""
        return self.plan is not None and name in self.plan.whole

    def is_offloaded(self, key: Key) -> bool:
        """Whether what an operation returns waits in host memory."""
        return packet_of(key[0]) in self._offloaded

    def model(self) -> Model:
        """What the last step has measured, to plan with.

        Raises:
            ParallelConfigError: No block has run in eager.
        """
        ledger = self.ledger
        if not ledger.profiles:
            raise ParallelConfigError(
                "No checkpointed block has run where it could be measured: they are compiled, or no training step has "
                "called them."
            )
        inputs = self.policy.offloads_inputs
        profiles = {
            name: each.offloaded(self.is_offloaded, inputs=inputs) for name, each in mean_times(ledger.profiles).items()
        }
        return Model(
            profiles,
            {name: max(ledger.live.get(name, 0), 1) for name in profiles},
            {name: max(ledger.calls[name], 1) for name in profiles},
        )

    def solve(self, budget: int | None = None) -> Plan:
        """Plan from what the last step has measured. Ranks that hold the same blocks decide the same.

        Args:
            budget: Bytes of activations in the blocks; by default the policy's.

        Raises:
            ParallelConfigError: It does not fit on some rank.
        """
        model = self.model()
        given = self.policy.budget
        if budget is None:
            budget = int(given * model.without_checkpointing()) if isinstance(given, float) else int(given or 0)
        plan: Plan | None = None
        error = None
        try:
            plan = model.plan(budget)
        except ParallelConfigError as problem:
            error = str(problem)
        self.plan = agree(plan, error, tuple(model.profiles))
        return self.plan

    def predicted(self) -> tuple[int, float, int]:
        """Bytes at the worst moment, and seconds and FLOPs of recomputation in a step."""
        model = self.model()

        def kept(name: str, key: Key) -> bool:
            decide = self.decide(name)
            return decide is not None and decide(key)

        whole = self.plan.whole if self.plan is not None else frozenset[str]()
        return (model.peak(kept, whole), *model.extra(kept, whole))

    def compiled_contexts(self) -> Callable[[], Any] | None:
        """For ``torch.compile``: torch's own contexts, from a plain function, or the graph would break there."""
        kept = self._operations
        if not kept:
            return None

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> bool:
            return packet_of(func) in kept

        def contexts() -> Any:
            return create_selective_checkpoint_contexts(policy)

        return contexts

    def _is_kept(self, key: Key) -> bool:
        return packet_of(key[0]) in self._operations or self.is_offloaded(key)


class Checkpointed:
    """In the place of a block's forward.

    Args:
        block: The block.
        name: Of it.
        owner: Whose policy it follows.
    """

    def __init__(self, block: nn.Module, name: str, owner: Checkpointing) -> None:
        self.block, self.name, self.owner = block, name, owner
        self._inner: Callable[..., Any] | None = None
        self._buffers = ChangingBuffers(block)
        self._contexts = owner.compiled_contexts()

    def install(self) -> None:
        """Take the place, of another one too."""
        own = vars(self.block).get("forward")
        self._inner = own._inner if isinstance(own, Checkpointed) else own
        vars(self.block)["forward"] = self

    def remove(self) -> None:
        """Leave the place, unless something else has taken it."""
        if vars(self.block).get("forward") is self:
            del vars(self.block)["forward"]
            if self._inner is not None:
                vars(self.block)["forward"] = self._inner

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward itself."""
        if self._inner is None:
            return type(self.block).forward(self.block, *args, **kwargs)
        return self._inner(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, its inner values kept as the policy says."""
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self._contexts is not None:
                kwargs["context_fn"] = self._contexts
            return checkpoint(self.run, *args, use_reentrant=False, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        needs = any(t.requires_grad for t in tensors) or any(p.requires_grad for p in self.block.parameters())
        if not needs or any(map(is_ghost, tensors)):
            return self.run(*args, **kwargs)

        def call(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(list(leaves), spec)
            return self.run(*args, **kwargs)

        self._look(call, leaves)
        if self.owner.is_whole(self.name):
            return self._run_whole(*args, **kwargs)
        region = Region(self, self.owner, tensors)
        with region.offloading_inputs():
            return checkpoint(call, *leaves, use_reentrant=False, context_fn=region.contexts)

    def _run_whole(self, *args: Any, **kwargs: Any) -> Any:
        """Not checkpointed; while the ledger is watched, what autograd saves tells it when the last of it is gone."""
        ledger = self.owner.ledger
        if not ledger.is_watched:
            return self.run(*args, **kwargs)
        token = _Token()
        ledger.hold(ledger.enter(token, self.name), ledger.profiles[self.name].saved)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, token), lambda packed: packed[0]):
            return self.run(*args, **kwargs)

    def _look(self, call: Callable[..., Any], leaves: list[Any]) -> None:
        """Measure the block at its first call."""
        ledger = self.owner.ledger
        if not ledger.is_watched or self.name in ledger.profiles or is_in_backward():
            return
        buffers = {(id(m), n): b.detach() for m in self.block.modules() for n, b in m._buffers.items() if b is not None}
        with as_it_was(self.block, buffers):
            ledger.profiles[self.name] = profile(self.block, lambda given: call(*given), leaves)


class _Token:
    """Lives as long as something that a block has saved."""


class Region:
    """One call of a checkpointed block.

    Args:
        forward: Of the block.
        owner: Where it is noted.
        inputs: Tensors that the block is called with.
    """

    def __init__(self, forward: Checkpointed, owner: Checkpointing, inputs: Sequence[Tensor]) -> None:
        self._forward, self._decide, self._owner = forward, owner.decide(forward.name), owner
        self._ledger = owner.ledger
        self._number = self._ledger.enter(self, forward.name)
        weakref.finalize(self, owner.offloads.leave, self._number).atexit = False
        moved = owner.policy.offloads_inputs
        self._inputs = {} if moved else dict(memory_of(t) for t in inputs if t.requires_grad)
        self._store = Store()
        self._before: dict[tuple[int, str], Tensor] = {}

    def contexts(self) -> tuple[Any, Any]:
        """Around the forward, and around each recomputation."""
        return self._computing(), _Again(self)

    def offloading_inputs(self) -> AbstractContextManager[Any]:
        """Around the call: what is kept of the block's inputs."""
        if not self._owner.policy.offloads_inputs:
            return nullcontext()
        return self._owner.offloads.inputs(self._number)

    def _move(self, key: Key) -> Move | None:
        return partial(self._owner.offloads.take, self._number) if self._owner.is_offloaded(key) else None

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._forward._buffers.noted(self._before))
            if self._decide is not None:
                stack.enter_context(Keeping(self._store, self._decide, self._move))
            yield
        self._ledger.hold(self._number, sum({**self._inputs, **dict(map(memory_of, self._store.tensors()))}.values()))

    @contextmanager
    def computing_again(self) -> Iterator[None]:
        """Around one recomputation."""
        self._owner.offloads.is_computed_again(self._number)
        if (seen := self._ledger.profiles.get(self._forward.name)) is not None:
            self._ledger.hold(self._number, seen.recomputed_bytes(self._store.kept.__contains__))
        with ExitStack() as stack:
            stack.enter_context(as_it_was(self._forward.block, self._before))
            if self._store.kept:
                stack.enter_context(Giving(self._store))
            yield


class _Again:
    """A context that is entered as often as a backward comes by."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        context = self._region.computing_again()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> Any:
        return self._entered.pop().__exit__(*error)


def checkpointing_of(module: nn.Module) -> Checkpointing | None:
    """What is in a module, if anything."""
    forwards = (vars(child).get("forward") for child in module.modules())
    return next((forward.owner for forward in forwards if isinstance(forward, Checkpointed)), None)


def take_out(module: nn.Module) -> None:
    """Give the modules of a copy their own forwards."""
    for child in module.modules():
        if isinstance(forward := vars(child).get("forward"), Checkpointed):
            forward.remove()
