"""One request to a chat-completions API, within the budget, with retries.

These are tried again, after a growing time or the time that the server asks for: no connection, a connection that
breaks, a reply that does not come in time, the statuses 408, 425, 429 and 5xx, and a body that is no completion. Other
statuses are final. An attempt whose price is unknown counts as the most that it can have cost.
"""

from __future__ import annotations

import functools
import os
import random
import ssl
from typing import Any, NamedTuple

import httpx
import msgspec
import trio

from rollouts.spending import SpendingStore
from rollouts_judge.prompts import Request, excerpt, tokens_at_most
from rollouts_judge.settings import JudgeSettings
from rollouts_judge.store import reserve

RETRYABLE = frozenset({408, 425, 429})
FIRST_WAIT_SECONDS = 0.5
WAIT_SECONDS_MAX = 30.0


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class Reply(NamedTuple):
    """The text of a reply, and what it cost, with all failed attempts before it."""

    text: str
    tokens: int
    dollars: float


class Refused(Exception):
    """There is no reply. The message says why. `tokens` and `dollars` are the most that the attempts can have cost."""

    def __init__(self, why: str, tokens: int = 0, dollars: float = 0.0) -> None:
        super().__init__(why)
        self.tokens, self.dollars = tokens, dollars


class _Failure(Exception):
    """One attempt failed. `is_free`: the server did not compute anything."""

    def __init__(self, why: str, *, again: bool, is_free: bool, wait_seconds: float = 0.0) -> None:
        super().__init__(why)
        self.again, self.is_free, self.wait_seconds = again, is_free, wait_seconds


class ChatAPI:
    """A chat-completions API with a budget."""

    def __init__(self, client: httpx.AsyncClient, settings: JudgeSettings, store: SpendingStore) -> None:
        self.settings, self._client, self._store = settings, client, store
        key = os.environ.get(settings.key_name, "").strip() if settings.key_name else ""
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def ask(self, request: Request) -> Reply:
        """The model's reply. Raises Refused, and BudgetSpent before an attempt that could exceed the budget."""
        settings = self.settings
        most = tokens_at_most(request, settings)
        most_tokens, most_dollars = sum(most), settings.price(request.model, *most)
        tokens, dollars = 0, 0.0
        for attempt in range(settings.attempts):
            limits = settings.tokens_max, settings.dollars_max
            await trio.to_thread.run_sync(reserve, self._store, most_tokens, most_dollars, *limits)
            try:
                text, usage = await self._attempt(request)
            except _Failure as failure:
                if failure.is_free:
                    await trio.to_thread.run_sync(self._store.settle, -most_tokens, -most_dollars)
                else:
                    tokens, dollars = tokens + most_tokens, dollars + most_dollars
                if not failure.again or attempt + 1 == settings.attempts:
                    tried = "" if attempt == 0 else f" after {attempt + 1} attempts"
                    raise Refused(f"{request.model}: {failure}{tried}", tokens, dollars) from failure
                await trio.sleep(failure.wait_seconds or _wait(attempt))
                continue
            used = most if usage is None else (usage.prompt_tokens, usage.completion_tokens)
            price = settings.price(request.model, *used)
            await trio.to_thread.run_sync(self._store.settle, sum(used) - most_tokens, price - most_dollars)
            return Reply(text, tokens + sum(used), dollars + price)
        raise AssertionError("there is at least one attempt")

    async def _attempt(self, request: Request) -> tuple[str, _Usage | None]:
        """The text and the usage of one completion. Raises _Failure."""
        url = f"{self.settings.url.rstrip('/')}/chat/completions"
        response = None
        with trio.move_on_after(self.settings.request_seconds):
            try:
                response = await self._client.post(url, json=request.body, headers=self._headers)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                raise _Failure(f"no connection to {self.settings.url}", again=True, is_free=True) from error
            except httpx.TimeoutException:
                response = None
            except httpx.HTTPError as error:
                why = f"the connection broke ({type(error).__name__})"
                raise _Failure(why, again=True, is_free=False) from error
        if response is None:
            why = f"no reply within {self.settings.request_seconds:g} seconds"
            raise _Failure(why, again=True, is_free=False)
        return _completion(response)


def verification(url: str) -> ssl.SSLContext | bool:
    """The certificates that a client of this URL checks. They are read once."""
    return _certificates() if url.startswith("https:") else False


@functools.cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _completion(response: httpx.Response) -> tuple[str, _Usage | None]:
    """The text and the usage in a response. Raises _Failure."""
    status = response.status_code
    if status != 200:
        again = status in RETRYABLE or status >= 500
        why = f"status {status}: {excerpt(response.text)}"
        raise _Failure(why, again=again, is_free=True, wait_seconds=_asked_wait(response))
    try:
        found = msgspec.json.decode(response.content, type=_Completion)
        text = found.choices[0].message.content
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
        why = f"the body is no completion: {excerpt(response.text)}"
        raise _Failure(why, again=True, is_free=False) from error
    usage = found.usage
    if usage is not None and min(usage.prompt_tokens, usage.completion_tokens) < 0:
        usage = None
    return text or "", usage


def _asked_wait(response: httpx.Response) -> float:
    """The seconds that the server asks to wait; 0 if it names none."""
    words: Any = response.headers.get("retry-after", "")
    try:
        return min(max(float(words), 0.0), WAIT_SECONDS_MAX)
    except ValueError:  # no number, or a date
        return 0.0


def _wait(attempt: int) -> float:
    """Seconds before the next attempt: they double, and are shortened at random by up to a half."""
    longest: float = min(FIRST_WAIT_SECONDS * 2**attempt, WAIT_SECONDS_MAX)
    return longest * (0.5 + random.random() / 2)
