"""Conversations prepared for supervised training: tokenized by several processes, into files that are kept.

    CACHE/4f0c.../9a31....safetensors    the rows of about two thousand conversations

The rows are read in pieces. The name of a piece's file is a hash of its content, and that of the folder a hash of
everything else that decides its tokens. So a preparation that was killed continues, a file that grew is only prepared
where it is new, and memory holds a few pieces at a time. `CACHE` is `$ROLLOUTS_CACHE`, else `~/.cache/rollouts`, with
`prepared/`; you may delete it at any time. Training reads the files through a memory map.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import queue
import random
import subprocess
import sys
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import msgspec

from rollouts.chat.format import ChatFormat, load_chat_format
from rollouts.chat.masks import TurnsRow, encode_rows
from rollouts.chat.shown import lost_words
from rollouts.chat.template_style import probe_call
from rollouts.chat.tool_parsers import ChosenParser
from rollouts.data.conversations import (
    BadRowError,
    WeightedConversation,
    add_unread,
    described,
    read_conversation,
    unread_words,
)
from rollouts.data.loaders import NotARow
from rollouts.data.source import DataRow
from rollouts.disk import partial_name
from rollouts.errors import ConfigError, ModelError, RunError, counted, first_line, in_lines
from rollouts.training.datasets.chat_rows import ChatOptions, Cut, Planned, cut_rows, plan_rows
from rollouts.types import Sample

T = TypeVar("T")

PIECE_ROWS, PIECE_BYTES = 2048, 16_000_000
_BATCH_BYTES = 200_000
_VERSION = "5"  # of the files; a change of their content changes it
_SAMPLE_CHARACTERS = 200


class PieceReport(msgspec.Struct):
    """What one or several pieces hold. `bad` has the number of each row of a piece that is no conversation, with the
    reason and a sample, `unread` the names of columns that no conversation read, `lost` counts fields that are in none
    of the rows.
    """

    forms: dict[str, int] = {}
    bad: list[tuple[int, str, str]] = []
    cut: Cut = Cut()
    unread: set[str] = set()
    lost: dict[str, int] = {}

    def add(self, other: PieceReport) -> None:
        """Add another piece, without its bad rows."""
        self.cut = self.cut.plus(other.cut)
        add_unread(self.unread, other.unread)
        for own, new in ((self.forms, other.forms), (self.lost, other.lost)):
            for name, count in new.items():
                own[name] = own.get(name, 0) + count


def cache_folder() -> Path:
    """Where prepared conversations are kept."""
    given = os.environ.get("ROLLOUTS_CACHE")
    return (Path(given) if given else Path.home() / ".cache" / "rollouts") / "prepared"


@dataclass
class Preparer:
    """Prepares pieces with one tokenizer. `arguments` are those of the chat template. A process has one of these. With
    a tool parser, which may be no function of an installed package, one process prepares all.
    """

    tokenizer: Any
    arguments: dict[str, Any]
    options: ChatOptions
    chat: ChatFormat | None = None
    parser: ChosenParser | None = None

    def key(self) -> str:
        """A hash of everything but the rows that decides the tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        template = json.dumps(self.tokenizer.chat_template, sort_keys=True)
        shown = self.parser and (self.parser.name, self.parser.write and self.parser.write(probe_call().tool_calls))
        rest = msgspec.json.encode([_VERSION, self.arguments, self.options._asdict(), PIECE_ROWS, shown]).decode()
        return hashlib.sha256("\0".join((vocabulary, template, rest)).encode()).hexdigest()[:24]

    def prepare(self, content: bytes, path: str) -> None:
        """Write the file of a piece, whose `content` is a JSON list of rows."""
        import numpy
        from safetensors.numpy import save_file

        if self.chat is None:
            self.chat = load_chat_format(self.tokenizer, self.arguments, self.parser)
        report = PieceReport()
        tokens, weights = [numpy.empty(0, numpy.int32)], [numpy.empty(0, numpy.float32)]
        lengths, owners, places = array("q"), array("i"), array("d")
        numbered = enumerate(msgspec.json.decode(content, type=list[msgspec.Raw]))
        # The rows of a piece are encoded in parts. A token takes about a hundred bytes while it is new.
        for batch in _parts(numbered, lambda pair: len(bytes(pair[1])), _BATCH_BYTES):
            for planned, rows, raw in self._encoded(batch, report):
                kept, cut = cut_rows(planned, rows, self.options.max_length)
                report.cut = report.cut.plus(cut)
                if not kept:
                    continue
                for row in kept:
                    tokens.append(numpy.fromiter(row.tokens, numpy.int32, len(row.tokens)))
                    weights.append(mask := numpy.zeros(len(row.tokens), numpy.float32))
                    for start, end, place in row.turns:
                        mask[start:end] = planned.weights[place]
                    lengths.append(len(row.tokens))
                    owners.append(len(places))
                places.append(int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest()) / 2**64)
        whole = {
            "tokens": numpy.concatenate(tokens),
            "weights": numpy.concatenate(weights),
            "ends": numpy.cumsum(numpy.array(lengths, dtype=numpy.int64)),
            "owners": numpy.array(owners, dtype=numpy.int32),
            "places": numpy.array(places, dtype=numpy.float64),
        }
        temporary = Path(path).with_name(partial_name(f"{Path(path).name}.{os.getpid()}"))
        save_file(whole, temporary, metadata={"report": msgspec.json.encode(report).decode()})
        os.replace(temporary, path)

    def _encoded(
        self, batch: Sequence[tuple[int, msgspec.Raw]], report: PieceReport
    ) -> Iterator[tuple[Planned, list[TurnsRow], msgspec.Raw]]:
        """The conversations of a batch with their rows, encoded at once. Bad rows are added to the report."""
        assert self.chat is not None
        found: list[tuple[int, Planned, WeightedConversation, msgspec.Raw]] = []

        def bad(number: int, error: Exception, raw: msgspec.Raw) -> None:
            report.bad.append((number, str(error), bytes(raw)[:_SAMPLE_CHARACTERS].decode(errors="replace")))

        for number, raw in batch:
            try:
                conversation = read_conversation(msgspec.json.decode(raw))
                found.append((number, plan_rows(conversation, self.chat, self.options), conversation, raw))
            except (BadRowError, ModelError) as error:
                bad(number, error, raw)
        encoded = iter(encode_rows([text for _, planned, *_ in found for text in planned.texts], self.chat))
        for number, planned, conversation, raw in found:
            rows = list(itertools.islice(encoded, len(planned.texts)))
            try:
                lost = planned.check(rows, self.chat)
            except ModelError as error:
                bad(number, error, raw)
                continue
            report.add(PieceReport({conversation.form: 1}, unread=set(conversation.unread), lost=Counter(lost)))
            yield planned, rows, raw


def _parts(
    items: Iterable[T], size_of: Callable[[T], int], size_max: int, count_max: int = sys.maxsize
) -> Iterator[list[T]]:
    """The items in lists. A list ends with the item that exceeds `size_max`, and has at most `count_max`."""
    held: list[T] = []
    size = 0
    for item in items:
        held.append(item)
        size += size_of(item)
        if size > size_max or len(held) == count_max:
            yield held
            held, size = [], 0
    if held:
        yield held


class Piece(NamedTuple):
    """Rows that are prepared together: JSON, and the place of each."""

    content: bytes
    places: list[str]


def pieces(rows: Iterable[DataRow], bad: list[tuple[str, str, str]]) -> Iterator[Piece]:
    """The rows in pieces. Rows that are none are added to `bad`: place, reason, sample."""
    for held in _parts(_plain(rows, bad), lambda pair: len(pair[1]), PIECE_BYTES, PIECE_ROWS):
        yield Piece(b"[" + b",".join(encoded for _, encoded in held) + b"]", [place for place, _ in held])


def _plain(rows: Iterable[DataRow], bad: list[tuple[str, str, str]]) -> Iterator[tuple[str, bytes]]:
    """The place and the JSON of each row."""
    for place, value in rows:
        try:
            if isinstance(value, NotARow):
                raise BadRowError(value.why)
            yield place, msgspec.json.encode(value)
        except (BadRowError, TypeError, ValueError) as error:
            bad.append((place, str(error), ""))


@dataclass
class Prepared:
    """The prepared conversations: the files, what all pieces hold, and where each row is in the files. `bad` has place,
    reason and sample of each row that is no conversation.
    """

    files: list[Any] = field(default_factory=list)
    report: PieceReport = field(default_factory=PieceReport)
    bad: list[tuple[str, str, str]] = field(default_factory=list)
    file_of: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    first_rows: array[int] = field(default_factory=lambda: array("q"))  # of each conversation, and the number of rows
    positions: array[float] = field(default_factory=lambda: array("d"))  # of each conversation, from 0 to 1, by a hash

    def __len__(self) -> int:
        """The number of conversations."""
        return len(self.positions)

    def add(self, path: Path, places: Sequence[str]) -> None:
        """Add the file of a piece."""
        from safetensors import safe_open

        file: Any = safe_open(path, "np")
        report = msgspec.json.decode(file.metadata()["report"], type=PieceReport)
        self.report.add(report)
        self.bad += [(places[number], why, sample) for number, why, sample in report.bad]
        ends, owners = file.get_tensor("ends").tolist(), file.get_tensor("owners").tolist()
        rows, conversations = len(self.ends), len(self.positions)
        self.first_rows.extend(rows + at for at, owner in enumerate(owners) if not at or owner != owners[at - 1])
        self.positions.extend(file.get_tensor("places").tolist())
        assert len(self.first_rows) == len(self.positions) >= conversations, f"{path}: its rows do not fit"
        self.ends.extend(ends)
        self.starts.extend([0, *ends[:-1]] if ends else [])
        self.file_of.extend([len(self.files)] * len(ends))
        self.files.append(file)

    def rows_of(self, conversation: int) -> range:
        """The numbers of the rows of a conversation."""
        end = self.first_rows[conversation + 1] if conversation + 1 < len(self) else len(self.ends)
        return range(self.first_rows[conversation], end)

    def sample(self, row: int, rollout_index: int) -> Sample:
        """One row, read from its file."""
        file, part = self.files[self.file_of[row]], slice(self.starts[row], self.ends[row])
        tokens, weights = (file.get_slice(name)[part].tolist() for name in ("tokens", "weights"))
        return Sample(tokens=tokens, loss_mask=weights, rollout_index=rollout_index)

    def words(self, name: str) -> list[str]:
        """What was taken for what, what was not read, cut and skipped, each in one line."""
        found = self.report
        lines = [f"{name}: {described(found.forms, sum(found.forms.values()))}"]
        lines += [f"{name}: {words}" for words in (unread_words(found.unread), lost_words(found.lost)) if words]
        if any(found.cut):
            rows, left_out, tokens = found.cut
            lost = f"cut {counted(rows, 'row')} and left out {counted(left_out, 'row')}"
            lines.append(f"{name}: max_length {lost}, {counted(tokens, 'token')} in all")
        if self.bad:
            lines.append(f"{name}: skipped {counted(len(self.bad), 'row')}, such as {bad_words(self.bad[0])}")
        return lines


def bad_words(bad: tuple[str, str, str]) -> str:
    """A bad row in words: its place, the reason and a sample."""
    place, why, sample = bad
    return in_lines(f"{place}: {why}", f"the row: {sample}" if sample else "")


def prepare(
    rows: Iterable[DataRow],
    preparer: Preparer,
    *,
    processes: int = 0,
    skips: bool = False,
    folder: Path | None = None,
    name: str = "the data",
) -> Prepared:
    """Prepare all conversations of the rows, or find them in the cache `folder`. A single piece is prepared here,
    several by `processes` (0: one for each core).

    Raises ConfigError for a bad row, unless `skips`, and if no conversation is left.
    """
    folder = (folder or cache_folder()) / preparer.key()
    folder.mkdir(parents=True, exist_ok=True)
    prepared = Prepared()
    own: list[tuple[str, str, str]] = []
    waiting: deque[tuple[Piece, Path, Future[None] | None]] = deque()
    with contextlib.ExitStack() as stack:
        workers: _Workers | None = None
        for number, piece in enumerate(pieces(rows, own)):
            path = folder / f"{hashlib.sha256(piece.content).hexdigest()[:32]}.safetensors"
            job = None
            if not path.is_file():
                count = 1 if preparer.parser else processes or os.cpu_count() or 1
                workers = workers or stack.enter_context(_Workers(preparer, count))
                job = workers.submit(piece.content, str(path))
            waiting.append((piece, path, job))
            while len(waiting) > (2 * workers.count if workers else 0):
                _take(waiting, prepared, own, skips)
            del piece, number
        while waiting:
            _take(waiting, prepared, own, skips)
    prepared.bad[:0] = own
    _refuse_bad(prepared.bad, skips)
    if not len(prepared):
        why = "it holds no rows"
        if prepared.bad:
            why = f"no row is a conversation to train on: {bad_words(prepared.bad[0])}"
        elif any(prepared.report.cut):
            nothing = f"max_length {preparer.options.max_length} leaves nothing of any conversation"
            why = f"{nothing}; type a larger one (for their lengths, type: rollouts data inspect {name})"
        raise ConfigError(f"{name}: {why}")
    return prepared


def _take(waiting: deque[Any], prepared: Prepared, own: Sequence[Any], skips: bool) -> None:
    piece, path, job = waiting.popleft()
    if job is not None:
        job.result()
    prepared.add(path, piece.places)
    if not skips:
        _refuse_bad([*own, *prepared.bad], skips)


def _refuse_bad(bad: Sequence[tuple[str, str, str]], skips: bool) -> None:
    if bad and not skips:
        raise ConfigError(f"{bad_words(bad[0])}\nto skip and count such rows, type: --data.bad-rows skip")


class _Workers:
    """Processes that prepare pieces. The first piece, and all with a count of 1, are prepared in this process."""

    def __init__(self, preparer: Preparer, count: int) -> None:
        self.count = count
        self._preparer = preparer
        self._begun = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[tuple[Any, bool]] = queue.SimpleQueue()  # a process, and whether it is new
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
            process.communicate()

    def submit(self, content: bytes, path: str) -> Future[None] | None:
        """Prepare a piece. None: it is done."""
        self._begun += 1
        if self._begun == 1 or self.count == 1:
            self._preparer.prepare(content, path)
            return None
        if len(self._processes) < self.count:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            command = [sys.executable, "-m", "rollouts.training.datasets.prepared"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._processes.append(process)
            self._idle.put((process, True))
        return self._threads.submit(self._ask, content, path)

    def _ask(self, content: bytes, path: str) -> None:
        process, is_new = self._idle.get()
        try:
            if is_new:
                preparer = self._preparer
                pickle.dump((preparer.tokenizer, preparer.arguments, tuple(preparer.options)), process.stdin)
            pickle.dump((content, path), process.stdin)
            process.stdin.flush()
            error = pickle.load(process.stdout)
        except (OSError, EOFError) as lost:
            raise RunError(
                "a process that tokenizes ended; type --data.processes 1 to tokenize in the process of the run"
            ) from lost
        finally:
            self._idle.put((process, False))
        if error is not None:
            raise error


class ShuffledSamples(Sequence[Sample]):
    """`count` samples of conversations, epoch after epoch, each epoch in another order: a function of the seed and the
    epoch alone. The rows of a conversation follow each other, and share their `rollout_index`.
    """

    def __init__(
        self, prepared: Prepared, conversations: Sequence[int], count: int, seed: int, *, is_shuffled: bool = True
    ) -> None:
        self.prepared, self.seed, self.is_shuffled = prepared, seed, is_shuffled
        self._conversations = array("q", conversations)
        self._count = count
        self._epoch, self._order = -1, array("q")
        self.rows = sum(len(prepared.rows_of(each)) for each in conversations)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        epoch, place = divmod(index, self.rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        row = self._order[place]
        owner = bisect_right(self.prepared.first_rows, row) - 1
        return self.prepared.sample(row, epoch * len(self.prepared) + owner)

    def _order_of(self, epoch: int) -> array[int]:
        order = array("q", self._conversations)
        if self.is_shuffled:
            random.Random(f"{self.seed}/conversations/{epoch}").shuffle(order)
        return array("q", (row for conversation in order for row in self.prepared.rows_of(conversation)))


def divided(prepared: Prepared, fraction: float) -> tuple[list[int], list[int]]:
    """The conversations to train on, and those to hold out, by a hash of their content: equal rows stay together."""
    held_out = [number for number, at in enumerate(prepared.positions) if at < fraction]
    trained = [number for number, at in enumerate(prepared.positions) if at >= fraction]
    if not trained or (fraction and not held_out):
        what = f"--data.held-out {fraction}: of {counted(len(prepared), 'conversation')}"
        raise ConfigError(f"{what}, {len(held_out)} would be held out; type another fraction, or 0")
    return trained, held_out


def _serve() -> None:
    """Prepare the pieces that standard input sends, until it ends: the program of a worker."""
    given, taken = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    tokenizer, arguments, options = pickle.load(given)
    preparer = Preparer(tokenizer, arguments, ChatOptions(*options))
    with contextlib.suppress(EOFError):
        while True:
            content, path = pickle.load(given)
            try:
                preparer.prepare(content, path)
                error = None
            except Exception as failure:  # the run raises it
                error = RunError(f"the preparation of conversations failed: {first_line(failure)}")
            pickle.dump(error, taken)
            taken.flush()


if __name__ == "__main__":
    _serve()
