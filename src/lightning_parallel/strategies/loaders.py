"""What the strategy does to every loader: who gets which samples, and guards against what would hang or go wrong."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_parallel.errors import ParallelConfigError
from lightning_parallel.strategies.lockstep import DataRanks, LockstepLoader, lockstep
from lightning_parallel.strategies.samplers import (
    agree_on_draws,
    deal_each_sample_once,
    even_batches,
    find_injected_sampler,
)

# What a rank tells of its loader before anything else, where that is not a number of samples.
_OPEN_ENDED, _USERS_OWN = -1, -2
# What it tells in the place of a number of batches.
_NO_LENGTH, _CANNOT_COLLATE = -1, -2


def prepare_loader(loader: Any, *, ranks: DataRanks, stage: RunningStage, limit_batches: int | float = 1.0) -> Any:
    """Make one of Lightning's loaders right for ranks that run one model together. Called on all ranks.

    - Worker processes are seeded by the data rank, so that peers get the same random augmentation.
    - Training keeps the sampler that Lightning injected. Evaluation and prediction see each sample exactly once, in
      the same number of batches on every rank; prediction in contiguous blocks, data rank by data rank.
    - Ranks with unequal numbers of batches are an error here. Where there is no length, or none to rely on, the loader
      is wrapped to keep ranks in step (`LockstepLoader`).

    A user's own sampler is never replaced.

    Args:
        loader: As ``Strategy.process_dataloader`` gets it: a DataLoader, or any iterable.
        ranks: Who sees what.
        stage: What the loader is for.
        limit_batches: The Trainer's limit for this stage; beyond it lengths may differ.

    Returns:
        The loader itself, or a wrapper around one without a length.

    Raises:
        ParallelConfigError: On all ranks; the loaders do not fit together, or there are too few samples.
    """
    if isinstance(loader, LockstepLoader):  # a CombinedLoader that went through another run
        loader = loader.inner
    if len(ranks.data_ranks) == 1:
        return loader
    name = f"{stage.dataloader_prefix}_dataloader"
    is_predicting = stage == RunningStage.PREDICTING
    injected = find_injected_sampler(loader, is_predicting=is_predicting)
    # The length of an IterableDataset is a promise of the user's, and wrong with workers.
    is_open_ended = has_iterable_dataset(loader) or sized_len(loader) is None
    own = _OPEN_ENDED if is_open_ended else _USERS_OWN if injected is None else len(injected.dataset)  # type: ignore[arg-type]
    _check_same_source(ranks.gather(own), name)

    seed_workers(loader, ranks)
    if injected is not None and (stage == RunningStage.TRAINING or ranks.data_size == 1):
        agree_on_draws(injected)
    elif injected is not None:
        deal_each_sample_once(
            loader,
            injected,
            data_rank=ranks.data_rank,
            data_size=ranks.data_size,
            is_predicting=is_predicting,
            name=name,
        )
    _check_same_length(ranks.gather(_num_batches(loader)), limit_batches, name)
    if (batches := even_batches(loader)) is not None and batches.is_over_full:
        rank_zero_warn(
            f"{name}: with batch_size=1, {batches.sampler.total_size} samples on {ranks.data_size} data ranks do not "
            "divide into as many batches on each, so the last batch of some ranks holds 2 samples. A step that takes a "
            "batch for a single sample needs a number of samples that is a multiple of the data ranks."
        )
    if is_open_ended:
        return lockstep(loader, ranks=ranks, name=name)
    return loader


def seed_workers(loader: Any, ranks: DataRanks) -> None:
    """Seed worker processes by the data rank where Lightning would by the global rank. Called on all ranks.

    Lightning does so right after the strategy has seen the loader, and leaves alone what is there already. A user's own
    ``worker_init_fn`` stays.
    """
    seeds = ranks.gather(torch.initial_seed() % 2**63) if ranks.have_peers else []
    if not hasattr(loader, "worker_init_fn"):
        return
    present = loader.worker_init_fn
    is_lightnings = isinstance(present, partial) and present.func is pl_worker_init_function
    if is_lightnings or (present is None and int(os.environ.get("PL_SEED_WORKERS", "0"))):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=ranks.data_rank)
    if seeds and getattr(loader, "num_workers", 0) > 0 and getattr(loader, "generator", None) is None:
        # The loader draws the workers' base seed from the global generator, and that of peers may be apart by now.
        loader.generator = torch.Generator().manual_seed(seeds[ranks.first_peer])


def _num_batches(loader: Any) -> int:
    length = sized_len(loader)
    batches = even_batches(loader)
    if batches is None or not batches.is_over_full:
        return _NO_LENGTH if length is None else length
    *_, last = batches
    # In a worker where the user has workers: a dataset may open files that must not cross a fork.
    trial = DataLoader(
        loader.dataset,
        batch_sampler=[last],
        collate_fn=loader.collate_fn,
        num_workers=min(1, loader.num_workers),
        multiprocessing_context=loader.multiprocessing_context,
    )
    try:
        with isolate_rng():
            next(iter(trial))
    except Exception:
        return _CANNOT_COLLATE
    return len(batches)


def _check_same_source(sources: Any, name: str) -> None:
    names = {_OPEN_ENDED: "data without a length", _USERS_OWN: "a sampler of its own"}
    told = [names.get(source, f"{source} samples") for source in sources]
    if len({*told}) > 1:
        raise ParallelConfigError(
            f"{name}: {_by_rank(told)}. The samples are dealt to the ranks by their number, so every rank must build "
            "the same dataset and the same kind of loader. Build them from the same files on every rank."
        )


def _check_same_length(lengths: Any, limit: int | float, name: str) -> None:
    if _CANNOT_COLLATE in lengths:
        raise ParallelConfigError(
            f"{name}: with batch_size=1 the samples do not divide among the data ranks, so that some rank's last batch "
            "must hold two, and collate_fn cannot put those two together. Give a number of samples that is a multiple "
            "of the data ranks, or a collate_fn that pads."
        )
    used = [n if n < 0 else min(n, limit) if isinstance(limit, int) else int(n * limit) for n in lengths]
    if len({*used}) > 1:
        told = ["no length" if n == _NO_LENGTH else f"{n} batches" for n in lengths]
        raise ParallelConfigError(
            f"{name}: {_by_rank(told)}. All ranks run the model together, so they need the same number of batches. Pad "
            "or cut in the sampler, or stop every rank early with Trainer("
            f"limit_{name.removesuffix('loader').removesuffix('_data')}_batches={max(1, min(lengths))})."
        )


def _by_rank(told: list[str]) -> str:
    """``3 batches on ranks 0, 1; 2 batches on rank 2``."""
    groups = {what: [rank for rank, other in enumerate(told) if other == what] for what in told}
    return "; ".join(
        f"{what} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for what, ranks in groups.items()
    )
