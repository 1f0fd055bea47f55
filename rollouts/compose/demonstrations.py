"""The demonstrations of a run: which ones are trained on, and in which order.

What is held out for the evaluation is not demonstrated. The order is a function of the seed, so that a resumed run goes
on where it was: the number of steps does not change it. Left out: how a conversation becomes tokens (`chat.masks`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from rollouts.compose.environments import Environment, task_identity
from rollouts.errors import EnvironmentDefinitionError
from rollouts.training.datasets import mixing
from rollouts.training.datasets.buffer import SKIPPED_MAX
from rollouts.types import Message, Task

__all__ = ["Demonstration", "HeldOutPrompts", "demonstrations"]


class Demonstration(NamedTuple):
    """An expert conversation, and the environment whose tools it uses; `number` tells it from the environment's others,
    and is the same in every epoch.
    """

    env: Environment
    number: int
    messages: list[Message]


def demonstrations(
    environments: Sequence[Environment], held_out: Sequence[Task], per_step: int
) -> Iterator[Demonstration]:
    """Expert conversations without end, mixed by the environments' weights at the step for which each one is.

    Those of one environment are shuffled, each epoch anew. None answers one of the tasks that are held out. Raises
    EnvironmentDefinitionError where an environment has none besides.
    """
    prompts = HeldOutPrompts(held_out)
    streams = [_without_end(env, prompts) for env in environments]
    if len(environments) == 1:
        yield from streams[0]
    weights = {env.alias: env.weight for env in environments}
    for number in itertools.count():
        shares = mixing.shares_at(weights, number // per_step)
        yield next(streams[mixing.pick(shares, environments[0].seed, number)])


def _without_end(env: Environment, prompts: HeldOutPrompts) -> Iterator[Demonstration]:
    """The demonstrations of one environment, epoch after epoch."""
    known: list[Demonstration] = []
    skipped = 0
    for messages in env.demonstrations():
        if prompts.asks(messages):
            skipped += 1
            if skipped == SKIPPED_MAX:
                break
            continue
        skipped = 0
        known.append(Demonstration(env, len(known), messages))
        yield known[-1]
    if not known:
        raise EnvironmentDefinitionError(
            f"the environment {env.name} has only demonstrations of held-out tasks ({skipped} in a row); give it more, "
            "lower --eval-tasks, or let tasks('eval', rng) give other ones"
        )
    for epoch in itertools.count(1):
        yield from (known[index] for index in env.demonstration_order(len(known), epoch))


class HeldOutPrompts:
    """The prompts of held-out tasks, by which a demonstration of one is known.

    Text is compared without the space around it. A system message counts only where several held-out tasks of one
    environment share the rest of their prompts: a demonstration may have another system message, or none. `shared`
    counts the tasks that share their whole prompt with another one of their environment: nothing in a demonstration
    says which of them it answers.

    >>> prompts = HeldOutPrompts([Task("2 + 2?"), Task("Play.", id="a"), Task("Play.", id="b")])
    >>> prompts.asks([Message("system", "Be brief."), Message("user", "2 + 2?"), Message("assistant", "4")])
    True
    >>> prompts.asks([Message("user", "Play."), Message("assistant", "e4")]), prompts.shared
    (False, 2)
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        # One id may mean another prompt in each of two phases, and one task may have another system message in each.
        known = [(task.env, task_identity(task), *_keys(task.messages)) for task in tasks]
        whole = Counter((env, whole) for env, _, whole in {(env, task, whole) for env, task, whole, _ in known})
        rest = Counter((env, rest) for env, _, rest in {(env, task, rest) for env, task, _, rest in known})
        self.shared = sum(count for count in whole.values() if count > 1)
        self._whole = {key for (_, key), count in whole.items() if count == 1}
        self._rest = {key for (_, key), count in rest.items() if count == 1 and key != b"[]"}

    def asks(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation answers one of these prompts, with any turn of the assistant."""
        for place, message in enumerate(messages):
            if message.role == "assistant":
                whole, rest = _keys(messages[:place])
                if whole in self._whole or rest in self._rest:
                    return True
        return False


def _keys(messages: Sequence[Message]) -> tuple[bytes, bytes]:
    """What a prompt is known by: all of it, and all but its system messages."""
    said = [
        (message.role, message.text.strip(), [part for part in _parts(message) if part.get("type") != "text"])
        for message in messages
    ]
    return msgspec.json.encode(said), msgspec.json.encode([each for each in said if each[0] != "system"])


def _parts(message: Message) -> list[dict[str, Any]]:
    return [] if isinstance(message.content, str) else message.content
