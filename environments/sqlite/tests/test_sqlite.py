from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest
from rollouts_sqlite import SQLite, ask

from rollouts.check import check_environment_class
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory


@pytest.fixture
def path() -> Iterator[str]:
    yield from SQLite().shared()


@pytest.mark.parametrize(
    "only", [["settings", "oracle"], pytest.param([], marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_the_contract(only: list[str]) -> None:
    check_environment_class(SQLite, tasks=2, only=only, skip=["wheel", "imports"])


def test_answers_agree_with_sums_in_python(path: str) -> None:
    """Two kinds of questions, computed without SQL's aggregates."""
    with sqlite3.connect(path) as connection:
        customers = {row[0]: row[1:] for row in connection.execute("SELECT * FROM customers")}
        products = {row[0]: row[1:] for row in connection.execute("SELECT * FROM products")}
        orders = [row[1:] for row in connection.execute("SELECT * FROM orders")]
    connection.close()
    env = SQLite()
    tasks = {task.prompt: task.answer for split in ("train", "eval") for task in env.tasks(split, None, path)}  # type: ignore[arg-type]
    assert len(tasks) == 3 * 5 - 5 + 2 * 10 + 2 * 20
    for city in {city for _, city in customers.values()}:
        paid = sum(amount * products[product][1] for who, product, amount in orders if customers[who][1] == city)
        assert tasks[f"How much did the customers from {city} pay for all their orders?"] == str(paid)
    for name, price in products.values():
        pieces = sum(amount for _, product, amount in orders if products[product][0] == name)
        assert tasks[f"How many pieces of the {name} were ordered?"] == str(pieces)
        assert tasks[f"What is the price of the {name}?"] == str(price)


def test_the_file_is_removed_at_the_end() -> None:
    shared = SQLite().shared()
    path = next(shared)
    assert ask(path, "SELECT 1").endswith("1")
    assert next(shared, None) is None
    with pytest.raises(sqlite3.OperationalError):
        ask(path, "SELECT 1")


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM orders",
        "WITH x AS (SELECT 1) DELETE FROM orders",
        "SELECT 1; DROP TABLE orders",
        "ATTACH 'other.db' AS other",
        "PRAGMA query_only = 0",
        "SELECT load_extension('x')",
        "SELECT writefile('x', 'y')",
        "SELECT * FROM nothing",
        "select",
        "",
        "SELECT zeroblob(2000000000)",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    ],
)
def test_what_is_refused(path: str, sql: str) -> None:
    with pytest.raises(ValueError):
        ask(path, sql)
    assert int(ask(path, "SELECT count(*) FROM orders").splitlines()[1]) == 200


def test_rows_are_cut(path: str) -> None:
    lines = ask(path, "SELECT id, NULL FROM orders", rows_max=3).splitlines()
    assert lines == ["id | NULL", "1 | NULL", "2 | NULL", "3 | NULL", "..."]


@pytest.mark.parametrize(("text", "expected"), [("Oslo", 1.0), (" Oslo.\n", 1.0), ("Oslo or Kiel", 0.0), ("", 0.0)])
def test_the_reward(text: str, expected: float) -> None:
    task = Task("In which city does Ada live?", answer="Oslo")
    assert SQLite().correct(task, Trajectory(task, [Message("assistant", text)])) == expected


@pytest.mark.parametrize("settings", [{"orders": 0}, {"rows_max": 0}])
def test_settings_that_make_no_sense(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--env\."):
        SQLite(**settings)
