"""Regression check: record the numbers of a checkout, compare two records, time two checkouts side by side.

    python benchmarks/golden.py record before.json          # losses, cached logits, attached models
    python benchmarks/golden.py diff before.json after.json --rtol 1e-5
    python benchmarks/golden.py speed ../other_checkout     # interleaved, one busy at a time

Run it with PYTHONPATH=<checkout>/src. Two records of one checkout are bit-identical. Of a large tensor, 16
values and the root mean square are recorded. Everything that uses the API of qkflow is in the first part.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial, reduce
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from qkflow import hf
from qkflow.attention import couplings, scorings
from qkflow.attention.init import ParamSampler
from qkflow.models import Decoder, preset
from qkflow.models.generate import generate, make_decode_step
from qkflow.training import Callback, RunConfig, TrainConfig, train
from qkflow.training.distributed import DistContext
from qkflow.training.step import Stepper

ROOT = Path(__file__).resolve().parents[1]
SHAPE: dict[str, Any] = {
    "n_layers": 2,
    "dim": 64,
    "n_heads": 4,
    "init": "fan_in",
}  # where couplings make a difference

# ---------------------------------------------------------------- the API of qkflow and its tests

RENAMED: dict[str, str] = {}  # part of a parameter name now -> in the first record; names seed the init
DISTURBED = (".coupling.", ".scoring.", "slow.gates.")  # in the names of the first record
COUPLINGS = [*couplings.names(), "leapfrog:n=7", "leapfrog:conservative=true"]
VARIANTS = {
    f"{c}+{s}": dict[str, Any](coupling=c, scoring=s) for c, s in product(COUPLINGS, scorings.names())
}
greedy = partial(generate, temperature=0)  # of a model, a prompt and the number of new tokens


def keep_streams() -> None:
    """Init renamed parameters from the random streams of their first names."""
    own = ParamSampler.generator

    def generator(self: ParamSampler, name: str) -> torch.Generator:
        prefix, _, last = first_name(f"{self.prefix}.{name}").rpartition(".")
        return own(dataclasses.replace(self, prefix=prefix), last)

    ParamSampler.generator = generator  # type: ignore[method-assign]


def model_options(
    coupling: str = "none", scoring: str = "softmax", init: str = "gpt2", slow: bool = False, **more: Any
) -> dict[str, Any]:
    """Return fields of a model config; `more` is vocab_size, n_layers, dim, n_heads, n_kv_heads."""
    options = {"attention": {"coupling": coupling, "scoring": scoring}, "init": init, **more}
    return options | ({"slow": {"ratio": 4, "n_layers": 1}} if slow else {})


def build_model(size: str, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return Decoder(preset(size, **model_options(**options)), seed=0, dtype=dtype).eval()


def train_run(seed: int, steps: int, pace: float | None = None, **options: Any) -> list[float]:
    """Return the validation losses, every 10 steps, of one run on generated text from a perturbed init."""
    callback: Any = Callback()
    callback.on_start = lambda trainer: disturb(trainer.stepper.decoder)
    model = {"preset": "tiny", **model_options(**options)}
    data = {"corpus": "patterns:documents=120", "tokenizer": "bpe:384", "seq_len": 64}
    how = {"steps": steps, "batch_size": 8, "lr": 3e-3, "pace": pace, "seed": seed, "device": "cpu"}
    how |= {"eval_every": 10, "eval_tokens": 2048, "probe_every": 0}
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), RunConfig.from_dict({"model": model, "data": data, "train": how}), callback)
        rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines())
        return [row["loss"] for row in rows if row["kind"] == "eval"]


@torch.inference_mode()
def logits(model: Decoder, ids: Tensor, prompt: int | None = None, long: bool = False) -> Tensor:
    """Return logits of one full pass, or of cached steps after the prompt; `long` uses the CPU decoder."""
    if prompt is None:
        return model.logits(model(ids))
    caches = model.new_caches(*ids.shape)
    first = model.logits(model(ids[:, :prompt], caches=caches)[:, -1])
    decode = make_decode_step(model, caches, len(ids), 1000 if long else 1)
    return torch.stack([first, *(decode(token).clone() for token in ids[:, prompt:].unbind(1))], dim=1)


def training_step(model: Decoder, batch: int, length: int) -> Callable[[], Any]:
    """Return one step of the training loop: loss, gradients, clipping, AdamW."""
    ids = random_ids(model.config.vocab_size, batch, length + 1).numpy()
    windows: Any = SimpleNamespace(batch=lambda step: ids)
    stepper = Stepper(model.train(), TrainConfig(), windows, DistContext(torch.device("cpu")))
    return lambda: stepper.step(0, 1e-4, 0.0)


def attached() -> Iterator[tuple[str, nn.Module, Callable[[], Any]]]:
    """Yield a name, a coupled `transformers` model of each family, and the function of its output."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    tests: Any = __import__("families")
    for family, coupling in product(tests.FAMILIES, ("affine", "euler")):
        model = tests.tiny(family)
        for weight in (
            p.data for p in model.parameters() if p.dim() > 1
        ):  # a fresh model attends almost uniformly
            weight *= 0.1 / weight.std()
        hf.attach(model, coupling, seed=0)
        yield f"{family}/{coupling}", model, partial(tests.output, model, tests.token_ids())


# ---------------------------------------------------------------- record, diff, speed


def first_name(name: str) -> str:
    return reduce(lambda name, pair: name.replace(*pair), RENAMED.items(), name)


@torch.no_grad()
def disturb(model: nn.Module, amount: float = 0.1) -> int:
    """Perturb parameters that may be the identity at init, seeded by name; return how many."""
    names = {first_name(name): parameter for name, parameter in model.named_parameters()}
    chosen = {name: p for name, p in names.items() if any(part in name for part in DISTURBED)}
    for name, parameter in chosen.items():
        source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.add_(amount * torch.randn(parameter.shape, generator=source, dtype=torch.float64))
    return len(chosen)


def random_ids(vocab_size: int, batch: int, length: int) -> Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def summary(values: Tensor) -> list[float]:
    flat = values.detach().double().flatten()
    places = torch.linspace(0, len(flat) - 1, 16, dtype=torch.float64).long()
    return [*flat[places].tolist(), float(flat.square().mean().sqrt())]


def record_training(numbers: dict[str, Any]) -> None:
    cases: dict[str, Any] = {"none, slow": {"slow": True}, "none, pace=4": {"pace": 4.0}, **VARIANTS}
    cases |= {f"none@{init}": {"init": init} for init in ("gpt2", "fan_in", "fan_in+symmetric=1")}
    for (name, options), seed in product(cases.items(), (0, 1)):
        numbers[f"training/{name}/seed {seed}"] = train_run(seed, 40, **{**SHAPE, **options})


def record_decoding(numbers: dict[str, Any]) -> None:
    cases: dict[str, Any] = {f"{c}, grouped": {"coupling": c, "n_kv_heads": 2} for c in COUPLINGS}
    cases |= VARIANTS | {f"{c}, slow": {"coupling": c, "slow": True} for c in ("none", "euler")}
    for (name, options), dtype in product(cases.items(), (torch.float64, torch.float32)):
        model = build_model("small", dtype, vocab_size=211, **SHAPE, **options)
        disturb(model)
        ids = greedy(model, random_ids(211, 2, 24), 16)
        key = f"decoding/{name}/{str(dtype).removeprefix('torch.')}"
        numbers[f"{key}/tokens"] = [float(token) for token in ids[:, 24:].flatten()]
        numbers[f"{key}/full"] = summary(logits(model, ids))
        numbers[f"{key}/cached"] = summary(logits(model, ids, 24))
        numbers[f"{key}/cached, long"] = summary(logits(model, ids[:1], 24, long=True))


def record_attached(numbers: dict[str, Any]) -> None:
    for name, model, output in attached():
        assert disturb(model), f"{name}: no parameter is named like a coupling's; see DISTURBED"
        numbers[f"attached/{name}"] = summary(output())


def record(given: argparse.Namespace) -> None:
    assert Path(hf.__file__).is_relative_to(ROOT / "src"), f"set PYTHONPATH={ROOT}/src"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    keep_streams()
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["QKFLOW_CACHE"] = cache  # this checkout generates and tokenizes the text
        for section in (record_training, record_decoding, record_attached):
            section(numbers)
            print(f"{section.__name__}: {time.process_time():.0f} s, {len(numbers)} keys so far")
    git = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    about = {"commit": subprocess.check_output(git, cwd=ROOT, text=True).strip(), "torch": torch.__version__}
    given.paths[0].write_text(json.dumps({"environment": about, "numbers": numbers}, indent=0), "utf-8")


def difference(before: list[float], after: list[float]) -> float:
    """Return the largest difference relative to the largest value; inf if not comparable."""
    if len(before) != len(after) or not all(map(math.isfinite, [*before, *after])):
        return math.inf
    return max(abs(a - b) for a, b in zip(before, after, strict=True)) / (max(map(abs, before)) or 1.0)


def diff(given: argparse.Namespace) -> int:
    """Print the differences of two records; return how many keys are missing or beyond `rtol`."""
    old, new = (json.loads(path.read_text("utf-8")) for path in given.paths)
    print(f"before: {old['environment']}\nafter:  {new['environment']}")
    a, b = old["numbers"], new["numbers"]
    found = {key: difference(a[key], b[key]) for key in a if key in b}
    for section in dict.fromkeys(key.split("/")[0] for key in found):
        keys = [key for key in found if key.startswith(f"{section}/")]
        worst, equal = max(keys, key=found.__getitem__), sum(found[key] == 0 for key in keys)
        print(f"{section}: largest {found[worst]:.1e} ({worst}), {equal} of {len(keys)} equal")
    beyond = sorted((key for key in found if found[key] > given.rtol), key=found.__getitem__, reverse=True)
    missing = sorted(a.keys() ^ b.keys())
    lines = [f"differs by {found[key]:.1e}: {key}" for key in beyond]
    lines += [f"only {'before' if key in a else 'after'}: {key}" for key in missing]
    print(*lines, f"{len(beyond)} of {len(found)} beyond {given.rtol:g}, {len(missing)} missing", sep="\n")
    return len(beyond) + len(missing)


def speed_cases() -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return the tokens of one repetition and the repetition, by name."""
    cases: dict[str, tuple[int, Callable[[], Any]]] = {}
    for name in ("none+softmax", "euler+softmax", "leapfrog+softmax", "affine+softmax", "none+differential"):
        cases[f"train tiny {name}"] = (8 * 128, training_step(build_model("tiny", **VARIANTS[name]), 8, 128))
    for name in ("none", "euler"):
        cases[f"train small {name}"] = (4 * 256, training_step(build_model("small", coupling=name), 4, 256))
    for name in ("none", "euler", "affine"):
        model = build_model("small", coupling=name, init="fan_in")
        disturb(model)
        cases[f"generate small {name}"] = (64, partial(greedy, model, random_ids(8192, 1, 16), 64))
    return cases


def worker(given: argparse.Namespace) -> None:
    """Print the cases; then, for every case name on stdin, run it once and print its seconds."""
    torch.set_num_threads(given.threads)
    torch.set_flush_denormal(True)
    cases = speed_cases()
    print(json.dumps([hf.__file__, {name: tokens for name, (tokens, _) in cases.items()}]), flush=True)
    gc.disable()  # a collection is not the cost of the repetition it interrupts
    for line in sys.stdin:
        begin = time.perf_counter()
        cases[line.strip()][1]()
        seconds = time.perf_counter() - begin
        gc.collect()  # before answering: after it the other worker is being timed
        print(seconds, flush=True)


class Worker:
    """The process of one checkout, with its own package and its own copy of this file."""

    def __init__(self, checkout: Path, threads: int) -> None:
        memory = {"MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_MMAP_THRESHOLD_": "1073741824"}  # keep it
        settings = {**os.environ, **memory, "PYTHONPATH": f"{checkout}/src"}
        command = [sys.executable, f"{checkout}/benchmarks/golden.py", "worker", f"--threads={threads}"]
        self.process: Any = subprocess.Popen(command, env=settings, stdin=-1, stdout=-1, text=True)  # pipes
        source, self.tokens = json.loads(self.ask(""))
        assert source.startswith(f"{checkout}/src/"), f"{checkout} imports {source}"

    def ask(self, text: str) -> str:
        print(text, end="", file=self.process.stdin, flush=True)
        return self.process.stdout.readline() or sys.exit("a worker has failed")


def speed(given: argparse.Namespace) -> None:
    """Print the speed of the other checkout relative to this one: median and 95% bootstrap interval."""
    other, rounds, draw = given.paths[0].resolve(), given.rounds, random.Random(0)
    pair = [Worker(checkout, given.threads) for checkout in (ROOT, other)]
    speeds: dict[str, list[list[float]]] = {name: [] for name in pair[0].tokens if name in pair[1].tokens}
    for turn, name in product(range(-2, rounds), speeds):  # the first two rounds warm up
        taken = {i: pair[i].tokens[name] / float(pair[i].ask(f"{name}\n")) for i in draw.sample((0, 1), 2)}
        speeds[name] += [[taken[0], taken[1]]] if turn >= 0 else []
    print(f"tokens/s of {ROOT} and {other}, {given.threads} threads, and the second over the first")
    for name, rows in speeds.items():
        ratios = [its / own for own, its in rows]
        drawn = sorted(statistics.median(draw.choices(ratios, k=rounds)) for _ in range(2000))
        own, its, mid = map(statistics.median, [*zip(*rows, strict=True), ratios])
        print(f"{name:28} {own:6.0f} and {its:6.0f}, {mid:.3f} ({drawn[50]:.3f} to {drawn[1949]:.3f})")


def main() -> None:
    commands = {"record": (record, 1), "diff": (diff, 2), "speed": (speed, 1), "worker": (worker, 0)}
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("command", choices=commands)
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--rtol", type=float, default=1e-5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    run, count = commands[given.command]
    if len(given.paths) != count:
        parser.error(f"{given.command} takes {count} paths, not {len(given.paths)}")
    sys.exit(bool(run(given)))


if __name__ == "__main__":
    main()
