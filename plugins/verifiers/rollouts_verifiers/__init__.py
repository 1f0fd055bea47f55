"""Tasksets of verifiers 0.4 as environments: `--env verifiers/my-taskset --env.config.KEY VALUE`.

A task is one of the taskset's. Upstream's own rollout plays and scores it: its hooks, its tool servers, its chat
program. The model of the run is its model.

    catalog     which tasksets there are, how upstream's environment is made, and why one cannot be served
    serving     upstream's environment while it is served
    programs    harnesses, which are programs: the address that they ask, and why one cannot play
    client      the model as upstream's client, and messages in both forms
    hooks       the names, for `rollouts`

`rollouts_verifiers_harness` beside it runs upstream's chat program.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from rollouts import Message, Score, Task, Trajectory, metric, reward
from rollouts.errors import ConfigError
from rollouts_verifiers import catalog
from rollouts_verifiers.serving import Served, serving

if TYPE_CHECKING:
    from rollouts.agent.on_asyncio import AsyncioModel
    from rollouts.gateway.endpoint import Endpoint

__all__ = ["Verifiers", "environment_of"]


@dataclass
class Verifiers:
    """A taskset of verifiers."""

    taskset: ClassVar[str] = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of the taskset's own config
    harness: str = ""  # the program that plays, such as bash; empty: a chat loop in this process
    harness_config: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of the harness's own config

    def __post_init__(self) -> None:
        catalog.check(self.taskset, self.config, self.harness, self.harness_config)
        self._trace: Any = None

    async def shared(self) -> AsyncIterator[Served]:
        """The taskset, and the servers that all of its tasks share."""
        env = catalog.make(self.taskset, self.config, self.harness, self.harness_config)
        async with serving(env, has_harness=bool(self.harness)) as served:
            yield served
            await asyncio.sleep(0)

    def tasks(self, split: str, rng: random.Random, shared: Served) -> Sequence[Task] | Iterator[Task]:
        """The tasks of the taskset. Both splits have the same ones, of which the run holds some out."""
        found = (self._task_of(each, index) for index, each in enumerate(shared.tasks()))
        return list(found) if shared.is_finite else found

    def setup(self, task: Task, shared: Served) -> None:
        self._served, self._task = shared, shared.task(task.info["idx"])
        if self._task_of(self._task, task.info["idx"]).prompt != task.prompt:
            raise RuntimeError(
                f"task {task.info['idx']} of verifiers/{self.taskset} differs from that of the run: the taskset "
                "does not load the same tasks each time"
            )

    async def rollout(self, task: Task, model: Any) -> Trajectory | None:
        """Let upstream play and score the task. Returns the conversation with the last reply."""
        from rollouts.agent.on_asyncio import play_on_asyncio

        if not self.harness:
            await play_on_asyncio(model, self._play)
            return None
        async with model.serve() as endpoint:
            await play_on_asyncio(model, functools.partial(self._play_program, endpoint, model))
        last: Trajectory | None = model.trajectory
        return last

    async def _play(self, model: AsyncioModel) -> None:
        self._keep(await self._served.play(self._task, model))

    async def _play_program(self, endpoint: Endpoint, model: Any, _: AsyncioModel) -> None:
        def limit() -> str:
            return "max_output_tokens" if model.turns_left else "max_turns"

        self._keep(await self._served.play_program(self._task, endpoint, limit))

    def _keep(self, episode: Any) -> None:
        """Keep upstream's trace. Raises RuntimeError if the rollout failed."""
        if len(episode.traces) > 1:
            raise RuntimeError(f"verifiers/{self.taskset} played a task {len(episode.traces)} times in one episode")
        self._trace = episode.traces[0] if episode.traces else None
        if self._trace is None or not (self._trace.ok or _is_scoring(self._trace)) or episode.errors:
            errors = [*(self._trace.errors if self._trace is not None else []), *episode.errors]
            said = errors[0] if errors else None
            raise RuntimeError(f"verifiers/{self.taskset}: {said.type}: {said.message}" if said else "no rollout ended")

    @reward
    def score(self) -> Score:
        """Upstream's reward: the weighted sum of the task's rewards."""
        if self._trace is None:
            return Score(None, why="upstream's rollout did not end")
        rewards, metrics = self._trace.rewards, self._trace.metrics
        parts = {name: None if each is None else each.score for name, each in rewards.items()} | metrics
        if not self._trace.ok:
            return Score(None, parts, self._trace.errors[-1].message)
        if not rewards:
            return Score(None, parts, "the task has no reward")
        weights = {name: each.weight for name, each in rewards.items()}
        return Score(self._trace.reward, parts, str(self._trace.stop_condition or ""), weights)

    @metric
    def cut_off(self) -> float:
        """1 if upstream counts the rollout as truncated."""
        return float(self._trace is not None and self._trace.is_truncated)

    def _task_of(self, task: Any, index: int) -> Task:
        data = task.data
        if data.image is not None:
            raise ConfigError(
                f"verifiers/{self.taskset} cannot be served: task {index} needs a container of the image {data.image}"
            )
        answer = getattr(data, "answer", None)
        plain = answer if isinstance(answer, str | int | float | bool) else None
        return Task(_prompt(data), plain, {"idx": index}, data.id or f"{index}-{task.key[:12]}")


def _prompt(data: Any) -> list[Message]:
    """The first messages of a task. Without a prompt, the environment opens the conversation."""
    from rollouts_verifiers.client import own_message

    system = [] if data.system_prompt is None else [Message("system", data.system_prompt)]
    if data.prompt is None:
        return [*system, Message("user", data.description or data.name or "")]
    said = [Message("user", data.prompt)] if isinstance(data.prompt, str) else data.prompt
    return [*system, *(each if isinstance(each, Message) else own_message(each, {}) for each in said)]


def _is_scoring(trace: Any) -> bool:
    """Whether a rollout failed in its scoring only."""
    return bool(trace.timing.scoring.start)


@functools.cache
def environment_of(taskset: str) -> type[Verifiers] | None:
    """The environment of a taskset; None if no module of its name is installed, or upstream is another version."""
    if find_spec("verifiers.v1") is None or not catalog.is_installed(taskset):
        return None
    title = "".join(part.capitalize() for part in catalog.module_of(taskset).split("_"))
    docstring = f"{taskset}, a taskset of verifiers."
    return type(title, (Verifiers,), {"taskset": taskset, "__doc__": docstring, "__module__": __name__})
