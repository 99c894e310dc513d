"""The documentation site builds with both generators; its links work, and it loads nothing from elsewhere."""

from __future__ import annotations

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

from built_site import broken_links, external_resources, read_site

ROOT = Path(__file__).parents[1]
GENERATORS = ("mkdocs", "zensical")


@pytest.fixture(scope="session", params=GENERATORS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("mkdocs.yml", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    for name in ("docs", "src", "examples"):
        (folder / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-m", request.param, "build", "--strict"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_links_and_anchors_exist(site: Path) -> None:
    pages = read_site(site)
    assert len(pages) > len(nav_pages())  # and 404.html
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert not broken_links(site)


def test_nothing_is_loaded_from_another_origin(site: Path) -> None:
    assert not external_resources(site)
    for path in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", path.read_text("utf-8")), path


def test_site_has_the_pages_of_the_nav_and_no_scripts_of_ours(site: Path) -> None:
    for page in nav_pages():
        assert (site / page).with_suffix(".html").is_file(), page
    assert (site / "llms.txt").read_text("utf-8") == (ROOT / "docs" / "llms.txt").read_text("utf-8")
    assert not list(site.rglob("*.py"))
    assert not (site / "results").exists()


def test_docstrings_of_the_api_are_rendered(site: Path) -> None:
    text = (site / "api" / "attention.html").read_text("utf-8")
    assert 'id="qkflow.attention.Attention.prepare_for_inference"' in text
    assert re.search(r"<td><code>n_heads, n_kv_heads</code></td>\s*<td>query heads, and", text)


def test_code_of_the_examples_is_included(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "examples.html").read_text("utf-8"))
    assert "--8&lt;--" not in text
    assert 'coupling="leapfrog:n=7"' in text.replace("&quot;", '"')


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
