"""`qkflow claims`: every claim of the papers, beside what this project measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro

from qkflow import console
from qkflow.cli.commands.registry import print_rows
from qkflow.papers.claims import Finding, LedgerRow, Results, build_ledger
from qkflow.papers.coupled_dynamics.corpora import corpus_rows, gain_correlations
from qkflow.papers.findings import MainFinding, main_findings
from qkflow.papers.ledger import select_claims

STATUS_STYLES = {"consistent": "green", "contradicted": "red", "mixed": "yellow"}


def claims(
    dial: Annotated[str | None, tyro.conf.Positional] = None,
    *,
    findings: bool = False,
    corpora: bool = False,
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
      qkflow claims --corpora
      qkflow claims --json

    Args:
        dial: coupling, timescale or pace (default: all).
        findings: print the main findings instead, one sentence each.
        corpora: print the gains on several corpora instead, beside measures of the text that could predict
            them.
        results: folder with stored results (default: those of this version).
        markdown: print Markdown, as in docs/claims.md.
        json: print one JSON object.
    """
    stored = Results(results)
    if findings:
        _print_findings(main_findings(stored), json)
        return
    if corpora:
        _print_corpora(stored, markdown, json)
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


def _print_findings(findings: list[MainFinding], json: bool) -> None:
    if json:
        console.emit_json({"findings": [asdict(finding) for finding in findings]})
        return
    for index, finding in enumerate(findings, start=1):
        print(f"{index}. **{finding.title}** {finding.text}")


def _print_corpora(results: Results, markdown: bool, json: bool) -> None:
    rows, correlations = corpus_rows(results), gain_correlations(results)
    if json:
        console.emit_json({"corpora": rows, "correlations": [asdict(each) for each in correlations]})
        return
    print_rows("corpora", rows, json=False, markdown=markdown)
    print()
    tested = [
        {
            "measure": each.measure,
            "rank correlation with the change of euler from fan_in": f"{each.rho:+.2f}",
            "p, Holm": f"{each.p_holm:.2g}",
        }
        for each in correlations
    ]
    print_rows("correlations", tested, json=False, markdown=markdown)


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


def _finding(finding: Finding, suffix: str = "") -> str:
    # parentheses: brackets would be a link in Markdown
    seeds = f", {finding.seeds} seeds" if finding.seeds else ""
    return f"{finding.text} ({finding.scale}{seeds}{suffix})"


def _markdown(rows: list[LedgerRow]) -> str:
    """Return one table row per claim, and the commands below."""
    lines = ["| claim | published | ours | status |", "|---|---|---|---|"]
    commands: list[str] = []
    for row in rows:
        for finding in row.findings:
            if finding.command not in commands:
                commands.append(finding.command)
        ours = "<br>".join(
            _finding(finding, f"; command {commands.index(finding.command) + 1}") for finding in row.findings
        )
        if row.claim.to_settle:
            ours += ("<br>" if ours else "") + f"*To settle:* {row.claim.to_settle}"
        cells = (row.claim.text, row.claim.published, ours, f"**{row.status}**")
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    lines += ["", "Commands:", ""]
    lines += [f"{index}. `{command}`" for index, command in enumerate(commands, start=1)]
    return "\n".join([*lines, ""])
