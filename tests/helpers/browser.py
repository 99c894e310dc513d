"""Chromium for tests of pages: no console error, no request off origin, axe-core.

from browser import axe_violations, needs_chromium, open_page    # `chromium` is a fixture
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from starlette.types import ASGIApp

from qkflow.web.security import LocalOnly, LocalSite, bind_site, serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    *("--no-sandbox", "--no-first-run"),
    *(f"--disable-{name}" for name in ("gpu", "quic", "background-networking", "component-update", "sync")),
)
PHONE, DESKTOP = {"width": 390, "height": 800}, {"width": 1280, "height": 900}
TIMEOUT = 60_000  # milliseconds: the machine may be busy

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for all tests; every page has its own profile."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and what went wrong in it."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert not self.problems, "\n".join(self.problems)


@contextmanager
def watch_page(browser: Browser, origin: str, **options: Any) -> Iterator[Watched]:
    """Yield an empty page. A console error, exception, dialog or request outside of `origin` is a problem."""
    context = browser.new_context(**{"accept_downloads": True, **options})
    context.set_default_timeout(TIMEOUT)
    watched = Watched(context.new_page())
    page, problems = watched.page, watched.problems

    def check_request(request: Any) -> None:
        if not request.url.split("#")[0].startswith((origin, "data:", "blob:")):
            problems.append(f"request to {request.url}")

    def dismiss(dialog: Any) -> None:
        problems.append(dialog.message)
        dialog.dismiss()

    kinds = ("error", "warning")
    page.on("console", lambda message: problems.append(message.text) if message.type in kinds else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", dismiss)
    page.on("request", check_request)
    try:
        yield watched
    finally:
        context.close()


@contextmanager
def open_page(
    browser: Browser, url: str, *, dark: bool = False, phone: bool = False, **options: Any
) -> Iterator[Page]:
    """Open a page; at the end, fail for every problem that `watch_page` recorded."""
    origin = url if url.startswith("file:") else "/".join(url.split("/")[:3]) + "/"
    scheme = "dark" if dark else "light"
    settings = {"viewport": PHONE if phone else DESKTOP, "color_scheme": scheme, **options}
    with watch_page(browser, origin, **settings) as watched:
        watched.page.goto(url)
        yield watched.page
        watched.check()


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


def axe_violations(page: Page, exclude: str = "") -> list[str]:
    """Return the serious and critical violations that axe-core finds outside of the selector `exclude`."""
    script = (resources.files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
    page.evaluate(f"() => {{ {script} }}")
    results = page.evaluate(
        "exclude => axe.run(exclude ? { exclude: [exclude] } : document, { resultTypes: ['violations'] })",
        exclude,
    )
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in results["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"][:5]
    ]
