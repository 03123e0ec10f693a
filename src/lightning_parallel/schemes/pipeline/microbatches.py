"""A batch cut into microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.errors import ParallelConfigError


def split_batch(batch: Any, count: int, dims: Mapping[str, int | None] | None = None) -> tuple[list[Any], list[int]]:
    """Cut ``batch`` into at most ``count`` microbatches of nearly equal numbers of samples.

    Tensors are cut along dim 0, lists of one entry a sample likewise; numbers, strings, ``None``, tensors without
    dims and objects of other classes go to every microbatch as they are.

    Args:
        batch: Tensors in tuples, lists and dicts (also dataclasses and Hugging Face's ``BatchEncoding``).
        count: How many; fewer where the batch has fewer samples.
        dims: Glob of an entry's name (keys and indices joined by dots) to the dim that counts samples, ``None`` for an
            entry that every microbatch gets whole.

    Returns:
        The microbatches, and the number of samples in each.

    Raises:
        ParallelConfigError: No tensor tells the number of samples, or one does not have that many.
    """
    if count == 1 and not dims:  # nothing to cut, so nothing to know
        return [batch], [1]
    leaves = list(_leaves(batch))
    cuts = {path: _dim(path, dims or {}) for path, _ in leaves}
    sizes = {
        path: value.size(dim)
        for path, value in leaves
        if isinstance(value, Tensor) and (dim := cuts[path]) is not None and value.ndim > dim
    }
    if not sizes:
        raise ParallelConfigError(
            "A pipeline cuts each batch into microbatches along the samples, and this batch has no tensor with a first "
            f"dim: it is {_described(batch)}. Let the DataLoader's collate_fn give tensors."
        )
    samples = next(iter(sizes.values()))
    for path, size in sizes.items():
        if size != samples:
            most = Counter(sizes.values()).most_common(1)[0][0]
            raise ParallelConfigError(
                f"Entry {path!r} of the batch has {size} rows and {next(iter(sizes))!r} has {samples}"
                f"{f' (most have {most})' if most not in (size, samples) else ''}, so it is not clear how microbatches "
                f"share it. Say it in PipelineParallel(batch_dims={{{path!r}: …}}): the dim that counts samples, or "
                "None to give it whole to every microbatch."
            )
    if samples == 0:
        raise ParallelConfigError("The batch has no samples. Drop empty batches in the DataLoader.")
    parts = [len(part) for part in torch.arange(samples).tensor_split(min(count, samples))]
    starts = [sum(parts[:i]) for i in range(len(parts))]
    pieces = [_cut(batch, (), cuts, samples, start, size) for start, size in zip(starts, parts, strict=True)]
    return pieces, parts


def _dim(path: str, dims: Mapping[str, int | None]) -> int | None:
    for glob, dim in dims.items():
        if fnmatchcase(path, glob):
            return dim
    return 0


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    if _is_list_of_values(value):
        return [(".".join(path), value)]
    items = _items(value)
    if items is None:
        return [(".".join(path), value)]
    return [leaf for key, item in items for leaf in _leaves(item, (*path, str(key)))]


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [(name, getattr(value, name)) for name in value.__dataclass_fields__]
    return None


def _is_list_of_values(value: Any) -> bool:
    """One entry a sample: strings, say."""
    return (
        isinstance(value, list)
        and bool(value)
        and not any(_items(v) is not None or isinstance(v, Tensor) for v in value)
    )


def _cut(value: Any, path: tuple[str, ...], cuts: Mapping[str, int | None], samples: int, start: int, size: int) -> Any:
    name = ".".join(path)
    if isinstance(value, Tensor):
        dim = cuts[name]
        return value if dim is None or value.ndim <= dim else value.narrow(dim, start, size)
    if _is_list_of_values(value):
        return value[start : start + size] if len(value) == samples and cuts[name] == 0 else value
    items = _items(value)
    if items is None:
        return value
    return _rebuilt(value, {key: _cut(item, (*path, str(key)), cuts, samples, start, size) for key, item in items})


def copied(value: Any) -> Any:
    """The same batch, which a step may change in place: each stage runs the step, on the same microbatch."""
    if isinstance(value, Tensor):
        return value.clone()
    items = _items(value)
    return value if items is None else _rebuilt(value, {key: copied(item) for key, item in items})


def _rebuilt(value: Any, new: dict[Any, Any]) -> Any:
    """``value`` with other entries."""
    if isinstance(value, Mapping):
        return _same_mapping(value, new)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*new.values())
    if isinstance(value, tuple | list):
        return type(value)(new.values())
    copy = object.__new__(type(value))
    copy.__dict__.update(value.__dict__)
    for key, item in new.items():
        object.__setattr__(copy, key, item)
    return copy


def _same_mapping(value: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return new
    try:
        return type(value)(new)  # type: ignore[call-arg]  # UserDict, OrderedDict, BatchEncoding, TensorDict-likes
    except TypeError:
        return new


def signature(value: Any) -> Any:
    """Equal for microbatches whose tensors have the same shapes and dtypes, and whose other entries are of one kind."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    items = _items(value)
    if items is None or _is_list_of_values(value):
        return value if isinstance(value, bool | str | type(None)) else type(value).__name__
    return tuple((key, signature(item)) for key, item in items)


def _described(batch: Any) -> str:
    items = _items(batch)
    if items is None:
        return f"a {type(batch).__name__}"
    return f"a {type(batch).__name__} of " + ", ".join(f"{key}: {type(item).__name__}" for key, item in items[:6])


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """One output of a step for those of its microbatches.

    A tensor with one row a sample is joined along dim 0, a tensor without dims or a number is the weighted mean;
    anything else is that of the last microbatch. Tuples, lists and dicts are merged entry by entry.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if (isinstance(first, Tensor) and first.ndim == 0) or isinstance(first, float):
        total = sum(output * weight for output, weight in zip(outputs, weights, strict=True))
        return total.to(first.dtype) if isinstance(first, Tensor) and isinstance(total, Tensor) else total
    if isinstance(first, Tensor):
        if all(isinstance(o, Tensor) and o.size(0) == size for o, size in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        return outputs[-1]
    if type(first) is dict and all(type(o) is dict and o.keys() == first.keys() for o in outputs):
        return {key: merge_outputs([o[key] for o in outputs], sizes, weights) for key in first}
    if type(first) in (tuple, list) and all(len(o) == len(first) for o in outputs):
        return type(first)(merge_outputs(list(entries), sizes, weights) for entries in zip(*outputs, strict=True))
    return outputs[-1]
