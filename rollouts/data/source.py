"""What `--data` names: its loader, its settings, and its rows with their places.

    for row in open_rows({"name": "rows.parquet", "prompt": "question", "limit": 100}):
        print(row.place, row.value["prompt"])

The value chooses the loader: `rows.csv` by its ending, a folder by its content, `OWNER/NAME` the hub, `LOADER:SOURCE`
any loader, and a loader's own name one that needs no source. Not here: the loaders, and what a row means.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollouts.author_code import authors_code, why_no_list
from rollouts.config.files import NOWHERE
from rollouts.config.names import names_file, names_module, normalize
from rollouts.data.loaders import OF_FILES, NotARow, bounded_row, json_lines, unreadable_source
from rollouts.errors import ConfigError, RolloutsError, SignatureError, first_line, in_lines, suggestion, words_of
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.loading import install_hint
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import Signature, call_with, check_signature, converted, read_signature

KIND = "datasets"
SHUFFLED_MAX = 10_000  # rows of a stream are shuffled through a window of so many
_SAME_ENDING = {"ndjson": "jsonl", "gz": "jsonl"}


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """The settings of all data: which columns hold what, and which rows are used.

    A column inside of another one is written with dots: `reward_model.ground_truth`.

    Args:
        prompt: the column of the prompt, if it is not `prompt`
        answer: the column of the answer, if it is not `answer`
        id: the column of the identity of a row, if it is not `id`
        response: the column of the reply, if it is not `response`
        messages: the column of the conversation, if it is not `messages`
        tools: the column of the tools of a conversation, if it is not `tools`
        limit: use at most so many rows
        seed: shuffle the rows by this seed, before `limit`
        streaming: read rows while the run goes on, instead of all of them at its start
        bad_rows: what to do with a row that cannot be used: end with an error, or skip and count it
        turns: which of the assistant's turns `rollouts sft` trains
        thinking: whether `rollouts sft` keeps the assistant's thinking
        max_length: `rollouts sft` cuts conversations to so many tokens, at the end of a turn
        held_out: the fraction of conversations of which `rollouts sft` only computes the loss
        patience: `rollouts sft` ends after so many evaluations without a lower loss; 0: it does not
        processes: how many processes tokenize the conversations of `rollouts sft`; 0: one for each core
    """

    prompt: str = ""
    answer: str = ""
    id: str = ""
    response: str = ""
    messages: str = ""
    tools: str = ""
    limit: int | None = None
    seed: int | None = None
    streaming: bool = False
    bad_rows: Literal["error", "skip"] = "error"
    turns: Literal["all", "last"] = "all"
    thinking: Literal["keep", "drop"] = "keep"
    max_length: int | None = None
    held_out: float = 0.0
    patience: int = 0
    processes: int = 0


OF_SFT = ("turns", "thinking", "max_length", "held_out", "patience", "processes")
"""The settings that are for conversations, which only `rollouts sft` trains on."""

COLUMNS = ("prompt", "answer", "id", "response", "messages", "tools")
"""The columns that a setting can name."""


class DataRow(NamedTuple):
    """A row, and its place in words: `rows.jsonl, line 3`."""

    place: str
    value: Any


class Loader(NamedTuple):
    """The loader of a source, and its settings. `settings` has those of the loader, `rows` those of all data."""

    name: str
    ref: ComponentRef
    source: str
    component: Callable[..., Any]
    settings: Mapping[str, Any]
    rows: RowSettings


def find_loader(manager: PluginManager, value: str) -> tuple[ComponentRef, str]:
    """The loader that a value of `--data` chooses, and its source. Raises UserError."""
    refs = manager.list(KIND)
    owned = {f"{normalize(ref.distribution)}/{ref.name}" for ref in refs if ref.distribution}
    name, source = split_value(value, {ref.name for ref in refs} | owned)
    return manager.find(KIND, name), source


def split_value(value: str, loaders: Collection[str]) -> tuple[str, str]:
    """The name of the loader that a value of `--data` chooses, and its source. `loaders` has the names of all loaders,
    those of packages also as `dist/name`. Raises ConfigError.

    >>> split_value("rows.jsonl", ["jsonl", "hub"]), split_value("hub:acme/rows", ["jsonl", "hub"])
    (('jsonl', 'rows.jsonl'), ('hub', 'acme/rows'))
    """
    if in_file := re.fullmatch(r"(?P<name>.*\.py:\w+)(?::(?P<source>.*))?", value):
        return in_file["name"], in_file["source"] or ""
    head, colon, rest = value.partition(":")
    if colon and _is_loader(head, loaders):
        return head, rest
    path = Path(value)
    ending = path.suffix.removeprefix(".").lower()
    ending = _SAME_ENDING.get(ending, ending)
    if ending in loaders and not path.is_dir():
        return ending, value
    if path.is_dir():
        is_arrow = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        return "arrow" if is_arrow else "hub", value
    if names_module(value) or _is_loader(value, loaders):
        return value, ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", value) and not names_file(value) and not Path(head.split("/")[0]).exists():
        return "hub", value
    endings = ", ".join(f".{name}" for name in sorted(loaders) if name not in ("arrow", "hub") and "/" not in name)
    raise ConfigError(
        in_lines(
            f"--data {value}: no loader reads it, and there is no such folder",
            suggestion(value, loaders),
            f"files end in {endings}; a dataset of the hub is OWNER/NAME or hub:NAME; other loaders: LOADER:{value}",
        )
    )


def _is_loader(name: str, loaders: Collection[str]) -> bool:
    owner, slash, rest = name.partition("/")
    return name in loaders or (bool(slash) and f"{normalize(owner)}/{rest}" in loaders)


def loader_signature(found: Any, label: str) -> Signature:
    """The inputs of a loader, and its settings after those of all data. Raises SignatureError."""
    own, common = check_signature(found, KIND, label), read_signature(RowSettings, KIND).settings
    if taken := {each.name for each in common} & {each.name for each in own.settings}:
        raise SignatureError(
            f"{label}: its settings {', '.join(sorted(taken))} have the names of settings that all data has\n"
            "give them other names"
        )
    return own._replace(settings=(*common, *own.settings))


def choose_loader(manager: PluginManager, data: str | Mapping[str, Any]) -> Loader:
    """The loader of a value of `--data`, or of a table with its `name` and settings. Raises UserError."""
    table = {"name": data} if isinstance(data, str) else data
    if not isinstance(table.get("name"), str):
        raise ConfigError('the table of `data` needs a name: data = { name = "rows.jsonl", prompt = "question" }')
    ref, source = find_loader(manager, table["name"])
    found, label = manager.load(ref), f"data {table['name']}"
    given = {key: value for key, value in table.items() if key != "name"}
    settings = converted(loader_signature(found, label), given, label, NOWHERE, ("data",))
    common = RowSettings(**{each.name: settings.pop(each.name) for each in fields(RowSettings)})
    for name, least in (("limit", 1), ("max_length", 2), ("patience", 0), ("processes", 0)):
        value = getattr(common, name)
        if value is not None and value < least:
            raise ConfigError(f"--data.{name.replace('_', '-')} {value}: expected {least} or more")
    if not 0 <= common.held_out < 1:
        raise ConfigError(f"--data.held-out {common.held_out}: expected 0 or more, below 1, such as 0.05")
    return Loader(table["name"], ref, source, found, settings, common)


def require_file(data: str | Mapping[str, Any]) -> None:
    """Raise ConfigError if the loader of this data reads a file, and there is none. Nothing is read."""
    loader = choose_loader(PluginManager(), data)
    if loader.component in OF_FILES and not Path(loader.source).exists():
        raise unreadable_source(loader.source)


def open_rows(
    data: str | Mapping[str, Any], manager: PluginManager | None = None, *, lines: bytes | None = None
) -> Iterator[DataRow]:
    """The rows that `--data` names, in their order or shuffled by `seed`, with renamed columns.

    `lines` are JSON lines in place of the source's content. A row that a loader could not read has a NotARow as its
    value. Raises UserError, also for a column that a row lacks.
    """
    loader = choose_loader(manager or PluginManager(), data)
    settings = loader.rows
    given = _load(loader) if lines is None else json_lines(lines.decode().split("\n"))
    rows: Iterator[DataRow] = _placed(given, loader)
    if settings.seed is not None:
        rows = _shuffled(rows, random.Random(settings.seed), SHUFFLED_MAX if settings.streaming else None)
    rows = itertools.islice(rows, settings.limit)
    named = {column: getattr(settings, column) for column in COLUMNS if getattr(settings, column)}
    return _renamed(rows, named, skips=settings.bad_rows == "skip") if named else rows


def _renamed(rows: Iterable[DataRow], columns: Mapping[str, str], *, skips: bool) -> Iterator[DataRow]:
    """The rows with renamed columns. A row without a column is no row if bad rows are skipped, but for the first."""
    for number, (place, value) in enumerate(rows):
        try:
            yield DataRow(place, renamed(value, columns, place))
        except ConfigError as error:
            if not (skips and number):
                raise
            yield DataRow(place, NotARow(first_line(error)))


def _load(loader: Loader) -> Iterator[Any]:
    available = {"source": loader.source, "streaming": loader.rows.streaming}
    label = f"--data {loader.name}"
    try:
        with authors_code():
            rows = call_with(loader.component, available, loader.settings)
            if reason := why_no_list(rows):
                raise ConfigError(
                    f"{label}: its loader returned {type(rows).__name__}, {reason}; expected an iterable of rows"
                )
            yield from rows
    except RolloutsError:
        raise
    except ImportError as error:
        raise ConfigError(in_lines(f"{label}: {first_line(error)}", install_hint(error, loader.ref))) from error
    except Exception as error:  # a loader may raise anything
        raise ConfigError(f"{label}: its loader raised {words_of(error)}") from error


def _placed(given: Iterable[Any], loader: Loader) -> Iterator[DataRow]:
    """The rows with their places, without blank lines."""
    unit = "line" if split_is_lines(loader) else "row"
    for number, value in enumerate(given, start=1):
        if value != NotARow(""):
            yield DataRow(f"{loader.source or loader.name}, {unit} {number}", bounded_row(value))


def split_is_lines(loader: Loader) -> bool:
    """Whether the rows of this loader are the lines of a file."""
    return getattr(loader.component, "__name__", "") == "jsonl"


def _shuffled(rows: Iterable[DataRow], rng: random.Random, window: int | None) -> Iterator[DataRow]:
    """The rows in another order. With a `window`, at most so many are in memory, and a row moves about as far."""
    held: list[DataRow] = []
    for row in rows:
        if window is None or len(held) < window:
            held.append(row)
        else:
            place = rng.randrange(window)
            yield held[place]
            held[place] = row
    rng.shuffle(held)
    yield from held


def renamed(row: Any, columns: Mapping[str, str], place: str) -> Any:
    """A row with its columns under the names that rollouts reads. Raises ConfigError for a column that it lacks.

    >>> renamed({"q": "2+2?", "meta": {"a": 4}}, {"prompt": "q", "answer": "meta.a"}, "row 1")
    {'meta': {'a': 4}, 'prompt': '2+2?', 'answer': 4}
    """
    if not isinstance(row, dict):
        return row
    found, rest = {}, dict(row)
    for name, column in columns.items():
        value: Any = row
        for part in [column] if column in row else column.split("."):
            if not isinstance(value, dict) or part not in value:
                raise ConfigError(_no_column(row, name, column, place))
            value = value[part]
        found[name] = value
        rest.pop(column, None)
    return rest | found


def _no_column(row: Mapping[str, Any], name: str, column: str, place: str) -> str:
    return in_lines(
        f"--data.{name} {column}: {place} has no column {column!r}; it has: {', '.join(map(str, row)) or 'none'}",
        suggestion(column, map(str, row), f"--data.{name} {{}}".format),
    )
