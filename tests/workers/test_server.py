"""The worker's side of the protocol, spoken to through a pipe."""

from __future__ import annotations

import math
import random
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from rollouts.env.shared import shared_values
from rollouts.env.workers.channel import ChannelClosedError, PipeChannel
from rollouts.env.workers.protocol import (
    VERSION,
    Answer,
    Ask,
    Cancel,
    Error,
    Failure,
    Hello,
    Ping,
    Pong,
    ProtocolError,
    Report,
    Request,
    decode_value,
    encode_value,
    read_from_worker,
)
from rollouts.env.workers.server import serve_worker
from rollouts.errors import EnvironmentDefinitionError
from rollouts.types import Message, Score, Task, ToolCall, Trajectory

ENVS = Path(__file__).parent / "worker_envs.py"


class Caller:
    """Sends requests, and keeps what comes back."""

    def __init__(self, channel: PipeChannel) -> None:
        self.channel, self.number, self.others = channel, 0, []

    async def receive(self) -> Any:
        return read_from_worker(await self.channel.receive())

    async def begin(self, method: str, arguments: Any = None, session: int = 0, seconds: float | None = None) -> int:
        self.number += 1
        request = Request(self.number, method, session, encode_value(arguments), seconds)
        await self.channel.send(msgspec.json.encode(request))
        return self.number

    async def end(self, number: int) -> Any:
        while not (isinstance(message := await self.receive(), Answer | Failure) and message.number == number):
            self.others.append(message)
        return message

    async def call(self, method: str, arguments: Any = None, session: int = 0, kind: Any = Any, **more: Any) -> Any:
        answer = await self.end(await self.begin(method, arguments, session, **more))
        return decode_value(answer.value, kind) if isinstance(answer, Answer) else answer.error


@asynccontextmanager
async def worker():
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_worker, PipeChannel(theirs, theirs))
        caller = Caller(PipeChannel(ours, ours))
        assert (await caller.receive()).protocol == VERSION
        yield caller
        await caller.channel.aclose()


def made(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": f"{ENVS}:{name}", "settings": settings, "with_shape": True}


def played(text: str, task: Task) -> Trajectory:
    return Trajectory(task, [*task.messages, Message("assistant", text)])


TASK = Task("What is 2 + 3?", answer=5)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.1 + 0.2, 5e-324, 1e22, 10**30, None, "caf\ud800", [True]])
def test_values_survive(value):
    back = decode_value(encode_value({"x": value, "other": None}))["x"]
    assert back == value or back != back != value or (isinstance(value, str) and back == "caf\\ud800")
    assert type(back) is type(value)


def test_a_value_that_json_cannot_hold_is_refused():
    with pytest.raises(EnvironmentDefinitionError, match=r"^the task cannot be sent .*--worker inline"):
        encode_value({"x": object()}, "the task")


def test_a_session_from_description_to_close():
    async def main():
        async with worker() as run:
            name = f"{ENVS}:Counting"
            about = await run.call("describe", {"name": name})
            assert about["class_name"] == "Counting" and about["settings"] == ["digits", "mood", "log"]
            assert about["rewards"] == [["near", 1.0, None], ["asked_again", 0.3, None]]
            assert about["metrics"][0][0] == "segments"
            given = {"settings": {"digits": {"$flag": "3"}}, "path": ["env"]}
            settings = await run.call("configure", {"name": name, "given": given})
            assert settings == {"digits": 3, "mood": "kind", "log": ""}
            shape = await run.call("make", made("Counting", **settings), session=1)
            assert shape["methods"] == ["tasks", "demonstrations", "setup", "close", "reply", "state", "restore"]
            assert [each[0] for each in shape["tools"]] == ["add", "fail", "wait"] and "error" in shape
            assert shape["tools"][0][2]["function"]["parameters"]["properties"]["a"]["description"] == "the first"
            assert await run.call("setup", TASK, session=1, seconds=5.0) is None
            ask = {"call": ToolCall("add", {"a": "2", "b": 3}), "characters_max": 100}
            assert await run.call("tool", ask, session=1) == ["5", None, ""]
            reply = await run.call("reply", played("5", TASK), session=1, kind=list[Message])
            assert reply == [Message("user", "Are you sure, after 1 turns?")]
            score = await run.call(
                "reward", {"name": "near", "trajectory": played("5", TASK)}, session=1, kind=Score, seconds=5.0
            )
            assert score == Score(0.1 / 6, {"length": 1.0}, "1 characters")
            state = await run.call("state", session=1)
            assert state == {"asked": 1, "calls": [[2, 3]], "task": TASK.prompt}
            assert await run.call("close", session=1) is None

    trio.run(main)


def test_tasks_are_those_of_the_same_random_numbers_and_come_in_batches():
    import worker_envs

    async def main():
        async with worker() as run:
            await run.call("make", made("Counting"), session=1)
            rng = random.Random("0/train")
            asked = {"method": "tasks", "split": "train", "rng": rng.getstate(), "label": "counting.tasks"}
            start = await run.call("stream", asked, session=1)
            assert start["kind"] == "iterator"
            drawn = []
            while len(drawn) < 600:
                batch = await run.call("more", {"method": "tasks", "first": len(drawn), "count": 250}, session=1)
                drawn += batch["items"]
            own = worker_envs.Counting().tasks("train", rng)
            assert msgspec.convert(drawn, list[Task])[:600] == [next(own) for _ in range(600)]

    trio.run(main)


def test_all_objects_of_a_worker_have_one_shared_value():
    async def main():
        async with worker() as run:
            for session in (1, 2, 3):
                await run.call("make", made("Shared"), session=session)
            asked = {"method": "tasks", "split": "train", "rng": random.Random(0).getstate(), "label": "shared.tasks"}
            assert (await run.call("stream", asked, session=1))["kind"] == "list"
            for session in (2, 3):
                await run.call("setup", Task(f"task {session}"), session=session, seconds=5.0)
            ask = {"call": ToolCall("show"), "characters_max": 100}
            assert await run.call("tool", ask, session=3) == ['["tasks","task 2","task 3"]', None, ""]

    with shared_values():
        trio.run(main)


def test_requests_run_at_the_same_time_and_end_when_cancelled():
    async def main():
        async with worker() as run:
            await run.call("make", made("Counting"), session=1)
            await run.call("setup", TASK, session=1)
            slow = await run.begin("tool", {"call": ToolCall("wait"), "characters_max": 100}, session=1)
            ask = {"call": ToolCall("add", {"a": 1}), "characters_max": 100}
            assert (await run.call("tool", ask, session=1))[0] == "1"
            assert not any(isinstance(each, Answer) and each.number == slow for each in run.others)
            await run.channel.send(msgspec.json.encode(Cancel(slow)))
            assert (await run.end(slow)).error.kind == "cancelled"
            late = await run.call("tool", {"call": ToolCall("wait"), "characters_max": 100}, session=1)
            assert late[:2] == ["Error: wait took longer than 0.2 seconds", "timeout"]
            await run.channel.send(msgspec.json.encode(Ping(9)))
            assert await run.receive() == Pong(9)

    trio.run(main)


def test_an_error_is_sent_with_its_line_and_traceback():
    async def main():
        async with worker() as run:
            await run.call("make", made("Broken", kind="setup"), session=1)
            error = await run.call("setup", TASK, session=1)
            assert error.kind == "author" and "LookupError: no room" in error.fault.words
            assert "raise LookupError" in error.fault.traceback and "worker_envs.py, line" in error.fault.place
            await run.call("make", made("Counting"), session=2)
            outcome = await run.call("tool", {"call": ToolCall("fail"), "characters_max": 100}, session=2)
            assert outcome[:2] == ["Error: KeyError: 'no such thing'", "exception"]
            (report,) = [each for each in run.others if isinstance(each, Report)]
            assert report.label == "the tool fail" and "raise KeyError" in report.fault.traceback
            nan = {"name": "odd", "trajectory": played("5", TASK)}
            await run.call("make", made("Broken", kind="nan"), session=3)
            error = await run.call("reward", nan, session=3)
            assert (error.kind, error.name) == ("ours", "RewardError") and "reward 'odd' returned nan" in error.message
            assert "def odd(self, trajectory)" in error.message
            wrong = await run.call("describe", {"name": f"{ENVS}:Counter"})
            assert wrong.name == "UnknownComponentError" and "did you mean: Counting?" in wrong.message
            assert (await run.call("setup", TASK, session=99)).kind == "bug"

    trio.run(main)


def test_an_own_rollout_asks_the_run():
    async def main():
        async with worker() as run:
            await run.call("make", made("OwnRollout"), session=1)
            task, state = Task("Count to 3."), {"tokens_left": 90, "turns_left": 3}
            number = await run.begin("rollout", {"task": task, "models": {"": state}}, session=1)
            ask = await run.receive()
            assert isinstance(ask, Ask) and (ask.method, ask.request) == ("chat", number)
            reply = Message("assistant", "1 2 3")
            later = {**state, "turns_left": 0, "place": 0, "trajectory": Trajectory(task, [*task.messages, reply])}
            answer = Answer(ask.number, encode_value({"messages": [reply], "state": later}))
            await run.channel.send(msgspec.json.encode(answer))
            assert decode_value((await run.end(number)).value) == {"chosen": ["", 0], "infos": []}
            number = await run.begin("rollout", {"task": task, "models": {"": state}}, session=1)
            ask = await run.receive()
            over = Failure(ask.number, Error("asks", message="over"))
            await run.channel.send(msgspec.json.encode(over))
            assert (await run.end(number)).error.asks == [ask.number]

    trio.run(main)


def test_nonsense_from_the_run_ends_the_worker():
    async def main():
        with pytest.raises(ExceptionGroup) as caught:
            async with worker() as run:
                await run.channel.send(b"nonsense")
                with pytest.raises(ChannelClosedError):
                    while True:
                        await run.receive()
        assert caught.group_contains(ProtocolError)

    trio.run(main)


def test_hello_is_the_first_message():
    async def main():
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_worker, PipeChannel(theirs, theirs))
            assert isinstance(read_from_worker(await PipeChannel(ours, ours).receive()), Hello)
            await ours.aclose()

    trio.run(main)
