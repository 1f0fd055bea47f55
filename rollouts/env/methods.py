"""What an environment's methods take and return: inputs such as `shared` in `setup(self, task, shared)`, and tasks,
demonstrations, messages, metrics and states, checked.

The arguments are passed in their order, whatever their names are. Inputs are passed by name, and may have any place
among the parameters. Not here: the results of tools (`results`) and of rewards (`mixing`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollouts.author_code import authors_code, message_of, place_of_function, printable, shown
from rollouts.env.authoring import JudgeMethod
from rollouts.errors import EnvironmentDefinitionError, named
from rollouts.types import Message, Task

INPUTS: Mapping[str, tuple[str, ...]] = {
    "tasks": ("shared",),
    "demonstrations": ("shared",),
    "setup": ("shared", "sandbox"),
}
"""The inputs that each method may name."""

_NONE = object()


def as_task(value: Any) -> Task:
    """Make a Task of a Task, a prompt, or a mapping with the key `prompt`. Its keys `answer`, `id` and `info` are
    optional; all other keys are added to `info`.

    Messages may be written as mappings (`{"role": "user", "content": "..."}`). Raises EnvironmentDefinitionError.

    >>> as_task({"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": 4, "level": 1}).info
    {'level': 1}
    """
    try:
        with authors_code():
            task = _read_task(value)
        if task is not None:
            return task
        reason = ""
    except Exception as error:  # an author's object may raise anything
        reason = f" ({message_of(error) if isinstance(error, msgspec.ValidationError) else named(error)})"
    wanted = "rollouts.Task objects, prompts (text, or a list of messages), or mappings with `prompt`"
    given = f"{shown(value)} ({type(value).__name__}){reason}"
    raise EnvironmentDefinitionError(f"tasks() gave {given}; it must give {wanted}")


def _read_task(value: Any) -> Task | None:
    if isinstance(value, Task):
        prompt, identity = _as_prompt(value.prompt), _as_id(value.id)
        if prompt is value.prompt and identity is value.id:
            return value
        return msgspec.structs.replace(value, prompt=prompt, id=identity)
    if isinstance(value, Mapping) and "prompt" in value:
        rest = {key: value[key] for key in value if key not in ("prompt", "answer", "id", "info")}
        info = {**msgspec.convert(value.get("info") or {}, dict[str, Any]), **rest}
        return Task(_as_prompt(value["prompt"]), value.get("answer"), info, _as_id(value.get("id")))
    return Task(_as_prompt(value)) if isinstance(value, str | list) else None


def _as_id(identity: Any) -> str | None:
    return None if identity is None else printable(identity if isinstance(identity, str) else str(identity))


def _as_prompt(prompt: Any) -> str | list[Message]:
    """Return a prompt unchanged, or convert its messages. Raises msgspec.ValidationError."""
    return printable(prompt) if isinstance(prompt, str) else _as_messages(prompt)


def _as_messages(given: Any) -> list[Message]:
    is_converted = isinstance(given, list) and all(isinstance(message, Message) for message in given)
    return given if is_converted else msgspec.convert(given, list[Message])


def as_conversation(value: Any, label: str) -> list[Message]:
    """The messages of a demonstration, which needs a reply of the assistant.

    Raises EnvironmentDefinitionError; its message begins with `label`.
    """
    expected = "a list of Message with at least one of the role 'assistant'"
    try:
        messages = _as_messages(value)
    except (msgspec.ValidationError, UnicodeError) as error:  # half of a surrogate pair is no text
        raise EnvironmentDefinitionError(f"{label} gave {shown(value)} ({error}); expected {expected}") from error
    if all(message.role != "assistant" for message in messages):
        raise EnvironmentDefinitionError(f"{label} gave {shown(value)}, which teaches no reply; expected {expected}")
    return messages


def reply_messages(env: Any, returned: Any) -> list[Message]:
    """The messages that the environment's `reply` returned, which may also be text. Raises TypeError, with the file and
    line of `reply`, if it returned anything else.
    """
    answers = returned if isinstance(returned, list | tuple) else [] if returned is None else [returned]
    for answer in answers:
        if not isinstance(answer, str | Message):
            place = place_of_function(env.reply)
            raise TypeError(
                f"it returned {type(answer).__name__}, expected text, a Message, a list of them, or None ({place})"
            )
    return [Message("user", answer) if isinstance(answer, str) else answer for answer in answers]


def finite_metric(metric: JudgeMethod, returned: Any) -> float:
    """The return value of a metric as a finite number. Raises TypeError with the file and line of the metric."""
    with contextlib.suppress(Exception), authors_code():  # the author's object may raise anything
        value = float(returned)
        if math.isfinite(value) and not isinstance(returned, str):
            return value
    place = place_of_function(metric.function)
    given = f"it returned {shown(returned)} ({type(returned).__name__}); a metric returns a finite number"
    raise TypeError(given + (f" ({place})" if place else ""))


def plain_state(name: str, state: Any) -> Any:
    """An environment's `state()` as JSON data. Raises EnvironmentDefinitionError if that is impossible."""
    try:
        return msgspec.json.decode(msgspec.json.encode(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentDefinitionError(
            f"{name}.state() returned a value that a checkpoint cannot store ({error}); return plain data: "
            "numbers, text, lists, dicts"
        ) from error


# --- inputs ---------------------------------------------------------------------------------------------------------


def inputs_of(method: Any, name: str) -> tuple[str, ...]:
    """The inputs that a method names; `name` is the name under which the core calls it."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # there is no such method, or its signature is not readable
        return ()
    return tuple(each for each in INPUTS.get(name, ()) if each in parameters)


def names_input(env: Any, method: str, name: str) -> bool:
    """Whether a method of the environment (a class or an object) names this input."""
    return name in inputs_of(getattr(env, method, None), method)


def with_inputs(method: Callable[..., Any], arguments: Sequence[Any], inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """A function and the arguments to call it with: the method gets its arguments in order, and its inputs by name.

    >>> def setup(shared, task, sandbox=None): return shared, task, sandbox
    >>> call, *arguments = with_inputs(setup, ["a task"], {"shared": "an index"})
    >>> call(*arguments)
    ('an index', 'a task', None)
    """
    if not inputs:
        return (method, *arguments)
    rest: Iterator[Any] = iter(arguments)
    positional: list[Any] = []
    named = dict(inputs)
    for parameter in inspect.signature(method).parameters.values():
        if parameter.name in inputs or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            named.update((parameter.name, value) for value in [next(rest, _NONE)] if value is not _NONE)
        else:
            positional += [next(rest)] if parameter.kind is parameter.POSITIONAL_ONLY else rest
    return (functools.partial(method, **named), *positional, *rest)
