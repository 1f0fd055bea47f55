"""A shop with a till: an environment with tools and a state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollouts import Message, Score, Status, Task, Tool, ToolCall, metric, reward, tool
from rollouts.errors import ConfigError


@dataclass
class Shop:
    """A customer buys things. The till adds them up."""

    largest: int = 9
    things: list[str] = field(default_factory=lambda: ["tea", "cake"])
    currency: Literal["euro", "yen"] = "euro"

    reward_range = (0.0, 1.5)

    def __post_init__(self):
        if self.largest < 2:
            raise ConfigError(f"--env.largest {self.largest}: expected at least 2")
        self.total, self.closed = 0, False

    def shared(self):
        prices = {name: 2 + place for place, name in enumerate(self.things)}
        yield prices
        prices.clear()

    def tasks(self, split, rng, shared):
        number = 0
        while True:
            number += 1
            thing, count = rng.choice(sorted(shared)), rng.randint(2, self.largest)
            prompt = [Message("system", f"You count in {self.currency}."), Message("user", f"{count} {thing}, please.")]
            info = {"thing": thing, "count": count, "may_ask": number % 2 == 0}
            yield Task(prompt, answer=count * shared[thing], info=info, id=f"{split}-{number}-{count}-{thing}")

    def demonstrations(self, split, rng):
        shared = {name: 2 + place for place, name in enumerate(self.things)}
        for task in self.tasks(split, rng, shared):
            call = ToolCall("add", {"price": shared[task.info["thing"]], "count": task.info["count"]}, id="call_1")
            yield [
                *task.messages,
                Message("assistant", "", tool_calls=[call]),
                Message("tool", str(task.answer), tool_call_id="call_1", name="add"),
                Message("assistant", str(task.answer)),
            ]

    def setup(self, task, shared):
        self.prices, self.calls = shared, 0

    def tools(self, task):
        found = [self.add, "price_list"]
        if task.info["may_ask"]:
            thing = {"type": "string", "enum": sorted(self.prices)}
            schema = {"properties": {"thing": thing, "loud": {"type": "boolean"}}, "required": ["thing"]}
            found.append(Tool("price", self.price, "The price of a thing.", schema, timeout_seconds=5))
        return found

    @tool(timeout_seconds=5)
    def add(self, price: int, count: int = 1) -> int:
        """Add to the bill.

        Args:
            price: of one thing
            count: how many of them
        """
        if count < 1:
            raise ValueError("count is at least 1")
        self.calls += 1
        self.total += price * count
        return self.total

    @tool(name="price_list")
    async def prices_of_all(self) -> dict[str, int]:
        """All prices."""
        return dict(self.prices)

    @tool(isolate="process", timeout_seconds=60)
    @staticmethod
    def divide(bill: int, people: int) -> float:
        """Divide a bill."""
        return bill / people

    def price(self, thing, loud=False):
        return f"{self.prices[thing]}{'!' if loud else ''}"

    def reply(self, trajectory):
        if trajectory.turns > 3 or str(trajectory.task.answer) in trajectory.last_text.split():
            return None
        return [Message("user", "Are you sure?")]

    def state(self):
        return {"total": self.total, "calls": self.calls}

    def restore(self, state):
        self.total, self.calls = state["total"], state["calls"]

    @reward
    def correct(self, task, trajectory):
        """1 if the last reply is the answer."""
        is_right = float(trajectory.last_text.strip() == str(task.answer))
        return Score(is_right, {"bill": float(self.total)}, "" if is_right else "another number")

    @reward(weight=0.5)
    def by_turn(self, trajectory, env):
        """The last turn is worth 1 if the till was used."""
        assert env is self and trajectory.status in (Status.COMPLETED, Status.TRUNCATED)
        return Score(None, turns=[0.0] * (trajectory.turns - 1) + [float(self.calls == 1)])

    @metric
    def bill(self):
        return self.total

    def close(self):
        self.closed = True


def brevity(trajectory, *, target_tokens: int = 10) -> float | None:
    """1 for short replies."""
    if not trajectory.messages:
        return None
    return float(sum(len(each.text) for each in trajectory.messages if each.role == "assistant") <= target_tokens)
