"""The state of an optimizer, and back, on any mesh.

Two forms. torch's own numbers the parameters in the order of the groups; it is what one device writes and loads.
The *named* form has the parameters' names in place of the numbers, so it needs no order and suits a folder
of shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from lightning_parallel.checkpoint.layout import copy_whole
from lightning_parallel.checkpoint.model import to_host
from lightning_parallel.checkpoint.names import parameter_names, plain_name
from lightning_parallel.checkpoint.tree import map_children
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.pipeline.ghost import is_ghost

STEP = "step"  # torch's optimizers count steps under this key, as a plain scalar whatever the parameter is


def optimizer_state_dict(
    optimizer: Optimizer, module: nn.Module, *, full: bool, is_writer: bool = True
) -> dict[str, Any]:
    """The optimizer's state, in torch's form with whole tensors or in the named form with shards.

    Args:
        optimizer: A torch optimizer over parameters of ``module``.
        module: Gives the parameters their names.
        full: torch's own form; each sharded tensor is gathered, one at a time (a collective of all ranks), and kept
            in host memory on the writer; the other ranks get ``{}``. Otherwise the named form, with tensors as
            they are.
        is_writer: Whether this rank keeps the gathered tensors.

    Raises:
        ParallelConfigError: The optimizer has a parameter that the module does not, or keeps a part of a sharded
            parameter's state in a plain tensor, of which only this rank's would be saved.
    """
    names = _names_by_parameter(module)
    state = optimizer.state_dict()
    parameters = dict(_numbered(optimizer, state))
    for number, parameter in parameters.items():
        _refuse_unknown_shards(optimizer, parameter, state["state"].get(number))
    if full:
        return dict(to_host(state, is_writer=is_writer))
    name_of = {number: _name(names, optimizer, parameter) for number, parameter in parameters.items()}
    return {
        **state,
        "state": {name_of.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def load_optimizer_state_dict(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state of either form, saved on any mesh. No communication.

    A tensor of its parameter's shape becomes sharded as the parameter is; other tensors become replicas, and step
    counters stay plain scalars. torch's own ``load_state_dict`` does the rest, dtypes and options of the groups
    included.

    Args:
        optimizer: A torch optimizer over parameters of ``module``, with or without a state.
        module: Gives the parameters their names.
        state: What `optimizer_state_dict` or ``Optimizer.state_dict`` returned. Tensors have the whole shape, or are
            sharded as the parameters are.

    Raises:
        ParallelConfigError: A state in the named form is of other parameters, or its groups divide them otherwise.
        ValueError: As torch's own, for a state in torch's form whose groups are of other sizes.
    """
    numbered = number_parameters(state, _group_names(optimizer, module)) if is_named(state) else dict(state)
    by_number = dict(
        zip(
            (number for group in numbered["param_groups"] for number in group["params"]),
            (parameter for group in optimizer.param_groups for parameter in group["params"]),
            strict=False,  # sizes that differ are torch's error
        )
    )
    laid_out = {
        key: _lay_out(value, by_number[key]) if key in by_number else value
        for key, value in numbered["state"].items()
        if not is_ghost(by_number.get(key))
    }
    optimizer.load_state_dict({**numbered, "state": laid_out})


def is_named(state: Mapping[str, Any]) -> bool:
    """Whether a state has its parameters by name."""
    return any(isinstance(key, str) for group in state["param_groups"] for key in group["params"])


def number_parameters(state: Mapping[str, Any], groups: list[list[frozenset[str]]] | None = None) -> dict[str, Any]:
    """Turn the named form into torch's own.

    Args:
        state: A state in the named form.
        groups: For each group of the optimizer that is to load it, each parameter's names, several if it is tied.
            By default the parameters are numbered in the order in which the state has them.

    Raises:
        ParallelConfigError: The state is of other parameters, or its groups divide them otherwise.
    """
    saved = [[plain_name(name) for name in group["params"]] for group in state["param_groups"]]
    groups = [[frozenset({name}) for name in names] for names in saved] if groups is None else groups
    group_of = {name: index for index, names in enumerate(saved) for name in names}
    own = frozenset(name for group in groups for names in group for name in names)
    missing = [min(names) for group in groups for names in group if not names & group_of.keys()]
    unexpected = [name for name in group_of if name not in own]
    if missing or unexpected:
        raise ParallelConfigError(
            f"The checkpoint's optimizer state is of other parameters than the optimizer's: {_some(missing)} missing, "
            f"{_some(unexpected)} unexpected. Freeze and group the parameters as in the run that saved it, or load "
            "the weights alone."
        )
    numbers: dict[str, int] = {}
    param_groups: list[dict[str, Any]] = []
    count = 0
    for group in groups:
        for number, names in enumerate(group, start=count):
            numbers.update(dict.fromkeys(names, number))
        sources = {group_of[name] for names in group for name in names if name in group_of}
        if len(sources) > 1:
            raise ParallelConfigError(
                f"One group of the optimizer has parameters of {len(sources)} groups of the checkpoint, whose options "
                f"may differ: {_some([min(names) for names in group])}. Group them as in the run that saved it."
            )
        source = sources.pop() if sources else min(len(param_groups), len(saved) - 1)
        param_groups.append({**state["param_groups"][source], "params": list(range(count, count + len(group)))})
        count += len(group)
    return {
        **state,
        "state": {numbers.get(plain_name(str(key)), key): value for key, value in state["state"].items()},
        "param_groups": param_groups,
    }


def like_parameter(parameter: Tensor, *, key: object, shape: torch.Size, dtype: torch.dtype) -> DTensor | None:
    """An empty tensor sharded as the parameter is, or None where the state is not of that kind.

    Args:
        parameter: The parameter that the state belongs to.
        key: The state's name within the parameter's state.
        shape: The state's whole shape.
        dtype: The state's dtype, which may differ from the parameter's.
    """
    if isinstance(parameter, DTensor) and parameter.shape == shape and key != STEP:
        return torch.empty_like(parameter.detach(), dtype=dtype)  # type: ignore[return-value]
    return None


def _lay_out(value: Any, parameter: Tensor, key: object = None) -> Any:
    if isinstance(value, DTensor):
        return value
    if not isinstance(value, Tensor):
        if isinstance(value, dict):
            return {name: _lay_out(child, parameter, name) for name, child in value.items()}
        return map_children(lambda child: _lay_out(child, parameter), value)
    sharded = like_parameter(parameter, key=key, shape=value.shape, dtype=value.dtype)
    if sharded is not None:
        copy_whole(sharded, value)
        return sharded
    if isinstance(parameter, DTensor) and value.dim() > 0:
        # Factored moments, say: they meet the parameter's shards in one expression, so they must be on its mesh.
        mesh = parameter.device_mesh
        return distribute_tensor(value.clone(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    return value.clone()  # not a view of a file that is mapped into memory


def _names_by_parameter(module: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by its identity."""
    names: dict[int, str] = {}
    for name, parameter in parameter_names(module).items():
        names.setdefault(id(parameter), name)
    return names


def _group_names(optimizer: Optimizer, module: nn.Module) -> list[list[frozenset[str]]]:
    """All names of each parameter, by group."""
    names: dict[int, set[str]] = {}
    for name, parameter in parameter_names(module).items():
        names.setdefault(id(parameter), set()).add(name)
    first = _names_by_parameter(module)
    return [
        [frozenset(names.get(id(p)) or {_name(first, optimizer, p)}) for p in group["params"]]
        for group in optimizer.param_groups
    ]


def _numbered(optimizer: Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """Each parameter with its number in ``state``."""
    for group, numbers in zip(optimizer.param_groups, state["param_groups"], strict=True):
        yield from zip(numbers["params"], group["params"], strict=True)


def _name(names: Mapping[int, str], optimizer: Optimizer, parameter: Tensor) -> str:
    if id(parameter) in names:
        return names[id(parameter)]
    raise ParallelConfigError(
        f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not the module's, "
        "so its state has no name in the checkpoint. Register it in the module, and make the optimizer from "
        "the module's parameters after they are sharded."
    )


def _refuse_unknown_shards(optimizer: Optimizer, parameter: Tensor, state: Any) -> None:
    if not isinstance(parameter, DTensor) or not isinstance(state, dict):
        return
    if all(isinstance(p, Replicate) or parameter.device_mesh.size(i) == 1 for i, p in enumerate(parameter.placements)):
        return
    for key, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() > 0:
            raise ParallelConfigError(
                f"{type(optimizer).__name__} keeps {key!r} of a sharded parameter as a plain tensor of shape "
                f"{tuple(value.shape)}, so each rank has a part that nothing can put together. Use an optimizer whose "
                "state follows the parameter, as torch's do, or save the weights alone."
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{len(names)} ({shown}{', …' if len(names) > 3 else ''})" if names else "none"
