"""`json_schema`: a reply that is JSON and satisfies a schema, with jsonschema.

A schema never loads another one from a URL. It runs in another process with a deadline, because its regular expressions
may take for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from msgspec import Meta
from referencing import Registry

from rollouts import Score, Task, Trajectory
from rollouts.errors import ConfigError
from rollouts.plugins.checks import checked_by
from rollouts_text_rewards.processes import limited_memory, stopped_at

FENCES = ("```json", "```")
SHOWN_CHARACTERS = 200


def fault_of(text: str, schema: dict[str, Any]) -> dict[str, str]:
    """Why a text does not satisfy a schema: `json: ...` if it is no JSON, `schema: ...` if it does not fit; empty if it
    does.
    """
    return {"found": _fault(text, schema)}


def _fault(text: str, schema: dict[str, Any]) -> str:
    with limited_memory():
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            return f"json: {error}"
        validator = Draft202012Validator(schema, registry=Registry())
        try:
            first = next(iter(validator.iter_errors(value)), None)
        except RecursionError:
            return "schema: it is nested too deeply"
        return f"schema: {first.json_path}: {first.message[:SHOWN_CHARACTERS]}" if first else ""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def check_schema(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if the schema of the settings cannot be read or is no schema."""
    schema = schema_of(values["schema"], values["schema_file"])
    if schema is None:
        return
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"the schema of the reward json_schema: at {error.json_path}: {error.message}") from error


def schema_of(schema: dict[str, Any] | None, file: str) -> Any:
    """The schema of the settings; None if they have none. Raises ConfigError."""
    if schema is not None and file:
        raise ConfigError("the reward json_schema has the settings schema and schema_file; leave one of them out")
    if not file:
        return schema
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the schema file {file}: {why}; give the path of a JSON file") from error


@checked_by(check_schema)
async def json_schema(
    task: Task,
    trajectory: Trajectory,
    *,
    schema: dict[str, Any] | None = None,
    schema_file: str = "",
    info_key: str = "schema",
    fence: bool = True,
    only_json: Annotated[float, Meta(ge=0, le=1)] = 0.0,
    seconds: Annotated[float, Meta(gt=0)] = 2.0,
) -> Score:
    """1 if the whole reply is JSON that satisfies a schema; None if there is no schema, or if it takes too long.

    Args:
        schema: the JSON schema (draft 2020-12)
        schema_file: a file with the schema
        info_key: without both, the schema is under this key in the task's info
        fence: the JSON may be in a fenced block
        only_json: the value of JSON that does not satisfy the schema
        seconds: the time for one reply
    """
    found = schema_of(schema, schema_file)
    found = task.info.get(info_key) if found is None else found
    if not isinstance(found, dict):
        return Score(None, why=f"there is no schema: not in the settings, and not in task.info[{info_key!r}]")
    text = trajectory.last_text.strip()
    outcome = await stopped_at(seconds, fault_of, text=_inside(text) if fence else text, schema=found)
    if outcome.why:
        return Score(None, why=outcome.why)
    value = 1.0 if not outcome.value else only_json if outcome.value.startswith("schema: ") else 0.0
    return Score(value, why=outcome.value)


def _inside(text: str) -> str:
    """The text inside a fence that is all of the text, else the text."""
    for opening in FENCES:
        if text.startswith(opening) and text.endswith("```") and len(text) >= len(opening) + 3:
            return text[len(opening) : -3]
    return text
