"""Rewrite docs/licenses.md from the metadata of the installed packages: `make tables`.

The extras `ray`, `trackio` and `wandb` are left out.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licenses.md"
EXTRAS = ("data", "hf", "eval", "tensorboard", "docs", "dev")  # after the base, in the order of the column
HEADER = """# Licenses of the dependencies

Generated from the metadata of the installed packages (`make tables`), with everything that they need
themselves. `base` is what `pip install qkflow` installs; the other names are extras. qkflow itself is under
Apache-2.0. The extras `ray`, `trackio` and `wandb` are not listed. `pip install torch` may add packages of a
GPU vendor, which have licenses of their own.

| package | license | needed by |
|---|---|---|
"""


def direct_requirements() -> dict[str, list[Requirement]]:
    """Return the requirements in pyproject.toml: those of the base, and of every extra in EXTRAS."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lists = {"base": project["dependencies"]} | {e: project["optional-dependencies"][e] for e in EXTRAS}
    parsed = {name: [Requirement(text) for text in texts] for name, texts in lists.items()}
    return {name: [each for each in found if each.name != "qkflow"] for name, found in parsed.items()}


def license_of(package: Distribution) -> str:
    """Return the license in the metadata: its expression, else its classifiers, else a line of its text."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [c for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    names = [c.rpartition(" :: ")[2] for c in classifiers if c != "License :: OSI Approved"]
    text = " or ".join(names) or str(metadata.get("License") or "").strip().partition("\n")[0]
    return re.sub(r"\s+", " ", text).replace("|", "/") or "not stated"


def collect() -> dict[str, tuple[str, str]]:
    """Return (license, first group that needs it) of every installed dependency, by name."""
    rows: dict[str, tuple[str, str]] = {}
    for group, requirements in direct_requirements().items():
        queue, seen = list(requirements), set()
        while queue:
            requirement = queue.pop()
            name = canonicalize_name(requirement.name)
            key = (name, frozenset(requirement.extras))
            if key in seen or name == "qkflow":
                continue
            seen.add(key)
            try:
                package = distribution(name)
            except PackageNotFoundError:  # for another platform or version of Python
                continue
            rows.setdefault(name, (license_of(package), group))
            for text in package.requires or ():
                needed = Requirement(text)
                environments = [{"extra": extra} for extra in ("", *requirement.extras)]
                if needed.marker is None or any(needed.marker.evaluate(e) for e in environments):
                    queue.append(needed)
    return dict(sorted(rows.items()))


def render() -> str:
    rows = (f"| {name} | {license} | {group} |\n" for name, (license, group) in collect().items())
    return HEADER + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
