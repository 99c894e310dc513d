"""`qkflow pace flow` and `qkflow pace synthetic`: faster query-key learning in theory and on a toy task."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.table import Table

from qkflow import console
from qkflow.config_io import Range
from qkflow.errors import InputError

if TYPE_CHECKING:  # imported inside the commands, because torch is slow to import
    from qkflow.papers.faster_qk.fixed_attention import FixedAttentionResult
    from qkflow.papers.faster_qk.synthetic import SyntheticConfig, SyntheticResult


MAX_SEEDS = 1000


def _parse_floats(text: str, flag: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
        if not all(map(math.isfinite, values)):
            values = []
    except ValueError:
        values = []
    if not values:
        raise InputError(
            f"{flag} takes numbers separated by commas, e.g. 0.1,1,10, not '{text}'", code="not-a-number-list"
        )
    return values


def flow(
    ratios: str = "0.01,0.1,1,10,100",
    loss: float = 1e-4,
    kind: str = "CACO",
    m: float = 5,
    n: float = 50,
    b: float = 50,
    M: float = 20,
    init: float = 1e-3,
    check: bool = False,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Evaluate the reduced gradient flow of attention at a given loss, in closed form.

    For each ratio η_QK/η_OV of learning rates: μ_OV, μ_QK, the attention α on relevant tokens, and the time
    at which the loss reaches --loss. With --check, the equations are also integrated numerically.

    examples:
      qkflow pace flow
      qkflow pace flow --ratios 0.1,1,10 --loss 1e-6 --check
      qkflow pace flow --kind all --out flow.html

    Args:
        ratios: ratios η_QK/η_OV, separated by commas.
        loss: loss to evaluate the flow at.
        kind: FAFO, FACO, CAFO, CACO (Factorized or Collapsed Attention, then Output), or all.
        m: number of relevant tokens.
        n: number of other tokens.
        b: number of training sequences.
        M: number of classes.
        init: initial μ of factorized circuits (zero is a saddle).
        check: also integrate the equations and show the largest difference of μ_OV, μ_QK, α.
        out: write the trajectories as one self-contained HTML file.
        json: print one JSON object instead of a table.
    """
    from qkflow.papers.faster_qk.reduced_flow import KINDS, ReducedFlow

    kinds = KINDS if kind == "all" else (kind,)
    flows = [
        ReducedFlow(r, name, m, n, b, M, init) for name in kinds for r in _parse_floats(ratios, "--ratios")
    ]
    rows = [{"kind": each.kind, "ratio": each.ratio, **asdict(each.at_loss(loss))} for each in flows]
    if check:
        for each, row in zip(flows, rows, strict=True):
            reference = asdict(each.integrate(loss))
            row["difference"] = max(abs(row[name] - reference[name]) for name in ("mu_ov", "mu_qk", "alpha"))
    if out is not None:
        from qkflow.papers.faster_qk.figures import flow_page

        _write_page(out, flow_page(flows, loss))
    if json:
        console.emit_json({"loss": loss, "m": m, "n": n, "b": b, "M": M, "init": init, "rows": rows})
    else:
        comparable = (loss, m, n, b, M) == (1e-4, 5, 50, 50, 20)
        title = f"Reduced gradient flow at loss {loss:g} (m={m:g}, n={n:g}, b={b:g}, M={M:g})"
        console.out.print(_flow_table(title, rows, comparable))


def _write_page(path: Path, page: str) -> None:
    from qkflow.files import write_atomic

    write_atomic(path, page)
    console.err.print(f"figure: {path}", markup=False, soft_wrap=True)


def _flow_table(title: str, rows: list[dict[str, Any]], comparable: bool) -> Table:
    from qkflow.papers.faster_qk.reduced_flow import PUBLISHED_ENDPOINTS

    checked = "difference" in rows[0]
    caption = "r = η_QK/η_OV; time in units of 1/η_OV; published: μ_OV, μ_QK, α of the authors' notebook"
    table = Table(title=title, caption=caption, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("kind", "r", "μ_OV", "μ_QK", "α", "time", "published"):
        table.add_column(heading, justify="right", no_wrap=True)
    if checked:
        table.add_column("difference", justify="right")
    for row in rows:
        known = PUBLISHED_ENDPOINTS.get(row["ratio"]) if comparable and row["kind"] == "CACO" else None
        cells = [row["kind"], f"{row['ratio']:g}", f"{row['mu_ov']:.4f}", f"{row['mu_qk']:.5f}"]
        cells += [f"{row['alpha']:.5f}", f"{row['time']:.3g}"]
        cells.append(" ".join(f"{value:.3f}" for value in known) if known else "–")
        table.add_row(*cells, *([f"{row['difference']:.0e}"] if checked else []))
    return table


def synthetic(
    setting: str | None = None,
    qk_lr: float | None = None,
    ov_lr: float | None = None,
    seq_len: Annotated[int, Range(high=10**4)] | None = None,
    growth: float | None = None,
    steps: int | None = None,
    stop_loss: float | None = None,
    qk_init: str | None = None,
    ov_init: str | None = None,
    batch_size: Annotated[int, Range(high=10**5)] | None = None,
    fixed_attention: bool = False,
    seeds: Annotated[int, Range(1, MAX_SEEDS)] = 3,
    first_seed: Annotated[int, Range(0, 2**32)] = 1234,
    workers: Annotated[int, Range(0, 4096)] = 0,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Train attention on the controlled task and compare it with the published figure.

    Without --setting, trains all six settings of the figure. With --setting, trains one: F(actorized) or
    C(ollapsed) A(ttention), then O(utput). With --fixed-attention, trains the output-value circuit only,
    under fixed attention.

    examples:
      qkflow pace synthetic --out figure.html
      qkflow pace synthetic --setting FACO --steps 50000 --seeds 1
      qkflow pace synthetic --setting CACO --qk-lr .05 --ov-lr .01 --seq-len 128
      qkflow pace synthetic --fixed-attention --seeds 1

    Args:
        setting: FAFO, FACO, CAFO or CACO.
        qk_lr: learning rate of the query-key circuit (default: .01).
        ov_lr: learning rate of the output-value circuit (default: .01).
        seq_len: tokens per sequence, including the label (default: 64).
        growth: factor by which the query-key learning rate grows, linearly in steps (default: 1).
        steps: maximum number of steps (default: as published for the setting and sequence length).
        stop_loss: stop after a tenth epoch whose mean loss is at most this (default: as published). An epoch
            is 250 steps.
        qk_init: init of the query-key circuit, identity (1e-6·I) or uniform (±1/√50) (default: as published).
        ov_init: init of the output-value circuit.
        batch_size: sequences per step (default: 32; 128 with --fixed-attention).
        fixed_attention: train only the output-value circuit, under five fixed attention shares α.
        seeds: number of seeds.
        first_seed: first seed; the others follow.
        workers: number of processes (0: one per sequence shape, at most one per CPU).
        out: write the figure as one self-contained HTML file.
        json: print one JSON object instead of a table.
    """
    from qkflow.papers.faster_qk.synthetic import FIGURE_CONFIGS, synthetic_config

    options: dict[str, Any] = {
        "qk_lr": qk_lr, "ov_lr": ov_lr, "seq_len": seq_len, "growth": growth, "steps": steps,
        "stop_loss": stop_loss, "qk_init": qk_init, "ov_init": ov_init, "batch_size": batch_size,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if value is not None}
    seed_range = range(first_seed, first_seed + seeds)
    if fixed_attention:
        unused = [name for name in options if name not in ("ov_lr", "seq_len", "steps", "batch_size")]
        _check_unused_options(
            unused + (["setting"] if setting else []), "has no effect with --fixed-attention"
        )
        run_fixed_attention(seed_range, options, out, json)
    elif setting is None:
        _check_unused_options(list(options), "needs --setting FAFO, FACO, CAFO or CACO")
        run_settings(FIGURE_CONFIGS, seed_range, workers, out, json)
    else:
        run_settings([synthetic_config(setting, **options)], seed_range, workers, out, json)


def _check_unused_options(names: list[str], reason: str) -> None:
    if names:
        raise InputError(f"--{names[0].replace('_', '-')} {reason}", code="unused-option")


def run_settings(
    configs: Sequence[SyntheticConfig], seeds: Sequence[int], workers: int, out: Path | None, json: bool
) -> None:
    """Train the settings and print a row each, with the published row and the difference below it."""
    import numpy as np

    from qkflow.papers.faster_qk.figures import heatmap_page
    from qkflow.papers.faster_qk.sweep import sweep

    timer = _Timer()
    with console.progress_bar() as bar:
        task = bar.add_task("training", total=sum(config.steps for config in configs) * len(seeds))
        results = sweep(configs, seeds, workers, partial(bar.advance, task))
    rows = [_settings_row([result for result in results if result.config == config]) for config in configs]
    if out is not None:
        _write_page(out, heatmap_page({row["name"]: np.array(row["heatmap"]) for row in rows}))
    if json:
        console.emit_json({"seeds": list(seeds), **timer.elapsed(), "rows": rows})
    else:
        console.out.print(_settings_table(rows, len(seeds)))
        console.out.print(timer)


def _settings_row(results: list[SyntheticResult]) -> dict[str, Any]:
    """Average the runs of one setting over seeds."""
    import numpy as np

    config = results[0].config
    shares = np.array([result.attention_histogram for result in results])
    heatmap = np.mean([result.heatmap for result in results], axis=0)
    row = {name: getattr(config, name) for name in ("name", "kind", "qk_lr", "ov_lr", "seq_len", "growth")}
    row |= {
        "steps": [result.steps for result in results],
        "shares": shares.mean(0).tolist(),
        "shares_by_seed": shares.tolist(),
        "mean_distinct_attention": float(np.mean([result.mean_distinct_attention for result in results])),
        "mean_query_attention": float(np.mean([result.mean_query_attention for result in results])),
        "loss": float(np.mean([result.loss for result in results])),
        "confident": float(heatmap[:, -1].sum()),  # % of instances with label probability ≥ .8
        "heatmap": heatmap.tolist(),
        "published": list(config.published) if config.published else None,
    }
    if config.published:
        row["difference"] = (shares.mean(0) - np.array(config.published)).tolist()
    return row


def _settings_table(rows: list[dict[str, Any]], seeds: int) -> Table:
    caption = (
        "% of instances by attention on distinct tokens, its mean, mean attention on the query token, loss, "
        "% of instances with label probability ≥ .8"
    )
    title = f"The controlled task, mean of {seeds} seed(s)"
    table = Table(title=title, caption=caption, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("setting")
    for heading in ("0–.2", ".2–.4", ".4–.6", ".6–.8", ".8–1", "mean", "query", "loss", "≥.8"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{share:.1f}" for share in row["shares"]]
        cells += [f"{row[name]:.3f}" for name in ("mean_distinct_attention", "mean_query_attention")]
        table.add_row(row["name"], *cells, f"{row['loss']:.2g}", f"{row['confident']:.1f}")
        if row["published"]:
            table.add_row("  published", *(f"{share:.1f}" for share in row["published"]), style="dim")
            table.add_row("  difference", *(f"{value:+.1f}" for value in row["difference"]), style="dim")
    return table


def run_fixed_attention(
    seeds: Sequence[int], overrides: dict[str, Any], out: Path | None, json: bool
) -> None:
    """Train both kinds of OV circuit under each α; print final and published losses and marginal gains."""
    from qkflow.papers.faster_qk import fixed_attention
    from qkflow.papers.faster_qk.figures import fixed_attention_page

    timer = _Timer()
    options = {"lr" if name == "ov_lr" else name: value for name, value in overrides.items()}
    results: list[FixedAttentionResult] = []
    with console.progress_bar() as bar:
        task = bar.add_task("training", total=options.get("steps", fixed_attention.DEFAULT_STEPS) * 2)
        for kind in fixed_attention.PUBLISHED_LOSSES:
            results += fixed_attention.train_fixed_attention(
                kind, seeds, on_progress=partial(bar.advance, task), **options
            )
    rows: list[dict[str, Any]] = []
    for result in results:
        published = None if options else fixed_attention.PUBLISHED_LOSSES[result.kind].get(result.alpha)
        ratio = result.loss / published if published else None
        rows.append({**asdict(result), "published": published, "ratio": ratio})
    if out is not None:
        _write_page(out, fixed_attention_page(results))
    if json:
        console.emit_json({"seeds": list(seeds), **timer.elapsed(), "rows": rows})
    else:
        console.out.print(_fixed_attention_table(rows, len(seeds)))
        console.out.print(timer)


def _fixed_attention_table(rows: list[dict[str, Any]], seeds: int) -> Table:
    from qkflow.papers.faster_qk import fixed_attention

    delta = fixed_attention.DELTA
    title = f"Attention fixed at α, output-value circuit trained, mean of {seeds} seed(s)"
    caption = f"marginal gain: [L(α) − L(α + {delta})]/{delta}"
    table = Table(title=title, caption=caption, box=box.SIMPLE)
    for heading in ("circuit", "α", "loss", "published", "ours/published", "marginal gain"):
        table.add_column(heading, justify="right")
    for row in rows:
        compared = [f"{row['published']:.3g}", f"{row['ratio']:.3f}"] if row["published"] else ["–", "–"]
        gain = "–" if row["gain"] is None else f"{row['gain']:.3g}"
        table.add_row(row["kind"], f"{row['alpha']:g}", f"{row['loss']:.4g}", *compared, gain)
    return table


class _Timer:
    """Wall-clock and CPU seconds, including finished child processes."""

    def __init__(self) -> None:
        self._start_times = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        times = os.times()
        return time.perf_counter(), times.user + times.system + times.children_user + times.children_system

    def elapsed(self) -> dict[str, float]:
        wall, cpu = (now - then for now, then in zip(self._now(), self._start_times, strict=True))
        return {"seconds": wall, "cpu_seconds": cpu}

    def __str__(self) -> str:
        elapsed = self.elapsed()
        return f"{elapsed['seconds']:.0f} s wall-clock, {elapsed['cpu_seconds']:.0f} s CPU time"
