"""Serve a local web app that only the person who started it can read.

    site = bind_site(port=None)                       # a bound loopback socket and a random token
    app = LocalOnly(starlette_app, site)              # wrap any ASGI app
    serve(app, site, open_browser=True)               # blocks until Ctrl-C, then returns

`site.url` has the token: `http://127.0.0.1:PORT/?token=…`. The first request turns the token into an
HttpOnly, SameSite=Strict cookie and redirects to the same address without it.

`LocalOnly` refuses, before the app sees the request:

    403  a Host that is not this server (DNS rebinding), an Origin that is not this server, no valid token
    405  a method other than GET, HEAD and POST
    413  a body above `max_body` bytes; the body is read to that size, never further

and adds a Content-Security-Policy (`csp`, default `default-src 'self'`) and other protective headers to every
response. Bodies are buffered; responses are not, so server-sent events pass through. A long response should
stop when `site.stopping.is_set()`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from types import FrameType
from urllib.parse import parse_qsl, urlencode

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkflow.errors import InputError

LOOPBACK = "127.0.0.1"
MAX_BODY = 1 << 20
DEFAULT_CSP = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
)
PROTECTIVE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass
class LocalSite:
    """The address of a local server: its port, its token and, if it was bound, its socket."""

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    socket: socket.socket | None = None
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def origin(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.origin}/?token={self.token}"

    @property
    def hosts(self) -> tuple[str, ...]:
        return (f"{LOOPBACK}:{self.port}", f"localhost:{self.port}")

    @property
    def cookie_name(self) -> str:
        return f"qkflow_{self.port}"  # browsers share the cookies of all ports of a host


def bind_site(port: int | None = None) -> LocalSite:
    """Return a site on a bound loopback socket; None: any free port."""
    if port is not None and not 0 <= port <= 65535:
        raise InputError(f"--port must be between 0 and 65535, not {port}", code="invalid-port")
    try:
        bound = socket.create_server((LOOPBACK, port or 0), backlog=128)
    except OSError as error:
        raise InputError(
            f"cannot serve on port {port} ({error.strerror}): choose another --port", code="port-in-use"
        ) from None
    return LocalSite(bound.getsockname()[1], socket=bound)


class LocalOnly:
    """ASGI middleware: check Host, Origin, token and body size of every request, and add headers."""

    def __init__(
        self, app: ASGIApp, site: LocalSite, *, max_body: int = MAX_BODY, csp: str = DEFAULT_CSP
    ) -> None:
        self.app, self.site, self.max_body, self.csp = app, site, max_body, csp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets, no lifespan
            return
        send = self._with_headers(send)
        refusal = self._check(scope)
        if refusal is None and scope["method"] == "POST":
            body = await _read_body(Headers(scope=scope), receive, self.max_body)
            if body is None:
                refusal = PlainTextResponse(
                    f"the request body is above {self.max_body} bytes", 413, {"Connection": "close"}
                )
            else:
                receive = _replay(body, receive)
        await (self.app if refusal is None else refusal)(scope, receive, send)

    def _check(self, scope: Scope) -> Response | None:
        """Return the response to a request that must not reach the app, None if it may."""
        headers = Headers(scope=scope)
        if len(headers.getlist("host")) != 1 or headers["host"].lower() not in self.site.hosts:
            return PlainTextResponse("this server answers to its loopback address only", 403)
        if any(origin not in self._origins for origin in headers.getlist("origin")):
            return PlainTextResponse("requests from another origin are refused", 403)
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("method not allowed", 405)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        for name, value in query:
            if name == "token" and scope["method"] == "GET" and self._is_token(value):
                rest = urlencode([(key, text) for key, text in query if key != "token"])
                return self._set_cookie(scope["path"] + (f"?{rest}" if rest else ""), headers)
        if not self._is_token(_read_cookie(headers, self.site.cookie_name)):
            return PlainTextResponse("open the address that the qkflow command printed: it has a token", 403)
        return None

    @property
    def _origins(self) -> tuple[str, ...]:
        return tuple(f"http://{host}" for host in self.site.hosts)

    def _is_token(self, value: str) -> bool:
        return secrets.compare_digest(value.encode(), self.site.token.encode())

    def _set_cookie(self, target: str, headers: Headers) -> Response:
        target = "/" + target.lstrip("/")  # `//other.host` would leave this server
        response: Response
        if headers.get("sec-fetch-site") == "cross-site":
            # A redirect of a link on another site does not carry a SameSite=Strict cookie; a page does.
            attribute = target.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
            response = HTMLResponse(
                f'<!doctype html><meta http-equiv="refresh" content="0;url={attribute}"><title>qkflow</title>'
            )
        else:
            response = RedirectResponse(target, 303)
        response.set_cookie(self.site.cookie_name, self.site.token, httponly=True, samesite="strict")
        return response

    def _with_headers(self, send: Send) -> Send:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = self.csp
                for name, value in PROTECTIVE_HEADERS.items():
                    headers[name] = value
            await send(message)

        return send_with_headers


def serve(
    app: ASGIApp, site: LocalSite, *, open_browser: bool = False, on_ready: Callable[[], None] | None = None
) -> None:
    """Run the server on the socket of `site` until Ctrl-C or `site.stopping`; then return."""
    assert site.socket is not None, "bind_site first"
    config = uvicorn.Config(
        app,
        log_level="error",  # a warning per request that is no HTTP would fill the terminal
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config, site.stopping)

    def is_running(record: logging.LogRecord) -> bool:  # requests that Ctrl-C cancels are no errors
        return not site.stopping.is_set()

    logging.getLogger("uvicorn.error").addFilter(is_running)
    threading.Thread(target=_stop_when_set, args=(site.stopping, server), daemon=True).start()
    if open_browser:  # the socket is bound: the page waits until the server runs
        threading.Thread(target=webbrowser.open, args=(site.url,), daemon=True).start()
    if on_ready is not None:
        on_ready()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[site.socket])
    finally:
        site.stopping.set()
        site.socket.close()
        logging.getLogger("uvicorn.error").removeFilter(is_running)


class _Server(uvicorn.Server):
    """Sets `stopping` on a signal, so that long responses end before the server waits for them."""

    def __init__(self, config: uvicorn.Config, stopping: threading.Event) -> None:
        super().__init__(config)
        self.stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stopping.set()
        super().handle_exit(sig, frame)


def _stop_when_set(stopping: threading.Event, server: uvicorn.Server) -> None:
    stopping.wait()
    server.should_exit = True


async def _read_body(headers: Headers, receive: Receive, limit: int) -> bytes | None:
    """Return the body, or None if it is longer than `limit`."""
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        return None
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return b""  # the client is gone
        chunks.append(message.get("body", b""))
        size, more = size + len(chunks[-1]), message.get("more_body", False)
        if size > limit:
            return None
    return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _read_cookie(headers: Headers, name: str) -> str:
    cookies: SimpleCookie = SimpleCookie()
    for line in headers.getlist("cookie"):
        with contextlib.suppress(CookieError):
            cookies.load(line)
    return cookies[name].value if name in cookies else ""
