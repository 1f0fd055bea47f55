"""Language models as judges: `--reward judge --reward.judge.model gpt-5-mini`.

One or several models grade a reply by a rubric, over any chat-completions API. Their votes become one reward from 0
to 1. If there is no verdict, the reward is None, never 0. Not here: judges that compare the rollouts of a group, and
the run's own engine, which rewards cannot reach.

    settings    the settings, and their check before a run starts
    prompts     the request of one vote, and the verdict in its reply
    api         one request, with retries
    store       the cache of verdicts, and what was spent
    votes       many votes as one reward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import trio

from rollouts import Score, Task, Trajectory
from rollouts.errors import RewardError
from rollouts.plugins.checks import checked_by
from rollouts.spending import SpendingStore
from rollouts_judge import prompts
from rollouts_judge.api import ChatAPI, Refused, verification
from rollouts_judge.settings import JudgeSettings, check, require_model_and_key
from rollouts_judge.store import BudgetSpent, store_of
from rollouts_judge.votes import Vote, score_of

__all__ = ["JudgeSettings", "judge"]

_limiters: trio.lowlevel.RunVar[dict[str, trio.CapacityLimiter]] = trio.lowlevel.RunVar("rollouts-judge-limiters")


@checked_by(check)
async def judge(task: Task, trajectory: Trajectory, *, settings: JudgeSettings = JudgeSettings()) -> Score:
    """The verdict of one or several language models, from 0 to 1; None if they give none.

    Raises ConfigError if no model or no key is given. Raises RewardError, which ends the run, if the budget is spent
    and `when_spent` is "stop".
    """
    require_model_and_key(settings)
    store = store_of(settings.cache)
    requests = [
        prompts.request_of(settings, model, sample, task, trajectory)
        for model in settings.models
        for sample in range(settings.samples)
    ]
    votes = [Vote(why="it was not asked")] * len(requests)

    async with httpx.AsyncClient(timeout=settings.request_seconds, verify=verification(settings.url)) as client:
        api = ChatAPI(client, settings, store)

        async def ask(place: int) -> None:
            votes[place] = await _vote(api, store, requests[place])

        await _all(ask, len(requests), settings)
    return score_of(votes, settings)


async def _vote(api: ChatAPI, store: SpendingStore, request: prompts.Request) -> Vote:
    """The vote of one request: from the cache, or from the model."""
    cached = await trio.to_thread.run_sync(store.reply, request.key)
    if cached is not None:
        return Vote(prompts.verdict_in(cached, api.settings), cached=True)
    try:
        reply = await api.ask(request)
    except Refused as error:
        return Vote(why=str(error), tokens=error.tokens, dollars=error.dollars)
    except BudgetSpent as error:
        if api.settings.when_spent == "stop":
            raise RewardError(str(error)) from error
        return Vote(why=str(error))
    verdict = prompts.verdict_in(reply.text, api.settings, request.nonce)
    if verdict is None:
        why = f"the reply of {request.model} is no verdict: {prompts.excerpt(reply.text)}"
        return Vote(why=why, tokens=reply.tokens, dollars=reply.dollars)
    await trio.to_thread.run_sync(store.keep, request.key, prompts.without_nonce(verdict))
    return Vote(verdict, tokens=reply.tokens, dollars=reply.dollars)


async def _all(ask: Callable[[int], Any], count: int, settings: JudgeSettings) -> None:
    """Call `ask` with 0 to count - 1 at the same time, within the limit of all judges of this process at one URL."""
    try:
        limiters = _limiters.get()
    except LookupError:
        _limiters.set(limiters := {})
    limiter = limiters.setdefault(settings.url, trio.CapacityLimiter(settings.concurrency))
    limiter.total_tokens = min(limiter.total_tokens, settings.concurrency)

    async def limited(place: int) -> None:
        async with limiter:
            await ask(place)

    spent: list[BaseException] = []
    try:
        async with trio.open_nursery() as nursery:
            for place in range(count):
                nursery.start_soon(limited, place)
    except* RewardError as group:
        spent += group.exceptions
    if spent:
        raise spent[0]
