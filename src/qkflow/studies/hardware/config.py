"""The hardware of a plan; the options of `qkflow plan` are its fields."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from qkflow.config_io import Range, check_ranges
from qkflow.errors import InputError
from qkflow.studies.hardware.devices import Device, get_device
from qkflow.studies.hardware.memory import DEVICES_PER_NODE, Layout, Parallelism

Devices = Annotated[int, Range(1, 10**7, cost="no cluster has as many devices")]


@dataclass(frozen=True)
class HardwareConfig:
    """Devices, and what is assumed about them.

    hardware    a100, h100, b200, mi300x, rtx4090, or cpu: one core of this machine.
    world_size  devices of one run.
    devices     devices of the study at a time (default: those of one run).
    parallel    how a run is spread over its devices: ddp, fsdp or hsdp.
    devices_per_node  devices of a machine, connected by their own links.
    utilization  share of the peak FLOPs that computation reaches (default: 0.4, on a CPU 0.7).
    network     Gbit/s of the network, per device.
    usd_per_hour  price of a device; without it no cost is printed.
    activation_checkpointing  recompute blocks in the backward pass.
    noise       standard deviation of paired differences, in percent of perplexity, of an earlier study of
                this kind; it turns the power of the study into an effect in percent.
    """

    hardware: str = "a100"
    world_size: Devices = 1
    devices: Devices | None = None
    parallel: Parallelism = "ddp"
    devices_per_node: Devices = DEVICES_PER_NODE
    utilization: Annotated[float, Range(above=0, high=1)] | None = None
    network: Annotated[float, Range(above=0, high=1e9)] = 400.0
    usd_per_hour: Annotated[float, Range(above=0, high=1e9)] | None = None
    activation_checkpointing: bool = False
    noise: Annotated[float, Range(above=0, high=1e6)] | None = None

    def check(self) -> None:
        """Raise InputError for values that no hardware has."""
        check_ranges(self, "")
        self.layout()
        if self.devices is not None and self.devices < self.world_size:
            raise InputError(
                f"--devices {self.devices} is less than one run needs (--world-size {self.world_size})",
                code="too-few-devices",
            )

    def layout(self) -> Layout:
        return Layout(self.parallel, self.world_size, self.devices_per_node)

    def device(self) -> Device:
        device = get_device(self.hardware)
        return device if self.utilization is None else replace(device, utilization=self.utilization)

    @property
    def runs_at_a_time(self) -> int:
        return (self.devices or self.world_size) // self.world_size

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second and device."""
        return self.network * 1e9 / 8
