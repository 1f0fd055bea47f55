"""An environment of rollouts as a gymnasium.Env.

    env = gymnasium.make("rollouts_gymnasium.envs:rollouts/calculator-v0", settings={"digits": 1})
    text, info = env.reset(seed=3)                       # the seed chooses the task
    text, reward, terminated, truncated, info = env.step("42")

An observation is the text that a model would read, and an action is the text that it would reply. A reply with tool
calls is a JSON object: `{"tool_calls": [{"name": "calculator", "arguments": {"expression": "6 * 7"}}]}`, with an
optional `content`. The episode is that of a run: its tools, limits and rewards. It runs in a thread, which waits for
the next action.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.error import Error, ResetNeeded

from rollouts.inference.chatting import ChatReply, ChatRequest
from rollouts.runs.play import play_episode, play_plan
from rollouts.types import Episode, Message, Status, Task, ToolCall
from rollouts_gymnasium.spaces import TEXT_MAX, AnyText

SEEDS = 2**31
JOIN_SECONDS = 30.0  # how long `close` of an environment may take


class RolloutsEnv(gymnasium.Env[str, str]):
    """An environment of rollouts, played from gymnasium.

    Args:
        environment: its name, as for `rollouts run --env`: `calculator`, `./my_env.py:MyEnv`
        settings: the settings of the environment
        run: other settings of a run, such as `{"max_turns": 20}`
        split: the tasks: `train` or `eval`
        render_mode: `ansi` renders the whole conversation

    Raises:
        UserError: there is no such environment, or a setting is wrong.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        environment: str,
        settings: Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        split: str = "train",
        render_mode: str | None = None,
    ) -> None:
        if split not in ("train", "eval"):
            raise Error(f"split={split!r}: expected 'train' or 'eval'")
        self.observation_space, self.action_space = AnyText(), AnyText()
        self.render_mode, self._split = render_mode, split
        self._open = contextlib.ExitStack()
        tree = {**dict(run or {}), "env": {"name": environment, **dict(settings or {})}}
        self._plan = self._open.enter_context(play_plan(tree))
        self._tasks: Sequence[Task] | None = None  # if they are a list, or held out
        self._episode: _Episode | None = None
        self._is_over, self._read = True, dict[str, list[Message]]()

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode. The seed chooses the task; without a seed, the next one is drawn."""
        super().reset(seed=seed)
        self._abandon()
        number = int(self.np_random.integers(SEEDS))
        self._episode = _Episode(self._plan, self._task(number), number)
        self._is_over, self._read = False, {}
        text, _, terminated, truncated, info = self._next()
        if terminated or truncated:
            raise Error(f"the episode ended before the model's first turn: {info['status']}")
        return text, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Reply. The reward is that of the episode, in its last step; before, it is 0. It is NaN if no reward could
        judge.
        """
        if self._episode is None or self._is_over:
            raise ResetNeeded("call reset first: the episode is over")
        self._episode.reply(reply_of(action, len(self._episode.messages)))
        return self._next()

    def render(self) -> str | None:
        """The conversation so far, in the render mode `ansi`."""
        if self.render_mode != "ansi" or self._episode is None:
            return None
        return as_text(self._episode.messages, self._episode.tools)

    def close(self) -> None:
        """End the episode, whose environment is closed."""
        self._abandon()
        self._open.close()

    def _task(self, number: int) -> Task:
        """The task of a number: of a list of tasks a random one, else the first one that is drawn with this seed."""
        (environment,), rng = self._plan.environments, random.Random(number)
        if self._tasks is None:
            source = self._plan.eval_tasks() if self._split == "eval" else environment.training_source()
            self._tasks = source if isinstance(source, Sequence) else ()
        return rng.choice(self._tasks) if self._tasks else next(environment.draw("train", rng))

    def _next(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """What the model reads next, or how the episode ended."""
        assert self._episode is not None, "reset has run"
        found, messages = self._episode.wait(), self._episode.messages
        role = found.role if isinstance(found, ChatRequest) else ""
        before = self._read.get(role, [])  # a conversation continues an earlier one of its role, or is a new one
        before = before if messages[: len(before)] == before else []
        info: dict[str, Any] = {"task": self._episode.task.id or self._episode.task.key, "tools": self._episode.tools}
        new = [message for message in messages[len(before) :] if message.role != "assistant"]
        self._read[role] = messages
        if isinstance(found, ChatRequest):
            tools = [] if before else found.tools
            return as_text(new, tools), 0.0, False, False, info | {"role": found.role}
        self._is_over = True
        if found.status.is_infrastructure:
            raise Error(f"the episode failed: {found.status.value}: {found.trajectory.error}")
        value = found.score.value
        is_cut = found.status is Status.TRUNCATED or found.metrics.get("turn_limit", 0.0) > 0
        metrics = {name: value for name, value in found.metrics.items() if not name.endswith("_seconds")}
        info |= {"status": found.status.value, "score": value, "parts": found.score.parts, "metrics": metrics}
        text = "" if found.roles else as_text(new)  # with roles, the judged conversation is that of any role
        return text, float("nan") if value is None else float(value), not is_cut, is_cut, info

    def _abandon(self) -> None:
        if self._episode is not None:
            self._episode.abandon()
        self._episode = None


class _Episode:
    """One episode in a thread of its own, which waits for each reply."""

    def __init__(self, plan: Any, task: Task, number: int) -> None:
        self.task, self.messages, self.tools = task, list[Message](), list[dict[str, Any]]()
        self._requests: queue.SimpleQueue[ChatRequest | Episode | BaseException] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, args=(plan, number), daemon=True)
        self._thread.start()

    def wait(self) -> ChatRequest | Episode:
        """The next request for a reply, or the finished episode. Raises what the episode raised."""
        found = self._requests.get()
        if isinstance(found, BaseException):
            raise found
        self.messages = list(found.messages if isinstance(found, ChatRequest) else found.trajectory.messages)
        if isinstance(found, ChatRequest):
            self.tools = found.tools
        return found

    def reply(self, message: Message) -> None:
        """Give the reply that the episode waits for."""
        self._replies.put(message)

    def abandon(self) -> None:
        """End the episode if it still waits, and wait until its environment is closed."""
        self._is_abandoned = True
        self._replies.put(None)
        self._thread.join(JOIN_SECONDS)

    def _run(self, plan: Any, number: int) -> None:
        try:
            self._requests.put(play_episode(plan, self.task, number, self._chat, for_person=True))
        except BaseException as error:  # the caller's thread raises it
            if not self._is_abandoned:
                self._requests.put(error)

    def _chat(self, request: ChatRequest) -> ChatReply:
        self._requests.put(request)
        given = self._replies.get()
        if given is None:
            raise KeyboardInterrupt  # ends the episode; its environment is closed
        return ChatReply(given, "stop")


def reply_of(text: str, place: int = 0) -> Message:
    """The model's message that a text means: a JSON object with `tool_calls` is a reply with calls, anything else is a
    reply of text.

    >>> reply_of('{"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}').tool_calls[0].arguments
    {'a': 1}
    >>> reply_of("42").text
    '42'
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("tool_calls"), list):
        return Message("assistant", text)
    calls = [_call_of(each, f"call_{place}_{index}") for index, each in enumerate(found["tool_calls"])]
    return Message("assistant", str(found.get("content") or ""), calls)


def _call_of(given: Any, call_id: str) -> ToolCall:
    name = given.get("name") if isinstance(given, dict) else None
    arguments = given.get("arguments", {}) if isinstance(given, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        why = f'a call is an object such as {{"name": "add", "arguments": {{"a": 1}}}}; got {json.dumps(given)}'
        return ToolCall(name if isinstance(name, str) else "", {}, call_id, why)
    return ToolCall(name, arguments, call_id)


def as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The messages as a model reads them: a user's message as it is, others with `[role]` before them. The schemas of
    the tools come first, one in a line.
    """
    parts = [f"[tools]\n{''.join(json.dumps(tool) + chr(10) for tool in tools)}".strip()] if tools else []
    for message in messages:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        name = f"{message.role} {message.name}" if message.name else message.role
        text = message.text + (json.dumps({"tool_calls": calls}) if calls else "")
        parts.append(text if message.role == "user" else f"[{name}] {text}")
    return "\n\n".join(parts)[:TEXT_MAX]
