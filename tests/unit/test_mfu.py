"""Windows, pauses, waits and rates, on a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_parallel import MFUMonitor, ParallelConfigError
from lightning_parallel.callbacks.batches import measure_batch
from lightning_parallel.callbacks.mfu import compute_dtype
from lightning_parallel.callbacks.report import check_plot, draw, lines, named
from lightning_parallel.flops import ModelFlopsUtilization, TokensPerSecond
from lightning_parallel.flops.counting import Counted
from lightning_parallel.flops.meter import Clock, EventClock, Filled, Fleet, Meter, Work, rates

WORK = Counted(dense=6e9, attention=2e9, recomputed=4e9)
ALONE = Fleet(devices=1, data_ranks=1, peak=1e10)


class HandClock(Clock):
    def __init__(self) -> None:
        self.now = 0.0
        self.reached = float("inf")

    def mark(self) -> float:
        return self.now

    def host(self) -> float:
        return self.now

    def has_passed(self, mark: Any) -> bool:
        return mark <= self.reached


def make(window: int = 10, skip: int = 0) -> tuple[Meter, HandClock]:
    clock = HandClock()
    return Meter(clock, window, skip), clock


def step(meter: Meter, clock: HandClock, seconds: float = 1.0, microbatches: int = 1, **options: Any) -> None:
    for _ in range(microbatches):
        meter.begin()
        clock.now += seconds / microbatches
        meter.batch(WORK, samples=4, tokens=32, **options)
    meter.step()


def test_rates_of_one_device() -> None:
    meter, clock = make()
    for _ in range(3):
        step(meter, clock, 2.0)
    found = rates(meter.resolve(), ALONE)
    assert found["mfu"] == pytest.approx(0.4)
    assert found["hfu"] == pytest.approx(0.6)
    assert found["tflops_per_device"] == pytest.approx(4e-3)
    assert found["tokens_per_second"] == found["tokens_per_second_per_device"] == 16
    assert found["samples_per_second"] == 2
    assert found["step_seconds"] == 2


def test_peers_share_samples_and_replicas_do_not() -> None:
    work = Work(seconds=1, model=8e9, hardware=8e9, samples=4, tokens=32, steps=1)
    replicas = rates(work, Fleet(devices=8, data_ranks=8, peak=1e10))
    peers = rates(work, Fleet(devices=8, data_ranks=2, peak=1e10))
    assert replicas["mfu"] == pytest.approx(0.8)
    assert replicas["tokens_per_second"] == 256
    assert peers["mfu"] == pytest.approx(0.2)
    assert peers["tokens_per_second"] == 64
    assert peers["tokens_per_second_per_device"] == 8


def test_microbatches_add_up() -> None:
    meter, clock = make()
    step(meter, clock, 4.0, microbatches=4)
    assert rates(meter.resolve(), ALONE)["mfu"] == pytest.approx(0.8)
    assert meter.total.steps == 1


def test_the_window_forgets_and_the_total_does_not() -> None:
    meter, clock = make(window=2)
    for seconds in (100.0, 1.0, 3.0):
        step(meter, clock, seconds)
    assert rates(meter.resolve(), ALONE)["step_seconds"] == 2
    assert meter.total.seconds == 104


def test_first_steps_are_left_out() -> None:
    meter, clock = make(skip=2)
    for seconds in (100.0, 50.0, 1.0):
        step(meter, clock, seconds)
    meter.resolve()
    assert (meter.total.seconds, meter.total.steps) == (1.0, 1)


def test_pauses_are_kept_out_and_reported() -> None:
    meter, clock = make()
    step(meter, clock)
    meter.pause("validation")
    clock.now += 20
    meter.pause("checkpoint")  # inside: part of the validation
    clock.now += 5
    meter.resume()
    meter.resume()
    step(meter, clock)
    meter.pause("checkpoint")
    clock.now += 7
    meter.resume()
    meter.end()
    assert meter.total.seconds == 2
    assert meter.paused == {"validation": 25.0, "checkpoint": 7.0}


def test_a_step_that_is_not_kept_counts_nowhere_but_its_pauses_do() -> None:
    meter, clock = make()
    step(meter, clock)
    meter.pause("validation")
    clock.now += 20
    meter.resume()
    clock.now += 50
    meter.batch(WORK, samples=4, tokens=32)
    meter.step(keep=False)
    step(meter, clock)
    meter.resolve()
    assert (meter.total.seconds, meter.total.samples, meter.paused) == (2.0, 8, {"validation": 20.0})


def test_waiting_is_part_of_a_step() -> None:
    meter, clock = make()
    step(meter, clock)
    meter.wait()
    clock.now += 3
    meter.got()
    step(meter, clock)
    found = rates(meter.resolve(), ALONE)
    assert found["step_seconds"] == 2.5
    assert found["data_share"] == pytest.approx(3 / 5)


def test_nothing_is_read_that_the_device_has_not_done() -> None:
    meter, clock = make()
    clock.reached = 1.0
    for _ in range(3):
        step(meter, clock)
    assert meter.resolve().steps == 1
    clock.reached = 3.0
    assert meter.resolve().steps == 3


def test_events_are_only_recorded_while_training() -> None:
    # No synchronisation: in steps nothing but record() is called; elapsed_time only behind query().
    calls: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def query(self) -> bool:
            calls.append("query")
            return len(calls) > 6

        def elapsed_time(self, other: Any) -> float:
            calls.append("elapsed_time")
            return 500.0

    meter = Meter(EventClock(Event), 10, 0)
    for _ in range(3):
        meter.begin()
        meter.batch(WORK, samples=4, tokens=32)
        meter.step()
    assert calls == ["record"] * 4
    assert meter.resolve().steps == 0
    assert "elapsed_time" not in calls
    meter.resolve()
    assert meter.resolve().seconds == 1.5


def test_padding_and_documents() -> None:
    meter, clock = make()
    # Half of the positions are padding, and the pairs of what is left a quarter.
    filled = Filled(WORK, torch.tensor([16.0, 64.0]), 32, 256)
    step(meter, clock, filled=filled)
    work = meter.resolve()
    assert work.tokens == 16
    assert work.model == pytest.approx(6e9 / 2 + 2e9 / 4)
    assert work.hardware == WORK.hardware


def test_no_peak_no_mfu() -> None:
    found = rates(Work(seconds=1, model=1.0, samples=1, steps=1), Fleet(devices=1, data_ranks=1, peak=None))
    assert "mfu" not in found and "tflops_per_device" in found
    assert rates(Work(), ALONE) == {}


# --- batches


def test_batches_of_tokens() -> None:
    ids = torch.ones(4, 8, dtype=torch.long)
    at = measure_batch((ids, ids))
    assert (at.samples, at.tokens, at.sums) == (4, 32, None)
    assert at.key != measure_batch((ids[:, :4], ids)).key
    assert measure_batch({"labels": ids[:, :2], "input_ids": ids}).tokens == 32


def test_batches_of_images() -> None:
    at = measure_batch([torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)])
    assert (at.samples, at.tokens) == (4, 0)
    assert measure_batch(None).samples == 0


def test_padding_is_seen_in_the_mask() -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    at = measure_batch({"input_ids": ids, "attention_mask": mask})
    assert at.sums is not None
    assert at.sums.tolist() == [5, 17]
    assert (at.positions, at.pairs) == (8, 32)
    assert measure_batch({"input_ids": ids, "attention_mask": mask}, fill=False).sums is None


def test_documents_are_seen_in_positions_or_given() -> None:
    ids = torch.ones(1, 8, dtype=torch.long)
    at = measure_batch({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])})
    assert at.sums is not None
    assert at.sums.tolist() == [8, 9 + 4 + 9]
    at = measure_batch((ids,), lambda batch: torch.tensor([3, 2, 3]))
    assert at.sums is not None
    assert at.sums.tolist() == [8, 22]


# --- metrics


def test_metrics() -> None:
    mfu = ModelFlopsUtilization(peak_flops=1e10, devices=2)
    mfu.update(8e9, 1.0)
    assert float(mfu(8e9, 3.0)) == pytest.approx(8e9 / 3 / 2e10)
    assert float(mfu.compute()) == pytest.approx(16e9 / 4 / 2e10)
    tokens = TokensPerSecond(data_ranks=4)
    tokens.update(torch.tensor(100), 2.0)
    assert float(tokens.compute()) == 200
    with pytest.raises(ValueError, match="positive"):
        ModelFlopsUtilization(peak_flops=0)


# --- the dtype of the computation


@pytest.mark.parametrize(
    ("precision", "policy", "counted", "expected"),
    [
        ("32-true", None, None, torch.float32),
        ("32-true", None, torch.bfloat16, torch.bfloat16),  # autocast by hand
        ("bf16-mixed", None, None, torch.bfloat16),
        ("16-true", None, None, torch.float16),
        # FSDP computes in its parameters' dtype, whatever it reduces in; the copy that is counted knows nothing of it.
        ("32-true", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, torch.float32, torch.bfloat16),
        ("32-true", {"param_dtype": None, "reduce_dtype": torch.bfloat16}, torch.float32, torch.float32),
        ("transformer-engine", None, torch.bfloat16, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("whose", ["ours", "lightning"])
def test_dtype(whose: str, precision: str, policy: dict[str, Any] | None, counted: Any, expected: torch.dtype) -> None:
    strategy = SimpleNamespace()
    if policy and whose == "ours":
        strategy._fully_sharded = SimpleNamespace(mp_policy=SimpleNamespace(**policy))
    elif policy:
        strategy.mixed_precision_config = SimpleNamespace(**policy)
    trainer: Any = SimpleNamespace(precision=precision, strategy=strategy)
    assert compute_dtype(trainer, torch.nn.Linear(2, 2), counted) == expected


# --- arguments and reports


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"skip_steps": -1},
        {"flops": "guess"},
        {"causal": "third"},
        {"peak_flops": "H100"},
        {"padding": "?"},
    ],
)
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ParallelConfigError):
        MFUMonitor(**options)


def test_names_are_stable() -> None:
    found = named({"mfu": 0.5, "step_seconds": 2.0, "unknown": 1.0}, "train/")
    assert found == {"train/utilization/mfu": 0.5, "train/time/step_seconds": 2.0}
    assert lines({"mfu": 0.5}) == [("MFU", "50.0%")]


def test_pictures(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"\.png or an \.svg"):
        check_plot("curve.pdf")
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    for suffix in ("png", "svg"):
        path = tmp_path / "new" / f"curve.{suffix}"
        draw(check_plot(path), [1, 2, 3], {"MFU": [0.1, 0.4, 0.41], "HFU": [0.2, 0.5, 0.5]}, "counted")
        assert path.stat().st_size > 1000
