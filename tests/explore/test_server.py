"""The explorer's server: payloads, refusals, the offline page."""

from __future__ import annotations

import base64
import json
import re
import zlib

import numpy as np
import pytest
from starlette.testclient import TestClient

from explored import TEXT, small_model
from qkflow.errors import InputError
from qkflow.explore import payload
from qkflow.explore.models import check_same_tokens
from qkflow.explore.offline import MODULES, STATIC, bundle_scripts
from qkflow.explore.server import Explorer, ExportRequest, build_app
from qkflow.web.security import LocalOnly, LocalSite

SITE = LocalSite(8124, token="secret")


def make_client(*models: object, cookie: bool = True) -> TestClient:
    explorer = Explorer(list(models) or [small_model("leapfrog:n=3")], TEXT)  # type: ignore[arg-type]
    app = LocalOnly(build_app(explorer), SITE)
    cookies = {SITE.cookie_name: SITE.token} if cookie else {}
    return TestClient(app, base_url=SITE.origin, cookies=cookies)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return make_client()


def test_view_has_tokens_weights_and_measures(client: TestClient) -> None:
    response = client.post("/api/view", json={"model": 0, "text": TEXT})
    assert response.status_code == 200
    header, tensors = payload.decode(response.content)
    size = len(TEXT) + 1
    assert header["tokens"] == ["[end]", *TEXT]
    assert [levels.shape for levels in tensors["levels"]] == [(4, size, size)] * 2
    assert tensors["levels"][0].dtype == np.uint8
    assert not np.triu(tensors["levels"][1], 1).any()
    assert set(header["measures"]) == {"entropy", "sink_mass", "induction", "previous_token", "step_size"}
    assert len(header["losses"]) == size - 1
    assert int(response.headers["content-length"]) == len(response.content)


def test_view_with_a_head_off_has_the_loss_of_both(client: TestClient) -> None:
    whole, _ = payload.decode(client.post("/api/view", json={"model": 0, "text": TEXT}).content)
    body = {"model": 0, "text": TEXT, "off": [[0, 1]]}
    header, _ = payload.decode(client.post("/api/view", json=body).content)
    assert header["baseline_loss"] == whole["loss"] != header["loss"]
    answer = client.post("/api/lens", json={**body, "token": 4}).json()
    assert answer["before"]["top"] != answer["rows"][-1]["top"]


def test_coupling_has_a_point_per_step_and_token(client: TestClient) -> None:
    body = {"model": 0, "text": TEXT, "layer": 1, "head": 3}
    header, tensors = payload.decode(client.post("/api/coupling", json=body).content)
    assert (header["coupling"], header["steps"]) == ("leapfrog", 3)
    assert tensors["q"][0].shape == tensors["k"][0].shape == (4, len(TEXT) + 1, 2)
    assert 0 < header["explained"] <= 1
    assert all(shift > 0 for shift in header["q_shift"])


def test_models_and_random_text(client: TestClient) -> None:
    described = client.get("/api/models").json()
    assert described["text"] == TEXT
    assert described["models"][0]["couplings"] == ["leapfrog"]
    text = client.post("/api/random", json={"seed": 1}).json()["text"]
    assert text[: len(text) // 2] == text[len(text) // 2 :]


def test_lone_surrogate_is_replaced(client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    body = json.dumps({"model": 0, "text": "\ud800abc"})
    assert client.post("/api/view", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("view", {"model": 0, "text": ""}, "empty-text"),
        ("view", {"model": 0, "text": "  \n"}, "empty-text"),
        ("view", {"model": 0, "text": "x" * 20_000}, "text-too-long"),
        ("view", {"model": 7, "text": TEXT}, "unknown-model"),
        ("view", {"model": 0, "text": TEXT, "off": [[9, 0]]}, "unknown-head"),
        ("view", {"model": 0, "text": TEXT, "off": [[1]]}, "invalid-heads"),
        ("view", {"model": "a", "text": TEXT}, None),
        ("view", {"model": 0, "text": 3}, None),
        ("view", {"model": 0, "text": TEXT, "off": "abc"}, None),
        ("view", {"text": TEXT}, "missing-key"),
        ("view", {"model": 0, "text": TEXT, "sudo": 1}, "unknown-key"),
        ("lens", {"model": 0, "text": TEXT, "token": 999}, "unknown-token"),
        ("coupling", {"model": 0, "text": TEXT, "layer": 9}, "unknown-head"),
        ("rationale", {"model": 0, "text": TEXT}, "not-a-classifier"),
    ],
)
def test_bad_requests_are_one_sentence(client: TestClient, path: str, body: object, code: str | None) -> None:
    headers = {"content-type": "application/json"}
    response = client.post(f"/api/{path}", content=json.dumps(body), headers=headers)
    assert response.status_code == 400
    answer = response.json()
    assert answer["error"]
    assert code is None or answer["code"] == code


def test_only_json_is_accepted(client: TestClient) -> None:
    for content, kind in ((b"{}", "text/plain"), (b"{", "application/json"), (b"[]", "application/json")):
        response = client.post("/api/view", content=content, headers={"content-type": kind})
        assert (response.status_code, response.json()["code"]) == (400, "not-json")


def test_requests_without_token_or_from_elsewhere_are_refused(client: TestClient) -> None:
    body = {"model": 0, "text": TEXT}
    assert make_client(cookie=False).post("/api/view", json=body).status_code == 403
    assert make_client(cookie=False).get("/static/app.js").status_code == 403
    assert client.post("/api/view", json=body, headers={"origin": "http://evil.test"}).status_code == 403
    assert client.post("/api/view", json=body, headers={"host": "evil.test"}).status_code == 403
    huge = client.post("/api/view", content=b" " * 100_000_000, headers={"content-type": "application/json"})
    assert huge.status_code == 413


def test_static_files_stay_in_their_folder(client: TestClient) -> None:
    assert client.get("/static/app.js").status_code == 200
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py"):
        assert client.get(path).status_code == 404


def test_page_is_free_of_inline_code(client: TestClient) -> None:
    response = client.get("/")
    assert "<style" not in response.text
    assert not re.search(r"<script(?![^>]*\bsrc=)", response.text)
    assert not re.search(r"\s(on\w+|style)=", response.text)


def test_two_models_must_split_the_text_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = small_model(name="a"), small_model("euler", name="b")
    check_same_tokens([first, second])
    monkeypatch.setattr(second, "encode", lambda text: [0, *first.encode(text)])
    with pytest.raises(InputError) as caught:
        check_same_tokens([first, second])
    assert caught.value.code == "different-tokenizers"


def test_export_is_one_file_without_references(client: TestClient) -> None:
    response = client.post("/api/export", json={"text": "</script><b>"})
    assert response.headers["content-disposition"].startswith("attachment")
    page = response.text
    assert not re.search(r'(src|href)="(?!data:|\$)', page)
    assert "default-src 'none'" in page
    assert page.count("</script>") == 2
    archive = re.search(r'id="archive">([^<]+)<', page)
    assert archive is not None
    unpacked = zlib.decompress(base64.b64decode(archive[1]))
    assert b"coupling/0/1/3" in unpacked
    assert b"lens/0/12" in unpacked


def test_bundle_has_every_module_in_the_order_of_imports() -> None:
    assert set(MODULES) == {path.name for path in STATIC.glob("*.js")}
    earlier: set[str] = set()
    for name in MODULES:
        imported = set(re.findall(r'^import .* from "\./(\S+)";$', (STATIC / name).read_text("utf-8"), re.M))
        assert imported <= earlier, name
        earlier.add(name)
    script = bundle_scripts()
    assert not re.search(r"^(import|export) ", script, re.M)
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", script, re.M)
    assert len(names) == len(set(names)), "names of modules collide in the saved page"


def test_saved_page_of_a_long_text_is_small() -> None:
    model = small_model()
    text = "to be or not to be " * 52
    page = Explorer([model], text).export(ExportRequest(text))
    assert len(page) < 8 * 988**2  # fewer bytes than weights, base64 included
