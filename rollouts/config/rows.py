"""Prompts that Python code gave, as the rows of a file: texts, lists of messages, Tasks, or rows (dicts)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from rollouts.author_code import authors_code, shown, why_no_list
from rollouts.config.names import GIVEN_ROWS
from rollouts.errors import ConfigError, RolloutsError, words_of
from rollouts.types import Message, Task

OWN_KEYS = ("prompt", "answer", "id")
"""The keys of a row that do not become the task's `info`."""

_EXPECTED = "a prompt is a text, a list of messages, a Task, or a row such as {'prompt': 'What is 2+2?', 'answer': 4}"


def rows_of(prompts: Any) -> tuple[str, bytes]:
    """The prompts as JSON lines, and the name of their file in the folder of a run. Raises ConfigError.

    >>> rows_of(["What is 2+2?"])
    ('code/prompts_d842d630.jsonl', b'{"prompt":"What is 2+2?"}\\n')
    """
    if why_no_list(prompts):
        file = "\nto read a file of rows: data='rows.jsonl'" if isinstance(prompts, str) else ""
        raise ConfigError(f"prompts: expected a list of prompts; got {shown(prompts)}\n{_EXPECTED}{file}")
    try:
        with authors_code():
            given = list(prompts)
    except RolloutsError:
        raise
    except Exception as error:  # a generator may raise anything
        raise ConfigError(f"prompts: they cannot be read to the end: {words_of(error)}") from error
    if not given:
        raise ConfigError(f"prompts: got an empty list, so the run has no task\n{_EXPECTED}")
    lines = [_line(f"prompts[{number}]", prompt) for number, prompt in enumerate(given)]
    content = b"".join(line + b"\n" for line in lines)
    return f"{GIVEN_ROWS}{hashlib.sha256(content).hexdigest()[:8]}.jsonl", content


def _line(where: str, prompt: Any) -> bytes:
    """One prompt as a row. Raises ConfigError."""
    try:
        return msgspec.json.encode(_row(where, prompt), enc_hook=_as_plain)
    except (TypeError, ValueError, RecursionError) as error:
        why = f"a run keeps its prompts as JSON, and this one cannot be written: {error}"
        raise ConfigError(f"{where}: {why}\ngive text, numbers, lists and dicts") from error


def _as_plain(value: Any) -> Any:
    """The number or the list in a number or an array of numpy or torch. Called by msgspec."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"{shown(value)} is of the type {type(value).__name__}")


def _row(where: str, prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str | list | tuple):
        row: dict[str, Any] = {"prompt": prompt}
    elif isinstance(prompt, Task):
        for key in (key for key in OWN_KEYS if key in prompt.info):
            taken = f"the info of the task has the key {key!r}, which is a field of a Task"
            raise ConfigError(f"{where}: {taken}\nrename the key")
        fields = {"answer": prompt.answer, "id": prompt.id}
        row = {"prompt": prompt.prompt, **{k: v for k, v in fields.items() if v is not None}, **prompt.info}
    elif isinstance(prompt, Mapping) and "prompt" in prompt:
        row = dict(prompt)
    else:
        is_message = isinstance(prompt, Message) or (isinstance(prompt, Mapping) and "role" in prompt)
        hint = "\nfor one prompt of several messages, write prompts=[[message, message]]" if is_message else ""
        raise ConfigError(f"{where}: got {shown(prompt)}\n{_EXPECTED}{hint}")
    messages = row["prompt"]
    try:
        if not isinstance(messages, str):
            msgspec.convert(msgspec.to_builtins(messages), list[Message])
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"{where}: its prompt is no text and no list of messages: {error}\n{_EXPECTED}") from error
    if not messages:
        raise ConfigError(f"{where}: the prompt is empty")
    return row
