"""`qkflow pace groups`: which parameters count as the query-key circuit, and how each would be trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import nn

from qkflow import console
from qkflow.errors import InputError
from qkflow.hf.parameter_roles import ParameterSettings, describe_param_groups
from qkflow.models import PRESETS, Decoder, preset


def groups(
    model: str,
    /,
    lr: float = 1e-4,
    ratio: float = 20.0,
    qk: str = "q,k,qk",
    embed_ratio: float = 1.0,
    weight_decay: float = 0.1,
    decay: Literal["matrices", "all"] = "matrices",
    all: bool = False,
    json: bool = False,
) -> None:
    """Show the parameter groups of a model when its query-key circuit learns `--ratio` times as fast.

    No weights are loaded: a config is enough. Fused query-key-value weights (GPT-2's c_attn) are listed as
    `fused`; they are split into their parts when the groups are made for training.

    For example:
        qkflow pace groups tiny
        qkflow pace groups path/to/llama --ratio 30 --all
        qkflow pace groups path/to/qwen3 --qk q,k,qk_norm --json

    Args:
        model: one of our presets, the folder of a run, or a `transformers` folder or name.
        lr: learning rate of everything else.
        ratio: of the circuit's learning rate to that.
        qk: the roles that count as the circuit: q, k and qk, and if you like qk_norm and coupling.
        embed_ratio: of the embeddings' learning rate.
        weight_decay: of the parameters that decay.
        decay: which do: matrices, or all.
        all: list every parameter, not every role.
        json: print one JSON object.
    """
    rows = describe_param_groups(
        load_meta_model(model),
        lr,
        ratio=ratio,
        qk_roles=[role.strip() for role in qk.split(",") if role.strip()],
        embed_ratio=embed_ratio,
        weight_decay=weight_decay,
        decay=decay,
    )
    if json:
        console.emit_json({"model": model, "parameters": [dataclasses.asdict(row) for row in rows]})
        return
    table = Table(title=f"{model}: learning rate {lr:g}, query-key circuit ×{ratio:g}")
    for column in ("group", "role", "learning rate", "weight decay", "parameters", "name"):
        table.add_column(column, justify="right" if column == "parameters" else "left", overflow="fold")
    for shown in rows if all else summarize_groups(rows):
        size = torch.Size(shown.shape).numel()
        table.add_row(
            shown.group, shown.role, f"{shown.lr:g}", f"{shown.weight_decay:g}", f"{size:,}", shown.name
        )
    console.out.print(table)


def summarize_groups(rows: list[ParameterSettings]) -> list[ParameterSettings]:
    """One row for all parameters that are treated alike, named after the first."""
    alike: dict[tuple[Any, ...], list[ParameterSettings]] = {}
    for row in rows:
        alike.setdefault((row.group, row.role, row.lr, row.weight_decay), []).append(row)
    summary = []
    for same in alike.values():
        count = sum(torch.Size(row.shape).numel() for row in same)
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        summary.append(dataclasses.replace(same[0], shape=(count,), name=same[0].name + more))
    return sorted(summary, key=lambda row: ("qk", "fused", "embed", "rest").index(row.group))


def load_meta_model(name: str) -> nn.Module:
    """A model without its weights."""
    if name in PRESETS:
        return Decoder(preset(name), device="meta")
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from qkflow.hf.pretrained import is_run_dir
    from qkflow.training.pretrained import load_model

    if is_run_dir(Path(name)):
        return load_model(name)[0]
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        causal = type(config) in AutoModelForCausalLM._model_mapping
        with torch.device("meta"):
            return (AutoModelForCausalLM if causal else AutoModel).from_config(config)
    except Exception as error:  # whatever the config makes it run into
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"'{name}' is not a preset ({', '.join(PRESETS)}), nor a model that can be opened: {reason}"
        ) from error
