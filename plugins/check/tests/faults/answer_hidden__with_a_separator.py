"""A tool shows the answer with a separator: 342,258."""

from rollouts import Message, Task, ToolCall, reward, tool


class Fault:
    """Multiply; a tool checks a number before the reply."""

    def tasks(self, split, rng):
        while True:
            a, b = rng.randint(101, 999), rng.randint(101, 999)
            yield Task(prompt=f"What is {a} * {b}? Reply with digits only.", answer=str(a * b))

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [
                Message("user", task.prompt),
                Message("assistant", "", tool_calls=[ToolCall("check", {"number": int(task.answer)}, id="c1")]),
                Message("tool", "Right.", tool_call_id="c1", name="check"),
                Message("assistant", task.answer),
            ]

    def setup(self, task):
        self.expected = int(task.answer)

    @tool
    def check(self, number: int) -> str:
        """Check a number before you reply."""
        if number == self.expected:
            return "Right."
        return f"Wrong: expected {self.expected:,}, got {number:,}."

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == task.answer)
