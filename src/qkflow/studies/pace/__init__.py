"""Pace study: does a faster query-key circuit sharpen attention on a labeled task?"""

from qkflow.studies.pace.config import PaceStudyConfig
from qkflow.studies.pace.results import PaceStudyResult, PaceSummary
from qkflow.studies.pace.study import rebuild_pace_study, run_pace_study

__all__ = ["PaceStudyConfig", "PaceStudyResult", "PaceSummary", "rebuild_pace_study", "run_pace_study"]
