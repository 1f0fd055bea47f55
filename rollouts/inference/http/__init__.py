"""What every engine behind HTTP stands on: one cheap, bounded, typed way to ask a server.

    client.py      HTTPClient: requests in flight under a limit, connections kept, retries within a deadline
    connection.py  one HTTP/1.1 connection: h11 (the grammar) on a trio stream (the bytes)
    failures.py    HTTPFailure: what went wrong, and whether asking again is right

What is said to which kind of server: `rollouts.inference.vllm`, `sglang`, `openai`.
Names are imported when they are first used, so that this package costs nothing to import.
"""

from __future__ import annotations

from rollouts.lazy import lazy_face

_HOMES = {
    "ClientStatistics": "client",
    "FailureKind": "failures",
    "HTTPClient": "client",
    "HTTPFailure": "failures",
    "Retries": "client",
}

__all__ = ["ClientStatistics", "FailureKind", "HTTPClient", "HTTPFailure", "Retries"]

__getattr__, __dir__ = lazy_face(__name__, _HOMES)
