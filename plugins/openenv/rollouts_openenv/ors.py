"""An environment of rollouts that plays on a server of the Open Reward Standard (ORS).

A task is one of the server's. The server gives the prompt and the tools, and its tools give rewards and the end.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import trio

from rollouts import Task, Tool
from rollouts.env.services import Service, check_url, tools_of_server
from rollouts.errors import ConfigError, EnvironmentDefinitionError, ServiceLostError, suggestion
from rollouts_openenv.calls import KEY_HEADER, Session
from rollouts_openenv.playing import Playing
from rollouts_openenv.service import text_of_blocks

EXAMPLE = "http://127.0.0.1:8080"

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Facts(NamedTuple):
    """The environment that is played, and its splits."""

    name: str
    splits: list[dict[str, Any]]


@dataclass
class ORS(Playing):
    """An environment behind a server of the Open Reward Standard."""

    url: str = ""  # the server's address, such as http://127.0.0.1:8080
    environment: str = ""  # the name of the environment, if the server has several; by default its first
    rewards: Literal["sum", "turn"] = "sum"  # the reward of the episode, or also that of each turn
    instructions: str = "Do this task with the tools."  # is put before the server's prompt
    train_split: str = ""  # the server's split for training; by default that of the type train
    eval_split: str = ""  # the server's split for evaluation; by default that of the type test or validation
    unjudged: float | None = None  # the reward of an episode for which the server gave none; none: not judged
    max_errors: int = 3  # the episode ends at the next failed call after so many
    call_seconds: Seconds = 60.0  # how long the server may take for an answer
    secrets: dict[str, str] = field(default_factory=dict)  # are given to the server's environment
    api_key: str = ""  # is sent as X-API-Key
    headers: dict[str, str] = field(default_factory=dict)  # further HTTP headers

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.url, EXAMPLE)
        self._session: Session | None = None
        self._tools: list[Any] = []
        self._prompt = ""

    def shared(self) -> Facts:
        """What the server offers, asked once. Raises EnvironmentDefinitionError."""
        service = self._service()
        names = service.require("/list_environments")
        if not isinstance(names, list) or not names:
            raise EnvironmentDefinitionError(f"--env.url {self.url}: the server has no environment")
        known = {str(each).lower(): str(each) for each in names}
        if self.environment and self.environment.lower() not in known:
            near = suggestion(self.environment, known.values(), "--env.environment {}".format)
            raise ConfigError(
                f"--env.environment {self.environment}: the server has {', '.join(known.values())}\n{near}".rstrip()
            )
        name = known[self.environment.lower()] if self.environment else str(names[0])
        splits = service.require(f"/{name}/splits")
        return Facts(name, splits if isinstance(splits, list) else [])

    def tasks(self, split: str, rng: random.Random, shared: Facts) -> Sequence[Task]:
        """The tasks of the server's split."""
        return self._tasks_of(self._service(), shared.name, shared.splits, split, self.instructions)

    async def setup(self, task: Task, shared: Facts) -> None:
        """Begin a session with the task. Raises ServiceLostError."""
        place = f"/{shared.name}/task"
        found = await trio.to_thread.run_sync(self._service().post, place, task.info, abandon_on_cancel=True)
        if not isinstance(found, dict) or "task" not in found:
            raise ServiceLostError(f"the ORS server {self.url} has no task {task.id}")
        self._session = Session(self.url, self._headers(), self.call_seconds)
        await self._session.create(shared.name, found["task"], self.secrets)
        self._prompt = text_of_blocks(await self._session.prompt())
        self._tools = await self._session.tools()

    def tools(self, task: Task) -> list[Tool]:
        """The tools of the task."""
        return tools_of_server(self._tools, self._call, self.call_seconds)

    async def rollout(self, task: Task, model: Any) -> None:
        """Play the task. Pings keep the session meanwhile."""
        assert self._session is not None, "setup has run"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._session.keep_alive)
            await self._play(task, model, self._prompt)
            nursery.cancel_scope.cancel()

    async def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the server. Raises ValueError if it failed."""
        assert self._session is not None, "setup has run"
        output = await self._asked(self._session.call, tool, arguments)
        self._note(output.get("reward"), done=output.get("finished", False))
        return text_of_blocks(output.get("blocks"))

    def _service(self) -> Service:
        return Service(self.url, "ORS server", self._headers())

    def _headers(self) -> dict[str, str]:
        return {**self.headers, **({KEY_HEADER: self.api_key} if self.api_key else {})}
