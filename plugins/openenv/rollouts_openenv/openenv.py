"""An environment of rollouts that plays on an OpenEnv server.

A task is one of the server's, or a seed of `reset`. The model acts by tools: those of MCP that the server has, and
`act` for the server's own action. Or its reply is the text of the action.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import trio

from rollouts import Task, Tool
from rollouts.env.background import Background, background
from rollouts.env.json_schemas import plain_schema
from rollouts.env.services import TOOL_SECONDS, Service, check_url, tools_of_server
from rollouts.errors import ConfigError, ServiceLostError
from rollouts_openenv.playing import Playing
from rollouts_openenv.service import as_text, text_of_blocks
from rollouts_openenv.sessions import Held, Session, Step

SEEDS = 2**30
EXAMPLE = "http://127.0.0.1:8000"
ACT = "act"

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Facts(NamedTuple):
    """What a server offers: the schema of its action, its tools of MCP, and its splits (none: tasks are seeds)."""

    name: str
    description: str
    action: dict[str, Any]
    tools: dict[str, dict[str, Any]]
    splits: list[dict[str, Any]]

    @property
    def calls_tools_by_steps(self) -> bool:
        """Whether calls of tools are actions of the server."""
        return self.action.get("title") in ("Action", "CallToolAction", "ListToolsAction")

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the server's own action; none if its actions are calls of tools."""
        known = self.action.get("properties")
        own = {} if self.calls_tools_by_steps or not isinstance(known, dict) else known
        return {name: schema for name, schema in own.items() if name != "metadata"}


class Server(NamedTuple):
    """What a server offers, and the loop in which its sessions live."""

    facts: Facts
    loop: Background


@dataclass
class OpenEnv(Playing):
    """An environment behind an OpenEnv server."""

    url: str = ""  # the server's address, such as http://127.0.0.1:8000
    actions: Literal["tool", "text"] = "tool"  # the model calls tools, or its reply is a field of the action
    text_field: str = ""  # the field that the reply is; by default the only text among the required ones
    observe: list[str] = field(default_factory=list)  # the fields of observations that the model reads; empty: all
    rewards: Literal["sum", "turn"] = "sum"  # the reward of the episode, or also that of each turn
    instructions: str | None = None  # the prompt before the first observation; by default the server's description
    reset: dict[str, Any] = field(default_factory=dict)  # further arguments of reset
    train_split: str = ""  # the server's split for training, if it has tasks
    eval_split: str = ""  # the server's split for evaluation
    unjudged: float | None = None  # the reward of an episode for which the server gave none; none: not judged
    max_errors: int = 3  # the episode ends at the next refused action after so many
    call_seconds: Seconds = 60.0  # how long the server may take for an answer
    wait_seconds: Seconds = 60.0  # how long to wait for a free session
    headers: dict[str, str] = field(default_factory=dict)  # HTTP headers, such as Authorization

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.url, EXAMPLE)
        self._facts: Facts | None = None
        self._loop: Background | None = None
        self._held: Held | None = None
        self._session: Session | None = None

    async def shared(self) -> AsyncIterator[Server]:
        """What the server offers, and the loop of the connections. Raises EnvironmentDefinitionError."""
        facts = await trio.to_thread.run_sync(self._ask)
        async with background() as loop:
            yield Server(facts, loop)

    def _ask(self) -> Facts:
        service = self._service()
        schema, about = service.require("/schema"), service.get("/metadata") or {}
        names = service.get("/list_environments") or [""]
        splits = service.get(f"/{names[0]}/splits") if names[0] else None
        listed = service.post("/mcp", {"jsonrpc": "2.0", "method": "tools/list", "id": 1}) or {}
        tools = (listed.get("result") or {}).get("tools") or []
        return Facts(
            names[0] or str(about.get("name") or "openenv"),
            str(about.get("description") or ""),
            schema.get("action") or {},
            {each["name"]: each for each in tools},
            splits or [],
        )

    def tasks(self, split: str, rng: random.Random, shared: Server) -> Sequence[Task] | Iterator[Task]:
        """The server's tasks. If it has none: endless seeds of `reset`, even for training and odd for evaluation."""
        facts = shared.facts
        self._check(facts)
        described = facts.description or f"Act in the environment {facts.name}."
        prompt = described if self.instructions is None else self.instructions
        if not facts.splits:
            return self._seeds(split, rng, facts, prompt)
        return self._tasks_of(self._service(), facts.name, facts.splits, split, prompt)

    def _service(self) -> Service:
        return Service(self.url, "OpenEnv server", self.headers)

    def _seeds(self, split: str, rng: random.Random, facts: Facts, prompt: str) -> Iterator[Task]:
        while True:
            seed = 2 * rng.randrange(SEEDS) + (split == "eval")
            yield Task(prompt, info={"seed": seed}, id=f"{facts.name}/{seed}")

    def setup(self, task: Task, shared: Server) -> None:
        """Know what the server offers."""
        self._check(shared.facts)
        self._facts, self._loop = shared

    def tools(self, task: Task) -> list[Tool]:
        """The server's tools of MCP, and `act` for its own action."""
        facts = self._facts
        assert facts is not None, "setup has run"
        if not facts.fields or self.actions != "tool":
            return tools_of_server(facts.tools.values(), self._call, self.call_seconds)
        words = str(facts.action.get("description") or "").strip() or "Act."
        act = Tool(ACT, self._act, words, self._schema(facts), self.call_seconds + TOOL_SECONDS)
        return [act, *tools_of_server(facts.tools.values(), self._call, self.call_seconds, own=ACT)]

    async def rollout(self, task: Task, model: Any) -> None:
        """Play the task in a session of its own. Raises ServiceLostError."""
        assert self._loop is not None, "setup has run"
        self._held = Held(self.url, self.headers, self.wait_seconds, self.call_seconds)
        self._session, first = await self._loop.run(self._held.open, self._loop, {**self.reset, **task.info})
        if first.done:
            raise ServiceLostError(f"the OpenEnv server {self.url} ended the episode at its reset")
        await self._play(task, model, self._seen(first))

    async def close(self) -> None:
        """Close the session."""
        if self._held is not None and self._loop is not None:
            await self._loop.run(self._held.close)

    async def _answer(self, text: str) -> str | None:
        """Take a reply as the action; with tools, ask for a call of `act`."""
        facts = self._facts
        assert facts is not None, "setup has run"
        if self.actions == "tool":
            if not facts.fields:
                return None
            error = self._refuse(f"call the tool {ACT}")
            return None if self._is_over else f"Error: {error}"
        try:
            seen = await self._take({self._text_field(facts): text})
        except ValueError as error:
            return None if self._is_over else f"Error: {error}"
        return None if self._is_over else self._seen(seen)

    # --- actions ------------------------------------------------------------------------------------------------------

    async def _act(self, **action: Any) -> str:
        """The tool `act`."""
        return self._seen(await self._take(action))

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """A tool of MCP."""
        assert self._session is not None and self._facts is not None, "rollout has begun"
        if not self._facts.calls_tools_by_steps:
            return self._result(await self._ask_session(self._session.call, tool, arguments))
        step = await self._take({"type": "call_tool", "tool_name": tool, "arguments": dict(arguments)})
        error = step.observation.get("error")
        if error:
            raise self._refuse(str(error.get("message") if isinstance(error, dict) else error))
        result = step.observation.get("result")
        return self._result(result) if isinstance(result, dict) and "content" in result else as_text(result)

    def _result(self, result: Mapping[str, Any]) -> str:
        """The text of a result of MCP. Raises ValueError if it is an error."""
        text = text_of_blocks(result.get("content"))
        if result.get("is_error") or result.get("isError"):
            raise self._refuse(text or "the tool failed")
        return text

    async def _take(self, action: Mapping[str, Any]) -> Step:
        """Take an action. Raises ValueError if the server refuses it."""
        assert self._session is not None, "rollout has begun"
        step: Step = await self._ask_session(self._session.step, action)
        self._note(step.reward, done=step.done)
        return step

    async def _ask_session(self, request: Any, *args: Any) -> Any:
        assert self._loop is not None, "setup has run"
        return await self._asked(self._loop.run, request, *args)

    # --- texts and settings -------------------------------------------------------------------------------------------

    def _seen(self, step: Step) -> str:
        """What the model reads of an observation."""
        observation = step.observation
        if self.observe:
            return as_text({name: observation[name] for name in self.observe if name in observation})
        return as_text(observation)

    def _schema(self, facts: Facts) -> dict[str, Any]:
        required = [name for name in facts.action.get("required") or [] if name in facts.fields]
        return plain_schema({**facts.action, "properties": facts.fields, "required": required})

    def _text_field(self, facts: Facts) -> str:
        """The field of the action that a reply is. Raises ConfigError."""
        texts = [name for name, schema in facts.fields.items() if schema.get("type") == "string"]
        required = [name for name in texts if name in (facts.action.get("required") or [])]
        if self.text_field in texts:
            return self.text_field
        for only in (required, texts) if not self.text_field else ():
            if len(only) == 1:
                return only[0]
        given = f"--env.text-field {self.text_field}" if self.text_field else "--env.actions text"
        has = ", ".join(texts) if texts else "none"
        raise ConfigError(
            f"{given}: the texts among the fields of the server's action are: {has}\ntype: --env.actions tool"
        )

    def _check(self, facts: Facts) -> None:
        """Raise ConfigError if the settings do not fit the server."""
        if self.actions == "text":
            self._text_field(facts)
        if not facts.fields and not facts.tools:
            raise ConfigError(f"--env.url {self.url}: the server's action has no fields, and it has no tools")
