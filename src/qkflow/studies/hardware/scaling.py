"""A simulation past this machine: efficiency of one run and cost of a study, from 1 to 4,096 devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from qkflow.studies.config import ComparisonConfig
from qkflow.studies.grid import build_grid
from qkflow.studies.hardware import communication
from qkflow.studies.hardware.communication import step_time
from qkflow.studies.hardware.config import HardwareConfig
from qkflow.studies.hardware.memory import Layout, Parallelism, UnitSizes
from qkflow.studies.hardware.plan import model_cost
from qkflow.studies.workload import TrainedModel, count_runs, trained_models

DEVICE_COUNTS = tuple(2**power for power in range(13))


@dataclass(frozen=True)
class ScalingPoint:
    """One run on `devices` devices, `local_batch` windows each."""

    parallel: Parallelism
    devices: int
    step_seconds: float
    communication_seconds: float
    sent_bytes: float  # per device and step
    efficiency: float


@dataclass(frozen=True)
class CostPoint:
    """A whole study on at most `devices` devices: hours, and device-hours that are paid for."""

    devices: int
    devices_used: int
    devices_per_run: int
    hours: float
    device_hours: float
    usd: float | None


@dataclass(frozen=True)
class ScalingResult:
    """The simulation with what it assumes."""

    model: str
    hardware: HardwareConfig
    local_batch: int
    seq_len: int
    scaling: tuple[ScalingPoint, ...]
    cost: tuple[CostPoint, ...]
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def simulate_scaling(
    config: ComparisonConfig, hardware: HardwareConfig, local_batch: int = 8
) -> ScalingResult:
    """Simulate the first baseline of a comparison with a fixed batch per device, and the whole study.

    The study keeps its batch size: its runs first take one device each, then share the batch of every run
    among more devices, until each has one window.
    """
    hardware.check()
    model = trained_models(build_grid(config))[0]
    return ScalingResult(
        config.preset,
        hardware,
        local_batch,
        model.seq_len,
        _weak_scaling(model, hardware, local_batch),
        _study_cost(config, model, hardware),
        assumptions(hardware),
    )


def _weak_scaling(
    model: TrainedModel, hardware: HardwareConfig, local_batch: int
) -> tuple[ScalingPoint, ...]:
    device, units = hardware.device(), UnitSizes.of(model.config)
    cost = model_cost(model.config, model.seq_len, model.train.optimizer, hardware.activation_checkpointing)
    work = local_batch * model.seq_len * cost.flops_per_token + cost.flops_per_update
    compute = work / (device.utilization * device.peak_flops(model.train.precision))
    points = []
    for parallel in get_args(Parallelism):
        for devices in DEVICE_COUNTS:
            layout = Layout(parallel, devices, hardware.devices_per_node)
            timed = step_time(compute, units, layout, device, hardware.network_bandwidth)
            points.append(
                ScalingPoint(
                    parallel, devices, timed.total, timed.communication, timed.sent_bytes, timed.efficiency
                )
            )
    return tuple(points)


def _study_cost(
    config: ComparisonConfig, model: TrainedModel, hardware: HardwareConfig
) -> tuple[CostPoint, ...]:
    assert config.tokens is not None
    grid = build_grid(config)
    n_runs = sum(count_runs(grid, cell) for cell in grid.cells)
    device, units = hardware.device(), UnitSizes.of(model.config)
    cost = model_cost(model.config, model.seq_len, model.train.optimizer, hardware.activation_checkpointing)
    speed = device.utilization * device.peak_flops(model.train.precision)
    steps = config.tokens / (model.train.batch_size * model.seq_len)
    points = []
    for devices in DEVICE_COUNTS:
        per_run = 1
        while 2 * per_run * n_runs <= devices and model.train.batch_size % (2 * per_run) == 0:
            per_run *= 2
        used = min(devices, per_run * n_runs)
        at_a_time = used // per_run
        work = model.train.batch_size * model.seq_len * cost.flops_per_token / per_run
        layout = Layout(hardware.parallel, per_run, hardware.devices_per_node)
        timed = step_time(
            (work + cost.flops_per_update) / speed, units, layout, device, hardware.network_bandwidth
        )
        hours = -(-n_runs // at_a_time) * steps * timed.total / 3600
        paid = n_runs * per_run * steps * timed.total / 3600
        usd = None if hardware.usd_per_hour is None else paid * hardware.usd_per_hour
        points.append(CostPoint(devices, used, per_run, hours, paid, usd))
    return tuple(points)


def assumptions(hardware: HardwareConfig) -> tuple[str, ...]:
    """Return what the simulation assumes, one sentence each."""
    device = replace(hardware).device()
    return (
        f"{device.title}: {device.utilization:.0%} of its peak in computation",
        f"{hardware.devices_per_node} devices per node at {device.link_bandwidth / 1e9:.0f} GB/s each way, "
        f"{hardware.network:g} Gbit/s per device between nodes, "
        f"{communication.BUS_EFFICIENCY:.0%} of either reached",
        f"ring collectives in fp32, {1e6 * communication.LATENCY:.0f} µs · log2(devices) latency each",
        "communication is hidden behind the computation of the same pass where that is longer",
        "no stragglers, failures, evaluation, input or checkpoints",
    )
