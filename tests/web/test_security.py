"""The loopback server: who may read it, what it refuses, what it sends with every response."""

from __future__ import annotations

import socket
import threading

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from qkflow.errors import InputError
from qkflow.web.security import LocalOnly, LocalSite, bind_site, serve

SITE = LocalSite(8123, token="secret")


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"bytes": len(await request.body()), "query": str(request.url.query)})


def make_client(**options: object) -> TestClient:
    app = Starlette(routes=[Route("/", echo, methods=["GET", "POST"])])
    secured = LocalOnly(app, SITE, max_body=1000)
    return TestClient(secured, base_url=SITE.origin, follow_redirects=False, **options)  # type: ignore[arg-type]


def authorized() -> TestClient:
    return make_client(cookies={SITE.cookie_name: SITE.token})


def test_token_becomes_a_cookie() -> None:
    client = make_client()
    response = client.get("/?token=secret&model=b")
    assert response.status_code == 303
    assert response.headers["location"] == "/?model=b"
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/").status_code == 200


def test_redirect_stays_on_this_server() -> None:
    assert make_client().get(f"{SITE.origin}//evil.test/?token=secret").headers["location"] == "/evil.test/"


def test_link_of_another_site_reloads_from_our_own_page() -> None:
    response = make_client().get('/?token=secret&x="><script>', headers={"sec-fetch-site": "cross-site"})
    assert response.status_code == 200
    assert "set-cookie" in response.headers
    assert "<script" not in response.text


@pytest.mark.parametrize("url", ["/", "/?token=", "/?token=wrong", "/?token=secreT", "/?token=é"])
def test_missing_or_wrong_token_is_refused(url: str) -> None:
    response = make_client().get(url)
    assert response.status_code == 403
    assert "set-cookie" not in response.headers


def test_wrong_cookie_is_refused() -> None:
    assert make_client(cookies={SITE.cookie_name: "wrong"}).get("/").status_code == 403


@pytest.mark.parametrize("host", ["evil.test", "evil.test:8123", "127.0.0.1:1", "127.0.0.1", "localhost:80"])
def test_foreign_host_is_refused(host: str) -> None:
    assert authorized().get("/", headers={"host": host}).status_code == 403
    assert make_client().get("/?token=secret", headers={"host": host}).status_code == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.test", "null", "https://127.0.0.1:8123", "http://127.0.0.1:1"]
)
def test_foreign_origin_is_refused(origin: str) -> None:
    assert authorized().post("/", headers={"origin": origin}).status_code == 403


def test_own_origin_and_localhost_are_accepted() -> None:
    assert authorized().post("/", headers={"origin": SITE.origin}).status_code == 200
    headers = {"host": "localhost:8123", "origin": "http://localhost:8123"}
    assert authorized().post("/", headers=headers).status_code == 200


def test_body_limit() -> None:
    assert authorized().post("/", content=b"x" * 1000).json()["bytes"] == 1000
    assert authorized().post("/", content=b"x" * 1001).status_code == 413

    def chunks() -> object:  # without a Content-Length
        yield from (b"x" * 400,) * 3

    assert authorized().post("/", content=chunks()).status_code == 413  # type: ignore[arg-type]


def test_other_methods_are_refused() -> None:
    assert authorized().put("/").status_code == 405
    assert authorized().options("/").status_code == 405


@pytest.mark.parametrize("cookies", [{}, {SITE.cookie_name: SITE.token}])
def test_headers_of_every_response(cookies: dict[str, str]) -> None:
    headers = make_client(cookies=cookies).get("/").headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers


def test_serve_answers_on_loopback_and_stops() -> None:
    site = bind_site()
    app = LocalOnly(Starlette(routes=[Route("/", echo, methods=["GET", "POST"])]), site)
    thread = threading.Thread(target=serve, args=(app, site))
    thread.start()
    try:
        with httpx.Client(trust_env=False, follow_redirects=True) as client:
            assert client.get(site.url).status_code == 200
            cookie = f"{site.cookie_name}={site.token}"
        headers = f"Host: {site.hosts[0]}\r\nCookie: {cookie}\r\nContent-Length: 100000000"
        request = f"POST / HTTP/1.1\r\n{headers}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", site.port), timeout=10) as connection:
            connection.sendall(request.encode())  # refused before the body is sent
            assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    finally:
        site.stopping.set()
        thread.join(10)
    assert not thread.is_alive()


def test_port_in_use_is_an_input_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError) as caught:
        bind_site(taken.getsockname()[1])
    assert caught.value.code == "port-in-use"
    with pytest.raises(InputError) as caught:
        bind_site(70_000)
    assert caught.value.code == "invalid-port"
