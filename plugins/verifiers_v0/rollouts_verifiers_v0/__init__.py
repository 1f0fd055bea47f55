"""Environment packages of verifiers up to 0.3 as environments: `--env verifiers-v0/my-env --env.args.KEY VALUE`.

A task is a row of the package's dataset. Upstream's own loop plays the episode, with the model of the run as its
client, and upstream's rubric judges it.

    catalog     which packages there are, how one is loaded, and why one cannot be served
    client      the model as upstream's client, and messages in both forms
    verdicts    reward functions that raise
    hooks       the names, for `rollouts`
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, overload

from rollouts import Message, Score, Task, metric, reward
from rollouts_verifiers_v0 import catalog
from rollouts_verifiers_v0.verdicts import failures

if TYPE_CHECKING:
    from rollouts.agent.on_asyncio import AsyncioModel

__all__ = ["VerifiersV0", "environment_of"]

MODEL = "policy"
"""The name of the run's model in upstream's state."""


@dataclass
class VerifiersV0:
    """An environment package of verifiers."""

    package: ClassVar[str] = ""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)  # the arguments of load_environment

    def __post_init__(self) -> None:
        self._upstream = catalog.load(self.package, self.args)
        self._state: dict[str, Any] = {}
        self._failures: list[str] = []

    async def shared(self) -> AsyncIterator[Any]:
        """Upstream's environment, for all episodes."""
        yield self._upstream
        await asyncio.shield(self._upstream._teardown())

    def tasks(self, split: str, rng: random.Random, shared: Any) -> Sequence[Task]:
        """The rows of the dataset of this split; of the other one if the package has only that."""
        own = "dataset" if split == "train" else "eval_dataset"
        other = "eval_dataset" if split == "train" else "dataset"
        name = own if _dataset(shared, own) is not None else other
        return _Rows(_dataset(shared, name), name)

    def setup(self, task: Task, shared: Any) -> None:
        dataset = _dataset(shared, task.info["dataset"])
        self._row = dataset[task.info["index"]]
        if _task_of(self._row, task.info["dataset"], task.info["index"]).prompt != task.prompt:
            raise RuntimeError(
                f"row {task.info['index']} of verifiers-v0/{self.package} differs from the task: its dataset is "
                "not the same each time that it is loaded"
            )

    async def rollout(self, task: Task, model: Any) -> None:
        """Let upstream's loop play, and its rubric judge."""
        from rollouts.agent.on_asyncio import play_on_asyncio

        await play_on_asyncio(model, self._play)

    async def _play(self, model: AsyncioModel) -> None:
        from rollouts_verifiers_v0.client import PolicyClient

        env, row = self._upstream, self._row
        while hasattr(env, "env_map"):  # upstream's group plays a row in the environment that it names
            name, row, _ = env._route_child_input(row)
            env = env.get_env_for_name(name)
        failures.set(self._failures)
        state = await env._run_rollout_state(row, PolicyClient(model), MODEL, dict(env.sampling_args))
        self._state = state
        if state.get("error") is not None:
            raise RuntimeError(f"verifiers-v0/{self.package} ended the rollout: {_words(state['error'])}")

    @reward
    def rubric(self) -> Score:
        """Upstream's reward: the weighted sum of the rubric's functions."""
        parts = {name: float(value) for name, value in (self._state.get("metrics") or {}).items()}
        if self._failures:
            return Score(None, parts, "; ".join(self._failures))
        value = self._state.get("reward")
        why = str(self._state.get("stop_condition") or "")
        return Score(None if value is None else float(value), parts, why)

    @metric
    def cut_off(self) -> float:
        """1 if upstream counts the rollout as truncated."""
        return float(bool(self._state.get("is_truncated")))


class _Rows(Sequence[Task]):
    """The rows of a dataset as tasks, each made when it is read."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset, name

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return _task_of(self._dataset[index], self._name, index)


def _dataset(env: Any, name: str) -> Any:
    """Upstream's dataset of this name, built; None if it has none."""
    return env.build_dataset() if name == "dataset" else env.build_eval_dataset()


def _task_of(row: dict[str, Any], dataset: str, index: int) -> Task:
    from rollouts_verifiers_v0.client import prompt_of

    prompt: list[Message] = prompt_of(row)
    answer = row.get("answer")
    plain = answer if isinstance(answer, str | int | float | bool) else None
    return Task(prompt, plain, {"dataset": dataset, "index": index}, f"{dataset}-{index}")


def _words(error: BaseException) -> str:
    """An error and its cause."""
    cause = error.__cause__
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return said if cause is None else f"{said} ({type(cause).__name__}: {cause})"


@functools.cache
def environment_of(package: str) -> type[VerifiersV0] | None:
    """The environment of a package; None if no module of its name is installed, or upstream is another version."""
    if find_spec("verifiers.legacy") is None or not catalog.is_installed(package):
        return None
    title = "".join(part.capitalize() for part in catalog.module_of(package).split("_"))
    docstring = f"{package}, an environment package of verifiers."
    return type(title, (VerifiersV0,), {"package": package, "__doc__": docstring, "__module__": __name__})
