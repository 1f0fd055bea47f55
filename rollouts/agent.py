"""One task, one episode: build the environment, let the model act in it, judge what it did, clean up.

    episode = await run_episode(task, make_env=Calculator, chat=chat, inference=engine, limits=EpisodeLimits(), ...)

A failed episode is data (`Status`), never an exception; an error of the core itself is no failed episode, and ends the
run. The standard loop: the model speaks; its tool calls are carried
out and answered; without a call the environment's `reply` may speak; where nobody does, the episode is complete. What
is left out: many episodes at once (`training.rollout_gen`), rewards of a whole group, and the conversation's tokens
(`agent_model`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import trio

from rollouts.agent_clock import EpisodeClock
from rollouts.agent_model import ChatModel, EpisodeLimits, EpisodeOver, plain_state, turn_seed
from rollouts.author_code import message_of, shown
from rollouts.env import calls
from rollouts.env.authoring import metrics_of, rewards_of, tools_of
from rollouts.env.checks import requests_of
from rollouts.env.mixing import InvalidPolicy, RewardTerm, Verdict, mix, read_verdict
from rollouts.env.processes import ProcessError
from rollouts.env.schema import tool_schema
from rollouts.errors import EnvironmentDefinitionError, InferenceError, ModelError, RewardError, leaves_of, named
from rollouts.inference.base import InferenceBackend
from rollouts.inference.carried import HeldEpisode, attend, held_episode, remember
from rollouts.types import Message, Score, Status, Task, Trajectory

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat

__all__ = ["ChatModel", "Episode", "EpisodeLimits", "EpisodeOver", "run_episode", "turn_seed"]


class Episode(NamedTuple):
    """What came of one task: `order` is (group, rollout); `judged` the position of the trajectory that rewards saw.

    There is always at least one trajectory. `metrics` are the sums of the trajectories' counts, `latency_seconds`,
    `reward_failures` and `metric_failures` where there were any, and the environment's own @metric values, each under
    `metric/<name>`. `may_retry`: it failed of something that may well go right when the episode is played again.
    """

    order: tuple[int, int]
    task: Task
    trajectories: list[Trajectory]
    score: Score
    metrics: dict[str, float]
    judged: int = -1
    may_retry: bool = False

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory that was judged."""
        return self.trajectories[self.judged]

    @property
    def status(self) -> Status:
        """How the episode ended."""
        return self.trajectory.status


async def run_episode(
    task: Task,
    *,
    make_env: Callable[[], Any],
    chat: ChatFormat | None,
    inference: InferenceBackend,
    limits: EpisodeLimits,
    rewards: Sequence[RewardTerm],
    session: str,
    order: tuple[int, int],
    seed: int,
    on_invalid_reward: InvalidPolicy = "drop",
) -> Episode:
    """Play one episode in an environment of its own, and judge it.

    `chat` is None for an engine that is spoken to in messages (`CanChat`). `session` was opened by the caller and is
    closed here as soon as the model will not speak again. The environment's `close` runs in every case, also on
    cancellation, shielded, for at most `limits.cleanup_seconds`; where it fails, so does the episode. Rewards and
    metrics see the environment before it is closed, and only where the policy played the episode out (COMPLETED,
    TRUNCATED). Of several trajectories the one that `rollout` returned is judged, else the last. While the episode
    waits between two steps (a `Seat` at its gate), its deadlines stand still.

    Raises:
        RewardError: a reward returned NaN or no number, or could not judge under the policy `raise`.
        EnvironmentDefinitionError: the environment cannot be used as it is written.
        Exception: a mistake of the core's own, also where the environment's `rollout` caught it.
    """
    clock = EpisodeClock()
    clock.begin()
    attend(inference, clock)
    play = _Play(task, make_env, limits, clock)
    score, counts = Score(None), dict[str, float]()
    try:
        speak = functools.partial(
            ChatModel,
            task=task,
            chat=chat,
            inference=inference,
            limits=limits,
            session=session,
            order=order,
            seed=seed,
            clock=clock,
        )
        play.held = held_episode(inference)
        remember(inference, functools.partial(_snapshot, play))
        status, error = await _play_out(play, speak)
        inference.close_session(session)
        play.finish(status, error)
        if not play.judged.status.is_infrastructure:
            score, counts = await _judge(play.env, play.judged, rewards, limits, on_invalid_reward)
    finally:
        inference.close_session(session)
        close_error = await _close(play.env, limits.cleanup_seconds)
    if close_error is not None and not play.judged.status.is_infrastructure:
        play.finish(Status.ENVIRONMENT_ERROR, close_error)
    if play.judged.status.is_infrastructure:
        score = Score(None, {}, f"{play.judged.status.value}: {play.judged.error}")
    for trajectory in play.trajectories:
        for name, value in trajectory.metrics.items():
            counts[name] = counts.get(name, 0.0) + value
    counts["latency_seconds"] = clock.elapsed
    return Episode(order, task, play.trajectories, score, counts, play.judged_index, play.may_retry)


# --- playing --------------------------------------------------------------------------------------------------------

BUILDING, SETUP = "building the environment", "running setup"


class _Play:
    """What there is of an episode so far, so that a failure at any point knows what to close and what to report."""

    def __init__(self, task: Task, make_env: Callable[[], Any], limits: EpisodeLimits, clock: EpisodeClock) -> None:
        self.task = task
        self.make_env = make_env
        self.limits = limits
        self.clock = clock
        self.stage = BUILDING
        self.may_retry = False
        self.env: Any = None
        self.model: ChatModel | None = None
        self.held: HeldEpisode | None = None
        self.chosen: Trajectory | None = None
        self.trajectories: list[Trajectory] = []

    @property
    def judged_index(self) -> int:
        found = [index for index, t in enumerate(self.trajectories) if t is self.chosen]
        return found[0] if found else len(self.trajectories) - 1

    @property
    def judged(self) -> Trajectory:
        return self.trajectories[self.judged_index]

    def finish(self, status: Status, error: str | None) -> None:
        """Stamp and check the trajectories; an episode in which the model never spoke has an empty one."""
        if self.model is not None:
            self.model.close(status, error)
            self.trajectories = self.model.trajectories
        if not self.trajectories or self.model is None:
            self.trajectories = [Trajectory(self.task, self.task.messages, status=status, error=error)]


async def _play_out(play: _Play, speak: Callable[..., ChatModel]) -> tuple[Status, str | None]:
    """Play under the episode's deadline; what goes wrong becomes a status, with the reason in words."""
    seconds = play.limits.episode_seconds
    outcome: tuple[Status, str | None] = Status.COMPLETED, None
    try:
        with play.clock.move_on_after(seconds) as deadline:
            await _set_up(play, speak)
            await _converse(play)
    except Exception as error:  # also a group of errors
        outcome = _status_of(error, play.stage)
        play.may_retry = _may_retry(error, outcome[0], play.stage)
    else:
        if deadline.cancelled_caught:
            outcome = Status.TIMEOUT, f"the episode's deadline of {seconds:g} seconds passed while {play.stage}"
    if play.model is not None and play.model.failure is not None:
        raise play.model.failure  # an environment's `rollout` may have caught it, or raised something else over it
    return outcome


class _EnvironmentFault(Exception):
    """What the environment's own code raised, so that it is not taken for a mistake of the core, nor the reverse."""

    def __init__(self, error: Exception) -> None:
        super().__init__(message_of(error))
        self.error = error


async def _ask_env(
    function: Callable[..., Any], *args: Any, under_trio: bool = False, seconds: float = math.inf
) -> Any:
    library: Literal["trio"] | None = "trio" if under_trio else None
    try:
        return await calls.call(function, *args, timeout_seconds=seconds, async_library=library)
    except calls.CallTimeoutError:
        raise
    except Exception as error:  # calls.call lets nothing else of the author's through
        raise _EnvironmentFault(error) from error


async def _set_up(play: _Play, speak: Callable[..., ChatModel]) -> None:
    seconds = play.limits.setup_seconds
    try:
        play.env = await _ask_env(play.make_env, seconds=seconds)
        tools = {tool.name: tool for tool in tools_of(play.env)}
        schemas = [tool_schema(tool.function, tool.name) for tool in tools.values()]
        play.model = speak(tools=tools, schemas=schemas)
        if hasattr(play.env, "setup"):
            play.stage = SETUP
            await _ask_env(play.env.setup, play.task, seconds=seconds)
        if play.held is not None and _can_restore(play):
            play.stage = "running restore"
            await _ask_env(play.env.restore, play.held.env, seconds=seconds)
            play.model.load_state_dict(play.held.model)
    except calls.CallTimeoutError as error:
        raise EpisodeOver(Status.TIMEOUT, f"{play.stage} took longer than {seconds:g} seconds") from error


def _can_restore(play: _Play) -> bool:
    """Whether the episode can go on in another process: a loop of the environment's own cannot be entered midway."""
    return hasattr(play.env, "state") and hasattr(play.env, "restore") and not hasattr(play.env, "rollout")


async def _snapshot(play: _Play) -> tuple[Any, dict[str, Any]] | None:
    """What a checkpoint keeps of environment and conversation; None where the episode has to begin again.

    Raises EnvironmentDefinitionError where `state()` gives what cannot be written down.
    """
    if play.model is None or not _can_restore(play):
        return None
    try:
        state = await calls.call(play.env.state, timeout_seconds=play.limits.setup_seconds)
    except calls.CallTimeoutError:
        return None
    except EnvironmentDefinitionError:
        raise
    except Exception:  # an author's code may raise anything; the episode itself is as well as before
        return None
    conversations = play.model.state_dict()
    return None if conversations is None else (plain_state(type(play.env).__name__, state), conversations)


async def _converse(play: _Play) -> None:
    """The environment's own `rollout`, or the standard loop."""
    model = play.model
    assert model is not None, "the model is made before the conversation begins"
    if hasattr(play.env, "rollout"):
        play.stage = "running rollout"
        returned = await _ask_env(play.env.rollout, play.task, model, under_trio=True)
        play.chosen = returned if isinstance(returned, Trajectory) else None
        return
    messages = model.asked or play.task.messages
    while True:
        play.stage = "waiting for the model"
        reply = await model.chat(messages)
        trajectory = model.trajectory
        assert trajectory is not None, "a model that spoke has a trajectory"
        if trajectory.status is Status.TRUNCATED:
            return
        if reply.tool_calls:
            play.stage = f"running the tool {shown(reply.tool_calls[0].name)}"
            answer = await model.call_tools(reply)
        else:
            play.stage = "running reply"
            answer = await _env_reply(play.env, trajectory)
        if not answer:
            return
        messages = [*trajectory.messages, *answer]


async def _env_reply(env: Any, trajectory: Trajectory) -> list[Message]:
    """What the environment says when no tool was called; nothing ends the episode."""
    if not hasattr(env, "reply"):
        return []
    returned = await _ask_env(env.reply, trajectory)
    if returned is None:
        return []
    answers = returned if isinstance(returned, list | tuple) else [returned]
    for answer in answers:
        if not isinstance(answer, str | Message):
            words = f"it returned {type(answer).__name__}, expected text, a Message, a list of them, or None"
            raise _EnvironmentFault(TypeError(words))
    return [Message("user", answer) if isinstance(answer, str) else answer for answer in answers]


def _status_of(error: Exception, stage: str) -> tuple[Status, str]:
    """What an exception makes of the episode. Raises what ends the run: two errors of the environment, and all that the
    core itself should never have raised.
    """
    ours, leaves = list(leaves_of(error)), _raised(error)
    for leaf in leaves:
        if isinstance(leaf, RewardError | EnvironmentDefinitionError):
            raise leaf
    for leaf in leaves:
        if isinstance(leaf, EpisodeOver):
            return leaf.status, leaf.reason
    for leaf in leaves:
        if isinstance(leaf, InferenceError):
            return Status.INFERENCE_ERROR, message_of(leaf)
    if not all(
        isinstance(leaf, _EnvironmentFault | ModelError | calls.AbandonedCallsError | ProcessError) for leaf in ours
    ):
        raise error
    return Status.ENVIRONMENT_ERROR, f"{stage}: {named(leaves[0])}"


def _may_retry(error: Exception, status: Status, stage: str) -> bool:
    """Whether the same episode may go right another time: nothing of the policy has failed it, nor a deadline."""
    if status is Status.INFERENCE_ERROR:
        return all(leaf.is_transient for leaf in _raised(error) if isinstance(leaf, InferenceError))
    return status is Status.ENVIRONMENT_ERROR and stage in (BUILDING, SETUP)


def _raised(error: BaseException) -> list[BaseException]:
    """What was raised, out of groups and of what the environment's own errors are wrapped in."""
    leaves = (leaf.error if isinstance(leaf, _EnvironmentFault) else leaf for leaf in leaves_of(error))
    return [inner for each in leaves for inner in leaves_of(each)]


async def _close(env: Any, seconds: float) -> str | None:
    """Run the environment's `close` whatever is being cancelled; what went wrong, in words."""
    if not hasattr(env, "close"):
        return None
    with trio.CancelScope(shield=True):
        try:
            # A limiter of its own: cleaning up must not wait for other episodes' tools.
            await calls.call(env.close, timeout_seconds=seconds, limiter=trio.CapacityLimiter(1))
        except calls.CallTimeoutError:
            return f"close took longer than {seconds:g} seconds"
        except EnvironmentDefinitionError:
            raise
        except Exception as error:  # an author's code may raise anything
            return f"running close: {named(error)}"
    return None


# --- judging --------------------------------------------------------------------------------------------------------


async def _judge(
    env: Any,
    trajectory: Trajectory,
    terms: Sequence[RewardTerm],
    limits: EpisodeLimits,
    on_invalid: InvalidPolicy,
) -> tuple[Score, dict[str, float]]:
    """The score of every term that is not a group's, and the environment's metrics."""
    available = {"task": trajectory.task, "trajectory": trajectory, "env": env}
    ask = functools.partial(_ask, available=available, seconds=limits.reward_seconds)
    verdicts: list[Verdict] = []
    for term in terms:
        if term.is_group:
            continue
        if term.function is not None:
            verdicts.append(await ask(term.alias, term.weight, term.function, term.requests, term.settings))
            continue
        for method in rewards_of(env):
            requests = requests_of(method.function)
            verdict = await ask(method.name, term.weight * method.weight, method.function, requests, {})
            verdicts.append(verdict._replace(alias=term.alias))
    metrics: dict[str, float] = {}
    for own in metrics_of(env):
        value = await _measure(own.function, available, limits.reward_seconds)
        if value is None:
            metrics["metric_failures"] = metrics.get("metric_failures", 0.0) + 1.0
        else:
            metrics[f"metric/{own.name}"] = value
    failures = sum(1 for verdict in verdicts if verdict.value is None)
    if failures:
        metrics["reward_failures"] = float(failures)
    return mix(verdicts, on_invalid), metrics


async def _ask(
    name: str,
    weight: float,
    function: Callable[..., Any],
    requests: Sequence[str],
    settings: Mapping[str, Any],
    *,
    available: Mapping[str, Any],
    seconds: float,
) -> Verdict:
    """One reward's verdict; one that raises, or takes too long, could not judge."""
    arguments = [available[request] for request in requests]
    try:
        verdict: Verdict = await calls.call(
            functools.partial(function, **settings),
            *arguments,
            timeout_seconds=seconds,
            convert=functools.partial(read_verdict, name, weight),
        )
    except calls.CallTimeoutError:
        return Verdict(name, weight, None, {}, f"it took longer than {seconds:g} seconds", name)
    except (RewardError, EnvironmentDefinitionError):
        raise
    except Exception as error:  # a stranger's reward may raise anything
        return Verdict(name, weight, None, {}, named(error), name)
    return verdict


async def _measure(function: Callable[..., Any], available: Mapping[str, Any], seconds: float) -> float | None:
    """A metric's value; None where it raised, took too long, or is no finite number: a metric never harms a rollout."""
    arguments = [available[request] for request in requests_of(function)]
    try:
        value: float = await calls.call(function, *arguments, timeout_seconds=seconds, convert=float)
    except EnvironmentDefinitionError:
        raise
    except Exception:  # counted by the caller as metric_failures
        return None
    return value if math.isfinite(value) else None
