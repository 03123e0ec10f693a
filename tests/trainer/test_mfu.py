"""MFU through the Trainer, on a clock that the test moves: the same work on any mesh, and time where it belongs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_parallel import MFUMonitor
from lightning_parallel.flops.meter import Clock
from tests.support.models import Classifier, HandLlama, HuggingFaceLM, NanoGPT
from tests.support.pool import WorkerPool
from tests.support.specs import Spec, describe
from tests.trainer.common import CP, DDP, DDP_TP, FSDP, FSDP_CP, FSDP_TP, TP, Data, MemoryLogger, make_trainer, seed
from tests.trainer.models import ByHand, TwoOptimizers

LIGHTNING_DDP: Spec = ("DDPStrategy", {})
PP: Spec = ("PipelineParallel", {"microbatches": 2})
PEAK = 1e9


class HandClock(Clock):
    """Shows what it was set to, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def host(self) -> float:
        return self.now


class Monitor(MFUMonitor):
    def __init__(self, **options: Any) -> None:
        self.hand = HandClock()
        super().__init__(**{"skip_steps": 0, "peak_flops": PEAK, "summary": False, **options})

    def clock(self, device: torch.device) -> Clock:
        return self.hand


class Tick(Callback):
    """Moves the clock: seconds for each training batch, validation batch and checkpoint."""

    def __init__(self, clock: HandClock, *, train: float = 1.0, validation: float = 0.0, saving: float = 0.0) -> None:
        self.clock, self.train, self.validation, self.saving = clock, train, validation, saving

    def on_train_batch_start(self, *args: Any) -> None:
        self.clock.now += self.train

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.clock.now += self.validation

    def on_save_checkpoint(self, *args: Any) -> None:
        self.clock.now += self.saving


def fit(
    module: Any,
    strategy: Spec | None = None,
    *,
    options: dict[str, Any] | None = None,
    tick: dict[str, float] | None = None,
    callbacks: tuple[Callback, ...] = (),
    data: Any = None,
    ckpt_path: Any = None,
    **trainer_options: Any,
) -> tuple[Monitor, dict[str, list[float]]]:
    seed()
    monitor, logger = Monitor(**(options or {})), MemoryLogger()
    first = [monitor, Tick(monitor.hand, **(tick or {})), *callbacks]
    trainer = make_trainer(strategy, *first, logger=logger, num_sanity_val_steps=0, **trainer_options)
    trainer.fit(module(), datamodule=data or Data(), ckpt_path=ckpt_path)
    return monitor, logger.seen


def measured(module: Any, strategy: Spec | None, accumulate: int = 1) -> dict[str, Any]:
    monitor, seen = fit(module, strategy, limit_val_batches=0, accumulate_grad_batches=accumulate)
    return {"seen": seen, "convention": monitor.convention, "figures": dict(monitor.figures)}


@pytest.mark.parametrize(
    ("module", "strategy", "world"),
    [
        (NanoGPT, LIGHTNING_DDP, 2),
        (NanoGPT, DDP, 2),
        (NanoGPT, FSDP, 2),
        (NanoGPT, DDP_TP, 4),
        (NanoGPT, FSDP_TP, 4),
        (NanoGPT, PP, 2),
        (NanoGPT, CP, 2),
        (NanoGPT, FSDP_CP, 4),
        (HandLlama, PP, 2),
        (HandLlama, CP, 2),
    ],
    ids=describe,
)
def test_work_is_the_same_on_every_mesh(pool: WorkerPool, module: Any, strategy: Spec, world: int) -> None:
    # oumi#301: each rank is busy for as long as the one device is, so MFU falls by the number of ranks exactly.
    [alone] = pool.run_once(measured, module, None, world=1)
    ranks = pool.run(measured, module, strategy, world=world)
    assert len(alone["seen"]["utilization/mfu"]) == 3
    for name in ("utilization/mfu", "utilization/hfu", "utilization/tflops_per_device"):
        assert [world * value for value in ranks[0]["seen"][name]] == pytest.approx(alone["seen"][name], rel=1e-9)
    for name in ("throughput/tokens_per_second", "throughput/samples_per_second", "time/step_seconds"):
        assert ranks[0]["seen"][name] == pytest.approx(alone["seen"][name], rel=1e-9)
    assert ranks[0]["seen"]["throughput/samples_per_second"] == [8.0] * 3
    assert ranks[0]["seen"]["throughput/tokens_per_second_per_device"] == [64.0 / world] * 3
    for rank in ranks:  # all ranks know the same, and count in the same way
        assert rank["convention"] == alone["convention"]
        assert rank["figures"]["mfu"] == pytest.approx(alone["figures"]["mfu"] / world, rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_accumulation_and_logging_change_nothing(accumulate: int, every: int) -> None:
    # litgpt#403, Lightning#19461
    _, plain = fit(NanoGPT, limit_val_batches=0, data=Data(train=96))
    monitor, seen = fit(
        NanoGPT, limit_val_batches=0, data=Data(train=96), accumulate_grad_batches=accumulate, log_every_n_steps=every
    )
    assert len(seen["utilization/mfu"]) == 12 // accumulate // every
    assert seen["utilization/mfu"] == pytest.approx([plain["utilization/mfu"][0]] * len(seen["utilization/mfu"]))
    assert seen["time/step_seconds"] == [accumulate] * len(seen["time/step_seconds"])
    assert monitor.figures["tokens_per_second"] == 64


def test_validation_and_checkpoints_are_apart(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    monitor, seen = fit(
        NanoGPT, tick={"validation": 10.0, "saving": 7.0}, callbacks=(saver,), max_epochs=2, val_check_interval=1,
        enable_checkpointing=True,
    )  # fmt: skip
    assert seen["time/step_seconds"] == [1.0] * 6
    # Each step has been saved and validated (4 batches) since the last log.
    assert seen["time/validation_seconds"] == [40.0 * steps for steps in range(6)]
    assert seen["time/checkpoint_seconds"] == [7.0 * steps for steps in range(6)]
    assert monitor.figures["validation_seconds"] == 240.0
    assert monitor.figures["checkpoint_seconds"] == 42.0


class SlowData(Data):
    """Each training sample takes a quarter of a second to fetch."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self.clock = clock

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        inner, clock = loader.collate_fn, self.clock

        def collate(rows: Any) -> Any:
            clock.now += 3.0
            return inner(rows)

        loader.collate_fn = collate
        return loader


def test_waiting_for_data_is_in_and_has_a_share() -> None:
    monitor, logger = Monitor(), MemoryLogger()
    trainer = make_trainer(None, monitor, Tick(monitor.hand), logger=logger, limit_val_batches=0, max_epochs=3)
    trainer.fit(NanoGPT(), datamodule=SlowData(monitor.hand))
    assert monitor.figures["step_seconds"] == pytest.approx(4.0, rel=0.2)
    assert monitor.figures["data_share"] == pytest.approx(0.75, rel=0.2)


def test_a_run_goes_on_after_a_resume_and_the_gap_counts_nowhere(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    options: dict[str, Any] = {"limit_val_batches": 0, "enable_checkpointing": True, "default_root_dir": tmp_path}
    first, _ = fit(NanoGPT, callbacks=(saver,), **options)
    second, seen = fit(NanoGPT, max_epochs=2, ckpt_path=tmp_path / "last.ckpt", **options)
    assert first.state_dict()["total"][-1] == 3
    assert second.state_dict()["total"][-1] == 6
    assert seen["time/step_seconds"] == [1.0] * 3
    assert second.figures["samples_per_second"] == 8


class Itemising(NanoGPT):
    """Reads a number from the device, and steps over what is not finite: fake tensors cannot say."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("seen", loss.item())
        return loss


class LooksAtValues(NanoGPT):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1.0 if bool(torch.isfinite(loss)) else loss * 0.0


@pytest.mark.parametrize("module", [Itemising, LooksAtValues])
def test_steps_that_look_at_values_are_counted_all_the_same(module: Any) -> None:
    _, plain = fit(NanoGPT, limit_val_batches=0)
    monitor, seen = fit(module, limit_val_batches=0)
    assert seen["utilization/mfu"][-1] == pytest.approx(plain["utilization/mfu"][-1])
    assert seen["utilization/hfu"][-1] == pytest.approx(plain["utilization/hfu"][-1])
    # Where the real step had to be watched, it is left out: it was slow.
    assert len(seen["utilization/mfu"]) == (3 if module is Itemising else 2)
    assert monitor.state_dict()["total"][-1] == (3 if module is Itemising else 2)


@pytest.mark.parametrize("strategy", [DDP, LIGHTNING_DDP], ids=describe)
def test_real_steps_are_counted_on_replicas(pool: WorkerPool, strategy: Spec) -> None:
    [alone] = pool.run_once(measured, NanoGPT, None, world=1)
    ranks = pool.run(measured, LooksAtValues, strategy, world=2)
    assert 2 * ranks[0]["seen"]["utilization/mfu"][-1] == pytest.approx(alone["seen"]["utilization/mfu"][-1])


def test_a_split_model_that_cannot_be_copied_is_counted_by_its_parameters(pool: WorkerPool) -> None:
    matrices = [p for p in NanoGPT().parameters() if p.ndim > 1]
    table = NanoGPT().model.wpe.weight.numel()  # of positions, looked up; that of tokens is the head's matrix too
    for rank in pool.run(measured, LooksAtValues, TP, world=2):
        assert "without attention" in rank["convention"]
        mfu = 6 * (sum(p.numel() for p in matrices) - table) * 64 / (2 * PEAK)
        assert rank["figures"]["mfu"] == pytest.approx(mfu)


def test_counting_leaves_no_trace() -> None:
    plain = MemoryLogger()
    seed()
    make_trainer(None, logger=plain, num_sanity_val_steps=0).fit(NanoGPT(dropout=0.5), datamodule=Data())
    _, seen = fit(lambda: NanoGPT(dropout=0.5))
    assert seen["train_loss"] == plain.seen["train_loss"]
    assert seen["val_loss"] == plain.seen["val_loss"]


class Thaws(NanoGPT):
    def on_train_epoch_start(self) -> None:
        self.model.h.requires_grad_(self.current_epoch > 0)


def test_what_is_thawed_counts_from_then_on() -> None:
    _, seen = fit(Thaws, max_epochs=2, limit_val_batches=0, options={"window": 1})
    frozen, thawed = seen["utilization/mfu"][0], seen["utilization/mfu"][-1]
    blocks = sum(p.numel() for p in NanoGPT().model.h.parameters() if p.ndim > 1)
    assert (thawed - frozen) * PEAK == pytest.approx(2 * blocks * 64)  # no gradients of weights: 4 in place of 6


class MovedBeforeHook(NanoGPT):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def test_an_epoch_that_ends_early() -> None:
    monitor, _ = fit(MovedBeforeHook, max_epochs=3, limit_val_batches=0)
    assert monitor.state_dict()["total"][-1] == 3


class Images(Classifier):
    """No tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)


def test_models_without_tokens() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 16), torch.zeros(32, dtype=torch.long))
    monitor, logger = Monitor(), MemoryLogger()
    trainer = make_trainer(None, monitor, Tick(monitor.hand), logger=logger, limit_val_batches=0)
    module = Images()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    matrices = [p for p in module.parameters() if p.ndim > 1]
    # The first matrix has no gradient of its input to compute: 4 in place of 6.
    flops = 8 * (6 * sum(p.numel() for p in matrices) - 2 * matrices[0].numel())
    assert monitor.figures["mfu"] * PEAK == pytest.approx(flops)
    assert "tokens_per_second" not in monitor.figures
    assert monitor.figures["samples_per_second"] == 8


def test_an_unknown_device_has_no_mfu_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_parallel"):
        _, seen = fit(NanoGPT, options={"peak_flops": None}, max_epochs=2, limit_val_batches=0)
    assert "utilization/mfu" not in seen
    assert len(seen["throughput/tokens_per_second"]) == 6
    [message] = [record.getMessage() for record in caplog.records]
    assert "knows no peak" in message and "peak_flops" in message


def test_more_than_the_peak_is_an_error_line(caplog: pytest.LogCaptureFixture) -> None:
    # nanoGPT#464
    with caplog.at_level(logging.ERROR, logger="lightning_parallel"):
        fit(NanoGPT, options={"peak_flops": 1e6}, max_epochs=2, limit_val_batches=0)
    [message] = [record.getMessage() for record in caplog.records]
    assert "more than the devices can do" in message and "Likely causes" in message


def test_the_table_and_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = Monitor(summary=True, progress_bar=True)
    trainer = make_trainer(None, monitor, Tick(monitor.hand), limit_val_batches=0)
    trainer.fit(NanoGPT(), datamodule=Data())
    shown = capsys.readouterr().out
    assert "MFU" in shown and "tokens/s" in shown and "counted by operation" in shown
    assert float(trainer.progress_bar_metrics["mfu"]) == pytest.approx(monitor.figures["mfu"])


def test_the_trainer_is_as_it_was_afterwards() -> None:
    monitor = Monitor()
    trainer = make_trainer(None, monitor, limit_val_batches=0)
    trainer.fit(NanoGPT(), datamodule=Data())
    assert "save_checkpoint" not in vars(trainer)
    assert not {"start", "stop"} & set(vars(trainer.profiler))  # type: ignore[attr-defined]
    assert "setup" not in vars(trainer.strategy)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "bfloat16"), ("bf16-true", "bfloat16"), ("64-true", "float64")]
)
def test_the_dtype_is_that_of_the_computation(precision: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_parallel"):
        _, seen = fit(NanoGPT, options={"peak_flops": None}, limit_val_batches=0, precision=precision)
    [message] = [record.getMessage() for record in caplog.records if "knows no peak" in record.getMessage()]
    assert f"torch.{dtype}" in message
    _, plain = fit(NanoGPT, limit_val_batches=0)
    # Counted on the copy: the first step is there too.
    assert seen["utilization/tflops_per_device"] == pytest.approx(plain["utilization/tflops_per_device"])


class Padded(HuggingFaceLM):
    """Batches as a Hugging Face collator makes them."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.model(**batch).loss


def rows(lengths: list[int], width: int) -> dict[str, Tensor]:
    ids = torch.ones(len(lengths), width, dtype=torch.long)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("padding", ["excluded", "counted"])
def test_padding(padding: str) -> None:
    batches = [rows([8, 4], 8), rows([6, 2], 8)]
    monitor = Monitor(padding=padding)
    trainer = make_trainer(None, monitor, Tick(monitor.hand), limit_val_batches=0)
    module = Padded(attn_implementation="sdpa", tie_word_embeddings=True)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    matrices = sum(p.numel() for p in module.parameters() if p.ndim > 1)
    tokens = 20 if padding == "excluded" else 32
    assert monitor.figures["tokens_per_second"] == tokens / 2
    # Of two seconds together; attention is a small part here.
    assert monitor.figures["mfu"] * PEAK * 2 == pytest.approx(6 * matrices * tokens, rel=0.1)
    assert monitor.figures["hfu"] * PEAK * 2 == pytest.approx(6 * matrices * 32, rel=0.1)


def test_lengths_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [4, 8, 12, 6, 8, 16]

    def run(most: int) -> float:
        monkeypatch.setattr("lightning_parallel.callbacks.estimating._MOST_SHAPES", most)
        batches = [(torch.ones(2, n, dtype=torch.long),) * 2 for n in lengths]
        monitor = Monitor()
        trainer = make_trainer(None, monitor, Tick(monitor.hand), limit_val_batches=0)
        trainer.fit(NanoGPT(), torch.utils.data.DataLoader(batches, batch_size=None))
        assert monitor.figures["tokens_per_second"] == 2 * sum(lengths) / 6
        return monitor.figures["mfu"]

    # Each shape counted, and all scaled from the first: attention by pairs, the rest by tokens.
    assert run(1) == pytest.approx(run(64), rel=1e-9)


def test_formulas_numbers_and_functions() -> None:
    def mfu(flops: Any, module: Any = NanoGPT) -> float:
        monitor, _ = fit(module, options={"flops": flops}, limit_val_batches=0)
        return monitor.figures["mfu"] * PEAK

    assert mfu(1000.0) == pytest.approx(8000)
    assert mfu(lambda batch: 10.0 * batch[0].numel()) == pytest.approx(640)
    full, half = mfu("palm", HuggingFaceLM), mfu("palm-causal", HuggingFaceLM)
    assert full - half == pytest.approx(6 * 2 * 4 * 8 * 8 * 64)


@pytest.mark.parametrize("module", [ByHand, TwoOptimizers])
def test_manual_optimisation(module: Any) -> None:
    if module is TwoOptimizers:
        data = torch.utils.data.TensorDataset(torch.randn(32, 16), torch.zeros(32, dtype=torch.long))
        monitor = Monitor()
        trainer = make_trainer(None, monitor, Tick(monitor.hand), limit_val_batches=0)
        trainer.fit(module(), torch.utils.data.DataLoader(data, batch_size=8))
        assert monitor.figures["step_seconds"] == 1.0  # two optimizers that step in one batch are one step
    else:
        monitor, _ = fit(module, limit_val_batches=0, data=Data(train=32))
        plain, _ = fit(NanoGPT, limit_val_batches=0)
        assert monitor.figures["step_seconds"] == 2.0
        assert monitor.figures["mfu"] == pytest.approx(2 * plain.figures["mfu"])  # two forwards, two backwards
    assert "real step" not in monitor.convention


def uneven(reduce: bool) -> dict[str, float]:
    """Rank r trains on sequences of 4·(r + 1) tokens."""
    import os

    length = 4 * (int(os.environ["RANK"]) + 1)
    monitor, logger = Monitor(reduce=reduce), MemoryLogger()
    batches = [(torch.ones(2, length, dtype=torch.long),) * 2 for _ in range(6)]
    trainer = make_trainer(
        LIGHTNING_DDP, monitor, Tick(monitor.hand), logger=logger, limit_val_batches=0, use_distributed_sampler=False
    )
    trainer.fit(NanoGPT(), torch.utils.data.DataLoader(batches, batch_size=None))
    logged = {name: values[-1] for name, values in logger.seen.items()}
    return {"logged": logged.get("throughput/tokens_per_second", 0.0), "end": monitor.figures["tokens_per_second"]}


@pytest.mark.parametrize("reduce", [False, True])
def test_ranks_with_different_work(pool: WorkerPool, reduce: bool) -> None:
    first, second = pool.run(uneven, reduce, world=2)
    assert first["logged"] == (24 if reduce else 16)
    assert first["end"] == second["end"] == 24  # the table is right in any case


def fitted_twice(strategy: Spec) -> list[float]:
    seed()
    monitor, module = Monitor(), NanoGPT()
    trainer = make_trainer(strategy, monitor, Tick(monitor.hand), limit_val_batches=0)
    found = []
    for _ in range(2):
        trainer.fit(module, datamodule=Data())
        trainer.fit_loop.max_epochs = 2
        found.append(monitor.figures["mfu"])
    return found


@pytest.mark.parametrize("strategy", [FSDP, PP], ids=describe)
def test_a_module_that_was_split_by_an_earlier_fit(pool: WorkerPool, strategy: Spec) -> None:
    for first, second in pool.run(fitted_twice, strategy, world=2):
        assert first == pytest.approx(second)
