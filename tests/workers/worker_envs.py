"""Environments for the tests of workers. Workers import this file by its path."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import Literal

import trio

from rollouts import Message, Role, Score, Task, Tool, metric, reward, tool


@dataclasses.dataclass
class Counting:
    """Adds numbers, with a user that asks again, and a state."""

    digits: int = 2
    mood: Literal["kind", "rude"] = "kind"
    log: str = ""

    def tasks(self, split, rng):
        while True:
            a, b = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
            yield Task(f"What is {a} + {b}?", answer=a + b, info={"limit": float("inf"), "split": split})

    def demonstrations(self, split, rng):
        for task, _ in zip(self.tasks(split, rng), range(40), strict=False):
            yield [*task.messages, Message("assistant", str(task.answer))]

    def setup(self, task):
        self.task, self.asked, self.calls = task, 0, []

    @tool(timeout_seconds=5)
    def add(self, a: int, b: int = 0) -> int:
        """Add two numbers.

        Args:
            a: the first
        """
        self.calls.append([a, b])
        print("adding", a, b)
        return a + b

    @tool
    def fail(self) -> str:
        """Raise an error."""
        raise KeyError("no such thing")

    @tool(timeout_seconds=0.2)
    async def wait(self) -> str:
        """Wait too long."""
        await trio.sleep(60)
        return ""

    def reply(self, trajectory):
        self.asked += 1
        return None if self.asked > 1 else f"Are you sure, after {trajectory.turns} turns?"

    def state(self):
        return {"asked": self.asked, "calls": self.calls, "task": self.task.prompt}

    def restore(self, state):
        self.asked, self.calls = state["asked"], state["calls"]

    @reward
    def near(self, task, trajectory):
        text = trajectory.last_text
        return Score(0.1 * len(text) / (1 + task.answer), {"length": float(len(text))}, f"{len(text)} characters")

    @reward(weight=0.3)
    def asked_again(self, trajectory):
        return self.asked / 3

    @metric
    def segments(self, trajectory):
        return len(trajectory.segments) + sum(segment.sampled_count for segment in trajectory.segments) / 7

    def close(self):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"closed {os.getpid()}\n")


class OwnRollout:
    """An environment with its own loop."""

    def tasks(self, split, rng):
        return [Task(f"Count to {n}.", answer=n, id=str(n)) for n in range(40)]

    @tool
    def up(self, n: int) -> int:
        """One more."""
        return n + 1

    async def rollout(self, task, model):
        first = await model.chat(task.messages)
        assert model.trajectory is not None and model.trajectory.messages[-1] == first
        held = model.trajectory
        if first.tool_calls:
            answers = await model.call_tools(first)
            assert model.answers(first, [each.text for each in answers]) == answers or answers[0].role == "user"
            await model.chat([*model.trajectory.messages, *answers])
            assert model.trajectory is held
        if model.turns_left and model.tokens_left > 40:
            await model.chat("Something else.")
        return held

    @reward
    def turns(self, trajectory):
        return trajectory.turns / 5 + trajectory.metrics["turns"]


class OwnClient(OwnRollout):
    """An agent with a client of its own. It asks until a limit refuses its request."""

    async def rollout(self, task, model):
        import httpx  # other environments of this file start without it

        messages, statuses = [{"role": "user", "content": task.prompt}], []
        async with model.serve() as endpoint:
            key = {"authorization": f"Bearer {endpoint.key}"}
            async with httpx.AsyncClient(headers=key, trust_env=False, timeout=600) as client:
                while statuses[-1:] != [400]:
                    body = {"messages": messages, "max_tokens": 20}
                    answer = await client.post(f"{endpoint.base_url}/chat/completions", json=body)
                    statuses.append(answer.status_code)
                    if answer.status_code == 200:
                        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
        model.trajectory.info["statuses"] = statuses


class Boxed:
    """Runs commands in a sandbox. If `kind` is `lost`, judging every second task kills the sandbox, and hides it."""

    def __init__(self, *, kind: str = ""):
        self.kind = kind

    def tasks(self, split, rng):
        yield from (Task(f"Say {n}.", answer=n) for n in range(40))

    def setup(self, task, sandbox):
        self.sandbox = sandbox
        sandbox.write("answer", f"{task.answer}")

    @tool
    def run(self, command: str) -> str:
        """Run a command."""
        return self.sandbox.exec(command).text

    @reward
    def right(self, task, trajectory):
        if self.kind == "lost" and task.answer % 2:
            with contextlib.suppress(Exception):
                self.sandbox.exec("kill -9 $PPID; sleep 60")
            return 0.0
        return float(self.sandbox.exec("cat answer").stdout) + len(trajectory.last_text) / 7

    def close(self):
        self.sandbox.exec("rm answer")


class Market:
    """Two roles that talk about a price, with tools for each task and rewards by turn."""

    roles = (Role("seller", system="You sell a lamp."), Role("buyer", system="You buy a lamp."))

    def tasks(self, split, rng):
        while True:
            yield Task(f"lamp {rng.random()}", answer=rng.randrange(100))

    def setup(self, task):
        self.asked = 0

    def tools(self, task):
        schema = {"type": "object", "properties": {"price": {"type": "number"}}, "required": ["price"]}
        offer = Tool("offer", lambda price: f"{price + task.answer}", "Offer a price.", schema)
        return [self.stock, offer] if task.answer % 2 else [self.haggle]

    @tool(role="seller")
    def stock(self) -> int:
        """How many lamps are left."""
        self.asked += 1
        return 3

    @tool(role="buyer")
    def haggle(self, price: float = 1.0) -> str:
        """Ask for a lower price."""
        self.asked += 1
        return f"{price - 1}"

    async def rollout(self, task, model):
        seller, buyer = model.role("seller"), model.role("buyer")
        offer = await seller.say(f"You need {task.answer}. What is your price?")
        bid = await buyer.say(["The seller says:", offer.text])
        await seller.say(f"The buyer says: {bid.text}")

    @reward(role="seller")
    def profit(self, trajectory):
        texts = [message.text for message in trajectory.messages if message.role == "assistant"]
        return Score(
            None, {"turns": float(len(texts))}, turns=[len(text) / 7 - place for place, text in enumerate(texts)]
        )

    @reward(role="seller", weight=0.1, per="turn")
    def brief(self, turn, task):
        return len(task.prompt) - len(turn.message.text) - turn.index * len(turn.answers)

    @reward(role="buyer", weight=0.3)
    def saving(self, task, trajectory):
        return (self.asked + len(trajectory.last_text)) / (1 + task.answer)

    @metric
    def length(self, trajectory):
        return trajectory.sampled_count / 3


class Broken:
    """Its rewards and metrics do everything wrong."""

    kind: str = ""

    def __init__(self, *, kind: str = "raise"):
        self.kind = kind

    def tasks(self, split, rng):
        if self.kind == "tasks":
            raise ZeroDivisionError("no tasks today")
        yield from (Task(f"Say {n}.") for n in range(300))

    def setup(self, task):
        if self.kind == "setup":
            raise LookupError("no room")

    @reward
    def odd(self, trajectory):
        if self.kind == "raise":
            raise ArithmeticError("cannot count")
        return float("nan") if self.kind == "nan" else None if self.kind == "none" else 1.0

    @metric
    def words(self, trajectory):
        return "many" if self.kind == "metric" else 1.0


class Hostile:
    """Harms its own process, in the way that `kind` says."""

    def __init__(self, *, kind: str = ""):
        self.kind = kind

    def tasks(self, split, rng):
        yield from (Task(f"Say {n}.") for n in range(10_000))

    async def setup(self, task):
        if self.kind == "blocks":
            await trio.lowlevel.checkpoint()
            time.sleep(60)  # noqa: ASYNC251 - that is the harm
        if self.kind == "exits":
            os._exit(7)
        while self.kind == "spins":
            await trio.lowlevel.checkpoint()
        if self.kind == "memory":
            held = []
            while True:
                held.append(bytearray(50_000_000))
        if self.kind == "garbage":
            os.write(int(os.environ["ROLLOUTS_TEST_FD"]), b"nonsense\n")

    @tool
    def fork(self) -> str:
        """Fork."""
        child = os.fork()
        return f"{child > 0}"

    @reward
    def one(self, trajectory):
        return 1.0


class Shared:
    """Every object of the process has the same list."""

    def shared(self):
        yield []

    def tasks(self, split, rng, shared):
        shared.append("tasks")
        return [Task("Say one."), Task("Say two.")]

    def setup(self, shared, task):
        self.names = shared
        shared.append(task.prompt)

    @tool
    def show(self) -> list:
        """The list."""
        return self.names

    @reward
    def said(self, trajectory):
        return 1.0


class Sharing:
    """Its episodes share a value, which is cleaned up."""

    def __init__(self, *, log: str = ""):
        self.log = log

    def shared(self):
        yield {"pid": os.getpid()}
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()}\n")

    def tasks(self, split, rng, shared):
        yield from (Task(f"Say {n}.", answer=shared["pid"]) for n in range(100))

    async def setup(self, task, shared):
        self.value = shared
        await trio.lowlevel.checkpoint()

    def state(self):
        return self.value

    @reward
    def one(self, trajectory):
        return 1.0
