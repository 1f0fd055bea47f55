"""`restore` puts back low and high, but not the count of guesses, which an expert does not need."""

from rollouts import Message, Task, reward


class Fault:
    """Guess a number with at most eight guesses."""

    def tasks(self, split, rng):
        for number in range(500):
            yield Task(
                prompt=f"Game {number}: guess 1 to 100, one number per turn.",
                answer=rng.randint(1, 100),
            )

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [Message("user", task.prompt), Message("assistant", str(task.answer))]

    def setup(self, task):
        self.number = task.answer
        self.low, self.high, self.guesses, self.won = 1, 100, 0, False

    def reply(self, trajectory):
        text = trajectory.last_text.strip()
        self.guesses += 1
        guess = int(text) if text.isdecimal() else 0
        if guess == self.number:
            self.won = True
            return None
        if self.guesses >= 8:
            return None
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return f"No. It is between {self.low} and {self.high}."

    def state(self):
        return {"low": self.low, "high": self.high, "guesses": self.guesses, "won": self.won}

    def restore(self, state):
        self.low, self.high, self.won = state["low"], state["high"], state["won"]

    @reward
    def score(self):
        return 1.0 if self.won and self.guesses <= 7 else 0.5 if self.won else 0.0
