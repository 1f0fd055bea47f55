"""Upstream's solver and scorers around one reply of the model.

The solver runs twice: once without a model, for the prompt, and once with the model's reply, so that what it does after
the reply is done too. A solver that asks the model more than once is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollouts import Message, Status, Trajectory
from rollouts.errors import ConfigError, named
from rollouts_inspect.loading import Loaded

MODEL = "rollouts/policy"
TEXTS = 200  # how much of an error is shown


class Scored(NamedTuple):
    """The scores by their names, in upstream's order; or why there are none."""

    values: Mapping[str, float]
    why: str = ""


class _AskedError(Exception):
    """The solver asks the model. The prompt is complete."""


class _AgainError(BaseException):
    """The solver asks the model again. It is no Exception, so that the solver's own code does not catch it."""


async def prompt_of(name: str, task: Any, sample: Any, index: int) -> list[Message]:
    """What the solver asks the model for a sample. Raises ConfigError if it cannot be served."""
    found: list[Any] = []

    async def generate(state: Any, *_: Any, **__: Any) -> Any:
        found.append(state)
        raise _AskedError

    try:
        await _solve(task, state_of(sample, index), generate)
    except _AskedError:
        pass
    except Exception as error:  # the author's solver may raise anything, such as that there is no model
        raise ConfigError(f"{name} cannot be served: its solver failed: {named(error)[:TEXTS]}") from error
    if not found:
        raise ConfigError(f"{name} cannot be served: its solver does not ask the model with `generate`")
    if found[0].tools:
        raise ConfigError(f"{name} cannot be served: its solver gives the model tools")
    return own_messages(name, found[0].messages)


async def check_once(name: str, task: Any, sample: Any, index: int) -> None:
    """Raise ConfigError if the solver asks the model more than once for this sample."""
    from inspect_ai.model import ModelOutput

    replies = 0

    async def generate(state: Any, *_: Any, **__: Any) -> Any:
        nonlocal replies
        replies += 1
        if replies > 1:
            raise _AgainError
        state.output = ModelOutput.from_content(MODEL, "")
        state.messages.append(state.output.message)
        return state

    try:
        with contextlib.suppress(Exception):  # an empty reply may well be an error for it
            await _solve(task, state_of(sample, index), generate)
    except _AgainError as error:
        raise ConfigError(f"{name} cannot be served: its solver asks the model more than once") from error


def scored(loaded: Loaded, index: int, trajectory: Trajectory) -> Scored:
    """The scores of the last message of an episode, by upstream's scorers."""
    try:
        return asyncio.run(_scored(loaded, index, trajectory))
    except _AgainError:
        return Scored({}, "the solver asks the model more than once")


async def _scored(loaded: Loaded, index: int, trajectory: Trajectory) -> Scored:
    from inspect_ai.scorer import Target
    from inspect_ai.scorer._scorer import unique_scorer_name

    sample, replies = loaded.samples[index], 0
    expected = loaded.prompts[index]

    async def generate(state: Any, *_: Any, **__: Any) -> Any:
        nonlocal replies
        replies += 1
        if replies > 1:
            raise _AgainError
        if own_messages(loaded.name, state.messages) != expected:
            raise ValueError("the solver makes another prompt each time")
        state.output = output_of(trajectory)
        state.messages.append(state.output.message)
        return state

    try:
        state = await _solve(loaded.task, state_of(sample, index), generate)
    except ValueError as error:
        return Scored({}, str(error))
    values, taken = dict[str, float](), list[str]()
    for scorer in loaded.task.scorer:
        taken.append(name := unique_scorer_name(scorer, taken))
        score = await scorer(state, Target(sample.target))
        if score is None:
            return Scored({}, f"the scorer {name} gave no score")
        values |= {place: _number(name, value) for place, value in _flat(name, score.value).items()}
    return Scored(values)


def _flat(name: str, value: Any) -> dict[str, Any]:
    """The values of a score: one, or those of its table or list."""
    if isinstance(value, Mapping):
        return {f"{name}.{key}": each for key, each in value.items()}
    if isinstance(value, list | tuple):
        return {f"{name}.{place}": each for place, each in enumerate(value)}
    return {name: value}


def _number(name: str, value: Any) -> float:
    """Upstream's number for a value: C is 1, P is 0.5, I and N are 0. NaN for a text that is none."""
    from inspect_ai.scorer import value_to_float

    if value is None:
        return math.nan
    known = value in ("C", "I", "P", "N") or str(value).lower() in ("yes", "no", "true", "false")
    if isinstance(value, str) and not known:
        try:
            return float(value)
        except ValueError:
            return math.nan
    return value_to_float()(value)


async def _solve(task: Any, state: Any, generate: Any) -> Any:
    """Run the task's setup and solver."""
    setup = task.setup if isinstance(task.setup, list | tuple) else [task.setup] if task.setup else []
    for solver in [*setup, task.solver]:
        state = await solver(state, generate)
    return state


def state_of(sample: Any, index: int) -> Any:
    """Upstream's state at the beginning of a sample."""
    from inspect_ai.model import ChatMessageUser, ModelName
    from inspect_ai.scorer import Target
    from inspect_ai.solver import TaskState

    own = copy.deepcopy(sample)
    messages = [ChatMessageUser(content=own.input, source="input")] if isinstance(own.input, str) else list(own.input)
    return TaskState(
        model=ModelName(MODEL),
        sample_id=index if own.id is None else own.id,
        epoch=1,
        input=own.input,
        messages=messages,
        target=Target(own.target),
        choices=own.choices,
        metadata=own.metadata or {},
    )


def output_of(trajectory: Trajectory) -> Any:
    """The last message of the model as upstream's output."""
    from inspect_ai.model import ChatMessageAssistant, ContentReasoning, ContentText, ModelOutput
    from inspect_ai.model._model_output import ChatCompletionChoice

    last = next((m for m in reversed(trajectory.messages) if m.role == "assistant"), Message("assistant"))
    content: Any = last.text
    if last.reasoning:
        content = [ContentReasoning(reasoning=last.reasoning), ContentText(text=last.text)]
    message = ChatMessageAssistant(content=content, source="generate", model=MODEL)
    reason = "max_tokens" if trajectory.status is Status.TRUNCATED else "stop"
    return ModelOutput(model=MODEL, choices=[ChatCompletionChoice(message=message, stop_reason=reason)])


def own_messages(name: str, messages: Any) -> list[Message]:
    """Upstream's messages as those of a prompt. Raises ConfigError for what is no text."""
    found = []
    for message in messages:
        parts = [] if isinstance(message.content, str) else message.content
        other = [part.type for part in parts if part.type not in ("text", "reasoning")]
        if other or message.role == "tool":
            raise ConfigError(f"{name} cannot be served: a prompt has a part of the type {(other or ['tool'])[0]}")
        found.append(Message(message.role, message.text))
    return found
