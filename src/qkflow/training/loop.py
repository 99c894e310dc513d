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
from qkflow.measures.circuits import CircuitWatch, circuit_measures
from qkflow.measures.language import Score, score
from qkflow.models import Decoder
from qkflow.models.cost import flops_per_token, parameters_by_role
from qkflow.training import environment, pretrained
from qkflow.training.checkpoint import Checkpoint, Checkpoints, DamagedError, DiskFullError, load
from qkflow.training.config import RunConfig
from qkflow.training.distributed import Team, join
from qkflow.training.metrics_log import Metrics, check_writers
from qkflow.training.run_dir import alone_in, stop_signals
from qkflow.training.schedule import Budget, learning_rate, passes
from qkflow.training.step import NonFiniteError, Stepper

CONFIG, RESULT, CHECKPOINTS, MODEL = "config.yaml", "result.json", "checkpoints", "model"
PROBE_WINDOWS, PROBE_TOKENS = 2, 128


class StoppedError(Exception):
    """The run was asked to stop, and has saved its state."""


class Listener:
    """Hears what happens in a run; silent unless overridden."""

    def begin(self, run: Run) -> None: ...
    def stepped(self, run: Run, loss: Tensor) -> None: ...
    def row(self, row: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


def train(
    folder: Path, config: RunConfig, listener: Listener | None = None, *, record: RunConfig | None = None
) -> dict[str, Any]:
    """Train what `config` says in `folder`, going on from its last checkpoint; the content of result.json.

    `record` is written down as the folder's config, once it is clear that the run can be run: what is refused
    leaves nothing behind.
    Raises StoppedError when stopped by a signal, and NonFiniteError when the loss is no longer a number.
    """
    listener = listener or Listener()
    with join(config.train.parallel, config.train.device) as team:
        data = _prepare(config, team)  # a signal ends this at once: there is no state to save yet
        with stop_signals() as stop:
            run = Run(folder, config, data, team, listener, stop)
            with alone_in(folder, team):
                if record is not None and team.leads:
                    files.write_atomic(folder / CONFIG, record.to_yaml())
                return run.go()


def _prepare(config: RunConfig, team: Team) -> TokenSet:
    """The tokens; one process makes them where they are not there yet, the others find them made."""
    wanted = config.data
    if team.leads:
        prepare(wanted.corpus, wanted.tokenizer)
    team.wait()
    data = prepare(wanted.corpus, wanted.tokenizer, show_progress=False)
    if wanted.fingerprint is not None and wanted.fingerprint != data.fingerprint:
        raise InputError(
            f"'{wanted.corpus}' has changed: its tokens have the fingerprint {data.fingerprint}, and the "
            f"config asks for {wanted.fingerprint}"
        )
    return data


class Run:
    """A run at work. `step` counts finished steps; `seconds` training time, earlier lives included.

    Making one refuses what cannot be run, and writes nothing.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        data: TokenSet,
        team: Team,
        listener: Listener,
        stop: threading.Event,
    ) -> None:
        self.folder, self.config, self.data, self.team = folder, config, data, team
        self.listener, self.stop = listener, stop
        train, length = config.train, config.data.length
        check_writers(train.writers)
        self.model_config = config.model_config(data.vocab_size)
        self.windows = TrainWindows(
            data.tokens("train"), length, train.batch, train.seed, rank=team.rank, world=team.world
        )
        if train.batch % (train.accumulate * team.world):
            raise InputError(
                f"a batch of {train.batch} windows cannot be cut into {train.accumulate} parts for each of "
                f"{team.world} processes"
            )
        self.held_out = data.evaluation("validation", length, train.batch, train.eval_tokens)
        self.budget = Budget.of(train, length)
        decoder = Decoder(self.model_config, seed=train.seed).to(team.device)
        self.flops_per_token = flops_per_token(decoder, length)
        self.parameters_by_role = parameters_by_role(decoder)
        self.watch = CircuitWatch(decoder)
        self.stepper = Stepper(decoder, train, self.windows, team)
        self.checkpoints = Checkpoints(
            folder / CHECKPOINTS, config.fingerprint(data.fingerprint), train.keep, team, self.note
        )
        self.step = self._first = 0  # of this process
        self.seconds = 0.0
        self.durations: list[float] = []  # of steps
        self.last_score: Score | None = None
        self.unlogged: list[
            tuple[float, Tensor, Tensor]
        ] = []  # learning rate, loss, norm of steps not yet logged

    @property
    def tokens(self) -> int:
        return self.step * self.config.train.batch * self.config.data.length

    @property
    def progress(self) -> float:
        return self.budget.progress(self.step, self.seconds)

    def note(self, text: str) -> None:
        if self.team.leads:
            self.listener.note(text)

    def go(self) -> dict[str, Any]:
        self._restore()
        settings = self.config.to_dict()
        self.metrics = (
            Metrics(self.folder, self.step, self.config.train.writers, settings) if self.team.leads else None
        )
        self.listener.begin(self)
        try:
            self._loop()
            return self._finish()
        except NonFiniteError:
            if self.stepper.looks:  # then nothing bad has reached the weights
                self._save()
            raise
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _loop(self) -> None:
        saved = time.monotonic()
        resumed = time.perf_counter()
        while self.progress < 1:
            before = self.progress
            lr = learning_rate(self.config.train, self.budget, self.step, self.seconds)
            loss, norm = self.stepper.step(self.step, lr, before)
            self.step += 1
            self.unlogged.append((lr, loss, norm))
            self.listener.stepped(self, loss)
            log, evaluate, probe, save = self._due(before, saved)
            if not self.stepper.looks and not (log or evaluate or probe or self._alone_wants(save)):
                continue  # let the device work ahead: its clock is read when there is something to say
            resumed = self._lap(resumed)
            stop, save = self.team.agree(self.stop.is_set(), save)
            if log or evaluate or save or stop:
                self._log()
            if evaluate:
                self._evaluate()
            if probe:
                self._probe()
            if stop or (save and self.progress < 1):
                self._save()
                saved = time.monotonic()
            if stop and self.progress < 1:
                raise StoppedError(f"stopped at step {self.step}, and its state is saved")
            if evaluate or probe or save:
                resumed = time.perf_counter()

    def _alone_wants(self, save: bool) -> bool:
        """Reasons to pause that other processes, if there are any, may not have at the same step."""
        by_step = self.config.train.save_every is not None
        return (save and by_step) or (self.team.world == 1 and (save or self.stop.is_set()))

    def _due(self, before: float, saved: float) -> tuple[bool, bool, bool, bool]:
        """What is to be done after this step: log, evaluate, probe, save."""
        train, last = self.config.train, self.progress >= 1
        every = train.log_every or max(1, (self.budget.steps or 1000) // 200)
        if train.eval_every:
            evaluate = last or self.step % train.eval_every == 0
        else:
            evaluate = passes(before, self.progress, train.evaluations)
        probe = (
            evaluate
            if train.probe_every is None
            else bool(train.probe_every) and self.step % train.probe_every == 0
        )
        if train.save_every:
            save = self.step % train.save_every == 0
        else:
            save = self.team.leads and time.monotonic() - saved > 60 * train.save_minutes
        return last or self.step % every == 0, evaluate, probe, save

    def _lap(self, resumed: float) -> float:
        """Add the time since `resumed`, spent on the steps not yet on the clock."""
        if self.team.device.type != "cpu":
            torch.get_device_module(self.team.device).synchronize()
        now = time.perf_counter()
        steps = max(1, self.step - len(self.durations) - self._first)
        self.durations += [(now - resumed) / steps] * steps
        self.seconds += now - resumed
        if self.budget.seconds is not None:
            self.seconds = self.team.share(self.seconds)  # all must stop at the same step
        return now

    def _log(self) -> None:
        if not self.unlogged:
            return
        first = self.step - len(self.unlogged)
        losses, norms = ([float(x) for x in column] for column in list(zip(*self.unlogged, strict=True))[1:])
        for number, ((lr, _, _), loss, norm) in enumerate(
            zip(self.unlogged, losses, norms, strict=True), first
        ):
            self.stepper.check(number, lr, loss, norm)
        recent = self.durations[-len(self.unlogged) :]
        self._write(
            "train",
            loss=statistics.fmean(losses),
            lr=self.unlogged[-1][0],
            grad_norm=statistics.fmean(norms),
            tokens_per_second=self.tokens / self.step * len(recent) / max(sum(recent), 1e-9),
        )
        self.unlogged = []

    def _evaluate(self) -> None:
        train = self.config.train
        loss_sum = self.stepper.evaluate()
        self.last_score = score(
            self.stepper.decoder, self.held_out, precision=train.precision, loss_sum=loss_sum
        )
        self._write("eval", flops=self.tokens * self.flops_per_token, **self.last_score.to_dict())

    def _probe(self) -> None:
        """Where attention goes, on a few windows that never change; how large its circuits are and how fast
        they move."""
        if self.team.sharded or not self.team.leads:  # a shard alone cannot run a layer
            return
        from qkflow.measures.attention import probe, summary
        from qkflow.measures.slow_path import slow_measures

        inputs, _ = next(iter(self.held_out))
        ids = torch.from_numpy(inputs[:PROBE_WINDOWS, :PROBE_TOKENS]).to(self.team.device)
        decoder = self.stepper.decoder
        found = {**summary(probe(decoder, ids)), **circuit_measures(decoder), **self.watch.look(decoder)}
        self._write("probe", **found, **slow_measures(decoder, ids))

    def _write(self, kind: str, **values: Any) -> None:
        if self.metrics is None:
            return
        row = {
            "kind": kind,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 6),
            **values,
        }
        self.metrics.write(row)
        self.listener.row(row)

    def _save(self) -> None:
        """Write a checkpoint; where there is no room for one, say so and go on with the one before."""
        if self.metrics is not None:
            self.metrics.sync()
        record = {"seconds": self.seconds, "threads": torch.get_num_threads(), "torch": torch.__version__}
        try:
            self.checkpoints.save(self.step, self.stepper.tensors(), record)
        except DiskFullError as full:
            if self.stop.is_set():
                raise
            self.note(f"{full}; training goes on, but a stop now would go back to the checkpoint before")

    def _restore(self) -> None:
        found = self.checkpoints.latest()
        if found is None:
            if self.team.leads:
                self.checkpoints.make_room(self.stepper.tensors())  # said now rather than after hours
            return
        try:
            load(found, self.stepper.tensors())
        except DamagedError as damaged:
            raise InputError(f"{damaged}: it is not a checkpoint of this model") from None
        self.step = self._first = found.step
        self.seconds = float(found.record["seconds"])
        self._warn_of_changes(found)

    def _warn_of_changes(self, found: Checkpoint) -> None:
        self.note(f"going on from step {found.step}")
        for name, now in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
            if found.record[name] != now:
                self.note(
                    f"the checkpoint was made with {name} {found.record[name]}, now it is {now}: "
                    "the run will end within rounding of where it would have, not bit for bit"
                )

    def _finish(self) -> dict[str, Any]:
        """Write the model, then the result; only then are the checkpoints of no more use."""
        if self.last_score is None:  # killed after the last step
            self._evaluate()
        assert self.last_score is not None
        weights = pretrained.full_weights(self.stepper.decoder)
        result = {
            "status": "finished",
            "error": None,
            **self.last_score.to_dict(),
            "tokens": self.tokens,
            "steps": self.step,
            "seconds": self.seconds,
            "step_seconds": statistics.median(self.durations or [self.seconds / max(1, self.step)]),
            "peak_memory_bytes": environment.peak_memory(self.team.device),
            "parameters": sum(self.parameters_by_role.values()),
            "parameters_by_role": self.parameters_by_role,
            "flops_per_token": self.flops_per_token,
            "data": {"name": self.data.name, "fingerprint": self.data.fingerprint},
            "environment": environment.describe(self.team.device) | {"processes": self.team.world},
        }
        if self.team.leads:
            length = self.config.data.length
            pretrained.save(
                self.folder / MODEL, self.model_config, weights, self.data.tokenizer, length=length
            )
            files.write_json(self.folder / RESULT, result)
            shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
        self.team.wait()
        return result


def read_result(folder: Path) -> dict[str, Any] | None:
    """What result.json says; None where there is none, or a damaged one."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def write_failure(folder: Path, error: str) -> None:
    files.write_json(folder / RESULT, {"status": "failed", "error": error})


def time_left(run: Run) -> float | None:
    """Seconds of training still to come, from the pace so far."""
    if not run.durations or not run.progress:
        return None
    if run.budget.seconds is not None:
        return max(0.0, run.budget.seconds - run.seconds)
    return statistics.median(run.durations[-50:]) * math.ceil((run.budget.steps or 0) - run.step)
