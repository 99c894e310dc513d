"""What users receive: the wheel, its dependencies, their licenses."""

from __future__ import annotations

import re
import runpy
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def test_wheel_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    """Modules, recipes, templates, static files, py.typed, and the stored results of `qkflow claims`."""
    package = ROOT / "src" / "qkflow"
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {f"qkflow/{path.relative_to(package).as_posix()}" for path in files}
    expected |= {f"qkflow/papers/results/{path.name}" for path in (ROOT / "docs" / "results").glob("*.json")}
    missing = expected - set(wheel.namelist())
    assert not missing
    kinds = {Path(name).suffix for name in expected} | {Path(name).name for name in expected}
    assert {".py", ".yaml", ".html", ".css", ".js", ".json", "py.typed"} <= kinds


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    def read(name: str) -> str:
        return wheel.read(next(n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))).decode()

    metadata = Parser().parsestr(read("METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert read("licenses/LICENSE") == (ROOT / "LICENSE").read_text("utf-8")
    assert "qkflow = qkflow.cli.main:main" in read("entry_points.txt")
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    unbounded = [
        str(each)
        for each in requirements
        if each.name != "qkflow" and not any(s.operator in (">=", "==", "~=") for s in each.specifier)
    ]
    assert not unbounded, "without constraints, pip may choose a version that is too old"
    assert not any(each.url for each in requirements)


def test_licenses_of_direct_dependencies_are_listed() -> None:
    """What these need in turn is listed too, but not checked: it changes with their releases."""
    script = runpy.run_path(str(ROOT / "docs" / "generate_licenses.py"))
    page = script["PAGE"].read_text("utf-8")
    listed = dict(re.findall(r"^\| (\S+) \| (.+?) \| \w+ \|$", page, re.M))
    installed = script["collect"]()
    direct = {
        script["canonicalize_name"](each.name)
        for group in script["direct_requirements"]().values()
        for each in group
    }
    current = {name: installed[name][0] for name in direct if name in installed}
    assert current == {name: listed.get(name) for name in current}, "run `make tables`"
    assert direct <= set(listed)
