"""Upstream's environment of a run while it is served: its tasks by their index, and rollouts of them.

Upstream's chat loop asks the model of an episode through `PolicyClient`; a harness asks its address (`programs`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts.agent.on_asyncio import AsyncioModel
    from rollouts.gateway.endpoint import Endpoint


class Served:
    """A taskset whose shared tool servers run. Threads may share it."""

    def __init__(self, env: Any, client: Any, context: Any) -> None:
        self._env, self._client, self._context = env, client, context
        self._lock = threading.Lock()
        self._iterator = iter(env.taskset)
        self._tasks: list[Any] = []

    @property
    def is_finite(self) -> bool:
        return bool(self._env.taskset.bounded)

    def task(self, index: int) -> Any:
        """Upstream's task of this index. Raises IndexError after the last one."""
        with self._lock:
            while len(self._tasks) <= index:
                try:
                    self._tasks.append(next(self._iterator))
                except StopIteration:
                    raise IndexError(index) from None
            return self._tasks[index]

    def tasks(self) -> Iterator[Any]:
        """All tasks from the first on."""
        index = 0
        with contextlib.suppress(IndexError):
            while True:
                yield self.task(index)
                index += 1

    async def play_program(self, task: Any, endpoint: Endpoint, limit: Callable[[], str]) -> Any:
        """One episode of upstream, whose harness asks the model at this address. `limit` gives upstream's name for the
        limit of the run that ended the episode.
        """
        from verifiers.v1.clients import ModelContext

        from rollouts_verifiers.client import MODEL
        from rollouts_verifiers.programs import ProgramClient

        begun: list[Any] = []

        def stop() -> None:
            for trace in begun:
                trace.stop(limit())

        client = ProgramClient(endpoint, stop)
        known, key = self._env._interception.clients, client.config.model_dump_json()
        known[key] = client
        try:
            context = ModelContext(model=MODEL, client=client.config)
            return await self._env.run_episode(task, context, on_trace=begun.append)
        finally:
            del known[key]
            await client.close()

    async def play(self, task: Any, model: AsyncioModel) -> Any:
        """One episode of upstream, with this model as its only agent."""
        from rollouts_verifiers.client import Conversation

        begun: list[str] = []

        def begin(trace: Any) -> None:
            begun.append(trace.id)
            self._client.conversations[trace.id] = Conversation(model)

        try:
            return await self._env.run_episode(task, self._context, on_trace=begin)
        finally:
            for identifier in begun:
                self._client.conversations.pop(identifier, None)


@contextlib.asynccontextmanager
async def serving(env: Any, *, has_harness: bool = False) -> AsyncIterator[Served]:
    """Start the tool servers that all tasks share, and the server through which upstream's program asks the model."""
    from verifiers.v1.clients import ModelContext, TrainClientConfig

    if has_harness:
        from rollouts_verifiers.programs import prepare_chat_program

        prepare_chat_program()
    from rollouts_verifiers.client import MODEL, PolicyClient

    async with env.serving():
        client, config = PolicyClient(), TrainClientConfig()
        env._interception.clients[config.model_dump_json()] = client  # in place of one that connects to an engine
        yield Served(env, client, ModelContext(model=MODEL, client=config))
