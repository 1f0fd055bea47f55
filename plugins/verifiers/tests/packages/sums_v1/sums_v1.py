"""One turn: rewards with weights, one that gives several scores, and a metric."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def style(self, trace: vf.Trace) -> dict[str, float]:
        return {"short": float(len(trace.last_reply) < 5), "polite": float("please" in trace.last_reply)}

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        if trace.last_reply == "crash":
            raise ValueError("no characters")
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 4
    system: str | None = "Answer with a number."


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for n in range(self.config.num_tasks):
            data = SumsData(prompt=f"What is {n} + {n}?", system_prompt=self.config.system, answer=2 * n)
            yield SumsTask(data, self.config.task)
