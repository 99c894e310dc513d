"""Size of a report, and the time until Chromium has drawn it: `python benchmarks/report.py`.

The study has made-up runs: 12 arms, 2 inits, 5 seeds, 25 evaluations and probes of 12 layers.

    text    from the request of the page to its first paint
    drawn   to the last figure in view; the cards of 12 arms may fill the view, and then no figure is in it
    busy    CPU time of the main thread of the page until then
    all     to the last figure of the page

The first page is left out: it starts processes of the browser.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from playwright.sync_api import Browser, sync_playwright

from browser import CHROMIUM, DESKTOP, OPTIONS, TIMEOUT
from made_study import write_study
from qkflow.report.page import render_report
from qkflow.studies import ComparisonConfig, load_comparison
from qkflow.studies.grid import build_grid

VARIANTS = (
    *("standard", "euler", "drift", "affine", "leapfrog:n=2", "leapfrog:n=4", "leapfrog:n=7", "uncoupled"),
    *("nonlinear_query", "euler+differential", "affine+differential", "standard+pace=4"),
)


def build_page(folder: Path) -> Path:
    config = ComparisonConfig(
        variants=VARIANTS, inits=("gpt2", "fan_in"), seeds=5, tokens=1_000_000, controls=()
    )
    cells = sorted({cell.name for cell in build_grid(config).cells})
    final = {cell: 4.6 + 0.01 * i for i, cell in enumerate(cells)}
    study = write_study(folder / "study", config, final, points=25, layers=12)
    start = time.perf_counter()
    comparison = load_comparison(study)
    middle = time.perf_counter()
    page = folder / "report.html"
    page.write_text(render_report(comparison), encoding="utf-8")
    print(f"{len(comparison.summary.arms)} arms, {len(comparison.runs)} runs")
    print(f"judged in {middle - start:.1f} s, rendered in {time.perf_counter() - middle:.1f} s")
    print(f"page       {page.stat().st_size / 1e6:.2f} MB")
    return page


def time_page(browser: Browser, url: str) -> dict[str, float]:
    context = browser.new_context(viewport=DESKTOP)  # type: ignore[arg-type]
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    start = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.wait_for_selector("html[data-ready]")
    drawn = time.perf_counter() - start
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    text = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
    page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_selector(f"html[data-drawn='{page.locator('.plot').count()}']")
    times = {
        "text": text,
        "drawn": drawn,
        "busy": metrics["TaskDuration"],
        "all": time.perf_counter() - start,
    }
    context.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = build_page(Path(folder))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        times = [time_page(browser, page.as_uri()) for _ in range(repeats + 1)][1:]
        browser.close()
    for name in times[0]:
        values = sorted(each[name] for each in times)
        print(f"{name:<10} {statistics.median(values):.2f} s (from {values[0]:.2f} to {values[-1]:.2f})")
    print(f"load       {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
