"""Run one episode: build the environment, let the model act in it, judge the result, clean up.

    episode = await run_episode(task, make_env=Calculator, chat=chat, inference=engine, limits=EpisodeLimits(), ...)

In this order:

1. The environment is built and set up for the task, with a sandbox and a shared value if its `setup` names them.
2. The model replies, and its tool calls are run and answered. If a reply has no call, the environment's `reply` may
   answer; if it returns no message, the episode is complete. An environment with its own `rollout` replaces this loop.
3. Rewards and metrics judge the trajectory of each role, unless the episode failed.
4. The environment and the sandbox are closed, also on cancellation.

A failed episode is data (`Status`), not an exception. A bug in rollouts itself is an exception, and it ends the run.
Not here: concurrent episodes and rewards of whole groups (`training.rollout_gen`), the tokens of a conversation
(`model`), deadlines that pause (`rollouts.inference.suspend`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from rollouts.agent.judging import judge
from rollouts.agent.model import NO_ROLE, ChatModel, EpisodeLimits, Turns
from rollouts.agent.records import EpisodeOver
from rollouts.author_code import message_of, shown
from rollouts.env import calls
from rollouts.env.authoring import (
    ToolMethod,
    WorkerEnvironment,
    environment_name,
    of_role,
    roles_of,
    tools_of,
)
from rollouts.env.checks import line_of
from rollouts.env.methods import names_input, plain_state, reply_messages, with_inputs
from rollouts.env.mixing import InvalidPolicy, RewardTerm
from rollouts.env.schema import schema_of
from rollouts.env.shared import SharedValue, shared_value
from rollouts.env.toolsets import AddedTool, Toolset, two_of_one_name
from rollouts.error_log import report
from rollouts.errors import (
    EnvironmentDefinitionError,
    InferenceError,
    ModelError,
    ProcessError,
    RewardError,
    RolloutsError,
    RunError,
    SandboxError,
    ServiceLostError,
    WorkerError,
    WorkersLostError,
    leaves_of,
    words_of,
)
from rollouts.inference.base import InferenceBackend
from rollouts.inference.suspend import SuspendableEngine
from rollouts.types import (
    COUNTS,
    Episode,
    EpisodeTimes,
    Message,
    Role,
    RoleResult,
    Score,
    Status,
    Task,
    Trajectory,
    mean_score,
)

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat
    from rollouts.env.workers.proxy import RemoteSandboxes
    from rollouts.sandboxes.base import Sandboxes


class Opponent(NamedTuple):
    """The engine of a role that is not trained, entered, and its chat format (None: it takes messages)."""

    engine: InferenceBackend
    chat: ChatFormat | None


NO_OPPONENTS: Mapping[str, Opponent] = MappingProxyType({})


class EpisodeOptions(NamedTuple):
    """What the episodes of an environment have beside their task and model.

    `tools` are added to those of the environment. If its `setup` names `sandbox`, `sandboxes` opens one, which is
    closed after the environment's `close`. If it names `shared`, `shared` returns that value; None: one for each
    `make_env`. `opponents` are the models of roles that are not trained: no reward judges them, and they have no
    result. `on_invalid_reward` says what happens if a reward could not judge. `on_end` is called with the episode.
    """

    tools: Sequence[AddedTool] = ()
    sandboxes: Sandboxes | RemoteSandboxes | None = None
    shared: Callable[[], SharedValue] | None = None
    opponents: Mapping[str, Opponent] = NO_OPPONENTS
    on_invalid_reward: InvalidPolicy = "drop"
    on_end: Callable[[Episode], None] | None = None


NO_OPTIONS = EpisodeOptions()


async def run_episode(
    task: Task,
    *,
    make_env: Callable[[], Any],
    chat: ChatFormat | None,
    inference: InferenceBackend | SuspendableEngine,
    limits: EpisodeLimits,
    rewards: Sequence[RewardTerm],
    session: str,
    order: tuple[int, int],
    seed: int,
    options: EpisodeOptions = NO_OPTIONS,
) -> Episode:
    """Run one episode in a new environment, and judge it.

    `chat` is None for an engine that takes messages (`CanChat`). The caller has opened `session`; this function closes
    it after the model's last reply. The environment's `close` always runs, also on cancellation, for at most
    `limits.cleanup_seconds`; if `close` fails, the episode fails. Rewards and metrics run before `close`, and only if
    the status is COMPLETED or TRUNCATED. If there are several trajectories, rewards judge the one that `rollout`
    returned, or else the last one. In an environment with roles they judge one trajectory of each role, one role after
    another; if a role failed, the episode failed. While the episode is suspended (`SuspendableEngine`), its deadlines
    do not advance.

    Raises:
        RewardError: a reward returned NaN or no number; or it could not judge, and `on_invalid_reward` is "raise".
        EnvironmentDefinitionError: the environment's code is not valid.
        Exception: a bug in rollouts itself, even if the environment's `rollout` caught it.
    """
    engine = (
        inference if isinstance(inference, SuspendableEngine) else SuspendableEngine(inference, None, order, session)
    )
    engine.clock.begin()
    episode_run = EpisodeRun(engine, task, make_env, chat, limits, seed, options)
    engine.snapshot = episode_run.snapshot
    results: dict[str, tuple[Score, dict[str, float]]] = {}
    try:
        status, error = await episode_run.run()
        engine.close_session(session)
        status, error = episode_run.finish(status, error)
        try:
            for role, trajectory in episode_run.played.items() if not status.is_infrastructure else ():
                policy = options.on_invalid_reward
                results[role] = await judge(episode_run.env, trajectory, rewards, limits.reward_seconds, policy)
        except WorkerError as lost:
            status, error = episode_run.finish(Status.ENVIRONMENT_ERROR, f"judging: {lost}")
            episode_run.may_retry = True
    finally:
        engine.close_session(session)
        close_error = await episode_run.close()
    if close_error is not None and not status.is_infrastructure:
        status, error = episode_run.finish(Status.ENVIRONMENT_ERROR, close_error)
    if status.is_infrastructure:
        failed = Score(None, {}, f"{status.value}: {error}")
        results = {role: (failed, results[role][1] if role in results else {}) for role in episode_run.played}
    episode = episode_run.result(results)
    if options.on_end is not None:
        options.on_end(episode)
    return episode


async def tools_of_task(
    task: Task,
    make_env: Callable[[], Any],
    inference: InferenceBackend,
    limits: EpisodeLimits,
    options: EpisodeOptions = NO_OPTIONS,
) -> list[ToolMethod]:
    """All tools in an episode of this task: builds the environment, sets it up and closes it. Raises
    EnvironmentDefinitionError, and RunError if the environment fails.
    """
    engine = SuspendableEngine(inference, None, (0, 0), "")
    engine.clock.begin()
    run = EpisodeRun(engine, task, make_env, None, limits, 0, options)
    try:
        await run.set_up()
    except Exception as error:  # outcome_of raises errors of the core again
        raise RunError(outcome_of(error, run.stage)[1]) from error
    finally:
        why = await run.close()
    if why is not None:
        raise RunError(why)
    return run.all_tools


# --- running --------------------------------------------------------------------------------------------------------

BUILDING, OPENING = "building the environment", "opening a sandbox"
CLOSING = "closing the sandbox"
SETUP, TOOLS, ADDING = "running setup", "running tools", "opening the added tools"


@dataclass(eq=False)
class EpisodeRun:
    """The state of an episode. After a failure it shows what to close and what to report."""

    engine: SuspendableEngine
    task: Task
    make_env: Callable[[], Any]
    chat: ChatFormat | None
    limits: EpisodeLimits
    seed: int
    options: EpisodeOptions = NO_OPTIONS
    role: str = ""  # the role of a conversation with a person
    stage: str = BUILDING
    may_retry: bool = False
    env: Any = None
    own_tools: list[ToolMethod] = field(default_factory=list)
    added: list[ToolMethod] = field(default_factory=list)  # those of `options.tools`
    opened: list[Any] = field(default_factory=list)  # the objects of the classes in `options.tools`
    model: ChatModel | None = None
    chosen: Trajectory | None = None  # the trajectory that the environment's `rollout` returned
    trajectories: list[Trajectory] = field(default_factory=list)
    judged: dict[str, Trajectory] = field(default_factory=dict)  # by role; "" in an environment without roles
    lease: Any = None  # a Lease, or that of an environment in a worker
    sessions: list[SuspendableEngine] = field(default_factory=list)  # of opponents

    @property
    def played(self) -> dict[str, Trajectory]:
        """The judged trajectory of each role of the policy."""
        return {role: each for role, each in self.judged.items() if role not in self.options.opponents}

    @property
    def can_restore(self) -> bool:
        """Whether another process can continue the episode. An environment with its own `rollout` cannot be resumed,
        nor an episode with a class of tools, whose objects have no state that is kept.
        """
        env, opens = self.env, any(isinstance(each, Toolset) for each in self.options.tools)
        return not opens and hasattr(env, "state") and hasattr(env, "restore") and not hasattr(env, "rollout")

    @property
    def all_tools(self) -> list[ToolMethod]:
        """The tools of the environment for this task, and those that the run adds."""
        return [*self.own_tools, *self.added]

    async def run(self) -> tuple[Status, str | None]:
        """Run under the episode's deadline. A failure becomes a status with a reason."""
        seconds, status = self.limits.episode_seconds, Status.COMPLETED
        why: str | None = None
        try:
            with self.engine.clock.move_on_after(seconds) as deadline:
                model = await self.set_up()
                messages: list[Message] | None = model.last_messages or self.task.messages
                if hasattr(self.env, "rollout"):
                    self.stage, messages = "running rollout", None
                    returned = await _call_env(self.env.rollout, self.task, model, async_library="trio")
                    self.chosen = returned if isinstance(returned, Trajectory) else None
                while messages is not None:
                    self.stage = "waiting for the model"
                    reply = await model.chat(messages)
                    messages = await self.respond(model, reply)
        except Exception as error:  # also a group of errors
            status, why, self.may_retry = outcome_of(error, self.stage)
            over = self.model.refusal if self.model is not None else None
            if over is not None and status is Status.ENVIRONMENT_ERROR:  # a program that failed for lack of a reply
                status, why, self.may_retry = over.status, over.reason, False
        else:
            if deadline.cancelled_caught:
                status, why = Status.TIMEOUT, f"the episode's deadline of {seconds:g} seconds passed while {self.stage}"
        if self.model is not None and self.model.failure is not None:
            raise self.model.failure  # the environment's `rollout` may have caught or replaced it
        return status, why

    async def set_up(self, *, for_task: bool = True) -> ChatModel:
        """Build the environment and its model. If `for_task`, run `setup`, and `tools` for the tools of the task."""
        seconds, suspended = self.limits.setup_seconds, self.engine.resume_from
        try:
            self.env = await _call_env(self.make_env, seconds=seconds)
            if for_task and hasattr(self.env, "setup"):
                inputs = await self._setup_inputs()
                self.stage = SETUP
                await _call_env(*with_inputs(self.env.setup, [self.task], inputs), seconds=seconds)
            saved = suspended if self.can_restore else None
            if saved is not None:
                self.stage = "running restore"
                await _call_env(self.env.restore, saved.env, seconds=seconds)
            self.own_tools = tools_of(self.env)
            if for_task and hasattr(self.env, "tools"):
                self.stage = TOOLS
                self.own_tools = await self._tools_of(self.env)
            await self._add_tools()
            self.model = self.new_model()
            if saved is not None:
                self.model.load_state_dict(saved.model)
        except calls.CallTimeoutError as error:
            raise EpisodeOver(Status.TIMEOUT, f"{self.stage} took longer than {seconds:g} seconds") from error
        return self.model

    async def _setup_inputs(self) -> dict[str, Any]:
        """What `setup` names besides the task. Raises CallTimeoutError."""
        inputs, seconds = dict[str, Any](), self.limits.setup_seconds
        if names_input(self.env, "setup", "shared"):
            self.stage = "running shared"
            shared = self.options.shared
            value = shared() if shared is not None else shared_value(self.make_env, {}, self.make_env)
            inputs["shared"] = await value.get(seconds)
        if (lease := self._new_lease()) is not None:
            self.stage, self.lease = OPENING, lease
            # A separate limiter, so that tools do not wait for sandboxes that start.
            limiter = trio.CapacityLimiter(1)
            sandbox = await _call_env(lease.open, seconds=seconds, limiter=limiter)
            if sandbox is not None:  # None: it is in the worker of the environment
                inputs["sandbox"] = sandbox
        return inputs

    def _new_lease(self) -> Any:
        """What opens the sandbox of this episode; None if `setup` names none."""
        if isinstance(self.env, WorkerEnvironment):
            return self.env.remote_lease(self.options.sandboxes)
        if not names_input(self.env, "setup", "sandbox"):
            return None
        from rollouts.sandboxes.base import Lease, Sandboxes

        sandboxes = self.options.sandboxes
        assert isinstance(sandboxes, Sandboxes), f"no sandboxes were given for {environment_name(self.env)}"
        return Lease(sandboxes)

    async def _tools_of(self, env: Any) -> list[ToolMethod]:
        """The tools that the `tools` of an object returns: the environment, or one of a class of tools. Raises
        EnvironmentDefinitionError with the line of `tools` for a value that is no tool.
        """
        with line_of(env.tools):
            from rollouts.env.task_tools import read_tools

            read = functools.partial(read_tools, env)
            found: list[ToolMethod] = await _call_env(
                env.tools, self.task, seconds=self.limits.setup_seconds, convert=read
            )
            return found

    async def _add_tools(self) -> None:
        """Add the tools of the run. An object of each class of tools is made and set up. Raises
        EnvironmentDefinitionError if two tools have one name.
        """
        self.added, seconds = [], self.limits.setup_seconds
        for each in self.options.tools:
            found = [each] if isinstance(each, ToolMethod) else []
            if isinstance(each, Toolset):
                self.stage = ADDING
                self.opened.append(made := await _call_env(each.make, seconds=seconds))
                if hasattr(made, "setup"):
                    is_shared = names_input(made, "setup", "shared")
                    inputs = {"shared": await each.shared().get(seconds)} if is_shared else {}
                    await _call_env(*with_inputs(made.setup, [self.task], inputs), seconds=seconds)
                found = await self._tools_of(made) if hasattr(made, "tools") else tools_of(made)
            twice = {tool.name for tool in found} & {tool.name for tool in self.all_tools}
            if twice:
                raise EnvironmentDefinitionError(two_of_one_name(min(twice), each, environment_name(self.env)))
            self.added += found

    async def close(self) -> str | None:
        """Run the environment's `close` and close the sandbox, also under cancellation. Returns the reason if one of
        them failed, or if the sandbox was lost, which the environment's code may have hidden.
        """
        for engine in self.sessions:
            engine.close_session(engine.session)
        seconds, opened, self.opened = self.limits.cleanup_seconds, self.opened, []
        failures = []
        for each in (*reversed(opened), self.env):
            if hasattr(each, "close"):
                label = f"close of the environment {environment_name(each)}"
                failures.append(await _close(each.close, "running close", label, seconds))
        why = next(filter(None, failures), None)
        lease, self.lease = self.lease, None
        if lease is None:
            return why
        failed = await _close(lease.close, CLOSING, CLOSING, seconds)
        self.may_retry = self.may_retry or bool(lease.lost)
        return lease.lost or why or failed

    def new_model(self) -> ChatModel:
        """A new model with all tools. In an environment with roles, each role has a model with its tools."""
        turns, roles = Turns(), {role.name: role for role in roles_of(self.env)}

        def model(role: Role, models: Mapping[str, ChatModel]) -> ChatModel:
            tools = {tool.name: tool for tool in of_role(self.all_tools, role.name)}
            schemas = [schema_of(tool) for tool in tools.values()]
            engine, chat = self._engine_of(role.name)
            return ChatModel(engine, self.task, chat, self.limits, self.seed, tools, schemas, role, turns, models)

        if self.role:
            return model(roles[self.role], {})
        return model(NO_ROLE, {name: model(role, {}) for name, role in roles.items()})

    def _engine_of(self, role: str) -> tuple[SuspendableEngine, ChatFormat | None]:
        """The engine and the chat format of a role."""
        opponent = self.options.opponents.get(role)
        if opponent is None:
            return self.engine, self.chat
        order = self.engine.order
        session = opponent.engine.open_session(order)
        engine = SuspendableEngine(opponent.engine, None, order, session, clock=self.engine.clock)
        engine.release()  # the opponent's other episodes may wait for the policy, and would wait for each other forever
        self.sessions.append(engine)
        return engine, opponent.chat

    async def respond(self, model: ChatModel, reply: Message) -> list[Message] | None:
        """The conversation up to `reply`, with the answers of tools or of the environment; None if the episode ends."""
        trajectory = model.trajectory
        assert trajectory is not None, "a model that replied has a trajectory"
        if trajectory.status is Status.TRUNCATED:
            return None
        if reply.tool_calls:
            self.stage = f"running the tool {shown(reply.tool_calls[0].name)}"
            answer = await model.call_tools(reply)
        else:
            self.stage = "running reply"
            answer = await _env_reply(self.env, trajectory)
        return [*trajectory.messages, *answer] if answer else None

    async def snapshot(self) -> tuple[Any, dict[str, Any]] | None:
        """The states of environment and conversation for a checkpoint; None if the episode must start again.

        Raises EnvironmentDefinitionError if `state()` returns something that JSON cannot represent.
        """
        if self.model is None or not self.can_restore:
            return None
        try:
            state = await calls.call(self.env.state, timeout_seconds=self.limits.setup_seconds)
        except calls.CallTimeoutError:
            return None
        except EnvironmentDefinitionError:
            raise
        except Exception as error:  # an author's code may raise anything; the episode continues
            report(error, f"state of the environment {environment_name(self.env)}")
            return None
        conversations = self.model.state_dict()
        return None if conversations is None else (plain_state(type(self.env).__name__, state), conversations)

    def finish(self, status: Status, error: str | None) -> tuple[Status, str | None]:
        """Set the status of the trajectories and check them. Returns the status of the episode, and the reason.

        `judged` gets the trajectory that rewards judge: the one that `rollout` returned, else the last; in an
        environment with roles, one of each role. If the model never replied, it is a trajectory without replies.
        """
        model, played = self.model, dict[str, list[Trajectory]]()
        if model is not None:
            model.close(status, error)
            played = {role: each.trajectories for role, each in (model.roles or {"": model}).items()}
        self.trajectories, self.judged = [], {}
        for role, own in (played or {"": []}).items():
            first = model.roles[role].messages if model is not None and role else self.task.messages
            counts = dict.fromkeys(COUNTS, 0.0)
            own = own or [Trajectory(self.task, first, status=status, metrics=counts, error=error, role=role)]
            self.judged[role] = next((each for each in own if each is self.chosen), own[-1])
            self.trajectories += own
        ends = [(each.status, each.error) for each in self.judged.values()]
        failed = next((end for end in ends if end[0].is_infrastructure), None)
        if failed is not None and any(end[0] is not failed[0] for end in ends):
            return self.finish(*failed)  # a role that failed, although `rollout` caught it, ends all roles
        last = list((self.played or self.judged).values())[-1]
        return failed or (last.status, last.error)

    def result(self, results: Mapping[str, tuple[Score, dict[str, float]]]) -> Episode:
        """The finished episode, with the score and the metrics of each role."""

        def counts(role: str | None, judging: Mapping[str, float]) -> dict[str, float]:
            total = dict(judging)
            for trajectory in self.trajectories:
                for name, value in trajectory.metrics.items() if role in (None, trajectory.role) else ():
                    total[name] = total.get(name, 0.0) + value
            return total | {"latency_seconds": self.engine.clock.elapsed}

        places = {id(each): place for place, each in enumerate(self.trajectories)}
        roles = tuple(
            RoleResult(role, score, counts(role, judging), places[id(self.judged[role])])
            for role, (score, judging) in results.items()
        )
        order = (self.engine.order[0], self.engine.order[1])
        times = EpisodeTimes(self.engine.clock.began_at, time.time(), self.engine.clock.replies)
        role, score, metrics, judged = roles[0]
        if role:
            score, metrics = mean_score(roles), counts(None, {})
        episode = Episode(order, self.task, self.trajectories, score, metrics, judged, self.may_retry, times=times)
        return episode._replace(roles=roles) if role else episode


class _EnvironmentFault(Exception):
    """Wraps an exception of the environment's code, to distinguish it from a bug in rollouts."""

    def __init__(self, error: Exception) -> None:
        super().__init__(message_of(error))
        self.error = error


async def _call_env(function: Callable[..., Any], *args: Any, seconds: float = math.inf, **options: Any) -> Any:
    """Call the environment's code; `options` are those of `calls.call`."""
    try:
        return await calls.call(function, *args, timeout_seconds=seconds, **options)
    except (calls.CallTimeoutError, EnvironmentDefinitionError):
        raise
    except Exception as error:  # an exception of the author's code
        raise _EnvironmentFault(error) from error


async def _env_reply(env: Any, trajectory: Trajectory) -> list[Message]:
    """The environment's answer to a reply without tool calls. An empty list ends the episode."""
    returned = await _call_env(env.reply, trajectory) if hasattr(env, "reply") else None
    try:
        return reply_messages(env, returned)
    except TypeError as error:
        raise _EnvironmentFault(error) from error


def outcome_of(error: Exception, stage: str) -> tuple[Status, str, bool]:
    """The status that an exception gives the episode, the reason, and whether to retry the episode.

    A retry makes sense if neither the policy nor a deadline caused the failure. Errors that end the run are raised:
    RewardError, EnvironmentDefinitionError, and bugs in rollouts.
    """
    ours = list(leaves_of(error))
    inner = [leaf.error if isinstance(leaf, _EnvironmentFault) else leaf for leaf in ours]
    leaves = [leaf for each in inner for leaf in leaves_of(each)]
    for leaf in leaves:
        if isinstance(leaf, RewardError | EnvironmentDefinitionError | WorkersLostError):
            raise leaf
    for leaf in leaves:
        if isinstance(leaf, EpisodeOver):
            return leaf.status, leaf.reason, False
    failures = [leaf for leaf in leaves if isinstance(leaf, InferenceError)]
    if failures:
        return Status.INFERENCE_ERROR, message_of(failures[0]), all(leaf.is_transient for leaf in failures)
    transient = SandboxError | ServiceLostError | WorkerError
    infrastructure = calls.AbandonedCallsError | ProcessError | transient
    known = _EnvironmentFault | ModelError | infrastructure
    if not all(isinstance(leaf, known) for leaf in ours):
        raise error
    first = inner[0]
    words = words_of(first) if isinstance(first, RolloutsError) else report(first, stage)
    is_transient = any(isinstance(leaf, transient) for leaf in leaves)
    may_retry = stage in (BUILDING, OPENING, SETUP, TOOLS, ADDING) or is_transient
    return Status.ENVIRONMENT_ERROR, f"{stage}: {words}", may_retry


async def _close(function: Callable[[], Any], stage: str, label: str, seconds: float) -> str | None:
    """Close the environment, an object with tools, or the sandbox, also under cancellation. Returns the reason if it
    failed, else None. `stage` begins a reason, and `label` a report.
    """
    with trio.CancelScope(shield=True):
        try:
            # A separate limiter, so that it does not wait for other episodes' tools.
            await calls.call(function, timeout_seconds=seconds, limiter=trio.CapacityLimiter(1))
        except calls.CallTimeoutError:
            return f"{stage.removeprefix('running ')} took longer than {seconds:g} seconds"
        except EnvironmentDefinitionError:
            raise
        except Exception as error:  # an author's code may raise anything
            return f"{stage}: {report(error, label)}"
    return None
