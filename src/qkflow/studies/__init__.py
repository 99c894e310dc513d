"""Studies: grids of paired runs and what they say. `compare(...)` asks whether a variant pays on a corpus."""

from qkflow.studies.compare import Comparison, compare, rebuild
from qkflow.studies.grid import Question

__all__ = ["Comparison", "Question", "compare", "rebuild"]
