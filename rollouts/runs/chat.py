"""A conversation with a model that has the tools of an environment. It runs in a thread, so that the main thread can
wait for input, and gets Ctrl-C. Not here: the terminal (`rollouts.cli.chat`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import outcome
import trio

from rollouts.agent.conversation import ChatSession
from rollouts.agent.episode import EpisodeOptions, EpisodeRun
from rollouts.agent.model import NO_ROLE
from rollouts.env.authoring import of_role, roles_of
from rollouts.errors import ConfigError
from rollouts.inference.base import InferenceBackend
from rollouts.inference.suspend import SuspendableEngine
from rollouts.runs.environments import PlannedEnvironment
from rollouts.runs.plan import Plan
from rollouts.runs.run_model import temporary_engine
from rollouts.runs.session import episode_limits, load_chat
from rollouts.types import Message, Role, Score, Task

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

T = TypeVar("T")

SETTINGS = tuple(
    """
    mode env worker tool tool_parser sandbox reward data system template inference max_tokens max_turns temperature
    turn_seconds tool_seconds reward_seconds setup_seconds tasks_seconds cleanup_seconds trust_remote_code pass_env seed
    eval_tasks
    """.split()
)
"""The settings of a run that also apply to a conversation."""


class _NoEnvironment:
    """The environment of a conversation without an environment: it has no tools."""


class Chat:
    """An open conversation, for a program that waits for a person's input. Ctrl-C in `call` ends the reply."""

    def __init__(self, plan: Plan, task: Task | None, thread: TrioThread) -> None:
        self.task, self.call = task, thread.call
        self.conversation: ChatSession = thread.value
        self._plan = plan

    @property
    def title(self) -> str:
        """One line: the model, the environment, the tools."""
        run = self.conversation.run
        names = ", ".join(tool.name for tool in of_role(run.all_tools, run.role))
        env = self._plan.env_name or "no environment (type --env NAME for its tools)"
        role = f", the {run.role}" if run.role else ""
        return f"{self._plan.settings.model} · {env}{role} · {f'tools: {names}' if names else 'no tools'}"

    @property
    def notes(self) -> list[str]:
        """Warnings before the conversation."""
        notes, env, role = list(self._plan.notes), self.conversation.run.env, self.conversation.run.role
        if others := [each.name for each in roles_of(env) if each.name != role]:
            notes.append(f"the model is the {role}; for another role type --role {others[0]}")
        if self.task is not None:
            return notes
        first, *several = [each.alias for each in self._plan.environments] or [""]
        if several:
            notes.append(f"the tools are those of {first}, not of {', '.join(several)}")
        if hasattr(env, "setup"):
            notes.append(f"{type(env).__name__} is set up for a task; without one its tools may fail. Type --task 0")
        if hasattr(env, "tools"):
            notes.append(f"{type(env).__name__}.tools chooses the tools of a task; these are all marked ones")
        return notes

    def begin_anew(self) -> None:
        """Begin a new conversation; see `ChatSession.begin_anew`."""

        async def begin() -> None:
            await self.conversation.begin_anew(for_task=self.task is not None)

        self.call(begin)

    def judge(self) -> Score | None:
        """The rewards of the conversation so far; None if no task opened it, or if there are none."""
        if self.task is None or not self._plan.rewards:
            return None
        return self.call(self.conversation.judge, self._plan.rewards)


@contextlib.contextmanager
def open_chat(
    plan: Plan, task_number: int | None, show: Callable[[Message], None], role: str | None = None
) -> Iterator[Chat]:
    """Load the model and build its environment; `show` is called with each new message, in another thread.

    `task_number` counts the held-out tasks from 0; None: no task opens the conversation. In an environment with roles,
    the model has one `role`; None: the first one. Raises UserError, RunError.
    """
    task = None if task_number is None else _task(plan, task_number)
    environments = [env for env in plan.environments if task is None or env.alias == task.env][:1]
    chat = None if plan.is_chat else load_chat(plan.settings, environments, tool_parser=plan.tool_parser)
    env = environments[0] if environments else None
    played = _role_of(env.make_checked() if env is not None else None, role)
    with temporary_engine(plan, environments) as backend:
        inner = _conversation(plan, backend, env, chat, task, show, played)
        with TrioThread(inner) as thread:
            yield Chat(plan, task, thread)


@contextlib.asynccontextmanager
async def _conversation(
    plan: Plan,
    backend: InferenceBackend,
    env: PlannedEnvironment | None,
    chat: ChatFormat | None,
    task: Task | None,
    show: Callable[[Message], None],
    role: Role,
) -> AsyncIterator[ChatSession]:
    settings = plan.settings
    limits = episode_limits(settings, settings.temperature)
    async with backend:
        engine = SuspendableEngine(backend, None, (0, 0), backend.open_session((0, 0)))
        engine.clock.begin()
        make_env, own = (_NoEnvironment, ()) if env is None else (env.make_env, (env.sandboxes, env.shared))
        first, words = task or Task(""), role.system or settings.system
        options = EpisodeOptions(plan.tools, *own)
        run = EpisodeRun(engine, first, make_env, chat, limits, settings.seed, options, role.name)
        system = [Message("system", words)] if words and task is None else []
        conversation = ChatSession(run, show, system)
        try:
            await conversation.open(for_task=task is not None)
            yield conversation
        finally:
            await conversation.aclose()


def _role_of(env: Any, name: str | None) -> Role:
    """The role that the model has. Raises ConfigError."""
    roles = {role.name: role for role in roles_of(env)}
    if name and name not in roles:
        raise ConfigError(f"--role {name}: the roles are {', '.join(roles) or 'none'}")
    return roles[name] if name else next(iter(roles.values()), NO_ROLE)


def _task(plan: Plan, number: int) -> Task:
    """The held-out task of this number. Raises ConfigError."""
    if not plan.environments:
        raise ConfigError(f"--task {number}: there is no environment to take a task from; type --env NAME")
    tasks = plan.eval_tasks()
    if not 0 <= number < len(tasks):
        many = f"there are {len(tasks)} held-out tasks; give a number from 0 to {len(tasks) - 1}"
        raise ConfigError(f"--task {number}: {many if tasks else 'there is no held-out task'}")
    return tasks[number]


# --- the thread -------------------------------------------------------------------------------------------------------


class TrioThread:
    """A context manager that enters an async context manager in a thread that runs trio. `value` is the result of
    entering it.

    Leaving exits the async context manager and waits for the thread. A Ctrl-C while it is entered exits it too. Raises
    the exceptions of the async context manager.
    """

    def __init__(self, inner: AbstractAsyncContextManager[Any]) -> None:
        self._inner = inner
        self._thread = threading.Thread(target=self._run, name="rollouts-trio")
        self._began, self._is_open = threading.Event(), threading.Event()
        self._result: outcome.Maybe[None] = outcome.Value(None)
        self._opening, self._closing = trio.CancelScope(), trio.Event()
        self.value: Any = None
        self._token: trio.lowlevel.TrioToken | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._is_open.wait()
        except KeyboardInterrupt:
            self._end()
            raise
        self._result.unwrap()  # the thread may still be ending, so its life says nothing
        return self

    def __exit__(self, *exc: Any) -> None:
        self._end()
        if exc[0] is None:
            self._result.unwrap()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call an async function in the trio thread. Returns its result. The first Ctrl-C cancels the function, and is
        raised when it has ended; a second Ctrl-C is raised at once.
        """
        scope, over = trio.CancelScope(), threading.Event()

        async def cancellable() -> T | None:
            try:
                with scope:
                    return await function(*args)
                return None
            finally:
                over.set()

        assert self._token is not None, "enter it first"
        try:
            return trio.from_thread.run(cancellable, trio_token=self._token)  # type: ignore[return-value]
        except KeyboardInterrupt:
            self._soon(scope.cancel)
            over.wait()
            raise
        except (trio.RunFinishedError, trio.Cancelled):  # the async context manager failed, and the thread has ended
            self._thread.join()
            self._result.unwrap()
            raise

    def _run(self) -> None:
        self._result = outcome.capture(trio.run, self._main)
        self._began.set()
        self._is_open.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._began.set()
        with self._opening:
            async with self._inner as self.value:
                self._is_open.set()
                await self._closing.wait()

    def _end(self) -> None:
        self._began.wait()
        self._soon(self._closing.set if self._is_open.is_set() else self._opening.cancel)
        self._thread.join()

    def _soon(self, function: Callable[[], None]) -> None:
        if self._token is not None:
            try:
                self._token.run_sync_soon(function)
            except trio.RunFinishedError:
                return  # the thread has already ended
