"""Tokens per second, MFU and peak memory."""

from pathlib import Path

import pytest
import torch

from launcher.watch.speed import GIB, listed_peak, peak_flops_per_second, peak_memory_gib, speed_metrics

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device_name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "fp16", 756.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200", "fp32", 67.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L40", "bf16", 181.05),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
    ],
)
def test_listed_devices(device_name: str, precision: str, tflops: float) -> None:
    assert listed_peak(device_name, precision) == tflops * 1e12  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device_name", "precision"),
    [
        ("Tesla V100-SXM2-16GB", "bf16"),  # no such units
        ("NVIDIA H200 MIG 1g.18gb", "bf16"),  # a seventh of one
        ("NVIDIA A100-SXM-64GB", "bf16"),  # a custom part with more units
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("Some GPU", "fp32"),
    ],
)
def test_a_similar_name_is_not_guessed(device_name: str, precision: str) -> None:
    assert listed_peak(device_name, precision) is None  # type: ignore[arg-type]


def test_speed_of_a_step() -> None:
    row = speed_metrics(tokens=1000, step_seconds=0.5, flops_per_token=6e9, peak_flops=100e12, n_devices=2, device=CPU)
    assert row["tokens_per_second"] == 2000.0
    assert row["step_seconds"] == 0.5
    assert row["mfu"] == pytest.approx(2000 * 6e9 / 200e12, rel=1e-12)
    assert list(row) == ["tokens_per_second", "mfu", "peak_gib", "step_seconds"]


def test_mfu_is_null_where_the_peak_is_not_known() -> None:
    assert peak_flops_per_second(CPU, "bf16") is None
    row = speed_metrics(tokens=1, step_seconds=1.0, flops_per_token=1.0, peak_flops=None, n_devices=1, device=CPU)
    assert row["mfu"] is None


def test_peak_memory_on_a_cpu_is_the_highest_resident_set_in_gib() -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kernel_gib = int(fields["VmHWM"].split()[0]) * 1024 / GIB
    assert peak_memory_gib(CPU) == pytest.approx(kernel_gib, rel=0.05)  # the kernel counts pages in batches
