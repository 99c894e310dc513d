"""Plans of comparisons on given hardware."""

from __future__ import annotations

import json
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.cli.main import dispatch
from qkflow.models import preset
from qkflow.models.presets import PRESETS, Preset
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.hardware.communication import step_time
from qkflow.studies.hardware.config import HardwareConfig
from qkflow.studies.hardware.devices import DEVICES, get_device
from qkflow.studies.hardware.memory import Layout, UnitSizes, device_memory, largest_batch
from qkflow.studies.hardware.plan import count_study, model_cost, plan_comparison
from qkflow.studies.hardware.scaling import DEVICE_COUNTS, simulate_scaling
from qkflow.training.memory import MemoryModel

A100 = DEVICES["a100"]


@pytest.fixture(autouse=True)
def _small_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", Preset(2, 32, 4, "gelu", 64, "shrunken"))


def config_of(**settings: Any) -> ComparisonConfig:
    defaults = {
        "variants": "euler",
        "controls": "none",
        "inits": "gpt2",
        "tokens": "1M",
        "tokenizer": "bytes",
        "optimizer": "adamw",  # the FLOPs of Muon's update are a case of their own
    }
    return ComparisonConfig.parse(**{**defaults, **settings})


def test_hours_and_cost_follow_from_flops() -> None:
    planned = plan_comparison(config_of(precision="bf16"), HardwareConfig("h100", usd_per_hour=2.0))
    speed = planned.device.utilization * DEVICES["h100"].bf16_flops
    assert planned.device_hours == pytest.approx(planned.flops / speed / 3600)
    assert planned.usd == pytest.approx(2 * planned.device_hours)
    assert (planned.runs, planned.flops) == count_study(planned.config)
    assert [arm.runs for arm in planned.arms] == [10, 5]  # the noise floor counts for the baseline
    assert planned.hours == pytest.approx(planned.device_hours)
    assert "standard deviations" in planned.power
    many = plan_comparison(config_of(precision="bf16"), HardwareConfig("h100", devices=5, noise=0.5))
    assert many.hours == pytest.approx(planned.hours / 5, rel=0.01)  # 15 runs, three on each device
    most = plan_comparison(config_of(precision="bf16"), HardwareConfig("h100", devices=8))
    assert most.hours == pytest.approx(planned.hours * 2 / 15, rel=0.01)  # no run is split over two devices
    assert most.device_hours == planned.device_hours
    assert many.usd is None
    assert "noise 0.5%" in many.power


def test_finetuning_is_part_of_the_cost() -> None:
    plain = plan_comparison(config_of(), HardwareConfig("h100"))
    tuned = plan_comparison(config_of(finetune="glue:CoLA,RTE", finetune_epochs=2), HardwareConfig("h100"))
    assert tuned.runs == plain.runs + 2 * 5 * 2  # two cells, five seeds, two tasks
    flops = tuned.flops - plain.flops
    # CoLA: 268 batches of 32 examples; RTE: 78. The backward pass doubles the FLOPs of the forward pass.
    tokens = 2 * 5 * 2 * 32 * (268 * 12 + 78 * 75)
    hidden = 6 * sum(
        size for role, size in plain.models[0].parameters.items() if role not in ("embed", "norm")
    )
    assert 1.0 < flops / (tokens * hidden) < 1.3  # attention scores, and the coupling of one arm
    seconds = flops / (tuned.device.utilization * DEVICES["h100"].fp32_flops)
    assert tuned.device_hours - plain.device_hours == pytest.approx(seconds / 3600)
    few = config_of(finetune="glue:CoLA,RTE", finetune_epochs=2, finetune_examples=64)
    assert count_study(few)[1] - plain.flops < flops / 30


def test_memory_per_device() -> None:
    config = preset("tiny", vocab_size=512)
    model, units = MemoryModel(config, 512, "adamw"), UnitSizes.of(config)
    one, ddp, fsdp, hsdp = (
        device_memory(model, units, 4, layout)
        for layout in (Layout(), Layout("ddp", 16), Layout("fsdp", 16), Layout("hsdp", 16))
    )
    assert units.total * 4 == one.weights == ddp.weights
    assert fsdp.optimizer == pytest.approx(one.optimizer / 16, abs=1)
    assert hsdp.optimizer == pytest.approx(one.optimizer / 8, abs=1)
    assert one.activations == ddp.activations == fsdp.activations
    assert ddp.peak >= one.peak  # buckets of gradients stay allocated
    usable = 20 * one.peak
    most = largest_batch(model, units, Layout(), usable)
    assert device_memory(model, units, most, Layout()).peak <= usable
    assert device_memory(model, units, most + 1, Layout()).peak > usable
    assert largest_batch(model, units, Layout(), one.weights) == 0


def test_batch_is_split_into_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    small = HardwareConfig("a100")
    config = config_of(batch_size=48, seq_len=64)
    monkeypatch.setattr("qkflow.studies.hardware.plan.largest_batch", lambda *a: 10)
    (model, *_) = plan_comparison(config, small).models
    assert (model.micro_batch, model.accumulate) == (8, 6)
    assert any("--accumulate 6" in note for note in plan_comparison(config, small).notes)
    planned = plan_comparison(config_of(batch_size=48, seq_len=64, accumulate=12), small)
    assert (planned.models[0].micro_batch, planned.models[0].accumulate) == (4, 12)
    assert not planned.notes
    monkeypatch.setattr("qkflow.studies.hardware.plan.largest_batch", lambda *a: 0)
    planned = plan_comparison(config, small)
    assert not planned.models[0].fits
    assert any("does not fit" in note for note in planned.notes)


def test_flops_of_muon_and_checkpointing() -> None:
    config = preset("tiny", vocab_size=64)
    plain, muon = (model_cost(config, 32, name, False) for name in ("adamw", "muon"))
    assert plain.flops_per_update == 0
    # five steps of X·Xᵀ (A²B), G·G (A³) and P·X (A²B): four 32×32 projections, two 32×128 matrices, per layer
    matrices = 4 * [(32, 32)] + 2 * [(32, 128)]
    assert muon.flops_per_update == 2 * sum(5 * 2 * (2 * a * a * b + a**3) for a, b in matrices)
    recomputed = model_cost(config, 32, "adamw", True).flops_per_token
    assert 1.1 < recomputed / plain.flops_per_token < 4 / 3


def test_communication_volumes() -> None:
    units = UnitSizes(root=1000, block=500, n_blocks=4)  # 3,000 parameters
    sent = {
        mode: step_time(1.0, units, Layout(mode, 16), A100).sent_bytes  # type: ignore[arg-type]
        for mode in ("ddp", "fsdp", "hsdp")
    }
    assert sent["ddp"] == pytest.approx(2 * 15 / 16 * 12_000)
    assert sent["fsdp"] == pytest.approx(15 / 16 * (12_000 + 8_000 + 12_000))
    assert sent["hsdp"] == pytest.approx(7 / 8 * 32_000 + 2 * 1 / 2 * 12_000 / 8)
    assert step_time(1.0, units, Layout("ddp", 1), A100).total == 1.0
    hidden, exposed = (step_time(seconds, units, Layout("fsdp", 16), A100) for seconds in (1.0, 1e-9))
    assert hidden.efficiency == 1
    assert exposed.efficiency < 0.01
    assert exposed.total == pytest.approx(hidden.communication, rel=0.01)


def test_scaling_to_4096_devices() -> None:
    hardware = HardwareConfig("h100", usd_per_hour=2.0)
    simulated = simulate_scaling(config_of(batch_size=16, precision="bf16"), hardware)
    assert DEVICE_COUNTS[-1] == 4096
    for mode in ("ddp", "fsdp", "hsdp"):
        points = [point for point in simulated.scaling if point.parallel == mode]
        assert [point.devices for point in points] == list(DEVICE_COUNTS)
        assert points[0].efficiency == 1
        assert points[-1].efficiency <= points[1].efficiency
    hours = [point.hours for point in simulated.cost]
    assert hours[3] < hours[0]
    assert simulated.cost[-1].devices_used == 15 * 16  # 15 runs with one window per device
    assert simulated.cost[-1].usd >= simulated.cost[0].usd  # type: ignore[operator]
    assert len(simulated.assumptions) == 5


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--hardware", "tpu"], "unknown-hardware"),
        (["--world-size", "3"], "batch-not-divisible"),
        (["--accumulate", "3"], "batch-not-divisible"),
        (["--world-size", "0"], "below-minimum"),
        (["--world-size", "12", "--parallel", "hsdp"], "partial-node"),
        (["--world-size", "4", "--devices", "2"], "too-few-devices"),
        (["--utilization", "1.5"], "above-maximum"),
        (["--usd-per-hour", "-1"], "below-minimum"),
        (["--parallel", "pipeline"], "unknown-parallel"),
        (["--variants", "eular"], "unknown-variant"),
    ],
)
def test_bad_input_is_one_sentence(options: list[str], code: str) -> None:
    with raises_code(code) as error:
        dispatch(["plan", "--controls", "none", "--inits", "gpt2", *options])
    assert "\n" not in str(error.value)


def test_commands_print_json_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--variants", "euler", "--controls", "none", "--inits", "gpt2", "--tokens", "1M"]
    assert dispatch(["plan", *options, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert {"weights", "activations", "peak"} <= planned["models"][0]["memory"].keys()
    assert dispatch(["plan", *options, "--usd-per-hour", "3"]) == 0
    printed = capsys.readouterr().out
    usd = 3 * planned["device_hours"]
    assert f"{usd * 0.4 / 0.5:,.0f} USD; at 25%" in " ".join(printed.split())
    state = planned["models"][1]["checkpoint_bytes"]
    assert state == sum(planned["models"][1]["memory"][kind] for kind in ("weights", "optimizer"))
    assert f"at most {state / 1e9:.3g} GB" in " ".join(printed.split())
    assert dispatch(["plan", "scaling", *options, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cost"]) == len(DEVICE_COUNTS)
    assert dispatch(["plan", "devices", "--markdown"]) == 0
    table = capsys.readouterr().out
    assert all(f"`{name}`" in table for name in (*DEVICES, "cpu"))


def test_every_device_has_a_source() -> None:
    assert set(DEVICES) == {"a100", "h100", "b200", "mi300x", "rtx4090"}
    assert all(
        any(year in device.source for year in ("2021", "2022", "2023", "2024")) for device in DEVICES.values()
    )


def test_cpu_is_measured() -> None:
    cpu = get_device("cpu")
    assert cpu.bf16_flops > 1e9
    assert cpu.memory > 1e8
