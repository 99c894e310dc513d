"""All claims of the three papers: `qkflow claims`."""

from __future__ import annotations

from qkflow.errors import unknown
from qkflow.papers.claims import Claim
from qkflow.papers.coupled_dynamics.claims import CLAIMS as COUPLING_CLAIMS
from qkflow.papers.fast_slow.claims import CLAIMS as FAST_SLOW_CLAIMS
from qkflow.papers.faster_qk.claims import CLAIMS as PACE_CLAIMS

CLAIMS_BY_DIAL: dict[str, tuple[Claim, ...]] = {
    "coupling": COUPLING_CLAIMS,
    "timescale": FAST_SLOW_CLAIMS,
    "pace": PACE_CLAIMS,
}


def select_claims(dial: str | None = None) -> dict[str, tuple[Claim, ...]]:
    """Return the claims by dial: all, or those of one."""
    if dial is None:
        return CLAIMS_BY_DIAL
    if dial not in CLAIMS_BY_DIAL:
        raise unknown("dial", dial, CLAIMS_BY_DIAL)
    return {dial: CLAIMS_BY_DIAL[dial]}
