"""The documentation site builds with both generators; its links work, and it loads nothing from elsewhere."""

from __future__ import annotations

import html
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from browser import CHROMIUM, axe_violations, watch_page
from built_site import broken_links, external_resources, read_site

ROOT = Path(__file__).parents[1]


def build(generator: str, folder: Path) -> Path:
    """Build the site from a copy of its sources; a generator may write beside them."""
    for name in ("mkdocs.yml", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    for name in ("docs", "src", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", generator, "build", "--strict"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.mark.parametrize("generator", ["mkdocs", "zensical"])
def test_site(generator: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One test for each generator, so that no process builds a site twice."""
    site = build(generator, tmp_path)
    pages = read_site(site)
    assert set(nav_pages()) <= {path.relative_to(site).with_suffix(".md").as_posix() for path in pages}
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert not broken_links(site)
    check_origins(site)
    check_files(site)
    check_content(site)
    if generator == "zensical" and CHROMIUM is not None:  # the one of `make docs`
        check_accessibility(site, request.getfixturevalue("chromium"))


def check_accessibility(site: Path, browser: Any) -> None:
    """Navigation, a table that scrolls and the labels of the API have no violation, in light and dark."""
    for name in ("couplings", "api/attention"):
        for scheme in ("light", "dark"):
            with watch_page(browser, "file://", color_scheme=scheme) as watched:
                watched.page.goto((site / f"{name}.html").as_uri())
                watched.page.wait_for_selector(".md-typeset__scrollwrap")
                assert not axe_violations(watched.page), (name, scheme)


def check_origins(site: Path) -> None:
    """Nothing is loaded from another origin."""
    assert not external_resources(site)
    for path in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", path.read_text("utf-8")), path


def check_files(site: Path) -> None:
    assert (site / "llms.txt").read_text("utf-8") == (ROOT / "docs" / "llms.txt").read_text("utf-8")
    assert not list(site.rglob("*.py"))
    assert not (site / "results").exists()


def check_content(site: Path) -> None:
    """Docstrings, examples and tables are rendered."""
    api = (site / "api" / "attention.html").read_text("utf-8")
    assert 'id="qkflow.attention.Attention.prepare_for_inference"' in api
    assert re.search(r"<td><code>n_heads, n_kv_heads</code></td>\s*<td>query heads, and", api)
    gallery = html.unescape(re.sub(r"<[^>]+>", "", (site / "examples.html").read_text("utf-8")))
    for name in ("coupling", "slow_path", "pace", "attach"):
        assert (ROOT / "examples" / f"{name}.py").read_text("utf-8").strip() in gallery
    assert "<table" in (site / "couplings.html").read_text("utf-8")  # below a comment that marks it


def test_every_page_is_in_the_nav() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(nav_pages()) == pages


def test_every_page_is_in_llms_txt() -> None:
    listed = re.findall(r"\]\((?!https?://)([^)]+)\)", (ROOT / "docs" / "llms.txt").read_text("utf-8"))
    assert {str(Path(page).with_suffix(".html")) for page in nav_pages()} == set(listed)


def nav_pages() -> list[str]:
    def flatten(entry: str | list[Any] | dict[str, Any]) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [page for value in values for page in flatten(value)]

    return flatten(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a><a href="b.html#there">2</a><a href="c.html">3</a>'
        '<a href="https://example.org">4</a><img src="x.png"><script src="//cdn.example.org/x.js"></script>'
        '<link rel="stylesheet" href="https://example.org/x.css">'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    assert broken_links(tmp_path) == ["a.html: b.html#there", "a.html: c.html", "a.html: x.png"]
    assert external_resources(tmp_path) == [
        "a.html: //cdn.example.org/x.js",
        "a.html: https://example.org/x.css",
    ]


def test_two_columns_of_a_docstring_become_a_table() -> None:
    convert = runpy.run_path(str(ROOT / "docs" / "docstring_columns.py"))["columns_to_tables"]
    text = (
        "Title.\n\n    code  # not a table\n\ndim      size\nn_heads  heads, and\n         more | less\n\n"
        "Prose.  Two spaces."
    )
    assert convert(text) == (
        "Title.\n\n    code  # not a table\n\n| name | description |\n|---|---|\n| `dim` | size |\n"
        "| `n_heads` | heads, and more \\| less |\n\nProse.  Two spaces."
    )
