"""The cache of verdicts and the budget of a judge, in a file of `rollouts.spending`."""

from __future__ import annotations

import trio

from rollouts.spending import SpendingStore, spent_words

TABLE = "verdicts"


class BudgetSpent(Exception):
    """Another request could exceed the budget."""


def open_store(file: str) -> SpendingStore:
    """The verdicts and the spending in this file; "": in memory."""
    return SpendingStore(file, TABLE)


def reserve(
    store: SpendingStore, tokens: int, dollars: float, tokens_max: int | None, dollars_max: float | None
) -> None:
    """Count a request before it is sent. Raises BudgetSpent if it could exceed the budget."""
    if store.reserve(tokens, dollars, tokens_max, dollars_max):
        return
    flag = "--reward.judge.tokens-max" if dollars_max is None else "--reward.judge.dollars-max"
    raise BudgetSpent(
        f"the budget of the reward judge is spent: {spent_words(*store.spent(), tokens_max, dollars_max)}, and the "
        f"next request may need more; resume with a larger {flag}, or type --reward.judge.when-spent none"
    )


_stores: trio.lowlevel.RunVar[dict[str, SpendingStore]] = trio.lowlevel.RunVar("rollouts-judge-stores")


def store_of(file: str) -> SpendingStore:
    """The store of this file in the current trio run."""
    try:
        stores = _stores.get()
    except LookupError:
        _stores.set(stores := {})
    if file not in stores:
        stores[file] = open_store(file)
    return stores[file]
