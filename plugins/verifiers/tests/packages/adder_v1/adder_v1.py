"""Tools: a server that all tasks share, and one of the episode with a state that a reward reads."""

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["AdderTaskset"]


class Basket(vf.State):
    numbers: list[int] = Field(default_factory=list)


class AdderToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "adder"

    @vf.tool
    async def add(self, first: int, second: int) -> int:
        """Add two numbers."""
        return first + second

    @vf.tool
    async def fail(self) -> str:
        """Always fail."""
        raise ValueError("it failed")


class BasketToolset(vf.Toolset[vf.ToolsetConfig, Basket]):
    TOOL_PREFIX = "basket"

    @vf.tool
    async def keep(self, number: int) -> str:
        """Keep a number."""
        self.state.numbers.append(number)
        return f"kept {self.state.numbers}"


class AdderData(vf.TaskData):
    answer: int


class AdderTaskConfig(vf.TaskConfig):
    basket: bool = False


class AdderTask(vf.Task[AdderData, Basket, AdderTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [BasketToolset(vf.ToolsetConfig())] if config.basket else []

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def kept(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.state.numbers)

    @vf.stop
    async def has_given_up(self, trace: vf.Trace) -> bool:
        return "give up" in trace.last_reply


class AdderConfig(vf.TasksetConfig):
    num_tasks: int = 2
    task: AdderTaskConfig = AdderTaskConfig()


class AdderTaskset(vf.Taskset[AdderTask, AdderConfig]):
    def load(self):
        return [
            AdderTask(AdderData(prompt=f"Add {n} and 40 with a tool.", answer=n + 40), self.config.task)
            for n in range(self.config.num_tasks)
        ]

    @classmethod
    def toolsets(cls, config):
        return [AdderToolset(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    import os

    (BasketToolset if os.environ.get("VF_STATE_URL") else AdderToolset).run()
