"""The documentation agrees with the code: tables, commands, links, names, paths and code blocks."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from generate_figures import FIGURES, IMAGES

from qkflow.cli.main import COMMANDS, split_command

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXECUTED_ELSEWHERE = ("huggingface.md", "add_a_coupling.md")  # each has a test file of its own
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def python_blocks() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        if page.name not in EXECUTED_ELSEWHERE:
            for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.S):
                yield page, block


BLOCKS = list(python_blocks())


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[page.name for page, _ in BLOCKS])
def test_python_block_runs(page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(page), "exec"), {})


@each_page
def test_commands_exist_with_their_options(page: Path) -> None:
    text = page.read_text("utf-8")
    lines = re.findall(r"^(?: {4}(?:\$ )?)?qkflow ([a-z].+)", text, re.M)
    inline = re.findall(r"`qkflow ([a-z][^`]*? --[^`]+)`", text)
    for line in lines + inline:
        name, arguments = split_command(shlex.split(line.replace("…", ""), comments=True))
        module, function, _ = COMMANDS[name]
        command = getattr(importlib.import_module(f"qkflow.cli.commands.{module}"), function)
        known = {"help", *(key.replace("_", "-") for key in inspect.signature(command).parameters)}
        used = {word.partition("=")[0].removeprefix("--") for word in arguments if word.startswith("--")}
        assert not {option for option in used if option.removeprefix("no-") not in known}, line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_description(name: str) -> None:
    module, function, _ = COMMANDS[name]
    command = getattr(importlib.import_module(f"qkflow.cli.commands.{module}"), function)
    described = set(re.findall(r"^    (\w+):", (inspect.getdoc(command) or "").partition("Args:")[2], re.M))
    assert described == set(inspect.signature(command).parameters)


@each_page
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    text = page.read_text("utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@each_page
def test_repository_paths_exist(page: Path) -> None:
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    for path in re.findall(rf"\b((?:{'|'.join(folders)})/[\w./-]*\w)", page.read_text("utf-8")):
        assert (ROOT / path).exists(), path


@each_page
def test_dotted_names_exist(page: Path) -> None:
    names = set(re.findall(r"\bqkflow(?:\.[a-zA-Z_]\w*)+", page.read_text("utf-8")))
    # the entry-point group, a file, a module that needs a package which is not a dependency
    for name in names - {"qkflow.couplings", "qkflow.fish", "qkflow.hf.transformer_lens"}:
        resolve(name)


def resolve(name: str) -> object:
    """Return the module or attribute with this dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(resolve(module), attribute)


def test_contributing_names_every_package_and_root_module() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    source = ROOT / "src" / "qkflow"
    packages = {f"`{path.parent.name}/`" for path in source.glob("*/__init__.py")}
    modules = {f"`{path.name}`" for path in source.glob("*.py") if not path.name.startswith("__")}
    assert not {name for name in packages | modules if name not in text}
    for path in re.findall(r"`((?:attention|data|training|studies|cli)/[\w/.]+)`", text):
        assert (source / path).exists(), path


@each_page
def test_generated_tables_are_current(page: Path) -> None:
    text = page.read_text("utf-8")
    render = runpy.run_path(str(ROOT / "docs" / "generate_tables.py"))["render"]
    assert render(text) == text, "run `make tables`"


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_current(name: str) -> None:
    assert FIGURES[name]() == (IMAGES / name).read_text("utf-8"), "run `make tables`"


def test_options_of_couplings_are_documented() -> None:
    from qkflow.attention import couplings

    documented = table_column(ROOT / "docs" / "couplings.md", "option")
    registered = {option for name in couplings.names() for option in couplings.options(name)}
    assert documented == registered


def test_options_of_synthetic_corpora_are_documented() -> None:
    from qkflow.data.synthetic import GENERATORS

    page = (ROOT / "docs" / "data.md").read_text("utf-8")
    for name, kind in GENERATORS.items():
        section = page.partition(f"## Options of `{name}`")[2].partition("## ")[0]
        rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", section, re.M))
        assert rows == {field.name: str(field.default) for field in fields(kind)}


def table_column(page: Path, header: str) -> set[str]:
    """Return the first name set as code in each row's first cell, of the table with this header."""
    table = page.read_text("utf-8").partition(f"\n| {header} |")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)`", table, re.M))
