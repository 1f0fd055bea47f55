"""The loop in which connections of environments live."""

from __future__ import annotations

import pytest
import trio
import trio.lowlevel
import trio.testing

from rollouts.env.background import background
from rollouts.env.shared import SharedValue
from rollouts.errors import ConfigError, EnvironmentDefinitionError, ServiceLostError


class Connected:
    async def shared(self):
        async with background() as loop:
            yield loop


async def later(value):
    await trio.lowlevel.checkpoint()
    return value


async def fail():
    raise ValueError("no")


def test_functions_run_in_the_loop_of_another_thread():
    shared = SharedValue(Connected)

    async def use():
        loop = await shared.get()
        assert await loop.run(later, 3) == 3
        with pytest.raises(ValueError, match="no"):
            await loop.run(fail)
        shared.close()
        with pytest.raises(ServiceLostError):
            await loop.run(later, 3)

    trio.run(use)


def test_a_cancelled_call_ends_in_the_loop_too():
    ended = []

    async def forever():
        try:
            await trio.sleep_forever()
        finally:
            ended.append(True)

    async def play():
        async with background() as loop:
            with trio.move_on_after(0.05):
                await loop.run(forever)
            await trio.testing.wait_all_tasks_blocked()
            assert ended == [True]
        with pytest.raises(ServiceLostError):
            await loop.run(trio.sleep, 0)

    trio.run(play)


def test_an_error_of_shared_that_says_what_to_type_is_raised_as_it_is():
    class Refused:
        def shared(self):
            raise ConfigError("--env.url: type another one")

    with pytest.raises(EnvironmentDefinitionError, match=r"^--env\.url: type another one$"):
        SharedValue(Refused).get_now()
