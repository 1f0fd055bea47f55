"""Guess which thing is meant, with questions that a scripted user answers with yes or no.

The prompt lists the things and the words that the user understands. The model asks, one question in each message, such
as "Is it alive?", and guesses with the name of one thing, such as "Is it a cat?". The reward is 1 if a guess is right
before the questions are used up. There are more things than questions, so asking for one thing after the other does
not win.

The user is the method `reply`. It keeps nothing: it reads the messages of the trajectory.

    rollouts run --env twenty_questions --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rollouts.env import metric, reward
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory

__all__ = ["THINGS", "TwentyQuestions", "answer_to"]

THINGS = {
    "ant": "alive animal small dark",
    "apple": "alive food round sweet",
    "ball": "round toy",
    "bat": "alive animal dark flies small",
    "bear": "alive animal dark large",
    "bee": "alive animal flies small sweet",
    "boat": "large travels wet",
    "bread": "food",
    "bus": "large travels",
    "cake": "food round sweet",
    "cat": "alive animal",
    "coal": "dark",
    "coin": "metal round small",
    "crow": "alive animal dark flies",
    "doll": "toy",
    "fish": "alive animal food wet",
    "kite": "flies toy",
    "lake": "large wet",
    "moon": "large round travels",
    "nail": "metal small",
    "olive": "alive food round small",
    "plane": "flies large metal travels",
    "robot": "metal toy",
    "whale": "alive animal large wet",
}
PROPERTIES = sorted({word for words in THINGS.values() for word in words.split()})
HINT = "Ask about one word."


@dataclass
class TwentyQuestions:
    """Guess a thing with questions that are answered with yes or no."""

    things: int = 24  # how many things there are to choose from
    questions: int = 20  # how many messages the model has, guesses included
    pool: int = 24  # the things of a game are chosen from the first so many in the alphabet
    expert: bool = True  # demonstrations are of an expert, else of a beginner, who does not use the answers
    hints: bool = True  # an unclear message is answered with a hint, else it ends the game

    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not 2 <= self.pool <= len(THINGS):
            raise ConfigError(f"--env.pool {self.pool}: expected 2 to {len(THINGS)}")
        if not 2 <= self.things <= self.pool:
            raise ConfigError(f"--env.things {self.things}: expected 2 to {self.pool}, as many as --env.pool has")
        if self.questions < 1:
            raise ConfigError(f"--env.questions {self.questions}: expected at least 1")

    def tasks(self, split: str, rng: random.Random) -> Iterator[Task]:
        """Endless games, each with other things, or in another order. Both splits have the same distribution."""
        while True:
            yield self._draw(rng)

    def demonstrations(self, split: str, rng: random.Random) -> Iterator[list[Message]]:
        """Endless games that an expert wins, or games that a beginner wins or loses.

        The expert asks about the word that divides what is left most evenly, and guesses what is left. The beginner
        asks about the same words and guesses any thing of the list. So the beginner shows how to write a question and
        a guess, and not what to do with the answers.
        """
        while True:
            task = self._draw(rng)
            messages = self._demonstrate(task, rng)
            if not self.expert or _named(messages[-1].text) == [task.answer]:
                yield messages

    def reply(self, trajectory: Trajectory) -> str | None:
        """Yes or no. The game ends with a right guess or with the last question; without hints, with an unclear one."""
        if self.guessed(trajectory.task, trajectory) or trajectory.turns >= self.questions:
            return None
        answer = answer_to(trajectory.last_text, trajectory.task.answer)
        return answer if self.hints or answer != HINT else None

    def state(self) -> None:
        """Nothing is kept beside the messages, so an unfinished game can continue from a checkpoint."""

    def restore(self, state: None) -> None:
        """See `state`."""

    @reward
    def guessed(self, task: Task, trajectory: Trajectory) -> float:
        """1 if the last message names the thing and no other thing, else 0."""
        return float(_named(trajectory.last_text) == [task.answer])

    @metric
    def questions_asked(self, trajectory: Trajectory) -> float:
        """How many messages the model wrote."""
        return float(trajectory.turns)

    def _demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
        """A whole game. It ends with a message of the player: the right guess, or the last question."""
        things: list[str] = task.info["things"]
        left, messages = things, list(task.messages)
        for number in range(1, self.questions + 1):
            word = _best_word(left) if number < self.questions else None
            question = f"Is it {word or (left[0] if self.expert else rng.choice(things))}?"
            messages.append(Message("assistant", question))
            if number == self.questions or _named(question) == [task.answer]:
                break
            answer = answer_to(question, task.answer)
            left = [each for each in left if answer_to(question, each) == answer]
            messages.append(Message("user", answer))
        return messages

    def _draw(self, rng: random.Random) -> Task:
        things = rng.sample(sorted(THINGS)[: self.pool], self.things)
        words = [word for word in PROPERTIES if 0 < sum(word in THINGS[each].split() for each in things) < self.things]
        thing = rng.choice(things)
        prompt = (
            f"I think of one of: {', '.join(things)}.\nAsk about one word: {', '.join(words)}.\n"
            f"Or guess one thing. You have {self.questions} questions."
        )
        return Task(prompt, answer=thing, info={"things": things}, id=f"{thing} of {' '.join(things)}")


def answer_to(question: str, thing: str) -> str:
    """The user's answer to a question about the thing.

    >>> answer_to("Is it alive?", "cat"), answer_to("Is it a dog or a cat?", "cat"), answer_to("Is it a bus?", "cat")
    ('Yes.', 'Ask about one word.', 'No.')
    """
    named = _named(question) + [word for word in PROPERTIES if word in _words(question)]
    if len(named) != 1:
        return HINT
    return "Yes." if named[0] == thing or named[0] in THINGS[thing].split() else "No."


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def _named(text: str) -> list[str]:
    """The things that the text names."""
    return [thing for thing in THINGS if thing in _words(text)]


def _best_word(left: list[str]) -> str | None:
    """The property that divides the things that are left most evenly, the first in the alphabet if several do. None if
    no property divides them.
    """
    counts = {word: sum(word in THINGS[each].split() for each in left) for word in PROPERTIES}
    word = min(PROPERTIES, key=lambda word: abs(2 * counts[word] - len(left)))
    return word if 0 < counts[word] < len(left) else None
