"""Count the letters of a word, with a tool."""

from dataclasses import dataclass

from rollouts import Task, metric, reward, tool


@dataclass
class Counting:
    """How often is a letter in a word?"""

    longest: int = 6  # letters of the longest word
    letters: str = "abc"  # what words are made of

    def tasks(self, split, rng):
        while True:
            word = "".join(rng.choice(self.letters) for _ in range(rng.randint(1, self.longest)))
            letter = rng.choice(self.letters)
            yield Task(f"How many {letter} are in {word}?", answer=word.count(letter))

    @tool(timeout_seconds=2)
    def count(self, letter: str, word: str) -> int:
        """Count a letter in a word.

        Args:
            letter: what to look for
            word: where to look
        """
        return word.count(letter)

    @reward
    def counted(self, task, trajectory):
        return float(str(task.answer) in trajectory.last_text)

    @metric
    def said(self, trajectory):
        return len(trajectory.last_text)
