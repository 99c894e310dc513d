from __future__ import annotations

import json
from dataclasses import replace

import pytest

from input_errors import raises_code
from qkflow.studies import grid
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.grid import build_grid, build_run_config

CONFIG = ComparisonConfig(variants=("standard", "euler"), tokens=4096, seq_len=64, batch_size=4)


def cells(config: ComparisonConfig) -> dict[str, list[str]]:
    return {arm.variant.name: [cell.name for cell in arm.cells] for arm in build_grid(config).arms}


def test_every_variant_and_control_runs_with_every_init() -> None:
    assert cells(CONFIG) == {
        "standard": ["standard@gpt2", "standard@fan_in"],
        "euler": ["euler@gpt2", "euler@fan_in"],
        "symmetric": ["standard@gpt2+symmetric=1", "standard@fan_in+symmetric=1"],
        "uncoupled": ["uncoupled@gpt2", "uncoupled@fan_in"],
    }
    assert [arm.role for arm in build_grid(CONFIG).arms] == ["reference", "variant", "control", "control"]


def test_standard_also_runs_with_inits_that_variants_fix() -> None:
    fixed = replace(
        CONFIG, variants=("euler@fan_in", "standard@fan_in+symmetric=2"), inits=("gpt2",), controls=()
    )
    assert cells(fixed) == {
        "standard": ["standard@gpt2", "standard@fan_in", "standard@fan_in+symmetric=2"],
        "euler@fan_in": ["euler@fan_in"],
    }


def test_cell_of_two_arms_is_run_once() -> None:
    config = replace(
        CONFIG, inits=("fan_in", "fan_in+symmetric=1"), variants=("symmetric@fan_in",), controls=()
    )
    grid = build_grid(config)
    assert [cell.name for cell in grid.cells] == ["standard@fan_in", "standard@fan_in+symmetric=1"]
    assert len(grid.build_runs("compare", range(3), tokens_by_model={"standard": 4096})) == 6


def test_runs_are_ordered_by_seed_and_identified_by_content() -> None:
    grid = build_grid(CONFIG)
    tokens = dict.fromkeys(("standard", "euler", "uncoupled"), 4096)
    runs = grid.build_runs("compare", range(3), tokens_by_model=tokens)
    assert [run.seed for run in runs] == [0] * 8 + [1] * 8 + [2] * 8
    assert len({run.id for run in runs}) == 24
    assert {run.steps for run in runs} == {16}
    again = grid.build_runs("compare", range(3), tokens_by_model=tokens)
    assert [run.id for run in again] == [run.id for run in runs]
    other = build_grid(replace(CONFIG, lr=1e-3)).build_runs("compare", range(3), tokens_by_model=tokens)
    assert not {run.id for run in other} & {run.id for run in runs}
    assert all("/" not in run.id and ":" not in run.id for run in runs)


def test_run_config() -> None:
    config = replace(CONFIG, variants=("leapfrog:n=7+differential+slow:P=8+pace=4@fan_in",), controls=())
    cell = build_grid(config).arms[1].cells[0]
    run_config = build_run_config(
        config, cell, seed=2, lr=1e-3, tokens=4096, data_overrides={"fingerprint": "abc"}
    )
    slow = run_config["model"].pop("slow")
    assert (slow["ratio"], slow["n_layers"], slow["gate_init"]) == (8, 2, 0.0)
    assert run_config["model"] == {
        "preset": "tiny",
        "attention": {"coupling": "leapfrog:n=7", "scoring": "differential"},
        "init": "fan_in",
    }
    assert run_config["data"] == {
        "corpus": "speeches",
        "tokenizer": "bpe:2048",
        "seq_len": 64,
        "fingerprint": "abc",
    }
    expected = {"tokens": 4096, "batch_size": 4, "lr": 1e-3, "seed": 2, "pace": 4.0}
    assert run_config["train"].items() >= expected.items()
    json.dumps(run_config)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"inits": ("gpt3",)}, "unknown-init"),
        ({"variants": ("standard",), "controls": ()}, "nothing-to-compare"),
        ({"variants": ("eulr",)}, "unknown-variant"),
        ({"seeds": 1}, "too-few-seeds"),  # the config is checked first
    ],
)
def test_build_grid_rejects(change: dict[str, tuple[str, ...]], code: str) -> None:
    with raises_code(code):
        build_grid(replace(CONFIG, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [50_000, 100_000, 200_000, 1_000_000, 50_000_000])
def test_evaluation_costs_its_share_of_a_run(tokens: int) -> None:
    settings = grid.eval_settings(tokens, tokens_per_step=2048)
    steps = -(-tokens // 2048)
    probes = -(-steps // settings["probe_every"])
    forward = settings["final_eval_tokens"] + settings["evaluations"] * settings["eval_tokens"]
    cost = grid.FORWARD_SHARE * (forward + probes * grid.PROBE_COST)
    assert cost <= 1.1 * grid.EVAL_SHARE * tokens
    assert 8_192 <= settings["final_eval_tokens"] <= 32_768
    assert settings["eval_tokens"] <= settings["final_eval_tokens"]
    assert 4 <= settings["evaluations"] <= 10
