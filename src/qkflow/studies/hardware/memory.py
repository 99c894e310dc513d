"""Memory per device: what DDP, FSDP2 and HSDP replicate, shard and gather.

none   weights, gradients and optimizer state on one device
ddp    all of them on every device; gradients are views of buckets that stay allocated
fsdp   all of them sharded over all devices. Gathered in fp32: the root unit (embedding, last norm) during the
       whole step, one block in use and one prefetched, and the gradients of the root and of one block
hsdp   as fsdp within a node, replicated over nodes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from qkflow.errors import InputError, unknown
from qkflow.models.config import ModelConfig
from qkflow.models.cost import build_meta_decoder
from qkflow.training.memory import MemoryModel

Parallelism = Literal["ddp", "fsdp", "hsdp"]
DEVICES_PER_NODE = 8
GATHERED_BLOCKS = 2


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a training step on one of several devices: the most of each kind, and of all together."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    temporary: int  # gathered weights and gradients of FSDP included
    peak: int


@dataclass(frozen=True)
class Layout:
    """How one run is spread over devices."""

    parallel: Parallelism = "ddp"
    world_size: int = 1
    devices_per_node: int = DEVICES_PER_NODE

    def __post_init__(self) -> None:
        if self.parallel not in get_args(Parallelism):
            raise unknown("--parallel", self.parallel, get_args(Parallelism))
        if self.world_size < 1 or self.devices_per_node < 1:
            raise InputError(
                f"--world-size must be at least 1, not {self.world_size}", code="invalid-world-size"
            )
        if self.parallel == "hsdp" and self.world_size % self.shard_count:
            raise InputError(
                f"hsdp needs whole nodes: --world-size {self.world_size} is not a multiple of "
                f"{self.devices_per_node}",
                code="partial-node",
            )

    @property
    def shard_count(self) -> int:
        """The number of devices that one copy of the model is sharded over."""
        if self.parallel == "ddp":
            return 1
        return self.world_size if self.parallel == "fsdp" else min(self.world_size, self.devices_per_node)

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.devices_per_node)


@dataclass(frozen=True)
class UnitSizes:
    """Parameters of the units that FSDP gathers: everything outside the blocks, and one block."""

    root: int
    block: int
    n_blocks: int

    @classmethod
    def of(cls, config: ModelConfig) -> UnitSizes:
        model = build_meta_decoder(config)
        total = sum(p.numel() for p in model.parameters())
        block = sum(p.numel() for p in model.blocks[0].parameters())
        return cls(total - block * len(model.blocks), block, len(model.blocks))

    @property
    def total(self) -> int:
        return self.root + self.n_blocks * self.block


def device_memory(model: MemoryModel, units: UnitSizes, batch_size: int, layout: Layout) -> DeviceMemory:
    """Return the memory of one device on `batch_size` windows of its own."""
    step, shard_count = model.at(batch_size), layout.shard_count
    if layout.world_size == 1:
        return DeviceMemory(
            step.weights,
            step.gradients,
            step.optimizer,
            step.activations,
            step.logits,
            step.temporary,
            step.peak,
        )
    weights, gradients, optimizer = (
        -(-size // shard_count) for size in (step.weights, step.gradients, step.optimizer)
    )
    gathered = 0
    if shard_count > 1:
        gathered = 4 * (units.root + GATHERED_BLOCKS * units.block + units.root + units.block)
    return DeviceMemory(
        weights,
        gradients,
        optimizer,
        step.activations,
        step.logits,
        step.temporary + gathered,
        weights + gradients + optimizer + step.working + gathered,
    )


def largest_batch(model: MemoryModel, units: UnitSizes, layout: Layout, usable_bytes: float) -> int:
    """Return the most windows per device whose step fits into `usable_bytes`; 0 if not even one does."""

    def fits(batch_size: int) -> bool:
        return device_memory(model, units, batch_size, layout).peak <= usable_bytes

    low, high = 0, model.first_extrapolated_batch
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
