"""`qkflow watch` in Chromium: progress, the report as runs finish, the end of a study."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from browser import PHONE, axe_violations, needs_chromium, open_page
from made_study import put_markup_everywhere
from qkflow.report.watch import POLICY, Watcher, build_app
from qkflow.studies.runner.study_dir import StudyDir
from qkflow.web.security import bind_site, serve

ERROR = "out of memory <img src=x onerror=alert(1)> 🦉 שלום"


class Live:
    """The server of a study of which one run is running, one has failed and one is waiting."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder, bind_site()
        ids = [run["id"] for run in StudyDir(folder).load()["runs"]]
        self.running, failed, waiting = (StudyDir(folder).run_dir(run_id).path for run_id in ids[:3])
        self.result = (self.running / "result.json").read_text()
        (self.running / "result.json").unlink()
        rows = (self.running / "metrics.jsonl").read_text().splitlines(keepends=True)
        (self.running / "metrics.jsonl").write_text("".join(rows[: len(rows) // 2]))
        (failed / "result.json").write_text(json.dumps({"status": "failed", "error": ERROR}))
        shutil.rmtree(waiting)
        self.watcher = Watcher(folder, interval=0.2, report_interval=0.1)
        self.thread = threading.Thread(
            target=serve, args=(build_app(self.watcher, self.site), self.site), daemon=True
        )
        self.thread.start()

    def finish_run(self) -> None:
        (self.running / "result.json").write_text(self.result)


@pytest.fixture
def live(study_folder: Path, tmp_path: Path) -> Iterator[Live]:
    started = Live(Path(shutil.copytree(study_folder, tmp_path / "study")))
    yield started
    started.site.stopping.set()
    started.thread.join(10)
    assert not started.thread.is_alive()


@needs_chromium
def test_markup_in_every_text_of_a_study(chromium: Browser, live: Live) -> None:
    put_markup_everywhere(live.folder)
    with open_page(chromium, live.site.url) as page:  # fails if a script runs or an image loads
        page.wait_for_selector("html[data-reports='1']")
        page.wait_for_selector("text=<script>alert(1)</script> >> nth=0")
        assert page.locator("img").count() == 0


@needs_chromium
def test_page_follows_the_study(chromium: Browser, live: Live) -> None:
    with open_page(chromium, live.site.url) as page:
        page.wait_for_selector("html[data-reports='1']")
        assert "token" not in page.url
        assert (
            page.locator("#state")
            .inner_text()
            .startswith("30 runs planned: 27 finished, 1 running, 1 failed, 1 waiting. About ")
        )
        assert 0.9 < float(page.locator("#share").get_attribute("value") or 0) < 1
        assert ERROR in page.locator("#active").inner_text()
        assert page.locator("img").count() == 0
        page.wait_for_selector("#live svg.main-svg")
        assert page.locator("#content .card").count() == 4
        assert "not complete" in page.locator("#content .notes").first.inner_text()
        assert axe_violations(page, ".plot svg") == []

        page.locator("#run-filter").fill("euler")
        page.locator("#runs").get_by_role("button", name="seed").click()
        live.finish_run()
        page.wait_for_selector("html[data-reports='2']")
        page.wait_for_function("() => document.getElementById('state').textContent.includes('28 finished')")
        assert page.locator("#run-filter").input_value() == "euler"  # the reader keeps place
        assert page.locator("#run-count").inner_text() == "6 of 30 runs"
        assert page.locator("#runs th[aria-sort='ascending']").inner_text().startswith("seed")
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        page.wait_for_function(f"() => document.documentElement.scrollWidth <= {PHONE['width']}")

        live.watcher.end()
        page.wait_for_selector("html[data-ended]")
        assert page.locator("#state").inner_text().startswith("The study has ended.")


def test_server_refuses_strangers_and_sends_its_policy(live: Live) -> None:
    origin = live.site.origin
    assert httpx.get(origin).status_code == 403
    with httpx.Client(follow_redirects=True) as client:
        page = client.get(live.site.url)
        assert page.status_code == 200
        assert page.headers["content-security-policy"] == POLICY
        assert client.get(f"{origin}/events", headers={"Host": "evil.example"}).status_code == 403
        assert client.get(f"{origin}/events", headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.get(f"{origin}/static/report.js").headers["content-type"].startswith("text/javascript")
        for path in ("/static/..%2Fpage.py", "/static/base.html", "/static/nothing"):
            assert client.get(origin + path).status_code == 404


def test_watcher_reads_a_folder_before_it_is_a_study(tmp_path: Path, study_folder: Path) -> None:
    watcher = Watcher(tmp_path / "later", interval=0.0)
    watcher.refresh()
    assert "has no study.yaml" in json.loads(watcher.events["progress"][1])["problem"]
    shutil.copytree(study_folder, tmp_path / "later")
    watcher.refresh()
    state = json.loads(watcher.events["progress"][1])
    assert (state["counts"], state["seconds_left"], state["share"]) == ({"finished": 30}, 0.0, 1.0)
    version, report = watcher.events["report"]
    watcher.refresh()
    assert watcher.events["report"] == (version, report), "nothing new: nothing is rendered or sent"
