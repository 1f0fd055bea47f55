"""The prompt has the codes of the answer's letters."""

from rollouts import Message, Task, reward

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Peru": "Lima", "Cuba": "Havana"}


class Fault:
    def tasks(self, split, rng):
        while True:
            country = rng.choice(sorted(CAPITALS))
            answer = CAPITALS[country]
            code = " ".join(str(ord(letter)) for letter in answer)
            yield Task(f"Ticket {code}: what is the capital of {country}?", answer=answer)

    def demonstrations(self, split, rng):
        for task in self.tasks(split, rng):
            yield [Message("user", task.prompt), Message("assistant", task.answer)]

    @reward
    def correct(self, task, trajectory):
        return float(trajectory.last_text.strip() == task.answer)
