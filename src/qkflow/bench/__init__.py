"""What each part costs, as a ratio to standard attention measured in the same process."""

from qkflow.bench.timing import TimeRatio, time_interleaved

__all__ = ["TimeRatio", "time_interleaved"]
