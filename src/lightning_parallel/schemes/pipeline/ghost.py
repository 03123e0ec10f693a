"""Tensors whose values another pipeline stage has.

A stage runs the whole of the user's step, with parameters that it does not hold. Such a parameter is a ``Ghost``: it
has a shape, a dtype and a device, and no memory. What is computed from a ghost is a ghost, by torch's own fake tensors,
so dtypes under autocast and the need of a gradient come out as in the real run. Thus the stage learns exactly which
values it lacks, whatever the user's code does with them, and where it needs one of them it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_parallel._torch import FAKE_ERRORS, fake_mode, tree_leaves, tree_map
from lightning_parallel.errors import PlanError

_META = torch.device("meta")

# What these make depends on a tensor's shape, dtype and device only, so it is real.
_LIKE = frozenset({
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
})  # fmt: skip

_READS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})

_MOST_RESULTS = 4096

_in_step = False
_results: dict[Any, Tensor] | None = None
_made: list[ref[Ghost]] | None = None
_is_kept: Callable[[Tensor], bool] | None = None


@contextmanager
def made_ghosts() -> Iterator[list[ref[Ghost]]]:
    """Those that are made inside."""
    global _made
    before, _made = _made, []
    try:
        yield _made
    finally:
        _made = before


@contextmanager
def ghosts_in_step(
    results: dict[Any, Tensor] | None = None, is_kept: Callable[[Tensor], bool] | None = None
) -> Iterator[None]:
    """Ghosts name the device that the real tensors are on, as a step's code expects; at rest they say ``meta``.

    Args:
        results: Keeps what functions of ghosts come to: each microbatch runs the same ones, and fake tensors take a
            good part of a millisecond for each.
        is_kept: Tells a module's own buffers and parameters: where values that are missing would change one in place,
            it stays as it is. Any other tensor becomes a ghost then.
    """
    global _in_step, _results, _is_kept
    before = _in_step, _results, _is_kept
    _in_step, _results, _is_kept = True, results, is_kept
    try:
        yield
    finally:
        _in_step, _results, _is_kept = before


class Ghost(Tensor):
    """A tensor without values.

    Args:
        fake: A fake tensor, which carries all but the values.
        origin: The parameter, or block, whose values are missing; for messages.
        is_shared: Other ghosts have the same fake tensor.
    """

    _fake: Tensor
    _origin: str
    _real: Tensor | None
    _is_shared: bool

    @staticmethod
    def __new__(cls, fake: Tensor, origin: str, *, is_shared: bool = False) -> Ghost:
        """Without storage."""
        self = Tensor._make_wrapper_subclass(cls, fake.shape, strides=fake.stride(), dtype=fake.dtype, device=_META)
        self._fake, self._origin, self._real, self._is_shared = fake, origin, None, is_shared
        if _made is not None:
            _made.append(ref(self))
        return self

    def __init__(self, fake: Tensor, origin: str, *, is_shared: bool = False) -> None:
        super().__init__()

    def own_fake(self) -> Tensor:
        """The fake tensor, for a function that may change it."""
        if self._is_shared:
            with torch._C.DisableTorchFunctionSubclass(), fake_mode(), torch.enable_grad():
                self._fake = self._fake.clone()
            self._is_shared = False
        return self._fake

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

    @origin.setter
    def origin(self, name: str) -> None:
        self._origin = name

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the real tensor in a step, else ``meta``."""
        return self._fake.device if _in_step else _META

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether the device is ``meta``."""
        return not _in_step

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Of the real tensor."""
        return self._fake.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the real tensor."""
        return self._fake.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the real tensor does."""
        return self._fake.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.own_fake().requires_grad_(value)

    @property
    def grad(self) -> None:
        """Where the real tensor is. Optimizers ask for it at every step."""

    @grad.setter
    def grad(self, value: None) -> None:
        if value is not None:
            raise _no_values(self._origin)

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
    if func is Tensor.__getitem__:
        args = (args[0], _without_masks(args[1]))
    results, key = _results, None if _results is None else _key(func, args, kwargs)
    if results is not None and key in results:
        return Ghost(results[key], origin, is_shared=True)
    back: dict[int, Tensor] = {}  # id of a fake argument: what it stands for
    fakes: dict[int, Tensor] = {}

    def fake_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in fakes:
            fakes[id(value)] = fake = _fake_of(value)
            back[id(fake)] = value
        return fakes[id(value)]

    args, kwargs = tree_map(fake_of, (args, kwargs))
    try:
        with torch._C.DisableTorchFunctionSubclass(), fake_mode():
            out = func(*args, **kwargs)
            if func is Tensor.__iter__:
                out = list(out)
    except FAKE_ERRORS as error:
        raise _no_values(origin) from error
    for fake in fakes.values():
        if fake._version:
            _haunt(back[id(fake)], fake, origin)
    # What is done in place to a view is done to what it is of, so that one is no new tensor.
    is_new = isinstance(out, Tensor) and id(out) not in back and not out._is_view()
    if is_new and results is not None and key is not None:
        if len(results) >= _MOST_RESULTS:
            results.clear()
        results[key] = out
        return Ghost(out, origin, is_shared=True)

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return back.get(id(value)) if id(value) in back else Ghost(value, origin)

    out = tree_map(wrap, out)
    return iter(out) if func is Tensor.__iter__ else out


def _haunt(value: Tensor, fake: Tensor, origin: str) -> None:
    """Values that are missing were to change ``value`` in place: from now on its own are missing too."""
    if isinstance(value, Ghost):
        if value._real is not None:
            value._real, value._fake, value._is_shared = None, fake, False
    elif _is_kept is None or not _is_kept(value):
        if value._base is not None:
            _haunt(value._base, _fake_of(value._base), origin)
        value.__class__ = Ghost
        assert isinstance(value, Ghost)
        value._fake, value._origin, value._real, value._is_shared = fake, origin, None, False


def _no_values(origin: str) -> PlanError:
    return PlanError(
        f"The values asked for are not on this pipeline stage: they are computed from {origin}, which another stage "
        "holds. Before the pipelined blocks a step may look at shapes only; if the module of that name runs elsewhere "
        "than it was put, give it the role stem (first stage) or head (last stage) in the plan."
    )


def _key(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Equal for calls whose results are alike but for their values; None where that cannot be told."""
    kinds: set[str] = set()
    try:
        traits = _traits(args, kinds), _traits(kwargs, kinds)
        hash(traits)
    except TypeError:
        return None
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds))
    return func, traits, autocast, torch.is_grad_enabled(), torch.get_default_dtype()


def _traits(value: Any, kinds: set[str]) -> Any:
    if isinstance(value, Ghost):
        value = value._fake if value._real is None else value._real
    if isinstance(value, Tensor):
        kinds.add(value.device.type)
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, slice):
        value = value.start, value.stop, value.step
    if isinstance(value, tuple | list):
        return type(value), *(_traits(item, kinds) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, _traits(item, kinds)) for key, item in value.items())
    return type(value), value


def _fake_of(value: Tensor) -> Tensor:
    if isinstance(value, Ghost):
        return value.own_fake() if value._real is None else _fake_of(value._real)
    with torch._C.DisableTorchFunctionSubclass(), fake_mode(), torch.enable_grad():
        fake = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )
        return fake.clone() if value.requires_grad and not value.is_leaf else fake


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
