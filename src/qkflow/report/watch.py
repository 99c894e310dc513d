"""`qkflow watch`: the report of a study that still runs, updated by server-sent events.

The folder is the only interface to the study, which may run in another process, on Ray or on SLURM. It is
read only while a page is open, and rendering takes at most 5% of a CPU core.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkflow.errors import InputError
from qkflow.report.document import read_asset, render_document, style_sheet
from qkflow.report.plotly_bundle import plotly_bundle
from qkflow.studies.runner.progress import StudyProgress

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from qkflow.web.security import LocalSite

POLL_INTERVAL = 1.0  # seconds
REPORT_INTERVAL = 5.0  # seconds between two reports, and longer if
MAX_RENDER_SECONDS = 0.25  # of CPU time are exceeded by one: rendering takes at most 5% of a core
LAST_EVENTS_TIMEOUT = 10.0  # seconds for open pages to receive the final report
HEARTBEAT = 15.0  # seconds without an event, after which a comment is sent
# plotly.js sets styles of its own elements
POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)


class Watcher:
    """The latest events of a study, by name, with a version each. Reads the folder when asked to."""

    def __init__(
        self, folder: Path, interval: float = POLL_INTERVAL, report_interval: float = REPORT_INTERVAL
    ) -> None:
        self.folder, self.interval, self.report_interval = folder, interval, report_interval
        self.progress = StudyProgress(folder)
        self.events: dict[str, tuple[int, str]] = {}
        self.has_ended = False  # the process that trains has told so
        self.open_pages = 0
        self._lock = threading.Lock()
        self._next_read = self._next_report = 0.0
        self._reported: Any = None

    def refresh(self) -> None:
        """Read the folder, if it is due, and set the events that have changed."""
        with self._lock:
            if time.monotonic() < self._next_read and not self.has_ended:
                return
            state: dict[str, Any] = {"name": self.folder.resolve().name, "ended": self.has_ended}
            try:
                self.progress.update()
                self._refresh_report()
            except (InputError, OSError) as error:  # a study that is not planned yet, or half written
                state["problem"] = str(error)
            except Exception as error:  # progress is shown even if the report cannot be
                state["problem"] = f"the report cannot be rendered ({type(error).__name__}: {error})"
            self._set("progress", {**self.progress.to_dict(), **state})
            self._next_read = time.monotonic() + self.interval

    def _refresh_report(self) -> None:
        key, start = self.progress.results_key, time.thread_time()
        if key == self._reported or (time.monotonic() < self._next_report and not self.has_ended):
            return
        html, figures = render_content_of(self.folder)
        self._set("report", {"html": html, "figures": figures})
        self._reported = key
        pause = self.report_interval * max(1.0, (time.thread_time() - start) / MAX_RENDER_SECONDS)
        self._next_report = time.monotonic() + pause

    def _set(self, name: str, value: dict[str, Any]) -> None:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        version, before = self.events.get(name, (0, ""))
        if text != before:
            self.events[name] = (version + 1, text)

    def end(self) -> None:
        """Read the folder for the last time, and mark the study as ended."""
        self.has_ended = True
        self.refresh()


def render_content_of(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return content and figures of the report of a comparison or pace study."""
    from qkflow.studies.pace.config import is_pace_study
    from qkflow.studies.runner.study_dir import StudyDir

    study = StudyDir(folder).load()
    if is_pace_study(study):
        from qkflow.report import pace
        from qkflow.studies.pace.analysis import analyze

        return pace.render_live_content(analyze(StudyDir(folder), study))
    from qkflow.report import page
    from qkflow.studies import load_comparison

    return page.render_live_content(load_comparison(folder))


def build_app(watcher: Watcher, site: LocalSite) -> ASGIApp:
    """Return the web app: the page, its scripts and styles, and the events."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, Response, StreamingResponse
    from starlette.routing import Route

    from qkflow.web.security import LocalOnly

    static: dict[str, tuple[str, Callable[[], str]]] = {
        "report.css": ("text/css", style_sheet),
        "report.js": ("text/javascript", partial(read_asset, "report.js")),
        "watch.js": ("text/javascript", partial(read_asset, "watch.js")),
        "plotly.js": ("text/javascript", lambda: plotly_bundle().script),
    }

    def page(request: Request) -> Response:
        return HTMLResponse(render_document("watch.html", {}, live=True, name=watcher.folder.resolve().name))

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static:
            return Response("not found", 404)
        kind, read = static[name]
        return Response(read(), media_type=kind)

    async def events(request: Request) -> Response:
        return StreamingResponse(stream_events(watcher, site), media_type="text/event-stream")

    routes = [Route("/", page), Route("/static/{name}", asset), Route("/events", events)]
    return LocalOnly(Starlette(routes=routes), site, csp=POLICY)


async def stream_events(watcher: Watcher, site: LocalSite) -> AsyncIterator[str]:
    """Yield every event that is new to one page, until the study or the server has ended."""
    import anyio

    sent: dict[str, int] = {}
    last = time.monotonic()
    watcher.open_pages += 1
    try:
        while True:
            ended = watcher.has_ended
            await anyio.to_thread.run_sync(watcher.refresh)
            for name, (version, text) in list(watcher.events.items()):
                if sent.get(name) != version:
                    sent[name] = version
                    last = time.monotonic()
                    yield f"event: {name}\ndata: {text}\n\n"
            if ended or site.stopping.is_set():
                yield "event: end\ndata: {}\n\n"
                return
            if time.monotonic() - last > HEARTBEAT:
                last = time.monotonic()
                yield ": still here\n\n"
            await anyio.sleep(watcher.interval)
    finally:
        watcher.open_pages -= 1


def serve_folder(
    folder: Path, port: int | None = None, open_browser: bool = True, ends_with_stdin: bool = False
) -> None:
    """Serve the report of a folder until Ctrl-C, or until stdin is closed by the study that runs."""
    from qkflow.web.security import bind_site, serve

    site, watcher = bind_site(port), Watcher(folder)
    if ends_with_stdin:
        threading.Thread(target=_end_with_stdin, args=(watcher, site), daemon=True).start()
    announce = partial(print, json.dumps({"url": site.url}), flush=True)
    serve(build_app(watcher, site), site, open_browser=open_browser, on_ready=announce)


def _end_with_stdin(watcher: Watcher, site: LocalSite) -> None:
    sys.stdin.read()
    try:
        if watcher.open_pages:
            watcher.end()
        deadline = time.monotonic() + LAST_EVENTS_TIMEOUT
        while watcher.open_pages and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        site.stopping.set()


def main() -> None:
    """Serve the folder named on the command line, beside a study and at the lowest priority."""
    if hasattr(os, "nice"):
        os.nice(19)
    serve_folder(Path(sys.argv[1]), open_browser="--no-browser" not in sys.argv, ends_with_stdin=True)


if __name__ == "__main__":
    main()
