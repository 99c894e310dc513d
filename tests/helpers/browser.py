"""Chromium for tests of pages: one browser per module, no console error, no request off origin, axe-core.

from browser import axe_violations, chromium, needs_chromium, open_page
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    *("--no-sandbox", "--no-first-run"),
    *(f"--disable-{name}" for name in ("gpu", "quic", "background-networking", "component-update", "sync")),
)
PHONE, DESKTOP = {"width": 390, "height": 800}, {"width": 1280, "height": 900}
TIMEOUT = 60_000  # milliseconds: the machine may be busy

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all tests of a module; every page has its own profile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: Browser, url: str, *, dark: bool = False, phone: bool = False, **options: Any
) -> Iterator[Page]:
    """Open a page; at the end, fail for a console error, an exception, a dialog or a request off origin."""
    context = browser.new_context(
        viewport=PHONE if phone else DESKTOP,  # type: ignore[arg-type]
        color_scheme="dark" if dark else "light",
        **options,
    )
    context.set_default_timeout(TIMEOUT)
    page, problems = context.new_page(), []
    origin = url if url.startswith("file:") else "/".join(url.split("/")[:3]) + "/"
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.split("#")[0].startswith((origin, "data:", "blob:"))
            else problems.append(f"request of {request.url}")
        ),
    )
    try:
        page.goto(url)
        yield page
        assert not problems, problems
    finally:
        context.close()


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
