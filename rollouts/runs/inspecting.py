"""Training data as a person looks at it: the tokens of conversations, their masks and their lengths.

Not here: how it is printed (`rollouts.cli.data`), and how it is prepared for a run (`rollouts.runs.jobs.chat_data`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.chat.format import ChatFormat
from rollouts.chat.masks import SupervisedRow
from rollouts.chat.shown import lost_words
from rollouts.chat.token_texts import token_texts
from rollouts.config.convert import unflagged
from rollouts.config.files import load_file
from rollouts.config.flags import Tree
from rollouts.config.merging import merge
from rollouts.config.resolving import resolve
from rollouts.data.conversations import (
    BadRowError,
    WeightedConversation,
    add_unread,
    described,
    read_conversation,
    unread_words,
)
from rollouts.data.loaders import NotARow
from rollouts.data.source import choose_loader, open_rows
from rollouts.errors import ConfigError, ModelError, counted
from rollouts.models.loading import load_tokenizer, remote_code
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import choose, parser_of
from rollouts.runs.folder import CONFIG
from rollouts.runs.jobs.chat_data import chat_options, open_data
from rollouts.runs.plan import Plan
from rollouts.runs.saved import SavedRun, open_saved
from rollouts.runs.session import load_chat
from rollouts.training.datasets.chat_rows import ChatOptions, Cut, supervised_rows

OF_SFT = ("model", "trust_remote_code", "template", "system", "tool_parser", "data")
"""The settings of a run of mode sft that decide its tokens."""

BAD_SHOWN = 3  # how many rows that are no conversation are shown
SAMPLE_CHARACTERS = 200
BINS = 10


class Shown(NamedTuple):
    """A sequence of tokens: a title, and for each token its text and its weight [L]."""

    title: str
    tokens: Sequence[int]
    texts: list[str]
    weights: Sequence[float]


class ReadRow(NamedTuple):
    """A row as `rollouts sft` would train on it: its sequences, what was cut, and the fields in no row. `bad` says why
    it is no conversation, and `sample` is the begin of such a row.
    """

    conversation: WeightedConversation | None
    rows: list[SupervisedRow]
    cut: Cut
    lost: Sequence[str] = ()
    bad: str = ""
    sample: str = ""


class RowReader:
    """Reads rows as a run of mode sft would, with these settings of the run. Use it in one thread at a time.

    `given` are more settings for the tokenizer, such as `local_files_only`. Raises ConfigError and ModelError.
    """

    def __init__(self, tree: Tree, **given: Any) -> None:
        self.resolved = resolve(tree | {"mode": "sft", "steps": 1})
        self.manager = PluginManager()
        own = {key: self.resolved.components[key] for key in ("data", "tool_parser")}
        (component,), chosen_of = own["data"], choose(self.manager, own, self.resolved.source)
        (chosen,), (parser,) = chosen_of["data"], chosen_of["tool_parser"]
        self.data: dict[str, Any] = {name: chosen.settings[name] for name in component.settings}
        self.data["name"] = component.name
        settings = self.resolved.settings
        rows = choose_loader(self.manager, self.data).rows
        with remote_code(settings.trust_remote_code):
            self.chat = load_chat(settings, (), load_tokenizer(settings.model, **given), parser_of(parser))
        self._options = ChatOptions(rows.turns, rows.thinking, rows.max_length, system=settings.system)

    def read(self, value: Any) -> ReadRow:
        """The sequences of a row."""
        return read_row(value, self.chat, self._options)


def read_row(value: Any, chat: ChatFormat, options: ChatOptions) -> ReadRow:
    """The sequences of a row, or why it has none."""
    try:
        conversation = conversation_of(value)
        return ReadRow(conversation, *supervised_rows(conversation, chat, options))
    except (BadRowError, ModelError) as error:
        return ReadRow(None, [], Cut(), (), str(error), sample_of(value))


def conversation_of(value: Any) -> WeightedConversation:
    """The conversation of a row. Raises BadRowError, also for what a loader could not read."""
    if isinstance(value, NotARow):
        raise BadRowError(value.why)
    return read_conversation(value)


def sample_of(value: Any) -> str:
    """The begin of a row that is no conversation. What a loader could not read is in the reason."""
    return "" if isinstance(value, NotARow) else repr(value)[:SAMPLE_CHARACTERS]


@dataclass
class Inspection:
    """What was read: the first sequences whole, and of all of them the lengths and the numbers of trained tokens. `bad`
    has the place, the reason and a sample of the first rows that are no conversation, `unusable` counts them. `forms`
    counts conversations by the columns that they were read from; `unread` names columns that were not read, and `lost`
    counts fields that are in no row.
    """

    shown: list[Shown] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    bad: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    forms: Counter[str] = field(default_factory=Counter)
    unread: set[str] = field(default_factory=set)
    lost: Counter[str] = field(default_factory=Counter)
    unusable: int = 0
    cut: Cut = field(default_factory=Cut)

    def add(self, title: str, tokens: Sequence[int], weights: Sequence[float], tokenizer: Any, show: int) -> None:
        """Add a sequence, whole if fewer than `show` are. One without tokens, of a failed rollout, is left out."""
        if not tokens:
            return
        self.lengths.append(len(tokens))
        self.trained.append(sum(weight > 0 for weight in weights))
        if len(self.shown) < show:
            self.shown.append(Shown(title, tokens, token_texts(tokens, tokenizer), weights))

    def add_row(self, place: str, row: ReadRow, tokenizer: Any = None, *, show: int = 0, bad: int = BAD_SHOWN) -> None:
        """Add the sequences of a row, or the reason why it has none if fewer than `bad` are known."""
        if row.conversation is None:
            self.unusable += 1
            if len(self.bad) < bad:
                self.bad.append((place, row.bad, row.sample))
            return
        self.forms[row.conversation.form] += 1
        add_unread(self.unread, row.conversation.unread)
        self.lost.update(row.lost)
        self.cut = Cut(*(before + more for before, more in zip(self.cut, row.cut, strict=True)))
        for number, each in enumerate(row.rows, start=1):
            of = f" (sequence {number} of {len(row.rows)})" if len(row.rows) > 1 else ""
            self.add(f"{place}{of}", each.tokens, each.loss_mask, tokenizer, show)

    def words(self, name: str, model: str) -> list[str]:
        """What was read for what, what was not read and cut, and how many rows cannot be used."""
        words, read = [], self.forms.total()
        if read:
            words.append(f"{name}: {described(self.forms, read)}; tokens of {model}")
        words += [each for each in (unread_words(self.unread), lost_words(self.lost)) if each]
        if any(self.cut):
            words.append(
                f"max_length cut {counted(self.cut.rows, 'sequence')} and left out "
                f"{counted(self.cut.left_out, 'sequence')}, {counted(self.cut.tokens, 'token')} in all"
            )
        if self.unusable:
            words.append(f"{counted(self.unusable, 'row')} of {read + self.unusable} cannot be used")
        return words


def tried_rows(plan: Plan, chat: ChatFormat, count: int) -> tuple[str, bool]:
    """Describe the rows of the first `count` conversations of `--data`, and say whether these are all. Raises
    ConfigError for one that the run would refuse, and if there is none.
    """
    _, rows, opened = open_data(plan)
    options, found = chat_options(plan, rows), Inspection()
    for place, value in itertools.islice(opened, count):
        row = read_row(value, chat, options)
        if row.bad and rows.bad_rows != "skip":
            raise ConfigError(f"{place}: {row.bad}")
        found.add_row(place, row)
    read = found.forms.total()
    if not read:
        bad = found.unusable
        why = f"none of its first {counted(bad, 'row')} is one" if bad else "it holds none"
        raise ConfigError(f"{plan.settings.data}: no conversations: {why}")
    live = sum(found.trained)
    words = f"{described(found.forms, read)}: {counted(sum(found.lengths), 'token')}, {live} of them trained"
    words += f"; {counted(found.unusable, 'row')} skipped" if found.unusable else ""
    words += "".join(f"; {each}" for each in (unread_words(found.unread), lost_words(found.lost)) if each)
    are_all = next(opened, None) is None
    return words if are_all else f"the first {words}", are_all


def bins_of(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """How many of these lengths are in each of up to ten equal ranges: the least, the greatest, the count.

    >>> bins_of([1, 2, 2, 30])[:2]
    [(1, 3, 3), (4, 6, 0)]
    """
    least = min(lengths)
    width = (max(lengths) - least) // BINS + 1
    counts = [0] * ((max(lengths) - least) // width + 1)
    for length in lengths:
        counts[(length - least) // width] += 1
    return [(least + width * at, least + width * (at + 1) - 1, count) for at, count in enumerate(counts)]


def inspect_data(source: str, given: Tree, *, show: int = 3, first: int = 1000) -> Inspection:
    """The first conversations of rows, or of a run. `source` is a value of the setting `data`, or a run's folder.
    `given` are settings: `model`, `template`, `system` and `data` with the settings of rows.

    Raises ConfigError if nothing can be shown, and ModelError.
    """
    file = Path(source).expanduser() / CONFIG
    if not file.is_file() and not (file.parent / "rl" / CONFIG).is_file():
        found = _of_rows(merge({"data": source}, given), show, first)
    else:
        tree = load_file(file)[0] if file.is_file() else {}
        if tree.get("mode") == "sft" and tree.get("data"):
            found = _of_rows(merge({key: value for key, value in tree.items() if key in OF_SFT}, given), show, first)
        else:
            found = _of_run(source, given, show, first)
    if not found.lengths:
        place, why, sample = found.bad[0] if found.bad else (source, "it holds no conversations", "")
        raise ConfigError(f"{place}: {why}" + (f"\nthe row: {sample}" if sample else ""))
    return found


def _of_rows(tree: Tree, show: int, first: int) -> Inspection:
    reader, found = RowReader(tree), Inspection()
    for place, value in itertools.islice(open_rows(reader.data, reader.manager), first):
        found.add_row(place, reader.read(value), reader.chat.tokenizer, show=show)
    found.notes = found.words(reader.data["name"], reader.resolved.settings.model)
    return found


def _of_run(run: str, given: Tree, show: int, first: int) -> Inspection:
    if "data" in given:
        raise ConfigError(f"{run} is a run, whose tokens are saved; settings of --data do not apply")
    saved = open_saved(run)
    tree = load_file(saved.folder / CONFIG)[0]
    model = unflagged(given.get("model", tree.get("model", "tiny")))
    tokenizer = load_tokenizer(model)
    found = Inspection(notes=[f"{run}: {counted(saved.rollouts, 'saved rollout')}; tokens of {model}", *saved.notes])
    for title, tokens, mask in itertools.islice(_sequences(saved), first):
        found.add(title, tokens, mask, tokenizer, show)
    return found


def _sequences(saved: SavedRun) -> Iterator[tuple[str, list[int], list[float]]]:
    for index, place in enumerate(saved.places):
        for number, episode in enumerate(saved.group(index).episodes):
            for trajectory in episode.trajectories:
                for part, segment in enumerate(trajectory.segments, start=1):
                    of = f", segment {part} of {len(trajectory.segments)}" if len(trajectory.segments) > 1 else ""
                    yield f"{place.file.stem}, group {index}, rollout {number}{of}", segment.tokens, segment.loss_mask
