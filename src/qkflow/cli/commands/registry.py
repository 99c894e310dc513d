"""`qkflow couplings`, `scorings`, `inits` and `config`: tables generated from the code.

The documentation contains these tables too; `make tables` rewrites them there.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import tokenize
import types
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from qkflow import console
from qkflow.errors import unknown
from qkflow.report.tables import format_cell, markdown_table

Row = dict[str, Any]


def couplings(*, full: bool = False, json: bool = False, markdown: bool = False) -> None:
    """List the registered couplings with their equation and declared properties.

    examples:
      qkflow couplings
      qkflow couplings --full --json

    Args:
        full: add options and citation.
        json: print one JSON object instead of a table.
        markdown: print a Markdown table.
    """
    print_rows("couplings", coupling_rows(full), json, markdown)


def scorings(*, json: bool = False, markdown: bool = False) -> None:
    """List the registered scorings with their equation.

    examples:
      qkflow scorings
      qkflow scorings --markdown

    Args:
        json: print one JSON object instead of a table.
        markdown: print a Markdown table.
    """
    print_rows("scorings", scoring_rows(), json, markdown)


def inits(*, json: bool = False, markdown: bool = False) -> None:
    """List the parameter inits: bases, modifiers of a base, and parts that may differ from it.

    Write BASE, BASE+MODIFIER or BASE{PART=VALUE,...}, e.g. gpt2, fan_in+symmetric=1, modern{qk=gpt2,out=0.5}.
    The value of a part is a base, zero, or a number a, which means N(0, a²/fan-in).

    examples:
      qkflow inits
      qkflow inits --json

    Args:
        json: print one JSON object instead of a table.
        markdown: print a Markdown table.
    """
    print_rows("inits", init_rows(), json, markdown)


def config(
    section: Annotated[str | None, tyro.conf.Positional] = None, *, json: bool = False, markdown: bool = False
) -> None:
    """List the keys of a run's config.yaml with type, default and description.

    Set any of them with `qkflow train RUN --set KEY=VALUE`.

    examples:
      qkflow config
      qkflow config model.slow
      qkflow config train --markdown

    Args:
        section: model, model.attention, model.slow, data or train (default: all).
        json: print one JSON object instead of a table.
        markdown: print a Markdown table.
    """
    print_rows("config", config_rows(section), json, markdown)


def coupling_rows(full: bool = False) -> list[Row]:
    """Return one row per coupling; properties that depend on heads or options are those of the defaults."""
    from qkflow.attention import couplings as registry
    from qkflow.attention import scorings

    head_shapes = scorings.get("softmax").head_shapes(4, 4, 8)
    rows = []
    for name in registry.names():
        part = registry.build(name, head_shapes, {"device": "meta"})
        row: Row = {
            "coupling": name,
            "equation": part.equation,
            "good for": part.good_for,
            "identity at init": part.identity_at_init,
            "invertible": part.invertible,
        }
        rows.append(
            row | {"options": list(registry.options(name)), "citation": part.citation} if full else row
        )
    return rows


def scoring_rows() -> list[Row]:
    from qkflow.attention import scorings as registry

    parts = ((name, registry.get(name)) for name in registry.names())
    return [
        {"scoring": name, "equation": part.equation, "good for": part.good_for, "citation": part.citation}
        for name, part in parts
    ]


def init_rows() -> list[Row]:
    """Return the rows of the Markdown tables in the docstring of `qkflow.attention.init`."""
    from qkflow.attention import init

    rows: list[Row] = []
    for block in re.findall(r"(?:^\|.*\n)+", init.__doc__ or "", re.M):
        (kind, *columns), _, *lines = (
            [cell.strip() for cell in line[1:-1].split("|")] for line in block.split("\n")[:-1]
        )
        for name, *cells in lines:
            described = "; ".join(f"{column}: {cell}" for column, cell in zip(columns, cells, strict=True))
            rows.append({"init": name.strip("`"), "kind": kind, "parameters": described})
    return rows


def config_rows(section: str | None = None) -> list[Row]:
    from qkflow.models.config import AttentionConfig, ModelConfig
    from qkflow.models.presets import PRESETS
    from qkflow.models.slow_path.config import SlowPathConfig
    from qkflow.training.config import DataConfig, TrainConfig

    sections: dict[str, type] = {
        "model": ModelConfig,
        "model.attention": AttentionConfig,
        "model.slow": SlowPathConfig,
        "data": DataConfig,
        "train": TrainConfig,
    }
    if section is not None and section not in sections:
        raise unknown("section", section, sections)
    selected = sections if section is None else {section: sections[section]}
    rows = [row for name, cls in selected.items() for row in _field_rows(name, cls)]
    if "model" not in selected:
        return rows
    preset = {"key": "model.preset", "type": " or ".join(PRESETS), "default": "tiny"}
    return [
        preset | {"description": "named size: sets vocab_size, n_layers, dim, n_heads and the feed-forward"},
        *rows,
    ]


def _field_rows(section: str, cls: type) -> list[Row]:
    hints, descriptions = get_type_hints(cls), field_descriptions(cls)
    return [
        {
            "key": f"{section}.{field.name}",
            "type": _type_name(hints[field.name]),
            "default": _default(field),
            "description": descriptions.get(field.name, ""),
        }
        for field in dataclasses.fields(cls)
    ]


def field_descriptions(cls: type) -> dict[str, str]:
    """Return the description of each dataclass field.

    It is the comment on the field's line, the string below the field, or an entry of the class docstring: the
    name, two spaces or more and the text; deeper indented lines continue it.
    """
    entries = re.findall(r"^(\w+) {2,}(\S.*(?:\n {2,}\S.*)*)", inspect.getdoc(cls) or "", re.M)
    descriptions = {name: " ".join(text.split()) for name, text in entries}
    source = inspect.cleandoc(inspect.getsource(cls))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in pairwise(definition.body):
        text = below.value.value if _is_string(below) else None  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and text:
            descriptions[field.target.id] = text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        named = re.match(r" *(\w+):", token.line)
        if token.type == tokenize.COMMENT and named:
            descriptions[named[1]] = token.string.lstrip("# ")
    return descriptions


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _type_name(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type_name(kind) for kind in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) in (list, tuple):
        return f"list of {_type_name(get_args(hint)[0])}"
    if dataclasses.is_dataclass(hint) or get_origin(hint) is dict:
        return "mapping"
    return "null" if hint is type(None) else str(hint.__name__)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return list(field.default) if isinstance(field.default, tuple) else field.default
    if field.default_factory is not dataclasses.MISSING:
        return {}
    return "of the preset"


def print_rows(name: str, rows: Sequence[Row], json: bool, markdown: bool) -> None:
    if json:
        console.emit_json({name: rows})
    elif markdown:
        print(console.without_controls(markdown_table(rows)))
    else:
        _print_table(rows)


def _print_table(rows: Sequence[Row]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(format_cell(value)) for value in row.values()))
    console.out.print(table)
