"""`qkflow pace …`: the query-key circuit's pace, in theory and on the controlled task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from qkflow import console
from qkflow.errors import InputError


def _numbers(text: str, flag: str) -> list[float]:
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
    start: float = 1e-3,
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
    from dataclasses import asdict

    from qkflow.pace.reduced_flow import KINDS, Flow

    kinds = KINDS if kind == "all" else (kind,)
    flows = [Flow(r, name, m, n, b, M, start) for name in kinds for r in _numbers(ratios, "--ratios")]
    rows = [{"kind": each.kind, "ratio": each.ratio, **asdict(each.at_loss(loss))} for each in flows]
    if check:
        for each, row in zip(flows, rows, strict=True):
            found = asdict(each.integrate(loss))
            row["difference"] = max(abs(row[name] - found[name]) for name in ("mu_ov", "mu_qk", "alpha"))
    if out is not None:
        from qkflow.pace.figures import flow_figure, write_page

        write_page(flow_figure(flows, loss), out)
        console.err.print(f"curves: {out}")
    if json:
        console.emit_json({"loss": loss, "m": m, "n": n, "b": b, "M": M, "start": start, "rows": rows})
    else:
        comparable = (loss, m, n, b, M) == (1e-4, 5, 50, 50, 20)
        title = f"Reduced gradient flow at loss {loss:g} (m={m:g}, n={n:g}, b={b:g}, M={M:g})"
        console.out.print(_flow_table(title, rows, comparable))


def _flow_table(title: str, rows: list[dict[str, Any]], comparable: bool) -> Table:
    from qkflow.pace.reduced_flow import PUBLISHED

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
        known = PUBLISHED.get(row["ratio"]) if comparable and row["kind"] == "CACO" else None
        cells = [row["kind"], f"{row['ratio']:g}", f"{row['mu_ov']:.4f}", f"{row['mu_qk']:.5f}"]
        cells += [f"{row['alpha']:.5f}", f"{row['time']:.3g}"]
        cells.append(" ".join(f"{value:.3f}" for value in known) if known else "–")
        table.add_row(*cells, *([f"{row['difference']:.0e}"] if checked else []))
    return table
