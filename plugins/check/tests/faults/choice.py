"""Multiple choice, with parts of the score and rewards by turn: an environment without a mistake."""

from rollouts import Message, Score, Task, reward


class Choice:
    def tasks(self, split, rng):
        while True:
            a, b = rng.randint(2, 99), rng.randint(2, 99)
            options = rng.sample([a * b, a * b + 10, a * b - 2, a + b + 1000], 4)
            text = " ".join(f"{letter}) {value}" for letter, value in zip("ABCD", options, strict=True))
            yield Task(prompt=f"{a} * {b} = ? {text}. Reply with one letter.", answer="ABCD"[options.index(a * b)])

    def demonstrations(self, split, rng):
        for t in self.tasks(split, rng):
            yield [Message("user", t.prompt), Message("assistant", t.answer)]

    @reward
    def correct(self, task, trajectory):
        value = float(trajectory.last_text.strip() == task.answer)
        return Score(value, parts={"length": float(len(trajectory.last_text))}, turns=[value] * trajectory.turns)
