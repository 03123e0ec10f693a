"""A checkpoint as a folder to which every rank writes its shards, and from which any mesh reads its own.

The layout is Lightning's: torch's distributed checkpoint with the weights under ``state_dict.`` and each optimizer
under ``optimizer_<i>.``, and ``meta.pt`` with the rest of the checkpoint. Each reads the other's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel._torch import HOST
from lightning_parallel.checkpoint.layout import copy_whole
from lightning_parallel.checkpoint.names import parameter_names, plain_name
from lightning_parallel.checkpoint.optimizer import like_parameter
from lightning_parallel.checkpoint.storage import (
    META_FILE,
    PathOrURL,
    is_sharded_checkpoint,
    on_first_rank,
    prepare_folder,
    publish_folder,
    resolve,
)
from lightning_parallel.checkpoint.tree import Path, flatten, put_back, set_at, take_shards
from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.pipeline.ghost import is_ghost

# torch's distributed checkpoint, which `shards` imports, costs 0.1 s: it is imported where it is used.

_OPTIMIZER = "optimizer_"


def save_sharded(path: PathOrURL, checkpoint: Mapping[str, Any]) -> None:
    """Write a checkpoint as a folder of shards. A collective of all ranks.

    What is at ``path`` is replaced when the new folder is complete.

    Args:
        path: A local path or a URL, the same on every rank, that all ranks can write to.
        checkpoint: As Lightning's Trainer dumps it: ``state_dict`` and ``optimizer_states`` with shards, the latter
            in the named form. Sharded tensors elsewhere in nested dicts and lists are stored as shards too; the rest
            is rank 0's.

    Raises:
        FileExistsError: ``path`` is a folder with other things than a checkpoint.
        ParallelConfigError: A sharded tensor stands where it cannot be taken out, in a tuple.
    """
    from lightning_parallel.checkpoint.shards import write_shards

    rest = dict(checkpoint)
    stored: dict[str, Any] = {"state_dict": rest.pop("state_dict", {})}
    if rest.get("optimizer_states"):
        states = rest.pop("optimizer_states")
        stored.update({f"{_OPTIMIZER}{number}": state for number, state in enumerate(states)})
    taken, left = take_shards(rest)
    flat = flatten({**stored, **(taken or {})})
    staged = on_first_rank(lambda: prepare_folder(path))
    write_shards(staged, flat)

    def finish() -> None:
        fs, where = resolve(staged)
        with fs.open(f"{where}/{META_FILE}", "wb") as file:
            torch.save(left or {}, file)
        publish_folder(staged, path)

    on_first_rank(finish)


def load_sharded(
    path: PathOrURL,
    module: nn.Module | None,
    *,
    weights_only: bool | None = None,
    optimizers: bool = True,
) -> dict[str, Any]:
    """Read a folder of shards written on any mesh. No communication: each rank reads the parts that it needs.

    Nothing is loaded into the module, so that hooks may look at the checkpoint first.

    Args:
        path: A local path or a URL.
        module: Says how this mesh shards: a tensor under a parameter's name and of its shape is read as a shard like
            the parameter, anything else whole into host memory. With None everything is read whole.
        weights_only: As for ``torch.load``, for every pickle in the folder.
        optimizers: Whether to read the states of optimizers.

    Returns:
        The checkpoint as the Trainer knows it: ``state_dict``, ``optimizer_states`` in the named form, and the rest.

    Raises:
        ParallelConfigError: ``path`` is not a folder of shards.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from lightning_parallel.checkpoint.shards import path_of, read_index, read_shards

    if not is_sharded_checkpoint(path):
        raise ParallelConfigError(
            f"{path} is not a folder of shards: it has no {META_FILE}. Give the folder that a strategy with "
            "save_distributed_checkpoint=True wrote."
        )
    index = read_index(path, weights_only=weights_only)
    paths = {name: path_of(name, index) for name in index.state_dict_metadata}
    own = {} if module is None else _named_tensors(module)
    targets: dict[str, Any] = {}
    ghosts: dict[str, Tensor] = {}
    for name, stored in index.state_dict_metadata.items():
        if not optimizers and str(paths[name][0]).startswith(_OPTIMIZER):
            continue
        like = _own_tensor(paths[name], own)
        if like is not None and is_ghost(like):  # another pipeline stage reads it
            if paths[name][0] == "state_dict":
                ghosts[name] = like  # load_state_dict wants every key
            continue
        targets[name] = None
        if isinstance(stored, TensorStorageMetadata):
            targets[name] = _target(paths[name], stored.size, stored.properties.dtype, like)
    read_shards(path, index, targets, weights_only=weights_only)
    tree: dict[str, Any] = {}
    for name, value in (targets | ghosts).items():
        set_at(tree, paths[name], value)
    fs, where = resolve(path)
    with fs.open(f"{where}/{META_FILE}", "rb") as file:
        rest = torch.load(file, map_location=HOST, weights_only=weights_only)
    return _assemble(tree, rest)


def lay_out(checkpoint: Any, module: nn.Module) -> Any:
    """Give the whole tensors of a file the look of a folder that was read: shards where the module has them.

    A plain tensor under a parameter's name and of its shape, anywhere in nested dicts, becomes a shard like the
    parameter. So ``module.load_state_dict`` takes it in a callback that knows nothing of shards. No communication.
    """
    own = _named_tensors(module)

    def convert(value: Any, like: Tensor | None = None) -> Any:
        if isinstance(value, dict):
            children = copy.copy(value)  # keeps the versions that torch attaches to a state dict
            children.update((key, convert(child, own.get(plain_name(str(key))))) for key, child in value.items())
            return children
        if like is None or not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        sharded = like_parameter(like, key=None, shape=value.shape, dtype=value.dtype)
        if sharded is None:
            return value
        copy_whole(sharded, value)
        return sharded

    return convert(checkpoint)


def _own_tensor(path: Path, own: Mapping[str, Tensor]) -> Tensor | None:
    """What the module has where a stored value belongs."""
    names = (plain_name(str(part)) for part in path[1:])
    return next((own[name] for name in names if name in own), None)


def _target(path: Path, shape: torch.Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
    """An empty tensor to read into."""
    sharded = None if like is None else like_parameter(like, key=path[-1], shape=shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype) if sharded is None else sharded


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    buffers = {plain_name(name): buffer for name, buffer in module.named_buffers(remove_duplicate=False)}
    return {**buffers, **parameter_names(module)}


def _assemble(tree: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Put the checkpoint together from the shards and ``meta.pt``."""
    if "state_dict" not in tree and "model" in tree:  # as Lightning's FSDPStrategy names it
        tree["state_dict"] = tree.pop("model")
    checkpoint: dict[str, Any] = {"state_dict": tree.pop("state_dict", {})}
    states: list[dict[str, Any]] = []
    while (key := f"{_OPTIMIZER}{len(states)}") in tree:
        states.append({"state": {}, **tree.pop(key)})
    if states:
        checkpoint["optimizer_states"] = states
    result: dict[str, Any] = {**checkpoint, **put_back(rest, tree)}
    return result
