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
from qkflow.training.distributed import DistContext
from qkflow.training.tensor_file import write_tensors

CHECKPOINT_FORMAT = 1
MANIFEST_FILE = "checkpoint.json"
STATE_FILE = "state.safetensors"
RESERVED_DISK_BYTES = 64 << 20  # bytes to leave free on the disk: metrics and result still have to be written

MessageHandler = Callable[[str], None]


class CorruptCheckpointError(Exception):
    """A checkpoint that is not what its record says; the message names the file."""


class DiskFullError(OSError):
    """A checkpoint cannot be written; nothing of it is left, and the ones before are untouched."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


class CheckpointManager:
    """The checkpoints of one run, whose config has the given fingerprint."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        keep_latest_k: int,
        dist_context: DistContext,
        on_message: MessageHandler,
    ) -> None:
        self.folder, self.fingerprint, self.keep_latest_k = folder, fingerprint, keep_latest_k
        self.dist_context, self.on_message = dist_context, on_message

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that can be trusted; damaged ones are named and passed over.

        One that was made with another config is refused.
        """
        found = None
        if self.dist_context.is_main:
            self._remove_partial_checkpoints()
            for path in reversed(self._list_checkpoints()):
                try:
                    found = verify_checkpoint(path)
                    break
                except CorruptCheckpointError as damaged:
                    self.on_message(f"{damaged}; going back to the checkpoint before it")
        found = self.dist_context.broadcast(found)
        if found is not None and found.manifest["fingerprint"] != self.fingerprint:
            raise InputError(
                f"{found.path} was made with another config, or from other data, than the one in "
                f"{self.folder.parent}: put the config back, or train in a new folder"
            )
        return found

    def save(self, step: int, state_dict: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint, then let go of the oldest. Raises DiskFullError with everything as it was."""
        final = self.folder / f"step-{step:08d}"
        staging = files.staging_path(final)
        self._run_or_fail_together(lambda: self._create_staging_dir(staging, state_dict), all_ranks=False)
        try:
            self._run_or_fail_together(lambda: _write_state(staging, state_dict, self.dist_context))
            self._run_or_fail_together(
                lambda: self._commit(staging, final, {**metadata, "step": step}), all_ranks=False
            )
        except DiskFullError:
            if self.dist_context.is_main:
                shutil.rmtree(staging, ignore_errors=True)
            raise

    def _run_or_fail_together(self, fn: Callable[[], None], *, all_ranks: bool = True) -> None:
        """Act in every process, or in the leading one; if one fails, all do."""
        problem = None
        try:
            if all_ranks or self.dist_context.is_main:
                fn()
        except OSError as error:
            problem = error
        if any(self.dist_context.any_rank(problem is not None)):
            raise DiskFullError(str(problem or "another process could not write its part")) from problem

    def _create_staging_dir(self, staging: Path, state_dict: Mapping[str, Tensor]) -> None:
        self.ensure_disk_space(state_dict)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def _commit(self, staging: Path, final: Path, metadata: Mapping[str, Any]) -> None:
        content = {}
        for path in sorted(staging.iterdir()):
            content[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        sealed = {"format": CHECKPOINT_FORMAT, "fingerprint": self.fingerprint, **metadata, "files": content}
        files.write_json(staging / MANIFEST_FILE, {**sealed, "seal": _manifest_checksum(sealed)})
        files.commit_folder(staging, final)
        for path in self._list_checkpoints()[: -self.keep_latest_k]:
            files.remove_folder(path)

    def _list_checkpoints(self) -> list[Path]:
        """Checkpoints from the oldest to the newest."""
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name))

    def _remove_partial_checkpoints(self) -> None:
        """Remove what a killed process left half-written."""
        for path in self.folder.glob(".step-*.part"):
            shutil.rmtree(path, ignore_errors=True)

    def ensure_disk_space(self, state_dict: Mapping[str, Tensor]) -> None:
        """Make sure that a checkpoint fits, giving up older ones but never the newest."""
        size = RESERVED_DISK_BYTES + sum(
            tensor.numel() * tensor.element_size() for tensor in state_dict.values()
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        older = self._list_checkpoints()[:-1]
        while (free := shutil.disk_usage(self.folder).free) < size:
            if not older:
                raise DiskFullError(
                    f"the disk is full: a checkpoint needs {size / 1e6:.0f} MB in {self.folder}, and "
                    f"{free / 1e6:.0f} MB are free"
                )
            self.on_message(f"the disk is nearly full: removing the older checkpoint {older[0].name}")
            files.remove_folder(older.pop(0))


def verify_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte of it checked."""
    try:
        record = json.loads((path / MANIFEST_FILE).read_bytes())
        seal = record.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError):
        raise CorruptCheckpointError(f"{path / MANIFEST_FILE} is missing or damaged") from None
    if seal != _manifest_checksum(record) or record["format"] != CHECKPOINT_FORMAT:
        raise CorruptCheckpointError(f"{path / MANIFEST_FILE} is damaged")
    for name, entry in record["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise CorruptCheckpointError(f"{file} is missing or of the wrong size")
        if file_sha256(file) != entry["sha256"]:
            raise CorruptCheckpointError(
                f"{file} is damaged: its content does not have the recorded checksum"
            )
    return Checkpoint(path, record)


def load_checkpoint(checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint's values into `tensors`, which may be sharded otherwise than when it was made."""
    single = checkpoint.path / STATE_FILE
    if single.is_file() and not any(hasattr(tensor, "full_tensor") for tensor in state_dict.values()):
        _read_state(single, state_dict)
        return
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as distributed_load

    alone = not torch.distributed.is_initialized()
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    distributed_load(dict(_scalars_as_1d(state_dict)), storage_reader=reader, no_dist=alone)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_state(folder: Path, state_dict: Mapping[str, Tensor], dist_context: DistContext) -> None:
    if dist_context.is_sharded:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter
        from torch.distributed.checkpoint import save as distributed_save

        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        distributed_save(dict(_scalars_as_1d(state_dict)), storage_writer=writer)
    elif dist_context.is_main:
        write_tensors(folder / STATE_FILE, _scalars_as_1d(state_dict))


@torch.no_grad()
def _read_state(path: Path, state_dict: Mapping[str, Tensor]) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        stored = set(file.keys())
        for name, tensor in _scalars_as_1d(state_dict).items():
            if name not in stored:
                raise CorruptCheckpointError(f"{path} does not hold '{name}'")
            # copied, not mapped: the kernels' sums depend on how a tensor lies in memory
            tensor.copy_(file.get_tensor(name))


def _scalars_as_1d(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scalars as views of one element: shards are described by offsets, of which a scalar has none."""
    return {name: tensor.view(1) if tensor.dim() == 0 else tensor for name, tensor in state_dict.items()}
