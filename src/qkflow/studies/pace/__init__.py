"""Does a faster query-key circuit sharpen attention on real tasks, and does that explain anything?"""

from qkflow.studies.pace.config import PaceStudy, Settings, rebuild, run_study

__all__ = ["PaceStudy", "Settings", "rebuild", "run_study"]
