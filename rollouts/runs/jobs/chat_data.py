"""The training data of mode sft: conversations from rows (`--data`), prepared once and kept, or the demonstrations of
environments. Not here: what rows and conversations are (`rollouts.data`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rollouts.chat.format import ChatFormat
from rollouts.chat.masks import SupervisedRow, tokenize_supervised
from rollouts.config.convert import unflagged
from rollouts.config.settings import Settings
from rollouts.data.conversations import BadRowError, read_conversation
from rollouts.data.source import DataRow, RowSettings, choose_loader, open_rows
from rollouts.errors import ConfigError, counted
from rollouts.runs.components import takes_rows
from rollouts.runs.environments import HeldOutPrompts, PlannedEnvironment, demonstrations
from rollouts.runs.plan import Plan
from rollouts.training.datasets.chat_rows import ChatOptions
from rollouts.training.datasets.prepared import Preparer, ShuffledSamples, divided, prepare
from rollouts.types import Message, Sample, Task

ROWS_BETWEEN = 100  # between two words about how many were read


class TrainingRows(NamedTuple):
    """The samples of mode sft in the order in which the run trains on them, those of which it only computes the loss,
    notes for the user, and after how many evaluations without a lower loss the run ends (0: it does not).
    """

    samples: Sequence[Sample]
    held_out: Sequence[Sample]
    notes: list[str]
    patience: int = 0


def training_rows(plan: Plan, held_out: Sequence[Task], chat: ChatFormat, watch: Callable[[int], None]) -> TrainingRows:
    """The conversations of the rows that `--data` names, or demonstrations. Those of held-out tasks are left out.
    `watch` is called with the number of rows that were read so far.

    With `streaming`, only as many rows are read as the run uses, in their order. Raises ConfigError, for a bad row with
    its place and a sample.
    """
    settings = plan.settings
    if not takes_rows(settings.mode, plan.chosen):
        return TrainingRows(demonstration_samples(plan.environments, held_out, settings, chat), [], [])
    name, rows, found = open_data(plan)
    if rows.patience and not (rows.held_out and settings.eval_every):
        raise ConfigError(
            f"--data.patience {rows.patience}: it compares evaluations, so type --data.held-out 0.05 --eval-every 20"
        )
    answers = _Answers(found, HeldOutPrompts(held_out)) if held_out else None
    count = max(1, settings.steps * settings.prompts_per_step)
    given: Iterable[DataRow] = answers or found
    given = _watched(itertools.islice(given, count) if rows.streaming else given, watch)
    preparer = Preparer(chat.tokenizer, dict(settings.template), chat_options(plan, rows), chat, plan.tool_parser)
    prepared = prepare(given, preparer, processes=rows.processes, skips=rows.bad_rows == "skip", folder=None, name=name)
    trained, kept = divided(prepared, rows.held_out)
    samples = ShuffledSamples(prepared, trained, count, settings.seed, is_shuffled=not rows.streaming)
    notes = prepared.words(name)
    if answers is not None and answers.count:
        notes.append(f"{name}: {counted(answers.count, 'conversation')} of held-out tasks left out")
    notes.append(
        f"{name}: {counted(settings.steps, 'step')} of {counted(settings.prompts_per_step, 'row')} visit "
        f"each of {counted(samples.rows, 'row')} {count / samples.rows:.3g} times"
    )
    own = [prepared.sample(row, number) for number in kept for row in prepared.rows_of(number)]
    return TrainingRows(samples, own, notes, rows.patience)


def open_data(plan: Plan) -> tuple[str, RowSettings, Iterator[DataRow]]:
    """The name of `--data`, its settings, and its rows."""
    (component,) = plan.resolved.components["data"]
    data = {"name": component.name, **unflagged(component.settings)}
    lines = plan.resolved.source.objects.rows.get(component.name)
    return component.name, choose_loader(plan.manager, data).rows, open_rows(data, plan.manager, lines=lines)


def _watched(rows: Iterable[DataRow], watch: Callable[[int], None]) -> Iterator[DataRow]:
    """The rows; `watch` is called with their number, now and then."""
    for count, row in enumerate(rows):
        if count % ROWS_BETWEEN == 0:
            watch(count)
        yield row


class _Answers:
    """The rows that do not answer a held-out task; `count` counts the others."""

    def __init__(self, rows: Iterator[DataRow], prompts: HeldOutPrompts) -> None:
        self._rows, self._prompts, self.count = rows, prompts, 0

    def __iter__(self) -> Iterator[DataRow]:
        for row in self._rows:
            try:
                answers = self._prompts.asks(read_conversation(row.value).messages)
            except BadRowError:  # `prepare` reports it
                answers = False
            self.count += answers
            if not answers:
                yield row


def chat_options(plan: Plan, rows: RowSettings) -> ChatOptions:
    """How the conversations of a run become rows."""
    tools = [tool for env in plan.environments for tool in env.schemas()]
    return ChatOptions(rows.turns, rows.thinking, rows.max_length, tools, plan.settings.system)


# --- demonstrations ---


def demonstration_samples(
    environments: Sequence[PlannedEnvironment], held_out: Sequence[Task], settings: Settings, chat: ChatFormat
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
