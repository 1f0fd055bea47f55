"""Fakes of an engine that decodes a token a second and of a trainer that takes its time, in trio's own time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import trio
import trio.testing
from agent_fakes import END, FakeChat
from backend_fakes import BackendFields

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.env import reward
from rollouts.env.mixing import env_term
from rollouts.inference.base import Capabilities, GenerateRequest, Generation, VersionSpan
from rollouts.training.algorithms.recipes import GRPO
from rollouts.training.batches import StepResult
from rollouts.types import Sample

__all__ = ["GRPO", "LONG", "LateBackend", "Plain", "TokenEngine", "live_versions", "player", "token", "under_trio"]

LONG = EpisodeLimits(max_tokens=400, max_turns=5, episode_seconds=1000.0)


def token(seed: int, number: int) -> int:
    """What is sampled as token `number` of a reply: a function of its seed alone, as with frozen weights."""
    return 97 + random.Random(f"{seed}/{number}").randrange(26)


class TokenEngine:
    """A second a token; says `length(order)` tokens, then ends. It can give back what it has."""

    capabilities = Capabilities(in_process=True, aborts=True)
    context_tokens_max, vocabulary_size = 100_000, 0

    def __init__(self, length: Callable[[tuple[int, ...]], int]) -> None:
        self.length, self.version = length, 0
        self.sessions: dict[str, tuple[int, ...]] = {}
        self.stops: dict[str, trio.Event] = {}
        self.requests: list[GenerateRequest] = []
        self.opened = self.most = 0

    def open_session(self, order):
        self.opened += 1
        name = f"{order}#{self.opened}"
        self.sessions[name] = order
        self.most = max(self.most, len(self.sessions))
        return name

    def close_session(self, session):
        self.sessions.pop(session, None)

    async def update_weights(self, update):
        self.version = update.version

    async def abort(self, session):
        if session in self.stops:
            self.stops[session].set()

    async def generate(self, request):
        assert request.session in self.sessions, "nobody speaks without an open session"
        assert request.session not in self.stops
        self.requests.append(request)
        stop = self.stops[request.session] = trio.Event()
        whole = self.length(request.order)
        tokens: list[int] = []
        finish = "abort"
        version = self.version
        try:
            with trio.CancelScope() as scope:
                while finish == "abort":
                    with trio.move_on_after(1):
                        await stop.wait()
                        scope.cancel()
                    if stop.is_set():
                        break
                    number = request.offset + len(tokens)
                    tokens.append(END if number == whole - 1 else token(request.seed, number))
                    finish = "stop" if tokens[-1] == END else "length" if len(tokens) == request.max_tokens else finish
        finally:
            del self.stops[request.session]
        return Generation(
            tokens, [-0.5] * len(tokens), finish, [VersionSpan(version, 0, len(tokens))] if tokens else []
        )


class Plain:
    """No tools; the reward is the length of what was said. `open` counts environments that are not closed.

    Nothing here runs in a thread: the clock of the tests jumps ahead wherever all tasks wait.
    """

    open = 0

    async def setup(self, task):
        Plain.open += 1

    async def close(self):
        Plain.open -= 1

    @reward
    async def said(self, trajectory: Any) -> float:
        return float(len(trajectory.last_text))


def player(env: Any = Plain, limits: EpisodeLimits = LONG, seed: int = 7) -> Any:
    async def make():
        return env()

    async def play(job, session, inference):
        return await run_episode(
            job.task, make_env=make, chat=FakeChat(), inference=inference, limits=limits, rewards=[env_term()],
            session=session, order=job.order, seed=seed,
        )  # fmt: skip

    return play


def under_trio(body: Callable[[], Any]) -> Any:
    """Run it under a clock that jumps ahead wherever all tasks wait."""
    return trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0))


def live_versions(samples: Sequence[Sample]) -> Iterator[int]:
    """The versions of the tokens that are trained on."""
    for sample in samples:
        assert sample.policy_versions is not None
        yield from (v for v, mask in zip(sample.policy_versions, sample.loss_mask, strict=True) if mask > 0)


class LateBackend(BackendFields):
    """A training backend: an optimizer step takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.version, self.seconds = 0, seconds

    def forward_backward(self, batch: Any) -> Any:
        return _Later(0.0, lambda: {"policy/loss": 0.5})

    def optim_step(self) -> Any:
        return _Later(self.seconds, self._step)

    def _step(self) -> StepResult:
        self.version += 1
        return StepResult({"optim/skipped": 0.0}, self.version)


class _Later:
    """A future of trio's own time."""

    def __init__(self, seconds: float, result: Callable[[], Any]) -> None:
        self._seconds, self._result = seconds, result

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        await trio.sleep(self._seconds)
        return self._result()
