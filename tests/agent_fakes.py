"""A small chat format, a scripted engine and checks of the invariants, for the tests of the agent loop."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import trio

from rollouts.agent.episode import EpisodeOptions, run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.env import reward, tool
from rollouts.env.mixing import env_term
from rollouts.errors import ModelError
from rollouts.inference.base import Capabilities, GenerateRequest, Generation, VersionSpan
from rollouts.types import Episode, Message, Task, ToolCall

END = 2_000_000
LAST = "\U0010ffff"  # how END is decoded
ROLES = {"system": 1_000_001, "user": 1_000_002, "assistant": 1_000_003, "tool": 1_000_004}


class FakeChat:
    """Characters are tokens; `[name {json}]` in a reply is a call. `rewrites`: turns whose history is rewritten."""

    stop_ids = (END,)
    literals = ()

    def __init__(self, rewrites: Sequence[int] = (), tool_after_text: bool = True) -> None:
        self.watched, self.sampled_shapes, self.kinds = set(), set(), {}
        self.rewrites = set(rewrites)
        self.report = SimpleNamespace(tool_after_text=tool_after_text, calls_as_text=False)

    def _message(self, message: Message) -> list[int]:
        calls = "".join(f"[{call.name} {json.dumps(call.arguments)}]" for call in message.tool_calls)
        return [ROLES[message.role], *map(ord, message.text + calls), END]

    def tokens_at_least(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
        return sum(1 + len(message.text) for message in messages)

    def encode_prompt(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        if any(message.text == "forbidden" for message in messages):
            raise ModelError("the chat template of this model refuses it")
        return [len(tools), *(t for m in messages for t in self._message(m)), ROLES["assistant"]]

    def extend(
        self, before: list[Message], reply: Message, new: list[Message], tools: list[dict[str, Any]], sampled: list[int]
    ) -> list[int] | None:
        assert new and reply.role == "assistant"
        if sum(1 for message in before if message.role == "assistant") in self.rewrites:
            return None
        close = [] if sampled and sampled[-1] == END else [END]
        return [*close, *(t for m in new for t in self._message(m)), ROLES["assistant"]]

    def render(self, messages: list[Message], tools: list[dict[str, Any]], generation_prompt: bool) -> str:
        assert generation_prompt
        return self.decode(self.encode_prompt(messages, tools))

    def encode(self, text: str) -> list[int]:
        return [END if sign == LAST else ord(sign) for sign in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(LAST if token == END else chr(token) for token in tokens)

    def shows(self, shown: str, sampled: str, tools: list[dict[str, Any]]) -> bool:
        one, other = (self.parse([*map(ord, text)], tools) for text in (shown, sampled))
        return one.text == other.text and [c.name for c in one.tool_calls] == [c.name for c in other.tool_calls]

    def parse(self, tokens: list[int], tools: list[dict[str, Any]], context: Sequence[int] = ()) -> Message:
        text = "".join(chr(token) for token in tokens if token != END)
        content, *found = text.split("[")
        return Message("assistant", content, tool_calls=[self._call(part, n) for n, part in enumerate(found)])

    def _call(self, part: str, number: int) -> ToolCall:
        name, _, arguments = part.rstrip("]").partition(" ")
        try:
            return ToolCall(name, json.loads(arguments or "{}"), id=f"call_{number}")
        except ValueError:
            return ToolCall(name, error="the arguments are not JSON", id=f"call_{number}")


class FakeEngine:
    """Says what the script says, then `rest`; keeps every request with its generation."""

    capabilities = Capabilities()
    vocabulary_size = version = 0

    def __init__(self, *script: str | Exception | Generation, rest: str = "done", context: int = 100_000) -> None:
        self.script = list(script)
        self.rest = rest
        self.context_tokens_max = context
        self.turns: list[tuple[GenerateRequest, Generation]] = []
        self.closed: list[str] = []
        self.blocked = trio.Event()
        self.blocks = False

    def close_session(self, session: str) -> None:
        self.closed.append(session)

    async def generate(self, request: GenerateRequest) -> Generation:
        await trio.lowlevel.checkpoint()
        if self.blocks:
            self.blocked.set()
            await trio.sleep_forever()
        said = self.script.pop(0) if self.script else self.rest
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Generation):
            generation = said
        else:
            whole = [*map(ord, said), END]
            tokens = whole[: request.max_tokens]
            logprobs = [-((request.seed >> n) % 7) / 3 for n in range(len(tokens))]
            finish = "stop" if len(tokens) == len(whole) else "length"
            generation = Generation(tokens, logprobs, finish, [VersionSpan(len(self.turns), 0, len(tokens))])
        self.turns.append((request, generation))
        return generation


class Quiz:
    """One tool, one reward; the tests derive from it."""

    def tasks(self, split: str, rng: Any) -> list[Task]:
        return [TASK]

    @tool(timeout_seconds=0.2)
    def double(self, n: int) -> int:
        """Double a number."""
        return 2 * n

    @reward
    def right(self, task: Task, trajectory: Any) -> float:
        return float(trajectory.last_text == str(task.answer))


TASK = Task("double 21", answer=42, id="t1")


def play(
    env: Callable[[], Any] = Quiz,
    engine: FakeEngine | None = None,
    chat: FakeChat | None = None,
    task: Task = TASK,
    clock: trio.abc.Clock | None = None,
    **changed: Any,
) -> Episode:
    limits = EpisodeLimits()._replace(**{k: changed.pop(k) for k in list(changed) if k in EpisodeLimits._fields})
    options = EpisodeOptions(**{k: changed.pop(k) for k in list(changed) if k in EpisodeOptions._fields})
    arguments: dict[str, Any] = {"rewards": [env_term()], "session": "s", "order": (3, 1), "seed": 5, **changed}
    run = functools.partial(
        run_episode,
        task,
        make_env=env,
        chat=chat or FakeChat(),
        inference=engine or FakeEngine(),
        limits=limits,
        options=options,
        **arguments,
    )
    episode = trio.run(run, clock=clock)
    for trajectory in episode.trajectories:
        check_segments(trajectory)
    return episode


def check_segments(trajectory: Any) -> None:
    """Invariant 2."""
    for segment in trajectory.segments:
        for weight, logprob, version in zip(segment.loss_mask, segment.logprobs, segment.versions, strict=True):
            assert (weight > 0 and math.isfinite(logprob) and logprob <= 0 and version >= 0) or (
                weight == 0 and logprob == 0.0 and version == -1
            )


def check_exact(episode: Episode, engine: FakeEngine) -> None:
    """Invariant 1: each generation stands once, after exactly what the engine was given, and nothing else is live."""
    segments = [segment for trajectory in episode.trajectories for segment in trajectory.segments]
    live = [[0.0] * len(segment.tokens) for segment in segments]
    for request, generation in engine.turns:
        start, end = len(request.tokens), len(request.tokens) + len(generation.tokens)
        homes = [
            index
            for index, segment in enumerate(segments)
            if segment.tokens[:start] == request.tokens
            and segment.tokens[start:end] == generation.tokens
            and segment.versions[start:end] == generation.versions
            and all(weight == 1.0 for weight in segment.loss_mask[start:end])
        ]
        assert len(homes) == 1, (homes, request.order)
        live[homes[0]][start:end] = [1.0] * len(generation.tokens)
        assert segments[homes[0]].logprobs[start:end] == generation.logprobs
    assert live == [segment.loss_mask for segment in segments]
