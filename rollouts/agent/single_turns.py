"""Answers from an engine that takes token ids, for `rollouts serve`. Nothing is recorded.

The model's own chat template turns a conversation into ids, and a reply is parsed as in an episode. So a client gets
the same tool calls as training. Each choice is a session of the engine, so choices that wait at the same time are
sampled together. Settings of sampling that the engine does not support, such as top-p, are refused with status 400.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

import trio

from rollouts.errors import InferenceError, ModelError
from rollouts.gateway.exchange import Answered, APIError, Asked, ClientReply, mistake_in, new_id, seen_reply
from rollouts.inference.base import GenerateRequest, Generation, InferenceBackend

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

SEEDS = 2**63


class ServedModel(NamedTuple):
    """The served model: its name for clients, its engine and chat format, and the defaults of requests. A request that
    takes more than `request_seconds` fails.
    """

    name: str
    engine: InferenceBackend
    chat: ChatFormat
    max_tokens: int = 256
    temperature: float = 1.0
    request_seconds: float = 600.0


class SingleTurns:
    """Answers requests one by one (`exchange.Answer`)."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._requests = 0

    async def answer(self, asked: Asked) -> Answered:
        """The replies. Raises APIError."""
        for key in asked.unsupported:
            raise mistake_in(key, f"{key} is not supported here; leave it out")
        tokens = self._encode(asked)
        replies = [self._reply(generation, asked, tokens) for generation in await self._sample(asked, tokens)]
        return Answered(replies, len(tokens))

    async def health(self) -> None:
        """Raise APIError if no server of a pool can answer."""
        engine = self._model.engine
        if engine.capabilities.is_pool and not (health := await engine.health()).ok:
            raise APIError(503, health.detail)

    def _encode(self, asked: Asked) -> list[int]:
        """The conversation as ids [L], with room for a reply."""
        chat, most = self._model.chat, self._model.engine.context_tokens_max
        # Encoding ten megabytes takes half a minute, in which no other request is answered.
        words, code = f"and the model's context length is {most}", "context_length_exceeded"
        if chat.tokens_at_least(asked.messages, asked.tools) > most:
            raise mistake_in("messages", f"the conversation has more than {most} tokens, {words}", code=code)
        try:
            tokens = chat.encode_prompt(asked.messages, asked.tools)
        except ModelError as error:
            raise mistake_in("messages", str(error)) from error
        if len(tokens) >= most:
            raise mistake_in("messages", f"the conversation has {len(tokens)} tokens, {words}", code=code)
        return tokens

    async def _sample(self, asked: Asked, tokens: list[int]) -> list[Generation]:
        """One reply for each choice. Raises APIError."""
        model = self._model
        limit = asked.max_tokens or model.max_tokens
        temperature = model.temperature if asked.temperature is None else asked.temperature
        seed = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed % SEEDS
        self._requests += 1
        number, replies = self._requests, dict[int, Generation]()

        async def sample(place: int, session: str) -> None:
            request = GenerateRequest(
                tokens,
                min(limit, model.engine.context_tokens_max - len(tokens)),
                model.chat.stop_ids,
                (seed + place) % SEEDS,
                temperature,
                (number, place, 0),
                session,
            )
            try:
                replies[place] = await model.engine.generate(request)
            finally:
                model.engine.close_session(session)

        failure: BaseException | None = None
        with trio.move_on_after(model.request_seconds):
            sessions = [model.engine.open_session((number, place)) for place in range(asked.count)]
            try:
                async with trio.open_nursery() as nursery:
                    for place, session in enumerate(sessions):
                        nursery.start_soon(sample, place, session)
            except* InferenceError as group:
                failure = group.exceptions[0]
        if failure is not None:
            raise APIError(500, f"the engine failed: {failure}") from failure
        if len(replies) < asked.count:
            raise APIError(504, f"there was no reply within {model.request_seconds:g} seconds")
        return [replies[place] for place in range(asked.count)]

    def _reply(self, generation: Generation, asked: Asked, context: list[int]) -> ClientReply:
        chat = self._model.chat
        message = chat.parse(generation.tokens, asked.tools, context)
        is_cut = generation.finish == "length"
        reply = seen_reply(message, asked.stop, is_cut=is_cut, tokens=len(generation.tokens), new_call=new_id("call_"))
        if asked.logprobs:
            pairs = zip(generation.tokens, generation.logprobs, strict=True)
            reply.logprobs = [(chat.decode([token]), logprob) for token, logprob in pairs]
        return reply
