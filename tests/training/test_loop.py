from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from input_errors import raises_code
from qkflow.models import Decoder
from qkflow.training import Callback, RunConfig, Trainer, load_model, loop, train
from qkflow.training.metrics_log import read_rows
from qkflow.training.optimizer import ParamGroup
from qkflow.training.run_dir import lock_run_dir

RunFolder = Callable[..., Path]


def run(folder: Path, callback: Callback | None = None) -> dict[str, Any]:
    return train(folder, RunConfig.load(folder / "config.yaml"), callback)


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_model(folder)[0].state_dict()


def assert_same_weights(one: Path, other: Path, **tolerance: float) -> None:
    for name, tensor in weights(one).items():
        torch.testing.assert_close(
            tensor, weights(other)[name], msg=name, **(tolerance or {"rtol": 0, "atol": 0})
        )


def test_files_and_metrics_of_a_run(run_folder: RunFolder) -> None:
    model = {"attention": {"coupling": "euler"}}
    folder = run_folder(model=model, steps=8, evaluations=4, log_every=2, pace={"ratio": 2})
    result = run(folder)
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["status"] == "finished"
    assert (result["steps"], result["tokens"]) == (8, 8 * 4 * 16)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(
        result["loss"] / math.log(2), rel=0.02
    )  # tokens are bytes
    assert result["parameters"] == sum(result["parameters_by_role"].values())
    assert {"seconds", "step_seconds", "peak_memory_bytes", "flops_per_token"} <= result.keys()
    environment = {"python", "torch", "qkflow", "commit", "threads", "device", "machine", "processes"}
    assert environment <= result["environment"].keys()
    logged = rows(folder, "train")
    assert [row["step"] for row in logged] == [2, 4, 6, 8]
    assert {"tokens", "seconds", "loss", "lr", "grad_norm", "tokens_per_second"} <= logged[0].keys()
    last = rows(folder, "eval")[-1]
    assert [row["step"] for row in rows(folder, "eval")] == [2, 4, 6, 8]
    assert last["loss"] == result["loss"]
    assert last["flops"] == result["tokens"] * result["flops_per_token"]
    probe = rows(folder, "probe")[-1]
    for name in ("step_size", "attention_entropy", "sink_mass", "spectral_gap", "qk_scale", "ov_balance"):
        assert len(probe[name]) == 1  # one value per layer
    assert probe["effective_pace"] > 0
    assert not (folder / "checkpoints").exists()


def test_training_reduces_the_loss(run_folder: RunFolder) -> None:
    folder = run_folder(steps=150, lr=1e-2)
    assert run(folder)["loss"] < rows(folder, "train")[0]["loss"] - 2


def test_gradient_accumulation_matches_one_batch(run_folder: RunFolder) -> None:
    whole, parts = run_folder("whole", batch_size=8), run_folder("parts", batch_size=8, accumulate=4)
    run(whole), run(parts)
    assert_same_weights(whole, parts, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", [{"activation_checkpointing": True}, {"compile": "eager"}])
def test_compute_options_do_not_change_the_weights(run_folder: RunFolder, option: dict[str, Any]) -> None:
    plain, other = run_folder("plain"), run_folder("other", **option)
    run(plain), run(other)
    assert_same_weights(plain, other, rtol=1e-5, atol=1e-6)


def test_bf16_autocast_keeps_fp32_weights(run_folder: RunFolder) -> None:
    exact, half = run_folder("exact", steps=20), run_folder("half", steps=20, precision="bf16")
    assert run(half)["loss"] == pytest.approx(run(exact)["loss"], rel=0.02)
    assert {tensor.dtype for tensor in weights(half).values()} == {torch.float32}


class RecordLearningRates(Callback):
    def __init__(self) -> None:
        self.ratios: list[float] = []

    def on_step(self, trainer: Trainer, loss: Tensor) -> None:
        groups: dict[str, ParamGroup] = {g.role: g for g in trainer.stepper.optimizer.param_groups}
        assert groups["q"].lr == groups["k"].lr
        self.ratios.append(groups["q"].lr / groups["v"].lr)


@pytest.mark.parametrize(
    ("pace", "ratios"),
    [
        (4, [4.0] * 4),
        ("4", [4.0] * 4),
        ({"ratio": 4}, [4.0] * 4),
        ("increasing:41", [1.0, 11.0, 21.0, 31.0]),
        ("increasing:41:steps=2", [1.0, 21.0, 41.0, 41.0]),
    ],
)
def test_pace_is_the_lr_ratio_of_the_qk_circuit(
    run_folder: RunFolder, pace: Any, ratios: list[float]
) -> None:
    callback = RecordLearningRates()
    run(run_folder(steps=4, pace=pace), callback)
    assert callback.ratios == pytest.approx(ratios)


def test_variants_of_a_seed_share_init_and_batches(
    settings: Callable[..., dict[str, Any]], run_folder: RunFolder
) -> None:
    def init(seed: int, coupling: str) -> dict[str, Tensor]:
        config = RunConfig.from_dict(settings(model={"attention": {"coupling": coupling}}, seed=seed))
        return Decoder(config.model_config(257), seed=config.train.seed).state_dict()

    plain, coupled, other = init(1, "none"), init(1, "leapfrog"), init(2, "none")
    assert plain.keys() < coupled.keys()
    assert all(torch.equal(plain[name], coupled[name]) for name in plain)
    assert not torch.equal(plain["embedding.weight"], other["embedding.weight"])

    class RecordBatches(Callback):
        batches: Any = None

        def on_start(self, trainer: Trainer) -> None:
            self.batches = [trainer.windows.batch(step).tolist() for step in range(3)]

    callbacks = [RecordBatches(), RecordBatches()]
    for callback, coupling in zip(callbacks, ("none", "drift"), strict=True):
        run(run_folder(coupling, model={"attention": {"coupling": coupling}}, seed=3), callback)
    assert callbacks[0].batches == callbacks[1].batches is not None


def test_signal_interrupts_data_preparation(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal was deferred")

    monkeypatch.setattr(loop, "prepare", prepare)
    with pytest.raises(KeyboardInterrupt):
        run(run_folder())


def test_time_budget(run_folder: RunFolder) -> None:
    folder = run_folder(steps=None, minutes=0.01, warmup=0.1, evaluations=4, pace="increasing:3")
    result = run(folder)
    assert 0.6 <= result["seconds"] <= 3
    assert result["steps"] >= 1
    evaluated = [row["seconds"] for row in rows(folder, "eval")]
    assert len(evaluated) == min(4, result["steps"])
    assert evaluated[-1] == pytest.approx(result["seconds"], abs=1e-5)


def test_run_folder_is_locked_while_training(run_folder: RunFolder) -> None:
    folder = run_folder()

    class LockAgain(Callback):
        tried = False

        def on_start(self, trainer: Trainer) -> None:
            with raises_code("folder-locked"), lock_run_dir(folder, trainer.dist_context):
                pass
            self.tried = True

    callback = LockAgain()
    run(folder, callback)
    assert callback.tried


def test_final_evaluation_on_more_tokens_than_the_curve(run_folder: RunFolder) -> None:
    curve, final = {"eval_tokens": 64, "probe_every": 4}, {"final_eval_tokens": 256}
    small, both = run_folder("small", **curve), run_folder("both", **curve, **final)
    large = run_folder("large", eval_tokens=256)
    results = {folder.name: run(folder) for folder in (small, both, large)}
    assert results["both"]["loss"] == results["large"]["loss"] != results["small"]["loss"]
    assert results["both"]["bits_per_byte"] == results["large"]["bits_per_byte"]
    assert [row["loss"] for row in rows(both, "eval")] == [row["loss"] for row in rows(small, "eval")]
    assert [row["step"] for row in rows(both, "probe")] == [4, 6]  # every fourth step, and the last
