"""The processes that train one model together, started by `torchrun`: data-parallel (DDP) or sharded (FSDP2).

`train.batch` is the batch of all of them, so that a run means the same however many share it.
"""

from __future__ import annotations

import os
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
    """One process's view of all of them. Alone, nothing here does anything."""

    device: torch.device
    mode: ParallelMode = "none"
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        return self.mode == "fsdp"

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as the team trains it; its parameters keep their names in `model` itself."""
        if self.mode == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model

    def shard(self, model: nn.Module, blocks: Iterator[nn.Module]) -> None:
        """Give each process its part of every parameter, in place: one unit a block and one for the rest."""
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
        """Exchange gradients only in the last part of an accumulated batch."""
        if self.mode == "ddp" and not is_last_microbatch:
            assert isinstance(model, nn.parallel.DistributedDataParallel)
            with model.no_sync():
                yield
            return
        if self.is_sharded:
            model.set_requires_gradient_sync(is_last_microbatch)  # type: ignore[operator]
        yield

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag whether any process raises it: all then do the same at the same step."""
        if self.world_size == 1:
            return flags
        return tuple(
            bool(count)
            for count in self.all_reduce_sum(torch.tensor(flags, dtype=torch.int32, device=self.device))
        )

    def broadcast(self, value: Any) -> Any:
        """The leader's value, everywhere."""
        if self.world_size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def barrier(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier()


@contextmanager
def init_distributed(parallel: ParallelMode | None, device: str) -> Iterator[DistContext]:
    """The team that torchrun's environment describes, for as long as the block lasts."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        if parallel in ("ddp", "fsdp"):
            raise InputError(
                f"'{parallel}' needs several processes: start it with torchrun --nproc-per-node 2 -m qkflow …"
            )
        yield DistContext(resolve_device(device))
        return
    if parallel == "none":
        raise InputError(f"torchrun started {world} processes, but the run is set to parallel: none")
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK", "0"))
    found = resolve_device(device)
    if found.type == "cuda":
        found = torch.device("cuda", local)
        torch.cuda.set_device(found)
    dist.init_process_group("nccl" if found.type == "cuda" else "gloo")
    try:
        yield DistContext(found, parallel or "ddp", dist.get_rank(), world)
    finally:
        dist.destroy_process_group()
