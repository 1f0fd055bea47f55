"""Where the lines of a JSONL file begin, so that one line of a million is read in milliseconds.

`trajectories/.step_000000.jsonl.index` is beside `step_000000.jsonl`. Its first line is a JSON object with the size and
the time of the JSONL file for which it was made. Then follow the offset of each line and the end of the last one, as
little-endian numbers of 8 bytes. An index that is missing, damaged or of another file is made anew.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from rollouts.disk import write_whole
from rollouts.errors import ConfigError, counted

FORMAT, VERSION = "rollouts-index", 1
BLOCK = 1 << 20


class _Head(msgspec.Struct):
    format: str
    version: int
    size: int
    mtime_ns: int
    lines: int


class Lines(NamedTuple):
    """The lines of a file: `offsets` has the first byte of each, and the end of the last one."""

    file: Path
    offsets: array[int]

    @property
    def total(self) -> int:
        """The number of lines."""
        return len(self.offsets) - 1

    def read(self, number: int) -> bytes:
        """A line, from 0, with its newline. Raises ConfigError if there is no such line, or the file has changed."""
        if not 0 <= number < self.total:
            raise ConfigError(f"{self.file} has no line {number}: it has {counted(self.total, 'line')}, from 0")
        start, end = self.offsets[number], self.offsets[number + 1]
        with _opened(self.file) as file:
            file.seek(max(0, start - 1))
            content = file.read(end - start + (start > 0))
        before, line = (content[:1], content[1:]) if start else (b"\n", content)
        is_last = number == self.total - 1
        if before != b"\n" or len(line) != end - start or b"\n" in line[:-1] or not (line.endswith(b"\n") or is_last):
            raise ConfigError(f"{self.file} has changed while it was read")
        return line


def index_of(file: Path) -> Path:
    """The index of a file. Its name is hidden, so that `step_*` only finds trajectories."""
    return file.with_name(f".{file.name}.index")


def open_lines(file: Path) -> Lines:
    """The lines of a file, by its index. Makes the index anew if it does not fit the file. Where the folder cannot be
    written, the index is only in memory. Raises ConfigError if the file cannot be read.
    """
    with _opened(file) as opened:
        stat = os.fstat(opened.fileno())
        offsets = _saved(index_of(file), stat)
        if offsets is not None and _fits(opened, offsets):
            return Lines(file, offsets)
        offsets = _scan(opened)
    with contextlib.suppress(OSError):  # a read-only disk
        _write(file, offsets, stat.st_mtime_ns)
    return Lines(file, offsets)


def write_index(file: Path, lengths: Iterable[int]) -> None:
    """Write the index of a file that was just written, with lines of these lengths. Raises OSError."""
    _write(file, array("Q", itertools.accumulate(lengths, initial=0)), file.stat().st_mtime_ns)


def _write(file: Path, offsets: array[int], mtime_ns: int) -> None:
    head = _Head(FORMAT, VERSION, offsets[-1], mtime_ns, len(offsets) - 1)
    data = _little(offsets).tobytes()
    write_whole(index_of(file), msgspec.json.encode(head) + b"\n" + data, synced=False)


def _saved(index: Path, stat: os.stat_result) -> array[int] | None:
    """The offsets in an index; None if it is missing, damaged, or of another file."""
    try:
        first, _, data = index.read_bytes().partition(b"\n")
        head = msgspec.json.decode(first, type=_Head)
    except (OSError, msgspec.DecodeError):
        return None
    of_file = (FORMAT, VERSION, stat.st_size, stat.st_mtime_ns)
    if (head.format, head.version, head.size, head.mtime_ns) != of_file or len(data) != 8 * (head.lines + 1):
        return None
    offsets = array("Q")
    offsets.frombytes(data)
    return _little(offsets)


def _fits(file: BinaryIO, offsets: array[int]) -> bool:
    """Whether the offsets end with the file, grow, and the last one begins a line."""
    if offsets[0] != 0 or offsets[-1] != os.fstat(file.fileno()).st_size:
        return False
    if len(offsets) > 2:
        file.seek(offsets[-2] - 1)
        return file.read(1) == b"\n"
    return True


def _scan(file: BinaryIO) -> array[int]:
    """The offsets of all lines."""
    offsets, place = array("Q", [0]), 0
    file.seek(0)
    while block := file.read(BLOCK):
        at = block.find(b"\n")
        while at >= 0:
            offsets.append(place + at + 1)
            at = block.find(b"\n", at + 1)
        place += len(block)
    if offsets[-1] != place:  # the last line has no newline
        offsets.append(place)
    return offsets


def _little(values: array[int]) -> array[int]:
    if sys.byteorder != "little":
        values = values[:]
        values.byteswap()
    return values


def _opened(file: Path) -> BinaryIO:
    try:
        return open(file, "rb")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
