from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.studies import grid
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.grid import build_grid, build_run_config, check_models
from qkflow.training.config import DEFAULT_LR

CONFIG = ComparisonConfig(
    variants=("standard", "euler"), inits=("gpt2", "fan_in"), tokens=4096, seq_len=64, batch_size=4
)


def cells(config: ComparisonConfig) -> dict[str, list[str]]:
    return {arm.name: [cell.name for cell in arm.cells] for arm in build_grid(config).arms}


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
        ({"variants": ("standard@mimetic",), "controls": ()}, "nothing-to-compare"),
        ({"baselines": ()}, "no-baselines"),
        ({"variants": ("standard{data.seq_len=1}",)}, "invalid-seq-len"),
        ({"variants": ("standard{train.batch_size=1000}",)}, "tokens-below-one-step"),
        ({"seeds": 1}, "too-few-seeds"),  # the config is checked first
    ],
)
def test_build_grid_rejects(change: dict[str, tuple[str, ...]], code: str) -> None:
    with raises_code(code):
        build_grid(replace(CONFIG, **change))  # type: ignore[arg-type]


def test_accumulate_is_a_key_of_every_run_if_set() -> None:
    def train_section(config: ComparisonConfig) -> dict[str, Any]:
        cell = build_grid(config).cells[0]
        run: dict[str, Any] = build_run_config(config, cell, seed=0, lr=1e-3, tokens=4096)
        return run["train"]  # type: ignore[no-any-return]

    assert "accumulate" not in train_section(CONFIG)  # keeps the ids of earlier runs
    assert train_section(replace(CONFIG, accumulate=2))["accumulate"] == 2


QK_NORM = "standard{attention.qk_norm=true}"


def test_pool_of_baselines_is_the_first_arm() -> None:
    config = replace(
        CONFIG,
        baselines=("standard{attention.qk_norm=false,true}", "standard", "affine@gpt2"),
        variants=("standard", "euler", QK_NORM, "affine@gpt2", "affine"),
        controls=(),
    )
    off = "standard{attention.qk_norm=false}"
    assert cells(config) == {
        "baselines": [
            *(f"{off}@gpt2", f"{off}@fan_in", f"{QK_NORM}@gpt2", f"{QK_NORM}@fan_in"),
            *("standard@gpt2", "standard@fan_in", "affine@gpt2"),
        ],
        "euler": ["euler@gpt2", "euler@fan_in"],
        "affine": ["affine@gpt2", "affine@fan_in"],
    }
    pool = build_grid(config).arms[0].plan()
    assert pool.role == "reference"
    assert [cell.variant for cell in pool.cells] == [
        off,
        off,
        QK_NORM,
        QK_NORM,
        "standard",
        "standard",
        "affine",
    ]


def same_init_baselines(config: ComparisonConfig) -> dict[str, str]:
    return {cell.name: cell.same_init_baseline for arm in build_grid(config).arms[1:] for cell in arm.cells}


def test_same_init_baseline_has_the_same_overrides_if_possible() -> None:
    variants = (
        "euler",
        "euler{attention.qk_norm=true}",
        "euler{attention.bias=true}",
        "symmetric",
        "drift@mimetic",
    )
    config = replace(CONFIG, baselines=("standard", QK_NORM), variants=variants, inits=("gpt2",), controls=())
    assert same_init_baselines(config) == {
        "euler@gpt2": "standard@gpt2",
        "euler{attention.qk_norm=true}@gpt2": f"{QK_NORM}@gpt2",
        "euler{attention.bias=true}@gpt2": "standard@gpt2",
        "standard@gpt2+symmetric=1": "standard@gpt2",
        "drift@gpt2+mimetic": "",
    }
    only_norm = replace(config, baselines=(QK_NORM,), variants=("euler",))
    assert same_init_baselines(only_norm) == {"euler@gpt2": ""}
    affine = replace(config, baselines=("affine",), variants=("euler",))
    assert same_init_baselines(affine) == {"euler@gpt2": "affine@gpt2"}


def test_run_config_with_overrides() -> None:
    text = (
        "euler{attention.qk_norm=true,model.tie_embeddings=false,train.lr=1e-3,train.batch_size=8,"
        "data.seq_len=32,data.tokenizer=bytes,slow.ratio=4}"
    )
    grid = build_grid(replace(CONFIG, variants=(text,), controls=(), inits=("gpt2",)))
    tokens = {cell.variant.model_name: 4096 for cell in grid.cells}
    data = {"bytes": {"fingerprint": "b"}, "bpe:2048": {"fingerprint": "a"}}
    standard, run = grid.build_runs(
        "tune", [0], tokens_by_model=tokens, lr_factors=(0.5,), data_overrides=data
    )
    assert standard.lr == DEFAULT_LR[CONFIG.optimizer] / 2
    assert run.lr == 0.001  # fixed by the variant
    assert run.steps == 16
    assert run.config["model"] == {
        "preset": "tiny",
        "init": "gpt2",
        "tie_embeddings": False,
        "slow": {"ratio": 4},
        "attention": {"coupling": "euler", "scoring": "softmax", "qk_norm": True},
    }
    assert run.config["train"].items() >= {"lr": 0.001, "batch_size": 8, "schedule": "cosine"}.items()
    assert run.config["data"] == {
        "corpus": "speeches",
        "tokenizer": "bytes",
        "seq_len": 32,
        "fingerprint": "b",
    }
    assert standard.config["data"]["fingerprint"] == "a"


def test_overrides_beside_a_slow_path() -> None:
    config = replace(
        CONFIG,
        variants=(
            "slow:frozen{train.freeze=[mlp],model.n_layers=6,slow.attention={coupling: euler}}@gpt2",
            "dense-matched{model.n_layers=6}@gpt2",
        ),
        controls=(),
    )
    slow, dense = (
        build_run_config(config, arm.cells[0], seed=0, lr=1e-3, tokens=4096)
        for arm in build_grid(config).arms[1:]
    )
    assert slow["train"]["freeze"] == ["mlp", "slow"]
    assert slow["model"]["slow"]["n_layers"] == 3  # half of the fast layers
    assert slow["model"]["slow"]["attention"] == {"coupling": "euler"}
    assert (dense["model"]["n_layers"], dense["model"]["hidden_dim"]) > (6, 512)
    check_models(build_grid(config))


def test_ids_of_long_names_are_short() -> None:
    name = f"standard{{data.tokenizer={'a' * 300}}}"
    grid = build_grid(replace(CONFIG, variants=(name,), controls=()))
    tokens = {cell.variant.model_name: 4096 for cell in grid.cells}
    ids = [run.id for run in grid.build_runs("compare", range(3), tokens_by_model=tokens)]
    assert len(set(ids)) == 12
    assert max(map(len, ids)) < 150


@pytest.mark.parametrize(
    ("variant", "code"),
    [
        (
            "standard{attention.circuit=CAFO,attention.qk_norm=true,attention.rope=false}",
            "collapsed-circuit-qk-norm",
        ),
        ("standard{train.freeze=[nothing]}", "unknown-role"),
        ("standard{model.n_heads=3}", "dim-not-divisible"),
        ("standard{train.accumulate=3}", "batch-not-divisible"),
        ("standard{train.lr=-1}", "below-minimum"),
    ],
)
def test_check_models_rejects_what_cannot_be_built(variant: str, code: str) -> None:
    with raises_code(code) as error:
        check_models(build_grid(replace(CONFIG, variants=(variant,))))
    assert variant in str(error.value)
    assert "\n" not in str(error.value)


def test_explosion_is_refused_before_it_is_enumerated() -> None:
    values = ",".join(map(str, range(1000)))
    sweep = f"euler{{step={values},hidden_dim={values},train.lr={values}}}"
    with raises_code("too-many-runs") as error:
        build_grid(replace(CONFIG, variants=(sweep,)))
    assert "10,000,000,0" in str(error.value)  # 10⁹ variants, 2 inits, 5 seeds, and the others
    with raises_code("too-many-runs") as error:
        build_grid(replace(CONFIG, variants=(f"euler{{step={values}}}",), controls=()))
    assert "16,021 runs" in str(error.value)
    assert "hours" in str(error.value)


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


def test_precision_of_the_study_is_in_every_run() -> None:
    config = ComparisonConfig.parse(variants="euler,standard{train.precision=fp32}", inits="gpt2")
    assert (
        "precision" not in next(iter(run_configs(config)))["train"]
    )  # the ids of runs in float32 do not change
    runs = run_configs(replace(config, precision="bf16"))
    assert {run["train"]["precision"] for run in runs} == {"fp32", "bf16"}


def run_configs(config: ComparisonConfig) -> list[dict[str, Any]]:
    grid = build_grid(config)
    tokens = dict.fromkeys((cell.variant.model_name for cell in grid.cells), 10_000)
    return [run.config for run in grid.build_runs("compare", [0], tokens_by_model=tokens)]


def test_learning_rate_and_optimizer_of_a_cell() -> None:
    """A variant's own rate comes first, then --lr, then the rate of its optimizer."""
    variants = ("standard{train.optimizer=adamw}", "standard{train.lr=0.1}")
    config = replace(CONFIG, variants=variants, controls=(), inits=("gpt2",))
    assert [cell.base_lr(config) for cell in build_grid(config).cells] == [0.012, 0.003, 0.1]
    config = replace(config, lr=0.02)
    assert [cell.base_lr(config) for cell in build_grid(config).cells] == [0.02, 0.02, 0.1]
    runs = build_grid(config).build_runs("compare", [0], tokens_by_model=dict.fromkeys(_models(config), 4096))
    assert [run.config["train"]["optimizer"] for run in runs] == ["muon", "adamw", "muon"]
    runs = build_grid(replace(config, optimizer="adamw", variants=("euler",))).build_runs(
        "compare", [0], tokens_by_model={"standard": 4096, "euler": 4096}
    )
    assert all("optimizer" not in run.config["train"] for run in runs)  # the default of TrainConfig


def _models(config: ComparisonConfig) -> list[str]:
    return [cell.variant.model_name for cell in build_grid(config).cells]
