"""Run one episode: build the environment, let the model act in it, judge the result, clean up.

    episode = await run_episode(task, make_env=Calculator, chat=chat, inference=engine, limits=EpisodeLimits(), ...)

A failed episode is data (`Status`), not an exception. A bug in rollouts itself is an exception, and it ends the run. In
the standard loop the model replies, and its tool calls are run and answered. If a reply has no call, the environment's
`reply` may answer; if it returns no message, the episode is complete. Concurrent episodes and rewards of whole groups
are in `training.rollout_gen`, and the conversation's tokens in `model`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from rollouts.agent.model import ChatModel, EpisodeLimits, EpisodeOver, plain_state
from rollouts.author_code import authors_code, message_of, place_of_function, shown, with_place
from rollouts.env import calls
from rollouts.env.authoring import JudgeMethod, ToolMethod, environment_name, metrics_of, rewards_of, tools_of
from rollouts.env.checks import requests_of
from rollouts.env.mixing import InvalidPolicy, RewardTerm, Verdict, mix, read_verdict, with_reason
from rollouts.env.processes import ProcessError
from rollouts.env.schema import tool_schema
from rollouts.error_log import report
from rollouts.errors import (
    EnvironmentDefinitionError,
    InferenceError,
    ModelError,
    RewardError,
    RolloutsError,
    leaves_of,
    words_of,
)
from rollouts.inference.base import InferenceBackend
from rollouts.inference.suspend import SuspendableEngine
from rollouts.plugins.signature import bind
from rollouts.types import Episode, Message, Score, Status, Task, Trajectory

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat


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
    on_invalid_reward: InvalidPolicy = "drop",
    tools: Sequence[ToolMethod] = (),
) -> Episode:
    """Run one episode in a new environment, and judge it. `tools` are added to those of the environment.

    `chat` is None for an engine that takes messages (`CanChat`). The caller has opened `session`; this function closes
    it after the model's last reply. The environment's `close` always runs, also on cancellation, for at most
    `limits.cleanup_seconds`; if `close` fails, the episode fails. Rewards and metrics run before `close`, and only if
    the status is COMPLETED or TRUNCATED. If there are several trajectories, rewards judge the one that `rollout`
    returned, or else the last one. While the episode is suspended (`SuspendableEngine`), its deadlines do not advance.

    Raises:
        RewardError: a reward returned NaN or no number; or a reward could not judge, and `on_invalid_reward` is
            "raise".
        EnvironmentDefinitionError: the environment's code is not valid.
        Exception: a bug in rollouts itself, even if the environment's `rollout` caught it.
    """
    engine = (
        inference if isinstance(inference, SuspendableEngine) else SuspendableEngine(inference, None, order, session)
    )
    engine.clock.begin()
    episode_run = EpisodeRun(engine, task, make_env, chat, limits, seed, tools)
    engine.snapshot = episode_run.snapshot
    score, counts = Score(None), dict[str, float]()
    try:
        status, error = await episode_run.run()
        engine.close_session(session)
        judged = episode_run.finish(status, error)
        if not judged.status.is_infrastructure:
            score, counts = await judge(episode_run.env, judged, rewards, limits.reward_seconds, on_invalid_reward)
    finally:
        engine.close_session(session)
        close_error = await close_environment(episode_run.env, limits.cleanup_seconds)
    if close_error is not None and not judged.status.is_infrastructure:
        judged = episode_run.finish(Status.ENVIRONMENT_ERROR, close_error)
    if judged.status.is_infrastructure:
        score = Score(None, {}, f"{judged.status.value}: {judged.error}")
    for trajectory in episode_run.trajectories:
        for name, value in trajectory.metrics.items():
            counts[name] = counts.get(name, 0.0) + value
    counts["latency_seconds"] = engine.clock.elapsed
    return Episode(order, task, episode_run.trajectories, score, counts, episode_run.judged, episode_run.may_retry)


# --- running --------------------------------------------------------------------------------------------------------

BUILDING, SETUP = "building the environment", "running setup"


@dataclass(eq=False)
class EpisodeRun:
    """The state of an episode. After a failure it shows what to close and what to report."""

    engine: SuspendableEngine
    task: Task
    make_env: Callable[[], Any]
    chat: ChatFormat | None
    limits: EpisodeLimits
    seed: int
    tools: Sequence[ToolMethod] = ()
    stage: str = BUILDING
    may_retry: bool = False
    env: Any = None
    model: ChatModel | None = None
    chosen: Trajectory | None = None  # the trajectory that the environment's `rollout` returned
    trajectories: list[Trajectory] = field(default_factory=list)
    judged: int = -1

    @property
    def can_restore(self) -> bool:
        """Whether another process can continue the episode. An environment with its own `rollout` cannot be resumed."""
        env = self.env
        return hasattr(env, "state") and hasattr(env, "restore") and not hasattr(env, "rollout")

    @property
    def all_tools(self) -> list[ToolMethod]:
        """The tools of the environment, and those that the run adds."""
        return [*tools_of(self.env), *self.tools]

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
                    returned = await _call_env(self.env.rollout, self.task, model, under_trio=True)
                    self.chosen = returned if isinstance(returned, Trajectory) else None
                while messages is not None:
                    self.stage = "waiting for the model"
                    reply = await model.chat(messages)
                    messages = await self.respond(model, reply)
        except Exception as error:  # also a group of errors
            status, why, self.may_retry = outcome_of(error, self.stage)
        else:
            if deadline.cancelled_caught:
                status, why = Status.TIMEOUT, f"the episode's deadline of {seconds:g} seconds passed while {self.stage}"
        if self.model is not None and self.model.failure is not None:
            raise self.model.failure  # the environment's `rollout` may have caught or replaced it
        return status, why

    async def set_up(self, *, for_task: bool = True) -> ChatModel:
        """Build the environment and its model, and run `setup` if `for_task`."""
        seconds, suspended = self.limits.setup_seconds, self.engine.resume_from
        try:
            self.env = await _call_env(self.make_env, seconds=seconds)
            self.model = self.new_model()
            if for_task and hasattr(self.env, "setup"):
                self.stage = SETUP
                await _call_env(self.env.setup, self.task, seconds=seconds)
            if suspended is not None and self.can_restore:
                self.stage = "running restore"
                await _call_env(self.env.restore, suspended.env, seconds=seconds)
                self.model.load_state_dict(suspended.model)
        except calls.CallTimeoutError as error:
            raise EpisodeOver(Status.TIMEOUT, f"{self.stage} took longer than {seconds:g} seconds") from error
        return self.model

    def new_model(self) -> ChatModel:
        """A new model with all tools."""
        tools = {tool.name: tool for tool in self.all_tools}
        schemas = [tool_schema(tool.function, tool.name) for tool in tools.values()]
        return ChatModel(self.engine, self.task, self.chat, self.limits, self.seed, tools, schemas)

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

    def finish(self, status: Status, error: str | None) -> Trajectory:
        """Set the status of the trajectories and check them. Returns the trajectory that rewards judge: the one that
        `rollout` returned, else the last. If the model never replied, there is one trajectory without replies.
        """
        if self.model is not None:
            self.model.close(status, error)
            self.trajectories = self.model.trajectories
        if not self.trajectories or self.model is None:
            self.trajectories = [Trajectory(self.task, self.task.messages, status=status, error=error)]
        last = len(self.trajectories) - 1
        self.judged = next((index for index, each in enumerate(self.trajectories) if each is self.chosen), last)
        return self.trajectories[self.judged]


class _EnvironmentFault(Exception):
    """Wraps an exception of the environment's code, to distinguish it from a bug in rollouts."""

    def __init__(self, error: Exception) -> None:
        super().__init__(message_of(error))
        self.error = error


async def _call_env(
    function: Callable[..., Any], *args: Any, under_trio: bool = False, seconds: float = math.inf
) -> Any:
    try:
        return await calls.call(function, *args, timeout_seconds=seconds, async_library="trio" if under_trio else None)
    except calls.CallTimeoutError:
        raise
    except Exception as error:  # an exception of the author's code
        raise _EnvironmentFault(error) from error


async def _env_reply(env: Any, trajectory: Trajectory) -> list[Message]:
    """The environment's answer to a reply without tool calls. An empty list ends the episode."""
    returned = await _call_env(env.reply, trajectory) if hasattr(env, "reply") else None
    answers = returned if isinstance(returned, list | tuple) else [] if returned is None else [returned]
    for answer in answers:
        if not isinstance(answer, str | Message):
            place = place_of_function(env.reply)
            words = f"it returned {type(answer).__name__}, expected text, a Message, a list of them, or None ({place})"
            raise _EnvironmentFault(TypeError(words))
    return [Message("user", answer) if isinstance(answer, str) else answer for answer in answers]


def outcome_of(error: Exception, stage: str) -> tuple[Status, str, bool]:
    """The status that an exception gives the episode, the reason, and whether to retry the episode.

    A retry makes sense if neither the policy nor a deadline caused the failure. Errors that end the run are raised:
    RewardError, EnvironmentDefinitionError, and bugs in rollouts.
    """
    ours = list(leaves_of(error))
    inner = [leaf.error if isinstance(leaf, _EnvironmentFault) else leaf for leaf in ours]
    leaves = [leaf for each in inner for leaf in leaves_of(each)]
    for leaf in leaves:
        if isinstance(leaf, RewardError | EnvironmentDefinitionError):
            raise leaf
    for leaf in leaves:
        if isinstance(leaf, EpisodeOver):
            return leaf.status, leaf.reason, False
    failures = [leaf for leaf in leaves if isinstance(leaf, InferenceError)]
    if failures:
        return Status.INFERENCE_ERROR, message_of(failures[0]), all(leaf.is_transient for leaf in failures)
    known = _EnvironmentFault | ModelError | calls.AbandonedCallsError | ProcessError
    if not all(isinstance(leaf, known) for leaf in ours):
        raise error
    first = inner[0]
    words = words_of(first) if isinstance(first, RolloutsError) else report(first, stage)
    return Status.ENVIRONMENT_ERROR, f"{stage}: {words}", stage in (BUILDING, SETUP)


async def close_environment(env: Any, seconds: float) -> str | None:
    """Run the environment's `close`, also under cancellation. Returns the reason if it failed, else None."""
    if not hasattr(env, "close"):
        return None
    with trio.CancelScope(shield=True):
        try:
            # A separate limiter, so that `close` does not wait for other episodes' tools.
            await calls.call(env.close, timeout_seconds=seconds, limiter=trio.CapacityLimiter(1))
        except calls.CallTimeoutError:
            return f"close took longer than {seconds:g} seconds"
        except EnvironmentDefinitionError:
            raise
        except Exception as error:  # an author's code may raise anything
            return f"running close: {report(error, f'close of the environment {environment_name(env)}')}"
    return None


# --- judging --------------------------------------------------------------------------------------------------------


async def judge(
    env: Any, trajectory: Trajectory, terms: Sequence[RewardTerm], seconds: float, on_invalid: InvalidPolicy
) -> tuple[Score, dict[str, float]]:
    """The score from all rewards but those of whole groups, and the environment's metrics."""
    available = {"task": trajectory.task, "trajectory": trajectory, "env": env}
    verdicts: list[Verdict] = []
    for term in terms:
        if term.is_group:
            continue
        own = [] if term.function is not None else rewards_of(env)
        asked = [RewardTerm(o.name, o.function, term.weight * o.weight, {}, requests_of(o.function)) for o in own]
        for each in asked if term.function is None else [term]:
            verdict = await _run_reward(each, available, seconds)
            verdicts.append(verdict._replace(alias=term.alias))
    values = {metric.name: await _measure(metric, available, seconds) for metric in metrics_of(env)}
    metrics = {f"metric/{name}": value for name, value in values.items() if value is not None}
    if failures := len(values) - len(metrics):
        metrics["metric_failures"] = float(failures)
    if failures := sum(1 for verdict in verdicts if verdict.value is None):
        metrics["reward_failures"] = float(failures)
    return mix(verdicts, on_invalid), metrics


async def _run_reward(term: RewardTerm, available: Mapping[str, Any], seconds: float) -> Verdict:
    """The verdict of one reward. A reward that raises or takes too long could not judge."""
    assert term.function is not None, "the caller replaces env by the environment's own rewards"
    try:
        verdict: Verdict = await calls.call(
            bind(term.function, term.settings),
            *(available[request] for request in term.requests),
            timeout_seconds=seconds,
            convert=functools.partial(read_verdict, term.alias, term.weight),
        )
    except calls.CallTimeoutError:
        return Verdict(term.alias, term.weight, None, {}, f"it took longer than {seconds:g} seconds")
    except EnvironmentDefinitionError:
        raise
    except RewardError as error:  # the reward returned something that is not a reward, or raised this itself
        raise RewardError(with_place(error, term.function)) from error
    except Exception as error:  # an author's code may raise anything
        return Verdict(term.alias, term.weight, None, {}, report(error, f"the reward {term.alias}"))
    return with_reason(verdict, term.function)


async def _measure(metric: JudgeMethod, available: Mapping[str, Any], seconds: float) -> float | None:
    """A metric's value. None if the metric raised, took too long or returned no finite number. Such a failure is
    reported, and the caller counts it; the rollout is not affected.
    """
    arguments = [available[request] for request in requests_of(metric.function)]
    read = functools.partial(_finite, metric)
    try:
        value: float = await calls.call(metric.function, *arguments, timeout_seconds=seconds, convert=read)
    except EnvironmentDefinitionError:
        raise
    except calls.CallTimeoutError:
        report(TimeoutError(f"it took longer than {seconds:g} seconds"), f"the metric {metric.name}")
    except Exception as error:  # an author's code may raise anything
        report(error, f"the metric {metric.name}")
    else:
        return value
    return None


def _finite(metric: JudgeMethod, returned: Any) -> float:
    """The return value of a metric as a finite number. Raises TypeError with the file and line of the metric."""
    with contextlib.suppress(Exception), authors_code():  # the author's object may raise anything
        value = float(returned)
        if math.isfinite(value) and not isinstance(returned, str):
            return value
    place = place_of_function(metric.function)
    given = f"it returned {shown(returned)} ({type(returned).__name__}); a metric returns a finite number"
    raise TypeError(given + (f" ({place})" if place else ""))
