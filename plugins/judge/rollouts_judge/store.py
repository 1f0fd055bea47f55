"""The cache of verdicts, and what was spent, in SQLite.

Several processes may use one file. Before a request, the most that it can cost is added to what was spent, if the
budget allows it; after the reply, the difference is taken back. So a budget is never exceeded, and a process that dies
leaves its open requests counted.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from typing import Any

import trio

from rollouts.errors import ConfigError

BUSY_SECONDS = 20.0
TABLES = """
CREATE TABLE IF NOT EXISTS verdicts (request TEXT PRIMARY KEY, verdict TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (
    one INTEGER PRIMARY KEY CHECK (one = 1), tokens INTEGER NOT NULL, dollars REAL NOT NULL
);
INSERT OR IGNORE INTO spent VALUES (1, 0, 0.0);
"""


class BudgetSpent(Exception):
    """Another request could exceed the budget."""


class Store:
    """Verdicts and spending in one file, or in memory. Threads may share it."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(
            file or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._close = weakref.finalize(self, self._connection.close)
        if file:
            self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(TABLES)

    def close(self) -> None:
        """Close the file."""
        self._close()

    def verdict(self, request: str) -> str | None:
        """The verdict of a request; None if there is none."""
        rows = self._run("SELECT verdict FROM verdicts WHERE request = ?", request)
        return str(rows[0][0]) if rows else None

    def keep(self, request: str, verdict: str) -> None:
        """Keep the verdict of a request."""
        self._run("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", request, verdict)

    def spent(self) -> tuple[int, float]:
        """Tokens and dollars, with those of open requests."""
        ((tokens, dollars),) = self._run("SELECT tokens, dollars FROM spent")
        return int(tokens), float(dollars)

    def reserve(self, tokens: int, dollars: float, tokens_max: int | None, dollars_max: float | None) -> None:
        """Count a request before it is sent. Raises BudgetSpent if it could exceed the budget."""
        changed = self._run(
            "UPDATE spent SET tokens = tokens + ?1, dollars = dollars + ?2 "
            "WHERE (?3 IS NULL OR tokens + ?1 <= ?3) AND (?4 IS NULL OR dollars + ?2 <= ?4) RETURNING one",
            *(tokens, dollars, tokens_max, dollars_max),
        )
        if not changed:
            raise BudgetSpent(self._words(tokens_max, dollars_max))

    def settle(self, tokens: int, dollars: float) -> None:
        """Add the difference between what a request cost and what was reserved for it."""
        self._run("UPDATE spent SET tokens = tokens + ?, dollars = max(dollars + ?, 0.0)", tokens, dollars)

    def _words(self, tokens_max: int | None, dollars_max: float | None) -> str:
        tokens, dollars = self.spent()
        limits = [f"{tokens} of {tokens_max} tokens"] if tokens_max is not None else []
        limits += [f"${dollars:.4f} of ${dollars_max:.4f}"] if dollars_max is not None else []
        flag = "--reward.judge.tokens-max" if dollars_max is None else "--reward.judge.dollars-max"
        return (
            f"the budget of the reward judge is spent: {' and '.join(limits)}, and the next request may need more; "
            f"resume with a larger {flag}, or type --reward.judge.when-spent none"
        )

    def _run(self, statement: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._connection.execute(statement, values).fetchall()


_stores: trio.lowlevel.RunVar[dict[str, Store]] = trio.lowlevel.RunVar("rollouts-judge-stores")


def store_of(file: str) -> Store:
    """The store of this file in the current trio run."""
    try:
        stores = _stores.get()
    except LookupError:
        _stores.set(stores := {})
    if file not in stores:
        stores[file] = Store(file)
    return stores[file]


def check_file(file: str) -> None:
    """Raise ConfigError if the file cannot hold a store."""
    try:
        Store(file).close()
    except sqlite3.Error as error:
        raise ConfigError(
            f"--reward.judge.cache {file}: {error}; give the path of a SQLite file in a folder that exists"
        ) from error
