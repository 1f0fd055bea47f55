"""Checks of an episode's life: cancellation, deadlines, `close`, `state` and `restore`, several episodes at once."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Sequence
from typing import Any

import trio

from rollouts.author_code import shown
from rollouts.env import calls
from rollouts.env.methods import plain_state
from rollouts.errors import counted
from rollouts.inference.chatting import ChatRequest
from rollouts.inference.suspend import EMPTY, SuspendableEngine, SuspendedEpisode
from rollouts.types import Message, Status, Task
from rollouts_check.environments import agents, traces
from rollouts_check.environments.rewards import WRONG, difference_of
from rollouts_check.environments.subject import Subject
from rollouts_check.report import FailedError, SkippedError, at, trying

NEVER = 10**9  # a step that no episode has
CANCELLED_MAX = 24  # places at which an episode is cancelled
WAIT_SECONDS = 0.05  # how long after a step an episode in a worker, or with asyncio methods, is cancelled
MODEL_SECONDS = 0.3  # the deadline of an episode whose model never replies


def interleaved(subject: Subject) -> str:
    """Two episodes at the same time do not change each other.

    Advice: keep the state of an episode on `self`, not in the class, a module variable or a shared file
    """
    pairs = [(each.task, each.replies) for each in subject.expert[:2]]
    if len(pairs) < 2:
        pairs = [(task, agents.script_for(subject, task)) for task in subject.tasks[:2]]
    if len(pairs) < 2:
        raise SkippedError("there is only one task")
    turns = max(len(script) for _, script in pairs)
    alone = [agents.play_each(subject, [task], [agents.says(*script)], turns=turns)[0] for task, script in pairs]
    together = agents.in_trio(_together, subject, pairs, turns)
    for task_number, (one, other) in enumerate(zip(alone, together, strict=True), start=1):
        difference = difference_of(one, other)
        tried = f"play episode {task_number} of 2 alone, and then turn by turn with the other one"
        subject.attempt(tried).require(not difference, difference)
    return "2 episodes"


async def _together(subject: Subject, pairs: Sequence[tuple[Task, list[Message]]], turns: int) -> list[agents.Played]:
    """Play the episodes at once. Each turn begins when every unfinished episode waits for it."""
    turnstile = _Turnstile(len(pairs))
    results: dict[int, agents.Played] = {}

    async def one(number: int, task: Task, script: list[Message]) -> None:
        try:
            results[number] = await agents.play(subject, task, turnstile.slowed(agents.says(*script)), turns=turns)
        finally:
            turnstile.leave()

    async with trio.open_nursery() as nursery:
        for number, (task, script) in enumerate(pairs):
            nursery.start_soon(one, number, task, script)
    return [results[number] for number in range(len(pairs))]


class _Turnstile:
    """Lets the model reply when all episodes wait for a reply."""

    def __init__(self, count: int) -> None:
        self._count, self._waiting, self._round = count, 0, trio.Event()

    def slowed(self, agent: agents.Agent) -> agents.Agent:
        async def choose(request: ChatRequest) -> Message:
            own = self._round
            self._waiting += 1
            self.leave(0)
            await own.wait()
            chosen = agent(request)
            assert isinstance(chosen, Message), "a script replies at once"
            return chosen

        return choose

    def leave(self, count: int = 1) -> None:
        """Wait for so many episodes less."""
        self._count -= count
        if self._waiting >= self._count:
            self._waiting = 0
            self._round.set()
            self._round = trio.Event()


def cancelled(subject: Subject) -> str:
    """An episode that is cancelled at any step runs `close`, and leaves no thread, process or temporary file.

    Advice: end in `close` what the episode started: processes, threads, files, connections
    """
    script = agents.script_for(subject, subject.tasks[0])
    steps, places = _steps_of(subject, script)
    if methods := _asyncio_methods(subject):
        _require_cancelled(subject, methods)
    with traces.own_temporary_folder(subject.scratch / "cancelled") as folder:
        left = traces.Leftovers(folder)  # without what `shared` started, which goes on
        for place in places:
            watch = agents.Watch()
            agents.in_trio(_cancelled_at, subject, script, watch, place)
            _check_closed(subject, watch, f"cancel an episode at step {place} of {steps}")
        tried = f"cancel an episode at {counted(len(places), 'step')}, one after the other"
        left.require_none(subject.attempt(tried, "close", "setup"))
    return counted(len(places), "step")


def _steps_of(subject: Subject, script: list[Message]) -> tuple[int, list[int]]:
    """How many steps an episode has, and those at which it is cancelled."""
    steps = agents.in_trio(_cancelled_at, subject, script, agents.Watch(), NEVER)
    return steps, sorted({1 + (steps * number) // CANCELLED_MAX for number in range(CANCELLED_MAX)})


class _CancelAtStep(trio.abc.Instrument):
    """Cancels a task before one of its steps, or this many seconds after it. `steps` counts them."""

    def __init__(self, step: int, seconds: float) -> None:
        self.steps, self._step, self._seconds, self.scope = 0, step, seconds, trio.CancelScope()
        self.task: trio.lowlevel.Task | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.steps += 1
            if self.steps == self._step and not self._seconds:
                self.scope.cancel()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task and self.steps == self._step and self._seconds:
            self.scope.deadline = trio.current_time() + self._seconds


def _require_cancelled(subject: Subject, methods: list[str]) -> None:
    """Cancel episodes with a call of each tool a little after a step, so that an asyncio method may be waiting. Raises
    FailedError if a method caught its cancellation.
    """
    script = agents.example_script(subject)
    for step in _steps_of(subject, script)[1]:
        before = calls.uncancelled_count()
        agents.in_trio(_cancelled_at, subject, script, agents.Watch(), step, WAIT_SECONDS)
        change = "let asyncio.CancelledError pass: do not catch it or BaseException, or raise it again"
        attempt = subject.attempt(f"cancel an episode {WAIT_SECONDS} s after step {step}", change=change)
        seen = f"an asyncio method caught its cancellation, and continued; there is {', '.join(methods)}"
        attempt.require(calls.uncancelled_count() == before, seen)


def _asyncio_methods(subject: Subject) -> list[str]:
    """The async methods of the class that are for asyncio, each with its line."""
    declared = getattr(subject.component, "async_library", None)
    found = {name: getattr(subject.component, name, None) for name in dir(subject.component) if name != "rollout"}
    return [
        f"{name}{at(each)}"
        for name, each in found.items()
        if inspect.iscoroutinefunction(each) and str(declared or calls.async_library_of(each)) == "asyncio"
    ]


async def _cancelled_at(
    subject: Subject, script: list[Message], watch: agents.Watch, step: int, seconds: float = 0
) -> int:
    """Play an episode and cancel it at this step of its task, or so many seconds later. In a worker it is a little
    later, when the worker has begun what the step asked for. Returns the number of steps.
    """
    instrument = _CancelAtStep(step, seconds or (WAIT_SECONDS if subject.environment.remote else 0.0))

    async def episode() -> None:
        instrument.task = trio.lowlevel.current_task()
        with instrument.scope:
            await agents.play(subject, subject.tasks[0], agents.says(*script), turns=len(script), watch=watch)
        instrument.task = None

    trio.lowlevel.add_instrument(instrument)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(episode)
    finally:
        trio.lowlevel.remove_instrument(instrument)
    return instrument.steps


def _check_closed(subject: Subject, watch: agents.Watch, tried: str) -> None:
    """Raise FailedError if an environment object that was made has a `close` that was not called."""
    missing = [env for env in watch.made if hasattr(env, "close") and not any(env is each for each in watch.closed)]
    attempt = subject.attempt(tried, "close", change="do not catch trio.Cancelled in `rollout`, or raise it again")
    is_watched = agents.watched(subject.component) is not subject.component
    attempt.require(not missing or not is_watched, "`close` did not run")


def deadlines(subject: Subject) -> str:
    """If the model never replies, the episode ends at its deadline, and `close` runs.

    Advice: let exceptions of model.chat pass: do not catch trio.Cancelled
    """
    watch = agents.Watch()

    async def never(request: ChatRequest) -> Message:
        await trio.sleep_forever()
        raise AssertionError("it sleeps for ever")

    async def episode() -> agents.Played:
        return await agents.play(subject, subject.tasks[0], never, seconds=MODEL_SECONDS, watch=watch)

    begun = time.monotonic()
    played = agents.in_trio(episode)
    tried = f"play an episode of at most {MODEL_SECONDS} seconds with a model that never replies"
    attempt = subject.attempt(tried)
    status = played.episode.status
    error = played.trajectory.error or "without an error"
    attempt.require(status is Status.TIMEOUT, f"it ended as {status.value}: {error}")
    _check_closed(subject, watch, tried)
    return f"timeout after {time.monotonic() - begun:.1f} s"


def close(subject: Subject) -> str:
    """`close` may be called twice, and before `setup`, because `setup` may fail."""
    if not hasattr(subject.component, "close"):
        raise SkippedError("the environment has no `close`")
    script, watch = agents.script_for(subject, subject.tasks[0]), agents.Watch()

    async def twice() -> None:
        await agents.play(subject, subject.tasks[0], agents.says(*script), turns=len(script), watch=watch)
        await calls.call(watch.made[-1].close, timeout_seconds=10)

    async def early() -> None:
        await calls.call(watch.make(subject).close, timeout_seconds=10)

    nothing = "let the second call do nothing: set what `close` has closed to None, and check it first"
    value = "give each attribute that `close` uses a value in the constructor, and check it"
    for function, tried, change in (
        (twice, "call `close` again after an episode", nothing),
        (early, "call `close` without `setup`", value),
    ):
        with trying(tried, subject.component.close, change=change) as attempt:
            try:
                agents.in_trio(function)
            except calls.CallTimeoutError:
                raise attempt.failed("it took longer than 10 seconds") from None
    return "twice, and without setup"


def restore(subject: Subject) -> str:
    """An episode that is saved with `state` and restored in another object goes on as before.

    Advice: return from `state` everything that the rest of the episode needs, and set it in `restore`
    """
    if not (subject.has("state") and subject.has("restore")):
        raise SkippedError("the environment has no `state` and `restore`")
    if subject.has("rollout"):
        raise SkippedError("an environment with its own `rollout` cannot be restored")
    task, example = subject.tasks[0], agents.example_script(subject)
    pairs = [(each.task, each.replies) for each in subject.expert[:2]] or [(task, agents.script_for(subject, task))]
    pairs.append((task, [Message("assistant", text) for text in WRONG]))
    if len(example) > 1:
        pairs.append((task, [*example[:-1], *example]))  # calls before and after
    count = 0
    for task, script in pairs:
        (whole,) = agents.play_each(subject, [task], [agents.says(*script)], turns=len(script))
        for said in range(len(script)):
            restored, saved, again = agents.in_trio(_restored, subject, task, script, said)
            count += 1
            tried = f"save an episode after {said} of {len(script)} replies, and restore it in a new object"
            attempt = subject.attempt(tried, "restore", change="set in `restore` all that `state` returned")
            attempt.require(saved == again, f"`state` gave {shown(saved)}, then {shown(again)}")
            difference = difference_of(whole, restored)
            subject.attempt(tried, "state").require(not difference, difference)
    return counted(count, "restored episode")


async def _restored(subject: Subject, task: Task, script: list[Message], count: int) -> tuple[agents.Played, Any, Any]:
    """Play the first `count` replies, save, and play the rest in another environment object. With the state that was
    saved, and the state of the other object right after `restore`; both None if the episode ended before.
    """
    saved: list[SuspendedEpisode] = []
    engine = SuspendableEngine(None, None, (0, 0), "check")  # type: ignore[arg-type]  # `play` sets the backend
    replies = iter(script[:count])

    with trio.CancelScope() as scope:

        async def until_saved(request: ChatRequest) -> Message:
            if (chosen := next(replies, None)) is not None:
                return chosen
            assert engine.snapshot is not None, "the episode sets it"
            states = await engine.snapshot()
            if states is None:
                raise FailedError("save the episode", "`state` raised, or took too long", "correct `state`")
            saved.append(SuspendedEpisode(*states, seed=0, context_length=0, partial=EMPTY))
            scope.cancel()
            await trio.sleep_forever()
            raise AssertionError("it is cancelled")

        played = await agents.play(subject, task, until_saved, turns=len(script), engine=engine)
    if not saved:
        return played, None, None
    again = SuspendableEngine(None, None, (0, 0), "check", resume_from=saved[0])  # type: ignore[arg-type]
    restored = await agents.play(subject, task, agents.says(*script[count:]), turns=len(script), engine=again)
    async with agents.ready(subject, task) as run:  # another object right after `restore`
        await calls.call(run.env.restore, copy.deepcopy(saved[0].env))
        state = plain_state(type(run.env).__name__, await calls.call(run.env.state))
    return restored, saved[0].env, state
