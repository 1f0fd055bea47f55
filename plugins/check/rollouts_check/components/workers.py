"""Checks of workers: a real one is started, and plays a small environment."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from rollouts.author_code import shown
from rollouts.env.workers.channel import Connection, Connector
from rollouts.env.workers.process import Options
from rollouts.errors import WorkerError
from rollouts.plugins.signature import call_with
from rollouts_check.components.common import Subject
from rollouts_check.environments import subject as environments
from rollouts_check.environments.agents import in_trio
from rollouts_check.environments.table import IN_WORKER
from rollouts_check.environments.traces import Leftovers
from rollouts_check.packages import Found
from rollouts_check.report import SkippedError, trying
from rollouts_check.runner import run_within

T = TypeVar("T")
START_SECONDS, END_SECONDS = 60.0, 10.0
CANCELLED_AFTER = (0.0, 0.05, 0.3)
PLAYED = ("worker-tasks", "worker-data", "episode", "worker-episodes", "worker-lives")
NUMBERS = '''\
from rollouts import Task, reward, tool


class Numbers:
    """Adds two numbers."""

    def tasks(self, split, rng):
        while True:
            a, b = rng.randrange(100), rng.randrange(100)
            yield Task(f"What is {a} plus {b}?", answer=a + b)

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @reward
    def correct(self, task, trajectory):
        return float(str(task.answer) in trajectory.last_text)
'''


def connects(subject: Subject) -> str:
    """It makes a Connector, whose `open` starts a worker that greets; `end` ends it and says how it ended.

    Advice: start `worker_command(options)`, and pass its messages on
    """

    async def open_and_end() -> tuple[Any, Any]:
        connection = await _open(subject)
        try:
            greeting = json.loads(await connection.channel.receive())
        finally:
            words = await connection.end(END_SECONDS)
        return greeting, words

    greeting, words = _in_time(open_and_end)
    attempt = subject.attempt("open a worker and end it")
    is_hello = isinstance(greeting, dict) and greeting.get("type") == "hello"
    attempt.require(is_hello, f"the first message is {shown(greeting)}")
    change = "return a text that says how it ended"
    attempt.require(isinstance(words, str) and words != "", f"`end` returned {shown(words)}", change)
    return str(words)


def leaves_nothing(subject: Subject) -> None:
    """No process is left of a worker that is ended, or whose start is cancelled.

    Advice: end what you started in a `finally`, also if `open` is cancelled
    """
    before = Leftovers(subject.scratch / "none")

    async def start_and_cancel() -> None:
        for seconds in CANCELLED_AFTER:
            connection: Connection | None = None
            with trio.move_on_after(seconds):
                connection = await _open(subject)
            if connection is not None:
                with trio.CancelScope(shield=True):
                    await connection.end(END_SECONDS)

    _in_time(start_and_cancel)
    before.require_none(subject.attempt("cancel the start of a worker at several moments, and end others"))


def plays(subject: Subject) -> str:
    """An environment in the worker has the tasks, tools, messages and rewards that it has in the process of the run."""
    if not subject.found.is_importable:
        raise SkippedError("the worker has no name that a run can choose")
    file = subject.scratch / "numbers_in_a_worker.py"
    file.write_text(NUMBERS, encoding="utf-8")
    found = Found("Numbers in the worker", f"{file}:Numbers")
    given = {"worker": {"kind": subject.found.name, **subject.settings}}
    with subject.making():
        played = environments.make_subject(found, given, subject.scratch, seed=subject.seed, tasks=2)
    try:
        results = run_within("an environment in the worker", IN_WORKER, played, only=PLAYED)
    finally:
        played.close()
    return ", ".join(result.name for result in results if result.status == "passed")


async def _open(subject: Subject) -> Connection:
    """A worker. Skips the check if none can be started here. Raises FailedError if the component makes no Connector."""
    inputs = {"environment": "calculator", "count": 1, "options": Options()}
    with subject.making():
        made = call_with(subject.component, inputs, subject.settings)
    change = "write `async def open(self, log)`: rollouts.env.workers.channel.Connector"
    subject.attempt("make it", change).require(isinstance(made, Connector), f"it made {type(made).__name__}")
    assert isinstance(made, Connector), "it was required"
    try:
        return await made.open(lambda chunk: None)
    except WorkerError as error:
        raise subject.skipped(f"no worker can be started here: {error}") from error


def _in_time(work: Callable[[], Awaitable[T]]) -> T:
    async def run() -> T:
        with trio.fail_after(START_SECONDS):
            return await work()

    with trying("start a worker and end it", change="let `open` and `end` return") as attempt:
        try:
            return in_trio(run)
        except trio.TooSlowError:
            raise attempt.failed(f"it took longer than {START_SECONDS:g} seconds") from None
