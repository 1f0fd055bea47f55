"""What requests to an API have cost, and replies that need not be paid for again, in SQLite.

Several processes may use one file. Before a request, the most that it can cost is added to what was spent, if the
limits allow it. After the reply, the difference is taken back. So a limit is never exceeded, and a process that dies
leaves its open requests counted. Not here: requests, and what to do if the money is spent (`openai`, and the reward
`judge`).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError, RunError

BUSY_SECONDS = 20.0
HIDDEN_TOKENS = 256  # a chat template adds tokens that are not in the request

Prices = Mapping[str, tuple[float, float]]
"""By model: dollars for a million input tokens, and for a million output tokens."""


class SpendingStore:
    """Replies, spending and counts in one file, or in memory. Threads may share it. `table` is that of the replies.

    Raises RunError if the file cannot be read or written.
    """

    def __init__(self, file: str, table: str = "replies") -> None:
        assert table.isidentifier(), table
        self._file, self._lock = file, threading.Lock()
        columns = ("request", "verdict" if table == "verdicts" else "reply")
        self._table, self._column = table, columns[1]
        with self._named():
            self._connection = sqlite3.connect(
                file or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._close = weakref.finalize(self, self._connection.close)
            if file:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(_TABLES.format(table=table, request=columns[0], reply=columns[1]))

    def close(self) -> None:
        """Close the file."""
        self._close()

    def reply(self, request: str) -> str | None:
        """The reply to a request; None if there is none."""
        rows = self._run(f"SELECT {self._column} FROM {self._table} WHERE request = ?", request)
        return str(rows[0][0]) if rows else None

    def keep(self, request: str, reply: str) -> None:
        """Keep the reply to a request."""
        self._run(f"INSERT OR IGNORE INTO {self._table} VALUES (?, ?)", request, reply)

    def spent(self) -> tuple[int, float]:
        """Tokens and dollars, with those of open requests."""
        ((tokens, dollars),) = self._run("SELECT tokens, dollars FROM spent")
        return int(tokens), float(dollars)

    def reserve(self, tokens: int, dollars: float, tokens_max: int | None, dollars_max: float | None) -> bool:
        """Count a request before it is sent. False: it could exceed a limit, and is not counted."""
        changed = self._run(
            "UPDATE spent SET tokens = tokens + ?1, dollars = dollars + ?2 "
            "WHERE (?3 IS NULL OR tokens + ?1 <= ?3) AND (?4 IS NULL OR dollars + ?2 <= ?4) RETURNING one",
            *(tokens, dollars, tokens_max, dollars_max),
        )
        return bool(changed)

    def settle(self, tokens: int, dollars: float) -> None:
        """Add the difference between what a request cost and what was reserved for it."""
        self._run("UPDATE spent SET tokens = tokens + ?, dollars = max(dollars + ?, 0.0)", tokens, dollars)

    def count(self, **counts: int) -> None:
        """Add to counts, such as those of requests."""
        for name, value in counts.items():
            self._run(
                "INSERT INTO counts VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2", name, value
            )

    def counts(self) -> dict[str, int]:
        """All counts."""
        return {str(name): int(value) for name, value in self._run("SELECT name, value FROM counts")}

    def _run(self, statement: str, *values: Any) -> list[Any]:
        with self._lock, self._named():
            return self._connection.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of SQLite, as one that names the file."""
        try:
            yield
        except sqlite3.Error as error:
            raise RunError(
                f"the file {self._file or 'in memory'} cannot be used: {error}; move it away, or give another one"
            ) from error


_TABLES = """
CREATE TABLE IF NOT EXISTS {table} ({request} TEXT PRIMARY KEY, {reply} TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (
    one INTEGER PRIMARY KEY CHECK (one = 1), tokens INTEGER NOT NULL, dollars REAL NOT NULL
);
INSERT OR IGNORE INTO spent VALUES (1, 0, 0.0);
CREATE TABLE IF NOT EXISTS counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


def price(prices: Prices | None, model: str, input_tokens: int, output_tokens: int) -> float:
    """Dollars for this many tokens of a model; 0 if its price is not given.

    >>> price({"m": (2.0, 10.0)}, "m", 500_000, 100_000)
    2.0
    """
    of_input, of_output = (prices or {}).get(model, (0.0, 0.0))
    return (input_tokens * of_input + output_tokens * of_output) / 1e6


def input_tokens_at_most(body: bytes) -> int:
    """The most input tokens of a request with this body: no tokenizer needs more tokens than bytes."""
    return len(body) + HIDDEN_TOKENS


def spent_words(tokens: int, dollars: float, tokens_max: int | None, dollars_max: float | None) -> str:
    """What was spent of each limit.

    >>> spent_words(90, 0.5, 100, None), spent_words(90, 0.5, None, 9.0)
    ('90 of 100 tokens', '$0.5000 of $9.0000')
    """
    limits = [f"{tokens} of {tokens_max} tokens"] if tokens_max is not None else []
    limits += [f"${dollars:.4f} of ${dollars_max:.4f}"] if dollars_max is not None else []
    return " and ".join(limits)


def check_prices(flag: str, models: Iterable[str], prices: Prices | None, dollars_max: float | None) -> None:
    """Raise ConfigError for a limit in dollars without the price of each model, and for a negative price. `flag` is the
    beginning of the flags, such as `--inference`.
    """
    unpriced = [model for model in models if model not in (prices or {})]
    if dollars_max is not None and unpriced:
        raise ConfigError(
            f"{flag}.dollars-max {dollars_max:g}: {unpriced[0]} has no price; type, in dollars for a "
            f"million input and output tokens, {flag}.prices '{{ \"{unpriced[0]}\" = [0.25, 2.0] }}'"
        )
    for model, pair in (prices or {}).items():
        if min(pair) < 0:
            raise ConfigError(f"{flag}.prices: the price of {model} is {list(pair)}; expected 0 or more")


def check_file(flag: str, file: str, table: str = "replies") -> None:
    """Raise ConfigError if the file cannot hold a store. A file that does not exist yet is not made."""
    path, why = Path(file), ""
    if not path.exists():
        if not path.parent.is_dir():
            why = f"there is no folder {path.parent}"
        elif not os.access(path.parent, os.W_OK):
            why = f"the folder {path.parent} cannot be written"
    else:
        try:
            SpendingStore(file, table).close()
        except RunError as error:
            why = str(error.__cause__)
    if why:
        raise ConfigError(f"{flag} {file}: {why}; give the path of a SQLite file in a folder that exists")
