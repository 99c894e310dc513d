from __future__ import annotations

from qkflow.studies.design import SeedDesign
from qkflow.studies.screening import CellData, Screening, paired_losses, screen


def cell(name: str, screened: list[float], judged: list[float] | None = None) -> CellData:
    judged_losses = dict(enumerate(judged or []))
    return CellData(f"euler@{name}", name, screened=dict(enumerate(screened, 30_000)), judged=judged_losses)


def test_leader_is_chosen_by_screening_seeds_alone() -> None:
    a, b = cell("a", [4.0, 4.1, 4.2], [5.0, 5.0]), cell("b", [4.1, 4.2, 4.31], [1.0, 1.0])
    assert screen([a, b]).leader is a


def test_clearly_worse_and_diverged_cells_are_retired() -> None:
    leader = cell("a", [4.0, 4.1, 4.2])
    close, worse = cell("b", [4.01, 4.09, 4.25]), cell("c", [4.5, 4.61, 4.7])
    diverged = cell("d", [3.0, 3.1])
    screening = screen([worse, close, diverged, leader])
    assert screening.racing == (leader, close)
    assert screening.rivals == [close]


def test_without_screening_all_cells_stay() -> None:
    a, b = cell("a", [], [4.0, 4.1, 4.2]), cell("b", [], [6.0, 6.1, 6.2])
    assert screen([b, a]).racing == (a, b)


def test_pairs_have_common_seeds_in_order() -> None:
    assert paired_losses({2: 0.2, 0: 0.0, 5: 0.5}, {5: 1.5, 2: 1.2}) == ([0.2, 0.5], [1.2, 1.5])


def race(*cells: CellData) -> Screening:
    return Screening(cells[0], cells)


LOW, HIGH = [3.0, 3.11, 3.2, 3.31], [4.0, 4.1, 4.2, 4.3]
DESIGN = SeedDesign.fixed(margin=0.01)


def test_rivals_count_on_both_sides() -> None:
    low, high, rival = cell("low", [], LOW), cell("high", [], HIGH), cell("rival", [], LOW)
    assert race(low).difference(race(high), DESIGN).p < 0.001
    assert race(low).difference(race(high, rival), DESIGN).p > 0.5  # does not beat every baseline
    assert race(high, rival).difference(race(low), DESIGN).p > 0.5  # is not worse with every init
    assert race(cell("none", [])).difference(race(low), DESIGN) is None


def test_rival_without_runs_gives_no_p_and_a_failed_one_is_out() -> None:
    low, high, empty = cell("low", [], LOW), cell("high", [], HIGH), cell("rival", [])
    assert race(low).difference(race(high, empty), DESIGN).p is None
    assert not race(high, empty).has_ended(4)
    empty.failed = {0}
    assert race(low).difference(race(high, empty), DESIGN).p < 0.001
    assert race(high, empty).has_ended(4)
