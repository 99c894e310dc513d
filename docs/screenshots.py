"""Retake the screenshots of the documentation from a real study and a real model: `make screenshots`.

Needs the Python package playwright and Chromium (`--chromium PATH`, default: the one on the PATH). The study
and the models are trained in `runs/screenshots`, some minutes on two cores; a second call trains nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from qkflow.errors import InputError

IMAGES = Path(__file__).parent / "images"
MAX_BYTES = 200_000
BROWSER_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
STUDY = [
    *("--data", "speeches", "--baselines", "standard@fan_in", "--variants", "euler@fan_in,euler@modern"),
    *("--controls", "standard@modern", "--seeds", "3", "--tokens", "40k"),
]
# The models of "Find an induction head" in docs/explorer.md.
INITS = {"symmetric": "modern+symmetric=1", "standard": "modern"}
WORDS = "fo bo ga ba bu fi di fa be bi da do fe fu de du"  # of the corpus `names`
MODEL = [
    *("--data", "names", "--tokenizer", "bpe:300", "--seq-len", "64", "--batch-size", "32"),
    *("--tokens", "1M", "--lr", "0.02", "--schedule", "wsd"),
    *("--set", "model.n_layers=2", "--set", "model.dim=64"),
    *("--set", "model.n_heads=2", "--set", "model.hidden_dim=64"),
]


@dataclass(frozen=True)
class Shot:
    """One picture: a page, the size of the window, and the time to draw it."""

    name: str
    url: str
    width: int = 1200
    height: int = 800
    wait_ms: int = 2500
    act: Callable[[Any], None] | None = None  # what a person does on the page first


def qkflow(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "qkflow", *arguments], check=True)


def train(study: Path, models: list[Path]) -> None:
    """Run the study and train the models of the explorer; what is finished is not repeated."""
    qkflow("compare", *STUDY, "--out", str(study))
    for model in models:
        if not (model / "result.json").is_file():
            qkflow("train", str(model), *MODEL, "--init", INITS[model.name])


def find_induction_head(page: Any) -> None:
    """Repeat words, sort by induction, open the first head, point at a word of the second half."""
    page.wait_for_selector("body[data-state=ready]")
    count = len(WORDS.split())
    page.fill("#text", f"{WORDS} {WORDS}")
    page.click("#run")
    page.wait_for_selector(f"#tokens button:nth-child({2 * count + 1})")
    page.select_option("#sort", "induction")
    page.click("#grid button >> nth=0")
    page.click(f"#tokens button:nth-child({count + 6})")
    page.mouse.move(0, 0)


@contextmanager
def explorer(models: list[Path]) -> Iterator[str]:
    """Serve the explorer; yield its address."""
    command = ["explore", *map(str, models), "--no-browser", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "qkflow", *command], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            printed = ""
            for line in server.stdout:
                printed += line
                if line.startswith("}"):
                    break
            yield json.loads(printed)["url"]
        finally:
            server.terminate()


def take(browser: Any, shot: Shot) -> None:
    """Write one picture. Raise if it is too large for the repository."""
    context = browser.new_context(viewport={"width": shot.width, "height": shot.height})
    page = context.new_page()
    page.goto(shot.url)
    if shot.act is not None:
        shot.act(page)
    page.wait_for_timeout(shot.wait_ms)
    path = IMAGES / f"{shot.name}.png"
    page.screenshot(path=str(path))
    context.close()
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} has more than {MAX_BYTES:,} bytes: use a smaller window", code="too-large")
    print(f"{path.relative_to(IMAGES.parent)}: {path.stat().st_size / 1e3:.0f} kB", file=sys.stderr)


def main(work: Path = Path("runs/screenshots"), chromium: Path | None = None) -> None:
    """Train what is missing, and take every picture."""
    from playwright.sync_api import sync_playwright

    executable = str(chromium or shutil.which("chromium") or shutil.which("chromium-browser") or "")
    if not executable:
        raise InputError("there is no Chromium on the PATH: give --chromium", code="no-browser")
    IMAGES.mkdir(exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    study, models = work / "study", [work / name for name in INITS]
    train(study, models)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=BROWSER_ARGS)
        report = (study / "report.html").resolve().as_uri()
        take(browser, Shot("report", report, height=840))
        with explorer(models) as url:
            take(browser, Shot("explorer", url, height=1080, act=find_induction_head))
        browser.close()


if __name__ == "__main__":
    tyro.cli(main)
