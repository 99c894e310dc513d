"""Redraw the figures of the documentation from stored results: `make tables`."""

from __future__ import annotations

from pathlib import Path

from figures import budgets, dynamics, findings, scaling

IMAGES = Path(__file__).with_name("images")
FIGURES = {
    "findings.svg": findings.render,
    "dynamics.svg": dynamics.render,
    "budgets.svg": budgets.render,
    "scaling.svg": scaling.render,
}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, render in FIGURES.items():
        (IMAGES / name).write_text(render(), "utf-8")


if __name__ == "__main__":
    main()
