"""What a user asks for: which modules are checkpointed, and which operations in them are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lightning_parallel._torch import OpOverload, OpOverloadPacket
from lightning_parallel.errors import ParallelConfigError, PlanError
from lightning_parallel.plan import Role, find_plan, matches, repeated_blocks

# What ``offload`` calls the inputs of a block.
INPUTS = "inputs"

Kind = Literal["full", "selective", "budget"]
Operation = str | OpOverload | OpOverloadPacket

# Products of matrices, convolutions and fused attention: most of a block's time, and a small part of its bytes.
COSTLY = (
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._grouped_mm", "aten.convolution",
    "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable", "aten._flash_attention_forward",
    "aten._efficient_attention_forward", "higher_order.flex_attention",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What is recomputed.

    Args:
        kind: ``"full"`` keeps a block's inputs, ``"selective"`` the outputs of ``operations`` besides, ``"budget"``
            what a memory budget has room for.
        every: Of the chosen modules, each n-th, the first of them included.
        modules: Globs of module names, class names or classes; none: the repeated blocks.
        operations: Kept under ``"selective"``, as ``torch.ops.aten.mm`` or ``"aten.mm"``.
        budget: Under ``"budget"``: bytes (an int), a fraction of what no checkpointing would hold (a float up to 1),
            or ``"fit"``.
        offload: Operations that are kept besides, in host memory, and ``"inputs"``: those of each block.

    Raises:
        ParallelConfigError: A value that no policy has.
    """

    kind: Kind = "full"
    every: int = 1
    modules: tuple[str | type, ...] = ()
    operations: tuple[Operation, ...] = COSTLY
    budget: float | int | Literal["fit"] | None = None
    offload: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("full", "selective", "budget"):
            raise ParallelConfigError(f'policy={self.kind!r}: use "full", "selective" or "budget".')
        if self.every < 1:
            raise ParallelConfigError(f"every={self.every}: each n-th block is checkpointed, so at least 1.")
        if (self.kind == "budget") != (self.budget is not None):
            raise ParallelConfigError(
                f'policy={self.kind!r} with budget={self.budget!r}: policy="budget" goes with budget= as bytes (an '
                'int), a fraction of no checkpointing (a float up to 1), or "fit".'
            )
        wrong = isinstance(self.budget, str) and self.budget != "fit"
        wrong |= isinstance(self.budget, bool) or (isinstance(self.budget, float) and not 0 < self.budget <= 1)
        if wrong or (isinstance(self.budget, int) and self.budget < 1):
            raise ParallelConfigError(
                f'budget={self.budget!r}: bytes (an int), a fraction of no checkpointing (a float up to 1), or "fit".'
            )
        resolve(self.operations)
        resolve(self.offloaded_operations)

    @property
    def offloaded_operations(self) -> tuple[Operation, ...]:
        """Those whose outputs are kept in host memory."""
        return tuple(operation for operation in self.offload if operation != INPUTS)

    @property
    def offloads_inputs(self) -> bool:
        """Whether blocks' inputs wait in host memory."""
        return INPUTS in self.offload

    @property
    def text(self) -> str:
        """As one would write it."""
        name = f"{self.kind}({self.budget})" if self.kind == "budget" else self.kind
        where = (
            f" of {', '.join(m if isinstance(m, str) else m.__name__ for m in self.modules)}" if self.modules else ""
        )
        return f"{name}{where}{f', every={self.every}' if self.every > 1 else ''}"


def resolve(operations: Iterable[Operation]) -> frozenset[Any]:
    """The operators that are meant, without those that this torch lacks.

    Raises:
        ParallelConfigError: A name that is none of torch's.
    """
    found = set()
    for operation in operations:
        if not isinstance(operation, str):
            found.add(operation.overloadpacket if isinstance(operation, OpOverload) else operation)
            continue
        space, _, name = operation.removeprefix("torch.ops.").partition(".")
        packet = getattr(getattr(torch.ops, space), name, None) if name else None
        if packet is None and operation not in COSTLY:
            raise ParallelConfigError(
                f"There is no operation {operation!r}. Use names as torch.ops has them: "
                '"aten.mm", or torch.ops.aten.mm itself.'
            )
        if packet is not None:
            found.add(packet)
    return frozenset(found)


def packet_of(func: Any) -> Any:
    """What an operation is called apart from its overload; higher-order operators have none."""
    return func.overloadpacket if isinstance(func, OpOverload) else func


def choose_modules(module: nn.Module, policy: Policy, blocks: Sequence[str] | None = None) -> list[str]:
    """Names of the modules that ``policy`` checkpoints, each module once.

    Args:
        module: The LightningModule.
        policy: Which.
        blocks: The repeated blocks, where they are known.

    Raises:
        PlanError: There are none, or a glob or class matches nothing.
    """
    named = dict(module.named_modules())
    if policy.modules:
        found: list[str] = []
        for wanted in policy.modules:
            hits = [name for name, child in named.items() if name and _is_meant(name, child, wanted)]
            if not hits:
                shown = wanted if isinstance(wanted, str) else wanted.__name__
                raise PlanError(
                    f"modules={shown!r} matches no module of {type(module).__name__}. It is a glob of module names "
                    '("model.h.*"), the name of a class ("Block") or a class.'
                )
            found += hits
        names = [name for name in named if name in found]
    else:
        if blocks is None:
            plan, _ = find_plan(None, module)
            roles: dict[str, Role] = plan.resolve(module) if plan else {}
            blocks = repeated_blocks(module, roles)
        names = [name for name in blocks if name in named]
        if not names:
            raise PlanError(
                f"{type(module).__name__} has no list of repeated blocks to checkpoint. Name them: "
                'modules="encoder.layer_*", or the class of one.'
            )
    return names[:: policy.every]


def _is_meant(name: str, child: nn.Module, wanted: str | type) -> bool:
    if isinstance(wanted, type):
        return isinstance(child, wanted)
    return matches(name, wanted) or any(kind.__name__ == wanted for kind in type(child).__mro__)
