"""`qkflow claims`: every claim of the papers, beside what this project measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import tyro

from qkflow import console
from qkflow.cli.commands.registry import print_rows
from qkflow.papers.claims import LedgerRow, Measurement, Results, build_ledger, damaged_results
from qkflow.papers.coupled_dynamics.contrasts import contrast_rows, init_by_coupling_rows
from qkflow.papers.coupled_dynamics.corpora import corpus_rows, predictor_rows
from qkflow.papers.coupled_dynamics.equal_cost import equal_cost_rows
from qkflow.papers.coupled_dynamics.factorial import factorial_rows
from qkflow.papers.coupled_dynamics.induction import induction_rows
from qkflow.papers.coupled_dynamics.lr_limits import lr_limit_rows
from qkflow.papers.coupled_dynamics.step_time import step_time_rows
from qkflow.papers.coupled_dynamics.token_budgets import token_budget_rows
from qkflow.papers.fast_slow.gates import gate_rows
from qkflow.papers.faster_qk.schedules import schedule_rows
from qkflow.papers.faster_qk.tasks import task_rows
from qkflow.papers.findings import Finding, main_findings
from qkflow.papers.ledger import select_claims
from qkflow.papers.open_questions import open_question_rows

TableName = Literal[
    "ingredients",
    "init-by-coupling",
    "symmetric-factorial",
    "corpora",
    "predictors",
    "token-budgets",
    "equal-cost",
    "step-time",
    "lr-limits",
    "induction",
    "pace-schedules",
    "pace-tasks",
    "gates",
    "open-questions",
]
TABLES: dict[TableName, Callable[[Results], list[dict[str, str]]]] = {
    "ingredients": contrast_rows,
    "init-by-coupling": init_by_coupling_rows,
    "symmetric-factorial": factorial_rows,
    "corpora": corpus_rows,
    "predictors": predictor_rows,
    "token-budgets": token_budget_rows,
    "equal-cost": equal_cost_rows,
    "step-time": step_time_rows,
    "lr-limits": lr_limit_rows,
    "induction": induction_rows,
    "pace-schedules": schedule_rows,
    "pace-tasks": task_rows,
    "gates": gate_rows,
    "open-questions": open_question_rows,
}
STATUS_STYLES = {"consistent": "green", "contradicted": "red", "mixed": "yellow"}


def claims(
    dial: Annotated[str | None, tyro.conf.Positional] = None,
    *,
    findings: bool = False,
    table: TableName | None = None,
    results: Path | None = None,
    markdown: bool = False,
    json: bool = False,
) -> None:
    """Print every claim of the three papers: the published figure, ours, and whether they agree.

    Our figures are computed from stored results (docs/results), with intervals and verdicts of the judge that
    `qkflow compare` uses. The recipes of the papers are not public, so agreement at another scale means
    consistent, never more. The command of a finding repeats it.

    examples:
      qkflow claims
      qkflow claims coupling
      qkflow claims --findings
      qkflow claims --table ingredients
      qkflow claims --json

    Args:
        dial: coupling, timescale or pace (default: all).
        findings: print the main findings instead, one sentence each.
        table: print a table of the stored studies instead. ingredients: which part of a coupling does the
            work; init-by-coupling: a symmetric init and a coupling that starts as the identity;
            symmetric-factorial: the gain of a symmetric init by the other parts of the init; corpora:
            gains by corpus beside measures of the text; predictors: correlations of these measures with
            the gain; token-budgets: gains by tokens of training, and which hypothesis predicts the
            largest; equal-cost: differential scoring after equal tokens and FLOPs; step-time: what
            couplings cost in a training step; lr-limits: the largest learning rate that trains;
            induction: when induction heads form; pace- schedules: ratios of the learning rates in
            language modeling; pace-tasks: ratios on labeled tasks; gates: the gate of the slow path, and
            what it gains; open-questions: what is not settled, the recipe that would settle it, and its
            cost.
        results: folder with stored results (default: those of this version).
        markdown: print Markdown, as in docs/claims.md.
        json: print one JSON object.
    """
    stored = Results(results)
    if findings:
        with damaged_results(stored):
            sentences = main_findings(stored)
        _print_findings(sentences, json)
        return
    if table is not None:
        with damaged_results(stored):
            cells = TABLES[table](stored)
        print_rows(table, cells, json, markdown)
        return
    ledgers = {name: build_ledger(selected, stored) for name, selected in select_claims(dial).items()}
    if json:
        console.emit_json({name: [row.to_dict() for row in rows] for name, rows in ledgers.items()})
    elif markdown:
        headings = [f"## {name.capitalize()}\n\n" if dial is None else "" for name in ledgers]
        tables = [_markdown(rows) for rows in ledgers.values()]
        print("\n".join(heading + table for heading, table in zip(headings, tables, strict=True)))
    else:
        for name, rows in ledgers.items():
            _print(name, rows)


def _print_findings(findings: list[Finding], json: bool) -> None:
    if json:
        console.emit_json({"findings": [asdict(finding) for finding in findings]})
        return
    for index, finding in enumerate(findings, start=1):
        print(f"{index}. **{finding.title}** {finding.text}")


def _print(name: str, rows: list[LedgerRow]) -> None:
    from rich.text import Text

    console.out.rule(name)
    for row in rows:
        style = STATUS_STYLES.get(str(row.status), "bold")
        console.out.print(Text.assemble((f"{row.status}", style), "  ", (row.claim.text, "bold")))
        console.out.print(f"  published: {row.claim.published}", markup=False, highlight=False)
        for finding in row.findings:
            console.out.print(f"  ours: {_finding(finding)}", markup=False, highlight=False)
        if row.claim.to_settle:
            console.out.print(f"  to settle: {row.claim.to_settle}", markup=False, highlight=False)


def _finding(finding: Measurement, suffix: str = "") -> str:
    # parentheses: brackets would be a link in Markdown
    seeds = f", {finding.seeds} seeds" if finding.seeds else ""
    return f"{finding.mark} {finding.text} ({finding.scale}{seeds}{suffix})"


def _markdown(rows: list[LedgerRow]) -> str:
    """Return one table row per claim, and the commands below."""
    lines = ["| claim | published | ours | status |", "|---|---|---|---|"]
    hours_by_command = {finding.command: finding.core_hours for row in rows for finding in row.findings}
    commands = list(hours_by_command)
    for row in rows:
        ours = "<br>".join(
            _finding(finding, f"; command {commands.index(finding.command) + 1}") for finding in row.findings
        )
        if row.claim.to_settle:
            ours += ("<br>" if ours else "") + f"*To settle:* {row.claim.to_settle}"
        cells = (row.claim.text, row.claim.published, ours, f"**{row.status}**")
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    lines += ["", "Commands:", ""]
    for index, (command, hours) in enumerate(hours_by_command.items(), start=1):
        lines.append(f"{index}. `{command}`" + (f" ({hours:.1f} core hours)" if hours else ""))
    return "\n".join([*lines, ""])
