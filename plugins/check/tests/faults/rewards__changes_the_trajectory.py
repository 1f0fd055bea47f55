"""The reward writes into the trajectory's metrics."""

from rollouts import Message, Task, reward


class Fault:
    """Square a number."""

    def tasks(self, split, rng):
        while True:
            n = rng.randint(11, 9999)
            yield Task(prompt=f"What is {n} squared? Reply with digits only.", answer=n * n)

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [Message("user", task.prompt), Message("assistant", str(task.answer))]

    @reward
    def correct(self, task, trajectory):
        text = trajectory.last_text.strip()
        trajectory.metrics["reply_chars"] = float(len(text))
        return float(text == str(task.answer))
