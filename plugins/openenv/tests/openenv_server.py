"""Environments of the tests on the server of OpenEnv itself: `python openenv_server.py PORT PING_SECONDS`."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any, Literal

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from starlette.applications import Starlette
from starlette.routing import Mount


class Guess(Action):
    """A guess of a number."""

    number: int
    tone: Literal["calm", "loud"] = "calm"


class Heard(Observation):
    """What a guess was answered."""

    text: str = ""
    tries: int = 0


class Guessing(Environment):
    """Guess a number from 0 to 99."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, high: int = 99, **kwargs: Any) -> Heard:
        """A new number."""
        self._number, self._tries = random.Random(seed).randrange(high + 1), 0
        return Heard(text=f"Guess a number from 0 to {high}; it ends with {self._number % 10}.")

    def step(self, action: Guess, *args: Any, **kwargs: Any) -> Heard:  # type: ignore[override]
        """A guess. Some numbers do what servers should not do."""
        self._tries += 1
        if action.number == -1:
            os._exit(3)
        if action.number == -2:
            time.sleep(60)
        if action.number == -3:
            raise ValueError("there is no negative number here")
        is_right = action.number == self._number or self._tries == 3
        text = "right" if action.number == self._number else "higher" if action.number < self._number else "lower"
        reward = 1.0 if action.number == self._number else -0.25 * self._tries
        return Heard(text=text, tries=self._tries, reward=reward, done=is_right)

    @property
    def state(self) -> State:
        """The count of tries."""
        return State(step_count=self._tries)


class Alone(Guessing):
    """The same, one session at a time."""

    SUPPORTS_CONCURRENT_SESSIONS = False


class Say(Action):
    """A text."""

    message: str


class Echo(Environment):
    """Repeats, and never judges."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, *args: Any, **kwargs: Any) -> Heard:
        """A new episode."""
        self._tries = 0
        return Heard(text="Say something.")

    def step(self, action: Say, *args: Any, **kwargs: Any) -> Heard:  # type: ignore[override]
        """Repeat."""
        self._tries += 1
        return Heard(text=action.message, tries=self._tries, done=self._tries == 2)

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


class Shop(MCPEnvironment):
    """A shop with tools of MCP, and tasks."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        from fastmcp import FastMCP

        server = FastMCP("shop")
        self._wanted, self._bought = "apple", []

        @server.tool
        def price(item: str) -> int:
            """The price of an item."""
            return len(item)

        @server.tool
        def buy(item: str, count: int = 1) -> str:
            """Buy an item."""
            if count < 1:
                raise ValueError("buy at least one")
            self._bought.append(item)
            return f"bought {count} {item}"

        super().__init__(server)

    def reset(self, seed: int | None = None, split: str = "train", index: int = 0, **kwargs: Any) -> Observation:
        """A new customer."""
        self._wanted, self._bought = f"{split}-{index}", []
        return Observation(metadata={"request": f"Please buy {self._wanted}."})

    async def step_async(self, action: Any, **kwargs: Any) -> Observation:
        """Buying the wanted item ends the episode."""
        found = await super().step_async(action, **kwargs)
        if isinstance(found, CallToolObservation) and self._bought:
            found.reward, found.done = float(self._bought[-1] == self._wanted), True
        return found

    def _step_impl(self, action: Action, **kwargs: Any) -> Observation:
        raise ValueError("only tools")

    def list_splits(self) -> list[str]:
        """Two splits."""
        return ["train", "test"]

    def num_tasks(self, split: str) -> int:
        """Few tasks."""
        return {"train": 5, "test": 3}[split]

    @property
    def state(self) -> State:
        """What was bought."""
        return State(step_count=len(self._bought))


KINDS = {
    "guessing": (Guessing, Guess, Heard, 8),
    "alone": (Alone, Guess, Heard, 1),
    "echo": (Echo, Say, Heard, 8),
    "shop": (Shop, CallToolAction, CallToolObservation, 8),
}

if __name__ == "__main__":
    routes = [
        Mount(f"/{kind}", create_fastapi_app(env, action, observation, max_concurrent_envs=sessions, env_name=kind))
        for kind, (env, action, observation, sessions) in KINDS.items()
    ]
    app, port, ping = Starlette(routes=routes), int(sys.argv[1]), float(sys.argv[2])
    uvicorn.run(app, port=port, log_level="error", ws_ping_interval=ping, ws_ping_timeout=ping)
