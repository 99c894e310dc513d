"""What each part costs, as a ratio to standard attention measured in the same process."""

from qkflow.bench.timing import Ratio, interleave

__all__ = ["Ratio", "interleave"]
