"""Who may ask: the browser that opened the link, on this machine.

The link has a token, which the server exchanges for a cookie. A page of another site can neither read the answers
(there are no CORS headers) nor change anything: the cookie is SameSite, and a change needs a header that a browser adds
for no other site. A request by another host name is refused, against DNS rebinding.
"""

from __future__ import annotations

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie

from rollouts.gateway.http_server import HTTPRequest
from rollouts_view.api import APIError, Query

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
        if not self._is_known(request):
            raise APIError(401, "open the link that `rollouts view` printed: it has the token of this server")
        if request.method not in ("GET", "HEAD") and CHANGES not in request.headers:
            raise APIError(403, f"a request that changes something needs the header {CHANGES}: 1")

    def _is_known(self, request: HTTPRequest) -> bool:
        try:
            cookie = SimpleCookie(request.headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            cookie = None
        given = cookie.value if cookie else request.headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(), self.token.encode())
