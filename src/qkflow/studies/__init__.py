"""Studies: grids of paired runs, their statistics and verdicts. `compare` is the entry point."""

from qkflow.studies.compare import Comparison, compare, load_comparison, restore_record, save_record
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.results import StudySummary

__all__ = [
    "Comparison",
    "ComparisonConfig",
    "StudySummary",
    "compare",
    "load_comparison",
    "restore_record",
    "save_record",
]
