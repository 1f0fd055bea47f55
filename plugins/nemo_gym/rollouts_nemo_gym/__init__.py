"""Environments behind resources servers of NeMo Gym: `--env nemo_gym --env.url http://127.0.0.1:8000 --env.data FILE`.

A task is a row of the file. The tools of a row are requests to the server, which keeps the state of the episode in a
session, and judges the conversation at the end.

    rows       the rows of a file, as tasks
    responses  a conversation as an object of OpenAI's Responses
    sessions   a session with a server
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio

from rollouts import Score, Task, Tool, Trajectory, metric, reward
from rollouts.env.services import Service, check_url, tools_of_server
from rollouts.errors import ConfigError, EnvironmentDefinitionError, ServiceLostError
from rollouts_nemo_gym.responses import response_of
from rollouts_nemo_gym.rows import Row, read_rows
from rollouts_nemo_gym.sessions import RefusedError, Session

__all__ = ["NemoGym"]

EXAMPLE = "http://127.0.0.1:8000"
PATHS = ("/seed_session", "/verify")

Seconds = Annotated[float, msgspec.Meta(gt=0)]


@dataclass
class NemoGym:
    """An environment behind a resources server of NeMo Gym."""

    url: str = ""  # the server's address, such as http://127.0.0.1:8000
    data: str = ""  # a file of rows (JSON Lines), each with `responses_create_params`
    eval_data: str = ""  # the rows for evaluation; by default some of `data` are held out
    call_seconds: Seconds = 60.0  # how long the server may take for an answer
    headers: dict[str, str] = field(default_factory=dict)  # HTTP headers, such as Authorization

    def __post_init__(self) -> None:
        check_url(self.url, EXAMPLE)
        if not self.data:
            raise ConfigError("--env.data: no file of rows is given\ntype: --env.data rows.jsonl")
        for flag, path in (("--env.data", self.data), ("--env.eval-data", self.eval_data)):
            if path and not Path(path).is_file():
                raise ConfigError(f"{flag} {path}: there is no such file")
        self._session: Session | None = None
        self._failures = 0

    def shared(self) -> Mapping[str, Sequence[Row]]:
        """The rows of each split. Raises UserError for another kind of server or a row that cannot be served."""
        self._check_server()
        rows = {"train": read_rows("--env.data", self.data)}
        if self.eval_data:
            rows["eval"] = read_rows("--env.eval-data", self.eval_data)
        return rows

    def _check_server(self) -> None:
        found = Service(self.url, "resources server of NeMo Gym", self.headers).require("/openapi.json")
        paths = found.get("paths") if isinstance(found, dict) else None
        known = paths if isinstance(paths, dict) else {}
        for path in PATHS:
            if path not in known:
                raise EnvironmentDefinitionError(
                    f"--env.url {self.url}: this is no resources server of NeMo Gym: it has no POST {path}\n"
                    "type the address of the resources server, not that of the agent, the model or the head server"
                )
        if "/step" in known:
            raise EnvironmentDefinitionError(
                f"--env.url {self.url}: this server is played with /reset and /step, which rollouts does not speak"
            )

    def tasks(self, split: str, rng: random.Random, shared: Mapping[str, Sequence[Row]]) -> Sequence[Task]:
        """A task for each row."""
        place = "eval" if split == "eval" and "eval" in shared else "train"
        return [
            Task(row.messages, info={"split": place, "row": number}, id=row.id)
            for number, row in enumerate(shared[place])
        ]

    async def setup(self, task: Task, shared: Mapping[str, Sequence[Row]]) -> None:
        """Begin a session with the row. Raises ServiceLostError."""
        self._row = shared[task.info["split"]][task.info["row"]]
        self._session = Session(self.url, self.headers, self.call_seconds)
        try:
            begun = await self._session.ask("/seed_session", self._row.whole)
        except RefusedError as error:
            raise EnvironmentDefinitionError(
                f"{self._row.where} does not fit the server {self.url}: {error}"
            ) from error
        if isinstance(begun.get("mcp"), dict) and not self._row.tools:
            raise EnvironmentDefinitionError(
                f"--env.url {self.url}: the tools of this server are those of MCP, and its rows name none\n"
                "rollouts calls tools that a row names, as POST /NAME"
            )

    def tools(self, task: Task) -> list[Tool]:
        """The tools of the row."""
        return tools_of_server(self._row.tools, self._call, self.call_seconds)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> str:
        """What the server answers to a call: its text, whatever its status is."""
        assert self._session is not None, "setup has run"
        status, text = await self._session.call(f"/{tool}", arguments)
        self._failures += status >= 400
        return text

    @reward
    async def verify(self, trajectory: Trajectory) -> Score:
        """The server's reward; None, with the reason, if it gave none."""
        assert self._session is not None, "setup has run"
        body = {**self._row.whole, "response": response_of(self._row, trajectory)}
        try:
            found = await self._session.ask("/verify", body)
        except (RefusedError, ServiceLostError) as error:
            return Score(None, why=str(error))
        return verdict(found, self._row.whole)

    @metric
    def failed_calls(self) -> float:
        """The calls of tools that the server answered with an error status."""
        return float(self._failures)

    async def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            with trio.CancelScope(shield=True):
                await session.close()


def verdict(found: Mapping[str, Any], row: Mapping[str, Any]) -> Score:
    """The score of an answer of /verify. Its other numbers, which the row does not have, are parts.

    >>> verdict({"reward": 1.0, "accuracy": True, "id": 3}, {"id": 3})[:2]
    (1.0, {'accuracy': 1.0})
    """
    numbers = {name: value for name, value in found.items() if isinstance(value, bool | int | float)}
    value = numbers.pop("reward", None)
    is_masked = numbers.pop("mask_sample", False)
    components = found.get("reward_components") or {}
    parts = {name: float(each) for name, each in {**numbers, **components}.items() if name not in row}
    if is_masked:
        return Score(None, parts, f"the server says that it could not judge: {found.get('failure_reason')}")
    if value is None:
        return Score(None, parts, f"the server gave the reward {found.get('reward')!r}, which is no number")
    return Score(float(value), parts)
