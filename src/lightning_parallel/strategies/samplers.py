"""Who gets which samples, where Lightning has put a sampler of its own into the user's loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_parallel._lightning import (
    DatasetSamplerWrapper,
    DistributedSamplerWrapper,
    IndexBatchSamplerWrapper,
    UnrepeatedDistributedSamplerWrapper,
    is_as_the_hook_returned_it,
    seed_all,
)
from lightning_parallel.errors import ParallelConfigError


class _InjectedSize(int):
    """A number of replicas as the strategy hands it to Lightning. A sampler that holds one is not the user's own."""


def sampler_kwargs(data_rank: int, data_size: int) -> dict[str, int]:
    """For ``Strategy.distributed_sampler_kwargs``: the arguments of the sampler that Lightning injects."""
    return {"num_replicas": _InjectedSize(data_size), "rank": data_rank}


def find_injected_sampler(loader: object, *, is_predicting: bool) -> DistributedSampler[Any] | None:
    """The sampler that Lightning injected into ``loader``; None where it left the user's own in place."""
    if not isinstance(loader, DataLoader) or is_as_the_hook_returned_it(loader):
        return None
    kinds = (UnrepeatedDistributedSamplerWrapper,) if is_predicting else (DistributedSampler, DistributedSamplerWrapper)
    # A loader with a batch sampler has its sampler inside that, in a user's class under any name.
    for candidate in (loader.sampler, *getattr(_batch_sampler(loader), "__dict__", {}).values()):
        if type(candidate) in kinds and isinstance(candidate.num_replicas, _InjectedSize):
            return candidate  # type: ignore[no-any-return]
    return None


# [Note: evaluation sees each sample once]
# Lightning's evaluation samplers either repeat samples, so that 7 of them on 2 ranks count as 8, or give one rank a
# batch more, in which it waits forever for the others to gather its parameters. So the n samples are dealt without
# repetition, ceil(n/R) or floor(n/R) to each of R ranks, and every rank cuts its own into the same number of batches:
# ceil(ceil(n/R)/B), the least that holds a batch size of B. Where one rank has fewer samples its last batches are
# smaller. That needs floor(n/R) samples at least as many as batches: true for B >= 2 and n >= R. For B = 1 and n not a
# multiple of R it is not, and some rank's last batch holds two.
#
# Validation and test deal in turn, as torch does: batch i of all ranks together is the i-th batch of R·B samples of
# one device, which is what ``limit_val_batches`` counts. Prediction deals contiguous blocks: one rank's predictions
# after the other's are in the order of the dataset.


class EachOnceSampler(DistributedSampler[int]):
    """This data rank's indices: over all data ranks every sample exactly once.

    A ``DistributedSampler``, so that Lightning does not inject another one around it.

    Args:
        injected: Whose dataset (or sampler, where it wraps one), order, seed and epoch are taken over.
        data_rank: Position among the data ranks.
        data_size: Number of data ranks.
        is_contiguous: Deal contiguous blocks instead of dealing in turn.
    """

    def __init__(
        self, injected: DistributedSampler[Any], *, data_rank: int, data_size: int, is_contiguous: bool
    ) -> None:
        super().__init__(
            injected.dataset, num_replicas=data_size, rank=data_rank, shuffle=injected.shuffle, seed=injected.seed
        )
        self.epoch = injected.epoch
        self.is_contiguous = is_contiguous
        self.total_size = len(injected.dataset)  # type: ignore[arg-type]
        self.num_samples = len(range(data_rank, self.total_size, data_size))

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        if not self.is_contiguous:
            return iter(order[self.rank :: self.num_replicas])
        start = self.rank * (self.total_size // self.num_replicas) + min(self.rank, self.total_size % self.num_replicas)
        return iter(order[start : start + self.num_samples])

    def set_epoch(self, epoch: int) -> None:
        """As torch's, and the user's sampler is told too."""
        super().set_epoch(epoch)
        set_source_epoch = getattr(self._source, "set_epoch", None)
        if callable(set_source_epoch):
            set_source_epoch(epoch)

    @property
    def _source(self) -> Any:
        """The user's sampler, where there is one other than sequential or random."""
        return self.dataset._sampler if isinstance(self.dataset, DatasetSamplerWrapper) else None

    def _order(self) -> list[int]:
        """The whole epoch, the same on all ranks."""
        order = list(range(self.total_size)) if self._source is None else draw_alike(self._source, self)
        if len(order) != self.total_size:
            raise ParallelConfigError(
                f"{type(self._source).__name__} gave {len(order)} indices and has a length of {self.total_size}: they "
                "are dealt to the ranks by the length. Make __len__ and __iter__ agree."
            )
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
        return order


class EvenBatchSampler(BatchSampler):
    """Cuts a rank's indices into as many batches as every other rank's (see [Note: evaluation sees each sample once]).

    Args:
        sampler: This rank's indices.
        batch_size: Most samples in a batch. Only where it is 1 may the last batch hold two.
        drop_last: Only full batches, as many as all ranks have.
    """

    sampler: EachOnceSampler

    def __init__(self, sampler: EachOnceSampler, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        least, most = sampler.total_size // sampler.num_replicas, ceil(sampler.total_size / sampler.num_replicas)
        self.num_batches = least // batch_size if drop_last else min(ceil(most / batch_size), least)

    @property
    def is_over_full(self) -> bool:
        """Whether this rank's last batch is larger than the batch size."""
        return not self.drop_last and self.sampler.num_samples > self.num_batches * self.batch_size

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        for num_left in reversed(range(self.num_batches)):
            if self.drop_last:
                size = self.batch_size
            elif num_left:
                size = min(self.batch_size, len(indices) - num_left)
            else:
                size = len(indices)
            yield indices[:size]
            del indices[:size]


def deal_each_sample_once(
    loader: DataLoader[Any],
    injected: DistributedSampler[Any],
    *,
    data_rank: int,
    data_size: int,
    is_predicting: bool,
    name: str,
) -> None:
    """Put an `EachOnceSampler` in the place of ``injected``, and even batches over it.

    In place: Lightning has just built ``loader`` for this run, and a subclass with arguments of its own cannot be built
    a second time. Everything else in it stays what the user chose.

    Args:
        name: What messages call the loader.

    Raises:
        ParallelConfigError: There are too few samples for every rank to have one in each batch. On all ranks.
    """
    exact = EachOnceSampler(injected, data_rank=data_rank, data_size=data_size, is_contiguous=is_predicting)
    if loader.sampler is injected:
        _set(loader, "sampler", exact)
    batches = _batch_sampler(loader)
    if batches is None:  # each item is a batch
        _check_batches(exact, exact.total_size % data_size == 0, "without batching (batch_size=None)", name)
        return
    if type(batches) is BatchSampler:
        even = EvenBatchSampler(exact, batches.batch_size, batches.drop_last)
        how = f"in batches of {even.batch_size}" + (", the last one dropped unless full," if even.drop_last else "")
        _check_batches(exact, len(even) > 0 or exact.total_size == 0, how, name)
        batches = even
    else:  # the user's class decides on batches; their number is compared with the other ranks'
        for attribute, value in list(vars(batches).items()):
            if value is injected:
                setattr(batches, attribute, exact)
    is_recorded = isinstance(loader.batch_sampler, IndexBatchSamplerWrapper)
    _set(loader, "batch_sampler", IndexBatchSamplerWrapper(batches) if is_recorded else batches)


def even_batches(loader: object) -> EvenBatchSampler | None:
    """What `deal_each_sample_once` put into ``loader``, None where the batches are the user's."""
    batches = _batch_sampler(loader) if isinstance(loader, DataLoader) else None
    return batches if isinstance(batches, EvenBatchSampler) else None


def agree_on_draws(injected: DistributedSampler[Any]) -> None:
    """Make a random sampler of the user's that Lightning has wrapped draw the same indices on every rank.

    Each rank draws the whole epoch and takes its share. From the global generator, which differs from rank to rank
    (dropout does), those would be shares of different epochs.
    """
    if isinstance(injected.dataset, DatasetSamplerWrapper):
        injected.dataset = _AlikeDraws(injected.dataset, injected)


class _AlikeDraws(DatasetSamplerWrapper):
    """What Lightning's wrapper reads a user's sampler through."""

    def __init__(self, wrapped: DatasetSamplerWrapper, owner: DistributedSampler[Any]) -> None:
        super().__init__(wrapped._sampler)
        self._owner = owner

    def reset(self) -> None:
        self._sampler_list = draw_alike(self._sampler, self._owner)


def draw_alike(source: Iterable[Any], owner: DistributedSampler[Any]) -> list[Any]:
    """All indices of ``source``, drawn from ``owner``'s seed and epoch where it uses the global generators."""
    with isolate_rng():
        seed_all(owner.seed + owner.epoch)
        return list(source)


def _batch_sampler(loader: DataLoader[Any]) -> Any:
    """The batch sampler, under Lightning's recorder of indices."""
    batches = loader.batch_sampler
    return batches._batch_sampler if isinstance(batches, IndexBatchSamplerWrapper) else batches


def _set(loader: DataLoader[Any], attribute: str, value: object) -> None:
    # DataLoader forbids it, since a user who sets a sampler would expect other attributes to follow.
    object.__setattr__(loader, attribute, value)


def _check_batches(sampler: EachOnceSampler, is_possible: bool, how: str, name: str) -> None:
    num, size = sampler.total_size, sampler.num_replicas
    if not is_possible:
        raise ParallelConfigError(
            f"{name}: {num} samples {how} do not give each of {size} data ranks the same number of batches, at least "
            "one, without repeating a sample. All ranks run the model together, so they need it. Give "
            f"{_nearest(num, size)} samples, use fewer data ranks (sizes that divide {num}, or a larger tp), or pass "
            "Trainer(use_distributed_sampler=False) and a sampler of your own."
        )


def _nearest(num: int, size: int) -> str:
    return f"{max(1, num // size) * size} or {(num // size + 1) * size}" if num >= size else f"at least {size}"
