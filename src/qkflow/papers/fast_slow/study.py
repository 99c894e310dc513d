"""The ablations of the paper, for any corpus: `qkflow reproduce fast-slow`."""

from qkflow.papers.paper_study import PaperStudy, Stage
from qkflow.studies.slow_path_findings import gate_findings

STUDY = PaperStudy(
    "Gao, arXiv 2606.16730",
    "at 500k tokens the slow path is neutral: its gate stays closed, and coupled and frozen are within "
    "the noise of each other",
    tokens="500k",
    seeds=5,
    stages=(
        Stage(
            "short",
            ("standard", "slow", "slow:closed", "slow:frozen", "slow:warm-gate", "dense-matched"),
        ),
        Stage("long", ("standard", "slow", "slow:warm-gate"), token_multiplier=10),
    ),
    settings={"controls": "none", "inits": "gpt2"},
    findings=gate_findings,
)
