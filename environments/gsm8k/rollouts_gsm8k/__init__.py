"""Word problems of grade school, in the format of GSM8K: a question, and a solution that ends with `#### 42`.

The package has a sample of its own, which needs no network. `--env.source openai/gsm8k` reads the whole data set from
the hub, through `datasets`, and any other name or file of the same format works too. The reward is 1 if the last number
of the last message is the answer.

    rollouts run --env gsm8k --env.source openai/gsm8k --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.data.loaders import load_hub
from rollouts.env import reward
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory

__all__ = ["GSM8K", "last_number"]

SAMPLE = "sample"
COLUMNS = ("question", "answer")


@dataclass
class GSM8K:
    """Word problems of grade school."""

    source: str = SAMPLE  # sample, a name on the hub, or a JSONL or Parquet file
    config: str = "main"  # the configuration of a data set on the hub
    revision: str = "main"  # its branch, tag or commit
    instruction: str = "End with the answer after ####."  # added to each question

    reward_range = (0.0, 1.0)

    def tasks(self, split: str, rng: random.Random) -> list[Task]:
        """The questions of the split. The split `eval` is the data set's `test`; of a file, a fifth of the rows."""
        return [task for task, _ in self._rows(split)]

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """The solutions of the data set."""
        for task, solution in self._rows(split):
            yield [*task.messages, Message("assistant", solution)]

    @reward
    def correct(self, task: Task, trajectory: Trajectory) -> float:
        """1 if the last number of the last message is the answer, else 0."""
        return float(last_number(trajectory.last_text) == float(task.answer))

    def _rows(self, split: str) -> list[tuple[Task, str]]:
        """Each task of the split, with its solution. Raises ConfigError for rows of another format."""
        found = []
        for index, row in enumerate(self._load(split)):
            missing = [name for name in COLUMNS if not isinstance(row.get(name), str)]
            if missing:
                raise ConfigError(
                    f"--env.source {self.source}: row {index} has no text {missing[0]!r}; it has {', '.join(row)}"
                )
            number = last_number(row["answer"])
            if number is None:
                raise ConfigError(f"--env.source {self.source}: the answer of row {index} has no number")
            text = f"{row['question'].strip()}\n{self.instruction}".strip()
            found.append((Task(text, answer=number), row["answer"]))
        return found

    def _load(self, split: str) -> list[dict[str, Any]]:
        import datasets

        path = Path(__file__).parent / "sample.jsonl" if self.source == SAMPLE else Path(self.source)
        part = "test" if split == "eval" else "train"
        if path.suffix in (".jsonl", ".json", ".parquet"):
            if not path.is_file():
                raise ConfigError(f"--env.source {self.source}: there is no such file")
            kind = "parquet" if path.suffix == ".parquet" else "json"
            rows = list(datasets.load_dataset(kind, data_files=str(path), split="train"))
            return [row for index, row in enumerate(rows) if (index % 5 == 0) == (split == "eval")]
        try:
            return list(load_hub(self.source, self.config, split=part, revision=self.revision))
        except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
            raise ConfigError(
                f"--env.source {self.source}: {' '.join(str(error).split())[:300]}\n"
                f"expected {SAMPLE}, a name on the hub such as openai/gsm8k, or a .jsonl or .parquet file"
            ) from None


def last_number(text: str) -> float | None:
    """The last number of a text, with or without commas; None if it has none.

    >>> last_number("She pays 1,250 dollars.\\n#### 1,250")
    1250.0
    """
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None
