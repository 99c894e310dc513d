"""`qkflow plan`: memory, time and cost of a comparison on given hardware, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from qkflow import console
from qkflow.cli.options import options_from
from qkflow.studies import ComparisonConfig
from qkflow.studies.hardware.config import HardwareConfig
from qkflow.studies.hardware.devices import DEVICES, THIS_MACHINE
from qkflow.studies.hardware.plan import StudyCostPlan, plan_comparison
from qkflow.studies.hardware.scaling import DEVICE_COUNTS, ScalingPoint, ScalingResult, simulate_scaling
from qkflow.training.config import TrainConfig

_KINDS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "logits": "logits",
    "temporary": "temp",
    "peak": "peak",
}
UTILIZATION_RANGE = (0.5, 0.25)  # tuned, and not tuned: assumptions, as the default is
_NOT_PLANNED = {"data", "minutes", "device", "finetune_data"}
_CONFIG_OPTIONS = tuple(name for name in ComparisonConfig.__dataclass_fields__ if name not in _NOT_PLANNED)
_HARDWARE_OPTIONS = tuple(HardwareConfig.__dataclass_fields__)


@options_from(
    ComparisonConfig,
    HardwareConfig,
    as_text=("tokens", "tune_tokens"),
    only=(*_CONFIG_OPTIONS, *_HARDWARE_OPTIONS),
)
def plan(settings: dict[str, Any], json: bool = False) -> int:
    """Plan a comparison on given hardware: memory, time, cost, and the effect it could show.

    Every model runs one training step on fake tensors, which have shapes and no data; matmuls and memory are
    counted. Time follows from the FLOPs, the peak of the device and --utilization, and from communication
    that computation does not hide. `qkflow reproduce NAME --scale paper --plan` plans a published experiment.

    examples:
      qkflow plan --preset 60m --tokenizer hf:gpt2 --tokens 1B --precision bf16 --hardware h100
      qkflow plan --preset 455m --tokens 1.2B --batch-size 128 --precision bf16 --world-size 8 --parallel fsdp
      qkflow plan --preset small --tokens 10M --hardware cpu --devices 2
      qkflow plan --preset 150m --tokens 3B --precision bf16 --usd-per-hour 2.5 --json

    Args:
        json: print one JSON object instead of tables.
    """
    hardware = HardwareConfig(**{name: settings.pop(name) for name in _HARDWARE_OPTIONS})
    if settings.get("tokens") is None:
        settings.pop("tokens")
    planned = plan_comparison(ComparisonConfig.parse(**settings), hardware)
    if json:
        console.emit_json(planned.to_dict())
    else:
        print_plan(planned)
    return 0


def print_plan(planned: StudyCostPlan) -> None:
    """Print a plan as tables: models, memory, arms, totals."""
    out, device, hardware = console.out, planned.device, planned.hardware
    layout = f"{hardware.world_size} × {device.title}"
    if hardware.world_size > 1:
        layout += f", {hardware.parallel}"
    runs = "1 run" if hardware.runs_at_a_time == 1 else f"{hardware.runs_at_a_time} runs"
    peak = device.peak_flops(planned.config.precision) / 1e12
    out.print(
        f"{layout} per run, {runs} at a time, {planned.config.precision}, {device.utilization:.0%} of "
        f"{peak:.3g} TFLOP/s assumed",
        markup=False,
        highlight=False,
    )
    out.print(_models_table(planned))
    for model in planned.models:
        roles = ", ".join(f"{role} {_count(size)}" for role, size in model.parameters.items())
        out.print(f"  {model.name}: {roles}", markup=False, highlight=False)
    out.print(_memory_table(planned))
    out.print(_arms_table(planned))
    for sentence in _budget(planned):
        out.print(sentence, markup=False, highlight=False)
    if planned.power:
        out.print(planned.power, markup=False, highlight=False)
    for note in planned.notes:
        out.print(f"! {note}", markup=False, highlight=False, style="yellow")


def _models_table(planned: StudyCostPlan) -> Table:
    table = Table(title="models", box=None, pad_edge=False, title_justify="left")
    table.add_column("model", overflow="fold")
    for heading in ("parameters", "FLOPs/token", "FLOPs/step", "step s", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in planned.models:
        table.add_row(
            Text(model.name),
            _count(sum(model.parameters.values())),
            f"{model.flops_per_token:.3g}",
            f"{model.flops_per_step:.3g}",
            f"{model.step_seconds:.3g}",
            f"{model.tokens_per_second:,.0f}" if model.fits else "does not fit",
        )
    return table


def _memory_table(planned: StudyCostPlan) -> Table:
    usable = planned.device.usable_memory * planned.device.memory
    title = f"memory per device, GB: the most of each kind, and of all together ({usable / 1e9:.3g} usable)"
    table = Table(title=title, box=None, pad_edge=False, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for heading in (*_KINDS.values(), "windows", "most"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in planned.models:
        sizes = [f"{getattr(model.memory, kind) / 1e9:.2f}" for kind in _KINDS]
        batch = f"{model.micro_batch}×{model.accumulate}"
        table.add_row(Text(model.name), *sizes, batch, str(model.largest_batch))
    table.caption = "windows: per device and microbatch × microbatches (--accumulate); most: that fit"
    table.caption_justify = "left"
    return table


def _arms_table(planned: StudyCostPlan) -> Table:
    with_cost = planned.usd is not None
    table = Table(title="study", box=None, pad_edge=False, title_justify="left")
    table.add_column("arm", overflow="fold")
    for heading in ("runs", "tokens per run", "FLOPs", "device hours", *(["USD"] if with_cost else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in planned.arms:
        cells = [str(arm.runs), f"{arm.tokens:,}", f"{arm.flops:.2g}", _hours(arm.device_hours)]
        table.add_row(Text(arm.name), *cells, *([_usd(arm.usd)] if arm.usd is not None else []))
    total = [str(planned.runs), "", f"{planned.flops:.2g}", _hours(planned.device_hours)]
    cost = [_usd(planned.usd)] if planned.usd is not None else []
    table.add_row("total", *total, *cost, style="bold")
    if planned.config.verdict:
        count = planned.config.n_seeds
        table.caption = f"{planned.arms[0].name}: {count} of its runs measure the noise floor"
        table.caption_justify = "left"
    return table


def _budget(planned: StudyCostPlan) -> Iterator[str]:
    """Yield what a budget needs besides the table: calendar, range, disk, what is left out."""
    at_a_time = min(planned.hardware.runs_at_a_time, planned.runs)
    used = planned.hardware.world_size * at_a_time
    devices = "1 device" if used == 1 else f"{used} devices"
    yield f"{_hours(planned.hours)} hours of wall-clock time on {devices}, {at_a_time} of the runs at a time"
    if planned.device.name != THIS_MACHINE:
        bounds = []
        for utilization in UTILIZATION_RANGE:
            factor = planned.factor_at(utilization)
            usd = "" if planned.usd is None else f", {_usd(planned.usd * factor)} USD"
            bounds.append(
                f"at {utilization:.0%} of the peak {_hours(planned.device_hours * factor)} device hours{usd}"
            )
        yield "; ".join(bounds)
    largest = max(planned.models, key=lambda model: model.checkpoint_bytes)
    kept = TrainConfig().keep_latest_k
    saved, model = kept * 1e-9 * largest.checkpoint_bytes, 4e-9 * sum(largest.parameters.values())
    yield (
        f"disk: {kept} checkpoints of at most {saved / kept:.3g} GB per run that trains, a model of "
        f"{model:.3g} GB per finished run, {at_a_time * saved + planned.runs * model:.3g} GB in all"
    )
    yield "not counted: start-up, compilation, checkpoints, waiting for data, steps lost with a machine"


def devices(markdown: bool = False, json: bool = False) -> int:
    """List the devices that `qkflow plan` has figures for, with their sources.

    examples:
      qkflow plan devices
      qkflow plan devices --json

    Args:
        markdown: print a Markdown table, as in docs/scale.md.
        json: print one JSON object instead of a table.
    """
    if json:
        from dataclasses import asdict

        console.emit_json({"devices": [asdict(device) for device in DEVICES.values()]})
        return 0
    headings = ("--hardware", "device", "bf16 TFLOP/s", "fp32", "memory GB", "TB/s", "link GB/s", "source")
    rows: list[tuple[str, ...]] = [
        (
            f"`{device.name}`" if markdown else device.name,
            device.title,
            f"{device.bf16_flops / 1e12:,.0f}",
            f"{device.fp32_flops / 1e12:,.1f}",
            f"{device.memory / 1e9:.0f}",
            f"{device.memory_bandwidth / 1e12:.2f}",
            f"{device.link_bandwidth / 1e9:.0f}",
            device.source,
        )
        for device in DEVICES.values()
    ]
    cpu = "`cpu`" if markdown else "cpu"
    core = "one core of this machine"
    rows.append((cpu, core, "measured", "measured", "its share", "–", "10", "a matmul of 512³"))
    if markdown:
        for row in (headings, ["---"] * len(headings), *rows):
            print("| " + " | ".join(row) + " |")
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    console.out.print(table)
    return 0


@options_from(
    ComparisonConfig,
    HardwareConfig,
    as_text=("tokens", "tune_tokens"),
    only=(*_CONFIG_OPTIONS, *_HARDWARE_OPTIONS),
)
def scaling(settings: dict[str, Any], local_batch: int = 8, json: bool = False) -> int:
    """Simulate a run on 1 to 4,096 devices, and the cost of the whole comparison on as many.

    Communication volume is set against bandwidth for DDP, FSDP2 and HSDP; the assumptions are printed. The
    first table keeps --local-batch windows per device; the second keeps the batch size of the study: its runs
    take one device each, then several, until each device has one window.

    examples:
      qkflow plan scaling --preset 455m --seq-len 512 --batch-size 128 --tokens 1.2B --precision bf16
      qkflow plan scaling --preset 60m --seq-len 512 --tokens 1B --hardware h100 --network 200 --json

    Args:
        local_batch: windows per device and step.
        json: print one JSON object instead of tables.
    """
    hardware = HardwareConfig(**{name: settings.pop(name) for name in _HARDWARE_OPTIONS})
    if settings.get("tokens") is None:
        settings.pop("tokens")
    simulated = simulate_scaling(ComparisonConfig.parse(**settings), hardware, local_batch)
    if json:
        console.emit_json(simulated.to_dict())
    else:
        print_scaling(simulated)
    return 0


def print_scaling(simulated: ScalingResult) -> None:
    """Print a simulation as two tables and its assumptions."""
    batch = f"{simulated.local_batch} windows of {simulated.seq_len} tokens per device"
    title = f"{simulated.model}: share of a step that is computation; MB sent per device ({batch})"
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("devices", justify="right")
    by_mode: dict[str, dict[int, ScalingPoint]] = {}
    for point in simulated.scaling:
        by_mode.setdefault(point.parallel, {})[point.devices] = point
    for mode in by_mode:
        table.add_column(mode, justify="right")
        table.add_column("MB", justify="right")
    for count in DEVICE_COUNTS:
        cells = []
        for points in by_mode.values():
            cells += [f"{points[count].efficiency:.0%}", f"{points[count].sent_bytes / 1e6:,.0f}"]
        table.add_row(f"{count:,}", *cells)
    console.out.print(table)
    with_cost = simulated.hardware.usd_per_hour is not None
    study = Table(title="the whole study", box=None, pad_edge=False, title_justify="left")
    for heading in ("devices", "used", "per run", "hours", "device hours", *(["USD"] if with_cost else [])):
        study.add_column(heading, justify="right")
    for each in simulated.cost:
        cells = [f"{each.devices:,}", f"{each.devices_used:,}", str(each.devices_per_run)]
        cells += [_hours(each.hours), _hours(each.device_hours)]
        study.add_row(*cells, *([f"{each.usd:,.0f}"] if each.usd is not None else []))
    console.out.print(study)
    for sentence in simulated.assumptions:
        console.out.print(f"• {sentence}", markup=False, highlight=False)


def _count(number: int) -> str:
    if number >= 1e6:
        return f"{number / 1e6:.1f}M"
    return f"{number / 1e3:.1f}k" if number >= 1e3 else str(number)


def _usd(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
