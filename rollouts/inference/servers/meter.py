"""The limits of an API: requests are counted before they are sent, so that tokens and dollars never exceed them.

    meter = Meter(SpendingStore(file), "gpt-4.1-mini", prices, dollars_max=1.0)
    request = meter.request(body, max_tokens)
    await request.reserve()                        # waits for open requests, or raises BudgetSpentError
    ... an attempt, inside `async with request:`
    request.settle(prompt_tokens, completion_tokens)

A request reserves the most that it can cost. If that does not fit, it waits for the open ones, which usually cost less
than they reserved. Only if none is open, the budget is spent. Not here: the file (`rollouts.spending`).
"""

from __future__ import annotations

from typing import Any, Self

import trio

from rollouts.errors import BudgetSpentError
from rollouts.inference.base import Spending
from rollouts.inference.servers.http import HTTPFailure
from rollouts.spending import Prices, SpendingStore, input_tokens_at_most, price, spent_words


class Meter:
    """Counts the requests of one model, within limits. `flag` begins the flags of the limits in messages."""

    def __init__(
        self,
        store: SpendingStore,
        model: str,
        prices: Prices | None = None,
        *,
        tokens_max: int | None = None,
        dollars_max: float | None = None,
        flag: str = "--inference",
    ) -> None:
        self._store, self._model, self._prices, self._flag = store, model, prices, flag
        self._limits = tokens_max, dollars_max
        self._open = 0
        self._turn, self._changed = trio.StrictFIFOLock(), trio.Event()

    def request(self, body: bytes, max_tokens: int) -> MeteredRequest:
        """A request with this body, whose reply has at most `max_tokens` tokens."""
        most = input_tokens_at_most(body)
        return MeteredRequest(self, most + max_tokens, price(self._prices, self._model, most, max_tokens))

    async def reserve(self, tokens: int, dollars: float) -> None:
        """Count the most that a request can cost. Raises BudgetSpentError if the limits do not allow it."""
        async with self._turn:  # in the order of their arrival, so that a long request is not passed by short ones
            while not self._store.reserve(tokens, dollars, *self._limits):
                if not self._open:
                    raise self._spent(tokens, dollars)
                self._changed = trio.Event()
                await self._changed.wait()
            self._open += 1

    def close_request(self, tokens: int, dollars: float) -> None:
        """Add the difference between what a request cost and what it reserved: it is not open any more."""
        self._store.settle(tokens, dollars)
        self._open -= 1
        self._changed.set()

    def settle(self, reserved: MeteredRequest, input_tokens: int | None, output_tokens: int | None) -> None:
        """Count the price of a reply in place of what was reserved. Without its tokens, it counts as the most."""
        if input_tokens is None or output_tokens is None or min(input_tokens, output_tokens) < 0:
            self._store.count(requests=1)
            self.close_request(0, 0.0)
            return
        self._store.count(requests=1, prompt_tokens=input_tokens, completion_tokens=output_tokens)
        dollars = price(self._prices, self._model, input_tokens, output_tokens)
        self.close_request(input_tokens + output_tokens - reserved.tokens, dollars - reserved.dollars)

    def hit(self) -> None:
        """Count a reply that was read from a file."""
        self._store.count(cache_hits=1)

    def spending(self) -> Spending:
        """What was spent so far."""
        (tokens, dollars), counts = self._store.spent(), self._store.counts()
        own = {name: counts.get(name, 0) for name in ("requests", "cache_hits", "prompt_tokens", "completion_tokens")}
        known = dollars if self._model in (self._prices or {}) else None
        return Spending(**own, tokens_spent=tokens, dollars=known)

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def _spent(self, tokens: int, dollars: float) -> BudgetSpentError:
        """The error for a request that may cost this much, with the flags of higher limits."""
        spent, (tokens_max, dollars_max) = self._store.spent(), self._limits
        needs, flags = [], []
        if tokens_max is not None and spent[0] + tokens > tokens_max:
            needs.append(f"{tokens} tokens")
            flags.append(f"{self._flag}.tokens-max {2 * (spent[0] + tokens)}")
        if dollars_max is not None and spent[1] + dollars > dollars_max:
            needs.append(f"${dollars:.4f}")
            flags.append(f"{self._flag}.dollars-max {2 * (spent[1] + dollars):.2g}")
        return BudgetSpentError(
            f"the budget of {self._model} is spent: {spent_words(*spent, *self._limits)}, and the next request may "
            f"need {' and '.join(needs)} more",
            flags=" ".join(flags),
        )


class MeteredRequest:
    """One request, and the most `tokens` and `dollars` that an attempt can cost. Enter it for each attempt."""

    def __init__(self, meter: Meter, tokens: int, dollars: float) -> None:
        self.tokens, self.dollars, self._meter, self._is_open = tokens, dollars, meter, False

    async def reserve(self) -> None:
        """Reserve what the next attempt can cost, unless it is reserved. Raises BudgetSpentError."""
        if not self._is_open:
            await self._meter.reserve(self.tokens, self.dollars)
            self._is_open = True

    async def __aenter__(self) -> Self:
        await self.reserve()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """A failed attempt that the API may have billed counts as the most that it can have cost."""
        if error is not None and not _is_free(error):
            self._close(0, 0.0)

    def settle(self, input_tokens: int | None, output_tokens: int | None) -> None:
        """Count the tokens of the reply in place of what was reserved; None: the API did not report them."""
        assert self._is_open, "a reply comes from an attempt"
        self._is_open = False
        self._meter.settle(self, input_tokens, output_tokens)

    def give_back(self) -> None:
        """Take back what is reserved, after attempts that were free."""
        if self._is_open:
            self._close(-self.tokens, -self.dollars)

    def _close(self, tokens: int, dollars: float) -> None:
        self._is_open = False
        self._meter.close_request(tokens, dollars)


def _is_free(error: BaseException) -> bool:
    """Whether an attempt cost nothing: there was no connection, or the API answered with an error status."""
    return isinstance(error, HTTPFailure) and (error.kind == "refused" or error.status is not None)
