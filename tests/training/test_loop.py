"""What a run does, writes and refuses."""

import json
import math
import os
import signal
import sys

import pytest
import torch

from qkflow.errors import InputError
from qkflow.models import Decoder
from qkflow.studies.runner.study_dir import RunDir
from qkflow.training import Callback, NonFiniteError, RunConfig, load_model, loop, train, worker
from qkflow.training.checkpoint import verify_checkpoint
from qkflow.training.metrics_log import MetricsLog, read_rows
from qkflow.training.run_dir import lock_run_dir


def run(folder, listener=None):
    return train(folder, RunConfig.load(folder / "config.yaml"), listener)


def rows(folder, kind):
    return [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind]


def weights(folder):
    return load_model(folder)[0].state_dict()


def assert_same_weights(one, other, **tolerance):
    for name, tensor in weights(one).items():
        torch.testing.assert_close(
            tensor, weights(other)[name], msg=name, **(tolerance or {"rtol": 0, "atol": 0})
        )


def test_a_run_writes_what_it_promises(run_folder):
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
    assert {"python", "torch", "qkflow", "commit", "threads", "device", "machine"} <= result[
        "environment"
    ].keys()
    assert [row["step"] for row in rows(folder, "train")] == [2, 4, 6, 8]
    assert {"tokens", "seconds", "loss", "lr", "grad_norm", "tokens_per_second"} <= rows(folder, "train")[
        0
    ].keys()
    last = rows(folder, "eval")[-1]
    assert [row["step"] for row in rows(folder, "eval")] == [2, 4, 6, 8]
    assert last["loss"] == result["loss"]
    assert last["flops"] == result["tokens"] * result["flops_per_token"]
    probe = rows(folder, "probe")[-1]
    for name in ("step_size", "attention_entropy", "sink_mass", "spectral_gap", "qk_scale", "ov_balance"):
        assert len(probe[name]) == 1  # a value a layer
    assert probe["effective_pace"] > 0
    assert not (folder / "checkpoints").exists()


def test_it_learns(run_folder):
    folder = run_folder(steps=150, lr=1e-2)
    assert run(folder)["loss"] < rows(folder, "train")[0]["loss"] - 2


def test_an_accumulated_batch_is_the_batch(run_folder):
    whole, parts = run_folder("whole", batch=8), run_folder("parts", batch=8, accumulate=4)
    run(whole), run(parts)
    assert_same_weights(whole, parts, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", [{"checkpoint_blocks": True}, {"compile": "eager"}])
def test_ways_to_compute_that_change_nothing(run_folder, option):
    plain, other = run_folder("plain"), run_folder("other", **option)
    run(plain), run(other)
    assert_same_weights(plain, other, rtol=1e-5, atol=1e-6)


def test_bf16_stays_close_and_keeps_exact_weights(run_folder):
    exact, half = run_folder("exact", steps=20), run_folder("half", steps=20, precision="bf16")
    assert run(half)["loss"] == pytest.approx(run(exact)["loss"], rel=0.02)
    assert {tensor.dtype for tensor in weights(half).values()} == {torch.float32}


def test_variants_of_a_seed_share_their_start_and_their_batches(settings, run_folder):
    def start(seed, coupling):
        config = RunConfig.from_dict(settings(model={"attention": {"coupling": coupling}}, seed=seed))
        return Decoder(config.model_config(257), seed=config.train.seed).state_dict()

    plain, coupled, other = start(1, "none"), start(1, "leapfrog"), start(2, "none")
    assert plain.keys() < coupled.keys()
    assert all(torch.equal(plain[name], coupled[name]) for name in plain)
    assert not torch.equal(plain["embedding.weight"], other["embedding.weight"])

    class Seen(Callback):
        def on_start(self, run):
            self.batches = [run.windows.batch(step).tolist() for step in range(3)]

    seen = [Seen(), Seen()]
    for listener, coupling in zip(seen, ("none", "drift"), strict=True):
        run(run_folder(coupling, model={"attention": {"coupling": coupling}}, seed=3), listener)
    assert seen[0].batches == seen[1].batches


class Asks(Callback):
    """Asks the run to stop, as a terminal or a scheduler would, when it has made a number of steps."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number, self.said = step, number, []

    def on_step(self, run, loss):
        if run.step == self.step:
            os.kill(os.getpid(), self.number)

    def on_message(self, text):
        self.said.append(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_goes_on_bit_for_bit(run_folder, number, capsys):
    undisturbed, stopped = run_folder("undisturbed"), run_folder("stopped")
    run(undisturbed)
    assert worker.run_worker(stopped, Asks(4, number)) == worker.EXIT_INTERRUPTED
    assert "stopped at step 4, and its state is saved: the same command goes on" in capsys.readouterr().err
    assert not (stopped / "result.json").exists()
    with pytest.raises(InputError, match="is not finished: `qkflow train"):
        load_model(stopped)
    later = Asks(step=None)
    assert worker.run_worker(stopped, later) == worker.EXIT_FINISHED
    assert later.said == ["going on from step 4"]
    assert_same_weights(undisturbed, stopped)


def test_a_signal_ends_the_preparation_of_data_at_once(run_folder, monkeypatch):
    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal was put off")

    monkeypatch.setattr(loop, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(run_folder())


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"status": "finis'])
def test_a_run_whose_result_is_damaged_is_made_again(run_folder, content):
    folder = run_folder(steps=1)
    (folder / "result.json").write_bytes(content)
    assert RunDir(folder).result() is None
    assert worker.main([str(folder)]) == worker.EXIT_FINISHED
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"


def test_a_finished_run_is_not_repeated(run_folder):
    folder = run_folder()
    assert worker.main([str(folder)]) == worker.EXIT_FINISHED
    before = (folder / "result.json").stat().st_mtime_ns
    assert worker.main([str(folder)]) == worker.EXIT_FINISHED
    assert (folder / "result.json").stat().st_mtime_ns == before


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_state(run_folder, capsys):
    folder = run_folder(lr=1e25, schedule="constant", clip=0, warmup=0, steps=50)
    assert worker.main([str(folder)]) == worker.EXIT_FAILED
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed"
    for words in ("not finite at step", "learning rate 1e+25", "batch", "of seed 0"):
        assert words in result["error"]
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert f"at step {verify_checkpoint(checkpoint).step + 1} " in result["error"]
    assert all(isinstance(row["loss"], float) for row in rows(folder, "train"))
    # tried again, it fails in the same way, from the state that was kept
    with pytest.raises(NonFiniteError, match="not finite at step"):
        run(folder)


def test_a_budget_of_minutes(run_folder):
    result = run(run_folder(steps=None, minutes=0.005, warmup=0.1))
    assert 0.3 <= result["seconds"] <= 3
    assert result["steps"] >= 1


def test_two_runs_in_one_folder(run_folder):
    folder = run_folder()

    class Second(Callback):
        def on_start(self, first):
            with (
                pytest.raises(InputError, match="another process is training in"),
                lock_run_dir(folder, first.team),
            ):
                pass
            self.tried = True

    second = Second()
    run(folder, second)
    assert second.tried


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": {"corpus": "nowhere/at-all.txt"}}, "nowhere/at-all.txt"),
        ({"data": {"seq_len": 100_000}}, "fewer than one window"),
        ({"data": {"fingerprint": "0" * 16}}, "has changed"),
        ({"model": {"dim": 15}}, "does not divide into"),
        ({"device": "cuda:7"}, "no device 'cuda:7'"),
        ({"device": "abacus"}, "is not a device"),
        ({"pace": -1}, "must be above zero"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(run_folder, capsys, options, words):
    folder = run_folder(**options)
    assert worker.main([str(folder)]) == worker.EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert {path.name for path in folder.iterdir()} <= {"config.yaml", ".worker.lock"}


def test_no_folder(tmp_path, capsys):
    assert worker.main([str(tmp_path / "nowhere")]) == worker.EXIT_BAD_INPUT
    assert "there is no" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_metrics_after_a_kill(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind":"train","step":1,"loss":1.0}\n{"kind":"train","step":2,"loss":0.5}\n{"kind":"tra'
    )
    metrics = MetricsLog(tmp_path, resume_step=1)
    metrics.write({"kind": "train", "step": 2, "loss": float("nan"), "list": [1.0, float("inf")]})
    metrics.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"kind": "train", "step": 1, "loss": 1.0},
        {"kind": "train", "step": 2, "loss": None, "list": [1.0, None]},
    ]


def test_rows_go_to_tensorboard_too(run_folder):
    pytest.importorskip("tensorboard")
    folder = run_folder(writers=["tensorboard"])
    run(folder)
    assert list((folder / "tensorboard").glob("events.out.*"))


def test_a_writer_that_is_not_installed(run_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert worker.main([str(run_folder(writers=["wandb"]))]) == worker.EXIT_BAD_INPUT
    assert 'pip install "qkflow[wandb]"' in capsys.readouterr().err
