"""Who gets which samples, and the guards: on imagined ranks, and under the Trainer on four processes."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torchmetrics import SumMetric

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.strategies.loaders import prepare_loader
from lightning_parallel.strategies.lockstep import DataRanks, LockstepLoader, PeerCheck, fingerprint, gather_over
from lightning_parallel.strategies.samplers import EachOnceSampler, EvenBatchSampler, sampler_kwargs
from tests.support.pool import WorkerPool

TRAIN, VAL, TEST, PREDICT = (
    RunningStage.TRAINING,
    RunningStage.VALIDATING,
    RunningStage.TESTING,
    RunningStage.PREDICTING,
)


def on_ranks(data_ranks: Sequence[int], fn: Callable[[DataRanks], Any]) -> list[Any]:
    """`fn` on every rank, each in a thread; an exception in the place of a value."""
    barrier = threading.Barrier(len(data_ranks), timeout=10)
    told: list[int] = [0] * len(data_ranks)

    def run(rank: int) -> Any:
        def gather(number: int) -> list[int]:
            told[rank] = number
            barrier.wait()
            everyone = list(told)
            barrier.wait()
            return everyone

        try:
            return fn(DataRanks(rank=rank, data_ranks=tuple(data_ranks), gather=gather))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(data_ranks)) as threads:
        return list(threads.map(run, range(len(data_ranks))))


def all_raise(results: Sequence[Any], match: str) -> None:
    for result in results:
        assert isinstance(result, ParallelConfigError)
        assert match in str(result)
    assert len({str(result) for result in results}) == 1


def as_lightning_does(loader: DataLoader[Any], ranks: DataRanks, stage: RunningStage) -> DataLoader[Any]:
    """The sampler that Lightning injects, in a new loader."""
    kwargs = sampler_kwargs(ranks.data_rank, ranks.data_size)
    if stage == PREDICT:
        wrapped = UnrepeatedDistributedSamplerWrapper(loader.sampler, **kwargs, shuffle=False)
        assert isinstance(loader.batch_sampler, BatchSampler)
        batches = BatchSampler(wrapped, loader.batch_sampler.batch_size, drop_last=False)
        return DataLoader(loader.dataset, batch_sampler=_IndexBatchSamplerWrapper(batches))
    is_plain = isinstance(loader.sampler, RandomSampler | SequentialSampler)
    sampler: Any = (
        DistributedSampler(loader.dataset, **kwargs, shuffle=stage == TRAIN)
        if is_plain
        else DistributedSamplerWrapper(loader.sampler, **kwargs, shuffle=stage == TRAIN)
    )
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last, num_workers=0
    )


def batches_of(make: Callable[[], DataLoader[Any]], stage: RunningStage, ranks: DataRanks) -> list[list[int]]:
    loader = prepare_loader(as_lightning_does(make(), ranks, stage), ranks=ranks, stage=stage)
    batches = [batch.tolist() for batch in loader]
    assert len(loader) == len(batches)
    return batches


# --- evaluation: each sample once, as many batches on every rank ---


@pytest.mark.filterwarnings("ignore:.*the last batch of some ranks holds 2 samples.*")
@pytest.mark.parametrize("stage", [VAL, TEST, PREDICT, RunningStage.SANITY_CHECKING])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 16])
def test_each_sample_once_in_as_many_batches(stage: RunningStage, size: int, batch_size: int) -> None:
    for num in range(size, 2 * size * min(batch_size, 4) + 3):
        make = lambda num=num: DataLoader(range(num), batch_size=batch_size)  # type: ignore[misc]  # noqa: E731
        ranks = on_ranks(range(size), partial(batches_of, make, stage))

        assert len({len(batches) for batches in ranks}) == 1
        assert all(len(batch) > 0 for batches in ranks for batch in batches)
        assert max(len(batch) for batches in ranks for batch in batches) <= max(batch_size, 2)
        assert len(ranks[0]) == math.ceil(math.ceil(num / size) / batch_size) or batch_size == 1
        flat = [i for batches in ranks for batch in batches for i in batch]
        assert sorted(flat) == list(range(num))
        if stage == PREDICT:
            assert flat == list(range(num)), "rank after rank is the order of the dataset"
        else:  # what limit_val_batches=1 sees is the head of the dataset
            first = sorted(i for batches in ranks for i in batches[0])
            assert first[: len(first) // 2] == list(range(len(first) // 2))


def test_seven_samples_on_two_ranks() -> None:
    make = lambda: DataLoader(range(7), batch_size=2)  # noqa: E731
    assert on_ranks([0, 0, 1, 1], partial(batches_of, make, VAL)) == [[[0, 2], [4, 6]]] * 2 + [[[1, 3], [5]]] * 2
    assert on_ranks([0, 1], partial(batches_of, make, PREDICT)) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    five = lambda: DataLoader(range(5), batch_size=2)  # noqa: E731
    assert on_ranks([0, 1], partial(batches_of, five, PREDICT)) == [[[0, 1], [2]], [[3], [4]]]


@pytest.mark.parametrize("stage", [VAL, TEST])
def test_too_few_samples(stage: RunningStage) -> None:
    make = lambda: DataLoader(range(3), batch_size=2)  # noqa: E731
    all_raise(on_ranks(range(4), partial(batches_of, make, stage)), "3 samples in batches of 2 do not give each of 4")


def test_nothing_at_all_is_left_to_lightning() -> None:
    make = lambda: DataLoader([], batch_size=2, sampler=SequentialSampler([]))  # noqa: E731
    assert on_ranks(range(2), partial(batches_of, make, VAL)) == [[], []]


def test_drop_last_is_the_users() -> None:
    make = lambda: DataLoader(range(11), batch_size=2, drop_last=True)  # noqa: E731
    assert on_ranks(range(2), partial(batches_of, make, VAL)) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    few = lambda: DataLoader(range(3), batch_size=2, drop_last=True)  # noqa: E731
    all_raise(on_ranks(range(2), partial(batches_of, few, VAL)), "the last one dropped unless full")


def test_without_batching_items_must_divide() -> None:
    make = lambda num: DataLoader(range(num), batch_size=None)  # type: ignore[arg-type]  # noqa: E731

    def items(num: int, ranks: DataRanks) -> list[int]:
        return list(prepare_loader(as_lightning_does(make(num), ranks, VAL), ranks=ranks, stage=VAL))

    assert on_ranks(range(2), partial(items, 4)) == [[0, 2], [1, 3]]
    all_raise(on_ranks(range(2), partial(items, 5)), "batch_size=None")


def test_batch_size_one_says_so() -> None:
    make = lambda: DataLoader(range(5), batch_size=1)  # noqa: E731
    with pytest.warns(UserWarning, match="the last batch of some ranks holds 2 samples"):
        assert on_ranks(range(2), partial(batches_of, make, VAL)) == [[[0], [2, 4]], [[1], [3]]]


def test_batch_size_one_that_cannot_be_merged() -> None:
    samples = [torch.zeros(n) for n in range(1, 4)]
    make = lambda: DataLoader(samples, batch_size=1)  # type: ignore[arg-type]  # noqa: E731
    all_raise(on_ranks(range(2), partial(batches_of, make, VAL)), "collate_fn cannot put those two together")


class Pairs(BatchSampler):
    """A user's own, with the sampler under another name."""

    def __init__(self, sampler: Sampler[int], batch_size: int, drop_last: bool) -> None:
        super().__init__(SequentialSampler([]), batch_size, drop_last)
        self.mine = sampler

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.mine)
        return iter([indices[i : i + 2] for i in range(0, len(indices), 2)])

    def __len__(self) -> int:
        return math.ceil(len(self.mine) / 2)  # type: ignore[arg-type]


def with_own_batch_sampler(num: int, ranks: DataRanks) -> list[list[int]]:
    injected = DistributedSampler(range(num), **sampler_kwargs(ranks.data_rank, 2), shuffle=False)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(range(num), batch_sampler=Pairs(injected, 2, False))  # type: ignore[arg-type, var-annotated]
    return [batch.tolist() for batch in prepare_loader(loader, ranks=ranks, stage=VAL)]


def test_own_batch_sampler_gets_the_exact_indices() -> None:
    assert on_ranks(range(2), partial(with_own_batch_sampler, 7)) == [[[0, 2], [4, 6]], [[1, 3], [5]]]
    all_raise(on_ranks(range(2), partial(with_own_batch_sampler, 5)), "2 batches on rank 0; 1 batches on rank 1")


def test_own_distributed_sampler_stays() -> None:
    def prepare(ranks: DataRanks) -> bool:
        own = DistributedSampler(range(7), num_replicas=2, rank=ranks.data_rank, shuffle=False)  # type: ignore[arg-type, var-annotated]
        loader = DataLoader(range(7), sampler=own, batch_size=2)  # type: ignore[arg-type, var-annotated]
        same = prepare_loader(loader, ranks=ranks, stage=VAL)
        return same is loader and loader.sampler is own and type(loader.batch_sampler) is BatchSampler

    assert on_ranks(range(2), prepare) == [True, True]


def test_everything_else_in_the_loader_stays() -> None:
    def collate(samples: list[int]) -> list[int]:
        return samples

    class Own(DataLoader[int]):
        def __init__(self, dataset: Any, extra: str, **kwargs: Any) -> None:
            super().__init__(dataset, **kwargs)
            self.extra = extra

    def prepare(ranks: DataRanks) -> list[Any]:
        sampler = DistributedSampler(range(7), **sampler_kwargs(ranks.data_rank, 2), shuffle=False)  # type: ignore[arg-type, var-annotated]
        loader = Own(range(7), "x", batch_size=2, sampler=sampler, collate_fn=collate, timeout=0)
        prepared = prepare_loader(loader, ranks=ranks, stage=VAL)
        assert prepared is loader
        assert isinstance(loader.sampler, EachOnceSampler)
        assert isinstance(loader.sampler, DistributedSampler), "or Lightning would split it once more"
        assert isinstance(loader.batch_sampler, EvenBatchSampler)
        assert (loader.extra, loader.collate_fn, loader.batch_size) == ("x", collate, 2)
        again = prepare_loader(loader, ranks=ranks, stage=VAL)
        assert again is loader
        return list(loader)

    assert on_ranks(range(2), prepare) == [[[0, 2], [4, 6]], [[1, 3], [5]]]


def test_shuffled_evaluation_changes_with_the_epoch() -> None:
    def prepare(ranks: DataRanks) -> list[list[int]]:
        sampler = DistributedSampler(range(7), **sampler_kwargs(ranks.data_rank, 2), shuffle=True)  # type: ignore[arg-type, var-annotated]
        loader = DataLoader(range(7), sampler=sampler, batch_size=7)  # type: ignore[arg-type, var-annotated]
        prepare_loader(loader, ranks=ranks, stage=VAL)
        epochs = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
            epochs.append(next(iter(loader)).tolist())
        return epochs

    first, second = zip(*on_ranks(range(2), prepare), strict=True)
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(7))
    assert first != second


# --- training ---


def training_epochs(sampler: Callable[[], Sampler[int] | None], data_rank: int) -> list[list[int]]:
    """Two epochs of one of two data ranks. One after the other: the global generators are the process's."""
    ranks = DataRanks(rank=data_rank, data_ranks=(0, 1), gather=lambda number: [number, number])
    torch.manual_seed(data_rank)  # as the strategy does, for dropout
    loader = as_lightning_does(DataLoader(range(10), batch_size=2, sampler=sampler(), shuffle=None), ranks, TRAIN)  # type: ignore[arg-type]
    before = loader.sampler
    assert prepare_loader(loader, ranks=ranks, stage=TRAIN) is loader
    assert loader.sampler is before
    epochs = []
    for epoch in range(2):
        before.set_epoch(epoch)  # type: ignore[union-attr]
        torch.rand(data_rank + 1)
        epochs.append([i for batch in loader for i in batch.tolist()])
        assert len(epochs[-1]) == 5
    return epochs


@pytest.mark.parametrize("sampler", [lambda: None, lambda: SubsetRandomSampler(range(10))])
def test_training_replicas_are_disjoint_and_shuffled(sampler: Callable[[], Sampler[int] | None]) -> None:
    zero, one = training_epochs(sampler, 0), training_epochs(sampler, 1)
    for epoch in range(2):
        assert sorted(zero[epoch] + one[epoch]) == list(range(10))
    assert zero[0] != zero[1]
    assert training_epochs(sampler, 0) == zero, "peers get the same order"


# --- worker seeds ---


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([torch.rand(1), torch.from_numpy(np.random.rand(1)).float()])


def test_workers_are_seeded_by_data_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    seen = []
    for rank in range(4):
        torch.manual_seed(5)
        ranks = DataRanks(rank=rank, data_ranks=(0, 0, 1, 1), gather=lambda number: [number] * 4)
        loader = prepare_loader(DataLoader(Noise(), num_workers=1, batch_size=4), ranks=ranks, stage=TRAIN)
        assert loader.worker_init_fn.keywords == {"rank": rank // 2}
        torch.rand(rank)  # peers' global generators have moved apart
        seen.append(next(iter(loader)))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not (seen[0] == seen[2]).any()


def test_worker_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = DataRanks(rank=1, data_ranks=(0, 0), gather=lambda number: [number] * 2)

    def own(worker: int) -> None: ...

    def prepared(fn: Any) -> Any:
        return prepare_loader(DataLoader(Noise(), worker_init_fn=fn), ranks=ranks, stage=TRAIN).worker_init_fn

    assert prepared(None) is None, "not asked for"
    assert prepared(own) is own
    assert prepared(partial(pl_worker_init_function, rank=1)).keywords == {"rank": 0}
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    assert prepared(own) is own


# --- guards ---


def test_unequal_lengths_are_an_error_on_every_rank() -> None:
    def prepare(ranks: DataRanks, limit: int | float = 1.0, stage: RunningStage = VAL) -> Any:
        loader = DataLoader(range(10), sampler=range(5 - ranks.rank))  # type: ignore[arg-type, var-annotated]
        return prepare_loader(loader, ranks=ranks, stage=stage, limit_batches=limit)

    results = on_ranks(range(2), prepare)
    all_raise(results, "val_dataloader: 5 batches on rank 0; 4 batches on rank 1.")
    assert "limit_val_batches=4" in str(results[0])
    all_raise(on_ranks(range(2), partial(prepare, limit=5)), "4 batches")
    assert all(isinstance(loader, DataLoader) for loader in on_ranks(range(2), partial(prepare, limit=4)))
    assert all(isinstance(loader, DataLoader) for loader in on_ranks(range(2), partial(prepare, limit=0.25)))


def test_different_datasets_are_an_error_on_every_rank() -> None:
    def prepare(ranks: DataRanks) -> Any:
        return batches_of(lambda: DataLoader(range(8 + ranks.rank), batch_size=4), VAL, ranks)

    all_raise(on_ranks(range(2), prepare), "8 samples on rank 0; 9 samples on rank 1")


def test_mixed_kinds_are_an_error_on_every_rank() -> None:
    def prepare(ranks: DataRanks) -> Any:
        return prepare_loader([1, 2] if ranks.rank else iter([1, 2]), ranks=ranks, stage=TRAIN)

    all_raise(on_ranks(range(2), prepare), "data without a length on rank 0")


def test_one_rank_is_left_alone() -> None:
    def no_gather(number: int) -> list[int]:
        raise AssertionError

    loader = DataLoader(Stream(3))
    ranks = DataRanks(rank=0, data_ranks=(0,), gather=no_gather)
    assert prepare_loader(loader, ranks=ranks, stage=TRAIN) is loader


@dataclass
class Stream(IterableDataset[int]):
    """Numbers from `start`, a step apart."""

    num: int
    start: int = 0
    step: int = 1
    fails_at: int | None = None

    def __iter__(self) -> Iterator[int]:
        for i in range(self.num):
            if i == self.fails_at:
                raise OSError("disk on fire")
            yield self.start + i * self.step


def consume(make: Callable[[DataRanks], Iterable[Any]], ranks: DataRanks, epochs: int = 1) -> list[Any]:
    loader = prepare_loader(make(ranks), ranks=ranks, stage=TRAIN)
    assert isinstance(loader, LockstepLoader)
    return [[batch.tolist() if isinstance(batch, Tensor) else batch for batch in loader] for _ in range(epochs)]


def split(num: int, ranks: DataRanks) -> Iterable[Any]:
    mine = len(range(ranks.data_rank, num, ranks.data_size))
    return DataLoader(Stream(mine, ranks.data_rank, ranks.data_size), batch_size=2)


def test_streams_in_step() -> None:
    results = on_ranks([0, 0, 1, 1], partial(consume, partial(split, 8), epochs=2))
    assert results == [[[[0, 2], [4, 6]]] * 2] * 2 + [[[[1, 3], [5, 7]]] * 2] * 2


def test_a_stream_that_ends_early_is_an_error_on_every_rank() -> None:
    results = on_ranks(range(2), partial(consume, partial(split, 5)))
    all_raise(results, "rank 1 ended after 1 batches, and rank 0 had another one")


def test_a_stream_that_fails_ends_every_rank() -> None:
    make = lambda ranks: DataLoader(Stream(4, ranks.rank, fails_at=2 if ranks.rank else None))  # noqa: E731
    healthy, failed = on_ranks(range(2), partial(consume, make))
    assert "rank 1 could not load batch 2" in str(healthy)
    assert isinstance(failed, OSError)


@pytest.mark.parametrize("make", [lambda ranks: DataLoader(Stream(4)), lambda ranks: iter([torch.arange(3)])])
def test_a_stream_that_nobody_split(make: Any) -> None:
    all_raise(on_ranks(range(2), partial(consume, make)), "data ranks 0 and 1 see the same samples")
    assert isinstance(on_ranks([0, 0], partial(consume, make))[0], list), "one data rank has nothing to split"


def test_a_stream_split_by_the_global_rank() -> None:
    make = lambda ranks: DataLoader(Stream(4, ranks.rank, 4))  # noqa: E731
    all_raise(on_ranks([0, 0, 1, 1], partial(consume, make)), "ranks 0 and 1 share data rank 0")


def test_constant_data_say_nothing() -> None:
    make = lambda ranks: iter([torch.zeros(2, 3), torch.zeros(2, 3)])  # noqa: E731
    assert on_ranks(range(2), partial(consume, make)) == [[[[[0.0] * 3] * 2] * 2]] * 2


def test_sized_stream_is_compared_and_kept_in_step() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return 4

    make = lambda ranks: DataLoader(Sized(4 - ranks.rank, ranks.rank))  # noqa: E731
    all_raise(on_ranks(range(2), partial(consume, make)), "rank 1 ended after 3 batches")


def test_wrapper_looks_like_the_loader() -> None:
    class Stateful(DataLoader[int]):
        def state_dict(self) -> dict[str, Any]:
            return {"position": 3}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

    ranks = DataRanks(rank=0, data_ranks=(0, 0), gather=lambda number: [number] * 2)
    inner = Stateful(Stream(4))
    loader = prepare_loader(inner, ranks=ranks, stage=TRAIN)
    assert loader.dataset is inner.dataset
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    with pytest.raises(TypeError):
        len(loader)
    assert loader
    combined = CombinedLoader([loader, prepare_loader(DataLoader(Stream(4)), ranks=ranks, stage=TRAIN)])
    assert combined._state_dicts() == [{"position": 3}], "the other one has none"
    combined._load_state_dicts([{"position": 5}])
    assert inner.loaded == {"position": 5}
    assert prepare_loader(loader, ranks=ranks, stage=VAL).inner is inner, "not wrapped twice"
    combined.reset()


def test_peers_of_sized_loaders() -> None:
    def check(ranks: DataRanks, offset: int) -> int:
        peers = PeerCheck(ranks)
        told = []
        counting = DataRanks(
            rank=ranks.rank,
            data_ranks=ranks.data_ranks,
            gather=lambda n: told.append(n) or ranks.gather(n),  # type: ignore[func-returns-value]
        )
        peers = PeerCheck(counting)
        batch = {"x": torch.arange(4) + ranks.data_rank + offset * ranks.rank}
        for key in ["train", "train", "val"]:
            peers(batch, key, "train_dataloader")
        peers.reset()
        peers(batch, "train", "train_dataloader")
        return len(told)

    assert on_ranks([0, 0, 1, 1], partial(check, offset=0)) == [3] * 4
    assert on_ranks([0, 1], partial(check, offset=1)) == [0] * 2, "no peers, no cost"
    all_raise(on_ranks([0, 0, 1, 1], partial(check, offset=1)), "train_dataloader: ranks 0 and 1 share data rank 0")


class Box:
    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


@pytest.mark.parametrize(
    ("left", "right", "is_same"),
    [
        (torch.arange(3), torch.arange(3), True),
        (torch.arange(3), torch.arange(3).float(), False),
        (torch.arange(6), torch.arange(6).view(2, 3), False),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), True),
        (torch.arange(3).bfloat16(), torch.tensor([0, 1, 3]).bfloat16(), False),
        ({"a": [torch.ones(2), "x"]}, {"a": [torch.ones(2), "y"]}, False),
        ([1, (2.0, None)], [1, (2.0, None)], True),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(1, 4), False),
        (Box(x=torch.arange(2)), Box(x=torch.arange(2)), True),
        (Box(x=torch.arange(2)), Box(x=torch.arange(1, 3)), False),
        (object(), object(), True),
        (torch.tensor(True), torch.tensor(False), False),
        (torch.randn(1 << 21).numpy(), np.zeros(1 << 21), False),
        (torch.full((3,), 1 - 2j).conj(), torch.full((3,), 1 + 2j), True),
        (torch.arange(12).view(3, 4).T, torch.arange(12).view(3, 4).T.contiguous(), True),
    ],
)
def test_fingerprint(left: Any, right: Any, is_same: bool) -> None:
    assert (fingerprint(left) == fingerprint(right)) is is_same
    assert 0 <= fingerprint(left) < 2**63


def test_fingerprint_of_a_large_tensor_is_cheap_and_sees_all_parts() -> None:
    x = torch.randn(1 << 22)
    print_before = fingerprint(x)
    x[: len(x) // 2] += 1
    assert fingerprint(x) != print_before


# --- under the Trainer: 2 data ranks × 2 peers ---


class TwoByTwo(DDPStrategy):
    """What the package's strategies do to loaders, on Lightning's own strategy."""

    def __init__(self) -> None:
        super().__init__(process_group_backend="gloo")

    @cached_property
    def check_peers(self) -> PeerCheck:
        return PeerCheck(self.ranks)

    @property
    def ranks(self) -> DataRanks:
        return DataRanks(rank=self.global_rank, data_ranks=(0, 0, 1, 1), gather=gather_over(device=self.root_device))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return sampler_kwargs(self.ranks.data_rank, self.ranks.data_size)

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        stage = trainer.state.stage
        assert stage is not None
        limit = getattr(trainer, f"limit_{stage.dataloader_prefix}_batches")
        return prepare_loader(dataloader, ranks=self.ranks, stage=stage, limit_batches=limit)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self.lightning_module is not None
        stage = self.lightning_module.trainer.state.stage
        self.check_peers(batch, (stage, dataloader_idx), f"{stage}_dataloader")
        return super().batch_to_device(batch, device, dataloader_idx)


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[str, list[list[int]]] = {}
        self.count = SumMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.setdefault(f"train{self.current_epoch}", []).append(batch.tolist())
        return self.layer(batch.float().unsqueeze(1)).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.setdefault("sanity" if self.trainer.sanity_checking else "val", []).append(batch.tolist())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.setdefault("test", []).append(batch.tolist())
        self.count.update(len(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch * 10

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.by_batch: list[list[int]] = []
        self.by_epoch: Any = None

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.by_batch.append(list(indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.by_epoch = indices


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=4,
        strategy=TwoByTwo(),
        callbacks=list(callbacks),
        **{
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
    )


def run_all_stages() -> dict[str, Any]:
    module, writer = Recorder(), Writer()
    runner = trainer(writer)
    seven = DataLoader(range(7), batch_size=2)  # type: ignore[arg-type, var-annotated]
    runner.fit(module, DataLoader(range(12), batch_size=2, shuffle=True), seven)  # type: ignore[arg-type]
    length = len(runner.train_dataloader)
    runner.test(module, seven, verbose=False)
    # The metric counts over the world, so each sample on both peers; the strategy's own syncs over data ranks.
    count = module.count.compute().item()
    predictions = runner.predict(module, seven)
    assert predictions is not None
    return {
        **module.seen,
        "length": length,
        "count": count,
        "predictions": torch.cat(predictions).tolist(),  # type: ignore[arg-type]
        "by_batch": writer.by_batch,
        "by_epoch": writer.by_epoch,
    }


def test_all_stages_under_the_trainer(pool: WorkerPool) -> None:
    results = pool.run(run_all_stages)

    assert results[0] == results[1]
    assert results[2] == results[3]
    zero, one = results[0], results[2]
    assert zero["val"] == [[0, 2], [4, 6]] * 2
    assert one["val"] == [[1, 3], [5]] * 2
    assert (zero["sanity"], one["sanity"]) == (zero["val"][:2], one["val"][:2])
    assert (zero["test"], one["test"]) == (zero["val"][:2], one["val"][:2])
    assert zero["count"] == 2 * 7
    for epoch in ("train0", "train1"):
        assert sorted(itertools.chain(*zero[epoch], *one[epoch])) == list(range(12))
    assert zero["train0"] != zero["train1"]
    assert zero["length"] == len(zero["train0"]) == 3
    assert zero["predictions"] + one["predictions"] == [10 * i for i in range(7)]
    assert zero["by_batch"] + one["by_batch"] == [[0, 1], [2, 3], [4, 5], [6]]
    assert zero["by_epoch"] + one["by_epoch"] == [[[0, 1], [2, 3]], [[4, 5], [6]]]


class SplitStream(IterableDataset[int]):
    """As the documentation of an error says."""

    def __init__(self, num: int, strategy: TwoByTwo, is_split: bool) -> None:
        self.num, self.strategy, self.is_split = num, strategy, is_split

    def __iter__(self) -> Iterator[int]:
        kwargs = self.strategy.distributed_sampler_kwargs
        samples = range(self.num)
        return (
            itertools.islice(samples, kwargs["rank"], None, kwargs["num_replicas"]) if self.is_split else iter(samples)
        )


def fit_stream(num: int, is_split: bool, with_mixture: bool = False) -> Any:
    module = Recorder()
    runner = trainer()
    strategy = runner.strategy
    assert isinstance(strategy, TwoByTwo)
    loader: Any = DataLoader(SplitStream(num, strategy, is_split), batch_size=2)
    if with_mixture:
        loader = CombinedLoader([loader], "max_size_cycle")
    try:
        runner.fit(module, loader)
    except ParallelConfigError as error:
        return str(error)
    return module.seen


def test_iterable_dataset_under_the_trainer(pool: WorkerPool) -> None:
    expected = [{f"train{epoch}": [[i, i + 2], [i + 4, i + 6]] for epoch in range(2)} for i in (0, 0, 1, 1)]
    assert pool.run(fit_stream, 8, True) == expected


@pytest.mark.parametrize(
    ("num", "is_split", "message"),
    [(5, True, "ranks 2, 3 ended after 1 batches"), (8, False, "data ranks 0 and 1 see the same samples")],
)
def test_iterable_dataset_that_does_not_fit(pool: WorkerPool, num: int, is_split: bool, message: str) -> None:
    results = pool.run(fit_stream, num, is_split)
    assert all(message in result for result in results), results


def validate_unequal() -> str:
    module, runner = Recorder(), trainer(use_distributed_sampler=False)
    rank = runner.global_rank
    loader = DataLoader(range(8), batch_size=2, sampler=range(8 if rank < 2 else 6))  # type: ignore[arg-type, var-annotated]
    try:
        runner.validate(module, loader)
    except ParallelConfigError as error:
        return str(error)
    return "validated"


def test_one_validation_batch_fewer_under_the_trainer(pool: WorkerPool) -> None:
    assert all("4 batches on ranks 0, 1; 3 batches on ranks 2, 3" in told for told in pool.run(validate_unequal))


def fit_shuffled_by_global_rank() -> str:
    module, runner = Recorder(), trainer(use_distributed_sampler=False)
    own = RandomSampler(range(64), generator=torch.Generator().manual_seed(runner.global_rank))
    try:
        runner.fit(module, DataLoader(range(64), batch_size=4, sampler=own))  # type: ignore[arg-type, var-annotated]
    except ParallelConfigError as error:
        return str(error)
    return "trained"


def test_own_sampler_that_parts_peers_under_the_trainer(pool: WorkerPool) -> None:
    results = pool.run(fit_shuffled_by_global_rank)
    assert all("ranks 0 and 1 share data rank 0" in told for told in results), results
