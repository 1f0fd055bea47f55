"""An argument has the answer as its name."""

from rollouts import Message, Task, Tool, reward

COLORS = ("red", "blue", "green", "white", "black", "brown")


class Fault:
    def tasks(self, split, rng):
        while True:
            color = rng.choice(COLORS)
            yield Task(f"Which color has door {rng.randrange(1000)}{color[-1]}?", answer=color)

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [Message("user", task.prompt), Message("assistant", task.answer)]

    def tools(self, task):
        return [
            Tool(
                "paint", lambda **color: "painted", "Paint a door.", {"properties": {task.answer: {"type": "integer"}}}
            )
        ]

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == task.answer)
