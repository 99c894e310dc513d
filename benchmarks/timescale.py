"""Cost of a slow path: training step, decoding, and memory of its attention.

    python benchmarks/timescale.py
    python benchmarks/timescale.py --quick
    python benchmarks/timescale.py --n-layers 8 --batch-size 8 --rounds 15 --threads 1 --json

The model with a slow path is timed against the model without one and against `dense-matched` (the same FLOPs
at token rate), with interleaved calls in one process. Ratios are medians over rounds with 95% intervals.
Timing starts only if incremental decoding with the slow path equals its full forward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import tyro
from rich.table import Table

from qkflow.attention import Attention
from qkflow.bench.memory import peak_memory_bytes
from qkflow.bench.timing import TimedFn, time_interleaved
from qkflow.bench.variants import (
    ROUND_MULTIPLIER,
    BenchShape,
    make_decode_step,
    make_training_step,
    share_equal_weights,
)
from qkflow.console import emit_json, out, progress_bar
from qkflow.errors import InputError
from qkflow.models import Decoder, ModelConfig
from qkflow.models.cost import flops_per_token
from qkflow.models.cpu_decoder import PackedWeights
from qkflow.studies.slow_path_variants import slow_path_variant

MEMORY_SEQ_LENS = (512, 1024, 2048, 4096)
CPU = torch.device("cpu")


def main(
    dim: int = 512,
    n_heads: int = 8,
    n_layers: int = 4,
    vocab_size: int = 8_192,
    batch_size: int = 8,
    seq_len: int = 512,
    ratio: int = 8,
    tokens: int = 8,
    rounds: int | None = None,
    threads: int | None = None,
    quick: bool = False,
    json: bool = False,
) -> None:
    """Time a slow path of half as many layers against the fast path alone and against dense-matched.

    Args:
        dim: Model dimension.
        n_heads: Attention heads.
        n_layers: Fast layers; the slow path has half as many.
        vocab_size: Vocabulary size.
        batch_size: Sequences per training step.
        seq_len: Tokens per sequence, and of the prompt for decoding.
        ratio: P, the tokens per block.
        tokens: Tokens decoded per call; a multiple of P, so that every call completes equally many blocks.
        rounds: Paired timings per row (default 9, with --quick 5); decoding takes eight times as many.
        threads: CPU threads (default: PyTorch's choice).
        quick: Use a small shape and few rounds.
        json: Print one JSON object instead of tables.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if quick:
        dim, n_heads, batch_size = 256, 4, 2
    rounds = rounds or (5 if quick else 9)
    base = ModelConfig(vocab_size=vocab_size, n_layers=n_layers, dim=dim, n_heads=n_heads)
    shape = BenchShape(
        dim=dim,
        n_heads=n_heads,
        seq_len=seq_len,
        batch_size=batch_size,
        vocab_size=vocab_size,
        decode_vocab_size=vocab_size,
        decode_tokens=tokens,
    )
    configs = {
        "fast": base,
        "slow": variant_config(base, f"slow:ratio={ratio}", seq_len),
        "dense": variant_config(base, f"dense-matched:ratio={ratio}", seq_len),
    }
    verify(configs["slow"])
    result: dict[str, Any] = {
        "environment": {"torch": torch.__version__, "threads": torch.get_num_threads(), "rounds": rounds},
        "model": {
            "n_layers": n_layers,
            "n_slow_layers": n_layers // 2 or 1,
            "ratio": ratio,
            "dim": dim,
            "vocab_size": vocab_size,
            "batch_size": batch_size,
            "seq_len": seq_len,
        },
        "dense_matched": {
            "n_layers": configs["dense"].n_layers,
            "hidden_dim": configs["dense"].resolved_hidden_dim,
        },
        "rows": measure(configs, shape, rounds),
        "memory": attention_memory(configs["slow"]),
    }
    result["memory_fit"] = fit_quadratic([(row["blocks"], row["materialized"]) for row in result["memory"]])
    if json:
        emit_json(result)
    else:
        show(result)


def variant_config(base: ModelConfig, name: str, seq_len: int) -> ModelConfig:
    return ModelConfig.from_dict({**base.to_dict(), **slow_path_variant(name, base, seq_len).model})


@torch.no_grad()
def verify(config: ModelConfig) -> None:
    """Raise unless token-by-token decoding with an open gate equals the full forward."""
    model = Decoder(config, seed=0).eval()
    assert model.slow is not None
    for gate in model.slow.gates.values():
        gate.weight.fill_(0.5)
    ids = torch.randint(config.vocab_size, (1, 3 * model.slow.ratio - 1))
    caches = model.new_caches(*ids.shape)
    steps = torch.cat([model(token, caches=caches) for token in ids.split(1, 1)], 1)
    error = float((steps - model(ids)).abs().max())
    if not error < 1e-3:
        raise InputError(
            f"decoding differs from the full forward by {error:.1e}: fix it before timing",
            code="decoding-mismatch",
        )


def measure(configs: dict[str, ModelConfig], shape: BenchShape, rounds: int) -> list[dict[str, Any]]:
    """Time a training step against both baselines, and decoding against the fast path."""

    def training_step(name: str) -> TimedFn:
        return make_training_step(Decoder(configs[name], seed=0), "model", shape, CPU, torch.float32)

    layouts, fast = PackedWeights(), Decoder(configs["fast"], seed=0)

    def decode_step(name: str) -> TimedFn:
        model = fast if name == "fast" else Decoder(configs[name], seed=0)
        share_equal_weights(model, fast)
        return make_decode_step(model, shape, CPU, layouts)

    flops = {name: flops_per_token(config, shape.seq_len) for name, config in configs.items()}
    rows = []
    for against in ("fast", "dense"):
        timed = time_slow("training step", against, training_step, rounds)
        flop_ratio = flops["slow"] / flops[against]
        overhead = timed["ratio"] / flop_ratio - 1
        rows.append({"what": "training step", **timed, "flop_ratio": flop_ratio, "beyond_flops": overhead})
    timed = time_slow("decoding", "fast", decode_step, rounds * ROUND_MULTIPLIER["decode"])
    speed = {"speed": 1 / timed["ratio"], "tokens_per_second": shape.decode_tokens / timed["seconds"]}
    return [*rows, {"what": "decoding", **timed, **speed}]


def time_slow(what: str, against: str, prepare: Callable[[str], TimedFn], rounds: int) -> dict[str, Any]:
    with progress_bar() as bar:
        task = bar.add_task(f"{what}: slow against {against}", total=rounds)
        calls = {"slow": prepare("slow")}
        timed = time_interleaved(prepare(against), calls, rounds=rounds, on_round=lambda: bar.advance(task))
    return {"against": against, **dataclasses.asdict(timed["slow"])}


def attention_memory(config: ModelConfig) -> list[dict[str, float]]:
    """Return peak bytes of one slow layer's scoring: with materialized scores, and with the fused kernel."""
    assert config.slow is not None
    layer: Attention = Decoder(config, seed=0).slow.blocks[0].attention  # type: ignore[union-attr, assignment]
    rows: list[dict[str, float]] = []
    for length in MEMORY_SEQ_LENS:
        blocks = length // config.slow.ratio
        materialized, fused = scoring_bytes(layer, blocks)
        row = {"tokens": length, "blocks": blocks, "materialized": materialized, "fused": fused}
        row["per_pair"] = materialized / blocks**2
        if rows:
            row["materialized_exponent"] = math.log2(materialized / rows[-1]["materialized"])
            row["fused_exponent"] = math.log2(fused / rows[-1]["fused"])
        rows.append(row)
    return rows


def fit_quadratic(points: list[tuple[float, float]]) -> dict[str, float]:
    """Fit bytes = a·K² + b·K for K blocks; return a, b and the largest relative error."""
    blocks, size = torch.tensor(points, dtype=torch.float64).T
    terms = torch.stack([blocks**2, blocks], 1) / size[:, None]  # least squares of relative errors
    pair, single = torch.linalg.lstsq(terms, torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0]
    max_error = ((pair * blocks**2 + single * blocks) / size - 1).abs().max()
    return {"per_pair_of_blocks": float(pair), "per_block": float(single), "max_error": float(max_error)}


@torch.no_grad()
def scoring_bytes(layer: Attention, blocks: int) -> tuple[int, int]:
    heads = layer.head_shapes
    q = torch.randn(1, blocks, heads.n_q, heads.head_dim)
    k = torch.randn(1, blocks, heads.n_k, heads.head_dim)
    v = torch.randn(1, blocks, heads.n_v, heads.v_head_dim)
    options: dict[str, Any] = {
        "mask": layer.make_mask(blocks, blocks),
        "scale": layer.scale,
        "x": torch.randn(1, blocks, layer.dim),
    }
    materialized = peak_memory_bytes(lambda: layer.scoring.reference(q, k, v, **options), CPU)
    return materialized, peak_memory_bytes(lambda: layer.scoring(q, k, v, dropout=0.0, **options), CPU)


def show(result: dict[str, Any]) -> None:
    table = Table(title="time with a slow path, and its FLOP ratio", title_justify="left")
    for heading in ("", "against", "time", "95%", "FLOPs", "overhead", "tokens/s"):
        table.add_column(heading, no_wrap=True)
    for row in result["rows"]:
        training = row["what"] == "training step"
        table.add_row(
            row["what"],
            row["against"],
            f"{row['ratio']:.3f}×",
            f"{row['low']:.3f}…{row['high']:.3f}",
            f"{row['flop_ratio']:.3f}×" if training else "",
            f"{row['beyond_flops']:+.1%}" if training else "",
            "" if training else f"{row['speed']:.3f}×",
        )
    out.print(table)
    table = Table(title="memory of one slow layer's scoring, MiB", title_justify="left")
    for heading in ("T", "T/P", "materialized", "bytes/(T/P)²", "grows as", "fused", "grows as"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["memory"]:
        materialized, fused = (row.get(f"{name}_exponent") for name in ("materialized", "fused"))
        table.add_row(
            str(row["tokens"]),
            str(row["blocks"]),
            f"{row['materialized'] / 2**20:.2f}",
            f"{row['per_pair']:.1f}",
            f"T^{materialized:.2f}" if materialized else "",
            f"{row['fused'] / 2**20:.2f}",
            f"T^{fused:.2f}" if fused else "",
        )
    out.print(table)
    fit = result["memory_fit"]
    out.print(
        f"materialized scores: {fit['per_pair_of_blocks']:.1f} bytes × (T/P)² + "
        f"{fit['per_block']:.0f} bytes × T/P, within {fit['max_error']:.1%}"
    )
    for name in ("model", "dense_matched", "environment"):
        out.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in result[name].items()))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
