"""A worker with the whole contract of a run folder, on a problem that trains in milliseconds.

Softmax regression in numpy. Labels depend on x and on the product of two inputs. The variant determines the
features (`euler` and `drift` have the product, `uncoupled` a useless feature), the init the first weights.
`broken` fails, `picky` rejects its config, `sleepy` is slow.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import yaml


def write_json(path: Path, value: object) -> None:
    """Write atomically, without qkflow: importing it would take longer than the training."""
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(value))
    os.replace(beside, path)


CLASSES, INPUTS, PULL = 8, 6, 3.0
WORLD = np.random.default_rng(0).normal(size=(CLASSES, INPUTS + 2))
WORLD[:, INPUTS + 1] = 0  # the useless feature


def features(x: np.ndarray, coupling: str) -> np.ndarray:
    product = PULL * x[:, :1] * x[:, 1:2] if coupling in ("true", "euler", "drift") else 0 * x[:, :1]
    useless = np.sin(7 * x[:, 2:3]) if coupling == "uncoupled" else 0 * x[:, :1]
    return np.concatenate([x, product, useless], axis=1)


def draw(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(count, INPUTS))
    logits = features(x, "true") @ WORLD.T
    return x, (logits + rng.gumbel(size=logits.shape)).argmax(1)


def loss_and_gradient(W: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    logits = x @ W.T
    logits -= logits.max(1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    p[np.arange(len(y)), y] -= 1
    return float(loss), p.T @ x / len(y)


def initial_weights(init: str, seed: int) -> np.ndarray:
    base = {"gpt2": 0.02, "fan_in": 2.0, "modern": 0.1, "mimetic": 0.5}[init.partition("+")[0]]
    W = base * np.random.default_rng([seed, 1]).normal(size=WORLD.shape)
    return W + 0.8 * WORLD if "symmetric" in init else W


class Worker:
    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, yaml.safe_load((folder / "config.yaml").read_text())
        data, self.train = self.config["data"], self.config["train"]
        self.coupling = self.config["model"]["attention"]["coupling"].partition(":")[0]
        self.init, self.seed = self.config["model"]["init"], self.train["seed"]
        self.per_step = self.train["batch_size"] * data["seq_len"]
        self.steps = math.ceil(self.train["tokens"] / self.per_step)
        self.step, self.seconds = 0, 0.0
        self.W = initial_weights(self.init, self.seed)
        self.test = draw(np.random.default_rng(99), 400)
        self.stop = False
        self.checkpoint = folder / "checkpoints" / "state.json"
        if self.checkpoint.exists():
            state = json.loads(self.checkpoint.read_text())
            self.step, self.seconds, self.W = state["step"], state["seconds"], np.array(state["W"])

    def save(self) -> None:
        write_json(self.checkpoint, {"step": self.step, "seconds": self.seconds, "W": self.W.tolist()})

    def log(self, **row: object) -> None:
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def evaluate(self) -> float:
        x, y = self.test
        loss, _ = loss_and_gradient(self.W, features(x, self.coupling), y)
        common = {"step": self.step, "tokens": self.step * self.per_step}
        flops = common["tokens"] * self.flops_per_token()
        scores = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / 4}
        self.log(kind="eval", **common, seconds=self.seconds, flops=flops, **scores)
        spread = np.abs(self.W).mean(0)
        size = {} if self.coupling == "none" else {"step_size": [float(spread[6]), float(spread[7])]}
        layers = {"attention_entropy": [loss, loss / 2], "sink_mass": [0.1, 0.2], "spectral_gap": [0.5, 0.4]}
        self.log(kind="probe", **common, **size, **layers, weight_norm=float(np.linalg.norm(self.W)))
        return loss

    def flops_per_token(self) -> float:
        return 125.0 if self.coupling == "euler" else 100.0

    def run(self) -> int:
        every = max(1, self.steps // self.train["evaluations"])
        if self.step == 0:
            self.evaluate()
        while self.step < self.steps:
            if self.stop:
                self.save()
                return 75
            start = time.perf_counter()
            x, y = draw(np.random.default_rng([self.seed, self.step]), self.per_step)
            loss, gradient = loss_and_gradient(self.W, features(x, self.coupling), y)
            self.W = self.W - self.train["lr"] * gradient
            time.sleep(0.1 if self.coupling == "sleepy" else 0)
            self.step += 1
            self.seconds += time.perf_counter() - start
            tokens = self.step * self.per_step
            self.log(kind="train", step=self.step, tokens=tokens, seconds=self.seconds, loss=loss,
                     lr=self.train["lr"], grad_norm=float(np.linalg.norm(gradient)),
                     tokens_per_second=tokens / self.seconds)  # fmt: skip
            if self.step % every == 0 or self.step == self.steps:
                self.evaluate()
            if self.step % 2 == 0:
                self.save()
        self.finish(self.evaluate())
        return 0

    def finish(self, loss: float) -> None:
        write_json(self.folder / "model" / "weights.json", self.W.tolist())
        write_json(
            self.folder / "result.json",
            {
                "status": "finished",
                "error": None,
                "loss": loss,
                "perplexity": math.exp(loss),
                "bits_per_byte": loss / math.log(2) / 4,
                "tokens": self.steps * self.per_step,
                "steps": self.steps,
                "seconds": self.seconds,
                "step_seconds": self.seconds / self.steps,
                "peak_memory_bytes": 1_000_000,
                "parameters": self.W.size,
                "parameters_by_role": {"mlp": self.W.size},
                "flops_per_token": self.flops_per_token(),
                "environment": {"commit": "0000000", "threads": os.environ["OMP_NUM_THREADS"]},
            },
        )


def main() -> int:
    worker = Worker(Path(sys.argv[1]))
    with open(worker.folder / "starts.txt", "a") as file:  # tests count the starts of every run
        file.write(f"{os.getpid()} from step {worker.step}\n")
    if worker.coupling == "picky":
        print("qkflow: option 'm' of coupling 'picky' is unknown: did you mean 'n'? [unknown-option]")
        return 2
    if worker.coupling == "broken":
        print("loading")
        raise RuntimeError("the toy exploded on <b>purpose</b>")

    def request_stop(number: int, frame: object) -> None:
        worker.stop = True

    signal.signal(signal.SIGTERM, request_stop)
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
