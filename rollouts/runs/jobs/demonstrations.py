"""The training data of mode sft: rows of tokens from the environments' demonstrations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rollouts.chat.format import ChatFormat
from rollouts.chat.masks import SupervisedRow, tokenize_supervised
from rollouts.config.settings import Settings
from rollouts.runs.environments import Environment, demonstrations
from rollouts.types import Message, Sample, Task


def demonstration_samples(
    environments: Sequence[Environment], held_out: Sequence[Task], settings: Settings, chat: ChatFormat
) -> list[Sample]:
    """Rows of the environments' expert conversations, in the order in which the run trains on them, as many as the run
    can use. The assistant's tokens are live. Demonstrations of held-out tasks are left out.
    """
    count = max(1, settings.steps * settings.prompts_per_step)
    endless = demonstrations(environments, held_out, settings.prompts_per_step)
    known: dict[tuple[str, int], list[SupervisedRow]] = {}
    tools: dict[str, Callable[[Sequence[Message]], list[dict[str, Any]]]] = {}
    samples: list[Sample] = []
    for place, (env, number, messages) in enumerate(itertools.islice(endless, count)):
        if env.alias not in tools:
            tools[env.alias] = env.schemas_of_demonstrations()
        if (key := (env.alias, number)) not in known:
            known[key] = tokenize_supervised(messages, tools[env.alias](messages), chat)
        samples += [Sample(messages, tokens=r.tokens, loss_mask=r.loss_mask, rollout_index=place) for r in known[key]]
    return samples
