"""The core environment `prompts`: each row of a file is a task, the model answers once, and you choose the rewards.

    rollouts run --env prompts --data rows.jsonl --reward pkg/f

A row is {"prompt": text or a list of messages, "answer": ..., "id": ...}. Its other keys become the task's `info`.
With a `response` (or `completion`), text or messages, it is a demonstration too. The last turn of a conversation is its
response (`rollouts.data.conversations`). Not here: tools, an own reward, reading files (`rollouts.data`).
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from rollouts.data.conversations import ROLES, BadRowError, read_conversation, read_message
from rollouts.data.loaders import NotARow
from rollouts.data.source import open_rows, require_file
from rollouts.env.advice import EnvironmentWarning
from rollouts.errors import ConfigError, counted, first_line, in_lines
from rollouts.types import Message, Task

Data = str | dict[str, Any]
"""What `--data` names: rows.jsonl; or a table with this as its `name`, and with settings."""

PROMPT_COLUMNS = ("question", "problem", "query", "instruction", "input", "text")
ANSWER_COLUMNS = ("answer", "solution", "target", "label", "output")
CONVERSATION_COLUMNS = ("messages", "conversations", "instruction", "input", "output", "question", "history", "system")


@dataclass
class Prompts:
    """Tasks from rows: one turn, no tools."""

    _own_name = "prompts"
    _given: ClassVar[Mapping[str, bytes]] = {}  # rows of a program, as JSON lines

    data: str | dict[str, Any] = ""  # the rows: a file, a folder, OWNER/NAME of a hub, or LOADER:SOURCE
    eval_data: str | dict[str, Any] = ""  # rows for evaluation; without them, a fraction of `data` is held out
    eval_fraction: float = 0.1  # the fraction of rows to hold out, by a hash of the row: the same in every run

    def tasks(self, split: str, rng: random.Random) -> list[Task] | Iterator[Task]:
        """All tasks of the split, "train" or "eval", shuffled by `rng`; of data with `streaming`, in their order while
        they are read.

        With `eval_fraction` above 0 and at least two tasks, each split has at least one, unless the data is streamed.
        Raises ConfigError for data that is missing or malformed (with the row), and for settings out of their range.
        """
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"--env.eval-fraction {self.eval_fraction}: expected 0 or more, below 1, such as 0.1")
        self.check_data()
        data = self.eval_data if self.eval_data and split == "eval" else self.data
        divides = not self.eval_data
        if isinstance(data, dict) and data.get("streaming"):
            return (task for task in self._read(data) if not divides or self._is_held_out(task) == (split == "eval"))
        chosen = self._all(data)
        if divides:
            held_out, rest = split_tasks(chosen, self.eval_fraction)
            chosen = held_out if split == "eval" else rest
        rng.shuffle(chosen)
        return chosen

    def check_data(self) -> None:
        """Raise ConfigError if no rows are named, or if their file is not there. Nothing is read."""
        if not self.data:
            raise ConfigError(f"the environment {self._own_name} needs rows: type --data rows.jsonl")
        for data in (self.data, self.eval_data):
            if data and _name(data) not in self._given:
                require_file(data)

    def demonstrations(self, split: str, rng: random.Random) -> list[list[Message]]:
        """The conversations of the split's rows that have a response. Raises ConfigError if there are none."""
        found = [messages for task in self.tasks(split, rng) if (messages := _demonstration(task))]
        if not found:
            shapes = '{"messages": [...]} or {"prompt": "...", "response": "..."}'
            raise ConfigError(f"{_name(self.data)} has no demonstrations; a row to learn from is {shapes}")
        return found

    def _is_held_out(self, task: Task) -> bool:
        return _unit_hash(task.key) < self.eval_fraction

    def _all(self, data: Data) -> list[Task]:
        if tasks := list(self._read(data)):
            return tasks
        raise ConfigError(f'{_name(data)} holds no rows; a row is {{"prompt": "...", "answer": ...}}')

    def _read(self, data: Data) -> Iterator[Task]:
        """The tasks of the rows, in their order. Raises ConfigError with the place of a row that is no task; with
        `bad_rows = "skip"`, these are left out, and a warning says how many.
        """
        skips, skipped = isinstance(data, dict) and data.get("bad_rows") == "skip", 0
        sample = ""
        for place, row in open_rows(data, lines=self._given.get(_name(data))):
            try:
                yield _task_of(place, row)
            except ConfigError as error:
                if not skips:
                    raise
                skipped, sample = skipped + 1, sample or first_line(error)
        if skipped:
            warnings.warn(
                f"{_name(data)}: {counted(skipped, 'row')} skipped, such as: {sample}", EnvironmentWarning, stacklevel=2
            )


def _name(data: Data) -> str:
    return data if isinstance(data, str) else str(data.get("name"))


def given_prompts(rows: Mapping[str, bytes]) -> type[Prompts]:
    """The environment `prompts` of a program that gives its rows itself: `rows` are JSON lines, by the value of `data`.

    >>> env = given_prompts({"mine.jsonl": b'{"prompt": "What is 2+2?", "answer": 4}'})("mine.jsonl")
    >>> env.tasks("train", random.Random(0))[0].answer
    4
    """

    return type(Prompts.__name__, (Prompts,), {"__module__": __name__, "__doc__": Prompts.__doc__, "_given": rows})


def split_tasks(tasks: list[Task], fraction: float) -> tuple[list[Task], list[Task]]:
    """(held-out tasks, all other tasks), by a hash of each task's key. Rows with the same id or prompt stay
    together.
    """
    place = {task.key: _unit_hash(task.key) for task in tasks}
    held_out = {key for key, value in place.items() if value < fraction}
    if fraction > 0 and len(place) > 1:
        if not held_out:
            held_out = {min(place, key=lambda key: place[key])}
        elif len(held_out) == len(place):
            held_out.remove(max(place, key=lambda key: place[key]))
    return [t for t in tasks if t.key in held_out], [t for t in tasks if t.key not in held_out]


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file, in its order. Raises ConfigError with the file and the line or row."""
    return Prompts()._all(str(path))


def _task_of(place: str, row: Any) -> Task:
    if isinstance(row, NotARow):
        raise ConfigError(f'{place}: {row.why}; a row is {{"prompt": "...", "answer": ...}}')
    given = row
    if isinstance(row, dict) and "prompt" not in row:
        row = _with_prompt(place, row)
    if not isinstance(row, dict) or "prompt" not in row:
        found = f"the keys {', '.join(sorted(given)) or '(none)'}" if isinstance(given, dict) else type(given).__name__
        raise ConfigError(
            in_lines(
                f'{place}: a row is {{"prompt": text or messages, "answer": ..., "id": ...}}, got {found}',
                f"to choose the columns, type: {_columns(given)}" if isinstance(given, dict) and given else "",
            )
        )
    prompt = _text_of(row["prompt"])
    try:
        messages = prompt if isinstance(prompt, str) else _messages(prompt)
    except (msgspec.ValidationError, BadRowError) as error:
        raise ConfigError(f'{place}: "prompt" is text or a list of {{"role", "content"}} messages: {error}') from error
    if not messages:
        raise ConfigError(f'{place}: "prompt" is empty')
    identity = row.get("id")
    info = {key: value for key, value in row.items() if key not in ("prompt", "answer", "id")}
    return Task(messages, row.get("answer"), info, None if identity is None else str(identity))


def _with_prompt(place: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row that is a conversation as `prompt` and `response`: what comes before the assistant's last turn, and the
    rest. A row without a conversation is returned unchanged. Raises ConfigError for a bad conversation.
    """
    try:
        conversation = read_conversation(row, keeps_parts=True)
    except BadRowError as error:
        if "messages" in row or "conversations" in row:
            raise ConfigError(f"{place}: {error}") from error
        return row
    messages = conversation.messages
    last = max((at for at, each in enumerate(messages) if each.role == "assistant"), default=len(messages))
    rest = {key: value for key, value in row.items() if key not in CONVERSATION_COLUMNS}
    return {"prompt": messages[:last], **({"response": messages[last:]} if messages[last:] else {}), **rest}


def _columns(row: Mapping[str, Any]) -> str:
    """The flags that would choose the columns of a row, as far as their names say it."""
    prompt = next((name for name in PROMPT_COLUMNS if name in row), "COLUMN")
    answer = next((name for name in ANSWER_COLUMNS if name in row), "")
    return f"--data.prompt {prompt}" + (f" --data.answer {answer}" if answer else "")


def _demonstration(task: Task) -> list[Message]:
    """The task's messages and its response; empty if it has none. Raises ConfigError."""
    reply = _text_of(task.info.get("response", task.info.get("completion")))
    try:
        replies = [Message("assistant", reply)] if isinstance(reply, str) else _messages(reply or [])
    except (msgspec.ValidationError, BadRowError) as error:
        raise ConfigError(f"the row of {task.key}: a response is text or messages: {error}") from error
    return [*task.messages, *replies] if replies else []


def _messages(given: Any) -> list[Message]:
    """Messages in the words of any API. A role that only some templates know is kept. Raises BadRowError and
    ValidationError.
    """
    turns = given if isinstance(given, list) else msgspec.convert(given, list[Any])
    return [
        read_message(turn, keeps_parts=True)
        if isinstance(turn, Message) or (isinstance(turn, dict) and turn.get("role") in set(ROLES.values()))
        else msgspec.convert(turn, Message)
        for turn in turns
    ]


def _text_of(value: Any) -> Any:
    """A number as text: a table of text, such as CSV, gives numbers for text of digits."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _unit_hash(key: str) -> float:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
