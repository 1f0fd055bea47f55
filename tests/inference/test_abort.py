"""Replies that are given back half done, and go on: token for token those of an unbroken generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trio
import trio.testing

from rollouts.inference.base import GenerateRequest, Generation
from rollouts.inference.embedded.decode import BLOCK, uniforms
from rollouts.inference.embedded.hf import HFInference
from rollouts.inference.suspend import join_generations

LENGTH = 90


@pytest.mark.parametrize("offset", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_a_stream_can_begin_anywhere(offset):
    whole, late = uniforms(11), uniforms(11, offset)
    numbers = [next(whole) for _ in range(offset + 70)]
    assert [next(late) for _ in range(70)] == numbers[offset:]


def request(session: str, member: int, said: tuple[int, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        [1, 2, 3 + member, *said], LENGTH - len(said), (), 100 + member, order=(0, member, 0), session=session,
        offset=len(said),
    )  # fmt: skip


def use(model: Any, body: Any, **settings: Any) -> Any:
    async def main() -> Any:
        with trio.fail_after(60):
            async with HFInference(model, None, **settings) as engine:
                return await body(engine)

    return trio.run(main)


async def together(engine: HFInference, sessions: list[str], said: list[Generation], abort_at: int | None) -> None:
    """One request for each session; all are aborted once so many tokens were sampled. `said` grows."""

    async def one(member: int) -> None:
        before = said[member]
        if before.finish == "abort":
            reply = await engine.generate(request(sessions[member], member, tuple(before.tokens)))
            said[member] = join_generations(before, reply)

    async with trio.open_nursery() as nursery:
        start = engine.statistics().sampled
        for member in range(len(sessions)):
            nursery.start_soon(one, member)
        if abort_at is not None:
            while engine.statistics().sampled < start + abort_at:  # noqa: ASYNC110  # counted in a thread
                await trio.sleep(0.001)
            for session in sessions:
                await engine.abort(session)


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.nightly), "gemma3", "mamba"])
@pytest.mark.parametrize("rows_max", [pytest.param(256, marks=pytest.mark.nightly), 2])
def test_streams_are_those_of_an_unbroken_generation(models, name, rows_max):
    async def body(engine: HFInference) -> tuple[list[Generation], int]:
        assert engine.capabilities.aborts
        said = [Generation([], [], "abort", [])] * 5
        breaks = 0
        for abort_at in (40, 70, None):
            sessions = [engine.open_session((0, member)) for member in range(5)]
            await together(engine, sessions, said, abort_at)
            breaks += sum(each.finish == "abort" for each in said)
            for session in sessions:
                engine.close_session(session)
            assert engine.statistics().open_sessions == 0
        return said, breaks

    async def unbroken(engine: HFInference) -> list[Generation]:
        said = [Generation([], [], "abort", [])] * 5
        await together(engine, [engine.open_session((0, member)) for member in range(5)], said, None)
        return said

    model = models(name)
    found, breaks = use(model, body, rows_max=rows_max)
    expected = use(model, unbroken)
    assert breaks > 0
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish == "length"
        assert len(one.logprobs) == len(one.versions) == LENGTH
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4)
        assert [(s.start, s.end) for s in one.spans] == [(0, LENGTH)], "one version is one span"


def test_an_aborted_request_that_waits_for_its_batch_has_no_tokens_and_others_continue(models):
    async def body(engine: HFInference) -> None:
        first, second = engine.open_session((0, 0)), engine.open_session((0, 1))
        found = {}

        async def ask(session: str, member: int) -> None:
            found[member] = await engine.generate(request(session, member))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, first, 0)
            await trio.testing.wait_all_tasks_blocked()
            assert engine.statistics().batches == 0
            await engine.abort(first)
            await engine.abort(first)
            await engine.abort("unknown")
        assert found[0] == Generation([], [], "abort", [])
        async with trio.open_nursery() as nursery:  # the session is open still
            nursery.start_soon(ask, second, 1)
            nursery.start_soon(ask, first, 0)
        assert [found[member].finish for member in (0, 1)] == ["length", "length"]
        engine.close_session(first)
        engine.close_session(second)

    use(models("qwen3"), body)


def test_a_cancelled_wait_leaves_nothing_to_abort(models):
    async def body(engine: HFInference) -> None:
        session = engine.open_session((0, 0))
        with trio.move_on_after(0.02):
            await engine.generate(request(session, 0))
        await engine.abort(session)
        assert not engine._scheduler._running and not engine._scheduler._waiting
        engine.close_session(session)

    use(models("qwen3"), body)
