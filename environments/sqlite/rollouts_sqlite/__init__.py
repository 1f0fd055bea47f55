"""Questions about a small shop, answered with SQL over a real SQLite file.

The model reads the tables with `tables`, asks with `query`, and answers with a text or a number as its last message.
The reward is 1 if that message is the answer. The file is opened for reading only, and each query has limits of time
and rows.

    rollouts run --env sqlite
"""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.env import reward, tool, tool_use
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory

__all__ = ["SQLite", "ask"]

SCHEMA = """\
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers,
  product_id INTEGER REFERENCES products, amount INTEGER);
"""
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Iris Jon Kai Lena Mia Nils Olga Paul Rosa Sven Tara Uwe".split()
CITIES = ("Bonn", "Kiel", "Lyon", "Oslo", "Turin")
PRODUCTS = ("chair", "clock", "desk", "lamp", "mirror", "rug", "shelf", "sofa", "table", "vase")
STEPS_MAX = 1_000_000  # instructions of SQLite's virtual machine; a query above is interrupted


class Question(NamedTuple):
    """A question and the query that answers it. Both name `{city}`, `{product}` or `{customer}`."""

    text: str
    sql: str


QUESTIONS = (
    Question("How many customers live in {city}?", "SELECT count(*) FROM customers WHERE city = '{city}'"),
    Question("What is the price of the {product}?", "SELECT price FROM products WHERE name = '{product}'"),
    Question("In which city does {customer} live?", "SELECT city FROM customers WHERE name = '{customer}'"),
    Question(
        "How many orders did {customer} make?",
        "SELECT count(*) FROM orders JOIN customers c ON c.id = customer_id WHERE c.name = '{customer}'",
    ),
    Question(
        "How many pieces of the {product} were ordered?",
        "SELECT coalesce(sum(amount), 0) FROM orders JOIN products p ON p.id = product_id WHERE p.name = '{product}'",
    ),
    Question(
        "How much did the customers from {city} pay for all their orders?",
        "SELECT coalesce(sum(amount * price), 0) FROM orders JOIN products p ON p.id = product_id "
        "JOIN customers c ON c.id = customer_id WHERE c.city = '{city}'",
    ),
)


@dataclass
class SQLite:
    """Questions about a shop, answered with SQL."""

    seed: int = 0  # the content of the database
    orders: int = 200  # how many orders it has
    rows_max: int = 20  # a query shows so many rows

    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        for name in ("orders", "rows_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--env.{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")

    def shared(self) -> Iterator[str]:
        """The path of the database, which all episodes read. It is removed at the end."""
        with tempfile.TemporaryDirectory(prefix="rollouts-sqlite-") as folder:
            path = str(Path(folder, "shop.db"))
            with closing(sqlite3.connect(path)) as connection, connection:
                self._fill(connection)
            yield path

    def tasks(self, split: str, rng: random.Random, shared: str) -> list[Task]:
        """All questions about this shop. A fifth of them is for evaluation."""
        return [task for task, _ in self._questions(split, shared)]

    def demonstrations(self, split: str, rng: random.Random, shared: str) -> Iterator[list[Message]]:
        """Conversations of an expert, who sends one query and repeats its result."""
        questions = self._questions(split, shared)
        while True:
            task, sql = rng.choice(questions)
            turn = tool_use("query", {"sql": sql}, ask(shared, sql, self.rows_max))
            yield [*task.messages, *turn, Message("assistant", task.answer)]

    def setup(self, task: Task, shared: str) -> None:
        self.path = shared

    @tool
    def tables(self) -> str:
        """Show the tables and their columns."""
        return SCHEMA

    @tool(timeout_seconds=10)
    def query(self, sql: str) -> str:
        """Send one SELECT statement, and read the rows.

        Args:
            sql: such as SELECT name FROM products WHERE price > 100
        """
        return ask(self.path, sql, self.rows_max)

    @reward
    def correct(self, task: Task, trajectory: Trajectory) -> float:
        """1 if the last message is the answer, with or without a period, else 0."""
        return float(trajectory.last_text.strip().removesuffix(".") == task.answer)

    def _fill(self, connection: sqlite3.Connection) -> None:
        rng = random.Random(self.seed)
        connection.executescript(SCHEMA)
        people = [(name, rng.choice(CITIES)) for name in NAMES]
        connection.executemany("INSERT INTO customers (name, city) VALUES (?, ?)", people)
        prices = [(name, rng.randrange(5, 500)) for name in PRODUCTS]
        connection.executemany("INSERT INTO products (name, price) VALUES (?, ?)", prices)
        orders = [
            (rng.randint(1, len(NAMES)), rng.randint(1, len(PRODUCTS)), rng.randint(1, 5)) for _ in range(self.orders)
        ]
        connection.executemany("INSERT INTO orders (customer_id, product_id, amount) VALUES (?, ?, ?)", orders)

    def _questions(self, split: str, path: str) -> list[tuple[Task, str]]:
        """Each question of the split with its query. Its answer is the only value of the only row."""
        words = {"city": CITIES, "product": PRODUCTS, "customer": NAMES}
        found = []
        for question in QUESTIONS:
            for key, values in words.items():
                found += [
                    (question.text.format(**{key: value}), question.sql.format(**{key: value}))
                    for value in values
                    if f"{{{key}}}" in question.text
                ]
        held_out = {index for index in range(len(found)) if index % 5 == 2}
        chosen = [each for index, each in enumerate(found) if (index in held_out) == (split == "eval")]
        return [(Task(text, answer=ask(path, sql).splitlines()[-1]), sql) for text, sql in chosen]


def ask(path: str, sql: str, rows_max: int = 20) -> str:
    """The rows of a query as text: a line with the names of the columns, then a line for each row.

    Raises ValueError for anything but a SELECT, for an error of SQLite, and for a query that takes too long.
    """
    if not sql.strip().lower().startswith(("select", "with")):
        raise ValueError("only SELECT statements are possible")
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)  # a text of a gigabyte is refused
        connection.set_authorizer(_only_reads)
        connection.set_progress_handler(lambda: 1, STEPS_MAX)
        try:
            cursor = connection.execute(sql)
            rows = cursor.fetchmany(rows_max + 1)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ValueError(str(error)) from None
        lines = [" | ".join(column[0] for column in cursor.description)]
        lines += [" | ".join("NULL" if value is None else str(value) for value in row) for row in rows[:rows_max]]
    return "\n".join([*lines, "..."] if len(rows) > rows_max else lines)


def _only_reads(action: int, *names: Any) -> int:
    """Refuses to attach other files and to change settings of the connection."""
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY
