"""Reports in Chromium: figures, every control, keyboard, phone, dark, print, accessibility."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from browser import PHONE, axe_violations, needs_chromium, open_page
from made_study import HOSTILE, put_markup_everywhere
from qkflow.report.joint import render_studies
from qkflow.report.page import render_report
from qkflow.studies import load_comparison

pytestmark = needs_chromium
PAGES = ("report", "hostile", "record", "studies", "pace", "figures")
N_RUNS = 30


def draw_all(page: Page) -> int:
    """Draw every figure, as for printing; return their number."""
    page.wait_for_selector("html[data-ready]")
    count = page.locator(".plot").count()
    page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    page.wait_for_selector(f"html[data-drawn='{count}']")
    return count


def visible_traces(page: Page, figure: str) -> list[bool]:
    traces: list[bool] = page.evaluate(
        "name => document.getElementById(name).data.map(trace => trace.visible !== false)", figure
    )
    return traces


@pytest.mark.parametrize("name", PAGES)
def test_drawn_accessible_and_fits_a_phone(chromium: Browser, pages: dict[str, str], name: str) -> None:
    with open_page(chromium, pages[name]) as page:
        count = draw_all(page)
        assert count > 0
        assert page.locator(".plot svg.main-svg").count() >= count
        assert page.locator("figure details.data tbody tr").count() >= count
        # figures have the text color of the page; axe looks at their hundreds of labels on one page alone
        assert axe_violations(page, "" if name == "figures" else ".plot svg") == []
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        page.wait_for_function(f"() => document.documentElement.scrollWidth <= {PHONE['width']}")


def test_dark_mode(chromium: Browser, pages: dict[str, str]) -> None:
    with open_page(chromium, pages["report"], dark=True) as page:
        page.wait_for_selector("html[data-ready]")
        page.locator("#differences").scroll_into_view_if_needed()
        page.wait_for_selector("#differences svg.main-svg")
        ink, ground = page.evaluate(
            "() => [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        assert (ink, ground) == ("rgb(232, 230, 225)", "rgb(20, 22, 24)")
        tick = page.locator("#differences .ytick text").first
        assert tick.evaluate("text => getComputedStyle(text).fill") == ink
        assert axe_violations(page, ".plot svg") == []


def test_figures_are_drawn_when_they_come_into_view(chromium: Browser, pages: dict[str, str]) -> None:
    with open_page(chromium, pages["report"]) as page:
        page.wait_for_selector("html[data-ready]")
        assert page.locator("#probe-copy_gain svg").count() == 0
        page.locator("#probe-copy_gain").scroll_into_view_if_needed()
        page.wait_for_selector("#probe-copy_gain svg.main-svg")


def test_controls_of_figures(chromium: Browser, pages: dict[str, str]) -> None:
    with open_page(chromium, pages["report"]) as page:
        draw_all(page)
        best = visible_traces(page, "loss-tokens")
        assert not all(best)
        page.get_by_label("show other inits").check()
        page.wait_for_function("() => document.getElementById('loss-tokens').data.every(t => t.visible)")
        page.get_by_label("show other inits").uncheck()

        page.locator("#layer").select_option("2")
        page.wait_for_function(
            "() => document.getElementById('probe-step_size').data"
            ".every(trace => trace.visible === (trace.meta.layer === '2'))"
        )
        assert any(visible_traces(page, "probe-copy_gain"))  # one number has no layers
        page.locator("#heatmap-variant").select_option("leapfrog:n=7")
        page.wait_for_function(
            "() => document.getElementById('layers-qk_scale').data"
            ".find(trace => trace.visible).meta.variant === 'leapfrog:n=7'"
        )
        assert sum(visible_traces(page, "layers-qk_scale")) == 1
        details = page.locator("figure:has(#differences) details")
        details.locator("summary").click()
        assert details.get_by_role("row").count() == 5
        assert "−10.4" in details.inner_text()


def column(page: Page, index: int) -> list[str]:
    texts: list[str] = page.evaluate(
        "i => [...document.querySelectorAll('#runs tbody tr')].filter(row => !row.hidden)"
        ".map(row => row.cells[i].textContent)",
        index,
    )
    return texts


def test_runs_are_sorted_and_filtered(chromium: Browser, pages: dict[str, str]) -> None:
    with open_page(chromium, pages["hostile"]) as page:
        rows = page.locator("#runs tbody tr")
        total = rows.count()
        page.locator("#runs").get_by_role("button", name="loss").click()
        losses = column(page, 6)
        known = [float(text) for text in losses if text != "–"]
        assert known == sorted(known)
        assert losses[-3:] == ["–"] * 3  # failed runs are last in both directions
        page.locator("#runs").get_by_role("button", name="loss").click()
        assert [float(text) for text in column(page, 6) if text != "–"] == known[::-1]
        assert column(page, 6)[-3:] == ["–"] * 3
        assert page.locator("#runs th[aria-sort='descending']").inner_text().startswith("loss")

        page.locator("#run-status").select_option("failed")
        assert set(column(page, 5)) == {"failed"}
        assert page.locator("#run-count").inner_text() == f"3 of {total} runs"
        page.locator("#run-status").select_option("")
        page.locator("#run-filter").fill("UNCOUPLED fan_in")
        assert set(column(page, 0)) == {"uncoupled@fan_in"}
        page.locator("#run-filter").fill("no such run")
        assert page.locator("#run-count").inner_text() == f"0 of {total} runs"


def test_keyboard_reaches_and_operates_every_control(chromium: Browser, pages: dict[str, str]) -> None:
    with open_page(chromium, pages["report"]) as page:
        page.wait_for_selector("html[data-ready]")
        reached: list[Any] = []
        for _ in range(120):
            page.keyboard.press("Tab")
            focus = page.evaluate(
                "() => { const e = document.activeElement; return [e.tagName, e.id || e.textContent.trim(), "
                "getComputedStyle(e).outlineStyle] }"
            )
            if focus[0] == "BODY":
                break
            reached.append(focus)
            if focus[1] == "all-inits":
                page.keyboard.press("Space")
            if focus[1] == "loss" and focus[0] == "BUTTON":
                page.keyboard.press("Enter")
        names = [name for _, name, _ in reached]
        assert {"all-inits", "layer", "heatmap-variant", "run-filter", "run-status", "run-phase"} <= set(
            names
        )
        assert {"SUMMARY", "BUTTON", "DIV"} <= {tag for tag, _, _ in reached}  # tables that scroll take focus
        assert all(outline != "none" for _, _, outline in reached), "a focused element is marked"
        assert page.locator("#all-inits").is_checked()
        assert page.locator("th[aria-sort='ascending']").count() >= 2


def test_hostile_text_is_shown_as_text(chromium: Browser, pages: dict[str, str]) -> None:
    with open_page(chromium, pages["hostile"]) as page:
        draw_all(page)
        assert HOSTILE in page.locator("h1").inner_text()
        assert page.locator("img").count() == 0
        assert "loss is <nan> & gone" in page.locator("#runs").inner_text()
    with open_page(chromium, pages["figures"]) as page:
        draw_all(page)
        assert page.locator("h1").inner_text() == "<script>alert(1)</script>"
        assert page.locator(".legend").inner_text().strip() == "<b>bold</b> & more"
        assert page.locator("figcaption").inner_text() == "<u>title</u>"


def test_print_draws_all_figures_on_white(chromium: Browser, pages: dict[str, str]) -> None:
    with open_page(chromium, pages["report"], dark=True) as page:
        page.wait_for_selector("html[data-ready]")
        assert len(page.pdf()) > 100_000
        count = page.locator(".plot").count()
        assert page.evaluate("() => document.documentElement.dataset.drawn") == str(count)
        page.emulate_media(media="print")
        assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator("#run-filter").is_visible()
        assert not page.locator("details.data").first.is_visible()
        assert page.locator("#runs tbody tr").last.is_visible()


def test_page_reads_without_javascript(chromium: Browser, pages: dict[str, str]) -> None:
    with open_page(chromium, pages["report"], java_script_enabled=False) as page:
        assert page.locator("noscript").inner_text().startswith("The figures")
        assert page.locator("#runs tbody tr").count() == N_RUNS
        assert page.locator(".card").count() == 4


def test_markup_in_every_text_of_a_study(chromium: Browser, study_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(study_folder, tmp_path / "study"))
    put_markup_everywhere(folder)
    comparison = load_comparison(folder)
    texts = {"report": render_report(comparison), "studies": render_studies([comparison])}
    for name, text in texts.items():
        page_path = tmp_path / f"{name}.html"
        page_path.write_text(text, encoding="utf-8")
        with open_page(chromium, page_path.as_uri()) as page:  # fails if a script runs or an image loads
            draw_all(page)
            assert page.locator("img").count() == 0
            assert "<script>alert(1)</script>" in page.locator("body").inner_text()
