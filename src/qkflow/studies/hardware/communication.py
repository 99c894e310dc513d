"""Time of a training step on many devices: computation, and communication that it does not hide.

Volumes are those of ring collectives, per device and step, with P parameters and N devices:

    ddp    all-reduce of gradients                     2·(N−1)/N · 4P bytes, during the backward pass
    fsdp   all-gather of weights                       (N−1)/N · 4P in the forward pass, again (without the
           root unit) in the backward pass; reduce-scatter of gradients (N−1)/N · 4P in the backward pass
    hsdp   as fsdp within a node of S devices, then an all-reduce of each device's gradient shard over
           N/S nodes: 2·(R−1)/R · 4P/S with R = N/S

Assumptions: fp32 weights and gradients are sent, as `training.distributed` does. A collective that leaves a
node runs at the speed of the network, inside a node at that of its links, both at BUS_EFFICIENCY. A
collective of N devices takes LATENCY·log2(N) in addition. Communication is hidden behind the computation of
the same pass. The forward pass is a third of the computation. Stragglers, failures, input, evaluation and
checkpoints are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qkflow.studies.hardware.devices import Device
from qkflow.studies.hardware.memory import Layout, UnitSizes

NETWORK_BANDWIDTH = 50e9  # bytes per second and device: 400 Gbit/s each
BUS_EFFICIENCY = 0.8
LATENCY = 10e-6  # seconds
FORWARD_SHARE = 1 / 3
BYTES = 4  # fp32


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, and the bytes that one device sends."""

    compute: float
    exposed: float  # communication that computation does not hide
    communication: float
    sent_bytes: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed

    @property
    def efficiency(self) -> float:
        return self.compute / self.total


def step_time(
    compute: float,
    units: UnitSizes,
    layout: Layout,
    device: Device,
    network_bandwidth: float = NETWORK_BANDWIDTH,
) -> StepTime:
    """Return the time of a step whose computation takes `compute` seconds on each device."""
    if layout.world_size == 1:
        return StepTime(compute, 0.0, 0.0, 0.0)
    forward, backward, sent = _collectives(units, layout, device, network_bandwidth)
    exposed = max(0.0, forward - FORWARD_SHARE * compute)
    exposed += max(0.0, backward - (1 - FORWARD_SHARE) * compute)
    return StepTime(compute, exposed, forward + backward, sent)


def _collectives(
    units: UnitSizes, layout: Layout, device: Device, network_bandwidth: float
) -> tuple[float, float, float]:
    """Return the seconds of communication in forward and backward pass, and the bytes sent."""
    shard_count, replicas = layout.shard_count, layout.world_size // layout.shard_count
    n_units = units.n_blocks + 1
    total, blocks = BYTES * units.total, BYTES * units.block * units.n_blocks

    def seconds(sent: float, n_devices: int, crosses_nodes: bool) -> float:
        bandwidth = min(network_bandwidth, device.link_bandwidth) if crosses_nodes else device.link_bandwidth
        return sent / (BUS_EFFICIENCY * bandwidth) + n_units * LATENCY * math.log2(n_devices)

    forward = backward = sent = 0.0
    if shard_count > 1:
        crosses = shard_count > layout.devices_per_node
        ring = (shard_count - 1) / shard_count
        forward += seconds(ring * total, shard_count, crosses)
        backward += seconds(ring * blocks, shard_count, crosses) + seconds(ring * total, shard_count, crosses)
        sent += ring * (2 * total + blocks)
    if replicas > 1:
        crosses = layout.world_size > layout.devices_per_node
        volume = 2 * (replicas - 1) / replicas * total / shard_count
        backward += seconds(volume, replicas, crosses)
        sent += volume
    return forward, backward, sent
