"""What devices can do at most: dense FLOP/s by device and dtype, each row with its source.

*Dense* is without structured sparsity, whose figures are twice as high and lead many datasheets, and with FP32
accumulation. Names are those that the device's driver gives, matched whole: an "L40S" is no "L4", and a device that is
not listed has no peak here (pass it, or measure it).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Kind = Literal["bf16", "fp16", "fp8", "tf32", "fp32", "fp64"]

KINDS: Mapping[torch.dtype, Kind] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """One row: devices that are alike.

    Attributes:
        names: As ``torch.cuda.get_device_name`` and its like on other accelerators give them.
        source: Whose figures they are.
        bf16: TFLOP/s, as all below.
        fp16: The same as ``bf16`` unless it is given.
        only_fp16: There is no bfloat16 in hardware.
        fp8: With FP32 accumulation.
        tf32: Matrix products of float32 tensors where TF32 is allowed.
        fp32: Matrix products of float32 tensors where it is not.
    """

    names: tuple[str, ...]
    source: str
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    tf32: float | None = None
    fp32: float | None = None
    fp64: float | None = field(default=None)

    def tflops(self, kind: Kind) -> float | None:
        """TFLOP/s of a kind of computation; ``None``: not known."""
        value: float | None = getattr(self, kind)
        return self.bf16 if kind == "fp16" and value is None else value


PEAKS: tuple[Peak, ...] = (
    Peak(
        names=(
            "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe",
            "NVIDIA A100-SXM-64GB", "NVIDIA A800-SXM4-40GB", "NVIDIA A800-SXM4-80GB", "NVIDIA A800 80GB PCIe",
            "A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB",
        ),
        source="NVIDIA A100 Tensor Core GPU datasheet",
        bf16=312, tf32=156, fp32=19.5,
    ),
    Peak(
        names=("NVIDIA H100 80GB HBM3", "NVIDIA H800", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
        source="NVIDIA H100 Tensor Core GPU datasheet, SXM column, halved (it gives sparse figures)",
        bf16=989.4, fp8=1979, tf32=494.7, fp32=67,
    ),
    Peak(
        names=("NVIDIA H100 PCIe",),
        source="NVIDIA H100 Tensor Core GPU datasheet, PCIe column, halved",
        bf16=756, fp8=1513, tf32=378, fp32=51,
    ),
    Peak(
        names=("NVIDIA H100 NVL",),
        source="NVIDIA H100 NVL datasheet, one GPU, halved",
        bf16=835.5, fp8=1671, tf32=418, fp32=60,
    ),
    Peak(
        names=("NVIDIA H200",),
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM column, halved",
        bf16=989, fp8=1979, tf32=494.5, fp32=67,
    ),
    Peak(names=("NVIDIA H20",), source="NVIDIA H20 product brief, as cited by VeOmni", bf16=148, fp8=296),
    Peak(
        names=("NVIDIA B200", "NVIDIA B300", "NVIDIA B300 SXM6 AC"),
        source="NVIDIA DGX B200 and B300 datasheets, one of eight GPUs, halved",
        bf16=2250, fp8=4500, tf32=1125,
    ),
    Peak(
        names=("NVIDIA GB200", "NVIDIA GB300"),
        source="NVIDIA GB200 and GB300 NVL72 datasheets, one of 72 GPUs, halved",
        bf16=2500, fp8=5000, tf32=1250,
    ),
    Peak(names=("NVIDIA L4",), source="NVIDIA L4 datasheet, halved", bf16=121, fp8=242, tf32=60, fp32=30.3),
    Peak(names=("NVIDIA L40",), source="NVIDIA L40 datasheet", bf16=181, fp8=362, tf32=90.5, fp32=90.5),
    Peak(names=("NVIDIA L40S",), source="NVIDIA L40S datasheet", bf16=362, fp8=733, tf32=183, fp32=91.6),
    Peak(names=("NVIDIA A10",), source="NVIDIA A10 datasheet", bf16=125, tf32=62.5, fp32=31.2),
    Peak(names=("NVIDIA A40",), source="NVIDIA A40 datasheet", bf16=149.7, tf32=74.8, fp32=37.4),
    Peak(
        names=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB"),
        source="NVIDIA V100 datasheet, SXM column",
        fp16=125, fp32=15.7, fp64=7.8,
    ),
    Peak(
        names=("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"),
        source="NVIDIA V100 datasheet, PCIe column",
        fp16=112, fp32=14, fp64=7,
    ),
    Peak(names=("Tesla T4",), source="NVIDIA T4 datasheet", fp16=65, fp32=8.1),
    Peak(
        names=("NVIDIA GeForce RTX 3090",),
        source="NVIDIA GA102 whitepaper, table of peak rates, FP32 accumulation",
        bf16=71, tf32=35.6, fp32=35.6,
    ),
    Peak(
        names=("NVIDIA GeForce RTX 4090",),
        source="NVIDIA Ada GPU whitepaper, table of peak rates, FP32 accumulation",
        bf16=165.2, fp8=330, tf32=82.6, fp32=82.6,
    ),
    Peak(
        names=("NVIDIA GeForce RTX 5090",),
        source="NVIDIA RTX Blackwell whitepaper, table of peak rates, FP32 accumulation",
        bf16=209.5, fp8=419, tf32=105,
    ),
    Peak(names=("NVIDIA RTX A6000",), source="NVIDIA RTX A6000 datasheet, halved", bf16=154.8, tf32=77.4, fp32=38.7),
    Peak(
        names=("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
        source="NVIDIA RTX Blackwell PRO whitepaper",
        bf16=503.8,
    ),
    Peak(
        names=("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
        source="NVIDIA RTX Blackwell PRO whitepaper",
        bf16=438.9,
    ),
    Peak(
        names=("AMD Instinct MI250X", "AMD Instinct MI250X / MI250"),
        source="AMD Instinct MI250X datasheet: 383 a card of two dies, and a die is a device",
        bf16=191.5,
    ),
    Peak(
        names=("AMD Instinct MI300X", "AMD Instinct MI325X"),
        source="AMD Instinct MI300X and MI325X datasheets",
        bf16=1307.4, fp8=2615, tf32=653.7, fp32=163.4,
    ),
    Peak(names=("AMD Instinct MI355X",), source="AMD Instinct MI355X datasheet", bf16=2500, fp8=5000),
    Peak(names=("TPU v4",), source="Google Cloud TPU documentation, system architecture", bf16=275),
    Peak(names=("TPU v5e", "TPU v5 lite"), source="Google Cloud TPU documentation, system architecture", bf16=197),
    Peak(names=("TPU v5p", "TPU v5"), source="Google Cloud TPU documentation, system architecture", bf16=459),
    Peak(names=("TPU v6e", "TPU v6 lite"), source="Google Cloud TPU documentation, system architecture", bf16=918),
    Peak(names=("TPU v7",), source="Google Cloud TPU documentation, system architecture", bf16=2307, fp8=4614),
    Peak(names=("GAUDI2",), source="Intel Gaudi 2 whitepaper", bf16=432, fp8=865),
    Peak(names=("GAUDI3",), source="Intel Gaudi 3 whitepaper", bf16=1835, fp8=1835),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A peak and where it is from.

    Attributes:
        flops: FLOP/s of one device.
        source: For the log.
    """

    flops: float
    source: str


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has a clock, memory and a driver of its own: the host's device has no index."""
    return device.index is not None


def device_name(device: torch.device) -> str | None:
    """What its driver calls it; ``None`` where it says nothing."""
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(ask(device)) if ask is not None and is_accelerator(device) else None


def kind_of(dtype: torch.dtype) -> Kind | None:
    """The column for tensors of a dtype: float32 ones are multiplied as TF32 where the user has allowed it."""
    kind = KINDS.get(dtype)
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return kind


def find_peak(name: str | None, dtype: torch.dtype) -> Found | None:
    """The peak of a listed device, by its whole name.

    Args:
        name: From its driver.
        dtype: In which matrix products are computed, not the one in which gradients are reduced.
    """
    kind = kind_of(dtype)
    row = next((row for row in PEAKS if name in row.names), None)
    if row is None or kind is None:
        return None
    # Where there is no TF32, allowing it changes nothing.
    tflops = row.tflops(kind) or (row.tflops("fp32") if kind == "tf32" else None)
    return None if tflops is None else Found(flops=tflops * 1e12, source=f"{row.source}, dense {kind}")


def measure_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.5) -> Found:
    """What a large matrix product reaches: the best of several, of the largest that fit in the time.

    Waits for the device; meant for the start of a run.

    Args:
        device: Which.
        dtype: Of both factors.
        seconds: About how long it may take.
    """
    wait = getattr(torch.get_device_module(device), "synchronize", None)
    best, size, largest = 0.0, 512, 512
    deadline = time.perf_counter() + seconds
    while True:
        a = torch.randn(size, size, device=device).to(dtype)
        b = torch.randn(size, size, device=device).to(dtype)
        torch.mm(a, b)
        took = float("inf")
        for _ in range(3):
            if wait is not None:
                wait()
            begin = time.perf_counter()
            torch.mm(a, b)
            if wait is not None:
                wait()
            took = min(took, time.perf_counter() - begin)
            if time.perf_counter() > deadline:
                break
        if (reached := 2 * size**3 / took) > best:
            best, largest = reached, size
        size *= 2
        # The next one takes about eight times as long, four times.
        if size > 16384 or time.perf_counter() + 32 * took > deadline:
            break
    return Found(flops=best, source=f"measured: a product of {largest} × {largest} matrices in {dtype}")
