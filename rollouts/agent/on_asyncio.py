"""An environment's own loop that is written for asyncio, such as that of another library.

    async def rollout(self, task, model):                # always under trio
        await play_on_asyncio(model, self._play)

    async def _play(self, model: AsyncioModel):          # on the asyncio loop of all environments
        turn = await model.chat([Message("user", "What is 2 + 2?")])

Tasks of asyncio may ask at the same time: their requests are answered one after another, in the order of the calls.
Not here: plain asyncio methods of an environment (`rollouts.env.calls`), and the model itself (`rollouts.agent.model`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import trio

from rollouts.env import calls
from rollouts.types import Message, Status

Result = TypeVar("Result")


class ModelEndedError(Exception):
    """The model gives no more replies in this episode: a limit was reached, or the engine failed."""


class Turn(NamedTuple):
    """One reply of the model. `is_cut`: the token or context limit cut it off. `tokens`: how many were sampled."""

    message: Message
    is_cut: bool
    tokens: int


class _Request(NamedTuple):
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Turn]

    def answer(self, turn: Turn) -> None:
        self._call(lambda: self.future.set_result(turn))

    def fail(self, error: Exception) -> None:
        self._call(lambda: self.future.set_exception(error))

    def _call(self, settle: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self.loop.call_soon_threadsafe(lambda: None if self.future.done() else settle())


class AsyncioModel:
    """The model of an episode, for code on the asyncio loop."""

    def __init__(self, model: Any, send: Callable[[_Request], None]) -> None:
        self._model, self._send = model, send
        self._token = trio.lowlevel.current_trio_token()

    async def chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> Turn:
        """The model's reply to a conversation. `tools` are OpenAI function schemas; None: those of the environment.

        Raises ModelEndedError. The loop should then end as it does at a limit of its own: what it computed is kept, and
        a rollout that was cut off is judged.
        """
        loop = asyncio.get_running_loop()
        request = _Request(list(messages), tools, loop, loop.create_future())
        with contextlib.suppress(trio.RunFinishedError):  # the run ends and cancels this call
            self._token.run_sync_soon(self._send, request)
        return await request.future

    def answers(self, reply: Message, texts: Sequence[str]) -> list[Message]:
        """The messages that answer the calls of a reply with these texts; see `ChatModel.answers`."""
        answered: list[Message] = self._model.answers(reply, texts)
        return answered


async def play_on_asyncio(model: Any, play: Callable[[AsyncioModel], Awaitable[Result]]) -> Result:
    """Run `await play(model)` on the asyncio loop that all environments share, and return its result.

    Raises the error of the model after `play` has ended, also if `play` ended well; else the error of `play`. If this
    call is cancelled, `play` is cancelled.
    """
    send, requests = trio.open_memory_channel[_Request](math.inf)  # a caller waits for each request
    model_errors: list[Exception] = []
    play_errors: list[Exception] = []
    results: list[Result] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_serve, model, requests, model_errors)
        try:
            results.append(await calls.call(play, AsyncioModel(model, send.send_nowait), async_library="asyncio"))
        except Exception as error:
            play_errors.append(error)
        nursery.cancel_scope.cancel()
    for failure in (*model_errors, *play_errors):
        raise failure
    return results[0]


async def _serve(model: Any, requests: trio.MemoryReceiveChannel[_Request], errors: list[Exception]) -> None:
    """Answer requests. After an error of the model, each request fails."""
    async for request in requests:
        if not errors:
            try:
                left = model.tokens_left
                message = await model.chat(request.messages, request.tools)
            except Exception as error:
                errors.append(error)
            else:
                is_cut = model.trajectory is not None and model.trajectory.status is Status.TRUNCATED
                request.answer(Turn(message, is_cut, left - model.tokens_left))
                continue
        request.fail(ModelEndedError(str(errors[0])))
