"""When everything in a step happened: `trajectories/.step_000000.times`, from which `rollouts view` draws a timeline.

The file is a JSON object. Times are seconds from `zero`, which is a Unix time: the beginning of the step, or of the
first episode of an evaluation. Nothing in a run depends on it.

`trajectories/.step_000000.index` is beside `step_000000.jsonl`: where its lines begin, so that one line of a million is
read in milliseconds. It begins with a JSON object of 256 bytes, with the size and the time of the JSONL file for which
it was made. Then follow the offset of each line and the end of the last one, as little-endian numbers of 8 bytes. An
index that is missing, damaged or of another file is made anew; one that cannot be written is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from rollouts.disk import open_regular, read_regular, write_whole
from rollouts.errors import ConfigError, counted
from rollouts.types import Episode


class Start(NamedTuple):
    """The moment when a run or a phase began, in seconds of the wall clock and of this process's CPU time."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Start:
        """This moment."""
        return cls(time.perf_counter(), time.process_time())

    def seconds(self) -> dict[str, float]:
        """The seconds since then, under the keys of summary.json."""
        now = Start.now()
        return {"wall_seconds": now.wall - self.wall, "cpu_seconds": now.cpu - self.cpu}


FORMAT, VERSION = "rollouts-times", 1
FINISH = "finish"  # the phase in which a step is written, logged and perhaps evaluated


class EpisodeSpan(NamedTuple):
    """One episode: the line of its first trajectory, its order, and when it and each reply of its models was."""

    line: int
    group: int
    rollout: int
    began: float
    ended: float
    replies: list[tuple[float, float]]


class StepTimes(msgspec.Struct):
    """The times of a step. `phases` are (name, begin, end); an evaluation has none."""

    zero: float
    phases: list[tuple[str, float, float]] = []
    episodes: list[EpisodeSpan] = []
    format: str = FORMAT
    version: int = VERSION


def times_of(file: Path) -> Path:
    """The file beside a file of trajectories. Its name is hidden, so that `step_*` only finds trajectories."""
    return file.with_name(f".{file.stem}.times")


def step_times(phases: Sequence[tuple[str, float, float]], episodes: Iterable[Episode]) -> StepTimes:
    """The times of a step that ends now. `phases` are in the seconds of `time.perf_counter`; `episodes` are in the
    order of their lines.
    """
    shift, now = time.time() - time.perf_counter(), time.perf_counter()
    last = phases[-1][2] if phases else now
    zero = (phases[0][1] if phases else now) + shift
    shown = [
        (name, _rounded(begin + shift - zero), _rounded(end + shift - zero))
        for name, begin, end in (*phases, (FINISH, last, now))
    ]
    return StepTimes(zero, shown, list(_spans(zero, episodes)))


def evaluation_times(episodes: Sequence[Episode]) -> StepTimes:
    """The times of an evaluation. `episodes` are in the order of their lines."""
    zero = min((each.times.began for each in episodes if each.times is not None), default=0.0)
    return StepTimes(zero, [], list(_spans(zero, episodes)))


def read_times(file: Path) -> StepTimes:
    """Read a file of times. Raises ConfigError."""
    try:
        found = msgspec.json.decode(read_regular(file), type=StepTimes)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    if (found.format, found.version) != (FORMAT, VERSION):
        raise ConfigError(f"{file} has the format {found.format} {found.version}; expected {FORMAT} {VERSION}")
    return found


def _spans(zero: float, episodes: Iterable[Episode]) -> Iterator[EpisodeSpan]:
    line = 0
    for episode in episodes:
        line += len(episode.others)
        if (times := episode.times) is not None:
            replies = [(_rounded(begin - zero), _rounded(end - zero)) for begin, end in times.replies]
            began, ended = _rounded(times.began - zero), _rounded(times.ended - zero)
            yield EpisodeSpan(line, episode.order[0], episode.order[1], began, ended, replies)
        line += len(episode.trajectories)


def _rounded(seconds: float) -> float:
    return round(seconds, 4)


# --- where lines begin ------------------------------------------------------------------------------------------------


INDEX_FORMAT, INDEX_VERSION = "rollouts-index", 1
HEAD_BYTES = 256
BLOCK = 1 << 20


class _Head(msgspec.Struct):
    format: str
    version: int
    size: int
    mtime_ns: int
    lines: int


class Lines(NamedTuple):
    """The lines of a file: how many there are, and their offsets (empty: read from the index)."""

    file: Path
    total: int
    offsets: bytes = b""

    def read(self, number: int) -> bytes:
        """A line, from 0, with its newline. Raises ConfigError if there is no such line, or the file cannot be read."""
        if not 0 <= number < self.total:
            raise ConfigError(f"{self.file} has no line {number}: it has {counted(self.total, 'line')}, from 0")
        line = self._read(number)
        if line is None and not self.offsets:  # a crash of the machine can leave an index whose data is zeros
            return _made_anew(self.file).read(number)
        if line is None:
            raise ConfigError(f"{self.file} has changed while it was read")
        return line

    def _read(self, number: int) -> bytes | None:
        """The line; None if there is no line where the offsets say."""
        pair = self.offsets[8 * number : 8 * number + 16] or _read_at(index_of(self.file), HEAD_BYTES + 8 * number, 16)
        start, end = struct.unpack("<2Q", pair) if len(pair) == 16 else (0, 0)
        if start >= end:
            return None
        content = _read_at(self.file, max(0, start - 1), end - start + (start > 0))
        before, line = (content[:1], content[1:]) if start else (b"\n", content)
        is_whole = line.endswith(b"\n") or number == self.total - 1
        return line if before == b"\n" and len(line) == end - start and b"\n" not in line[:-1] and is_whole else None


def index_of(file: Path) -> Path:
    """The index of a file. Its name is hidden, so that `step_*` only finds trajectories."""
    return file.with_name(f".{file.stem}.index")


def open_lines(file: Path) -> Lines:
    """The lines of a file, by its index, which is made anew if it does not fit the file. Raises ConfigError if the file
    cannot be read.
    """
    with _opened(file) as opened:
        stat = os.fstat(opened.fileno())
    with contextlib.suppress(OSError, msgspec.DecodeError), open_regular(index_of(file)) as index:
        head = msgspec.json.decode(index.read(HEAD_BYTES), type=_Head)
        of_file = (INDEX_FORMAT, INDEX_VERSION, stat.st_size, stat.st_mtime_ns)
        is_whole = os.fstat(index.fileno()).st_size == HEAD_BYTES + 8 * (head.lines + 1)
        if (head.format, head.version, head.size, head.mtime_ns) == of_file and is_whole:
            return Lines(file, head.lines)
    return _made_anew(file)


def write_index(file: Path, lengths: Iterable[int]) -> None:
    """Write the index of a file that was just written, with lines of these lengths."""
    _write(file, array("Q", itertools.accumulate(lengths, initial=0)), file.stat().st_mtime_ns)


def _made_anew(file: Path) -> Lines:
    with _opened(file) as opened:
        mtime_ns = os.fstat(opened.fileno()).st_mtime_ns
        offsets = _scan(opened)
    return Lines(file, len(offsets) - 1, _write(file, offsets, mtime_ns))


def _write(file: Path, offsets: array[int], mtime_ns: int) -> bytes:
    """Write the index, if it can be written. Returns its offsets as bytes."""
    head = _Head(INDEX_FORMAT, INDEX_VERSION, offsets[-1], mtime_ns, len(offsets) - 1)
    if sys.byteorder != "little":
        offsets.byteswap()
    data = offsets.tobytes()
    with contextlib.suppress(OSError):  # a read-only disk, or another process has just written the same index
        write_whole(index_of(file), msgspec.json.encode(head).ljust(HEAD_BYTES) + data, synced=False)
    return data


def _scan(file: BinaryIO) -> array[int]:
    """The offsets of all lines, and the end of the last one."""
    offsets, place = array("Q", [0]), 0
    while block := file.read(BLOCK):
        at = block.find(b"\n")
        while at >= 0:
            offsets.append(place + at + 1)
            at = block.find(b"\n", at + 1)
        place += len(block)
    if offsets[-1] != place:  # the last line has no newline
        offsets.append(place)
    return offsets


def _read_at(path: Path, start: int, count: int) -> bytes:
    with _opened(path) as file:
        file.seek(start)
        return file.read(count)


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
