"""FLOPs of one training step, counted operation by operation.

Either on a copy of the module without storage, on which the user's ``training_step`` and its backward run with fake
tensors before anything is trained; or while a real step runs.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel._torch import fake_mode, is_in_backward, operation_counter, tree_map
from lightning_parallel.flops.operations import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BACKWARD_PRODUCTS,
    GROUPED,
    RECOMPUTED_PRODUCTS,
    Attention,
    Causal,
    Sight,
    grouped_flops,
    read_attention,
)

# Sums, copies and communication: no products of matrices in them.
_KNOWN_TO_BE_NONE = ("aten.", "prim.", "prims.", "c10d", "_c10d", "profiler.", "_dtensor.", "fsdp.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """FLOPs of a batch, forward and backward.

    Attributes:
        dense: All products of matrices and convolutions outside fused attention.
        attention: Inside it.
        recomputed: What activation checkpointing and fused attention compute a second time; not in the others.
        dtype: In which most of them were computed.
        unknown: Kernels that ran and have no formula; they count nothing.
    """

    dense: float
    attention: float = 0.0
    recomputed: float = 0.0
    dtype: torch.dtype | None = None
    unknown: tuple[str, ...] = ()

    @property
    def model(self) -> float:
        """What the model needs."""
        return self.dense + self.attention

    @property
    def hardware(self) -> float:
        """What the device does."""
        return self.model + self.recomputed

    def useful(self, tokens: float, pairs: float) -> float:
        """Model FLOPs without padding, and within documents.

        Args:
            tokens: Share of positions that hold a token.
            pairs: Share of the pairs of positions that are of one document.
        """
        return self.dense * tokens + self.attention * pairs


@dataclass
class FlopCounter:
    """Counts what runs inside ``with counter.counting(module):``."""

    causal: Causal = "half"
    dense: float = 0.0
    attention: float = 0.0
    recomputed: float = 0.0
    stopped: bool = False
    by_dtype: Counter[torch.dtype] = field(default_factory=Counter)
    unknown: set[str] = field(default_factory=set)
    _sights: list[Sight] = field(default_factory=list)
    _calls: dict[Any, list[Attention]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def counting(self, module: nn.Module) -> Iterator[None]:
        """Count. Compiled parts run eagerly meanwhile: inside a compiled graph there are no operations to see."""
        with ExitStack() as stack:
            for child in module.modules():
                if (sight := look(child)) is not None:
                    stack.enter_context(self._inside(child, sight))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(operation_counter(self._see))
            yield

    @contextmanager
    def _inside(self, child: nn.Module, sight: Sight) -> Iterator[None]:
        hooks = [
            child.register_forward_pre_hook(lambda *_: self._sights.append(sight)),
            child.register_forward_hook(lambda *_: void(self._sights.pop()), always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see(self, name: str, flops: int | None, arguments: dict[str, Any]) -> None:
        if self.stopped:
            return
        is_backward = is_in_backward()
        is_repeated = is_backward and torch.is_grad_enabled()
        attention = 0.0
        if name in ATTENTION:
            call = read_attention(arguments, self._sights[-1] if self._sights else Sight())
            self._calls[call.shape].append(call)
            attention = call.flops(self.causal)
        elif name in ATTENTION_BACKWARD:
            call = self._matching(read_attention(arguments, Sight()))
            forward = call.flops(self.causal)
            attention = BACKWARD_PRODUCTS * forward
            self.recomputed += RECOMPUTED_PRODUCTS * forward
        dense = grouped_flops(arguments) if name in GROUPED else 0.0 if attention else float(flops or 0)
        if not attention and not dense:
            if flops is None and "." in name and (not name.startswith(_KNOWN_TO_BE_NONE) or "rnn" in name):
                self.unknown.add(name)
            return
        if is_repeated:
            self.recomputed += attention + dense
            return
        self.attention += attention
        self.dense += dense
        dtype = next((value.dtype for value in arguments.values() if isinstance(value, Tensor)), None)
        # A product by experts may have been cast to be counted (see NumbersOfFakes).
        if dtype is not None and dtype.is_floating_point and name not in GROUPED:
            self.by_dtype[dtype] += int(attention + dense)

    def _matching(self, call: Attention) -> Attention:
        """The forward that a backward belongs to, which knows its window: the last of its shape."""
        calls = self._calls[call.shape]
        return calls.pop() if calls else call

    def result(self) -> Counted:
        """What was counted so far."""
        most = self.by_dtype.most_common(1)
        return Counted(
            dense=self.dense,
            attention=self.attention,
            recomputed=self.recomputed,
            dtype=most[0][0] if most else None,
            unknown=tuple(sorted(self.unknown)),
        )


def look(module: nn.Module) -> Sight | None:
    """What a Hugging Face attention layer says of its mask; ``None`` for other modules."""
    causal = getattr(module, "is_causal", None)
    if not isinstance(causal, bool):
        return None
    if hasattr(module, "sliding_window"):
        window: Any = module.sliding_window
    else:  # one for all layers, unless the configuration tells them apart
        config = getattr(module, "config", None)
        window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    return Sight(causal=causal, window=window if isinstance(window, int) else None)


def void(_: object) -> None:
    """A hook's result, which would replace the output, thrown away."""


class NumbersOfFakes(TorchFunctionMode):
    """Gives ``loss.item()`` a number: what is logged of it does not change what is computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.item, Tensor.__float__) and args[0].is_floating_point():
            return 1.0
        if getattr(func, "__name__", "") in ("_grouped_mm", "grouped_mm"):
            # Its kernel for the host takes any dtype, the rule for its shapes one only.
            cast = [a.bfloat16() if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in args]
            return func(*cast, **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


class _CopiesAsFakes(TorchFunctionMode):
    """Copies tensors that are kept in plain attributes without their values too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def fake_copy(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """The module on ``device`` without storage. Tied parameters stay tied.

    Args:
        module: Whole, on any device.
        device: Where it will train.
        dtype: Its parameters' dtype there, where that is another one.
    """
    with fake_mode(), _CopiesAsFakes():
        memo: dict[int, Any] = {}
        for tensor in [*module.parameters(), *module.buffers()]:
            shape = getattr(tensor, "ds_shape", tensor.shape)  # DeepSpeed keeps a part, and the whole's shape
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            fake = torch.empty(shape, dtype=kind, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        return copy.deepcopy(module, memo)


def follow(fake: nn.Module, module: nn.Module, checkpointed: set[str]) -> None:
    """Bring a copy up to date: what is frozen, in training mode, or wrapped for checkpointing by now."""
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    for name, parameter in fake.named_parameters():
        parameter.requires_grad_(trained.get(plain_name(name), parameter.requires_grad))
    modes = {plain_name(name): child.training for name, child in module.named_modules()}
    for name, child in fake.named_modules():
        child.training = modes.get(name, True)
    for name, child in module.named_modules():
        if is_checkpointed(child) and (plain := plain_name(name)) not in checkpointed:
            checkpointed.add(plain)
            _checkpoint(fake.get_submodule(plain))


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a module is torch's wrapper that recomputes what is inside it (a private class, so by its name)."""
    return type(module).__name__ == "CheckpointWrapper"


def plain_name(name: str) -> str:
    """Without what torch's wrappers put into the names of modules."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "_forward_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _checkpoint(module: nn.Module) -> None:
    forward = module.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed


def count_step(module: nn.Module, step: Callable[[Any], Any], batch: Any, *, causal: Causal = "half") -> Counted:
    """Run a forward and a backward on fake tensors, and count.

    Args:
        module: From :func:`fake_copy`.
        step: Takes the batch, returns a loss, a mapping with a ``"loss"``, or nothing.
        batch: The real one; its values are not used.
        causal: How causal attention is counted.
    """
    counter = FlopCounter(causal)
    mode = fake_mode()
    with torch.random.fork_rng(devices=[]), mode, NumbersOfFakes():
        fakes = tree_map(lambda value: torch.empty_like(value) if isinstance(value, Tensor) else value, batch)
        with torch.enable_grad(), counter.counting(module):
            output = step(fakes)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()
        for parameter in module.parameters():
            parameter.grad = None
    return counter.result()
