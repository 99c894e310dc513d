"""Gains by corpus beside measures of the text."""

from __future__ import annotations

import json
import math

import pytest
from scipy.stats import spearmanr

from qkflow.cli.main import dispatch
from qkflow.papers.claims import Results
from qkflow.papers.coupled_dynamics.corpora import MEASURES, gain_correlations, rank_correlation


def test_rank_correlation_of_a_monotone_relation() -> None:
    rho, p = rank_correlation([1, 2, 3, 4, 5], [1, 4, 9, 16, 25])
    assert rho == pytest.approx(1)
    assert p == pytest.approx(2 / math.factorial(5))  # this order and its reverse
    assert rank_correlation([1, 2, 3, 4, 5], [5, 4, 3, 2, 1])[0] == pytest.approx(-1)


def test_rank_correlation_matches_scipy_with_ties() -> None:
    first, second = [0.3, 0.1, 0.1, 0.9, 0.5, 0.2], [2.0, 1.0, 3.0, 2.5, 0.5, 2.0]
    assert rank_correlation(first, second)[0] == pytest.approx(spearmanr(first, second).statistic)


def test_tables_of_corpora(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["claims", "--table", "corpora", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["corpora"]
    assert [row["corpus"] for row in rows] == list(Results().output("corpus-stats")["corpora"])
    assert dispatch(["claims", "--table", "predictors", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictors"]
    assert [row["measure"] for row in rows] == list(MEASURES)
    assert all(-1 <= each.rho <= 1 and 0 < each.p_holm <= 1 for each in gain_correlations(Results()))
