"""What a slow path costs: a training step, decoding, and the memory of its attention.

    python benchmarks/timescale.py
    python benchmarks/timescale.py --quick
    python benchmarks/timescale.py --layers 8 --batch 8 --rounds 15 --threads 1 --json

The model with a slow path takes turns with the model without one and with `dense-matched` (the same compute
spent at token rate), call by call in one process. Ratios are medians over rounds with 95% intervals. The FLOP
ratio is what arithmetic alone would cost. Nothing is timed unless decoding with the slow path equals its full
pass.
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

LENGTHS = (512, 1024, 2048, 4096)  # of which attention memory is measured
CPU = torch.device("cpu")


def main(
    width: int = 512,
    heads: int = 8,
    layers: int = 4,
    vocabulary: int = 8_192,
    batch: int = 8,
    length: int = 512,
    ratio: int = 8,
    tokens: int = 8,
    rounds: int | None = None,
    threads: int | None = None,
    quick: bool = False,
    json: bool = False,
) -> None:
    """Time a slow path of half as many layers against the fast path alone and against dense-matched.

    Args:
        width: Width of the residual stream.
        heads: Attention heads.
        layers: Fast layers; the slow path has half as many.
        vocabulary: Tokens the model knows.
        batch: Sequences a training step.
        length: Tokens a sequence, and of the prompt that is decoded from.
        ratio: P, the tokens a block.
        tokens: Tokens decoded a call; a multiple of P, so that every call completes as many blocks.
        rounds: Paired timings a row; 9 unless given, 5 with --quick; in decoding eight times as many.
        threads: CPU threads; PyTorch's own choice by default.
        quick: A small shape and few rounds: a first look.
        json: Print one JSON object instead of tables.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if quick:
        width, heads, batch = 256, 4, 2
    rounds = rounds or (5 if quick else 9)
    base = ModelConfig(vocab_size=vocabulary, n_layers=layers, dim=width, n_heads=heads)
    shape = BenchShape(
        dim=width,
        n_heads=heads,
        seq_len=length,
        batch_size=batch,
        vocab_size=vocabulary,
        decode_vocab_size=vocabulary,
        decode_tokens=tokens,
    )
    configs = {
        "fast": base,
        "slow": changed(base, f"slow:ratio={ratio}", length),
        "dense": changed(base, f"dense-matched:ratio={ratio}", length),
    }
    verify(configs["slow"])
    result: dict[str, Any] = {
        "environment": {"torch": torch.__version__, "threads": torch.get_num_threads(), "rounds": rounds},
        "model": {
            "layers": layers,
            "slow_layers": layers // 2 or 1,
            "ratio": ratio,
            "width": width,
            "vocabulary": vocabulary,
            "batch": batch,
            "length": length,
        },
        "dense_matched": {
            "layers": configs["dense"].n_layers,
            "hidden": configs["dense"].resolved_hidden_dim,
        },
        "rows": measure(configs, shape, rounds),
        "memory": attention_memory(configs["slow"]),
    }
    result["memory_law"] = quadratic([(row["blocks"], row["held"]) for row in result["memory"]])
    if json:
        emit_json(result)
    else:
        show(result)


def changed(base: ModelConfig, name: str, length: int) -> ModelConfig:
    return ModelConfig.from_dict({**base.to_dict(), **slow_path_variant(name, base, length).model})


@torch.no_grad()
def verify(config: ModelConfig) -> None:
    """Decoding token by token with the gate open must give what the full pass gives."""
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
            f"decoding differs from the full pass by {error:.1e}: nothing is timed until it is correct"
        )


def measure(configs: dict[str, ModelConfig], shape: BenchShape, rounds: int) -> list[dict[str, Any]]:
    """A training step against both rivals, and decoding against the fast path alone."""

    def trained(name: str) -> TimedFn:
        return make_training_step(Decoder(configs[name], seed=0), "model", shape, CPU, torch.float32)

    layouts, fast = PackedWeights(), Decoder(configs["fast"], seed=0)

    def decoded(name: str) -> TimedFn:
        model = fast if name == "fast" else Decoder(configs[name], seed=0)
        share_equal_weights(model, fast)
        return make_decode_step(model, shape, CPU, layouts)

    flops = {name: flops_per_token(config, shape.seq_len) for name, config in configs.items()}
    rows = []
    for against in ("fast", "dense"):
        timed = race("training step", against, trained, rounds)
        arithmetic = flops["slow"] / flops[against]
        beyond = timed["ratio"] / arithmetic - 1
        rows.append({"what": "training step", **timed, "flop_ratio": arithmetic, "beyond_flops": beyond})
    timed = race("decoding", "fast", decoded, rounds * ROUND_MULTIPLIER["decode"])
    speed = {"speed": 1 / timed["ratio"], "tokens_per_second": shape.decode_tokens / timed["seconds"]}
    return [*rows, {"what": "decoding", **timed, **speed}]


def race(what: str, against: str, prepare: Callable[[str], TimedFn], rounds: int) -> dict[str, Any]:
    with progress_bar() as bar:
        task = bar.add_task(f"{what}: slow against {against}", total=rounds)
        calls = {"slow": prepare("slow")}
        timed = time_interleaved(prepare(against), calls, rounds=rounds, on_round=lambda: bar.advance(task))
    return {"against": against, **dataclasses.asdict(timed["slow"])}


def attention_memory(config: ModelConfig) -> list[dict[str, float]]:
    """Peak bytes of one slow layer's scoring: with all scores held, and through the fused kernel."""
    assert config.slow is not None
    layer: Attention = Decoder(config, seed=0).slow.blocks[0].attention  # type: ignore[union-attr, assignment]
    rows: list[dict[str, float]] = []
    for length in LENGTHS:
        blocks = length // config.slow.ratio
        held, fused = scoring_bytes(layer, blocks)
        row = {"tokens": length, "blocks": blocks, "held": held, "fused": fused, "per_pair": held / blocks**2}
        if rows:
            row["held_exponent"] = math.log2(held / rows[-1]["held"])
            row["fused_exponent"] = math.log2(fused / rows[-1]["fused"])
        rows.append(row)
    return rows


def quadratic(points: list[tuple[float, float]]) -> dict[str, float]:
    """Bytes as a·K² + b·K of K blocks, and how far the worst point lies off it."""
    blocks, held = torch.tensor(points, dtype=torch.float64).T
    terms = torch.stack([blocks**2, blocks], 1) / held[:, None]  # every point counts alike
    pair, single = torch.linalg.lstsq(terms, torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0]
    misfit = ((pair * blocks**2 + single * blocks) / held - 1).abs().max()
    return {"per_pair_of_blocks": float(pair), "per_block": float(single), "misfit": float(misfit)}


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
    held = peak_memory_bytes(lambda: layer.scoring.reference(q, k, v, **options), CPU)
    return held, peak_memory_bytes(lambda: layer.scoring(q, k, v, dropout=0.0, **options), CPU)


def show(result: dict[str, Any]) -> None:
    table = Table(title="time with a slow path, beside what its FLOPs alone would cost", title_justify="left")
    for heading in ("", "against", "time", "95%", "FLOPs", "beyond", "tokens/s"):
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
    for heading in ("T", "T/P", "all scores held", "bytes/(T/P)²", "grows as", "fused", "grows as"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["memory"]:
        held, fused = (row.get(f"{name}_exponent") for name in ("held", "fused"))
        table.add_row(
            str(row["tokens"]),
            str(row["blocks"]),
            f"{row['held'] / 2**20:.2f}",
            f"{row['per_pair']:.1f}",
            f"T^{held:.2f}" if held else "",
            f"{row['fused'] / 2**20:.2f}",
            f"T^{fused:.2f}" if fused else "",
        )
    out.print(table)
    law = result["memory_law"]
    out.print(
        f"scores held: {law['per_pair_of_blocks']:.1f} bytes × (T/P)² + {law['per_block']:.0f} bytes × T/P"
        f", within {law['misfit']:.1%}"
    )
    for name in ("model", "dense_matched", "environment"):
        out.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in result[name].items()))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
