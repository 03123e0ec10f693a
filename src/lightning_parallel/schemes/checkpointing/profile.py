"""What a block computes and holds: each operation of one call, its bytes, its time and its FLOPs, measured."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lightning_parallel._torch import OpOverload, default_generator, memory_of, without_dispatch_modes
from lightning_parallel.flops.peaks import is_accelerator
from lightning_parallel.schemes.checkpointing.keeping import Counting, Decide, Key, Store, is_fresh, tensors_in


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a block's forward.

    Attributes:
        key: Which.
        bytes: Of new memory that it returns; 0 for views and what is done in place.
        seconds: It took.
        flops: By torch's formulas.
        runs_again: In a recomputation that keeps nothing: it ends with the last value that backward needs.
        unsaved: Of the bytes, those that autograd does not hold anyway.
    """

    key: Key
    bytes: int
    seconds: float
    flops: int
    runs_again: bool
    unsaved: int = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """One call of a block.

    Attributes:
        operations: In order.
        saved: Bytes that autograd holds without checkpointing, inputs included, parameters and buffers not.
        inputs: Bytes of the arguments that need a gradient, which checkpointing holds.
    """

    operations: tuple[Operation, ...]
    saved: int
    inputs: int

    def kept_bytes(self, decide: Decide) -> int:
        """Held between forward and backward, inputs included."""
        return self.inputs + sum(o.bytes for o in self.operations if decide(o.key))

    def recomputed_bytes(self, decide: Decide) -> int:
        """Held when it is computed again: all that autograd saves, and what is kept besides."""
        return self.saved + sum(o.unsaved for o in self.operations if decide(o.key))

    def offloaded(self, decide: Decide, *, inputs: bool) -> Profile:
        """The same where what is offloaded is neither held between forward and backward nor computed again."""
        operations = tuple(
            replace(o, bytes=0, unsaved=0, runs_again=False) if decide(o.key) else o for o in self.operations
        )
        return Profile(operations, self.saved, 0 if inputs else self.inputs)

    def extra(self, decide: Decide) -> tuple[float, int]:
        """Seconds and FLOPs of a recomputation."""
        again = [o for o in self.operations if o.runs_again and not decide(o.key)]
        return sum(o.seconds for o in again), sum(o.flops for o in again)


def profile(block: nn.Module, call: Callable[[Any], Any], arguments: Any) -> Profile:
    """Run a block once, without a trace, and look.

    Args:
        block: Whose parameters and buffers are not counted.
        call: Its forward, of a list of arguments.
        arguments: That list; tensors in it are taken as new leaves.
    """
    leaves = [_leaf(value) if isinstance(value, Tensor) else value for value in arguments]
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    inputs = _sizes(t for t in tensors if t.requires_grad)
    own = _sizes([*block.parameters(), *block.buffers()]) | _sizes(t for t in tensors if not t.requires_grad)
    watching = _Watching()
    saved: dict[int, int] = {}
    alive: list[Tensor] = []  # or memory would be used again, and looked at twice

    def see(tensor: Tensor) -> Tensor:
        watching.save(tensor)
        saved.update({place: size for place, size in _sizes([tensor]).items() if place not in own})
        alive.append(tensor)
        return tensor

    generators = {default_generator(t.device) for t in tensors} | {torch.default_generator}
    states = [(generator, generator.get_state()) for generator in generators]
    hooks = torch.autograd.graph.saved_tensors_hooks(see, lambda t: t)
    with without_dispatch_modes(), torch.enable_grad(), hooks, watching:
        call(leaves)
    for generator, state in states:
        generator.set_state(state)
    found = [
        Operation(
            key, sum(sizes.values()), seconds, flops, index < watching.saved_at, sum(watching.unsaved[index].values())
        )
        for index, (key, sizes, seconds, flops) in enumerate(watching.operations)
    ]
    return Profile(tuple(found), sum({**saved, **inputs}.values()), sum(inputs.values()))


class _Watching(Counting):
    """Times each operation, the device's work included."""

    def __init__(self) -> None:
        super().__init__(Store())
        self.operations: list[tuple[Key, dict[int, int], float, int]] = []
        self.unsaved: list[dict[int, int]] = []
        self.saved_at = 0
        self._origins: dict[int, int] = {}  # address of a memory: the operation that returned it last

    def save(self, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        self.saved_at = len(self.operations)
        address, _ = memory_of(tensor)
        if (index := self._origins.get(address)) is not None:
            self.unsaved[index].pop(address, None)

    def operate(self, key: Key, func: Any, args: Any, kwargs: Any) -> Any:
        """Run it and note."""
        _wait(args)
        start = time.perf_counter()
        output = func(*args, **kwargs)
        _wait(output)
        seconds = time.perf_counter() - start
        given = _sizes(tensors_in((args, kwargs)))
        sizes = {a: n for a, n in _sizes(tensors_in(output)).items() if a not in given} if is_fresh(func) else {}
        self._origins.update(dict.fromkeys(sizes, len(self.operations)))
        flops = 0
        formula = flop_registry.get(func.overloadpacket if isinstance(func, OpOverload) else func)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=output))
        self.operations.append((key, sizes, seconds, flops))
        self.unsaved.append(dict(sizes))
        return output


def _wait(values: Any) -> None:
    """Until the device has computed what is asked for; the host has nothing to wait for."""
    device = next((t.device for t in tensors_in(values) if is_accelerator(t.device)), None)
    if device is not None:
        torch.get_device_module(device).synchronize(device)


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_(tensor.requires_grad)


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address of each memory to its bytes on this rank."""
    return dict(map(memory_of, tensors))


def mean_times(profiles: dict[str, Profile]) -> dict[str, Profile]:
    """The same, where blocks that do the same share the median of their times: one call is a noisy clock."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for name, each in profiles.items():
        alike[tuple(replace(o, seconds=0.0) for o in each.operations)].append(name)
    result = dict(profiles)
    for names in alike.values():
        columns = zip(*(profiles[name].operations for name in names), strict=True)
        middle = [sorted(o.seconds for o in column)[len(column) // 2] for column in columns]
        for name in names:
            each = profiles[name]
            operations = tuple(replace(o, seconds=seconds) for o, seconds in zip(each.operations, middle, strict=True))
            result[name] = Profile(operations, each.saved, each.inputs)
    return result
