"""Imports point inward: library <- lab <- papers, with `hf` beside the lab. Packages form no import cycle.

Every import counts, at module level, inside a function or under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
LIBRARY = ("attention", "models", "data", "training", "measures")
LAB = ("studies", "report", "bench", "web", "explore", "cli")
RINGS = {
    **dict.fromkeys(LIBRARY, "library"),
    **dict.fromkeys(LAB, "lab"),
    "papers": "papers",
    "hf": "adapter",
}
MAY_IMPORT = {
    "library": {"library"},
    "lab": {"library", "lab", "adapter"},
    "papers": {"library", "lab"},
    "adapter": {"library"},
    "root": {"library"},  # modules directly in qkflow: errors, files, roles, ...
}
ENTRY_POINTS = ("cli", "__main__")  # may import every ring


@dataclass(frozen=True)
class Import:
    importer: str  # qkflow.training.loop
    imported: str  # qkflow.models.decoder
    line: int

    @property
    def edge(self) -> tuple[str, str]:
        return top_level(self.importer), top_level(self.imported)

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def top_level(module: str) -> str:
    """Return the package or root module below `qkflow`: `qkflow.data.tasks.glue` gives `data`."""
    return module.split(".")[1] if "." in module else "qkflow"


def ring(package: str) -> str:
    return RINGS.get(package, "root")


def read_imports() -> Iterator[Import]:
    modules = {}
    for path in sorted((SRC / "qkflow").rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            for imported in _imported_names(node, package):
                # `from qkflow import console` imports a module, `from qkflow.errors import InputError` a name
                target = imported if imported in modules else imported.rpartition(".")[0]
                if target in modules:
                    yield Import(name, target, node.lineno)  # type: ignore[attr-defined]


def _imported_names(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        parent = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parent, *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in node.names]


IMPORTS = [found for found in read_imports() if len(set(found.edge)) == 2]


def test_every_package_has_a_ring() -> None:
    packages = {path.parent.name for path in (SRC / "qkflow").glob("*/__init__.py")}
    assert packages == set(RINGS)


def test_imports_point_inward() -> None:
    outward = [
        str(found)
        for found in IMPORTS
        if found.edge[0] not in ENTRY_POINTS
        and found.edge[1] != "qkflow"
        and (ring(found.edge[1]) not in MAY_IMPORT[ring(found.edge[0])] | {"root"} or found.edge[1] == "cli")
    ]
    assert not outward, "\n".join(outward)


def test_packages_have_no_import_cycle() -> None:
    edges = {found.edge: str(found) for found in IMPORTS if "qkflow" not in found.edge}
    cycle = find_cycle(set(edges))
    assert not cycle, "\n".join(edges[edge] for edge in pairwise(cycle))


def find_cycle(edges: set[tuple[str, str]]) -> list[str]:
    """Return the nodes of one cycle, first node repeated at the end, or an empty list."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for _, target in sorted(edge for edge in edges if edge[0] == node):
            if cycle := visit(target, [*path, node]):
                return cycle
        done.add(node)
        return []

    return next(filter(None, (visit(node, []) for node in sorted({a for a, _ in edges}))), [])


def test_find_cycle() -> None:
    assert find_cycle({("a", "b"), ("b", "c"), ("a", "c")}) == []
    assert find_cycle({("a", "b"), ("b", "c"), ("c", "b")}) == ["b", "c", "b"]


def test_every_input_error_has_a_code() -> None:
    missing = list(input_errors_without_code())
    assert not missing, "\n".join(missing)


def input_errors_without_code() -> Iterator[str]:
    for path in sorted((SRC / "qkflow").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "InputError":
                continue
            if all(keyword.arg != "code" for keyword in node.keywords):
                yield f"{path.relative_to(SRC).as_posix()}:{node.lineno}"
