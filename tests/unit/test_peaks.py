"""The table of peaks: dense, sourced, matched exactly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_parallel.flops.peaks import PEAKS, Peak, device_name, find_peak, kind_of, measure_peak

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def tflops(name: str, dtype: torch.dtype) -> float | None:
    found = find_peak(name, dtype)
    return None if found is None else found.flops / 1e12


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", BF16, 312),
        ("NVIDIA H100 80GB HBM3", BF16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, 1979),
        ("NVIDIA H100 NVL", BF16, 835.5),  # Lightning#21677: 1671 is with sparsity
        ("NVIDIA H200", BF16, 989),  # Lightning#21743
        ("NVIDIA L4", BF16, 121),
        ("NVIDIA L40S", BF16, 362),
        ("NVIDIA L40", BF16, 181),
        ("NVIDIA B300", BF16, 2250),  # OLMo-core#817: not an A100's
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla V100-SXM2-16GB", BF16, None),  # has none
        ("Tesla T4", torch.float16, 65),
        ("AMD Instinct MI250X", BF16, 191.5),  # of one die, which is what torch calls a device
        ("TPU v5p", BF16, 459),
    ],
)
def test_dense_figures(name: str, dtype: torch.dtype, expected: float | None) -> None:
    assert tflops(name, dtype) == expected


@pytest.mark.parametrize(
    "name", ["NVIDIA L4S", "NVIDIA H2000", "nvidia h200", "H200", "NVIDIA H100", "NVIDIA A100", "", None, "EPYC"]
)
def test_names_are_matched_whole(name: str | None) -> None:
    assert find_peak(name, BF16) is None


def test_float32_is_tf32_only_where_it_is_allowed() -> None:
    torch.set_float32_matmul_precision("highest")
    assert kind_of(torch.float32) == "fp32"
    assert tflops("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5
    torch.set_float32_matmul_precision("high")
    assert tflops("NVIDIA A100-SXM4-80GB", torch.float32) == 156
    assert tflops("Tesla T4", torch.float32) == 8.1  # has no TF32


def test_integers_have_no_peak() -> None:
    assert find_peak("NVIDIA H200", torch.int64) is None


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: row.names[0])
def test_rows_are_plausible(row: Peak) -> None:
    assert len(row.source) > 10
    assert row.bf16 or row.fp16
    half = row.tflops("fp16")
    assert half is not None
    if row.tf32:
        # Half of bfloat16's on data centre cards, less on some others; twice as much would be the sparse figure.
        assert 0.4 <= row.tf32 / half <= 0.55
    if row.fp8:
        assert 1 <= row.fp8 / half <= 2.1
    if row.fp32 and row.tf32:
        assert row.fp32 <= row.tf32 * 1.001


def test_no_name_is_listed_twice() -> None:
    names = [name for row in PEAKS for name in row.names]
    assert len(names) == len(set(names))


def test_the_host_has_no_name_and_can_be_measured() -> None:
    host = torch.get_default_device()
    assert device_name(host) is None
    found = measure_peak(host, torch.float32, seconds=0.05)
    assert 1e9 < found.flops < 1e15
    assert "measured" in found.source
