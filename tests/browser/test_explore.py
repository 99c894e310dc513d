"""The explorer in Chromium: every control, hostile text, keyboard, phone, dark mode, accessibility."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Watched, axe_violations, needs_chromium, serve_locally, watch_page
from explored import TEXT, small_classifier, small_model
from qkflow.explore.server import Explorer, build_app
from qkflow.web.security import LocalSite

pytestmark = needs_chromium
HOSTILE = "<script>alert(1)</script> 🙂 שלום <img src=x onerror=alert(2)>"
PANEL_DONE = "body[data-panel={}]"


@pytest.fixture(scope="module")
def site() -> Iterator[LocalSite]:
    models = [small_model(name="standard"), small_model("leapfrog:n=3", name="coupled")]
    with serve_locally(build_app(Explorer(models, TEXT))) as site:
        yield site


@pytest.fixture
def watched(chromium: Any, site: LocalSite) -> Iterator[Watched]:
    with watch_page(chromium, site.origin) as watched:
        watched.page.goto(site.url)
        wait(watched.page)
        yield watched
        watched.check()


def wait(page: Any, state: str = "ready") -> None:
    page.wait_for_selector(f"body[data-state={state}]")


def hash_of(page: Any) -> str:
    return str(page.evaluate("location.hash"))


def pixels(page: Any, selector: str) -> str:
    """Return the content of a canvas, to see that it changes."""
    return str(page.evaluate("s => document.querySelector(s).toDataURL()", selector))


def test_first_view(watched: Watched) -> None:
    page = watched.page
    assert page.locator("#tokens button").count() == len(TEXT) + 1
    assert page.locator("#grid button").count() == 8
    assert "standard" in page.inner_text("#models")
    assert page.locator("#maps figure").count() == 3  # two models and their difference
    assert "loss" in page.inner_text("#effect")
    assert "token=" not in page.url  # the token is in the cookie only
    assert page.evaluate("document.cookie") == ""
    drawn = page.evaluate(
        """() => [...document.querySelectorAll("#maps canvas.base")].map(canvas => new Set(new Uint32Array(
             canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size)"""
    )
    assert all(colors > 20 for colors in drawn)


def test_hovering_a_token_shows_both_directions(watched: Watched) -> None:
    page = watched.page
    before = pixels(page, "#maps canvas.overlay")
    page.hover("#tokens button:nth-child(6)")
    text = page.inner_text("#readout")
    assert "(5) looks at" in text
    assert "looked at by" in text
    colors = page.evaluate(
        """() => [...document.querySelectorAll("#tokens button")].map(b => b.style.backgroundColor)"""
    )
    assert len(set(colors[:6])) > 1
    assert set(colors[6:]) == {"transparent"}  # causal: it looks at no later token
    assert pixels(page, "#maps canvas.overlay") != before
    page.click("#tokens button:nth-child(6)")
    assert "token=5" in hash_of(page)


def test_hovering_the_map_names_the_weight(watched: Watched) -> None:
    page = watched.page
    page.hover("#maps canvas.base >> nth=0", position={"x": 110, "y": 220})
    assert "looks at" in page.inner_text("#readout")
    page.mouse.move(0, 0)
    assert page.inner_text("#readout") == ""


def test_sorting_by_every_measure(watched: Watched) -> None:
    page = watched.page
    for name in page.locator("#sort option").evaluate_all("options => options.map(o => o.value)"):
        page.select_option("#sort", name)
        labels = page.locator("#grid button").evaluate_all(
            "all => all.map(b => b.getAttribute('aria-label'))"
        )
        values = [float(re.search(r"([-\d.]+)$", label)[1]) for label in labels]  # type: ignore[index]
        if name == "layer":
            assert labels[0].startswith("layer 0, head 0")
        else:
            assert values == sorted(values, reverse=name != "entropy"), name


def test_choosing_a_head_changes_map_and_address(watched: Watched) -> None:
    page = watched.page
    before = pixels(page, "#maps canvas.base")
    page.click("#grid button[data-layer='1'][data-head='2']")
    assert page.inner_text("#head-title") == "Layer 1, head 2"
    assert pixels(page, "#maps canvas.base") != before
    assert {"layer=1", "head=2"} <= set(hash_of(page)[1:].split("&"))
    page.select_option("#layer", "0")
    page.select_option("#head", "3")
    assert page.inner_text("#head-title") == "Layer 0, head 3"


def test_difference_of_two_models(watched: Watched) -> None:
    page = watched.page
    page.select_option("#show", "difference")
    assert "show=difference" in hash_of(page)
    page.hover("#tokens button:nth-child(9)")
    assert re.search(r"−0\.\d", page.inner_text("#readout"))  # differences may be negative
    page.select_option("#sort", "entropy")
    labels = page.locator("#grid button").all_inner_texts()
    sizes = [abs(float(label.split()[-1].replace("−", "-"))) for label in labels]
    assert sizes == sorted(sizes, reverse=True)  # what changed most comes first
    rows = page.locator("#measures tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["", "standard", "coupled", "coupled − standard"]
    assert "Δ" in rows[0]
    first, second, difference = (float(row.split("\t")[1].replace("−", "-")) for row in rows[1:])
    assert difference == pytest.approx(second - first, abs=0.011)  # of rounded numbers


def test_zoom(watched: Watched) -> None:
    page = watched.page
    assert page.is_disabled("#zoom-out")
    before = pixels(page, "#maps canvas.base")
    page.click("#zoom-in")
    assert pixels(page, "#maps canvas.base") != before
    assert page.inner_text("#zoom-text") == "2×"
    page.click("#zoom-out")
    assert pixels(page, "#maps canvas.base") == before


def test_arcs(watched: Watched) -> None:
    page = watched.page
    page.click("#tab-arcs")
    before = pixels(page, "#arcs canvas")
    page.hover("#tokens button:nth-child(12)")
    hovered = pixels(page, "#arcs canvas")
    assert hovered != before
    page.click("#tokens button:nth-child(12)")
    page.check("#only")
    assert pixels(page, "#arcs canvas") != hovered
    page.fill("#threshold", "0.4")
    assert page.inner_text("#threshold-text") == "0.40"
    assert "threshold=0.4" in hash_of(page)


def test_coupling_step_by_step(watched: Watched) -> None:
    page = watched.page
    page.click("#tokens button:nth-child(3)")
    page.click("#tab-coupling")
    page.wait_for_selector(PANEL_DONE.format("coupling"))
    captions = page.locator("#planes figcaption").all_inner_texts()
    assert "no coupling" in captions[0]
    assert "leapfrog" in captions[1]
    assert "Δ = " in captions[1]
    assert page.locator("#planes table tbody tr").count() == 2
    assert page.inner_text("#step-text") == "after step 3 of 3"
    last = pixels(page, "#planes figure:nth-child(2) canvas")
    page.fill("#step", "0")
    assert page.inner_text("#step-text") == "before the coupling"
    assert pixels(page, "#planes figure:nth-child(2) canvas") != last


def test_predictions_and_lens(watched: Watched) -> None:
    page = watched.page
    page.click("#tokens button:nth-child(4)")
    page.click("#tab-predictions")
    page.wait_for_selector(PANEL_DONE.format("predictions"))
    assert page.locator("#predictions .lens").count() == 2
    rows = page.locator("#predictions .lens >> nth=0").locator("tbody tr")
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == ["embedding", "layer 0", "layer 1"]
    first = page.inner_text("#predictions")
    page.click("#tokens button:nth-child(8)")
    page.wait_for_selector(PANEL_DONE.format("predictions"))
    assert page.inner_text("#predictions") != first


def test_switching_a_head_off_and_on(watched: Watched) -> None:
    page = watched.page
    before = page.inner_text("#effect")
    page.click("#tab-predictions")
    page.click("#ablate")
    wait(page)
    page.wait_for_selector(".next th:nth-child(3)")  # probabilities with all heads
    assert "with all heads" in page.inner_text("#effect")
    assert page.get_attribute("#ablate", "aria-pressed") == "true"
    assert "off=0.0" in hash_of(page)
    assert "off" in str(page.get_attribute("#grid button >> nth=0", "aria-label"))
    page.click("#restore")
    wait(page)
    assert page.inner_text("#effect") == before


def test_random_words_show_a_repetition(watched: Watched) -> None:
    page = watched.page
    page.click("#random")
    # the state is still that of the view before: wait for the tokens of the new text
    page.wait_for_function(
        """() => document.querySelector("#text").value.length === 48
             && document.querySelectorAll("#tokens button").length === 49"""
    )
    text = page.input_value("#text")
    assert text[: len(text) // 2] == text[len(text) // 2 :]
    assert "How to find an induction head" in page.inner_text("#help summary")


def test_view_is_restored_from_the_address(chromium: Any, site: LocalSite) -> None:
    state = "#text=to+be+or+not&layer=1&head=3&token=4&tab=arcs&sort=sink_mass&show=1&off=0.2"
    with watch_page(chromium, site.origin) as watched:
        watched.page.goto(site.url + state)
        wait(watched.page)
        assert watched.page.input_value("#text") == "to be or not"
        assert watched.page.inner_text("#head-title") == "Layer 1, head 3"
        assert watched.page.is_visible("#panel-arcs")
        assert watched.page.input_value("#sort") == "sink_mass"
        assert "(4) looks at" in watched.page.inner_text("#readout")
        assert "with all heads" in watched.page.inner_text("#effect")
        watched.page.goto(f"{site.origin}/#text=abc&layer=99&token=77&tab=nonsense&sort=x&show=9&zoom=abc")
        wait(watched.page)
        watched.page.wait_for_selector("#tokens button:nth-child(4):last-child")
        assert watched.page.inner_text("#head-title") == "Layer 0, head 0"
        watched.check()


def test_hostile_text_is_text(chromium: Any, site: LocalSite, tmp_path: Path) -> None:
    with watch_page(chromium, site.origin) as watched:
        page = watched.page
        page.on("dialog", lambda dialog: watched.problems.append("a script ran"))
        page.goto(site.url)
        wait(page)
        page.fill("#text", HOSTILE)
        page.click("#run")
        wait(page)
        page.wait_for_selector("#tokens button >> text=🙂")
        assert page.locator("#tokens img, #tokens script").count() == 0
        assert "<script>" in page.inner_text("#tokens").replace("\n", "")
        assert page.locator("#tokens bdi[dir=auto]").count() == page.locator("#tokens button").count()
        for tab in ("arcs", "coupling", "predictions", "map"):
            page.click(f"#tab-{tab}")
        with page.expect_download() as svg:
            page.click("#panel-map [data-format=svg]")
        assert "<script" not in Path(svg.value.path()).read_text("utf-8")
        with page.expect_download() as saved:
            page.click("#export-html")
        saved.value.save_as(tmp_path / "page.html")
        watched.check()
        page.goto((tmp_path / "page.html").as_uri())
        wait(page)
        assert "<script>" in page.inner_text("#tokens").replace("\n", "")


def test_markup_in_the_names_of_models_and_classes(chromium: Any) -> None:
    for model in (small_model("leapfrog:n=3"), small_classifier()):
        model.name = HOSTILE
        if model.class_names is not None:
            model.class_names = [f"{HOSTILE} {name}" for name in model.class_names]
        app = build_app(Explorer([model, model], TEXT))
        with serve_locally(app) as site, watch_page(chromium, site.origin) as watched:
            page = watched.page
            page.goto(site.url)
            wait(page)
            page.click("#tab-arcs")
            for tab in ("coupling", "predictions", "rationale"):
                if page.is_visible(f"#tab-{tab}"):
                    page.click(f"#tab-{tab}")
                    page.wait_for_selector(PANEL_DONE.format(tab))
            assert "<script>alert(1)</script>" in page.inner_text("body")
            assert page.locator("img").count() == 0
            watched.check()


def test_errors_are_shown_and_recoverable(chromium: Any, site: LocalSite) -> None:
    with watch_page(chromium, site.origin) as watched:
        page = watched.page
        page.goto(site.url)
        wait(page)
        page.fill("#text", " ")
        page.click("#run")
        wait(page, "failed")
        assert "at least two tokens" in page.inner_text("#error")
        page.fill("#text", "fine again")
        page.click("#run")
        wait(page)
        assert page.is_hidden("#error")
        # the browser itself reports the refused request; nothing else may
        assert all("400" in problem for problem in watched.problems)


def test_page_without_token_is_refused(chromium: Any, site: LocalSite) -> None:
    with watch_page(chromium, site.origin) as watched:
        assert watched.page.goto(site.origin).status == 403


@pytest.mark.parametrize("kind", ["map", "arcs", "coupling"])
def test_pictures_are_saved(watched: Watched, kind: str) -> None:
    page = watched.page
    page.click(f"#tab-{kind}")
    if kind == "coupling":
        page.wait_for_selector(PANEL_DONE.format("coupling"))
    with page.expect_download() as png:
        page.click(f"#panel-{kind} [data-format=png]")
    assert Path(png.value.path()).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with page.expect_download() as svg:
        page.click(f"#panel-{kind} [data-format=svg]")
    text = Path(svg.value.path()).read_text("utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert text.count("<text") > 5


def test_saved_page_works_offline(watched: Watched, chromium: Any, tmp_path: Path) -> None:
    watched.page.click("#ablate")
    watched.page.wait_for_selector("#restore:not([hidden])")
    wait(watched.page)
    with watched.page.expect_download() as saved:
        watched.page.click("#export-html")
    path = tmp_path / "attention.html"
    saved.value.save_as(path)
    with watch_page(chromium, "file://", offline=True) as opened:
        page = opened.page
        page.goto(path.as_uri())
        wait(page)
        assert page.locator("#grid button").count() == 8
        assert page.inner_text("#ablate") == "Head is off"
        assert page.is_disabled("#ablate")
        assert page.is_hidden("#restore")
        assert page.inner_text("#effect").count("with all heads") == 2
        page.hover("#tokens button:nth-child(6)")
        assert "(5) looks at" in page.inner_text("#readout")
        page.click("#grid button[data-layer='1'][data-head='1']")
        for tab in ("arcs", "coupling", "predictions"):
            page.click(f"#tab-{tab}")
            if tab != "arcs":
                page.wait_for_selector(PANEL_DONE.format(tab))
        assert page.locator("#predictions .lens").count() == 2
        assert page.is_hidden("#random")
        assert page.is_hidden("#ablate")
        assert not axe_violations(page)
        opened.check()


def test_keyboard_alone(watched: Watched) -> None:
    page = watched.page
    reached = set()
    page.focus("#text")
    for _ in range(40):
        page.keyboard.press("Tab")
        outline = page.evaluate(
            "() => { const e = document.activeElement; return [e.id || e.parentElement.id || e.className,"
            " getComputedStyle(e).outlineStyle]; }"
        )
        reached.add(outline[0])
        assert outline[1] != "none" or outline[0] == "", outline  # focus is visible
    assert {"run", "random", "tokens", "sort", "show", "grid", "layer", "head", "ablate", "tabs"} <= {
        *reached,
        "tabs" if "tab-map" in reached else "",
    }
    page.focus("#tokens button >> nth=0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "(2) looks at" in page.inner_text("#readout")
    page.keyboard.press("Enter")
    assert "token=2" in hash_of(page)
    page.focus("#grid button >> nth=0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.inner_text("#head-title") == "Layer 0, head 1"
    page.focus("#maps canvas.base >> nth=0")
    page.keyboard.press("ArrowDown")
    assert "(3) looks at" in page.inner_text("#readout")
    page.focus("#tab-map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.is_visible("#panel-arcs")
    page.focus("#text")
    page.keyboard.press("Control+Enter")
    wait(page)


def test_rationale_of_a_classifier(chromium: Any) -> None:
    app = build_app(Explorer([small_classifier()], TEXT))
    with serve_locally(app) as site, watch_page(chromium, site.origin) as watched:
        page = watched.page
        page.goto(site.url)
        wait(page)
        assert "class" in page.inner_text("#effect")
        assert page.is_hidden("#tab-predictions")
        page.click("#tab-rationale")
        page.wait_for_selector(PANEL_DONE.format("rationale"))
        first = page.inner_text("#rationale")
        assert "comprehensiveness" in first
        assert "mark the evidence" in first
        page.check("#marking")
        page.click("#tokens button >> nth=3")
        page.wait_for_selector("#tokens button.marked")
        page.wait_for_selector("#rationale >> text=mark the evidence", state="detached")
        page.fill("#percent", "60")
        page.press("#percent", "Enter")
        page.wait_for_selector(PANEL_DONE.format("rationale"))
        page.select_option("#method", "gradient")
        page.wait_for_selector(PANEL_DONE.format("rationale"))
        assert page.inner_text("#rationale") != first
        assert {"marked=3", "percent=60", "method=gradient"} <= set(hash_of(page)[1:].split("&"))
        assert not axe_violations(page)
        watched.check()


def test_phone_width(chromium: Any, site: LocalSite) -> None:
    options = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "has_touch": True}
    with watch_page(chromium, site.origin, **options) as watched:
        page = watched.page
        page.goto(site.url)
        wait(page)
        for tab in ("map", "arcs", "coupling", "predictions"):
            page.click(f"#tab-{tab}")
            if tab in ("coupling", "predictions"):
                page.wait_for_selector(PANEL_DONE.format(tab))
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, tab
        page.tap("#tokens button >> nth=3")
        assert "looks at" in page.inner_text("#readout")
        watched.check()


def test_dark_mode(watched: Watched) -> None:
    page = watched.page
    background = "getComputedStyle(document.body).backgroundColor"
    light, light_map = page.evaluate(background), pixels(page, "#maps canvas.base")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(200)
    assert page.evaluate(background) != light
    assert pixels(page, "#maps canvas.base") != light_map


@pytest.mark.parametrize(
    ("scheme", "checked"), [("light", ("map", "arcs", "coupling", "predictions")), ("dark", ("map",))]
)
def test_accessibility(chromium: Any, site: LocalSite, scheme: str, checked: tuple[str, ...]) -> None:
    with watch_page(chromium, site.origin, color_scheme=scheme) as watched:
        page = watched.page
        page.goto(site.url)
        wait(page)
        page.click("#help summary")
        page.click("#tokens button:nth-child(7)")
        for tab in checked:
            page.click(f"#tab-{tab}")
            if tab in ("coupling", "predictions"):
                page.wait_for_selector(PANEL_DONE.format(tab))
            assert not axe_violations(page), tab
        watched.check()
