"""plotly.js as pages embed it: compressed, and without the kinds of traces that no figure uses.

The bundle of the `plotly` package has all kinds of traces, maps and 3D included: three quarters of its code
and of the time to load it. Scatter traces are part of its core; of the others, pages use heatmaps. The bundle
is a list of CommonJS modules (`var NAME=W((exports,module)=>{…});`), and a module that needs another one
calls it by name, so those that cannot be reached by name are left out. If another version of the bundle is
laid out differently, it is embedded as it is.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from qkflow.html import csp_hash, deflate_base64

TRACES = ("heatmap",)  # beside scatter
_NAME = r"[\w$]+"
_REGISTER_ALL = re.compile(rf"\.register\(\[((?:{_NAME}\(\),?){{20,}})\]\)")
_MODULE = re.compile(rf"var ({_NAME})=W\(\((?:{_NAME})?,?(?:{_NAME})?\)=>\{{")
_SAME_AS = re.compile(rf"[^{{}}]{{0,120}}?{_NAME}\.exports=({_NAME})\(\)\}}\)")
_TRACE = re.compile(r'moduleType:"trace",name:"(\w+)"')
_BEGINS_MODULE = re.compile(rf"(?<=\}}\);)var {_NAME}=W\(")
_DEFINES_MODULE = re.compile(rf"(?<![\w$])({_NAME})=(?:W|Ea)\(")  # CommonJS, ES
_MODULE_SIZE = 4000  # characters from the start of a module within which it names its trace


class Bundle(NamedTuple):
    script: str
    deflated: str
    policy_source: str  # allows the script in a content security policy


@cache
def plotly_bundle() -> Bundle:
    from plotly.offline import get_plotlyjs

    script = drop_unused_modules(select_traces(get_plotlyjs(), TRACES))
    return Bundle(script, deflate_base64(script), csp_hash(script))


def select_traces(script: str, names: tuple[str, ...]) -> str:
    """Return the bundle with these kinds of traces alone; the bundle itself if it has not exactly these."""
    register = _REGISTER_ALL.search(script)
    if register is None:
        return script
    modules = {match[1]: match.end() for match in _MODULE.finditer(script)}
    calls = register[1].rstrip(",").split(",")
    kept = [call for call in calls if _trace_name(script, modules, call.removesuffix("()")) in names]
    if len(kept) != len(names):
        return script
    return script[: register.start(1)] + ",".join(kept) + script[register.end(1) :]


def _trace_name(script: str, modules: dict[str, int], module: str) -> str | None:
    """Return the kind of trace that a module defines, itself or by exporting another module."""
    for _ in range(4):
        if module not in modules:
            return None
        body = script[modules[module] : modules[module] + _MODULE_SIZE]
        same = _SAME_AS.match(body)
        if same is None:
            name = _TRACE.search(body)
            return name[1] if name else None
        module = same[1]
    return None


def drop_unused_modules(script: str) -> str:
    """Return the bundle without the modules whose name occurs in no module that is kept.

    What precedes the first module and follows the last one is kept. A name inside a string or of a local
    variable counts as a use, so at worst a module is kept that is not needed.
    """
    starts = [match.start() for match in _BEGINS_MODULE.finditer(script)]
    if not starts:
        return script
    parts = [script[begin:end] for begin, end in pairwise([*starts, len(script)])]
    part_of = {name: i for i, part in enumerate(parts) for name in _DEFINES_MODULE.findall(part)}
    identifier, kept = re.compile(_NAME), {len(parts) - 1}
    pending = [script[: starts[0]], parts[-1]]
    while pending:
        used = {part_of[name] for name in identifier.findall(pending.pop()) if name in part_of} - kept
        kept |= used
        pending += [parts[i] for i in used]
    return script[: starts[0]] + "".join(parts[i] for i in sorted(kept))
