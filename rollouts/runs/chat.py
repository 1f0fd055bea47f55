"""A conversation with a model that has the tools of an environment. Not here: the terminal (`rollouts.cli.chat`)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from rollouts.agent.conversation import ChatSession
from rollouts.agent.episode import EpisodeOptions, EpisodeRun
from rollouts.agent.model import NO_ROLE
from rollouts.env.authoring import of_role, roles_of
from rollouts.errors import ConfigError
from rollouts.inference.base import InferenceBackend
from rollouts.inference.suspend import SuspendableEngine
from rollouts.runs.environments import Environment
from rollouts.runs.plan import Plan
from rollouts.runs.run_model import temporary_engine
from rollouts.runs.session import episode_limits, load_chat
from rollouts.runs.trio_thread import TrioThread
from rollouts.types import Message, Role, Score, Task

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

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
    """An open conversation, for a program that waits for a person's input. Ctrl-C in `say` or `play_task` ends the
    reply.
    """

    def __init__(self, plan: Plan, task: Task | None, thread: TrioThread) -> None:
        self.task = task
        self.conversation: ChatSession = thread.value
        self._plan, self._thread = plan, thread

    @property
    def tools(self) -> list[str]:
        """The names of the tools that the model has."""
        run = self.conversation.run
        return [tool.name for tool in of_role(run.all_tools, run.role)]

    @property
    def title(self) -> str:
        """One line: the model, the environment, the tools."""
        settings = self._plan.settings
        names = self.tools
        tools = f"tools: {', '.join(names)}" if names else "no tools"
        env = self._plan.env_name or "no environment (type --env NAME for its tools)"
        role = self.conversation.run.role
        env += f", the {role}" if role else ""
        return f"{settings.model} · {env} · {tools}"

    @property
    def notes(self) -> list[str]:
        """Warnings before the conversation."""
        notes, env = list(self._plan.notes), self.conversation.run.env
        several = [each.alias for each in self._plan.environments][1:]
        if self.task is None and several:
            notes.append(f"the tools are those of {self._plan.environments[0].alias}, not of {', '.join(several)}")
        if self.task is None and hasattr(env, "setup"):
            notes.append(f"{type(env).__name__} is set up for a task; without one its tools may fail. Type --task 0")
        if others := [role.name for role in roles_of(env) if role.name != self.conversation.run.role]:
            notes.append(f"the model is the {self.conversation.run.role}; for another role type --role {others[0]}")
        if self.task is None and hasattr(env, "tools"):
            notes.append(f"{type(env).__name__}.tools chooses the tools of a task; these are all marked ones")
        return notes

    @property
    def has_rewards(self) -> bool:
        """Whether a task opened the conversation, and there are rewards to judge it."""
        return self.task is not None and bool(self._plan.rewards)

    def play_task(self) -> str:
        """Let the model answer the task that opens the conversation; see `ChatSession.play_task`."""
        return self._thread.call(self.conversation.play_task)

    def say(self, text: str) -> str:
        """Let the model answer a message; see `ChatSession.say`."""
        return self._thread.call(self.conversation.say, text)

    def begin_anew(self) -> None:
        """Begin a new conversation; see `ChatSession.begin_anew`."""

        async def begin() -> None:
            await self.conversation.begin_anew(for_task=self.task is not None)

        self._thread.call(begin)

    def judge(self) -> Score:
        """The rewards of the conversation so far."""
        return self._thread.call(self.conversation.judge, self._plan.rewards)


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
    env: Environment | None,
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
    if name is None or name in roles:
        return roles[name] if name else next(iter(roles.values()), NO_ROLE)
    raise ConfigError(f"--role {name}: " + (f"the roles are {', '.join(roles)}" if roles else "there are no roles"))


def _task(plan: Plan, number: int) -> Task:
    """The held-out task of this number. Raises ConfigError."""
    if not plan.environments:
        raise ConfigError(f"--task {number}: there is no environment to take a task from; type --env NAME")
    tasks = plan.eval_tasks()
    if not 0 <= number < len(tasks):
        few = ("there is no held-out task", "there is one held-out task; type --task 0")
        many = f"there are {len(tasks)} held-out tasks; give a number from 0 to {len(tasks) - 1}"
        raise ConfigError(f"--task {number}: {many if len(tasks) > 1 else few[len(tasks)]}")
    return tasks[number]
