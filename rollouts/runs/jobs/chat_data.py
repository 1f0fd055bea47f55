"""The training data of `rollouts sft --data`: conversations from rows, prepared once and kept.

Not here: demonstrations of an environment (`demonstrations`), and what rows and conversations are (`rollouts.data`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rollouts.chat.format import ChatFormat
from rollouts.chat.shown import lost_words
from rollouts.config.convert import unflagged
from rollouts.data.conversations import BadRowError, add_unread, described, read_conversation, unread_words
from rollouts.data.loaders import NotARow
from rollouts.data.source import DataRow, RowSettings, choose_loader, open_rows
from rollouts.errors import ConfigError, ModelError, counted
from rollouts.runs.components import takes_rows
from rollouts.runs.environments import HeldOutPrompts
from rollouts.runs.jobs.demonstrations import demonstration_samples
from rollouts.runs.jobs.evaluating import ChatData
from rollouts.runs.plan import Plan
from rollouts.training.datasets.chat_rows import ChatOptions, supervised_rows
from rollouts.training.datasets.prepared import Preparer, ShuffledSamples, divided, prepare
from rollouts.types import Task

ROWS_BETWEEN = 100  # between two words about how many were read


def training_data(
    plan: Plan, held_out: Sequence[Task], chat: ChatFormat, watch: Callable[[int], None] = lambda count: None
) -> ChatData:
    """The data of a run of mode sft: conversations of rows, or demonstrations. Those of held-out tasks are left out.
    `watch` is called with the number of rows that were read so far.
    """
    if takes_rows(plan.settings.mode, plan.chosen):
        return chat_data(plan, held_out, chat, watch=watch)
    return ChatData(demonstration_samples(plan.environments, held_out, plan.settings, chat), [], [])


def chat_data(
    plan: Plan,
    held_out: Sequence[Task],
    chat: ChatFormat,
    *,
    cache: Path | None = None,
    watch: Callable[[int], None] = lambda count: None,
) -> ChatData:
    """The conversations of the rows that `--data` names. Conversations that answer a held-out task are left out.

    With `streaming`, only as many rows are read as the run uses, in their order. Raises ConfigError, for a bad row with
    its place and a sample.
    """
    settings, (component,) = plan.settings, plan.resolved.components["data"]
    data = {"name": component.name, **unflagged(component.settings)}
    rows = choose_loader(plan.manager, data).rows
    if rows.patience and not (rows.held_out and settings.eval_every):
        raise ConfigError(
            f"--data.patience {rows.patience}: it compares evaluations, so type --data.held-out 0.05 --eval-every 20"
        )
    lines = plan.resolved.source.objects.rows.get(component.name)
    found = open_rows(data, plan.manager, lines=lines)
    asked = HeldOutPrompts(held_out)
    answers = _Answers(found, asked) if held_out else None
    count = max(1, settings.steps * settings.prompts_per_step)
    given: Iterable[DataRow] = answers or found
    if rows.streaming:
        given = itertools.islice(given, count)
    given = _watched(given, watch)
    preparer = Preparer(chat.tokenizer, dict(settings.template), chat_options(plan, rows), chat, plan.tool_parser)
    prepared = prepare(
        given, preparer, processes=rows.processes, skips=rows.bad_rows == "skip", folder=cache, name=component.name
    )
    trained, kept = divided(prepared, rows.held_out)
    samples = ShuffledSamples(prepared, trained, count, settings.seed, is_shuffled=not rows.streaming)
    notes = prepared.words(component.name)
    if answers is not None and answers.count:
        notes.append(f"{component.name}: {counted(answers.count, 'conversation')} of held-out tasks left out")
    notes.append(
        f"{component.name}: {counted(settings.steps, 'step')} of {counted(settings.prompts_per_step, 'row')} visit "
        f"each of {counted(samples.rows, 'row')} {count / samples.rows:.3g} times"
    )
    own = [prepared.sample(row, number) for number in kept for row in prepared.rows_of(number)]
    return ChatData(samples, own, notes, rows.patience)


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


def tried_rows(plan: Plan, chat: ChatFormat, count: int) -> tuple[str, bool]:
    """Describe the rows of the first `count` conversations, which are not kept, and say whether these are all. Raises
    ConfigError for one that the run would refuse, and if there is none.
    """
    settings, (component,) = plan.settings, plan.resolved.components["data"]
    data = {"name": component.name, **unflagged(component.settings)}
    rows = choose_loader(plan.manager, data).rows
    lines = plan.resolved.source.objects.rows.get(component.name)
    forms, unread, lost, tokens, live, bad = Counter[str](), set[str](), Counter[str](), 0, 0, 0
    for place, value in open_rows(data, plan.manager, lines=lines):
        if sum(forms.values()) + bad == count:
            break
        try:
            if isinstance(value, NotARow):
                raise BadRowError(value.why)
            conversation = read_conversation(value)
            found, _, fields = supervised_rows(conversation, chat, chat_options(plan, rows))
        except (BadRowError, ModelError) as error:
            if rows.bad_rows != "skip":
                raise ConfigError(f"{place}: {error}") from error
            bad += 1
            continue
        forms[conversation.form] += 1
        add_unread(unread, conversation.unread)
        lost.update(fields)
        tokens += sum(len(row.tokens) for row in found)
        live += sum(weight > 0 for row in found for weight in row.loss_mask)
    else:
        count = -1
    if not forms:
        why = f"none of its first {counted(bad, 'row')} is one" if bad else "it holds none"
        raise ConfigError(f"{settings.data}: no conversations: {why}")
    skipped = f"; {counted(bad, 'row')} skipped" if bad else ""
    skipped += "".join(f"; {words}" for words in (unread_words(unread), lost_words(lost)) if words)
    words = f"{described(forms, sum(forms.values()))}: {counted(tokens, 'token')}, {live} of them trained{skipped}"
    return words if count < 0 else f"the first {words}", count < 0


def chat_options(plan: Plan, rows: RowSettings) -> ChatOptions:
    """How the conversations of a run become rows."""
    tools = [tool for env in plan.environments for tool in env.schemas()]
    return ChatOptions(rows.turns, rows.thinking, rows.max_length, tools, plan.settings.system)
