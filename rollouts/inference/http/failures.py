"""HTTPFailure: what went wrong with a request, in words for a person and a kind for the code that asks again.

Left out: asking again (`client.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollouts.errors import InferenceError

__all__ = ["UNREADABLE", "FailureKind", "HTTPFailure", "failure_of_status", "message_of", "message_of_body"]

FailureKind = Literal["refused", "reset", "timeout", "busy", "server", "client", "garbage"]
"""refused: no connection. reset: it broke or closed before the whole answer. timeout: no whole answer in time.
busy: 429. server: 5xx. client: 4xx, redirects, and a request that cannot be written as JSON. garbage: an answer that is
no HTTP, no JSON, or not the JSON asked.
"""

MESSAGE_CHARACTERS_MAX = 500
RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
UNREADABLE = (ValueError, RecursionError)
"""What msgspec raises for bytes that are no JSON: its DecodeError and UnicodeDecodeError are ValueErrors; JSON that is
nested too deep is a RecursionError.
"""


class HTTPFailure(InferenceError):
    """A request that got no usable answer.

    `retryable`: the same request may succeed later, or at another server. `status` is the HTTP status where there was
    one; `retry_after_seconds` what the server asked for; `attempts` how often it was asked.
    """

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        retryable: bool,
        status: int | None = None,
        retry_after_seconds: float | None = None,
        attempts: int = 1,
    ) -> None:
        super().__init__(message, is_transient=retryable)
        self.kind = kind
        self.retryable = retryable
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.attempts = attempts


def failure_of_status(status: int, body: bytes, retry_after_seconds: float | None) -> HTTPFailure:
    """The failure that an answer with a status other than 2xx is, with the server's own words."""
    words = f"status {status}: {message_of_body(body) or 'no message'}"
    kind: FailureKind = "busy" if status == 429 else "server" if status >= 500 else "client"
    if 300 <= status < 400:
        words = f"status {status}: the URL redirects elsewhere; give the one that it redirects to"
    return HTTPFailure(
        kind,
        words,
        retryable=status in RETRYABLE_STATUSES,
        status=status,
        retry_after_seconds=retry_after_seconds,
    )


def message_of_body(body: bytes) -> str:
    """The server's message in an error's body, or the body as text where it is no JSON."""
    try:
        return message_of(msgspec.json.decode(body))
    except UNREADABLE:
        return _cut(body.decode("utf-8", "replace"))


def message_of(found: Any) -> str:
    """The message in the JSON of an error: OpenAI's and vLLM's `error.message`, FastAPI's `detail`, or the text."""
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return _cut(found if isinstance(found, str) else msgspec.json.encode(found).decode())


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_CHARACTERS_MAX else text[:MESSAGE_CHARACTERS_MAX] + "..."
