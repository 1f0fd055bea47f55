"""The data sets of reasoning-gym as environments: `--env reasoning_gym/chain_sum`.

A task is an entry of a data set. The model answers in one turn, and upstream's `score_answer` is the reward. A task
holds the seed and the index of its entry, from which an episode generates the entry again: its metadata is not always
JSON.

    answers     the answer in a reply, and which answers upstream may evaluate
    entries     upstream's data sets, their configs and entries
    hooks       the names, for `rollouts`
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rollouts import Message, Task, Trajectory, metric, reward
from rollouts.errors import ConfigError
from rollouts_reasoning_gym import entries
from rollouts_reasoning_gym.answers import INSTRUCTIONS, Format, answer_in, is_harmless, reply_with
from rollouts_reasoning_gym.entries import Entries

__all__ = ["ReasoningGym", "environment_of"]

SEEDS = 2**32


@dataclass
class ReasoningGym:
    """A data set of reasoning-gym."""

    data_set: ClassVar[str] = ""
    size: int = 500  # as many entries have one seed
    seed: int | None = None  # exactly upstream's data set of this seed and size; none: the run draws seeds
    level: int | None = None  # a level of the data set's curriculum, from 0; `config` takes precedence
    answer_format: Format = "tags"  # where the answer is: between <answer> tags, or in the last line
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of the data set's own config

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"--env.size {self.size}: expected at least 1")
        if self.seed is not None and not 0 <= self.seed < SEEDS:
            raise ConfigError(f"--env.seed {self.seed}: expected 0 to {SEEDS - 1}")
        self._upstream_config = entries.config_of(self.data_set, self.config, self.level)
        entries.check_hash_seed(self.data_set, self._upstream_config)

    def shared(self) -> Entries:
        """The data sets and the entries that were generated last, for all episodes."""
        return Entries(self.data_set, self._upstream_config, self.size)

    def tasks(self, split: str, rng: random.Random, shared: Entries) -> Iterator[Task]:
        """Each entry of a data set, then those of the next seed. With a fixed seed, they end."""
        for seed in self._seeds(rng):
            for index in range(self.size):
                entry = shared.entry(seed, index)
                yield Task(self._prompt(entry), entries.oracle_of(entry), {"seed": seed, "index": index})

    def setup(self, task: Task, shared: Entries) -> None:
        seed, index = task.info["seed"], task.info["index"]
        self._is_unreadable = False
        self._data_set, self._entry = shared.data_set(seed), shared.entry(seed, index)
        if self._prompt(self._entry) != task.prompt:
            raise RuntimeError(
                f"entry {index} of reasoning_gym/{self.data_set} with seed {seed} differs from that of the task; "
                "type PYTHONHASHSEED=0 before the command"
            )

    @reward
    def score(self, trajectory: Trajectory) -> float:
        """Upstream's score of the answer; 0 if it cannot read the answer."""
        try:
            value = float(self._data_set.score_answer(self._answer(trajectory), self._entry))
        except Exception:  # some scorers raise for an answer in another form: the metric `unreadable` counts these
            self._is_unreadable = True
            return 0.0
        self._is_unreadable = False
        return value

    @metric
    def unreadable(self) -> float:
        """1 if upstream's scorer raised."""
        return float(self._is_unreadable)

    @metric
    def answered(self, trajectory: Trajectory) -> float:
        """1 if the reply has an answer in the format."""
        return float(bool(self._answer(trajectory)))

    def _answer(self, trajectory: Trajectory) -> str | None:
        """The answer in the last message; None if there is none, or none that upstream may evaluate."""
        answer = answer_in(trajectory.last_text, self.answer_format)
        data_set = self._entry["metadata"].get("source_dataset", self.data_set)
        return answer if answer is not None and is_harmless(answer, data_set) else None

    def _prompt(self, entry: dict[str, Any]) -> str:
        if self.answer_format == "last_line" and "\n" in (entries.oracle_of(entry) or ""):
            raise ConfigError(
                f"--env.answer-format last_line: the answers of reasoning_gym/{self.data_set} have several lines; "
                "type --env.answer-format tags"
            )
        return f"{entry['question'].rstrip()}\n{INSTRUCTIONS[self.answer_format]}"

    def _seeds(self, rng: random.Random) -> Iterator[int]:
        """The fixed seed, or endless ones."""
        return iter([self.seed]) if self.seed is not None else (rng.randrange(SEEDS) for _ in itertools.count())


class SolvedReasoningGym(ReasoningGym):
    """A data set of reasoning-gym with upstream's answers as demonstrations."""

    def demonstrations(self, split: str, rng: random.Random, shared: Entries) -> Iterator[list[Message]]:
        """Upstream's own answer for each task."""
        for task in self.tasks(split, rng, shared):
            reply = Message("assistant", reply_with(task.answer, self.answer_format))
            yield [*task.messages, reply]


@functools.cache
def environment_of(name: str) -> type[ReasoningGym] | None:
    """The environment of a data set; None if upstream has no data set of this name."""
    registered = entries.factory().DATASETS
    if name not in registered:
        return None
    base = ReasoningGym if name in entries.UNSOLVED else SolvedReasoningGym
    docstring = f"{entries.about(name)}."
    title = "".join(part.capitalize() for part in name.split("_"))
    return type(title, (base,), {"data_set": name, "__doc__": docstring, "__module__": __name__})
