"""Does a faster query-key circuit sharpen attention on real tasks, and does that explain anything?"""

from qkflow.studies.pace.config import PaceStudyConfig, PaceStudyResult, rebuild_pace_study, run_pace_study

__all__ = ["PaceStudyConfig", "PaceStudyResult", "rebuild_pace_study", "run_pace_study"]
