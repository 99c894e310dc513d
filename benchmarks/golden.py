"""Numbers that a change of the code must not change, and how fast two checkouts are beside each other.

    python benchmarks/golden.py record before.json          # losses, cached logits, attached models
    python benchmarks/golden.py diff before.json after.json --rtol 1e-5
    python benchmarks/golden.py speed ../other_checkout     # both take turns, one busy at a time

Run it with PYTHONPATH=<checkout>/src. Two records of one checkout are equal bit for bit. Of a large tensor 16
values and the root mean square are kept. What knows qkflow's API stands in the first part of this file.
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

from qkflow import hub
from qkflow.attention import couplings, scorings
from qkflow.attention.starts import Draw
from qkflow.models import Decoder, preset
from qkflow.models.generate import generate, one_by_one
from qkflow.training import Listener, RunConfig, TrainConfig, train
from qkflow.training.parallel import Team
from qkflow.training.step import Stepper

ROOT = Path(__file__).resolve().parents[1]
SHAPE: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "start": "fan_in"}  # where couplings show

# ---------------------------------------------------------------- what knows qkflow and its tests

RENAMED: dict[str, str] = {}  # part of a parameter's name now -> in the first record; names seed numbers
DISTURBED = (".coupling.", ".scoring.", "slow.gates.")  # in the first record's names
COUPLINGS = [*couplings.names(), "leapfrog:n=7", "leapfrog:conservative=true"]
VARIANTS = {
    f"{c}+{s}": dict[str, Any](coupling=c, scoring=s) for c, s in product(COUPLINGS, scorings.names())
}
greedy = partial(generate, temperature=0)  # of a model, a prompt and the number of new tokens


def keep_streams() -> None:
    """Have renamed parameters start from the random numbers of their first names."""
    own = Draw.generator

    def generator(self: Draw, name: str) -> torch.Generator:
        prefix, _, last = first_name(f"{self.prefix}.{name}").rpartition(".")
        return own(dataclasses.replace(self, prefix=prefix), last)

    Draw.generator = generator  # type: ignore[method-assign]


def model_options(
    coupling: str = "none", scoring: str = "softmax", start: str = "gpt2", slow: bool = False, **more: Any
) -> dict[str, Any]:
    """Fields of a model's config; `more` is vocabulary, layers, width, heads, kv_heads."""
    options = {"attention": {"coupling": coupling, "scoring": scoring}, "start": start, **more}
    return options | ({"slow": {"ratio": 4, "layers": 1}} if slow else {})


def build_model(size: str, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return Decoder(preset(size, **model_options(**options)), seed=0, dtype=dtype).eval()


def train_run(seed: int, steps: int, pace: float | None = None, **options: Any) -> list[float]:
    """Validation losses, every 10 steps, of one run on generated text from a disturbed start."""
    listener: Any = Listener()
    listener.begin = lambda run: disturb(run.stepper.decoder)
    model = {"preset": "tiny", **model_options(**options)}
    data = {"corpus": "patterns:documents=120", "tokenizer": "bpe:384", "length": 64}
    how = {"steps": steps, "batch": 8, "lr": 3e-3, "pace": pace, "seed": seed, "device": "cpu"}
    how |= {"eval_every": 10, "eval_tokens": 2048, "probe_every": 0}
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), RunConfig.from_dict({"model": model, "data": data, "train": how}), listener)
        rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines())
        return [row["loss"] for row in rows if row["kind"] == "eval"]


@torch.inference_mode()
def logits(model: Decoder, ids: Tensor, prompt: int | None = None, long: bool = False) -> Tensor:
    """In one pass; or from the prompt's last token on by cached steps, `long`: as a long call takes them."""
    if prompt is None:
        return model.logits(model(ids))
    caches = model.new_caches(*ids.shape)
    first = model.logits(model(ids[:, :prompt], caches=caches)[:, -1])
    read = one_by_one(model, caches, len(ids), 1000 if long else 1)
    return torch.stack([first, *(read(token).clone() for token in ids[:, prompt:].unbind(1))], dim=1)


def training_step(model: Decoder, batch: int, length: int) -> Callable[[], Any]:
    """One step of the training loop: loss, gradients, clipping, AdamW."""
    ids = random_ids(model.config.vocabulary, batch, length + 1).numpy()
    windows: Any = SimpleNamespace(batch=lambda step: ids)
    stepper = Stepper(model.train(), TrainConfig(), windows, Team(torch.device("cpu")))
    return lambda: stepper.step(0, 1e-4, 0.0)


def attached() -> Iterator[tuple[str, nn.Module, Callable[[], Any]]]:
    """A name, a coupled `transformers` model of each of the tests' families, and what makes its output."""
    sys.path.insert(0, str(ROOT / "tests"))
    tests: Any = __import__("families")
    for family, coupling in product(tests.FAMILIES, ("affine", "euler")):
        model = tests.tiny(family)
        for weight in (p.data for p in model.parameters() if p.dim() > 1):  # fresh ones hardly attend
            weight *= 0.1 / weight.std()
        hub.attach(model, coupling, seed=0)
        yield f"{family}/{coupling}", model, partial(tests.output, model, tests.token_ids())


# ---------------------------------------------------------------- record, diff, speed


def first_name(name: str) -> str:
    return reduce(lambda name, pair: name.replace(*pair), RENAMED.items(), name)


@torch.no_grad()
def disturb(model: nn.Module, amount: float = 0.1) -> int:
    """Move what may start as the identity, by numbers that depend on names alone; how many were moved."""
    names = {first_name(name): parameter for name, parameter in model.named_parameters()}
    chosen = {name: p for name, p in names.items() if any(part in name for part in DISTURBED)}
    for name, parameter in chosen.items():
        source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.add_(amount * torch.randn(parameter.shape, generator=source, dtype=torch.float64))
    return len(chosen)


def random_ids(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def summary(values: Tensor) -> list[float]:
    flat = values.detach().double().flatten()
    places = torch.linspace(0, len(flat) - 1, 16, dtype=torch.float64).long()
    return [*flat[places].tolist(), float(flat.square().mean().sqrt())]


def record_training(numbers: dict[str, Any]) -> None:
    cases: dict[str, Any] = {"none, slow": {"slow": True}, "none, pace=4": {"pace": 4.0}, **VARIANTS}
    cases |= {f"none@{start}": {"start": start} for start in ("gpt2", "fan_in", "fan_in+symmetric=1")}
    for (name, options), seed in product(cases.items(), (0, 1)):
        numbers[f"training/{name}/seed {seed}"] = train_run(seed, 40, **{**SHAPE, **options})


def record_decoding(numbers: dict[str, Any]) -> None:
    cases: dict[str, Any] = {f"{c}, grouped": {"coupling": c, "kv_heads": 2} for c in COUPLINGS}
    cases |= VARIANTS | {f"{c}, slow": {"coupling": c, "slow": True} for c in ("none", "euler")}
    for (name, options), dtype in product(cases.items(), (torch.float64, torch.float32)):
        model = build_model("small", dtype, vocabulary=211, **SHAPE, **options)
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
    assert Path(hub.__file__).is_relative_to(ROOT / "src"), f"set PYTHONPATH={ROOT}/src"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    keep_streams()
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["QKFLOW_CACHE"] = cache  # so that this checkout makes and tokenises the text
        for section in (record_training, record_decoding, record_attached):
            section(numbers)
            print(f"{section.__name__}: {time.process_time():.0f} s, {len(numbers)} keys so far")
    git = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    about = {"commit": subprocess.check_output(git, cwd=ROOT, text=True).strip(), "torch": torch.__version__}
    given.paths[0].write_text(json.dumps({"environment": about, "numbers": numbers}, indent=0), "utf-8")


def difference(before: list[float], after: list[float]) -> float:
    """The largest difference, relative to the largest number; infinite where they cannot be compared."""
    if len(before) != len(after) or not all(map(math.isfinite, [*before, *after])):
        return math.inf
    return max(abs(a - b) for a, b in zip(before, after, strict=True)) / (max(map(abs, before)) or 1.0)


def diff(given: argparse.Namespace) -> int:
    """Print what differs between two records; how many keys are missing or beyond `rtol`."""
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
    """Tokens of one repetition, and the repetition."""
    cases: dict[str, tuple[int, Callable[[], Any]]] = {}
    for name in ("none+softmax", "euler+softmax", "leapfrog+softmax", "affine+softmax", "none+differential"):
        cases[f"train tiny {name}"] = (8 * 128, training_step(build_model("tiny", **VARIANTS[name]), 8, 128))
    for name in ("none", "euler"):
        cases[f"train small {name}"] = (4 * 256, training_step(build_model("small", coupling=name), 4, 256))
    for name in ("none", "euler", "affine"):
        model = build_model("small", coupling=name, start="fan_in")
        disturb(model)
        cases[f"generate small {name}"] = (64, partial(greedy, model, random_ids(8192, 1, 16), 64))
    return cases


def worker(given: argparse.Namespace) -> None:
    """Print what there is to time; then, for every name read, run it once and print its seconds."""
    torch.set_num_threads(given.threads)
    torch.set_flush_denormal(True)
    cases = speed_cases()
    print(json.dumps([hub.__file__, {name: tokens for name, (tokens, _) in cases.items()}]), flush=True)
    gc.disable()  # a collection that lands on one repetition is not its cost
    for line in sys.stdin:
        begin = time.perf_counter()
        cases[line.strip()][1]()
        seconds = time.perf_counter() - begin
        gc.collect()  # before answering: after it the other worker is being timed
        print(seconds, flush=True)


class Worker:
    """A checkout's process: its own package, its own copy of this file."""

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
    """Print how many times as fast the other checkout is: median and 95% bootstrap interval."""
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
