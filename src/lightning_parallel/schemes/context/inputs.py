"""What attention over a spread sequence takes: checked, and cast as autocast would, before anything is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.schemes.context.layout import Layout


def cast_inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as autocast casts them for scaled_dot_product_attention."""
    if not torch.is_autocast_enabled(query.device.type):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (
        tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in (query, key, value)
    )
    return query, key, value


def cast_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask with four dims; an additive one in the dtype of the query under autocast, and in no lesser one else.

    The host's kernel takes a float32 mask of four dims beside a float64 query, and reads it as float64 (torch 2.13).
    """
    if mask is None:
        return None
    if mask.is_floating_point():
        autocast = torch.is_autocast_enabled(query.device.type)
        mask = mask.to(query.dtype if autocast else torch.promote_types(mask.dtype, query.dtype))
    return mask[(None,) * (4 - mask.dim())]


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    layout: Layout,
    group: dist.ProcessGroup,
    name: str,
) -> None:
    """That shapes and dtypes fit each other, the layout and the group.

    Raises:
        ParallelConfigError: They do not.
    """
    if (size := dist.get_world_size(group)) != layout.size:
        raise ParallelConfigError(
            f"{name}: a layout over {layout.size} ranks with a group of {size}. Make the layout with size={size}."
        )
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    seen = "query {}, key {} and value {}".format(*shapes)
    if {len(shape) for shape in shapes} != {4}:
        raise ParallelConfigError(
            f"{name}: {seen}: attention over a spread sequence takes (batch, heads, rows, head_dim). Add the dims of "
            "size 1 that are missing."
        )
    if {shape[2] for shape in shapes} != {layout.num_local}:
        raise ParallelConfigError(
            f"{name}: {seen}: of {layout.length} positions over {layout.size} ranks each holds {layout.num_local} "
            "rows. Pass this rank's rows, padding included; attention to another sequence cannot be spread."
        )
    if query.shape[1] % key.shape[1] or shapes[1][:2] != shapes[2][:2] or shapes[0][0] != shapes[1][0]:
        raise ParallelConfigError(
            f"{name}: {seen}: batch sizes have to be equal, and the heads of key and value, which divide those of the "
            "query. Expand what is shared."
        )
    if query.shape[-1] != key.shape[-1] or len({tensor.dtype for tensor in (query, key, value)}) > 1:
        dtypes = ", ".join(str(tensor.dtype) for tensor in (query, key, value))
        raise ParallelConfigError(
            f"{name}: {seen} ({dtypes}): query and key have the same head_dim, and all three the same dtype. Cast them."
        )
    if mask is not None:
        _check_mask(query, mask, layout, name)


def check_method(method: str, query: Tensor, mask: Tensor | None, *, size: int, dropout_p: float, name: str) -> None:
    """That the method can do what is asked.

    Raises:
        ParallelConfigError: It cannot.
    """
    if method not in ("ring", "allgather", "ulysses"):
        raise ParallelConfigError(f"{name}: method={method!r} is none of 'ring', 'allgather' and 'ulysses'.")
    heads = query.shape[1]
    if method == "ulysses" and heads % size:
        sizes = [count for count in range(1, heads + 1) if heads % count == 0]
        raise ParallelConfigError(
            f"{name}: {heads} query heads over {size} ranks: method='ulysses' gives each rank whole heads. Use one of "
            f"{sizes} ranks, a multiple of {size} heads, or method='ring' or 'allgather'."
        )
    if method == "ring" and (dropout_p > 0 or learns(mask)):
        asked, remedy = (
            (f"dropout_p={dropout_p}", "no dropout in attention (dropout_p=0)")
            if dropout_p > 0
            else ("a mask that requires grad", "detach the mask")
        )
        raise ParallelConfigError(
            f"{name}: {asked} with method='ring', which computes block by block, with neither dropout nor the gradient "
            f"of a mask. Use method='ulysses' or 'allgather', or {remedy}."
        )


def learns(mask: Tensor | None) -> bool:
    """Whether a gradient of the mask is wanted."""
    return mask is not None and mask.requires_grad and torch.is_grad_enabled()


def _check_mask(query: Tensor, mask: Tensor, layout: Layout, name: str) -> None:
    whole = (*query.shape[:2], layout.length, layout.length)
    fits = mask.dim() <= 4 and all(
        size in (1, full) for size, full in zip(reversed(mask.shape), reversed(whole), strict=False)
    )
    if not fits:
        raise ParallelConfigError(
            f"{name}: a mask of shape {tuple(mask.shape)} for a sequence of {layout.length}: it has to broadcast to "
            f"(batch, heads, length, length) = {whole}. Pass the mask of the whole sequence, the same on every rank."
        )
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise ParallelConfigError(
            f"{name}: a mask of {mask.dtype} for a query of {query.dtype}: it is bool, float32 or of the query's "
            "dtype. Cast it."
        )
