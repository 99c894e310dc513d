"""The explorer's server: typed JSON in, one binary response out.

    GET  /             the page; /static/… its parts
    GET  /api/models   what was opened, and the text to start with
    POST /api/view     attention of a text          {model, text, off}
    POST /api/lens     predictions by layer         {model, text, off, token}
    POST /api/coupling q and k in a plane           {model, text, off, layer, head}
    POST /api/rationale                             {model, text, method, percent, marked}
    POST /api/random   random words, repeated       {model, seed}
    POST /api/export   the offline page             {text, off}

`qkflow.web.security` decides who may ask.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from qkflow.config_io import dataclass_from_dict
from qkflow.errors import InputError
from qkflow.explore import offline, payload
from qkflow.explore.base import ExplorableModel
from qkflow.explore.capture import Capture
from qkflow.explore.models import SAMPLE, check_same_tokens
from qkflow.explore.rationale import explain
from qkflow.plain_data import load_json

STATIC = Path(__file__).with_name("static")
KEPT_CAPTURES = 4
Heads = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class ViewRequest:
    model: int
    text: str
    off: list[list[int]] = field(default_factory=list)
    token: int = 0
    layer: int = 0
    head: int = 0


@dataclass(frozen=True)
class RationaleRequest:
    model: int
    text: str
    method: str = "attention"
    percent: float = 20.0
    marked: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RandomRequest:
    model: int = 0
    seed: int = 0


@dataclass(frozen=True)
class ExportRequest:
    text: str
    off: list[list[int]] = field(default_factory=list)


Body = TypeVar("Body", ViewRequest, RationaleRequest, RandomRequest, ExportRequest)


class Explorer:
    """Answers requests about the opened models. One at a time: a forward pass uses all cores."""

    def __init__(self, models: Sequence[ExplorableModel], text: str = SAMPLE) -> None:
        self.models, self.text = list(models), text
        self._captures: OrderedDict[tuple[int, str, Heads], Capture] = OrderedDict()
        self._lock = threading.Lock()

    def describe(self) -> dict[str, Any]:
        with self._lock:
            return {"text": self.text, "models": [payload.describe_model(model) for model in self.models]}

    def prepare(self) -> None:
        """Read the text to start with, so that the first view is ready when the page asks for it."""
        with self._lock, contextlib.suppress(InputError):  # the page shows the error
            for index in range(len(self.models)):
                self._capture(index, self.text, frozenset())

    def view(self, request: ViewRequest) -> list[bytes]:
        with self._lock:
            off = parse_heads(request.off)
            capture = self._capture(request.model, request.text, off)
            if len(self.models) > 1:
                check_same_tokens(self.models, request.text)
            baseline = self._capture(request.model, request.text, frozenset()) if off else None
            return payload.encode_view(capture, baseline)

    def lens(self, request: ViewRequest) -> dict[str, Any]:
        with self._lock:
            off = parse_heads(request.off)
            model, capture = self._model(request.model), self._capture(request.model, request.text, off)
            rows = model.predictions(capture, request.token)
            before = None
            if off and rows:
                baseline = self._capture(request.model, request.text, frozenset())
                before = model.predictions(baseline, request.token)[-1]
            return {"rows": rows, "before": before}

    def coupling(self, request: ViewRequest) -> list[bytes]:
        with self._lock:
            model = self._model(request.model)
            model.check_heads(frozenset({(request.layer, request.head)}))
            capture = self._capture(request.model, request.text, parse_heads(request.off))
            with torch.no_grad():
                path = model.trajectory(capture, request.layer, request.head)
            return payload.encode_plane(model, path, request.layer)

    def rationale(self, request: RationaleRequest) -> dict[str, Any]:
        with self._lock:
            model = self._model(request.model)
            ids = model.encode_checked(request.text)
            special = model.special_tokens(ids)
            return explain(
                model.classifier(),
                torch.tensor(ids, device=model.device),
                special,
                method=request.method,
                percent=request.percent,
                marked=request.marked,
            )

    def random(self, request: RandomRequest) -> dict[str, str]:
        with self._lock:
            return {"text": self._model(request.model).random_text(request.seed)}

    def export(self, request: ExportRequest) -> str:
        off = parse_heads(request.off)
        with self._lock:
            indices = range(len(self.models))
            captures = [self._capture(index, request.text, off) for index in indices]
            baselines = (
                [self._capture(index, request.text, frozenset()) for index in indices] if off else None
            )
            return offline.render_page(self.models, captures, request.text, baselines)

    def _model(self, index: int) -> ExplorableModel:
        if not 0 <= index < len(self.models):
            raise InputError(f"there is no model {index}: {len(self.models)} are open", code="unknown-model")
        return self.models[index]

    def _capture(self, index: int, text: str, off: Heads) -> Capture:
        key = (index, text, off)
        if key not in self._captures:
            self._captures[key] = self._model(index).capture(text, off)
            while len(self._captures) > KEPT_CAPTURES * len(self.models):
                self._captures.popitem(last=False)
        self._captures.move_to_end(key)
        return self._captures[key]


def parse_heads(pairs: list[list[int]]) -> Heads:
    if not all(len(pair) == 2 and all(isinstance(value, int) for value in pair) for pair in pairs):
        raise InputError("heads to switch off are given as [layer, head]", code="invalid-heads")
    return frozenset((layer, head) for layer, head in pairs)


def build_app(explorer: Explorer) -> Starlette:
    """Return the ASGI app, to be wrapped in `LocalOnly`."""

    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    script = offline.bundle_scripts()  # one request instead of one per module

    async def scripts(request: Request) -> Response:
        return Response(script, media_type="text/javascript")

    async def models(request: Request) -> Response:
        try:
            return _json(await run_in_threadpool(explorer.describe))
        except InputError as error:
            return _error(error)

    posts: list[tuple[str, Any, Callable[[Any], Any]]] = [
        ("view", ViewRequest, explorer.view),
        ("lens", ViewRequest, explorer.lens),
        ("coupling", ViewRequest, explorer.coupling),
        ("rationale", RationaleRequest, explorer.rationale),
        ("random", RandomRequest, explorer.random),
        ("export", ExportRequest, explorer.export),
    ]
    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/models", models),
            *(
                Route(f"/api/{name}", _endpoint(kind, answer), methods=["POST"])
                for name, kind, answer in posts
            ),
            Route("/static/app.js", scripts),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
    )


def _endpoint(kind: type[Body], answer: Callable[[Body], Any]) -> Callable[[Request], Any]:
    """Return an endpoint that parses a JSON body into `kind` and sends the answer."""

    async def endpoint(request: Request) -> Response:
        try:
            body = _parse_body(kind, await request.body(), request.headers.get("content-type", ""))
            result = await run_in_threadpool(answer, body)
            if isinstance(result, dict):
                return _json(result)
        except InputError as error:
            return _error(error)
        if isinstance(result, str):
            name = 'attachment; filename="attention.html"'
            return HTMLResponse(result, headers={"Content-Disposition": name})
        size = str(sum(map(len, result)))
        return StreamingResponse(
            iter(result), media_type="application/octet-stream", headers={"Content-Length": size}
        )

    return endpoint


def _json(values: dict[str, Any]) -> Response:
    return Response(payload.dump_json(values), media_type="application/json")


def _error(error: InputError) -> Response:
    return JSONResponse({"error": str(error), "code": error.code}, 400)


def _parse_body(kind: type[Body], content: bytes, content_type: str) -> Body:
    if content_type.partition(";")[0].strip() != "application/json":
        raise InputError("a request body must be application/json", code="not-json")
    try:
        values = load_json(content.decode())
    except (ValueError, RecursionError):
        raise InputError("the request body is not JSON", code="not-json") from None
    if not isinstance(values, dict):
        raise InputError("the request body must be a JSON object", code="not-json")
    return dataclass_from_dict(kind, values, "request")
