"""Studies: grids of paired runs and what they say. `compare(...)` asks whether a variant pays on a corpus."""

from qkflow.studies.compare import Comparison, compare, rebuild_report
from qkflow.studies.grid import ComparisonConfig

__all__ = ["Comparison", "ComparisonConfig", "compare", "rebuild_report"]
