"""Scripted agents: they play episodes of an environment through the engine's own code, without a model.

An agent is a function that chooses the next message of a conversation. `play` runs one episode with it. The episode
runs in a thread with a deadline, because an environment that blocks the event loop would block the checks too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import outcome
import trio

from rollouts.agent.episode import EpisodeOptions, EpisodeRun, outcome_of, run_episode, tools_of_task
from rollouts.agent.model import EpisodeLimits
from rollouts.author_code import message_of
from rollouts.encoding import encode
from rollouts.env.authoring import ToolMethod
from rollouts.env.mixing import RewardTerm
from rollouts.env.schema import schema_of
from rollouts.env.tools import run_tool
from rollouts.errors import RewardError, RunError
from rollouts.inference.chatting import ChatReply, ChatRequest
from rollouts.inference.suspend import SuspendableEngine
from rollouts.runs.rehearsal import CONTEXT_TOKENS, ScriptedEngine, script_of
from rollouts.types import Episode, Message, Score, Task, ToolCall, Trajectory
from rollouts_check.environments.subject import Subject
from rollouts_check.report import FailedError, place_of_frame
from rollouts_check.runner import once

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

T = TypeVar("T")
Agent = Callable[[ChatRequest], Message | Awaitable[Message]]
"""Chooses the next message from the conversation so far."""

EPISODE_SECONDS = 60.0
CHECK_SECONDS = 120.0  # how long an episode or a call inside trio may take
TURNS = 8
CLOSE_SECONDS = 10.0


class _AgentEngine(ScriptedEngine):
    """An engine whose replies an agent chooses."""

    def __init__(self, agent: Agent) -> None:
        super().__init__([])
        self._agent = agent

    async def chat(self, request: ChatRequest) -> ChatReply:
        chosen = self._agent(request)
        reply = chosen if isinstance(chosen, Message) else await chosen
        return ChatReply(reply, "stop", 0, 1)


def says(*replies: Message | str) -> Agent:
    """An agent that says these messages in order, and repeats the last one."""
    script = [Message("assistant", reply) if isinstance(reply, str) else reply for reply in replies]
    rest = iter(script[:-1])
    return lambda request: next(rest, script[-1])


class Played(NamedTuple):
    """A finished episode. `fault` is the message of a RewardError, which would end a run; empty if there is none."""

    episode: Episode
    fault: str = ""

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory that was judged."""
        return self.episode.trajectory

    @property
    def reward(self) -> float | None:
        """The reward; None if no reward could judge."""
        return self.episode.score.value


@dataclass(eq=False)
class Watch:
    """The environment objects that were made for episodes, and what was seen of them."""

    made: list[Any] = field(default_factory=list)
    closed: list[Any] = field(default_factory=list)  # those whose `close` was called
    changed: list[str] = field(default_factory=list)  # methods that changed the trajectory which they were given

    def make(self, subject: Subject) -> Any:
        """A new environment object."""
        _watches.add(self)
        chosen = subject.environment.chosen._replace(component=watched(subject.component))
        self.made.append(env := subject.environment._replace(chosen=chosen).make())
        return env


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


@functools.lru_cache(maxsize=16)  # one class for all episodes, because a class may have state
def watched(cls: Any) -> Any:
    """The class with a `close` and a `reply` that are recorded; unchanged if it has neither."""
    if not inspect.isclass(cls) or not (hasattr(cls, "close") or hasattr(cls, "reply")):
        return cls
    original: Any = cls

    def close(env: Any) -> Any:
        for watch in list(_watches):
            if any(env is each for each in watch.made):
                watch.closed.append(env)
        return original.close(env)

    def reply(env: Any, trajectory: Trajectory) -> Any:
        before = encode(trajectory)
        answer = original.reply(env, trajectory)
        if encode(trajectory) != before:
            for watch in [each for each in _watches if any(env is one for one in each.made)]:
                watch.changed.append("reply")
        return answer

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own: dict[str, Any] = {"close": close} if hasattr(cls, "close") else {}
    method = inspect.getattr_static(cls, "reply", None)
    if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
        own["reply"] = reply
    return type(original)(cls.__name__, (cls,), {**names, **own})


def copied(task: Task) -> Task:
    """A copy of the task for one episode, so that an episode that changes its task changes no other one."""
    try:
        return copy.deepcopy(task)
    except Exception:  # an author's object may refuse to be copied; `plain_data` reports it
        return task


async def play(
    subject: Subject,
    task: Task,
    agent: Agent,
    *,
    turns: int = TURNS,
    seconds: float = EPISODE_SECONDS,
    rewards: Sequence[RewardTerm] | None = None,
    watch: Watch | None = None,
    engine: SuspendableEngine | ScriptedEngine | None = None,
    chat: ChatFormat | None = None,
) -> Played:
    """One episode of the task with this agent, judged. `engine` resumes a suspended episode, or replies in place of the
    agent, with the tokens of `chat`.
    """
    inner, task = _AgentEngine(agent), copied(task)
    if isinstance(engine, SuspendableEngine):
        engine.backend = inner
    env = subject.environment
    try:
        episode = await run_episode(
            task,
            make_env=env.make_env if env.remote else partial((watch or Watch()).make, subject),
            chat=chat,
            inference=engine or inner,
            limits=EpisodeLimits(max_tokens=CONTEXT_TOKENS, max_turns=turns, episode_seconds=seconds),
            rewards=subject.rewards if rewards is None else rewards,
            session="check",
            order=(0, 0),
            seed=subject.seed,
            options=EpisodeOptions((), env.sandboxes, env.shared),
        )
    except RewardError as error:
        trajectory = Trajectory(task, task.messages)
        return Played(Episode((0, 0), task, [trajectory], Score(None), {}), message_of(error))
    finally:
        progressed()
    return Played(episode)


def play_each(subject: Subject, tasks: Sequence[Task], agents: Sequence[Agent], **options: Any) -> list[Played]:
    """An episode of each task with its agent, one after the other."""

    async def each() -> list[Played]:
        return [await play(subject, task, agent, **options) for task, agent in zip(tasks, agents, strict=True)]

    return in_trio(each)


@once
def tools_for(subject: Subject) -> list[ToolMethod]:
    """The tools of the first task; if the environment fails, the marked ones."""
    env = subject.environment
    if env.chooses_tools:
        with contextlib.suppress(RunError):  # `episode` reports the failure
            options = EpisodeOptions((), env.sandboxes, env.shared)
            arguments = (subject.tasks[0], env.make_env, _AgentEngine(says("")), EpisodeLimits(), options)
            return in_trio(tools_of_task, *arguments)
    return env.all_tools()


def parameters_of(tool: ToolMethod) -> dict[str, list[dict[str, Any]]]:
    """The arguments of a tool, each with its schema and the schemas of its alternatives."""
    found = schema_of(tool)["function"]["parameters"]["properties"]
    return {name: [schema, *schema.get("anyOf", ())] for name, schema in found.items()}


@contextlib.asynccontextmanager
async def ready(subject: Subject, task: Task | None = None) -> AsyncIterator[EpisodeRun]:
    """An environment object with its tools, after `setup` of the task (None: the first one). Its `close` runs, and its
    sandbox is closed, at the end of the block. Raises RunError.
    """
    engine = SuspendableEngine(_AgentEngine(says("")), None, (0, 0), "")
    engine.clock.begin()
    chosen, env = copied(subject.tasks[0] if task is None else task), subject.environment
    limits = EpisodeLimits(setup_seconds=60, cleanup_seconds=CLOSE_SECONDS)
    options = EpisodeOptions((), env.sandboxes, env.shared)
    run = EpisodeRun(engine, chosen, env.make_env, None, limits, subject.seed, options)
    try:
        try:
            await run.set_up()
        except Exception as error:  # outcome_of raises errors of the core again
            raise RunError(outcome_of(error, run.stage)[1]) from error
        yield run
    finally:
        await run.close()


async def call_tool(run: EpisodeRun, tool: str, arguments: dict[str, Any]) -> str:
    """The result of a tool in a prepared episode."""
    own = {each.name: each for each in run.own_tools}
    return (await run_tool(own, ToolCall(tool, arguments, "call"), seconds_max=10)).text


def example_script(subject: Subject) -> list[Message]:
    """A call of each tool with arguments made from its schema, then a text."""
    return script_of([schema_of(tool) for tool in tools_for(subject)])


def script_for(subject: Subject, task: Task) -> list[Message]:
    """The expert's messages for the task if they are known, else calls with invented arguments."""
    replies = next((each.replies for each in subject.expert if each.task == task), None)
    return replies or example_script(subject)


_ended: list[None] = []  # one for each episode, call or verdict that has ended


def progressed() -> None:
    """Say that an episode, a call or a verdict has ended, so the check is not stuck."""
    _ended.append(None)


def in_trio(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """The result of an async function, run by trio in a thread of its own. Raises FailedError, with the author's line,
    if there is neither a result nor progress for CHECK_SECONDS: the environment then blocks the event loop, or ignores
    its cancellation. How long the whole function takes does not matter, as the machine may be slow.
    """
    results: list[outcome.Outcome[T]] = []

    def run() -> None:
        results.append(outcome.capture(trio.run, function, *args))

    thread = threading.Thread(target=run, name="rollouts-check", daemon=True)
    thread.start()
    done = -1
    while thread.is_alive() and len(_ended) > done:
        done = len(_ended)
        thread.join(CHECK_SECONDS)
    if results:
        return results[0].unwrap()
    place = place_of_frame(sys._current_frames().get(thread.ident or 0), is_own=True)
    seen = f"one did not end in {CHECK_SECONDS:g} seconds" + (f"; the event loop waits for {place}" if place else "")
    change = "do not block in an async method (await trio.sleep, not time.sleep), and do not catch trio.Cancelled"
    raise FailedError("play episodes, each with a deadline", seen, change)
