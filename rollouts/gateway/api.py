"""The paths of the APIs: which module reads a request, who answers it, and what a mistake looks like."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from rollouts.author_code import shown
from rollouts.gateway import anthropic_messages, chat_completions, responses
from rollouts.gateway.exchange import Answer, APIError
from rollouts.gateway.http_server import HTTPRequest, HTTPResponse, as_json

MESSAGES = "/v1/messages"


class API:
    """Answers requests. `name` is the only model that a client may ask for; None: any name. `answer` gives the replies.

    `health` raises APIError if the model cannot answer.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        name: str | None,
        context_tokens: int | None = None,
        health: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._answer, self._name, self._health_of = answer, name, health
        self._context_tokens = context_tokens
        self._created = int(time.time())
        self._earlier = responses.Earlier()
        self._routes: dict[str, tuple[str, Callable[[HTTPRequest], Awaitable[HTTPResponse]]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/responses": ("POST", self._respond),
            MESSAGES: ("POST", self._message),
            f"{MESSAGES}/count_tokens": ("POST", self._count_tokens),
            "/v1/models": ("GET", self._list),
            "/health": ("GET", self._health),
        }

    async def handle(self, request: HTTPRequest) -> HTTPResponse:
        """The response. A mistake of the client gets an error in the format of its API. Raises what `answer` raises,
        apart from APIError.
        """
        method, answer = self._routes.get(request.path.rstrip("/"), ("", None))
        try:
            if answer is None:
                raise APIError(404, f"there is no {request.path} here; there are {', '.join(self._routes)}")
            if request.method != method:
                raise APIError(405, f"{request.path} takes {method}, not {request.method}")
            return await answer(request)
        except APIError as error:
            return refusal(request, error)

    async def _chat(self, request: HTTPRequest) -> HTTPResponse:
        given = chat_completions.read(request.body)
        model = self._model(given.model)
        return chat_completions.write(given, await self._answer(given.asked), model)

    async def _message(self, request: HTTPRequest) -> HTTPResponse:
        given = anthropic_messages.read(request.body)
        model = self._model(given.model)
        return anthropic_messages.write(given, await self._answer(given.asked), model)

    async def _count_tokens(self, request: HTTPRequest) -> HTTPResponse:
        given = anthropic_messages.read(request.body, is_count=True)
        self._model(given.model)
        return as_json({"input_tokens": (await self._answer(given.asked)).prompt_tokens})

    async def _respond(self, request: HTTPRequest) -> HTTPResponse:
        given = responses.read(request.body, self._earlier.conversations)
        model = self._model(given.model)
        try:
            answered = await self._answer(given.asked)
        except APIError as error:  # this API has another name for the messages
            error.parameter = "input" if error.parameter == "messages" else error.parameter
            raise
        response, number = responses.write(given, answered, model)
        self._earlier.add(number, responses.conversation(given, answered))
        return response

    async def _list(self, request: HTTPRequest) -> HTTPResponse:
        model: dict[str, Any] = {"id": self._name or "policy", "object": "model", "created": self._created}
        model["owned_by"] = "rollouts"
        if self._context_tokens is not None:
            model["max_model_len"] = self._context_tokens
        return as_json({"object": "list", "data": [model]})

    async def _health(self, request: HTTPRequest) -> HTTPResponse:
        if self._health_of is not None:
            await self._health_of()
        return as_json({"status": "ok"})

    def _model(self, asked: str | None) -> str:
        """The name that the response shows. Raises APIError for a model that is not here."""
        if self._name is None:
            return asked or "policy"
        if asked not in (None, self._name):
            words = f"there is no model {shown(asked)} here; there is {self._name!r}"
            raise APIError(404, words, parameter="model", code="model_not_found")
        return self._name


def refusal(request: HTTPRequest | None, error: APIError) -> HTTPResponse:
    """An error in the format of the API that was asked. None: the request could not be read."""
    is_anthropic = request is not None and request.path.startswith(MESSAGES)
    return anthropic_messages.refuse(error) if is_anthropic else chat_completions.refuse(error)


def unreadable(status: int, words: str) -> HTTPResponse:
    """The response to what is no HTTP request (`http_server.Refuse`)."""
    return refusal(None, APIError(status, words))
