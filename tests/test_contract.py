"""The sentences of docs/contract.md: the order of calls, objects, threads, deadlines, and what an exception means."""

from __future__ import annotations

import functools
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio

from rollouts import Message, Role, Score, Task, ToolCall, metric, reward, tool
from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.check import check_environment_class
from rollouts.config.resolving import resolve
from rollouts.env.advice import CONTRACT
from rollouts.env.authoring import tools_of
from rollouts.env.checks import METHODS
from rollouts.env.methods import INPUTS
from rollouts.env.mixing import env_term
from rollouts.env.shared import shared_values
from rollouts.env.tools import run_tool
from rollouts.errors import RewardError
from rollouts.plugins.loading import VERSIONS
from rollouts.runs.plan import make_plan
from rollouts.types import Episode, Status

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import FakeChat, FakeEngine, play

PAGE = (Path(__file__).parents[1] / "docs" / "contract.md").read_text()
CALL = '[count {"n": 2}][count {"n": 3}]'


class Recorder:
    """Records each call with the object and the thread. `fails` names the method that raises."""

    calls: ClassVar[list[tuple[str, int, str]]]
    fails: ClassVar[str] = ""
    error: ClassVar[type[BaseException]] = KeyError

    def __init__(self) -> None:
        self.record("__init__")

    def record(self, name: str) -> None:
        self.calls.append((name, id(self), threading.current_thread().name))
        if name == self.fails:
            raise self.error(name)

    def tasks(self, split: str, rng: random.Random) -> list[Task]:
        return [Task("?")]

    def shared(self) -> Any:
        self.record("shared")
        yield "an index"

    def setup(self, task: Task, shared: str) -> None:
        self.replies = 0
        self.record("setup")

    def tools(self, task: Task) -> list[Any]:
        self.record("tools")
        return [self.count]

    @tool
    def count(self, n: int) -> int:
        """Count."""
        self.record("tool")
        return n

    def reply(self, trajectory: Any) -> str | None:
        self.record("reply")
        self.replies += 1
        return "Go on." if self.replies == 1 else None

    @reward
    def first(self, trajectory: Any) -> float:
        self.record("reward")
        return 1.0

    @reward
    def second(self, env: Any, task: Task) -> float:
        assert env is self
        return 2.0

    @metric
    def number(self) -> float:
        self.record("metric")
        return 3.0

    def close(self) -> None:
        self.record("close")


def recorded(fails: str = "", error: type[BaseException] = KeyError, **more: Any) -> tuple[Episode, list[str], Any]:
    class Env(Recorder):
        calls: ClassVar[list[tuple[str, int, str]]] = []

    Env.fails, Env.error = fails, error
    with shared_values():
        episode = play(Env, FakeEngine(CALL, "a", "b"), task=Task("?"), rewards=[env_term()], **more)
    return episode, [name for name, _, _ in Env.calls], Env


def test_the_order_of_calls() -> None:
    episode, names, env = recorded()
    assert names == [
        *("__init__", "__init__", "shared", "setup", "tools", "tool", "tool"),
        *("reply", "reply", "reward", "metric", "close"),
    ]
    assert (episode.score.value, episode.metrics["metric/number"]) == (3.0, 3.0)
    by_name = {name: identity for name, identity, _ in env.calls}
    assert by_name["shared"] != by_name["setup"] == by_name["close"]  # an object of its own
    assert all(thread.startswith("rollouts-") for _, _, thread in env.calls)
    assert {thread for name, _, thread in env.calls if name == "shared"} == {"rollouts-shared"}


FAILED = Status.ENVIRONMENT_ERROR
EXCEPTIONS = [  # method, status, tried again, the value of the reward
    ("__init__", FAILED, True, None),
    ("setup", FAILED, True, None),
    ("tools", FAILED, True, None),
    ("tool", Status.COMPLETED, False, 3.0),
    ("reply", FAILED, False, None),
    ("reward", Status.COMPLETED, False, None),
    ("metric", Status.COMPLETED, False, 3.0),
    ("close", FAILED, False, None),
]


class Plain(Recorder):
    """Without `shared`, so that only the episode's object has a constructor that fails."""

    def setup(self, task: Task) -> None:  # type: ignore[override]
        super().setup(task, "")


@pytest.mark.parametrize("error", [KeyError, SystemExit])
@pytest.mark.parametrize(("method", "status", "again", "value"), EXCEPTIONS)
def test_what_an_exception_means(method: str, status: Status, again: bool, value: float | None, error: Any) -> None:
    class Env(Plain):
        calls: ClassVar[list[tuple[str, int, str]]] = []

    Env.fails, Env.error = method, error
    episode = play(Env, FakeEngine(CALL, "a", "b"), task=Task("?"), rewards=[env_term()])
    assert (episode.status, episode.may_retry, episode.score.value) == (status, again, value)
    names = [name for name, _, _ in Env.calls]
    assert names.count("close") == (method != "__init__")  # always, and once
    if method == "tool":
        assert episode.trajectory.messages[2].text.startswith("Error: ") and episode.metrics["tool_failures"] == 2
    if method == "metric":
        assert episode.metrics["metric_failures"] == 1 and "metric/number" not in episode.metrics


def test_a_mistake_in_the_class_ends_the_run_and_closes() -> None:
    class Infinite(Plain):
        calls: ClassVar[list[tuple[str, int, str]]] = []

        @reward
        def bad(self) -> Score:
            return Score(float("inf"))

    with pytest.raises(RewardError, match="bad"):
        play(Infinite, FakeEngine("x"), task=Task("?"), rewards=[env_term()])
    assert [name for name, _, _ in Infinite.calls].count("close") == 1


@pytest.mark.parametrize("returned", [3, [Message("user", "a"), None], {"role": "user"}])
def test_a_reply_that_is_no_message_fails_the_episode(returned: Any) -> None:
    class Env(Plain):
        calls: ClassVar[list[tuple[str, int, str]]] = []

        def reply(self, trajectory: Any) -> Any:
            return returned

    episode = play(Env, FakeEngine("x"), task=Task("?"), rewards=[env_term()])
    assert (episode.status, episode.may_retry) == (FAILED, False) and "it returned" in str(episode.trajectory.error)


DEADLINES = [
    ("setup", "setup_seconds", "running setup took longer than 1 seconds"),
    ("tools", "setup_seconds", "running tools took longer than 1 seconds"),
    ("reply", "episode_seconds", "the episode's deadline of 1 seconds passed while running reply"),
]


@pytest.mark.parametrize(("method", "limit", "words"), DEADLINES)
def test_a_deadline_cancels_an_async_method_ends_the_episode_and_closes(method: str, limit: str, words: str) -> None:
    class Env(Plain):
        calls: ClassVar[list[tuple[str, int, str]]] = []

    cancelled: list[str] = []

    async def waits(self: Any, *_: Any) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.append(method)
            raise

    setattr(Env, method, waits)
    episode = play(Env, FakeEngine("x"), task=Task("?"), rewards=[env_term()], **{limit: 1.0})
    assert (episode.status, episode.trajectory.error, cancelled) == (Status.TIMEOUT, words, [method])
    assert not episode.may_retry and episode.score.value is None
    assert [name for name, _, _ in Env.calls][-1] == "close"


def test_close_runs_while_a_plain_method_that_is_late_still_runs() -> None:
    closed, late = threading.Event(), threading.Event()

    class Env(Plain):
        calls: ClassVar[list[tuple[str, int, str]]] = []

        def setup(self, task: Task) -> None:  # type: ignore[override]
            closed.wait(60)
            late.set()

        def close(self) -> None:
            assert not late.is_set()
            closed.set()

    episode = play(Env, FakeEngine("x"), task=Task("?"), setup_seconds=1.0)
    assert episode.status is Status.TIMEOUT and late.wait(60)


def test_close_runs_when_the_run_is_cancelled() -> None:
    began = trio.Event()

    class Env(Plain):
        calls: ClassVar[list[tuple[str, int, str]]] = []

        async def reply(self, trajectory: Any) -> None:  # type: ignore[override]
            began.set()
            await trio.sleep_forever()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            run = functools.partial(run_episode, Task("?"), make_env=Env, chat=FakeChat(), inference=FakeEngine("x"))
            more = {"limits": EpisodeLimits(), "rewards": [], "session": "s", "order": (0, 0), "seed": 0}
            nursery.start_soon(functools.partial(run, **more))
            await began.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert [name for name, _, _ in Env.calls][-1] == "close"


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_every_method_with_its_arguments_every_input_and_the_version() -> None:
    assert set(METHODS) == set(CONTRACT)
    for name, arguments in METHODS.items():
        assert f"`{'async ' if name == 'rollout' else ''}{name}({', '.join(('self', *arguments))})`" in PAGE
    for method, inputs in INPUTS.items():
        assert f"`{method}`" in PAGE and all(f"`{each}`" in PAGE for each in inputs)
    assert VERSIONS == ("1",) and "This is **version 1**. It is frozen" in PAGE
    assert set(re.findall(r"`Role\.(\w+)`", PAGE)) <= set(Role.__struct_fields__)


def test_the_settings_of_two_objects_share_no_list_and_tasks_has_an_object_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from rollouts import Task, reward\n\n\n"
        "@dataclass\n"
        "class Own:\n"
        "    names: list[str] = field(default_factory=lambda: ['a'])\n\n"
        "    def tasks(self, split, rng):\n"
        "        self.names.append(split)\n"
        "        return [Task(f'{split} {number} {len(self.names)} {rng.random()}') for number in range(3)]\n\n"
        "    @reward\n"
        "    def one(self):\n"
        "        return 1.0\n"
    )
    plan = make_plan(resolve({"env": f"{tmp_path / 'own.py'}:Own", "seed": 4}))
    (environment,) = plan.environments
    one, other = environment.make(), environment.make()
    one.names.append("mine")
    assert other.names == ["a"]
    first, again = ([task.prompt for task in environment.training_source()] for _ in range(2))  # type: ignore[union-attr]
    assert first == again and all(" 2 " in prompt for prompt in first)  # a new object, and equal random numbers


class Refusing:
    """Add numbers. `takes` says how a reply is judged."""

    reward_range = (0.0, 1.0)
    takes: ClassVar[Any] = staticmethod(lambda text, answer: text == answer)

    def tasks(self, split: str, rng: random.Random) -> Any:
        while True:
            a, b = rng.randrange(100), rng.randrange(100)
            yield Task(f"What is {a} plus {b}?", answer=str(a + b), info={"numbers": [a, b]})

    def demonstrations(self, split: str, rng: random.Random) -> Any:
        for task in self.tasks(split, rng):
            yield [*task.messages, Message("assistant", task.answer)]

    @tool
    def total(self, numbers: list[int]) -> int:
        """Add numbers. It refuses an empty list by accident."""
        return numbers[0] + sum(numbers[1:])

    @reward
    def correct(self, task: Task, trajectory: Any) -> float:
        return float(self.takes(trajectory.last_text, task.answer))


class Containing(Refusing):
    takes = staticmethod(lambda text, answer: answer in text)


class Doubled(Refusing):
    takes = staticmethod(lambda text, answer: 2 * (text == answer))


def test_a_tool_may_refuse_a_call_with_any_exception_and_a_list_may_be_text() -> None:
    tools = {each.name: each for each in tools_of(Refusing())}
    refused, read = (
        trio.run(run_tool, tools, ToolCall("total", {"numbers": numbers}, id="1")) for numbers in ([], "[1, 2]")
    )
    assert refused.text.startswith("Error: IndexError") and refused.failure == "exception"
    assert read.text == "3" and read.failure is None
    report = check_environment_class(Refusing, only=["tool-arguments"], tasks=1)
    (note,) = report.results[0].notes
    assert "total raised IndexError" in note and "raise a ValueError" in note


@pytest.mark.parametrize(("environment", "check"), [(Containing, "forged-lists"), (Doubled, "rewards")])
def test_a_reward_judges_one_answer_and_stays_in_its_range(environment: type, check: str) -> None:
    check_environment_class(Refusing, only=[check], tasks=2)
    with pytest.raises(AssertionError, match=check):
        check_environment_class(environment, only=[check], tasks=2)


def test_the_page_links_what_belongs_to_it() -> None:
    assert {"roles.md", "check.md", "environments.md", "workers.md"} <= set(re.findall(r"\((\w+\.md)[#)]?", PAGE))
    assert "`reward_range = (smallest, largest)`" in PAGE
