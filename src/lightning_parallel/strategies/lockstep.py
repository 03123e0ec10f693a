"""Ranks that run one model together must get batches together: the same number, the right ones to each.

What breaks that does not fail by itself. A rank with a batch fewer leaves the others waiting in a collective; peers
that see different samples, or replicas that see the same, train to wrong numbers. So ranks tell each other one number
here and there, and all of them raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.errors import ParallelConfigError

# Bytes of one tensor that a fingerprint reads; of a larger one it takes evenly spaced elements.
_MAX_BYTES = 1 << 22
_MAX_DEPTH = 8

_HAS_BATCH, _ENDED, _FAILED = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRanks:
    """Which samples each rank sees, and how ranks tell each other a number.

    Attributes:
        rank: This process in the world.
        data_ranks: The data rank of each rank of the world. Ranks that share one are peers, and see the same samples.
        gather: Collective over the world: takes this rank's integer (64 bits, signed), returns every rank's.
    """

    rank: int
    data_ranks: tuple[int, ...]
    gather: Callable[[int], Sequence[int]]

    @property
    def data_rank(self) -> int:
        """Of this process."""
        return self.data_ranks[self.rank]

    @property
    def data_size(self) -> int:
        """How many ways the samples are split."""
        return max(self.data_ranks) + 1

    @property
    def have_peers(self) -> bool:
        """Whether any two ranks share a data rank."""
        return len(self.data_ranks) > self.data_size

    @property
    def first_peer(self) -> int:
        """The lowest rank with this data rank."""
        return self.data_ranks.index(self.data_rank)


def gather_over(
    group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Callable[[int], list[int]]:
    """A ``gather`` for `DataRanks`: one all-gather of one integer each.

    Args:
        group: The world; the default group where None.
        device: Where the backend of ``group`` takes tensors. The host, where it takes them there, does not have to
            wait for an accelerator.
    """

    def gather(number: int) -> list[int]:
        own = torch.tensor([number], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, own, group)
        return [int(value) for value in torch.cat(everyone).tolist()]

    return gather


class LockstepLoader:
    """A loader that nobody knows the length of, on ranks that end together or fail together.

    Looks like the loader it wraps: attributes are read from it and set on it, and ``len`` is its own, or missing.

    Args:
        inner: The user's loader.
        ranks: Who sees what.
        name: What messages call the loader.
    """

    _own = frozenset({"inner", "_ranks", "_name"})

    def __init__(self, inner: Any, *, ranks: DataRanks, name: str) -> None:
        self.inner = inner
        self._ranks = ranks
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name in LockstepLoader._own:  # not set yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LockstepLoader._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def __len__(self) -> int:
        return len(self.inner)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        # Not in the generator: workers start now, and the loader's state_dict is that of this iteration from now on.
        return self._iterate(iter(self.inner))

    def _iterate(self, iterator: Iterator[Any]) -> Iterator[Any]:
        is_first, num_seen = True, 0
        while True:
            batch, state, failure = None, _HAS_BATCH, None
            try:
                batch = next(iterator)
            except StopIteration:
                state = _ENDED
            except Exception as error:
                state, failure = _FAILED, error
            states = self._ranks.gather(state)
            if failure is not None:
                raise failure
            if _FAILED in states:
                raise RuntimeError(
                    f"{self._name}: {_ranks_with(states, _FAILED)} could not load batch {num_seen}; the error is there."
                )
            if _HAS_BATCH not in states:
                return
            if _ENDED in states:
                raise ParallelConfigError(
                    f"{self._name}: {_ranks_with(states, _ENDED)} ended after {num_seen} batches, and "
                    f"{_ranks_with(states, _HAS_BATCH)} had another one. All ranks run the model together, so they "
                    "need the same number of batches. Cut the data to a multiple of num_replicas × batch_size samples "
                    "before splitting it, or stop every rank early with Trainer(limit_…_batches=<the smallest number>)."
                )
            if is_first:
                # Lightning splits no data of this kind.
                check_first_batch(batch, self._ranks, self._name, is_split_by_user=True)
            is_first, num_seen = False, num_seen + 1
            yield batch


class StatefulLockstepLoader(LockstepLoader):
    """For a loader with a state, which Lightning saves and restores where it sees these methods on the class."""

    def state_dict(self) -> dict[str, Any]:
        """The inner loader's."""
        return dict(self.inner.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the inner loader."""
        self.inner.load_state_dict(state_dict)


def lockstep(inner: Any, *, ranks: DataRanks, name: str) -> LockstepLoader:
    """Wrap ``inner``; arguments as for `LockstepLoader`."""
    is_stateful = hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")
    kind = StatefulLockstepLoader if is_stateful else LockstepLoader
    return kind(inner, ranks=ranks, name=name)


class PeerCheck:
    """Compares the first batch of each loader among the ranks that must see the same samples.

    Cheaper than a wrapper around every loader, and blind to what a user reads from one: it is called with the
    batches that the loops get, on all ranks.
    """

    def __init__(self, ranks: DataRanks) -> None:
        self._ranks = ranks
        self._checked: set[Hashable] = set()

    def __call__(self, batch: Any, key: Hashable, name: str) -> None:
        """Check ``batch`` unless ``key`` was checked before.

        Args:
            batch: As the loader gave it, before it moves to a device.
            key: For instance stage, index of the loader and epoch. The same on all ranks.
            name: What the message calls the loader.

        Raises:
            ParallelConfigError: Peers see different samples. On all ranks.
        """
        if self._ranks.have_peers and key not in self._checked:
            self._checked.add(key)
            check_first_batch(batch, self._ranks, name, is_split_by_user=False)

    def reset(self) -> None:
        """Check every loader again."""
        self._checked.clear()


def check_first_batch(batch: Any, ranks: DataRanks, name: str, *, is_split_by_user: bool) -> None:
    """Compare a batch over all ranks, which must all call this.

    Raises:
        ParallelConfigError: Peers see different samples; or, where the user splits the data, data ranks the same ones.
    """
    prints = ranks.gather(fingerprint(batch))
    first: dict[int, int] = {}
    for rank, data_rank in enumerate(ranks.data_ranks):
        peer = first.setdefault(data_rank, rank)
        if prints[rank] != prints[peer]:
            raise ParallelConfigError(
                f"{name}: ranks {peer} and {rank} share data rank {data_rank}, so they must see the same samples, and "
                "their first batches differ. Seed and split data by the data rank, not the global rank: "
                "trainer.strategy.distributed_sampler_kwargs has it as 'rank'. Give a sampler that shuffles a "
                "generator with the same seed on every rank."
            )
    seen: dict[int, int] = {}
    for data_rank, rank in first.items():
        twin = seen.setdefault(prints[rank], data_rank)
        # The lowest bit: a batch of nothing but zeros, say, is the same everywhere and means nothing.
        if is_split_by_user and twin != data_rank and prints[rank] & 1:
            raise ParallelConfigError(
                f"{name}: data ranks {twin} and {data_rank} see the same samples. Lightning does not split an "
                "IterableDataset, or an iterable without a length. Do it in its __iter__, by kwargs = "
                "trainer.strategy.distributed_sampler_kwargs: itertools.islice(samples, kwargs['rank'], None, "
                "kwargs['num_replicas']), and then among the workers of torch.utils.data.get_worker_info()."
            )


def fingerprint(batch: Any) -> int:
    """A number of 63 bits for what ``batch`` holds, tensors by their bytes and everything else by its value.

    The lowest bit tells whether equal numbers mean anything: not for a batch without values, or whose tensors each
    repeat one value. An object of an unknown class counts by its attributes, or not at all: its ``repr`` may hold an
    address, which differs between equal objects.
    """
    digest = _Digest()
    digest.add(batch)
    number = int.from_bytes(digest.hash.digest(), "little") >> 2
    return number << 1 | digest.is_telling


class _Digest:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=8)
        self.is_telling = False

    def add(self, value: Any, depth: int = 0) -> None:
        self.hash.update(type(value).__name__.encode())
        if depth > _MAX_DEPTH:  # too deep, or a cycle
            return
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, str | bytes | int | float | complex):
            self.hash.update(repr(value).encode())
            self.is_telling = True
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.add(key, depth + 1)
                self.add(item, depth + 1)
        elif isinstance(value, list | tuple):
            for item in value:
                self.add(item, depth + 1)
        elif (to_bytes := _value_of_array(value)) is not None:
            self.hash.update(to_bytes)
            self.is_telling = True
        elif not isinstance(value, type):
            self.add(getattr(value, "__dict__", {}), depth + 1)

    def _add_tensor(self, tensor: Tensor) -> None:
        self.hash.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.numel() == 0:
            return
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        flat = flat[:: max(1, flat.numel() * flat.element_size() // _MAX_BYTES)].cpu().contiguous()
        rows = flat.view(torch.uint8).view(flat.numel(), -1)
        self.hash.update(rows.numpy().tobytes())
        self.is_telling |= len(rows) == 1 or bool((rows != rows[0]).any())


def _value_of_array(value: Any) -> bytes | None:
    """Of an array or an image; not of an array of objects, whose bytes are addresses."""
    to_bytes = getattr(value, "tobytes", None)
    is_plain = not getattr(getattr(value, "dtype", None), "hasobject", False)
    return bytes(to_bytes()) if callable(to_bytes) and is_plain else None


def _ranks_with(states: Iterable[int], state: int) -> str:
    ranks = [rank for rank, value in enumerate(states) if value == state]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
