from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from input_errors import raises_code
from qkflow.studies.config import ComparisonConfig
from qkflow.studies.finetune.config import FinetuneRunConfig, FinetuneTrainConfig, parse_tasks


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("glue:SST-2,CoLA", ["SST-2", "CoLA"]),
        ("GLUE:rte,mrpc", ["RTE", "MRPC"]),
        ("glue:rte,glue:RTE,cola", ["RTE", "CoLA"]),
        ("glue", ["SST-2", "CoLA", "MRPC", "RTE"]),
        ("none", []),
    ],
)
def test_parse_tasks(text: str, names: list[str]) -> None:
    config = ComparisonConfig.parse(finetune=text)
    assert [task.name for task in parse_tasks(config.finetune)] == names


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("CoLA", "missing-task-suite"),
        ("superglue:RTE", "unknown-task-suite"),
        ("glue:CoLa2", "unknown-glue-task"),
    ],
)
def test_unknown_tasks(text: str, code: str) -> None:
    with raises_code(code):
        parse_tasks(text.split(","))


def test_unknown_task_gets_the_nearest_name() -> None:
    with raises_code("unknown-glue-task") as error:
        parse_tasks(["glue:sst"])
    assert "'sst-2'" in str(error.value)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"finetune_epochs": 0}, "below-minimum"),
        ({"finetune_examples": 1}, "below-minimum"),
        ({"finetune_lr": 0.0}, "below-minimum"),
        ({"finetune_lr": float("nan")}, "not-finite"),
    ],
)
def test_check_rejects(change: dict[str, Any], code: str) -> None:
    with raises_code(code):
        replace(ComparisonConfig(tokens=4096), **change).check()


def test_command_round_trip() -> None:
    config = ComparisonConfig.parse(finetune="glue:RTE,CoLA", finetune_data="my glue", finetune_examples=100)
    assert "--finetune glue:RTE,CoLA --finetune-data 'my glue' --finetune-examples 100" in (
        config.to_command("out")
    )
    assert ComparisonConfig.from_dict(config.to_dict()) == config


def test_run_config_round_trip(tmp_path: Path) -> None:
    train = FinetuneTrainConfig(10, 4, 1e-3, 0.0, 1, "cpu")
    config = FinetuneRunConfig("euler-gpt2.s1.0", parse_tasks(["glue:CoLA"])[0], "data.json", 12, train)
    assert FinetuneRunConfig.from_dict(config.to_dict()) == config
