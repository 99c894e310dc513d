"""Checkpoints: everything a run needs to go on as if it had never stopped.

    checkpoints/step-00000400/state.safetensors   weights and optimizer state, or several `shard-…` files
                              checkpoint.json     step, seconds, config fingerprint; sha256 of the other files
    checkpoints/.step-00000500.part/              being written; of no interest to anybody

A checkpoint appears by one rename, when all of it is on the disk; a kill at any moment leaves the one before.
What is random needs no state: batches and random numbers are functions of the seed and the step.

Nothing here is a pickle. One process reads and writes safetensors directly; sharded processes do so through
`torch.distributed.checkpoint`, with its safetensors storage (its default one pickles its metadata), which
also puts shards together anew where the number of processes has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkflow import files
from qkflow.errors import InputError
from qkflow.training.distributed import Team
from qkflow.training.tensor_file import write_tensors

FORMAT = 1
RECORD = "checkpoint.json"
STATE = "state.safetensors"
SPARE = 64 << 20  # bytes to leave free on the disk: metrics and result still have to be written

Note = Callable[[str], None]


class DamagedError(Exception):
    """A checkpoint that is not what its record says; the message names the file."""


class DiskFullError(OSError):
    """A checkpoint cannot be written; nothing of it is left, and the ones before are untouched."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.record["step"])


class Checkpoints:
    """The checkpoints of one run, whose config has the given fingerprint."""

    def __init__(self, folder: Path, fingerprint: str, keep: int, team: Team, note: Note) -> None:
        self.folder, self.fingerprint, self.keep = folder, fingerprint, keep
        self.team, self.note = team, note

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that can be trusted; damaged ones are named and passed over.

        One that was made with another config is refused.
        """
        found = None
        if self.team.leads:
            self._tidy()
            for path in reversed(self._paths()):
                try:
                    found = verify(path)
                    break
                except DamagedError as damaged:
                    self.note(f"{damaged}; going back to the checkpoint before it")
        found = self.team.share(found)
        if found is not None and found.record["fingerprint"] != self.fingerprint:
            raise InputError(
                f"{found.path} was made with another config, or from other data, than the one in "
                f"{self.folder.parent}: put the config back, or train in a new folder"
            )
        return found

    def save(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Write a checkpoint, then let go of the oldest. Raises DiskFullError with everything as it was."""
        final = self.folder / f"step-{step:08d}"
        staging = final.with_name(f".{final.name}.part")
        self._together(lambda: self._begin(staging, tensors), everybody=False)
        try:
            self._together(lambda: _write(staging, tensors, self.team))
            self._together(lambda: self._finish(staging, final, {**record, "step": step}), everybody=False)
        except DiskFullError:
            if self.team.leads:
                shutil.rmtree(staging, ignore_errors=True)
            raise

    def _together(self, act: Callable[[], None], *, everybody: bool = True) -> None:
        """Act in every process, or in the leading one; if one fails, all do."""
        problem = None
        try:
            if everybody or self.team.leads:
                act()
        except OSError as error:
            problem = error
        if any(self.team.agree(problem is not None)):
            raise DiskFullError(str(problem or "another process could not write its part")) from problem

    def _begin(self, staging: Path, tensors: Mapping[str, Tensor]) -> None:
        self.make_room(tensors)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def _finish(self, staging: Path, final: Path, record: Mapping[str, Any]) -> None:
        content = {}
        for path in sorted(staging.iterdir()):
            content[path.name] = {"bytes": path.stat().st_size, "sha256": checksum(path, durable=True)}
        sealed = {"format": FORMAT, "fingerprint": self.fingerprint, **record, "files": content}
        files.write_json(staging / RECORD, {**sealed, "seal": _seal(sealed)})
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
        os.replace(staging, final)
        files.fsync_folder(self.folder)
        for path in self._paths()[: -self.keep]:
            remove(path)

    def _paths(self) -> list[Path]:
        """Checkpoints from the oldest to the newest."""
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name))

    def _tidy(self) -> None:
        """Remove what a killed process left half-written."""
        for path in self.folder.glob(".step-*.part"):
            shutil.rmtree(path, ignore_errors=True)

    def make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Make sure that a checkpoint fits, giving up older ones but never the newest."""
        size = SPARE + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self.folder.mkdir(parents=True, exist_ok=True)
        older = self._paths()[:-1]
        while (free := shutil.disk_usage(self.folder).free) < size:
            if not older:
                raise DiskFullError(
                    f"the disk is full: a checkpoint needs {size / 1e6:.0f} MB in {self.folder}, and "
                    f"{free / 1e6:.0f} MB are free"
                )
            self.note(f"the disk is nearly full: removing the older checkpoint {older[0].name}")
            remove(older.pop(0))


def verify(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte of it checked."""
    try:
        record = json.loads((path / RECORD).read_bytes())
        seal = record.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError):
        raise DamagedError(f"{path / RECORD} is missing or damaged") from None
    if seal != _seal(record) or record["format"] != FORMAT:
        raise DamagedError(f"{path / RECORD} is damaged")
    for name, entry in record["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise DamagedError(f"{file} is missing or of the wrong size")
        if checksum(file) != entry["sha256"]:
            raise DamagedError(f"{file} is damaged: its content does not have the recorded checksum")
    return Checkpoint(path, record)


def load(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint's values into `tensors`, which may be sharded otherwise than when it was made."""
    single = checkpoint.path / STATE
    if single.is_file() and not any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        _read(single, tensors)
        return
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as distributed_load

    alone = not torch.distributed.is_initialized()
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    distributed_load(dict(_without_scalars(tensors)), storage_reader=reader, no_dist=alone)


def remove(path: Path) -> None:
    """Remove a checkpoint so that no half of it is ever taken for a whole."""
    hidden = path.with_name(f".{path.name}.part")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def checksum(path: Path, *, durable: bool = False) -> str:
    with open(path, "rb") as file:
        if durable:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _write(folder: Path, tensors: Mapping[str, Tensor], team: Team) -> None:
    if team.sharded:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter
        from torch.distributed.checkpoint import save as distributed_save

        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        distributed_save(dict(_without_scalars(tensors)), storage_writer=writer)
    elif team.leads:
        write_tensors(folder / STATE, _without_scalars(tensors))


@torch.no_grad()
def _read(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        stored = set(file.keys())
        for name, tensor in _without_scalars(tensors).items():
            if name not in stored:
                raise DamagedError(f"{path} does not hold '{name}'")
            # copied, not mapped: the kernels' sums depend on how a tensor lies in memory
            tensor.copy_(file.get_tensor(name))


def _without_scalars(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scalars as views of one element: shards are described by offsets, of which a scalar has none."""
    return {name: tensor.view(1) if tensor.dim() == 0 else tensor for name, tensor in tensors.items()}
