"""One run, from its config to its result.

A run's folder:

    config.yaml        what to do; the only input
    metrics.jsonl      rows of kind train, eval and probe, as they happen
    checkpoints/       see `state`; removed when the run is finished
    model/             config.json, model.safetensors, tokenizer.json: the trained model
    result.json        written last: its presence means that the run is over
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkflow import files
from qkflow.data import TokenSet, TrainWindows, prepare
from qkflow.errors import InputError
from qkflow.measures.circuits import CircuitTracker, circuit_metrics
from qkflow.measures.language import EvalResult, evaluate_loss
from qkflow.models import Decoder
from qkflow.models.cost import flops_per_token, parameters_by_role
from qkflow.system import collect_env, peak_memory
from qkflow.training import pretrained
from qkflow.training.checkpoint import (
    Checkpoint,
    CheckpointManager,
    CorruptCheckpointError,
    DiskFullError,
    load_checkpoint,
)
from qkflow.training.config import RunConfig
from qkflow.training.distributed import DistContext, init_distributed
from qkflow.training.metrics_log import MetricsLog, check_writers
from qkflow.training.run_dir import lock_run_dir, stop_signals
from qkflow.training.schedule import Budget, crosses_milestone, learning_rate
from qkflow.training.step import NonFiniteError, Stepper

RUN_CONFIG_FILE, RESULT_FILE, CHECKPOINTS_DIR, MODEL_DIR = (
    "config.yaml",
    "result.json",
    "checkpoints",
    "model",
)
PROBE_WINDOWS, PROBE_TOKENS = 2, 128


class StoppedError(Exception):
    """The run was asked to stop, and has saved its state."""


class Callback:
    """Hears what happens in a run; silent unless overridden."""

    def on_start(self, trainer: Trainer) -> None: ...
    def on_step(self, trainer: Trainer, loss: Tensor) -> None: ...
    def on_metrics(self, row: dict[str, Any]) -> None: ...
    def on_message(self, message: str) -> None: ...


def train(
    folder: Path,
    config: RunConfig,
    callback: Callback | None = None,
    *,
    config_to_save: RunConfig | None = None,
) -> dict[str, Any]:
    """Train what `config` says in `folder`, going on from its last checkpoint; the content of result.json.

    `record` is written down as the folder's config, once it is clear that the run can be run: what is refused
    leaves nothing behind.
    Raises StoppedError when stopped by a signal, and NonFiniteError when the loss is no longer a number.
    """
    callback = callback or Callback()
    with init_distributed(config.train.parallel, config.train.device) as team:
        data = _prepare_data(config, team)  # a signal ends this at once: there is no state to save yet
        with stop_signals() as stop:
            run = Trainer(folder, config, data, team, callback, stop)
            with lock_run_dir(folder, team):
                if config_to_save is not None and team.is_main:
                    files.write_atomic(folder / RUN_CONFIG_FILE, config_to_save.to_yaml())
                return run.train()


def _prepare_data(config: RunConfig, dist_context: DistContext) -> TokenSet:
    """The tokens; one process makes them where they are not there yet, the others find them made."""
    wanted = config.data
    if dist_context.is_main:
        prepare(wanted.corpus, wanted.tokenizer)
    dist_context.barrier()
    data = prepare(wanted.corpus, wanted.tokenizer, show_progress=False)
    if wanted.fingerprint is not None and wanted.fingerprint != data.fingerprint:
        raise InputError(
            f"'{wanted.corpus}' has changed: its tokens have the fingerprint {data.fingerprint}, and the "
            f"config asks for {wanted.fingerprint}"
        )
    return data


class Trainer:
    """A run at work. `step` counts finished steps; `seconds` training time, earlier lives included.

    Making one refuses what cannot be run, and writes nothing.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        data: TokenSet,
        dist_context: DistContext,
        callback: Callback,
        stop_event: threading.Event,
    ) -> None:
        self.folder, self.config, self.data, self.dist_context = folder, config, data, dist_context
        self.callback, self.stop_event = callback, stop_event
        train, length = config.train, config.data.seq_len
        check_writers(train.writers)
        self.model_config = config.model_config(data.vocab_size)
        self.windows = TrainWindows(
            data.tokens("train"),
            length,
            train.batch_size,
            train.seed,
            rank=dist_context.rank,
            world_size=dist_context.world_size,
        )
        if train.batch_size % (train.accumulate * dist_context.world_size):
            raise InputError(
                f"a batch of {train.batch_size} windows cannot be cut into {train.accumulate} parts for each of "
                f"{dist_context.world_size} processes"
            )
        self.eval_windows = data.eval_windows("validation", length, train.batch_size, train.eval_tokens)
        self.budget = Budget.from_config(train, length)
        decoder = Decoder(self.model_config, seed=train.seed).to(dist_context.device)
        self.flops_per_token = flops_per_token(decoder, length)
        self.parameters_by_role = parameters_by_role(decoder)
        self.circuit_tracker = CircuitTracker(decoder)
        self.stepper = Stepper(decoder, train, self.windows, dist_context)
        self.checkpoints = CheckpointManager(
            folder / CHECKPOINTS_DIR,
            config.fingerprint(data.fingerprint),
            train.keep_latest_k,
            dist_context,
            self.notify,
        )
        self.step = self._first_step = 0  # of this process
        self.train_seconds = 0.0
        self.step_durations: list[float] = []  # of steps
        self.last_eval: EvalResult | None = None
        self.pending_log: list[
            tuple[float, Tensor, Tensor]
        ] = []  # learning rate, loss, norm of steps not yet logged

    @property
    def tokens(self) -> int:
        return self.step * self.config.train.batch_size * self.config.data.seq_len

    @property
    def progress(self) -> float:
        return self.budget.progress(self.step, self.train_seconds)

    def notify(self, message: str) -> None:
        if self.dist_context.is_main:
            self.callback.on_message(message)

    def train(self) -> dict[str, Any]:
        self._load_checkpoint()
        settings = self.config.to_dict()
        self.metrics = (
            MetricsLog(self.folder, self.step, self.config.train.writers, settings)
            if self.dist_context.is_main
            else None
        )
        self.callback.on_start(self)
        try:
            self._loop()
            return self._finish()
        except NonFiniteError:
            if self.stepper.check_before_update:  # then nothing bad has reached the weights
                self._save_checkpoint()
            raise
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _loop(self) -> None:
        saved = time.monotonic()
        resumed = time.perf_counter()
        while self.progress < 1:
            before = self.progress
            lr = learning_rate(self.config.train, self.budget, self.step, self.train_seconds)
            loss, norm = self.stepper.step(self.step, lr, before)
            self.step += 1
            self.pending_log.append((lr, loss, norm))
            self.callback.on_step(self, loss)
            log, evaluate, probe, save = self._due_actions(before, saved)
            if not self.stepper.check_before_update and not (
                log or evaluate or probe or self._local_save_or_stop(save)
            ):
                continue  # let the device work ahead: its clock is read when there is something to say
            resumed = self._record_time(resumed)
            stop, save = self.dist_context.any_rank(self.stop_event.is_set(), save)
            if log or evaluate or save or stop:
                self._log()
            if evaluate:
                self._evaluate()
            if probe:
                self._probe()
            if stop or (save and self.progress < 1):
                self._save_checkpoint()
                saved = time.monotonic()
            if stop and self.progress < 1:
                raise StoppedError(f"stopped at step {self.step}, and its state is saved")
            if evaluate or probe or save:
                resumed = time.perf_counter()

    def _local_save_or_stop(self, save: bool) -> bool:
        """Reasons to pause that other processes, if there are any, may not have at the same step."""
        by_step = self.config.train.save_every is not None
        return (save and by_step) or (
            self.dist_context.world_size == 1 and (save or self.stop_event.is_set())
        )

    def _due_actions(self, progress_before: float, last_save_time: float) -> tuple[bool, bool, bool, bool]:
        """What is to be done after this step: log, evaluate, probe, save."""
        train, last = self.config.train, self.progress >= 1
        every = train.log_every or max(1, (self.budget.steps or 1000) // 200)
        if train.eval_every:
            evaluate = last or self.step % train.eval_every == 0
        else:
            evaluate = crosses_milestone(progress_before, self.progress, train.evaluations)
        probe = (
            evaluate
            if train.probe_every is None
            else bool(train.probe_every) and self.step % train.probe_every == 0
        )
        if train.save_every:
            save = self.step % train.save_every == 0
        else:
            save = self.dist_context.is_main and time.monotonic() - last_save_time > 60 * train.save_minutes
        return last or self.step % every == 0, evaluate, probe, save

    def _record_time(self, start_time: float) -> float:
        """Add the time since `resumed`, spent on the steps not yet on the clock."""
        if self.dist_context.device.type != "cpu":
            torch.get_device_module(self.dist_context.device).synchronize()
        now = time.perf_counter()
        steps = max(1, self.step - len(self.step_durations) - self._first_step)
        self.step_durations += [(now - start_time) / steps] * steps
        self.train_seconds += now - start_time
        if self.budget.seconds is not None:
            self.train_seconds = self.dist_context.broadcast(
                self.train_seconds
            )  # all must stop at the same step
        return now

    def _log(self) -> None:
        if not self.pending_log:
            return
        first = self.step - len(self.pending_log)
        losses, norms = (
            [float(x) for x in column] for column in list(zip(*self.pending_log, strict=True))[1:]
        )
        for number, ((lr, _, _), loss, norm) in enumerate(
            zip(self.pending_log, losses, norms, strict=True), first
        ):
            self.stepper.check_finite(number, lr, loss, norm)
        recent = self.step_durations[-len(self.pending_log) :]
        self._write_metrics(
            "train",
            loss=statistics.fmean(losses),
            lr=self.pending_log[-1][0],
            grad_norm=statistics.fmean(norms),
            tokens_per_second=self.tokens / self.step * len(recent) / max(sum(recent), 1e-9),
        )
        self.pending_log = []

    def _evaluate(self) -> None:
        train = self.config.train
        loss_sum = self.stepper.eval_loss_fn()
        self.last_eval = evaluate_loss(
            self.stepper.decoder, self.eval_windows, precision=train.precision, loss_sum=loss_sum
        )
        self._write_metrics("eval", flops=self.tokens * self.flops_per_token, **self.last_eval.to_dict())

    def _probe(self) -> None:
        """Where attention goes, on a few windows that never change; how large its circuits are and how fast
        they move."""
        if self.dist_context.is_sharded or not self.dist_context.is_main:  # a shard alone cannot run a layer
            return
        from qkflow.measures.attention import probe_attention, summarize_probe
        from qkflow.measures.slow_path import slow_path_metrics

        inputs, _ = next(iter(self.eval_windows))
        ids = torch.from_numpy(inputs[:PROBE_WINDOWS, :PROBE_TOKENS]).to(self.dist_context.device)
        decoder = self.stepper.decoder
        found = {
            **summarize_probe(probe_attention(decoder, ids)),
            **circuit_metrics(decoder),
            **self.circuit_tracker.metrics(decoder),
        }
        self._write_metrics("probe", **found, **slow_path_metrics(decoder, ids))

    def _write_metrics(self, kind: str, **values: Any) -> None:
        if self.metrics is None:
            return
        row = {
            "kind": kind,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.train_seconds, 6),
            **values,
        }
        self.metrics.write(row)
        self.callback.on_metrics(row)

    def _save_checkpoint(self) -> None:
        """Write a checkpoint; where there is no room for one, say so and go on with the one before."""
        if self.metrics is not None:
            self.metrics.sync()
        record = {
            "seconds": self.train_seconds,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        try:
            self.checkpoints.save(self.step, self.stepper.state_dict(), record)
        except DiskFullError as full:
            if self.stop_event.is_set():
                raise
            self.notify(f"{full}; training goes on, but a stop now would go back to the checkpoint before")

    def _load_checkpoint(self) -> None:
        found = self.checkpoints.latest()
        if found is None:
            if self.dist_context.is_main:
                self.checkpoints.ensure_disk_space(
                    self.stepper.state_dict()
                )  # said now rather than after hours
            return
        try:
            load_checkpoint(found, self.stepper.state_dict())
        except CorruptCheckpointError as damaged:
            raise InputError(f"{damaged}: it is not a checkpoint of this model") from None
        self.step = self._first_step = found.step
        self.train_seconds = float(found.manifest["seconds"])
        self._warn_if_environment_changed(found)

    def _warn_if_environment_changed(self, checkpoint: Checkpoint) -> None:
        self.notify(f"going on from step {checkpoint.step}")
        for name, now in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
            if checkpoint.manifest[name] != now:
                self.notify(
                    f"the checkpoint was made with {name} {checkpoint.manifest[name]}, now it is {now}: "
                    "the run will end within rounding of where it would have, not bit for bit"
                )

    def _finish(self) -> dict[str, Any]:
        """Write the model, then the result; only then are the checkpoints of no more use."""
        if self.last_eval is None:  # killed after the last step
            self._evaluate()
        assert self.last_eval is not None
        weights = pretrained.full_state_dict(self.stepper.decoder)
        result = {
            "status": "finished",
            "error": None,
            **self.last_eval.to_dict(),
            "tokens": self.tokens,
            "steps": self.step,
            "seconds": self.train_seconds,
            "step_seconds": statistics.median(
                self.step_durations or [self.train_seconds / max(1, self.step)]
            ),
            "peak_memory_bytes": peak_memory(self.dist_context.device),
            "parameters": sum(self.parameters_by_role.values()),
            "parameters_by_role": self.parameters_by_role,
            "flops_per_token": self.flops_per_token,
            "data": {"name": self.data.name, "fingerprint": self.data.fingerprint},
            "environment": collect_env(self.dist_context.device)
            | {"processes": self.dist_context.world_size},
        }
        if self.dist_context.is_main:
            length = self.config.data.seq_len
            pretrained.save_model(
                self.folder / MODEL_DIR, self.model_config, weights, self.data.tokenizer, length=length
            )
            files.write_json(self.folder / RESULT_FILE, result)
            shutil.rmtree(self.folder / CHECKPOINTS_DIR, ignore_errors=True)
        self.dist_context.barrier()
        return result


def read_result(folder: Path) -> dict[str, Any] | None:
    """What result.json says; None where there is none, or a damaged one."""
    try:
        result = json.loads((folder / RESULT_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def write_failure(folder: Path, error: str) -> None:
    files.write_json(folder / RESULT_FILE, {"status": "failed", "error": error})


def time_left(trainer: Trainer) -> float | None:
    """Seconds of training still to come, from the pace so far."""
    if not trainer.step_durations or not trainer.progress:
        return None
    if trainer.budget.seconds is not None:
        return max(0.0, trainer.budget.seconds - trainer.train_seconds)
    return statistics.median(trainer.step_durations[-50:]) * math.ceil(
        (trainer.budget.steps or 0) - trainer.step
    )
