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

from rollouts.chat.token_texts import token_texts
from rollouts.config.convert import plain
from rollouts.config.files import load_file
from rollouts.config.flags import Tree
from rollouts.config.merging import merge
from rollouts.config.resolving import resolve
from rollouts.data.conversations import BadRowError, described, read_conversation
from rollouts.data.loaders import NotARow
from rollouts.data.source import choose_loader, open_rows
from rollouts.errors import ConfigError, ModelError, counted
from rollouts.runs.folder import CONFIG
from rollouts.runs.jobs.chat_data import chat_options
from rollouts.runs.plan import make_plan
from rollouts.runs.saved import SavedRun, open_saved
from rollouts.runs.session import load_chat
from rollouts.training.datasets.chat_rows import supervised_rows
from rollouts.training.models import load_tokenizer

OF_SFT = ("model", "trust_remote_code", "template", "system", "data")
"""The settings of a run of mode sft that decide its tokens."""

BAD_SHOWN = 3  # how many rows that are no conversation are shown
SAMPLE_CHARACTERS = 200


class Shown(NamedTuple):
    """A sequence of tokens: a title, and for each token its text and its weight [L]."""

    title: str
    tokens: Sequence[int]
    texts: list[str]
    weights: Sequence[float]


@dataclass
class Inspection:
    """What was read: the first sequences whole, and of all of them the lengths and the numbers of trained tokens. `bad`
    has the place, the reason and a sample of the first rows that are no conversation.
    """

    shown: list[Shown] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    bad: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, title: str, tokens: Sequence[int], weights: Sequence[float], tokenizer: Any, show: int) -> None:
        """Add a sequence, whole if fewer than `show` are. One without tokens, of a failed rollout, is left out."""
        if not tokens:
            return
        self.lengths.append(len(tokens))
        self.trained.append(sum(weight > 0 for weight in weights))
        if len(self.shown) < show:
            self.shown.append(Shown(title, tokens, token_texts(tokens, tokenizer), weights))


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
    plan = make_plan(resolve(tree | {"mode": "sft", "steps": 1}))
    chat = load_chat(plan.settings, plan.environments)
    (component,) = plan.resolved.components["data"]
    data = {"name": component.name, **plain(component.settings)}
    options = chat_options(plan, choose_loader(plan.manager, data).rows)
    found, forms, bad, cut = Inspection(), Counter[str](), 0, [0, 0, 0]
    for place, value in itertools.islice(open_rows(data, plan.manager), first):
        try:
            if isinstance(value, NotARow):
                raise BadRowError(value.why)
            conversation = read_conversation(value)
            rows, cut_here = supervised_rows(conversation, chat, options)
        except (BadRowError, ModelError) as error:
            bad += 1
            if bad <= BAD_SHOWN:
                sample = "" if isinstance(value, NotARow) else repr(value)[:SAMPLE_CHARACTERS]
                found.bad.append((place, str(error), sample))
            continue
        forms[conversation.form] += 1
        cut = [before + more for before, more in zip(cut, cut_here, strict=True)]
        for number, row in enumerate(rows, start=1):
            of = f" (sequence {number} of {len(rows)})" if len(rows) > 1 else ""
            found.add(f"{place}{of}", row.tokens, row.loss_mask, chat.tokenizer, show)
    read = sum(forms.values())
    if read:
        found.notes.append(f"{component.name}: {described(forms, read)}; tokens of {plan.settings.model}")
    if any(cut):
        found.notes.append(
            f"max_length cut {counted(cut[0], 'sequence')} and left out {counted(cut[1], 'sequence')}, "
            f"{counted(cut[2], 'token')} in all"
        )
    if bad:
        found.notes.append(f"{counted(bad, 'row')} of {read + bad} cannot be used; see the end")
    return found


def _of_run(run: str, given: Tree, show: int, first: int) -> Inspection:
    if "data" in given:
        raise ConfigError(f"{run} is a run, whose tokens are saved; settings of --data do not apply")
    saved = open_saved(run)
    tree = load_file(saved.folder / CONFIG)[0]
    model = plain(given.get("model", tree.get("model", "tiny")))
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
