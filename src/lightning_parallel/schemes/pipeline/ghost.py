"""Tensors whose values another pipeline stage has.

A stage runs the whole of the user's step, with parameters that it does not hold. Such a parameter is a ``Ghost``: it
has a shape, a dtype and a device, and no memory. What is computed from a ghost is a ghost, by torch's own fake tensors,
so dtypes under autocast and the need of a gradient come out as in the real run. Thus the stage learns exactly which
values it lacks, whatever the user's code does with them, and where it needs one of them it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel._torch import FAKE_ERRORS, fake_mode, tree_leaves, tree_map
from lightning_parallel.errors import PlanError

_META = torch.device("meta")

# What these make depends on a tensor's shape, dtype and device only, so it is real.
_LIKE = frozenset({
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
})  # fmt: skip

_READS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})

_in_step = False


@contextmanager
def ghosts_in_step() -> Iterator[None]:
    """Ghosts name the device that the real tensors are on, as a step's code expects; at rest they say ``meta``."""
    global _in_step
    before, _in_step = _in_step, True
    try:
        yield
    finally:
        _in_step = before


class Ghost(Tensor):
    """A tensor without values.

    Args:
        fake: A fake tensor, which carries all but the values.
        origin: The parameter, or block, whose values are missing; for messages.
    """

    _fake: Tensor
    _origin: str
    _real: Tensor | None
    __slots__ = ["_fake", "_origin", "_real"]

    @staticmethod
    def __new__(cls, fake: Tensor, origin: str) -> Ghost:
        """Without storage."""
        self = Tensor._make_wrapper_subclass(cls, fake.shape, strides=fake.stride(), dtype=fake.dtype, device=_META)
        self._fake, self._origin, self._real = fake, origin, None
        return self

    def __init__(self, fake: Tensor, origin: str) -> None:
        super().__init__()

    def become(self, real: Tensor) -> None:
        """From now on, wherever this ghost is used, the received value is."""
        self._real = real

    @property
    def received(self) -> Tensor | None:
        """The value, once it was received."""
        return self._real

    @property
    def origin(self) -> str:
        """Whose values are missing."""
        return self._origin

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the real tensor in a step, else ``meta``."""
        return self._fake.device if _in_step else _META

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether the device is ``meta``."""
        return not _in_step

    @property
    def requires_grad(self) -> bool:
        """Whether the real tensor does."""
        return self._fake.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._fake.requires_grad_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Ghost(shape={tuple(self._fake.shape)}, dtype={self._fake.dtype}, of={self._origin!r})"

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ghost:
        copy = ghost_like(self._fake, self._origin, is_parameter=getattr(self, "_is_param", False))
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlanError(f"{self!r} has no values to save: they are on another pipeline stage.")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ghosts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Ghost)]
        missing = [ghost for ghost in ghosts if ghost._real is None]
        if not missing:
            args, kwargs = tree_map(lambda v: v._real if isinstance(v, Ghost) else v, (args, kwargs))
            return func(*args, **kwargs)
        if func in _LIKE and args and args[0] is missing[0]:
            return func(_stand_in(args[0]), *args[1:], **kwargs)
        if func is Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0]._fake = args[1]._fake
            return None
        return _run_on_fakes(func, args, kwargs, missing[0]._origin)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for a method of instances
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PlanError(f"{func} was called on a tensor that another pipeline stage has, past torch's functions.")


def is_ghost(value: object) -> bool:
    """Whether ``value`` is a tensor that only another stage has."""
    return isinstance(value, Ghost)


def ghost_like(tensor: Tensor, origin: str, *, is_parameter: bool = False, device: torch.device | None = None) -> Ghost:
    """A ghost of the shape, dtype and gradient need of ``tensor``, which may be on the meta device."""
    with fake_mode():
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device,
            requires_grad=tensor.requires_grad,
        )  # fmt: skip
    ghost = Ghost(fake, origin)
    if is_parameter:
        ghost._is_param = True  # torch's own mark on a subclass
    return ghost


def _run_on_fakes(func: Callable[..., Any], args: Any, kwargs: Any, origin: str) -> Any:
    if func in _READS:
        raise _no_values(origin)
    back: dict[int, Tensor] = {}  # id of a fake argument: what it stands for
    fakes: dict[int, Tensor] = {}

    def fake_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in fakes:
            fakes[id(value)] = fake = _fake_of(value)
            back[id(fake)] = value
        return fakes[id(value)]

    if func is Tensor.__getitem__:
        args = (args[0], _without_masks(args[1]))
    args, kwargs = tree_map(fake_of, (args, kwargs))
    try:
        with torch._C.DisableTorchFunctionSubclass(), fake_mode():
            out = func(*args, **kwargs)
            if func is Tensor.__iter__:
                out = list(out)
    except FAKE_ERRORS as error:
        raise _no_values(origin) from error

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return back.get(id(value)) if id(value) in back else Ghost(value, origin)

    out = tree_map(wrap, out)
    return iter(out) if func is Tensor.__iter__ else out


def _no_values(origin: str) -> PlanError:
    return PlanError(
        f"The values asked for are not on this pipeline stage: they are computed from {origin}, which another stage "
        "holds. Before the pipelined blocks a step may look at shapes only; if the module of that name runs elsewhere "
        "than it was put, give it the role stem (first stage) or head (last stage) in the plan."
    )


def _fake_of(value: Tensor) -> Tensor:
    if isinstance(value, Ghost):
        return value._fake if value._real is None else _fake_of(value._real)
    with torch._C.DisableTorchFunctionSubclass(), fake_mode():
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )


def _without_masks(index: Any) -> Any:
    """A mask that is here gives an index of known length."""
    parts = index if isinstance(index, tuple) else (index,)
    spread: list[Any] = []
    for part in parts:
        is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) and not is_ghost(part)
        spread += part.nonzero(as_tuple=True) if is_mask and part.ndim else [part]
    return tuple(spread) if isinstance(index, tuple) or len(spread) > 1 else spread[0]


def _stand_in(ghost: Ghost) -> Tensor:
    fake = ghost._fake
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype, device = fake.shape, fake.dtype, fake.device
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def make_ghosts(owner: nn.Module, name: str, *, is_buffer: bool, origin: str, device: torch.device) -> None:
    """Replace one parameter or buffer by its ghost."""
    store: dict[str, Any] = owner._buffers if is_buffer else owner._parameters
    store[name] = ghost_like(store[name], origin, is_parameter=not is_buffer, device=device)
