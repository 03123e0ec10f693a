"""Blocks of other stages: what they return, in ghosts, and what they leave behind."""

from __future__ import annotations

import copy
import dis
import inspect
import logging
from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_parallel.errors import PlanError
from lightning_parallel.schemes.pipeline.arguments import template, walk
from lightning_parallel.schemes.pipeline.ghost import Ghost, ghost_like, is_ghost, made_ghosts

_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


class ForeignBlocks:
    """Calls blocks without their values.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._templates: dict[Any, Callable[[Any], Any] | None] = {}
        self._shadows: dict[int, nn.Module | None] = {}

    def shadow(self, block: nn.Module, name: str) -> None:
        """A block that this rank has, but not for every stage that it runs: a copy without values stands for it."""
        if id(block) in self._shadows:
            return
        memo: dict[int, Any] = {}
        for where, tensor in [*block.named_parameters(), *block.named_buffers()]:
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = ghost_like(tensor, f"{name}.{where}", is_parameter=is_parameter, device=self._device)
        try:
            self._shadows[id(block)] = copy.deepcopy(block, memo)
        except Exception:
            self._shadows[id(block)] = None

    def call(self, block: nn.Module, name: str, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``block`` returns: looked at once for each ``key``, unless it leaves something behind each time.

        A ghost that outlives the call otherwise than in what it returns (an auxiliary loss on the module, what a hook
        collects) would be missing where the step looks for it, so such a block is called again.
        """
        known = self._templates.get(key)
        if known is not None:
            return known((args, kwargs))
        with made_ghosts() as made:
            output = self._call(block, name, args, kwargs)
        left = [ghost for reference in made if (ghost := reference()) is not None]
        returned = {id(value) for _, value in walk(output)}
        for ghost in left:
            ghost.origin = name
        if len(self._templates) > 4096:
            self._templates.clear()
        is_pure = all(id(ghost) in returned for ghost in left)
        self._templates[key] = template(output, (args, kwargs)) if is_pure else None
        return output

    def _call(self, block: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shadow = self._shadows.get(id(block), block)
        # Hooks on a block may collect what it returns; one that cannot do without the values is left out.
        calls = [] if shadow is None else [shadow.forward]
        if shadow is not None and not isinstance(shadow, FSDPModule):
            calls.insert(0, shadow._call_impl)
        failure: Exception = PlanError(f"{name} cannot be copied, so what it returns on another stage cannot be told.")
        level = _fake_log.level
        _fake_log.setLevel(logging.CRITICAL)
        try:
            for call in calls:
                try:
                    return call(*args, **kwargs)
                except Exception as error:
                    failure = error
        finally:
            _fake_log.setLevel(level)
        # Its code depends on values (a router that sends each token to some experts, say). Such a block hands on what
        # it got: the receiving stage holds what arrives against this guess.
        hidden = next((v for _, v in walk((args, kwargs)) if is_ghost(v) and v.is_floating_point()), None)
        if hidden is None:
            raise failure
        failure.__traceback__ = None  # its frames hold ghosts
        if shadow is block:  # else it runs here too, for another stage
            _hide_assigned(block, name)
        return Ghost(hidden._fake, name, is_shared=True)


def _hide_assigned(block: nn.Module, name: str) -> None:
    """Give the attributes that code below ``block`` assigns while it runs a value that is known to be elsewhere."""
    for child in block.modules():
        values, kind = vars(child), cast(Any, type(child))
        for attribute in _assigned_by(kind) - child._modules.keys() - child._parameters.keys():
            value = values.get(attribute)
            if attribute not in child._buffers and (value is None or isinstance(value, float | Tensor)):
                values[attribute] = ghost_like(torch.zeros(()), name)


@cache
def _assigned_by(kind: Any) -> frozenset[str]:
    """Names of the attributes that the methods of a module's class assign; a constructor's do not count."""
    methods = [
        value
        for base in kind.__mro__
        if not base.__module__.startswith("torch.")
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and name != "__init__"
    ]
    return frozenset(
        op.argval
        for method in methods
        for op in dis.get_instructions(inspect.unwrap(method))
        if op.opname == "STORE_ATTR"
    )


def missing_loss(origin: str, blocks: Iterable[str]) -> PlanError:
    """What to raise for a loss that is computed from values of another stage, those of ``origin``."""
    if origin in blocks:
        return PlanError(
            f"The loss is computed from what {origin} gives on another pipeline stage. A value reaches the end of the "
            "step only through the blocks: not past a stage (a skip connection), nor kept aside (an auxiliary loss on "
            "the module, what a hook collects). Pass it through the following blocks, or use pp=1."
        )
    return PlanError(
        f"The loss is computed from {origin}, which the last stage does not hold. Give the module that holds it the "
        "role head in the plan (or stem, if it runs before the blocks)."
    )
