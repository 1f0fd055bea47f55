"""The paths of the APIs: which of them reads a request, who answers it, and what a mistake looks like."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from rollouts.author_code import shown
from rollouts.gateway.anthropic_messages import COUNT_TOKENS, MESSAGES
from rollouts.gateway.chat_completions import CHAT_COMPLETIONS
from rollouts.gateway.exchange import Answer, APIError, ClientAPI
from rollouts.gateway.http_server import HTTPRequest, HTTPResponse, as_json
from rollouts.gateway.responses import Responses

MESSAGES_PATH = "/v1/messages"


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
        self._apis: dict[str, ClientAPI] = {
            "/v1/chat/completions": CHAT_COMPLETIONS,
            "/v1/responses": Responses().api,
            MESSAGES_PATH: MESSAGES,
            f"{MESSAGES_PATH}/count_tokens": COUNT_TOKENS,
        }
        self._pages = {"/v1/models": self._list, "/health": self._health}

    async def handle(self, request: HTTPRequest) -> HTTPResponse:
        """The response. A mistake of the client gets an error in the format of its API. Raises what `answer` raises,
        apart from APIError.
        """
        path = request.path.rstrip("/")
        method = "POST" if path in self._apis else "GET"
        try:
            if path not in self._apis and path not in self._pages:
                there = ", ".join([*self._apis, *self._pages])
                raise APIError(404, f"there is no {request.path} here; there are {there}")
            if request.method != method:
                raise APIError(405, f"{request.path} takes {method}, not {request.method}")
            return await (self._reply(self._apis[path], request.body) if method == "POST" else self._pages[path]())
        except APIError as error:
            return error_response(request, error)

    async def _reply(self, api: ClientAPI, body: bytes) -> HTTPResponse:
        given = api.read(body)
        model = self._model(given.model)
        try:
            return api.write(given, await self._answer(given.asked), model)
        except APIError as error:
            error.parameter = api.conversation if error.parameter == "messages" else error.parameter
            raise

    async def _list(self) -> HTTPResponse:
        model: dict[str, Any] = {"id": self._name or "policy", "object": "model", "created": self._created}
        model["owned_by"] = "rollouts"
        if self._context_tokens is not None:
            model["max_model_len"] = self._context_tokens
        return as_json({"object": "list", "data": [model]})

    async def _health(self) -> HTTPResponse:
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


def error_response(request: HTTPRequest | None, error: APIError) -> HTTPResponse:
    """An error in the format of the API that was asked. None: the request could not be read."""
    is_anthropic = request is not None and request.path.startswith(MESSAGES_PATH)
    return (MESSAGES if is_anthropic else CHAT_COMPLETIONS).refuse(error)


def unreadable(status: int, words: str) -> HTTPResponse:
    """The response to what is no HTTP request (`http_server.Refuse`)."""
    return error_response(None, APIError(status, words))
