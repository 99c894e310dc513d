"""Distributed training in processes started by `torchrun`: data-parallel (DDP) or sharded (FSDP2).

`train.batch_size` is the batch of all processes together, so the same config gives the same run for any
number of processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.errors import InputError
from qkflow.system import resolve_device
from qkflow.training.config import ParallelMode


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
        return self.mode == "fsdp"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward synchronizes gradients; `model` keeps its parameter names."""
        if self.mode == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model

    def shard(self, model: nn.Module, blocks: Iterator[nn.Module]) -> None:
        """Apply FSDP in place: one unit per block and one for the remaining parameters."""
        if not self.is_sharded:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    @contextmanager
    def gradient_sync(self, model: nn.Module, is_last_microbatch: bool) -> Iterator[None]:
        """Reduce gradients only in the last microbatch of a step."""
        if self.mode == "ddp" and not is_last_microbatch:
            assert isinstance(model, nn.parallel.DistributedDataParallel)
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

    def barrier(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier()


def read_rank() -> tuple[int, int, int]:
    """Return WORLD_SIZE, RANK and LOCAL_RANK, which torchrun sets; 1, 0, 0 without it."""
    numbers = []
    for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        text = os.environ.get(name) or default
        if not re.fullmatch("[0-9]{1,6}", text):
            raise _bad_rank(f"{name} is '{text}'")
        numbers.append(int(text))
    world_size, rank, local_rank = numbers
    if world_size < 1 or (world_size > 1 and not (rank < world_size and local_rank < world_size)):
        raise _bad_rank(f"RANK {rank} and LOCAL_RANK {local_rank} do not fit WORLD_SIZE {world_size}")
    return world_size, rank, local_rank


def _bad_rank(problem: str) -> InputError:
    return InputError(
        f"the environment variable {problem}: torchrun sets it; unset WORLD_SIZE, RANK and LOCAL_RANK to "
        "train in one process",
        code="invalid-world-size",
    )


@contextmanager
def init_distributed(parallel: ParallelMode | None, device: str) -> Iterator[DistContext]:
    """Join the process group that torchrun's environment variables describe, until the block ends."""
    world_size, rank, local_rank = read_rank()
    if world_size == 1:
        if parallel in ("ddp", "fsdp"):
            raise InputError(
                f"parallel mode '{parallel}' needs several processes: start with torchrun --nproc-per-node 2 "
                "-m qkflow train …",
                code="not-distributed",
            )
        yield DistContext(resolve_device(device))
        return
    if parallel == "none":
        raise InputError(
            f"torchrun started {world_size} processes, but the parallel mode is 'none': use ddp or fsdp",
            code="parallel-none",
        )
    import torch.distributed as dist

    rank_device = resolve_device(device)
    if rank_device.type == "cuda":
        rank_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(rank_device)
    try:
        dist.init_process_group("nccl" if rank_device.type == "cuda" else "gloo")
    except ValueError as error:  # a variable of torchrun is missing or wrong
        raise InputError(
            f"process {rank} of {world_size} cannot join the others ({error}): start with torchrun, or unset "
            "WORLD_SIZE",
            code="invalid-world-size",
        ) from None
    try:
        yield DistContext(rank_device, parallel or "ddp", dist.get_rank(), world_size)
    finally:
        dist.destroy_process_group()
