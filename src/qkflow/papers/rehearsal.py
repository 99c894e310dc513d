"""A rehearsal of a recipe on the meta device: build, shard, and the layout of its checkpoints.

Models have shapes and no storage, so the published sizes are built on any machine. Sharding is real: FSDP2
runs in a process group that is one process playing one rank of many, and every collective is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qkflow.errors import InputError
from qkflow.models import Decoder
from qkflow.papers.recipe import Recipe
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.grid import build_grid
from qkflow.studies.hardware.config import HardwareConfig
from qkflow.studies.workload import TrainedModel, trained_models
from qkflow.training.distributed import DistContext
from qkflow.training.step import Stepper


@dataclass(frozen=True)
class CheckpointLayout:
    """Tensors of one rank's part of a checkpoint: name, shape of its shard, bytes."""

    model: str
    world_size: int
    rank: int
    tensors: dict[str, tuple[int, ...]]
    n_bytes: int
    total_bytes: int  # of all ranks

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rehearse_recipe(
    recipe: Recipe, scale: str, hardware: HardwareConfig, **overrides: Any
) -> dict[str, list[CheckpointLayout]]:
    """Build and shard every model of every stage; return the checkpoint layout of the first and last rank."""
    if recipe.kind != "comparison":
        raise InputError(
            f"--device meta rehearses comparisons, and {recipe.name} trains small models on a task: run it "
            "at --scale tiny",
            code="nothing-to-rehearse",
        )
    layouts: dict[str, list[CheckpointLayout]] = {}
    for stage in recipe.stage_names:
        config = recipe.config(scale, stage, **overrides)
        assert isinstance(config, ComparisonConfig)
        layouts[stage] = [
            checkpoint_layout(model, rank, hardware.layout().shard_count)
            for model in trained_models(build_grid(config))
            for rank in sorted({0, hardware.layout().shard_count - 1})
        ]
    return layouts


def checkpoint_layout(model: TrainedModel, rank: int, world_size: int) -> CheckpointLayout:
    """Return the part of a checkpoint that one of `world_size` ranks writes."""
    with _fake_process_group(rank, world_size) as context:
        decoder = Decoder(model.config, device="meta")
        stepper = Stepper(decoder, model.train, None, context, total_steps=1)  # type: ignore[arg-type]
        state = stepper.state_dict()
        local = {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in state.items()}
    return CheckpointLayout(
        model.name,
        world_size,
        rank,
        {name: tuple(shard.shape) for name, shard in local.items()},
        sum(shard.numel() * shard.element_size() for shard in local.values()),
        sum(tensor.numel() * tensor.element_size() for tensor in state.values()),
    )


@contextmanager
def _fake_process_group(rank: int, world_size: int) -> Iterator[DistContext]:
    """Play one rank of a process group without the others."""
    device = torch.device("cpu")
    if world_size == 1:
        yield DistContext(device)
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield DistContext(device, "fsdp", rank, world_size)
    finally:
        dist.destroy_process_group()
