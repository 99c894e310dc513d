"""Time, FLOPs and memory of couplings and scorings, relative to standard attention in the same process."""

from qkflow.bench.timing import TimeRatio, time_interleaved

__all__ = ["TimeRatio", "time_interleaved"]
