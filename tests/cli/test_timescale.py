"""`qkflow timescale theory` as its users meet it."""

import json
import sys

import pytest
import torch

from qkflow.cli import main
from qkflow.errors import InputError
from qkflow.papers.fast_slow.master_equation import random_generator, stationary_distribution

QUICK = ["timescale", "theory", "--quick", "--steps", "60", "--hidden-dim", "8"]


def test_a_given_generator_gets_its_numbers_and_a_page_that_needs_no_network(tmp_path, capsys):
    W = random_generator(3, (2,), seed=5)
    (tmp_path / "rates<1>.json").write_text(json.dumps(W.tolist()))
    page = tmp_path / "new" / "theory.html"
    arguments = [*QUICK, "--generator", str(tmp_path / "rates<1>.json"), "--out", str(page)]
    assert main.dispatch([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    torch.testing.assert_close(
        torch.tensor(result["stationary"]).double(), stationary_distribution(W), rtol=1e-6, atol=0
    )
    assert result["epsilons"] == [2.0**-k for k in range(1, 7)]
    assert len(result["errors"]) == 6
    assert result["order"] == pytest.approx(1, abs=0.02)
    assert result["solvers"]["any_two"] < 1e-13
    assert result["kl"]["steps"][-1] == 60
    assert result["kl"]["mean"][-1] < result["kl"]["mean"][0]
    text = page.read_text()
    assert text.count('class="plotly-graph-div"') == 5
    assert "<script src" not in text
    assert "rates&lt;1&gt;.json" in text
    assert [path.name for path in page.parent.iterdir()] == ["theory.html"]


def test_the_table_says_the_order(capsys):
    assert main.dispatch([*QUICK, "--states", "2"]) == 0
    shown = capsys.readouterr().out
    assert "fitted order 1.00" in shown or "fitted order 0.99" in shown
    assert "1/64" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--states", "1"], "at least 2 states"),
        (["--generator", "w.csv", "--states", "3"], "--states is the size of a random generator"),
        (["--generator", "missing.csv"], "no generator file"),
        (["--drift", "0"], "--drift must be a positive number"),
        (["--drift", "inf"], "--drift must be a positive number"),
        (["--steps", "0"], "--steps must be a positive number"),
        (["--out", "."], "is a folder"),
        (["--seed", "9" * 20], "--seed must lie between"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    with pytest.raises(InputError, match=message):
        main.dispatch([*QUICK[:3], *arguments])


def test_columns_that_do_not_sum_to_zero_end_the_program_with_code_2(tmp_path, capsys, monkeypatch):
    (tmp_path / "w.csv").write_text("-1,2\n1,-1\n")
    arguments = ["timescale", "theory", "--generator", str(tmp_path / "w.csv"), "--json"]
    monkeypatch.setattr(sys, "argv", ["qkflow", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("qkflow: the generator: column 1 sums to 1, not to zero;")
    assert shown.err.count("\n") == 1
