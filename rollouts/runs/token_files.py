"""`trajectories/step_*.tokens`: the values of each trained token of a step (`--record tokens`).

The first line of a file is a JSON object, padded with spaces to a multiple of 8 bytes. Then follow the channels, each
padded too, as little-endian numbers. docs/records.md describes both, with a reader of a page. What the trajectories
have already (ids, masks, the sampler's logprobs, versions) is not repeated. Not here: where the values come from
(`rollouts.training.backends.metric_sums`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.disk import read_regular
from rollouts.errors import ConfigError
from rollouts.training.batches import Row, TrainBatch
from rollouts.training.rollout_gen.groups import Group
from rollouts.types import Episode

FORMAT, VERSION = "rollouts-tokens", 1
OF_ROWS = {"advantages": "advantage", "ref_logprobs": "ref_logprob", "teacher_logprobs": "teacher_logprob"}
"""The fields of a batch's rows that are recorded, and the names of their channels."""
DTYPES = {"uint8": "B", "uint32": "I", "float32": "f"}


class TokenSpan(NamedTuple):
    """The trained tokens of one segment: the number of its line in the trajectories, its number in the line, and its
    values in every channel, from `start` on. Numbers count from 0.
    """

    line: int
    segment: int
    start: int
    length: int


class TokenTable(NamedTuple):
    """The trained tokens of a step. Every channel has one value for each of the T tokens of the spans; `position` is
    the token's place in its segment.
    """

    spans: list[TokenSpan]
    channels: dict[str, array[Any]]

    def of_line(self, line: int) -> dict[int, dict[str, array[Any]]]:
        """The channels of each trained segment of a line, by the number of the segment."""
        found = {}
        for _, segment, start, length in (span for span in self.spans if span.line == line):
            found[segment] = {name: values[start : start + length] for name, values in self.channels.items()}
        return found


def token_table(groups: Sequence[Group], batches: Sequence[TrainBatch]) -> TokenTable:
    """The values that a step trained on. `groups` are all groups of the step, as their lines were written; `batches`
    are those of its optimizer steps. A segment that is trained in several pairs has the values of the first. A
    channel that a token lacks is left out.
    """
    places, seen = _places(groups), set[tuple[int, int]]()
    spans, channels, count = list[TokenSpan](), {"position": array("I")}, 0
    for batch in batches:
        trained = {name: _array("f", data) for name, data in batch.recorded.items()}
        before = count
        kept: list[tuple[int, int]] = []  # ranges of the batch's own tokens
        own = 0
        for row in batch.rows:
            live = [position for position, weight in enumerate(row.loss_mask) if weight > 0]
            place = places[row.rollout_index][row.segment]
            own += len(live)
            if not live or place in seen:
                continue
            seen.add(place)
            spans.append(TokenSpan(*place, count, len(live)))
            channels["position"].extend(live)
            for name, values in _values(row, live):
                _extend(channels, name, count, values)
            kept.append((own - len(live), own))
            count += len(live)
        for name, of_batch in trained.items():
            own_values = [value for start, end in kept for value in of_batch[start:end]]
            _extend(channels, name, before, own_values)
    if "clipped" in channels:
        channels["clipped"] = array("B", map(int, channels["clipped"]))
    return TokenTable(spans, {name: values for name, values in channels.items() if len(values) == count})


def _values(row: Row, live: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    for field, name in OF_ROWS.items():
        stream = getattr(row, field)
        if stream is not None:
            yield name, [stream[position] for position in live]


def _extend(channels: dict[str, array[Any]], name: str, count: int, values: Sequence[float]) -> None:
    """Add values to a channel, unless one of the `count` tokens before has none."""
    channel = channels.setdefault(name, array("f"))
    if len(channel) == count:
        channel.extend(values)


def _places(groups: Sequence[Group]) -> list[list[tuple[int, int]]]:
    """(line, segment) of each segment of the kept groups' rollouts, by `rollout_index` and the number of the row in its
    rollout. Lines are those of `folder.episode_records`.
    """
    found: list[list[tuple[int, int]]] = []
    line = 0
    for group in groups:
        for episode in group.episodes:
            own, line = _episode_places(episode, line)
            if group.dropped is None:
                found.append(own[:1] if group.samples else own)
    return found


def _episode_places(episode: Episode, line: int) -> tuple[list[tuple[int, int]], int]:
    line += len(episode.others)
    lines = enumerate(episode.trajectories, start=line)
    own = [(at, segment) for at, trajectory in lines for segment in range(max(1, len(trajectory.segments)))]
    return own, line + len(episode.trajectories)


def encode_table(table: TokenTable) -> bytes:
    """The content of a file."""
    codes = {code: dtype for dtype, code in DTYPES.items()}
    described, data = [], b""
    for name, values in table.channels.items():
        described.append({"name": name, "dtype": codes[values.typecode], "offset": len(data)})
        data += _padded(_little(values).tobytes(), b"\0")
    count = sum(span.length for span in table.spans)
    head = {"format": FORMAT, "version": VERSION, "tokens": count, "bytes": len(data), "channels": described}
    head["spans"] = table.spans
    return _padded(msgspec.json.encode(head) + b"\n", b" ") + data


def _padded(data: bytes, filler: bytes) -> bytes:
    """The data with a length of a multiple of 8. A last newline stays last."""
    missing = filler * (-len(data) % 8)
    return data[:-1] + missing + b"\n" if data.endswith(b"\n") and filler == b" " else data + missing


class _ChannelHead(msgspec.Struct):
    name: str
    dtype: str
    offset: int


class _Head(msgspec.Struct):
    format: str
    version: int
    tokens: int
    bytes: int
    channels: list[_ChannelHead]
    spans: list[TokenSpan]


def read_table(file: Path) -> TokenTable:
    """Read a file. Raises ConfigError if it is missing, damaged, cut off, or of a later version."""
    try:
        content = read_regular(file)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror or error}; a run writes it with --record tokens"
        ) from error
    line, _, _ = content.partition(b"\n")
    try:
        form = msgspec.json.decode(line, type=Mapping[str, Any])
        if form.get("format") == FORMAT and form.get("version") != VERSION:
            raise ConfigError(f"{file} has version {form.get('version')} of its format; this rollouts reads {VERSION}")
        head = msgspec.json.decode(line, type=_Head)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is damaged: its first line is no description of token values: {error}") from error
    start = len(line) + 1
    if head.format != FORMAT or len(content) != start + head.bytes:
        raise ConfigError(
            f"{file} is damaged: {head.bytes} bytes should follow its first line, and {len(content) - start} do"
        )
    channels = {}
    for name, dtype, offset in ((each.name, each.dtype, start + each.offset) for each in head.channels):
        code = DTYPES.get(dtype)
        size = array(code or "B").itemsize * head.tokens
        if code is None or offset + size > len(content):
            raise ConfigError(f"{file} is damaged: its channel {name!r} has the dtype {dtype!r}, or does not fit")
        channels[name] = _little(_array(code, content[offset : offset + size]))
    if any(span.start + span.length > head.tokens or min(span) < 0 for span in head.spans):
        raise ConfigError(f"{file} is damaged: it describes tokens that it does not have")
    return TokenTable(head.spans, channels)


def _array(code: str, data: bytes) -> array[Any]:
    values = array(code)
    values.frombytes(data)
    return values


def _little(values: array[Any]) -> array[Any]:
    """The same numbers with their bytes in little-endian order, or back."""
    if sys.byteorder == "little":
        return values
    values = values[:]
    values.byteswap()
    return values
