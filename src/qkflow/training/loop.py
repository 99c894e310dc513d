"""The training loop, from a config to a result. `run_dir` describes the files of a run."""

from __future__ import annotations

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
from qkflow.data import EvalWindows, TokenSet, TrainWindows, prepare
from qkflow.errors import InputError
from qkflow.files import DiskFullError
from qkflow.measures.circuits import CircuitTracker
from qkflow.measures.language import EvalResult, evaluate_loss
from qkflow.models import Decoder
from qkflow.models.cost import check_memory, flops_per_token, parameters_by_role
from qkflow.system import has_bfloat16_instructions
from qkflow.training.callbacks import Callback
from qkflow.training.checkpoint import (
    Checkpoint,
    CheckpointManager,
    CorruptCheckpointError,
    load_checkpoint,
)
from qkflow.training.config import RunConfig
from qkflow.training.distributed import DistContext, init_distributed
from qkflow.training.metrics_log import MetricsLog, check_writers
from qkflow.training.outputs import build_result, save_outputs
from qkflow.training.pretrained import full_state_dict
from qkflow.training.run_dir import (
    CHECKPOINTS_DIR,
    RUN_CONFIG_FILE,
    lock_run_dir,
    stop_signals,
)
from qkflow.training.schedule import Budget, crosses_milestone, learning_rate
from qkflow.training.step import NonFiniteError, Stepper

PROBE_WINDOWS, PROBE_TOKENS = 2, 128


class StoppedError(Exception):
    """The run was stopped by a signal and has saved a checkpoint."""


def train(
    folder: Path,
    config: RunConfig,
    callback: Callback | None = None,
    *,
    config_to_save: RunConfig | None = None,
) -> dict[str, Any]:
    """Train in `folder`, resuming from its last checkpoint. Return the content of result.json.

    `config_to_save` is written to the folder after all checks, so that a config with errors writes nothing.
    Raise StoppedError after a signal, NonFiniteError if the loss becomes NaN or infinite, and DiskFullError
    if metrics, model or result cannot be written; the last checkpoint is then intact.
    """
    callback = callback or Callback()
    with init_distributed(config.train.parallel, config.train.device) as dist_context:
        data = _prepare_data(config, dist_context)  # before stop_signals: a signal interrupts it at once
        with stop_signals() as stop:
            trainer = Trainer(folder, config, data, dist_context, callback, stop)
            with lock_run_dir(folder, dist_context):
                if config_to_save is not None and dist_context.is_main:
                    files.write_atomic(folder / RUN_CONFIG_FILE, config_to_save.to_yaml())
                try:
                    return trainer.train()
                except OSError as error:
                    if files.is_disk_full(error):
                        raise trainer.disk_full_error(error) from error
                    raise


def _prepare_data(config: RunConfig, dist_context: DistContext) -> TokenSet:
    """Return the prepared corpus; the main process prepares it, the others read the cache."""
    corpus, tokenizer, expected = config.data.corpus, config.data.tokenizer, config.data.fingerprint
    data = dist_context.run_on_main(lambda: prepare(corpus, tokenizer))
    data = data or prepare(corpus, tokenizer, show_progress=False)
    if expected is not None and expected != data.fingerprint:
        raise InputError(
            f"'{corpus}' has changed: data.fingerprint is {expected}, but its tokens have {data.fingerprint}",
            code="data-changed",
        )
    return data


class Trainer:
    """Trains one run. `step` counts finished steps, `train_seconds` training time, both over all resumes.

    The constructor raises InputError for a config that cannot be run, and writes nothing.
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
        train, seq_len = config.train, config.data.seq_len
        check_writers(train.writers)
        if train.precision == "bf16" and not has_bfloat16_instructions(dist_context.device):
            self.notify("train.precision bf16 is emulated on this CPU, about ten times slower than fp32")
        self.model_config = config.model_config(data.vocab_size)
        self.windows = TrainWindows(
            data.tokens("train"),
            seq_len,
            train.batch_size,
            train.seed,
            rank=dist_context.rank,
            world_size=dist_context.world_size,
            vocab_size=data.vocab_size,
        )
        if train.batch_size % (train.accumulate * dist_context.world_size):
            raise InputError(
                f"train.batch_size {train.batch_size} is not a multiple of train.accumulate "
                f"{train.accumulate} times {dist_context.world_size} processes",
                code="batch-not-divisible",
            )
        self.eval_windows = data.eval_windows("validation", seq_len, train.batch_size, train.eval_tokens)
        final_tokens = train.final_eval_tokens or train.eval_tokens
        self.final_eval_windows = data.eval_windows("validation", seq_len, train.batch_size, final_tokens)
        self.budget = Budget.from_config(train, seq_len)
        check_memory(self.model_config)
        decoder = Decoder(self.model_config, seed=train.seed).to(dist_context.device)
        self.flops_per_token = flops_per_token(decoder, seq_len)
        self.parameters_by_role = parameters_by_role(decoder)
        self.circuit_tracker = CircuitTracker(decoder)
        self.stepper = Stepper(decoder, train, self.windows, dist_context, self.budget.steps)
        self.checkpoints = CheckpointManager(
            folder / CHECKPOINTS_DIR,
            config.fingerprint(data.fingerprint),
            train.keep_latest_k,
            dist_context,
            self.notify,
        )
        self.step = self._first_step = 0  # _first_step: after the resume
        self.train_seconds = 0.0
        self.step_durations: list[float] = []  # in seconds, since the resume
        self.last_eval: EvalResult | None = None
        # learning rate, loss and gradient norm of steps that are not yet logged
        self.pending_log: list[tuple[float, Tensor, Tensor]] = []

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
            if self.stepper.check_before_update and self._weights_are_finite():
                self._save_checkpoint()
            raise
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _loop(self) -> None:
        last_save_time = time.monotonic()
        start_time = time.perf_counter()
        checked = self.progress  # at the last check for due actions
        while self.progress < 1:
            lr = learning_rate(self.config.train, self.budget, self.step, self.train_seconds)
            loss, norm = self.stepper.step(self.step, lr, self.progress)
            self.step += 1
            self.pending_log.append((lr, loss, norm))
            self.callback.on_step(self, loss)
            if not self._needs_sync(checked, last_save_time):
                continue
            start_time = self._record_time(start_time)
            log, evaluate, probe, save = self._due_actions(checked, last_save_time)
            checked = self.progress
            stop, save = self.dist_context.any_rank(self.stop_event.is_set(), save)
            if log or evaluate or save or stop:
                self._log()
            if evaluate:
                self._evaluate()
            if probe:
                self._probe()
            if stop or (save and self.progress < 1):
                self._save_checkpoint()
                last_save_time = time.monotonic()
            if stop and self.progress < 1:
                raise StoppedError(f"stopped at step {self.step} with a checkpoint")
            if evaluate or probe or save:
                start_time = time.perf_counter()

    def _needs_sync(self, progress_before: float, last_save_time: float) -> bool:
        """Return whether to wait for the device after this step, the same in all processes.

        Otherwise the device queue stays full. With several processes a save by time or a signal waits for the
        next synchronization: clocks and signals differ between them.
        """
        if self.stepper.check_before_update:
            return True
        log, evaluate, probe, save = self._due_actions(progress_before, last_save_time)
        if self.dist_context.world_size > 1:
            save = save and self.config.train.save_every is not None
            return log or evaluate or probe or save
        return log or evaluate or probe or save or self.stop_event.is_set()

    def _due_actions(self, progress_before: float, last_save_time: float) -> tuple[bool, bool, bool, bool]:
        """Return whether to log, evaluate, probe and save after this step."""
        train, last = self.config.train, self.progress >= 1
        every = train.log_every or max(1, (self.budget.steps or 1000) // 200)
        if train.eval_every:
            evaluate = last or self.step % train.eval_every == 0
        else:
            evaluate = crosses_milestone(progress_before, self.progress, train.evaluations)
        probe = (
            evaluate
            if train.probe_every is None
            else bool(train.probe_every) and (last or self.step % train.probe_every == 0)
        )
        if train.save_every:
            save = self.step % train.save_every == 0
        else:
            save = self.dist_context.is_main and time.monotonic() - last_save_time > 60 * train.save_minutes
        return last or self.step % every == 0, evaluate, probe, save

    def _record_time(self, start_time: float) -> float:
        """Add the time since `start_time`, divided among the steps since then. Return the current time."""
        if self.dist_context.device.type != "cpu":
            torch.get_device_module(self.dist_context.device).synchronize()
        now = time.perf_counter()
        steps = max(1, self.step - len(self.step_durations) - self._first_step)
        self.step_durations += [(now - start_time) / steps] * steps
        self.train_seconds += now - start_time
        if self.budget.seconds is not None:
            # all processes must stop at the same step
            self.train_seconds = self.dist_context.broadcast(self.train_seconds)
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
            loss_max=max(losses),
            grad_norm_max=max(norms),
            tokens_per_second=self.tokens / self.step * len(recent) / max(sum(recent), 1e-9),
        )
        self.pending_log = []

    def _evaluate(self) -> None:
        """Write a point of the loss curve; all points are measured on the same windows."""
        self.last_eval = self._evaluate_on(self.eval_windows)
        self._write_metrics("eval", flops=self.tokens * self.flops_per_token, **self.last_eval.to_dict())

    def _evaluate_on(self, windows: EvalWindows) -> EvalResult:
        result = evaluate_loss(
            self.stepper.decoder,
            windows,
            precision=self.config.train.precision,
            loss_sum=self.stepper.eval_loss_fn(),
        )
        if not math.isfinite(result.loss):  # the last update overflowed
            raise NonFiniteError(
                f"the validation loss is not finite after step {self.step}: try a lower learning rate"
            )
        return result

    def _weights_are_finite(self) -> bool:
        return all(bool(weight.isfinite().all()) for weight in self.stepper.decoder.parameters())

    def _probe(self) -> None:
        """Write attention and circuit metrics, measured on a fixed few windows."""
        if self.dist_context.is_sharded or not self.dist_context.is_main:  # FSDP cannot run in one process
            return
        from qkflow.measures.probes import probe_metrics

        inputs, _ = next(iter(self.eval_windows))
        ids = torch.from_numpy(inputs[:PROBE_WINDOWS, :PROBE_TOKENS]).to(self.dist_context.device)
        try:
            metrics = probe_metrics(self.stepper.decoder, ids, self.circuit_tracker)
        except torch.linalg.LinAlgError:  # the last update overflowed: singular values of infinite weights
            return
        self._write_metrics("probe", **metrics)

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
        """Write a checkpoint. If the disk is full, report it and continue, unless the run is stopping."""
        if self.metrics is not None:
            self.metrics.sync()
        metadata = {
            "seconds": self.train_seconds,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        try:
            self.checkpoints.save(self.step, self.stepper.state_dict(), metadata)
        except DiskFullError as error:
            if self.stop_event.is_set():
                raise
            self.notify(f"{error}; training continues without this checkpoint")

    def _load_checkpoint(self) -> None:
        checkpoint = self.checkpoints.latest()
        if checkpoint is None:
            if self.dist_context.is_main:  # a full disk is reported now, not after hours
                self.checkpoints.ensure_disk_space(self.stepper.state_dict())
            return
        try:
            load_checkpoint(checkpoint, self.stepper.state_dict())
        except CorruptCheckpointError as error:
            raise InputError(
                f"{error}: it is not a checkpoint of this model", code="checkpoint-of-another-model"
            ) from None
        self.step = self._first_step = checkpoint.step
        self.train_seconds = float(checkpoint.manifest["seconds"])
        self.notify(f"resuming from step {checkpoint.step}")
        self._warn_if_environment_changed(checkpoint)

    def _warn_if_environment_changed(self, checkpoint: Checkpoint) -> None:
        for name, now in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
            if checkpoint.manifest[name] != now:
                self.notify(
                    f"the checkpoint was saved with {name} {checkpoint.manifest[name]}, now it is {now}: the "
                    "result will be equal up to rounding, not bit for bit"
                )

    def _finish(self) -> dict[str, Any]:
        """Write the model, then the result, then remove the checkpoints."""
        if self.last_eval is None:  # killed after the last step
            self._evaluate()
        assert self.last_eval is not None
        final_eval = self.last_eval
        if self.config.train.final_eval_tokens is not None:
            final_eval = self._evaluate_on(self.final_eval_windows)
        weights = full_state_dict(self.stepper.decoder)
        result = build_result(self, final_eval)
        if self.dist_context.is_main:
            save_outputs(self, weights, result)
            shutil.rmtree(self.folder / CHECKPOINTS_DIR, ignore_errors=True)
        self.dist_context.barrier()
        return result

    def disk_full_error(self, error: OSError) -> DiskFullError:
        """Return the error that says how to finish a run whose files do not fit on the disk."""
        reason = error if isinstance(error, DiskFullError) else f"the disk of {self.folder} is full"
        last = self.checkpoints.last_step()
        start = "starts again" if last is None else f"resumes from step {last}"
        remedy = f"free some space, then run the same command: it {start} and ends with the same result"
        return DiskFullError(f"{reason}; {remedy}")
