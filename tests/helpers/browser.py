"""Pages in the system's Chromium that record what must not happen: errors and requests to elsewhere."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from starlette.types import ASGIApp

from qkflow.web.security import LocalOnly, LocalSite, bind_site, serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Watched:
    """A page, and what went wrong in it."""

    page: Any
    problems: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert not self.problems, "\n".join(self.problems)


@contextmanager
def serve_locally(app: ASGIApp) -> Iterator[LocalSite]:
    """Serve an app on loopback in a thread."""
    site = bind_site()
    thread = threading.Thread(target=serve, args=(LocalOnly(app, site), site))
    thread.start()
    try:
        yield site
    finally:
        site.stopping.set()
        thread.join(10)


@contextmanager
def open_page(browser: Any, origin: str, **options: Any) -> Iterator[Watched]:
    """Open a page; any console error, exception or request outside of `origin` is a problem."""
    context = browser.new_context(accept_downloads=True, **options)
    watched = Watched(context.new_page())
    page, problems = watched.page, watched.problems
    page.set_default_timeout(20_000)
    page.on("console", lambda message: message.type == "error" and problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))

    def check_request(request: Any) -> None:
        if not request.url.startswith((origin, "blob:", "data:")):
            problems.append(f"request to {request.url}")

    page.on("request", check_request)
    try:
        yield watched
    finally:
        context.close()


def accessibility_violations(page: Any) -> list[str]:
    """Return the serious and critical violations that axe-core finds."""
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    found = page.evaluate("async () => (await axe.run({ resultTypes: ['violations'] })).violations")
    return [
        f"{rule['id']} ({rule['impact']}): {node['html'][:120]} {node['failureSummary']}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
