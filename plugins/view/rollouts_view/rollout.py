"""One trajectory for the page: its messages, and its tokens with every value that is known of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec

from rollouts.author_code import printable
from rollouts.chat.token_texts import token_texts
from rollouts.errors import ConfigError, UserError, first_line
from rollouts.runs.folder import TOKENS, read_config
from rollouts.runs.times import Lines
from rollouts.runs.token_files import read_table
from rollouts.types import Message, Task

GROUP_MAX = 64  # rollouts of a group
SIDE_BY_SIDE_MAX = 16


class _Place(msgspec.Struct):
    """What decides whether a line is of a group."""

    group: int
    rollout: int
    status: str
    reward: float | None = None
    advantage: float | None = None
    role: str = ""
    temperature: float | None = None


class _Segment(msgspec.Struct):
    tokens: list[int]
    loss_mask: list[float]
    logprobs: list[float]
    versions: list[int]
    turns: list[tuple[int, int]] = []


class _Line(_Place):
    task: Task = msgspec.field(default_factory=lambda: Task(""))
    messages: list[Message] = []
    segments: list[_Segment] = []
    parts: dict[str, float | None] = {}
    weights: dict[str, float] = {}
    turns: list[float] = []
    why: str = ""
    dropped: str | None = None
    error: str | None = None
    metrics: dict[str, Any] = {}
    info: dict[str, Any] = {}


class Tokenizers:
    """The tokenizers of models, each loaded once. If one cannot be loaded, its tokens are shown as numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}

    def texts(self, model: str, tokens: list[int]) -> tuple[list[str], str]:
        """The text of each token, or no texts and the reason."""
        with self._lock:  # tokenizers are not safe in two threads
            if model not in self._known:
                self._known[model] = _load(model)
            tokenizer = self._known[model]
            if isinstance(tokenizer, str):
                return [], tokenizer
            try:
                return [printable(text) for text in token_texts(tokens, tokenizer)], ""
            except Exception as error:  # ids that this tokenizer does not have; the library raises anything
                return [], f"the tokenizer of {model} cannot read these ids: {first_line(error)}"


def _load(model: str) -> Any:
    """A tokenizer, or why there is none."""
    if not model:
        return "the run's settings do not name its model, so tokens are shown as numbers"
    try:
        from rollouts.models.loading import load_tokenizer

        return _read_alone(model) or load_tokenizer(model, local_files_only=True)
    except UserError as error:
        return f"tokens are shown as numbers: {first_line(error)}"
    except Exception as error:  # a damaged file of a tokenizer; the library raises anything
        return f"tokens are shown as numbers: the tokenizer of {model} cannot be loaded: {first_line(error)}"


class _ReadAlone:
    """The tokenizer of a file tokenizer.json, without transformers: that and torch take seconds and 300 MB."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not clean_up_tokenization_spaces, "this tokenizer has no such step"
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def _read_alone(model: str) -> _ReadAlone | None:
    """The tokenizer of a model on this machine; None if it has no tokenizer.json, or the library is not installed."""
    from rollouts.models.folders import has_tokenizer, role_adapters
    from rollouts.models.loading import adapters_beneath

    whole, adapters = adapters_beneath(str(next(iter(role_adapters(model).values()), model)))
    own = next((folder for folder in reversed(adapters) if has_tokenizer(folder)), whole)
    try:
        file = Path(own) / "tokenizer.json" if Path(own).is_dir() else _of_hub(own)
        return _ReadAlone(file) if file is not None and file.is_file() else None
    except ImportError:
        return None


def _of_hub(repository: str) -> Path | None:
    """The file of a repository that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "tokenizer.json")
    return Path(found) if isinstance(found, str) else None


def read_rollout(folder: Path, lines: Lines, number: int, tokenizers: Tokenizers) -> dict[str, Any]:
    """A trajectory for the page. Raises ConfigError if there is no such line, or it is damaged."""
    line = _decoded(lines, number)
    channels, notes = _channels(lines.file, number)
    try:
        model = str(read_config(folder)[0].get("model", ""))
    except ConfigError:
        model = ""
    segments = []
    for index, segment in enumerate(line.segments):
        texts, note = tokenizers.texts(model, segment.tokens)
        notes += [note] if note and note not in notes else []
        segments.append(_shown(segment, texts, channels.get(index, {})))
    shown = {name: getattr(line, name) for name in line.__struct_fields__ if name != "segments"}
    return shown | {"line": number, "lines": lines.total, "segments": segments, "notes": notes, "model": model}


def _shown(segment: _Segment, texts: list[str], channels: dict[str, list[Any]]) -> dict[str, Any]:
    """A segment. `recorded` has values at the places `at` alone: those of the trained tokens."""
    at = channels.pop("position", [])
    return {
        "tokens": segment.tokens,
        "texts": texts,
        "mask": segment.loss_mask,
        "logprobs": segment.logprobs,
        "versions": segment.versions,
        "turns": segment.turns,
        "at": at,
        "recorded": channels,
    }


def _channels(file: Path, number: int) -> tuple[dict[int, dict[str, list[Any]]], list[str]]:
    """The recorded values of a line by segment, and notes about them."""
    tokens = file.with_suffix(TOKENS)
    if not tokens.exists():
        return {}, []
    try:
        found = read_table(tokens).of_line(number)
    except ConfigError as error:
        return {}, [str(error)]
    return {segment: {name: list(each) for name, each in channels.items()} for segment, channels in found.items()}, []


def _decoded(lines: Lines, number: int, kind: type[Any] = _Line) -> Any:
    try:
        return msgspec.json.decode(lines.read(number), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{lines.file}, line {number + 1} is damaged: {error}") from error


def group_of(lines: Lines, number: int) -> list[dict[str, Any]]:
    """The trajectories of the same group, this one included: the lines around it, for a file has them together."""
    own: _Place = _decoded(lines, number, _Place)
    found = {number: own}
    for step in (-1, 1):
        at = number + step
        while 0 <= at < lines.total and len(found) < GROUP_MAX:
            try:
                place = _decoded(lines, at, _Place)
            except ConfigError:  # a damaged line is no member
                break
            if (place.group, place.role, place.temperature) != (own.group, own.role, own.temperature):
                break
            found[at] = place
            at += step
    return [{"line": at, **msgspec.structs.asdict(found[at])} for at in sorted(found)]
