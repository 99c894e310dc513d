"""Devices: peak FLOPs, memory and bandwidth, as in the data sheets of their vendors."""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.errors import unknown
from qkflow.studies.estimate import UTILIZATION as CPU_UTILIZATION
from qkflow.studies.estimate import matmul_flops_per_second
from qkflow.system import process_cpu_count, total_memory

GPU_UTILIZATION = 0.4  # of the peak, an assumption: decoders of this size reach 30 to 50% when tuned
GPU_USABLE_MEMORY = 0.9  # the rest: context, libraries and fragments
CPU_USABLE_MEMORY = 0.75  # glibc's malloc kept up to a quarter of freed memory (benchmarks/plan.py)
CPU_LINK_BANDWIDTH = 10e9  # processes on one machine, an assumption
THIS_MACHINE = "cpu"


@dataclass(frozen=True)
class Device:
    """One device. FLOPs per second and bytes per second are peaks; links count one direction."""

    name: str
    title: str
    bf16_flops: float  # dense matmul
    fp32_flops: float
    memory: float  # bytes
    memory_bandwidth: float
    link_bandwidth: float  # to the other devices of its node
    source: str
    utilization: float = GPU_UTILIZATION
    usable_memory: float = GPU_USABLE_MEMORY

    def peak_flops(self, precision: str) -> float:
        return self.bf16_flops if precision == "bf16" else self.fp32_flops


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100", "NVIDIA A100 SXM 80 GB", 312e12, 19.5e12, 80e9, 2.04e12, 300e9,
               "NVIDIA A100 Tensor Core GPU data sheet, 2021"),
        Device("h100", "NVIDIA H100 SXM", 989e12, 67e12, 80e9, 3.35e12, 450e9,
               "NVIDIA H100 Tensor Core GPU data sheet, 2023 (without sparsity)"),
        Device("b200", "NVIDIA B200", 2250e12, 75e12, 180e9, 7.7e12, 900e9,
               "NVIDIA HGX B200 specification, 2024 (one of eight GPUs, without sparsity)"),
        Device("mi300x", "AMD Instinct MI300X", 1307.4e12, 163.4e12, 192e9, 5.3e12, 448e9,
               "AMD ROCm documentation, MI300 series microarchitecture, 2024"),
        Device("rtx4090", "NVIDIA GeForce RTX 4090", 165e12, 82.6e12, 24e9, 1.01e12, 32e9,
               "NVIDIA Ada GPU architecture white paper, 2022 (fp32 accumulation; link: PCIe 4.0 x16)"),
    )
}  # fmt: skip


def get_device(name: str) -> Device:
    """Return a device by name; `cpu` is one core of this machine, measured."""
    if name == THIS_MACHINE:
        return measure_cpu()
    if name not in DEVICES:
        raise unknown("hardware", name, [*DEVICES, THIS_MACHINE])
    return DEVICES[name]


def measure_cpu() -> Device:
    """Return one core of this machine: the measured speed of an fp32 matmul, and its share of the memory."""
    speed = matmul_flops_per_second("cpu")
    memory = total_memory() / process_cpu_count()
    return Device(
        THIS_MACHINE,
        "one core of this machine",
        speed,
        speed,
        memory,
        0.0,
        CPU_LINK_BANDWIDTH,
        "an fp32 matmul of 512³, measured",
        CPU_UTILIZATION,
        CPU_USABLE_MEMORY,
    )
