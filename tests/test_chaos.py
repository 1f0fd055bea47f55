"""Chaos: one call in five fails, in every way, over 2,000 rollouts. The step ends, every prompt is accounted for once,
the metrics name each cause, and nothing is left.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from rollouts_notes.manager import AsyncRolloutManager
from rollouts_notes.rows import RolloutConfig
from rollouts_servers.checks import ServerSetup
from rollouts_servers.http import Retries
from rollouts_servers.server import Server
from rollouts_servers.vllm import VLLM

from rollouts import Task, reward, tool
from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.env import calls, metric
from rollouts.env.authoring import tools_of
from rollouts.env.mixing import env_term
from rollouts.env.tools import run_tool
from rollouts.errors import InferenceError, RewardError, RunError
from rollouts.inference.base import Capabilities, GenerateRequest, Generation, VersionSpan
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.rollout_gen.groups import group_samples
from rollouts.training.rollout_gen.pool import FailurePolicy, Failures, Job, run_episodes
from rollouts.training.rollout_gen.steps import rollout_metrics
from rollouts.types import Status, ToolCall

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parent / room) for room in ("env", "servers"))]
import mock_engine  # noqa: E402
from agent_fakes import END, FakeChat  # noqa: E402
from isolated_tools import Isolated  # noqa: E402

pytestmark = pytest.mark.slow

CHANCE = 0.2
PROMPTS, MEMBERS = 250, 8
LIMITS = EpisodeLimits(
    max_turns=6,
    episode_seconds=20.0,
    setup_seconds=0.5,
    turn_seconds=0.3,
    tool_seconds=0.3,
    reward_seconds=0.3,
    cleanup_seconds=0.3,
    max_tokens=400,
)
GOOD = ("[look {}]", '[double {"n": 4}]', "go on")
BAD = ('[double {"n": "x"}]', "[double {}]", "[nothing {}]", "[look }", "[look [[[", "")
DEADLY = ("[spin {}]", "[vanish {}]")  # each ends a process, and the next call waits for another one


class Chaos:
    """An environment in which anything may fail; `rng` is shared, so that a retry meets another fate."""

    rng = random.Random(0)
    double, spin, vanish = Isolated.__dict__["double"], Isolated.__dict__["spin"], Isolated.__dict__["vanish"]

    def __init__(self) -> None:
        self.turns = 0
        if self.fails(0.25):
            raise OSError("no environment to be had")

    def fails(self, share: float = 1.0) -> bool:
        return self.rng.random() < CHANCE * share

    async def hang_or_raise(self, what: str) -> None:
        if self.fails():
            if self.rng.random() < 0.5:
                await trio.sleep_forever()
            raise ConnectionError(f"{what} lost its connection")

    async def setup(self, task: Task) -> None:
        await self.hang_or_raise("setup")

    @tool(timeout_seconds=0.2)
    def look(self) -> Any:
        """Raise, take too long in a thread, return what is no JSON, or look."""
        if self.fails():
            return self.rng.choice([self.take_long, self.divide, object, lambda: "x" * 100_000])()
        return "seen"

    def take_long(self) -> None:
        time.sleep(0.4)

    def divide(self) -> float:
        return 1 / 0

    async def reply(self, trajectory: Any) -> Any:
        self.turns += 1
        await self.hang_or_raise("reply") if self.fails(0.5) else None
        if self.fails(0.5):
            return 7
        return "go on" if self.turns < 2 else None

    @reward
    async def right(self, task: Task, trajectory: Any) -> float | None:
        await self.hang_or_raise("the reward")
        return None if self.fails() else self.rng.random()

    @metric
    async def luck(self) -> float:
        await self.hang_or_raise("the metric")
        return math.nan if self.fails() else 1.0

    async def close(self) -> None:
        await self.hang_or_raise("close") if self.fails(0.3) else None


class Engine:
    """Raises, hangs, stalls in mid-answer, returns garbage; and is away altogether for a while."""

    capabilities = Capabilities()
    context_tokens_max, vocabulary_size, version = 2000, 0, 0

    def __init__(self, away: tuple[float, float] = (1.0, 1.4)) -> None:
        self.rng = random.Random(1)
        self.open: set[str] = set()
        self.opened = 0
        self.away = away
        self.began = math.inf

    def open_session(self, order: tuple[int, ...]) -> str:
        self.opened += 1
        self.open.add(f"{order}#{self.opened}")
        return f"{order}#{self.opened}"

    def close_session(self, session: str) -> None:
        self.open.discard(session)

    async def generate(self, request: GenerateRequest) -> Generation:
        await trio.sleep(0.01)
        self.began = min(self.began, trio.current_time())
        start, end = self.away
        if start < trio.current_time() - self.began < end:
            raise InferenceError("the engine is away")
        luck = self.rng.random()
        said = self.rng.choice(DEADLY if luck < 0.01 else BAD if luck < CHANCE else GOOD)
        tokens = [*map(ord, said), END][: request.max_tokens]
        logprobs = [-1.0] * len(tokens)
        if self.rng.random() < CHANCE:
            fate = self.rng.choice(["raise", "hang", "stall", "short", "nan", "long", "bytes"])
            if fate == "raise":
                raise InferenceError("500: out of luck")
            if fate in ("hang", "stall"):
                await trio.sleep(math.inf if fate == "hang" else 0.5)
            if fate == "long":
                tokens = [65] * (request.max_tokens + 1)
            logprobs = [math.nan if fate == "nan" else -1.0] * (len(tokens) - (fate == "short"))
            if fate == "bytes":
                tokens = [self.rng.randrange(200) for _ in tokens]
        return Generation(tokens, logprobs, "stop", [VersionSpan(0, 0, len(tokens))])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Not a process, a file descriptor or a thread more than before."""
    trio.run(trio.to_thread.run_sync, int)
    before = left()
    yield
    deadline = time.monotonic() + 60  # threads that slept past their deadlines, and end by themselves
    while calls.abandoned_count() and time.monotonic() < deadline:
        time.sleep(0.05)
    gc.collect()
    assert left() == before
    assert calls.abandoned_count() == 0


def left() -> tuple[int, int, int]:
    waiting = ("Trio", "rollouts-worker")  # threads that wait for work, and end where none comes
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith(waiting)]
    return len(psutil.Process().children(recursive=True)), psutil.Process().num_fds(), len(threads)


def player(env: Any = Chaos, limits: EpisodeLimits = LIMITS) -> Any:
    chat = FakeChat()

    async def play(job: Job, session: str, inference: Any) -> Any:
        return await run_episode(
            job.task,
            make_env=env,
            chat=chat,
            inference=inference,
            limits=limits,
            rewards=[env_term()],
            session=session,
            order=job.order,
            seed=0,
        )

    return play


@pytest.mark.nightly
def test_a_step_of_two_thousand_rollouts_in_chaos() -> None:
    engine, failures = Engine(), Failures(FailurePolicy(retries=2, pause_seconds=0.3))
    buffer = DataBuffer([Task(f"prompt {number}", id=str(number)) for number in range(PROMPTS)], seed=0)
    manager = AsyncRolloutManager(
        buffer, RolloutConfig(PROMPTS, MEMBERS), play=player(), inference=engine, failures=failures
    )

    async def main() -> Any:
        tools = {each.name: each for each in tools_of(Isolated())}
        await run_tool(tools, ToolCall("double", {"n": 1}))  # the processes' keeper is a task of the whole run
        before = trio.lowlevel.current_statistics().tasks_living
        with trio.fail_after(120):
            step = await manager.generate_batch()
        assert trio.lowlevel.current_statistics().tasks_living == before
        return step

    step = trio.run(main)
    episodes = [episode for group in step.groups for episode in group.episodes]

    assert [each.order for each in episodes] == [(group, i) for group in range(PROMPTS) for i in range(MEMBERS)]
    assert sorted(int(group.task.id) for group in step.groups) == list(range(PROMPTS)), "each prompt once"
    assert all(each.task == group.task for group in step.groups for each in group.episodes)
    counts = manager.statistics
    assert (counts.begun, counts.kept + counts.dropped, counts.carried, counts.in_flight) == (PROMPTS, PROMPTS, 0, 0)
    assert not engine.open and engine.opened == len(episodes) + failures.retried

    for each in episodes:
        assert each.status is not Status.PENDING
        assert not each.status.is_infrastructure or (each.score.value is None and each.trajectory.error)
    for sample in group_samples(step.kept):
        assert not any(sample.loss_mask) or (sample.status is Status.COMPLETED and sample.reward is not None)
        assert all(math.isfinite(value) for value in sample.rollout_log_probs)

    metrics = rollout_metrics(step.groups)
    causes = [f"fail/{status}" for status in ("timeout", "environment_error", "inference_error")]
    causes += ["retried", "retried/environment_error", "retried/inference_error", "reward_failures", "metric_failures"]
    causes += [f"tool_failure/{why}" for why in ("malformed", "unknown_tool", "bad_arguments", "timeout", "crashed")]
    causes += ["tool_failure/exception"]
    assert all(metrics[f"rollout/{cause}"] > 0 for cause in causes), metrics
    assert failures.budget.settled == len(episodes) == PROMPTS * MEMBERS
    assert sum(failures.budget.by_status.values()) == sum(each.status.is_infrastructure for each in episodes)
    reasons = " ".join({each.trajectory.error or "" for each in episodes})
    for words in ("for one turn", "running setup took longer", "running reply", "close took longer", "running close"):
        assert words in reasons
    assert metrics["rollout/infra_fail_frac"] < 0.7, "most of what could be played was"


FAULTS = {
    "hang": 0.02,
    "stall": 0.03,
    "garbage": 0.03,
    "close": 0.03,
    "cut": 0.03,
    "429": 0.03,
    "500": 0.02,
    "400": 0.01,
}


@pytest.mark.parametrize("prompts", [30, pytest.param(PROMPTS, marks=pytest.mark.nightly)])
def test_a_step_with_a_server_in_chaos(prompts: int) -> None:
    """A server in another process, with a connection for each request: one answer in five is none, or half of one; and
    one call in five of the environment fails too.
    """
    look = [*map(ord, "[look {}]"), END]
    failures = Failures(FailurePolicy(retries=2, pause_seconds=0.05))
    buffer = DataBuffer([Task(f"prompt {number}", id=str(number)) for number in range(prompts)], seed=0)

    async def main(url: str) -> Any:
        retries = Retries(3, 0.01, 0.05)
        setup = ServerSetup(vocabulary_size=END + 1, takes_weights=False, request_seconds=1.5, retries=retries)
        engine = Server(VLLM(), url, setup)
        limits = LIMITS._replace(turn_seconds=5.0)
        async with engine:
            manager = AsyncRolloutManager(
                buffer,
                RolloutConfig(prompts, MEMBERS, concurrency=128),
                play=player(limits=limits),
                inference=engine,
                failures=failures,
            )
            with trio.fail_after(240):
                step = await manager.generate_batch()
            assert not engine._requests, "no request is left"
        return step, manager.statistics

    with mock_engine.started(
        call=look, answer=[*map(ord, "go on"), END], calls=2, delay_seconds=0.002, faults=FAULTS
    ) as server:
        step, counts = trio.run(main, server.url)
        seen = server.statistics()
    episodes = [episode for group in step.groups for episode in group.episodes]
    assert [each.order for each in episodes] == [(group, i) for group in range(prompts) for i in range(MEMBERS)]
    assert sorted(int(group.task.id) for group in step.groups) == list(range(prompts)), "each prompt once"
    assert (counts.begun, counts.kept + counts.dropped, counts.carried, counts.in_flight) == (prompts, prompts, 0, 0)
    assert set(seen["faults"]) == set(FAULTS) and sum(seen["faults"].values()) > 0.15 * seen["requests"]
    for sample in group_samples(step.kept):
        assert not any(sample.loss_mask) or (sample.status is Status.COMPLETED and sample.reward is not None)
        sampled = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask > 0]
        assert set(sampled) <= {*look, *map(ord, "go on")}, "half an answer is none"
    metrics = rollout_metrics(step.groups)
    assert metrics["rollout/fail/inference_error"] > 0 and metrics["rollout/retried"] > 0
    assert metrics["rollout/infra_fail_frac"] < 0.7, "most of what could be played was"
    reasons = " ".join({each.trajectory.error or "" for each in episodes if each.status is Status.INFERENCE_ERROR})
    assert "400" in reasons, "what cannot be asked again is told in the server's words"


def test_a_reward_that_is_none_ends_the_run_and_leaves_nothing() -> None:
    class Nonsense(Chaos):
        @reward
        async def right(self, task: Task, trajectory: Any) -> Any:
            return math.nan if self.fails() else 1.0

    engine = Engine()

    async def main() -> None:
        jobs = [Job(Task("prompt"), (group, 0)) for group in range(400)]  # most of them end before their reward
        await run_episodes(jobs, player(Nonsense), engine, failures=Failures())

    with pytest.raises(RewardError, match="right"):
        trio.run(main)
    assert not engine.open


def test_a_run_that_only_fails_is_stopped_with_its_reasons() -> None:
    engine = Engine(away=(0.0, math.inf))

    async def main() -> None:
        jobs = [Job(Task("prompt"), (group, 0)) for group in range(2000)]
        await run_episodes(jobs, player(), engine, failures=Failures(FailurePolicy(1, 0.5, pause_seconds=0.05)))

    with pytest.raises(RunError) as caught:
        trio.run(main)
    assert "of the last" in str(caught.value) and "x inference_error: the engine is away" in str(caught.value)
    assert not engine.open


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_many_episodes_at_once(count: int) -> None:
    """All of them wait for their first answer at the same moment."""

    class Sleeper:
        async def setup(self, task: Task) -> None:
            await trio.sleep(0.01)

        @reward
        async def right(self, trajectory: Any) -> float:
            await trio.sleep(0.01)
            return float(trajectory.last_text == "done")

    class Patient(Engine):
        here = most = 0
        all_here = trio.Event()

        async def generate(self, request: GenerateRequest) -> Generation:
            self.here += 1
            if self.here == count:
                self.all_here.set()
            await self.all_here.wait()
            tokens = [*map(ord, "done"), END]
            return Generation(tokens, [-1.0] * len(tokens), "stop", [VersionSpan(0, 0, len(tokens))])

    async def main() -> Any:
        jobs = [Job(Task("prompt"), (number, 0)) for number in range(count)]
        with trio.fail_after(60):
            return await run_episodes(jobs, play_patiently, Patient(), concurrency=count)

    async def play_patiently(job: Job, session: str, inference: Any) -> Any:
        return await run_episode(
            job.task,
            make_env=Sleeper,
            chat=chat,
            inference=inference,
            limits=EpisodeLimits(),
            rewards=[env_term()],
            session=session,
            order=job.order,
            seed=0,
        )

    chat = FakeChat()
    assert sum(episode.score.value for episode in trio.run(main)) == count
