from __future__ import annotations

import itertools
import random

import pytest
from rollouts_twenty_questions import THINGS, TwentyQuestions, answer_to

from rollouts.check import check_environment_class
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory


def test_the_contract() -> None:
    check_environment_class(TwentyQuestions, things=6, questions=5, tasks=2, skip=["wheel", "imports"])


def test_the_expert_wins_with_few_questions_and_asking_for_each_thing_does_not() -> None:
    env = TwentyQuestions()
    talks = list(itertools.islice(env.demonstrations("train", random.Random(0)), 100))
    tasks = list(itertools.islice(env.tasks("train", random.Random(0)), 100))
    turns = [sum(message.role == "assistant" for message in talk) for talk in talks]
    assert max(turns) <= 8 and env.questions < env.things
    for task, talk in zip(tasks, talks, strict=True):
        assert talk[:1] == task.messages
        assert env.guessed(task, Trajectory(task, talk)) == 1.0
        replies = [answer_to(message.text, task.answer) for message in talk if message.role == "assistant"]
        assert [message.text for message in talk if message.role == "user"][1:] == replies[:-1]


@pytest.mark.parametrize(
    ("question", "thing", "answer"),
    [
        ("Is it alive?", "cat", "Yes."),
        ("IS IT METAL", "cat", "No."),
        ("Is it a cat?", "cat", "Yes."),
        ("Is it a bat?", "cat", "No."),
        ("Is it a cat or a bat?", "cat", "Ask about one word."),
        ("Is it alive and metal?", "cat", "Ask about one word."),
        ("category", "cat", "Ask about one word."),
        ("", "cat", "Ask about one word."),
    ],
)
def test_the_user(question: str, thing: str, answer: str) -> None:
    assert answer_to(question, thing) == answer


def test_a_game_ends_with_a_right_guess_or_the_last_question() -> None:
    env, task = TwentyQuestions(questions=2), Task("Guess.", answer="cat")

    def played(*texts: str) -> Trajectory:
        messages = [message for text in texts for message in (Message("user", "?"), Message("assistant", text))]
        return Trajectory(task, messages)

    assert env.reply(played("Is it alive?")) == "Yes."
    assert env.reply(played("It is a cat")) is None
    assert env.reply(played("Is it alive?", "Is it a bat?")) is None
    assert env.guessed(task, played("Is it alive?", "Is it a bat?")) == 0.0
    assert env.guessed(task, played(" ".join(THINGS))) == 0.0


def test_a_smaller_pool_has_its_first_things_alone() -> None:
    tasks = itertools.islice(TwentyQuestions(things=3, pool=4).tasks("train", random.Random(0)), 50)
    assert {thing for task in tasks for thing in task.info["things"]} == {"ant", "apple", "ball", "bat"}


@pytest.mark.parametrize("settings", [{"things": 1}, {"things": 9, "pool": 8}, {"pool": 25}, {"questions": 0}])
def test_settings_that_make_no_sense(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--env\."):
        TwentyQuestions(**settings)
