"""`qkflow train`: train one model, or resume its training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro

from qkflow import console
from qkflow.config_io import check_mapping
from qkflow.errors import InputError, shorten, unknown
from qkflow.plain_data import MAX_DEPTH, parse_yaml, read_yaml
from qkflow.training import Callback, Trainer
from qkflow.training.config import (
    CHANGEABLE_ON_RESUME,
    DEFAULT_LR,
    OptimizerName,
    ParallelMode,
    RunConfig,
    TrainConfig,
)

# The config of a new run without --config; docs/which_dial.md has the measurements.
RECOMMENDED = {"model": {"init": "modern"}, "train": {"optimizer": "muon"}}


def train(
    folder: Annotated[Path, tyro.conf.Positional],
    *,
    config: Path | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    seq_len: int | None = None,
    preset: str | None = None,
    coupling: str | None = None,
    scoring: str | None = None,
    init: str | None = None,
    tokens: str | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    batch_size: int | None = None,
    accumulate: int | None = None,
    optimizer: OptimizerName | None = None,
    lr: float | None = None,
    schedule: str | None = None,
    warmup: float | None = None,
    pace: str | None = None,
    seed: int | None = None,
    precision: str | None = None,
    device: str | None = None,
    parallel: ParallelMode | None = None,
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    threads: int | None = None,
    json: bool = False,
) -> int:
    """Train one model in a folder. After a stop or a kill, the same command resumes the run.

    The folder contains config.yaml, metrics.jsonl and checkpoints, and at the end the model and result.json.

    examples:
      qkflow train runs/first
      qkflow train runs/coupled --data my_texts/ --coupling leapfrog:n=7 --tokens 5M --lr 2e-3
      qkflow train runs/small --preset small --tokenizer bpe:8192 --seq-len 256 --minutes 30
      qkflow train runs/paced --steps 2000 --pace increasing:40
      qkflow train runs/odd --config run.yaml --set train.beta2=0.98 --set model.n_kv_heads=2
      torchrun --nproc-per-node 2 -m qkflow train runs/big --preset 60m --parallel fsdp

    Args:
        folder: folder of the run; an interrupted run is resumed, a finished one is shown.
        config: a YAML file with the sections model, data and train; flags override it.
        data: corpus to train on: a built-in name, a path or hf:owner/name:config (default: speeches).
        tokenizer: bytes, bpe:SIZE, a path or hf:NAME (default: bpe:2048).
        seq_len: tokens per window (default: 128).
        preset: size of the model: tiny, small, 60m, 150m, 350m, 455m, tiny-swiglu, 350m-swiglu (default:
            tiny).
        coupling: none, drift, euler, leapfrog:n=7, affine, ... (default: none).
        scoring: softmax, softmax_norm, differential or differential_v2 (default: softmax).
        init: init scheme of the weights, see qkflow inits: gpt2, fan_in, modern, symmetric=1 (default:
            modern).
        tokens: training tokens, e.g. 200k or 5M (default: 1M).
        steps: optimizer steps, instead of tokens.
        minutes: training time without evaluation, instead of tokens.
        batch_size: windows per optimizer step, over all processes (default: 16).
        accumulate: microbatches per optimizer step, to save memory (default: 1).
        optimizer: muon (AdamW for embeddings, norms and scalars) or adamw (default: muon).
        lr: peak learning rate (default: 0.012 with muon, 0.003 with adamw).
        schedule: learning-rate schedule after warmup: cosine, wsd or constant (default: cosine).
        warmup: fraction of the run, or number of steps, of linear warmup (default: 0.02).
        pace: learning rate of the query-key circuit relative to the rest: a number, or increasing:40 to
            ramp it up from 1 over the run (default: 1).
        seed: of the init and the batches (default: 0).
        precision: fp32 or bf16 (default: fp32).
        device: auto, cpu, cuda or mps (default: auto).
        parallel: parallel mode of the processes of torchrun: ddp, fsdp (FSDP2) or hsdp, which is fsdp within
            a machine and ddp over machines (default: ddp).
        set: any other key of the config, e.g. train.clip=0.5; may be repeated.
        threads: CPU threads (default: all cores).
        json: print the result as one JSON object instead of a table.
    """
    from qkflow.training import worker

    flags = {
        "model": {"preset": preset, "init": init, "attention": {"coupling": coupling, "scoring": scoring}},
        "data": {"corpus": data, "tokenizer": tokenizer, "seq_len": seq_len},
        "train": {
            "tokens": tokens, "steps": steps, "minutes": minutes, "batch_size": batch_size,
            "accumulate": accumulate, "optimizer": optimizer, "lr": lr, "schedule": schedule,
            "warmup": warmup, "pace": pace, "seed": seed, "precision": precision, "device": device,
        },
    }  # fmt: skip
    overrides = _deep_merge(_deep_merge(_read_yaml(config), _drop_none(flags)), _parse_assignments(set))
    if not (folder / "config.yaml").exists():
        overrides = add_defaults(overrides, RECOMMENDED if config is None else {})
    config_to_save = resolve_config(folder, overrides)
    worker.configure_process(threads)
    with _ProgressCallback(folder) as progress:
        code = worker.run_worker(folder, progress, parallel, config_to_save)
    if code == worker.EXIT_INTERRUPTED:
        message = f"resume with: qkflow train {folder}"
        console.err.print(message, markup=False, highlight=False, soft_wrap=True)
    if code == worker.EXIT_FINISHED and progress.is_main:
        print_result(folder, json)
    return code


def resolve_config(folder: Path, overrides: dict[str, Any]) -> RunConfig | None:
    """Return the config of a new run, or of an existing one with allowed changes; None: no changes."""
    path = folder / "config.yaml"
    if not path.exists():
        config = RunConfig.from_dict(overrides)
        if folder.exists() and (not folder.is_dir() or any(p.name[0] != "." for p in folder.iterdir())):
            raise InputError(
                f"{folder} contains other files: choose a new or an empty folder", code="folder-not-empty"
            )
        return config
    old = RunConfig.load(path)
    if not overrides:
        return None
    new = RunConfig.from_dict(_deep_merge(old.to_dict(), overrides))
    changeable = {f"train.{name}" for name in CHANGEABLE_ON_RESUME}
    for key, (before, after) in old.differences(new).items():
        if key not in changeable:
            raise InputError(
                f"the run in {folder} has {key} {before}, not {after}: leave that out to resume it, or "
                "choose another folder",
                code="run-has-another-config",
            )
    return new


def add_defaults(values: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a new run: `recipe` updated with `values`, and the optimizer's default rate."""
    merged = _deep_merge(recipe, values)
    train = check_mapping(merged.get("train") or {}, "train")
    optimizer = train.get("optimizer", TrainConfig.optimizer)
    if not isinstance(optimizer, str) or optimizer not in DEFAULT_LR:
        raise unknown("train.optimizer", str(optimizer), DEFAULT_LR)
    return _deep_merge({"train": {"lr": DEFAULT_LR[optimizer]}}, merged)


def print_result(folder: Path, json: bool) -> None:
    from qkflow.measures.language import format_eval_result
    from qkflow.training.run_dir import RESULT_FILE, check_result, read_result

    result = read_result(folder) or {}
    if json:
        console.emit_json({"folder": str(folder), **result})
        return
    for name in ("parameters", "tokens", "seconds", "loss", "perplexity", "bits_per_byte"):
        if name not in result or (result[name] is None and name not in ("perplexity", "bits_per_byte")):
            raise InputError(
                f"{folder / RESULT_FILE} has no '{name}': remove the file to train again",
                code="incomplete-result",
            )
    check_result(result, folder / RESULT_FILE)
    speed = result["tokens"] / max(result["seconds"], 1e-9)
    lines = [
        f"{folder}: {result['parameters']:,} parameters, {result['tokens']:,} tokens in "
        f"{result['seconds']:.0f} s of training ({speed:,.0f} tokens/s)",
        f"validation: {format_eval_result(result)}",
        f"next: qkflow generate {folder} --prompt '...'   qkflow probe {folder} --text '...'",
    ]
    console.out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


class _ProgressCallback(Callback):
    """Shows a progress bar with tokens per second and losses on stderr."""

    def __init__(self, folder: Path) -> None:
        from rich.progress import TextColumn

        self.is_main = True
        self._folder = folder
        self._bar = console.progress_bar(TextColumn("{task.fields[losses]}"))
        self._task: Any = None
        self._train_text = ""
        self._eval_text = ""

    def __enter__(self) -> _ProgressCallback:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:  # stopping a bar that never started prints an empty line
            self._bar.stop()

    def on_start(self, trainer: Trainer) -> None:
        self.is_main = trainer.dist_context.is_main
        if not self.is_main:
            return
        total = trainer.budget.steps or round(trainer.budget.seconds or 0)
        self._task = self._bar.add_task(
            f"training {self._folder.name}", total=total, completed=trainer.step, losses=""
        )
        self._bar.start()

    def on_step(self, trainer: Trainer, loss: Any) -> None:
        if self._task is not None:
            seconds = trainer.budget.seconds
            done = trainer.step if seconds is None else round(min(trainer.train_seconds, seconds))
            self._bar.update(self._task, completed=done)

    def on_metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            self._train_text = f"{row['tokens_per_second']:,.0f} tokens/s  loss {row['loss']:.3f}"
        elif row["kind"] == "eval":
            self._eval_text = f"  validation {row['loss']:.3f}"
        self._bar.update(self._task, losses=self._train_text + self._eval_text)

    def on_message(self, message: str) -> None:
        self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)


def _read_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    RunConfig.load(path)  # its errors name the file
    values: dict[str, Any] = read_yaml(path)
    return values


def _parse_assignments(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return assignments such as `train.clip=0.5` as a nested mapping."""
    merged: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not 1 <= key.count(".") < MAX_DEPTH:
            raise InputError(
                f"--set takes section.key=value, e.g. train.clip=0.5, not {shorten(text)}",
                code="invalid-assignment",
            )
        nested: Any = parse_yaml(value, f"--set {key}: '{value}'")
        for part in reversed(key.split(".")):
            nested = {part: nested}
        merged = _deep_merge(merged, nested)
    return merged


def _deep_merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _drop_none(values: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        value = _drop_none(value) if isinstance(value, dict) else value
        if value is not None and value != {}:
            kept[key] = value
    return kept
