"""Checkpoints for exact resume.

    checkpoints/step-00000400/state.safetensors   tensors (FSDP: one `shard-…` file per process)
                              checkpoint.json     manifest
    checkpoints/.step-00000500.part/              being written

Saved tensors: `model.NAME`, every entry of the decoder's state dict; `optimizer.mean.NAME` and
`optimizer.square.NAME`, the AdamW moments of every parameter it trains; `optimizer.momentum.NAME` of every
parameter that Muon trains; `optimizer.steps`, the number of updates. Scalars are stored with shape (1,).

The manifest has `format`, `fingerprint` (of the config and the data, see `RunConfig.fingerprint`), `step`,
`seconds` of training so far, `threads` and `torch` (a change of either is reported on resume), `files` with
the size and sha256 of every other file, and `checksum`, the sha256 of the manifest itself.

Not saved, because they are functions of the config and the step: the learning rate, the batches and the seeds
of all random generators. Metrics are in `metrics.jsonl`.

A checkpoint becomes visible by one rename after all of it is on disk, so a kill at any time leaves the one
before it intact. Nothing is pickled. A single process reads and writes safetensors directly; FSDP uses
`torch.distributed.checkpoint` with safetensors storage, which also redistributes tensors if the number of
processes has changed.
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
from qkflow.errors import InputError, shorten
from qkflow.files import DiskFullError
from qkflow.plain_data import has_layout, read_json
from qkflow.training.distributed import DistContext
from qkflow.training.tensor_file import write_tensors

CHECKPOINT_FORMAT = 2
MANIFEST_FILE = "checkpoint.json"
STATE_FILE = "state.safetensors"
_MANIFEST_LAYOUT = {
    "fingerprint": str,
    "step": int,
    "seconds": float,
    "threads": int,
    "torch": str,
    "files": {str: {"bytes": int, "sha256": str}},
}
RESERVED_DISK_BYTES = 64 << 20  # left free for metrics and the result

MessageHandler = Callable[[str], None]


class CorruptCheckpointError(Exception):
    """A checkpoint file is missing, damaged or incomplete. The message names it."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


class CheckpointManager:
    """Writes, prunes and finds the checkpoints of one run."""

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
        """Return the newest intact checkpoint, or None. Damaged ones are skipped with a message.

        Raise InputError if it was saved with another config or by another version.
        """
        newest = None
        if self.dist_context.is_main:
            self._remove_partial_checkpoints()
            for path in reversed(self._list_checkpoints()):
                try:
                    newest = verify_checkpoint(path)
                    break
                except CorruptCheckpointError as error:
                    self.on_message(f"{error}; falling back to the previous checkpoint")
        newest = self.dist_context.broadcast(newest)
        if newest is not None and newest.manifest["format"] != CHECKPOINT_FORMAT:
            raise InputError(
                f"{newest.path} was saved by another version of qkflow (format {newest.manifest['format']}, "
                f"not {CHECKPOINT_FORMAT}): finish the run with that version, or train in a new folder",
                code="checkpoint-format",
            )
        if newest is not None and newest.manifest["fingerprint"] != self.fingerprint:
            raise InputError(
                f"{newest.path} was saved with another config or other data than {self.folder.parent} has "
                "now: restore the config, or train in a new folder",
                code="checkpoint-of-another-config",
            )
        return newest

    def save(self, step: int, state_dict: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove the oldest. Raise DiskFullError if it does not fit."""
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
        """Call `fn` in every process, or in the main one. If it fails in one process, raise in all."""
        failure = None
        try:
            if all_ranks or self.dist_context.is_main:
                fn()
        except OSError as error:
            failure = error
        if any(self.dist_context.any_rank(failure is not None)):
            raise DiskFullError(str(failure or "another process could not write its tensors")) from failure

    def _create_staging_dir(self, staging: Path, state_dict: Mapping[str, Tensor]) -> None:
        self.ensure_disk_space(state_dict)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def _commit(self, staging: Path, final: Path, metadata: Mapping[str, Any]) -> None:
        content = {}
        for path in sorted(staging.iterdir()):
            content[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        manifest = {
            "format": CHECKPOINT_FORMAT,
            "fingerprint": self.fingerprint,
            **metadata,
            "files": content,
        }
        files.write_json(staging / MANIFEST_FILE, {**manifest, "checksum": _manifest_checksum(manifest)})
        files.commit_folder(staging, final)
        for path in self._list_checkpoints()[: -self.keep_latest_k]:
            files.remove_folder(path)

    def _list_checkpoints(self) -> list[Path]:
        """Return the paths of all checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name))

    def last_step(self) -> int | None:
        """Return the step of the newest checkpoint, None if there is none. It is not verified."""
        paths = self._list_checkpoints()
        return int(paths[-1].name.removeprefix("step-")) if paths else None

    def remove_older(self) -> bool:
        """Remove all checkpoints but the newest, to make room for the model. Return whether there was one."""
        older = self._list_checkpoints()[:-1]
        for path in older:
            self.on_message(f"the disk is full: removing the older checkpoint {path.name}")
            files.remove_folder(path)
        return bool(older)

    def _remove_partial_checkpoints(self) -> None:
        """Remove incomplete checkpoints of a killed process."""
        for path in self.folder.glob(".step-*.part"):
            shutil.rmtree(path, ignore_errors=True)

    def ensure_disk_space(self, state_dict: Mapping[str, Tensor]) -> None:
        """Remove older checkpoints, never the newest, until one more fits on the disk."""
        size = RESERVED_DISK_BYTES + sum(
            tensor.numel() * tensor.element_size() for tensor in state_dict.values()
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        older = self._list_checkpoints()[:-1]
        while (free := shutil.disk_usage(self.folder).free) < size:
            if not older:
                raise DiskFullError(
                    f"the disk is full: a checkpoint needs {size / 1e6:.0f} MB in {self.folder}, but only "
                    f"{free / 1e6:.0f} MB are free"
                )
            self.on_message(f"the disk is nearly full: removing the older checkpoint {older[0].name}")
            files.remove_folder(older.pop(0))


def verify_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`. Raise CorruptCheckpointError if a checksum does not match."""
    try:
        manifest = read_json(path / MANIFEST_FILE)
        if manifest["format"] != CHECKPOINT_FORMAT:
            return Checkpoint(path, manifest)
        checksum = manifest.pop("checksum")
    except (OSError, ValueError, KeyError, TypeError):
        raise CorruptCheckpointError(f"{path / MANIFEST_FILE} is missing or damaged") from None
    if checksum != _manifest_checksum(manifest) or not has_layout(manifest, _MANIFEST_LAYOUT):
        raise CorruptCheckpointError(f"{path / MANIFEST_FILE} is damaged: its checksum does not match")
    for name, entry in manifest["files"].items():
        file = path / files.check_file_name(f"{path / MANIFEST_FILE}: the file", name)
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise CorruptCheckpointError(f"{file} is missing or has the wrong size")
        if file_sha256(file) != entry["sha256"]:
            raise CorruptCheckpointError(f"{file} is damaged: its checksum does not match")
    return Checkpoint(path, manifest)


def load_checkpoint(checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint into the tensors of `state_dict`; their sharding may differ from the saved one.

    Raise CorruptCheckpointError if a tensor is missing or has another shape.
    """
    single = checkpoint.path / STATE_FILE
    if single.is_file() and not any(hasattr(tensor, "full_tensor") for tensor in state_dict.values()):
        _read_state(single, state_dict)
    else:
        _read_sharded_state(checkpoint.path, state_dict)


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
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = _scalars_as_1d(state_dict)
            sizes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check_shapes(path, sizes, tensors)
            for name, tensor in tensors.items():
                # Copied instead of memory-mapped: the rounding of CPU kernels depends on alignment.
                tensor.copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise _unreadable(path, error) from None


def _read_sharded_state(folder: Path, state_dict: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as distributed_load

    try:
        reader = HuggingFaceStorageReader(str(folder))
        stored = reader.read_metadata().state_dict_metadata
        sizes = {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}
        _check_shapes(folder, sizes, _scalars_as_1d(state_dict))
        distributed_load(
            dict(_scalars_as_1d(state_dict)),
            storage_reader=reader,
            no_dist=not torch.distributed.is_initialized(),
        )
    except (SafetensorError, CheckpointException, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder, error) from None


def _unreadable(path: Path, error: BaseException) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} cannot be read ({shorten(' '.join(str(error).split()))})")


def _check_shapes(path: Path, sizes: Mapping[str, tuple[int, ...]], state_dict: Mapping[str, Tensor]) -> None:
    for name, tensor in state_dict.items():
        if name not in sizes:
            raise CorruptCheckpointError(f"{path} does not contain '{name}'")
        if sizes[name] != tuple(tensor.shape):
            raise CorruptCheckpointError(
                f"{path} has '{name}' with the shape {sizes[name]}, not {tuple(tensor.shape)}"
            )


def _scalars_as_1d(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """View scalars with shape (1,): distributed checkpoints address tensors by offsets, which need a dim."""
    return {name: tensor.view(1) if tensor.dim() == 0 else tensor for name, tensor in state_dict.items()}
