"""Distributed training in processes started by `torchrun`.

ddp   every process has the whole model; gradients are averaged (DistributedDataParallel)
fsdp  weights, gradients and optimizer state are sharded over all processes (FSDP2, `fully_shard`)
hsdp  sharded over the processes of one machine, replicated over machines (FSDP2 on a two-dimensional mesh)

`train.batch_size` is the batch of all processes together, so the same config gives the same run for any
number of processes. With one process no mode wraps the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qkflow.errors import InputError
from qkflow.system import resolve_device
from qkflow.training.config import ParallelMode, Precision, TrainConfig

T = TypeVar("T")
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LostProcessError(Exception):
    """Another process of the run has ended, so that a collective operation failed."""


@dataclass(frozen=True)
class DistContext:
    """Rank, device and collective operations of this process. With one process, all of them do nothing."""

    device: torch.device
    mode: ParallelMode = "none"
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP is applied. One process would gather what it already has, for 3 to 7% of a step."""
        return self.mode in ("fsdp", "hsdp") and self.world_size > 1

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward synchronizes gradients; `model` keeps its parameter names."""
        if self.mode == "ddp" and self.world_size > 1:
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model

    def shard(self, model: nn.Module, blocks: Iterable[nn.Module], config: TrainConfig) -> None:
        """Apply FSDP in place: one unit per block and one for the remaining parameters."""
        if not self.is_sharded:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shape = self.mesh_shape(config.shard_degree)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        # Inputs are not cast: the residual stream and the rotation stay in fp32, as under autocast.
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.param_dtype],
            reduce_dtype=DTYPES[config.reduce_dtype],
            cast_forward_inputs=False,
        )
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)

    def mesh_shape(self, shard_degree: int | None = None) -> tuple[int, ...]:
        """Return the shape of the device mesh: (world_size,), for hsdp (replicas, processes per replica)."""
        if self.mode != "hsdp":
            return (self.world_size,)
        degree = shard_degree or _read_count("LOCAL_WORLD_SIZE", self.world_size) or self.world_size
        if self.world_size % degree:
            raise InputError(
                f"hsdp cannot divide {self.world_size} processes into replicas of {degree}: set "
                "train.shard_degree to a divisor",
                code="shard-degree-not-divisor",
            )
        return self.world_size // degree, degree

    @contextmanager
    def gradient_sync(self, model: nn.Module, is_last_microbatch: bool) -> Iterator[None]:
        """Reduce gradients only in the last microbatch of a step."""
        if isinstance(model, nn.parallel.DistributedDataParallel) and not is_last_microbatch:
            with model.no_sync():
                yield
            return
        if self.is_sharded:
            model.set_requires_gradient_sync(is_last_microbatch)  # type: ignore[operator]
        yield

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set in any process."""
        if self.world_size == 1:
            return flags
        return tuple(
            bool(count)
            for count in self.all_reduce_sum(torch.tensor(flags, dtype=torch.int32, device=self.device))
        )

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value in every process."""
        if self.world_size == 1:
            return value
        objects = [value]
        torch.distributed.broadcast_object_list(objects, src=0, device=self.device)
        return objects[0]

    def run_on_main(self, fn: Callable[[], T]) -> T | None:
        """Return `fn()` in the main process and None in the others. Its InputError is raised in all of them.

        The other processes wait for it.
        """
        result, failure = None, None
        if self.is_main:
            try:
                result = fn()
            except InputError as error:
                failure = error
        failure = self.broadcast(failure)
        if failure is not None:
            raise failure
        return result

    def barrier(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier()


def read_rank() -> tuple[int, int, int]:
    """Return WORLD_SIZE, RANK and LOCAL_RANK, which torchrun sets; 1, 0, 0 without it."""
    world_size, rank, local_rank = (
        _read_count(name, default) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))
    )
    if world_size < 1 or (world_size > 1 and not (rank < world_size and local_rank < world_size)):
        raise _bad_rank(f"RANK {rank} and LOCAL_RANK {local_rank} do not fit WORLD_SIZE {world_size}")
    return world_size, rank, local_rank


def _read_count(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not re.fullmatch("[0-9]{1,6}", text):
        raise _bad_rank(f"{name} is '{text}'")
    return int(text)


def _bad_rank(problem: str) -> InputError:
    return InputError(
        f"the environment variable {problem}: torchrun sets it; unset WORLD_SIZE, RANK and LOCAL_RANK to "
        "train in one process",
        code="invalid-world-size",
    )


@contextmanager
def init_distributed(parallel: ParallelMode | None, device: str) -> Iterator[DistContext]:
    """Join the process group that torchrun's environment variables describe, until the block ends.

    A process group that the caller has initialized is used, and left as it is. Raise LostProcessError if
    another process of the group ends inside the block.
    """
    is_launched = "RANK" in os.environ or _has_process_group()
    world_size = _world_size()
    if not is_launched and parallel not in (None, "none"):
        raise InputError(
            f"parallel mode '{parallel}' needs processes of torchrun: start with torchrun --nproc-per-node 2 "
            "-m qkflow train …",
            code="not-distributed",
        )
    if world_size > 1 and parallel == "none":
        raise InputError(
            f"torchrun started {world_size} processes, but the parallel mode is 'none': use ddp, fsdp or "
            "hsdp",
            code="parallel-none",
        )
    if world_size == 1 and parallel in (None, "none"):
        yield DistContext(resolve_device(device))
        return
    rank_device = resolve_device(device)
    if rank_device.type == "cuda":
        rank_device = torch.device("cuda", read_rank()[2])
        torch.cuda.set_device(rank_device)
    with process_group(rank_device):
        rank = torch.distributed.get_rank()
        try:
            yield DistContext(rank_device, parallel or "ddp", rank, world_size)
        except RuntimeError as error:
            if _is_connection_error(error):
                raise LostProcessError(f"rank {rank} lost the connection to another process") from error
            raise


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _world_size() -> int:
    if _has_process_group():
        return torch.distributed.get_world_size()
    return read_rank()[0]


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the process group of torchrun until the block ends, or use the one that exists."""
    if _has_process_group():
        yield
        return
    try:
        _join_process_group("nccl" if device.type == "cuda" else "gloo")
    except ValueError as error:  # a variable of torchrun is missing or wrong
        world_size, rank, _ = read_rank()
        raise InputError(
            f"process {rank} of {world_size} cannot join the others ({error}): start with torchrun, or unset "
            "WORLD_SIZE",
            code="invalid-world-size",
        ) from None
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _join_process_group(backend: str) -> None:
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun keeps one store over restarts (--max-restarts), with the addresses of processes that have
        # ended. Restarts are counted per machine, so that the count names the attempt on one machine only.
        store, rank, world_size = next(torch.distributed.rendezvous("env://"))
        attempt = f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store = torch.distributed.PrefixStore(attempt, store)
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    else:
        torch.distributed.init_process_group(backend)


def _is_connection_error(error: RuntimeError) -> bool:
    """Return whether a collective operation failed; gloo raises RuntimeError with the place in its source."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
