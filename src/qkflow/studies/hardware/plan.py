"""What a comparison takes on given hardware: memory, time, cost and power. Nothing is allocated."""

from __future__ import annotations

import functools
import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qkflow.errors import InputError
from qkflow.models.config import ModelConfig
from qkflow.models.cost import build_meta_decoder, count_flops, flops_per_token, parameters_by_role
from qkflow.studies.compare import read_pilot_sd
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.grid import build_grid, check_models
from qkflow.studies.hardware.communication import StepTime, step_time
from qkflow.studies.hardware.config import HardwareConfig
from qkflow.studies.hardware.devices import Device
from qkflow.studies.hardware.memory import DeviceMemory, UnitSizes, device_memory, largest_batch
from qkflow.studies.sentences import power_sentence
from qkflow.studies.workload import (
    ArmWorkload,
    CellWorkload,
    TrainedModel,
    arm_workloads,
    study_power,
    token_scales,
    trained_models,
    unique_cells,
)
from qkflow.training.memory import MemoryModel
from qkflow.training.muon import hidden_matrices, newton_schulz

NOISE_HINT = "--noise is that of an earlier comparison, in percent"


@dataclass(frozen=True)
class ModelCost:
    """Parameters and FLOPs of a model. Recomputed activations and the update of Muon count."""

    parameters: dict[str, int]
    flops_per_token: float
    flops_per_update: float


@dataclass(frozen=True)
class ModelPlan:
    """One model of a comparison on one device of its run. `micro_batch` is 0 if no window fits."""

    name: str
    parameters: dict[str, int]
    flops_per_token: float
    flops_per_step: float
    memory: DeviceMemory
    largest_batch: int  # windows per device
    micro_batch: int
    accumulate: int
    step_seconds: float
    communication_bytes: float  # per device and step
    efficiency: float  # computation as a share of the time of a step
    tokens_per_second: float  # of all devices of a run
    checkpoint_bytes: int  # weights and optimizer state of all devices

    @property
    def fits(self) -> bool:
        return self.micro_batch > 0


@dataclass(frozen=True)
class ArmPlan:
    """The runs of one arm."""

    name: str
    role: str
    runs: int
    tokens: int  # per run
    flops: float
    device_hours: float
    usd: float | None


@dataclass(frozen=True)
class StudyCostPlan:
    """A comparison on given hardware. A cell of two arms is counted once in the totals."""

    config: ComparisonConfig
    hardware: HardwareConfig
    device: Device
    models: tuple[ModelPlan, ...]
    arms: tuple[ArmPlan, ...]
    runs: int
    flops: float
    device_hours: float
    hours: float  # wall-clock
    usd: float | None
    power: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "config": self.config.to_dict()}

    def factor_at(self, utilization: float) -> float:
        """Return by how much the device hours grow at another utilization, communication left aside."""
        return self.device.utilization / utilization


def plan_comparison(config: ComparisonConfig, hardware: HardwareConfig) -> StudyCostPlan:
    """Plan a comparison. Raise InputError if it cannot run, as `compare` does."""
    hardware.check()
    if config.tokens is None:
        raise InputError("a plan needs --tokens: minutes depend on the hardware", code="plan-needs-tokens")
    grid = build_grid(config)
    check_models(grid)
    device = hardware.device()
    trained = trained_models(grid)
    models = {model.name: plan_model(model, hardware, device) for model in trained}
    scales = token_scales(grid, {name: model.flops_per_token for name, model in models.items()})
    tokens = {name: round(config.tokens * scale) for name, scale in scales.items()}
    workloads = arm_workloads(grid, {name: model.flops_per_token for name, model in models.items()}, tokens)
    cells = unique_cells(workloads)
    hours = _device_hours(cells, models, hardware, device)
    sd, source = read_pilot_sd(config.pilot), "the pilot study"
    if hardware.noise is not None:
        sd, source = math.log1p(hardware.noise / 100), "--noise"
    power = study_power(grid, sd, source)
    return StudyCostPlan(
        config,
        hardware,
        device,
        tuple(models.values()),
        tuple(_plan_arm(arm, models, hardware, device) for arm in workloads),
        sum(cell.runs for cell in cells),
        sum(cell.flops for cell in cells),
        hours,
        _wall_clock_hours(cells, models, hardware, device),
        _usd(hours, hardware),
        "" if power is None else power_sentence(power, NOISE_HINT),
        tuple(_notes(config, models, trained)),
    )


def count_study(config: ComparisonConfig) -> tuple[int, float]:
    """Return the runs of a comparison and their FLOPs, without the memory of its models."""
    assert config.tokens is not None
    grid = build_grid(config)
    cost = {
        model.name: model_cost(model.config, model.seq_len, model.train.optimizer, False).flops_per_token
        for model in trained_models(grid)
    }
    tokens = {name: round(config.tokens * scale) for name, scale in token_scales(grid, cost).items()}
    cells = unique_cells(arm_workloads(grid, cost, tokens))
    return sum(cell.runs for cell in cells), sum(cell.flops for cell in cells)


def plan_model(model: TrainedModel, hardware: HardwareConfig, device: Device) -> ModelPlan:
    """Plan the training step of one model."""
    layout, train = hardware.layout(), model.train
    batch_size, seq_len = train.batch_size, model.seq_len
    if batch_size % (layout.world_size * train.accumulate):
        raise InputError(
            f"--batch-size {batch_size} is not a multiple of --world-size {layout.world_size}"
            + (f" × --accumulate {train.accumulate}" if train.accumulate > 1 else ""),
            code="batch-not-divisible",
        )
    checkpointing = hardware.activation_checkpointing or train.activation_checkpointing
    cost = model_cost(model.config, seq_len, train.optimizer, checkpointing)
    memory = MemoryModel(model.config, seq_len, train.optimizer, train.precision, checkpointing)
    units = UnitSizes.of(model.config)
    largest = largest_batch(memory, units, layout, device.usable_memory * device.memory)
    local = batch_size // layout.world_size
    most = min(local // train.accumulate, largest)
    micro = max((size for size in range(1, most + 1) if local % size == 0), default=0)
    accumulate = local // micro if micro else 1
    speed = device.utilization * device.peak_flops(train.precision)
    compute = (local * seq_len * cost.flops_per_token + cost.flops_per_update) / speed
    timed = accumulated_step_time(compute, accumulate, units, hardware, device)
    whole = memory.at(1)
    return ModelPlan(
        model.name,
        cost.parameters,
        cost.flops_per_token,
        batch_size * seq_len * cost.flops_per_token + layout.world_size * cost.flops_per_update,
        device_memory(memory, units, micro or 1, layout),
        largest,
        micro,
        accumulate,
        timed.total,
        timed.sent_bytes,
        timed.efficiency,
        batch_size * seq_len / timed.total,
        whole.weights + whole.optimizer,
    )


def accumulated_step_time(
    compute: float, accumulate: int, units: UnitSizes, hardware: HardwareConfig, device: Device
) -> StepTime:
    """Return the time of a step of several microbatches. FSDP gathers weights in each, DDP reduces once."""
    one = step_time(compute / accumulate, units, hardware.layout(), device, hardware.network_bandwidth)
    if hardware.parallel == "ddp":
        return StepTime(compute, one.exposed, one.communication, one.sent_bytes)
    return StepTime(
        compute, accumulate * one.exposed, accumulate * one.communication, accumulate * one.sent_bytes
    )


def model_cost(config: ModelConfig, seq_len: int, optimizer: str, checkpointing: bool) -> ModelCost:
    """Return parameters and FLOPs of a model."""
    return _model_cost(json.dumps(config.to_dict(), sort_keys=True), seq_len, optimizer, checkpointing)


@functools.lru_cache(maxsize=256)
def _model_cost(key: str, seq_len: int, optimizer: str, checkpointing: bool) -> ModelCost:
    config = ModelConfig.from_dict(json.loads(key))
    model = build_meta_decoder(config)
    flops, update = flops_per_token(config, seq_len), 0.0
    if checkpointing:  # the blocks run forward twice
        flops += flops_per_token(config, seq_len, training=False) - 2 * config.vocab_size * config.dim
    if optimizer == "muon":
        names = hidden_matrices(model)
        shapes: dict[tuple[int, int], int] = {}
        for name, parameter in model.named_parameters():
            if name in names:
                shape = (min(parameter.shape[-2:]), max(parameter.shape[-2:]))
                shapes[shape] = shapes.get(shape, 0) + parameter.numel() // (shape[0] * shape[1])
        update = sum(count * _newton_schulz_flops(shape) for shape, count in shapes.items())
    return ModelCost(parameters_by_role(model), flops, update)


def _newton_schulz_flops(shape: tuple[int, int]) -> int:
    return count_flops(lambda: newton_schulz(torch.empty(1, *shape, device="meta")))


def _device_hours(
    cells: Sequence[CellWorkload], models: dict[str, ModelPlan], hardware: HardwareConfig, device: Device
) -> float:
    training = sum(cell.tokens / models[cell.model].tokens_per_second for cell in cells)
    finetuning = sum(cell.finetune_flops for cell in cells) / (device.utilization * device.fp32_flops)
    return (training * hardware.world_size + finetuning) / 3600  # fine-tuning has one device per run


def _wall_clock_hours(
    cells: Sequence[CellWorkload], models: dict[str, ModelPlan], hardware: HardwareConfig, device: Device
) -> float:
    """Return when the last run ends, if the longest start first; a run cannot use the devices of two."""
    runs: list[float] = []
    for cell in cells:
        hours = _device_hours([cell], models, hardware, device) / hardware.world_size
        runs += [hours / cell.runs] * cell.runs
    ends = [0.0] * min(hardware.runs_at_a_time, len(runs))
    for hours in sorted(runs, reverse=True):
        heapq.heapreplace(ends, ends[0] + hours)
    return max(ends)


def _plan_arm(
    arm: ArmWorkload, models: dict[str, ModelPlan], hardware: HardwareConfig, device: Device
) -> ArmPlan:
    hours = _device_hours(arm.cells, models, hardware, device)
    return ArmPlan(arm.name, arm.role, arm.runs, arm.tokens, arm.flops, hours, _usd(hours, hardware))


def _usd(device_hours: float, hardware: HardwareConfig) -> float | None:
    return None if hardware.usd_per_hour is None else device_hours * hardware.usd_per_hour


def _notes(
    config: ComparisonConfig, models: dict[str, ModelPlan], trained: Sequence[TrainedModel]
) -> list[str]:
    notes = [
        f"{model.name} does not fit: use --parallel fsdp with more devices, or --activation-checkpointing"
        for model in models.values()
        if not model.fits
    ]
    needed = max(model.accumulate for model in models.values())
    if any(models[model.name].accumulate > model.train.accumulate for model in trained):
        notes.append(f"a batch does not fit at once: run with --accumulate {needed}")
    if config.finetune:
        notes.append("fine-tuning is counted in fp32, with assumed lengths of the examples of its tasks")
    if config.tune_lr:
        notes.append("a learning-rate grid that is widened adds runs")
    return notes
