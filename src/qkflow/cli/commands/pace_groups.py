"""`qkflow pace groups`: the optimizer groups of a model with a faster query-key circuit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import nn

from qkflow import console
from qkflow.errors import InputError, join_limited
from qkflow.hf import require_transformers
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
    """Show the parameter groups of a model whose query-key circuit learns `--ratio` times as fast.

    Only the config is loaded, no weights. Fused query-key-value weights (GPT-2's c_attn) are listed as
    `fused`; `hf.param_groups` splits them.

    examples:
      qkflow pace groups tiny
      qkflow pace groups path/to/llama --ratio 30 --all
      qkflow pace groups path/to/qwen3 --qk q,k,qk_norm --json

    Args:
        model: a preset, the folder of a run, or a `transformers` folder or Hub name.
        lr: base learning rate.
        ratio: learning rate of the query-key circuit relative to `--lr`.
        qk: comma-separated roles of the circuit: q, k, qk, and optionally qk_norm and coupling.
        embed_ratio: learning rate of the embeddings relative to `--lr`.
        weight_decay: weight decay of the parameters that decay.
        decay: which parameters decay: matrices or all.
        all: list every parameter instead of one row per role.
        json: print one JSON object instead of a table.
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
    for row in rows if all else summarize_groups(rows):
        count = torch.Size(row.shape).numel()
        table.add_row(row.group, row.role, f"{row.lr:g}", f"{row.weight_decay:g}", f"{count:,}", row.name)
    console.out.print(table)


def summarize_groups(rows: list[ParameterSettings]) -> list[ParameterSettings]:
    """Return one row per distinct settings, with the total number of values as its shape."""
    by_settings: dict[tuple[Any, ...], list[ParameterSettings]] = {}
    for row in rows:
        by_settings.setdefault((row.group, row.role, row.lr, row.weight_decay), []).append(row)
    summary = []
    for equal in by_settings.values():
        count = sum(torch.Size(row.shape).numel() for row in equal)
        name = join_limited([row.name for row in equal], 1)
        summary.append(dataclasses.replace(equal[0], shape=(count,), name=name))
    return sorted(summary, key=lambda row: ("qk", "fused", "embed", "rest").index(row.group))


def load_meta_model(name: str) -> nn.Module:
    """Build a model on the meta device from its config."""
    if name in PRESETS:
        return Decoder(preset(name), device="meta")
    require_transformers(f"opening '{name}', which is not a preset,")
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from qkflow.hf.pretrained import check_source_exists, is_run_dir
    from qkflow.training.pretrained import load_model

    if is_run_dir(Path(name)):
        return load_model(name)[0]
    try:
        check_source_exists(name)
    except InputError as error:
        raise InputError(f"not a preset ({', '.join(PRESETS)}): {error}", code=error.code) from None
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        causal = type(config) in AutoModelForCausalLM._model_mapping
        with torch.device("meta"):
            return (AutoModelForCausalLM if causal else AutoModel).from_config(config)
    except Exception as error:  # transformers raises many classes for broken configs
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"'{name}' is neither a preset ({', '.join(PRESETS)}) nor a model that can be loaded: {reason}",
            code="model-not-loadable",
        ) from error
