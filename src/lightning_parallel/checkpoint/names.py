"""Names of parameters as the module without wrappers has them, so that every checkpoint loads every other way."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

# The attribute under which a wrapper keeps the module: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def plain_name(name: str) -> str:
    """The name without the components that wrappers add.

    >>> plain_name("blocks.0._orig_mod.mlp._checkpoint_wrapped_module.weight")
    'blocks.0.mlp.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameter_names(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every plain name of every parameter, so a tied one under each of its names, in the module's order.

    Parameters that FSDP left gathered after a forward are sharded again first: optimizers hold the shards.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    return {plain_name(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}
