"""The core environment `prompts`: each row of a file is a task, the model answers once, and you choose the rewards.

    rollouts run --env prompts --data rows.jsonl --reward pkg/f

A row is {"prompt": text or a list of messages, "answer": ..., "id": ...}. Its other keys become the task's `info`.
With a `response` (or `completion`), text or messages, it is a demonstration too. The last turn of {"messages": [...]}
is its response. Not here: tools, an own reward, formats other than .jsonl and .json.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollouts.errors import ConfigError
from rollouts.types import Message, Task


@dataclass
class Prompts:
    """Tasks from the rows of a file: one turn, no tools."""

    data: str = ""  # the rows: a .jsonl file, or a .json file that holds a list
    eval_data: str = ""  # rows for evaluation; without it, a fraction of `data` is held out
    eval_fraction: float = 0.1  # the fraction of rows to hold out, by a hash of the row: the same in every run

    def tasks(self, split: str, rng: random.Random) -> list[Task]:
        """All tasks of the split, "train" or "eval", shuffled by `rng`.

        With `eval_fraction` above 0 and at least two tasks, each split has at least one. Raises ConfigError for a file
        that is missing or malformed (with the line), and for settings out of their range.
        """
        if not self.data:
            raise ConfigError("the environment prompts needs rows: type --data rows.jsonl")
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"--env.eval-fraction {self.eval_fraction}: expected 0 or more, below 1, such as 0.1")
        if self.eval_data:
            chosen = self._read(self.eval_data if split == "eval" else self.data)
        else:
            held_out, rest = split_tasks(self._read(self.data), self.eval_fraction)
            chosen = held_out if split == "eval" else rest
        rng.shuffle(chosen)
        return chosen

    def demonstrations(self, split: str, rng: random.Random) -> list[list[Message]]:
        """The conversations of the split's rows that have a response. Raises ConfigError if there are none."""
        found = [messages for task in self.tasks(split, rng) if (messages := _demonstration(task))]
        if not found:
            shapes = '{"messages": [...]} or {"prompt": "...", "response": "..."}'
            raise ConfigError(f"{self.data} has no demonstrations; a row to learn from is {shapes}")
        return found

    def _read(self, file: str) -> list[Task]:
        return read_tasks(Path(file))


def given_prompts(rows: Mapping[str, bytes]) -> type[Prompts]:
    """The environment `prompts` of a program that gives its rows itself: `rows` are JSON lines, by the value of `data`.

    >>> env = given_prompts({"mine.jsonl": b'{"prompt": "What is 2+2?", "answer": 4}'})("mine.jsonl")
    >>> env.tasks("train", random.Random(0))[0].answer
    4
    """

    @dataclass
    class GivenPrompts(Prompts):
        def _read(self, file: str) -> list[Task]:
            if file not in rows:
                return super()._read(file)
            return _tasks_of(Path(file), _rows_of_text(Path(file), rows[file].decode()))

    GivenPrompts.__name__ = GivenPrompts.__qualname__ = Prompts.__name__
    return GivenPrompts


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
    """The tasks of a .jsonl or .json file, in its order. Raises ConfigError with the file and the line or row."""
    return _tasks_of(path, read_rows(path))


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a .jsonl or .json file, each with its place in words. Raises ConfigError."""
    if path.suffix not in (".jsonl", ".json"):
        given = f"not {path.suffix!r}" if path.suffix else "and a dataset of a hub is saved as such a file first"
        raise ConfigError(f"{path}: rows are in .jsonl (one object a line) or .json (a list), {given}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' editors write a byte order mark
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; type --data PATH-OF-ROWS") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    yield from _rows_of_text(path, text)


def _rows_of_text(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    return _rows_of_lines(path, text) if path.suffix == ".jsonl" else _rows_of_list(path, text)


def _tasks_of(path: Path, rows: Iterable[tuple[str, Any]]) -> list[Task]:
    tasks = [_task_of(where, row) for where, row in rows]
    if not tasks:
        raise ConfigError(f'{path} holds no rows; a row is {{"prompt": "...", "answer": ...}}')
    return tasks


def _rows_of_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines(), which also splits at characters that JSON text may contain, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", _parse(f"{path}, line {number}", line)


def _rows_of_list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    rows = _parse(str(path), text)
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: expected a list of rows, got {type(rows).__name__}; one object a line is .jsonl")
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{where}" if error.lineno == 1 else f"{where}, line {error.lineno}"
        row = 'a row is {"prompt": "...", "answer": ...}'
        raise ConfigError(f"{place}: not JSON: {error.msg} (column {error.colno}); {row}") from error


def _task_of(where: str, row: Any) -> Task:
    if isinstance(row, dict) and "messages" in row and "prompt" not in row:
        row = _with_prompt(row)
    if not isinstance(row, dict) or "prompt" not in row:
        found = f"the keys {', '.join(sorted(row)) or '(none)'}" if isinstance(row, dict) else type(row).__name__
        raise ConfigError(f'{where}: a row is {{"prompt": text or messages, "answer": ..., "id": ...}}, got {found}')
    prompt = row["prompt"]
    try:
        messages = prompt if isinstance(prompt, str) else msgspec.convert(prompt, list[Message])
    except msgspec.ValidationError as error:
        raise ConfigError(f'{where}: "prompt" is text or a list of {{"role", "content"}} messages: {error}') from error
    if not messages:
        raise ConfigError(f'{where}: "prompt" is empty')
    identity = row.get("id")
    info = {key: value for key, value in row.items() if key not in ("prompt", "answer", "id")}
    return Task(messages, row.get("answer"), info, None if identity is None else str(identity))


def _with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `messages` as `prompt` and `response`: what comes before the assistant's last turn, and the rest."""
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return row
    last = max((at for at, each in enumerate(messages) if each.get("role") == "assistant"), default=len(messages))
    rest = {key: value for key, value in row.items() if key != "messages"}
    return {"prompt": messages[:last], **({"response": messages[last:]} if messages[last:] else {}), **rest}


def _demonstration(task: Task) -> list[Message]:
    """The task's messages and its response; empty if it has none. Raises ConfigError."""
    reply = task.info.get("response", task.info.get("completion"))
    try:
        replies = (
            [Message("assistant", reply)] if isinstance(reply, str) else msgspec.convert(reply or [], list[Message])
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"the row of {task.key}: a response is text or messages: {error}") from error
    return [*task.messages, *replies] if replies else []


def _unit_hash(key: str) -> float:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
