"""Serves the page and its API on this machine until a signal ends it, to the browser that opened the link.

The link has a token, which the server exchanges for a cookie. A page of another site can neither read the answers
(there are no CORS headers) nor change anything: the cookie is SameSite, and a change needs a header that a browser adds
for no other site. A request by another host name is refused, against DNS rebinding.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlencode

import trio

from rollouts.config.flags import Tree
from rollouts.encoding import encode
from rollouts.errors import UserError, counted
from rollouts.gateway.http_server import (
    HTTPLimits,
    HTTPRequest,
    HTTPResponse,
    bound_socket,
    serve_http,
    stop_at_signals,
)
from rollouts_view.api import APIError, Query, ViewAPI
from rollouts_view.catalog import Catalog

HOST = "127.0.0.1"
THREADS = 4
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
LIMITS = HTTPLimits(body_bytes_max=1 << 20, idle_seconds=30.0, grace_seconds=2.0)


def open_catalog(
    places: Sequence[Path], *, may_be_empty: bool = False, data: Mapping[str, Tree] = MappingProxyType({})
) -> Catalog:
    """The runs in these directories, each a run or a directory of runs, and files of training data with their settings.
    Raises UserError for a place that is no directory, and if none of them has a run, unless they may be empty.
    """
    catalog = Catalog(places, data)
    for place in places:
        if not place.is_dir():
            raise UserError(f"there is no directory {place}; name a run, or a directory that has runs")
    if not may_be_empty and not catalog.runs():
        words = " and ".join(map(str, places))
        raise UserError(f"{words} {'has' if len(places) == 1 else 'have'} no runs; name a directory that has runs")
    return catalog


def page_of_data(file: str) -> str:
    """The page of a file of data, for `view`."""
    return f"#/data?{urlencode({'file': file})}"


def view(
    catalog: Catalog,
    port: int,
    say: Callable[[str], None],
    opened: Callable[[str], object] | None = None,
    *,
    page: str = "",
) -> None:
    """Serve until SIGINT or SIGTERM comes. `say` is called with the link when the server is ready, and `opened` too.
    `page` is what the link shows: the part of its address from `#` on.

    Raises ConfigError if the port cannot be used.
    """
    with bound_socket(HOST, port, f"--port {port}") as bound:
        trio.run(_serve, catalog, bound, say, opened, page)


async def _serve(
    catalog: Catalog,
    bound: socket.socket,
    say: Callable[[str], None],
    opened: Callable[[str], object] | None,
    page: str,
) -> None:
    port = bound.getsockname()[1]
    access = Access(port)
    link = f"http://{HOST}:{port}/?token={access.token}{page}"
    stopping = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_at_signals, stopping, nursery.cancel_scope)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        say(f"{_shown(catalog)} at {link}")
        if opened is not None:
            opened(link)
        site = Site(ViewAPI(catalog), access)
        await serve_http(site.handle, _unreadable, [listener], LIMITS, stopping, site.admit)
        nursery.cancel_scope.cancel()


def _shown(catalog: Catalog) -> str:
    """What the page shows, in words: `2 runs`, `chat.jsonl`."""
    words = list(catalog.data)
    if catalog.places:
        words.append(counted(len(catalog.runs()), "run"))
    return " and ".join(words)


class Site:
    """Answers requests for the page's files and for the API."""

    def __init__(self, api: ViewAPI, access: Access) -> None:
        self._api, self._access = api, access
        self._threads = trio.CapacityLimiter(THREADS)
        self._files = {f"/{name}": content for name, content in page_files().items()}

    def admit(self, request: HTTPRequest) -> HTTPResponse | None:
        """The refusal of a request that may not ask, before its body is read."""
        try:
            self._access.check_host(request)
            if not self._is_link(request):
                self._access.check(request)
        except APIError as error:
            return _refusal(error)
        return None

    async def handle(self, request: HTTPRequest) -> HTTPResponse:
        """The answer to a request. A mistake in this package is answered too, and its traceback is printed."""
        if (refusal := self.admit(request)) is not None:
            return refusal
        try:
            if self._is_link(request):
                moved = HEADERS | {"location": "/", "set-cookie": self._access.cookie()}
                return HTTPResponse(303, b"", "text/plain", headers=moved)
            if request.path.startswith("/api/"):
                asked = (request.method, request.path, request.query, request.body)
                body = await trio.to_thread.run_sync(self._api.answer, *asked, limiter=self._threads)
                return _tagged(request, body, "application/json")
            return self._of_page(request)
        except APIError as error:
            return _refusal(error)
        except Exception:
            traceback.print_exc()
            return _refusal(APIError(500, "the viewer made a mistake; its terminal has the traceback"))

    def _is_link(self, request: HTTPRequest) -> bool:
        """Whether the request comes from the link, which has the token. Raises APIError."""
        return request.path == "/" and self._access.has_token(Query.of(request.query))

    def _of_page(self, request: HTTPRequest) -> HTTPResponse:
        path = "/index.html" if request.path == "/" else request.path
        if path not in self._files:
            raise APIError(404, f"there is no page {path}")
        if request.method not in ("GET", "HEAD"):
            raise APIError(405, f"{path} takes GET, not {request.method}")
        return _tagged(request, self._files[path], TYPES[Path(path).suffix])


def page_files() -> dict[str, bytes]:
    """The files of the page, by name."""
    folder = resources.files("rollouts_view") / "page"
    return {each.name: each.read_bytes() for each in folder.iterdir() if Path(each.name).suffix in TYPES}


def _tagged(request: HTTPRequest, body: bytes, content_type: str) -> HTTPResponse:
    """The body with its tag, or no body if the browser has the same already."""
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    is_known = request.headers.get("if-none-match") == tag
    headers = HEADERS | {"etag": tag, "cache-control": "no-cache"}
    return HTTPResponse(304 if is_known else 200, b"" if is_known else body, content_type, headers=headers)


def _refusal(error: APIError) -> HTTPResponse:
    body = encode({"error": str(error)})
    return HTTPResponse(error.status, body, headers=HEADERS | {"cache-control": "no-store"})


def _unreadable(status: int, words: str) -> HTTPResponse:
    return _refusal(APIError(status, words))


# --- who may ask ------------------------------------------------------------------------------------------------------


CHANGES = "x-rollouts-view"
"""The header that every request has that changes something."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Access:
    """The token of one server, which listens at `port`."""

    def __init__(self, port: int) -> None:
        self.token = secrets.token_urlsafe(24)
        self._cookie = f"rollouts_view_{port}"  # cookies do not know ports
        self._hosts = {f"{host}:{port}" for host in ("127.0.0.1", "localhost")}

    def cookie(self) -> str:
        """The value of `set-cookie` for a browser that has the token."""
        return f"{self._cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"

    def has_token(self, query: Query) -> bool:
        """Whether the address has the token."""
        return hmac.compare_digest(query.one("token").encode(), self.token.encode())

    def check_host(self, request: HTTPRequest) -> None:
        """Raise APIError if the request names another host."""
        host = request.headers.get("host", "")
        if host not in self._hosts:
            raise APIError(421, f"this server is {' or '.join(sorted(self._hosts))}, not {host!r}")

    def check(self, request: HTTPRequest) -> None:
        """Raise APIError if the request has no cookie or token, or changes something from another page."""
        try:
            cookie = SimpleCookie(request.headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            cookie = None
        given = cookie.value if cookie else request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise APIError(401, "open the link that `rollouts view` printed: it has the token of this server")
        if request.method not in ("GET", "HEAD") and CHANGES not in request.headers:
            raise APIError(403, f"a request that changes something needs the header {CHANGES}: 1")
