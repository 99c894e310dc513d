"""`qkflow pace …`: the query-key circuit's pace, in theory and on the controlled task."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from qkflow import console
from qkflow.errors import InputError

if TYPE_CHECKING:  # torch is imported by the command that needs it
    from qkflow.papers.faster_qk.fixed_attention import FixedAttentionResult
    from qkflow.papers.faster_qk.synthetic import SyntheticConfig, SyntheticResult


def _parse_floats(text: str, flag: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        raise InputError(f"{flag} takes numbers separated by commas, such as 0.1,1,10, not '{text}'")
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
    """The reduced gradient flow at a given loss: faster query-key learning buys sharper attention.

    Prints where training stands when the loss reaches --loss, for each ratio η_QK/η_OV of learning rates,
    from a closed form; nothing is integrated unless --check asks for it.

    Try:  qkflow pace flow
          qkflow pace flow --ratios 0.1,1,10 --loss 1e-6 --check
          qkflow pace flow --kind all --out flow.html

    Args:
        ratios: ratios η_QK/η_OV, separated by commas.
        loss: the loss at which training stops.
        kind: FAFO, FACO, CAFO, CACO (factorised or collapsed attention, then output), or all.
        m: number of relevant tokens.
        n: number of other tokens.
        b: number of training sequences.
        M: number of classes.
        start: where factorised circuits begin (zero is a saddle of theirs).
        check: also integrate the equations; show the largest difference of μ_OV, μ_QK, α.
        out: write the curves as one self-contained HTML file.
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
            found = asdict(each.integrate(loss))
            row["difference"] = max(abs(row[name] - found[name]) for name in ("mu_ov", "mu_qk", "alpha"))
    if out is not None:
        from qkflow.papers.faster_qk.figures import flow_figure, write_figure

        write_figure(flow_figure(flows, loss), out)
        console.err.print(f"curves: {out}", markup=False, soft_wrap=True)
    if json:
        console.emit_json({"loss": loss, "m": m, "n": n, "b": b, "M": M, "init": init, "rows": rows})
    else:
        comparable = (loss, m, n, b, M) == (1e-4, 5, 50, 50, 20)
        title = f"Reduced gradient flow at loss {loss:g} (m={m:g}, n={n:g}, b={b:g}, M={M:g})"
        console.out.print(_flow_table(title, rows, comparable))


def _flow_table(title: str, rows: list[dict[str, Any]], comparable: bool) -> Table:
    from qkflow.papers.faster_qk.reduced_flow import PUBLISHED_ENDPOINTS

    checked = "difference" in rows[0]
    caption = (
        "r = η_QK/η_OV; time in units of 1/η_OV; published: μ_OV, μ_QK, α printed by the authors' notebook"
    )
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
    length: int | None = None,
    growth: float | None = None,
    steps: int | None = None,
    stop_loss: float | None = None,
    qk_init: str | None = None,
    ov_init: str | None = None,
    batch: int | None = None,
    fixed_attention: bool = False,
    seeds: int = 3,
    first_seed: int = 1234,
    workers: int = 0,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Train attention on the controlled task and show where it looks, next to the published figure.

    Without --setting, all six settings of the figure. With it, one cell of any kind: F(actorised) or
    C(ollapsed) A(ttention), then O(utput). With --fixed-attention, the output circuit alone under attention
    that is given.

    Try:  qkflow pace synthetic --out figure.html
          qkflow pace synthetic --setting FACO --steps 50000 --seeds 1
          qkflow pace synthetic --setting CACO --qk-lr .05 --ov-lr .01 --length 128
          qkflow pace synthetic --fixed-attention --seeds 1

    Args:
        setting: FAFO, FACO, CAFO or CACO: run this one cell.
        qk_lr: learning rate of the query-key circuit (default .01).
        ov_lr: learning rate of the output-value circuit (default .01).
        length: tokens a sequence, label included (default 64).
        growth: the query-key rate grows to this multiple, linearly in steps (default 1).
        steps: most steps to train (default: as published for the kind).
        stop_loss: stop once the loss, averaged over 250 steps, is this low (default: as published).
        qk_start: identity (1e-6·I) or uniform (±1/√50) (default: as published).
        ov_start: the same for the output-value circuit.
        batch: sequences a step (default 32; 128 with --fixed-attention).
        fixed_attention: train the output-value circuit alone, for five fixed attention shares.
        seeds: number of seeds.
        first_seed: the first of them; the others follow.
        workers: processes (0: as many as help).
        out: write the heatmaps as one self-contained HTML file.
        json: print one JSON object instead of a table.
    """
    from qkflow.papers.faster_qk.synthetic import FIGURE_CONFIGS, synthetic_config

    if seeds < 1:
        raise InputError(f"--seeds must be at least 1, not {seeds}")
    given: dict[str, Any] = {
        "qk_lr": qk_lr, "ov_lr": ov_lr, "length": length, "growth": growth, "steps": steps,
        "stop_loss": stop_loss, "qk_init": qk_init, "ov_init": ov_init, "batch": batch,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    chosen = range(first_seed, first_seed + seeds)
    if fixed_attention:
        useless = [name for name in given if name not in ("ov_lr", "length", "steps", "batch")]
        _check_unused_options(
            useless + (["setting"] if setting else []), "has no meaning with --fixed-attention"
        )
        _run_fixed_attention(chosen, given, out, json)
    elif setting is None:
        _check_unused_options(list(given), "needs --setting FAFO, FACO, CAFO or CACO")
        _run_settings(FIGURE_CONFIGS, chosen, workers, out, json)
    else:
        _run_settings([synthetic_config(setting, **given)], chosen, workers, out, json)


def _check_unused_options(names: list[str], reason: str) -> None:
    if names:
        raise InputError(f"--{names[0].replace('_', '-')} {reason}")


def _run_settings(
    settings: Sequence[SyntheticConfig], seeds: Sequence[int], workers: int, out: Path | None, json: bool
) -> None:
    """Train the settings, then print a row each, with the published row and the difference under it."""
    import numpy as np

    from qkflow.papers.faster_qk.figures import heatmap_figure, write_figure
    from qkflow.papers.faster_qk.sweep import sweep
    from qkflow.papers.faster_qk.synthetic import BIN_EDGES

    clock = _Timer()
    with console.progress_bar() as bar:
        task = bar.add_task("training", total=sum(each.steps for each in settings) * len(seeds))
        outcomes = sweep(settings, seeds, workers, partial(bar.advance, task))
    rows = [_settings_row([each for each in outcomes if each.config == setting]) for setting in settings]
    if out is not None:
        write_figure(heatmap_figure({row["name"]: np.array(row["heatmap"]) for row in rows}, BIN_EDGES), out)
        console.err.print(f"heatmaps: {out}", markup=False, soft_wrap=True)
    if json:
        console.emit_json({"seeds": list(seeds), **clock.elapsed(), "rows": rows})
    else:
        console.out.print(_settings_table(rows, len(seeds)))
        console.out.print(clock)


def _settings_row(outcomes: list[SyntheticResult]) -> dict[str, Any]:
    """One setting, averaged over its seeds."""
    import numpy as np

    setting = outcomes[0].config
    shares = np.array([each.attention_histogram for each in outcomes])
    heatmap = np.mean([each.heatmap for each in outcomes], axis=0)
    attention = [each.mean_distinct_attention for each in outcomes]
    row = {name: getattr(setting, name) for name in ("name", "kind", "qk_lr", "ov_lr", "length", "growth")}
    row |= {
        "steps": [each.steps for each in outcomes],
        "shares": shares.mean(0).tolist(),
        "shares_by_seed": shares.tolist(),
        "mean_distinct_attention": float(np.mean(attention)),
        "mean_query_attention": float(np.mean([each.mean_query_attention for each in outcomes])),
        "loss": float(np.mean([each.loss for each in outcomes])),
        "confident": float(heatmap[:, -1].sum()),  # % of instances with p(truth) of 0.8 or more
        "heatmap": heatmap.tolist(),
        "published": list(setting.published) if setting.published else None,
    }
    if setting.published:
        row["difference"] = (shares.mean(0) - np.array(setting.published)).tolist()
    return row


def _settings_table(rows: list[dict[str, Any]], seeds: int) -> Table:
    caption = (
        "% of instances by attention on distinct tokens, its mean, mean attention on the query token, loss, "
    )
    caption += "% of instances with p(truth) ≥ .8"
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


def _run_fixed_attention(
    seeds: Sequence[int], overrides: dict[str, Any], out: Path | None, json: bool
) -> None:
    """Train both kinds of OV circuit under each attention share; print losses, published ones, and gains."""
    from qkflow.papers.faster_qk import fixed_attention
    from qkflow.papers.faster_qk.figures import fixed_attention_figure, write_figure

    clock = _Timer()
    options = {"lr" if name == "ov_lr" else name: value for name, value in overrides.items()}
    found: list[FixedAttentionResult] = []
    with console.progress_bar() as bar:
        task = bar.add_task("training", total=options.get("steps", fixed_attention.DEFAULT_STEPS) * 2)
        for kind in fixed_attention.PUBLISHED_LOSSES:
            found += fixed_attention.train_fixed_attention(
                kind, seeds, on_progress=partial(bar.advance, task), **options
            )
    rows: list[dict[str, Any]] = []
    for each in found:
        known = fixed_attention.PUBLISHED_LOSSES[each.kind].get(each.alpha) if not options else None
        rows.append({**asdict(each), "published": known, "ratio": each.loss / known if known else None})
    if out is not None:
        write_figure(fixed_attention_figure(found), out)
        console.err.print(f"curves: {out}", markup=False, soft_wrap=True)
    if json:
        console.emit_json({"seeds": list(seeds), **clock.elapsed(), "rows": rows})
        return
    delta = fixed_attention.DELTA
    title = f"Attention fixed at α, output-value circuit trained, mean of {len(seeds)} seed(s)"
    caption = f"gain: [L(α) − L(α + {delta})]/{delta}, the worth of more attention"
    table = Table(title=title, caption=caption, box=box.SIMPLE)
    for heading in ("circuit", "α", "loss", "published", "ours/published", "marginal gain"):
        table.add_column(heading, justify="right")
    for row in rows:
        compared = [f"{row['published']:.3g}", f"{row['ratio']:.3f}"] if row["published"] else ["–", "–"]
        gain = "–" if row["gain"] is None else f"{row['gain']:.3g}"
        table.add_row(row["kind"], f"{row['alpha']:g}", f"{row['loss']:.4g}", *compared, gain)
    console.out.print(table)
    console.out.print(clock)


class _Timer:
    """Wall-clock and processor seconds, those of finished child processes included."""

    def __init__(self) -> None:
        self._start_times = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        times = os.times()
        return time.perf_counter(), times.user + times.system + times.children_user + times.children_system

    def elapsed(self) -> dict[str, float]:
        wall, processor = (now - then for now, then in zip(self._now(), self._start_times, strict=True))
        return {"seconds": wall, "processor_seconds": processor}

    def __str__(self) -> str:
        used = self.elapsed()
        return f"{used['seconds']:.0f} s of wall-clock, {used['processor_seconds']:.0f} s of processor time"
