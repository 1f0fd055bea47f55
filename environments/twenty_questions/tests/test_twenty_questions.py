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


@pytest.mark.parametrize(("things", "questions"), [(4, 3), (8, 2), (24, 1)])
def test_the_expert_guesses_with_the_last_question_and_always_wins(things: int, questions: int) -> None:
    env = TwentyQuestions(things, questions)
    for talk in itertools.islice(env.demonstrations("train", random.Random(0)), 50):
        says = [message.text for message in talk if message.role == "assistant"]
        assert len(says) <= questions and talk[-1].role == "assistant"
        assert sum(answer_to(says[-1], thing) == "Yes." for thing in THINGS) == 1, "a guess, not a question"


def test_the_beginner_asks_as_the_expert_does_and_guesses_whatever_the_answers_are() -> None:
    settings = {"things": 5, "questions": 4, "pool": 5}
    env, expert = TwentyQuestions(**settings, expert=False), TwentyQuestions(**settings)
    openings, refuted = set(), 0
    for talk in itertools.islice(env.demonstrations("train", random.Random(0)), 300):
        asked = [(message.text, reply.text) for message, reply in zip(talk[1::2], talk[2::2], strict=False)]
        possible = [thing for thing in THINGS if all(answer_to(text, thing) == reply for text, reply in asked)]
        guess = talk[-1].text.removeprefix("Is it ").removesuffix("?")
        assert possible and guess in THINGS
        openings.add(talk[1].text)
        refuted += guess not in possible
    first = {talk[1].text for talk in itertools.islice(expert.demonstrations("train", random.Random(0)), 50)}
    assert openings == first
    assert 100 < refuted < 250, refuted


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


def test_without_hints_an_unclear_message_ends_the_game() -> None:
    task = Task("Guess.", answer="cat")

    def reply_to(text: str, hints: bool) -> str | None:
        return TwentyQuestions(hints=hints).reply(Trajectory(task, [Message("user", "?"), Message("assistant", text)]))

    assert reply_to("Is it a cta?", hints=True) == "Ask about one word."
    assert reply_to("Is it a cta?", hints=False) is None
    assert reply_to("Is it metal?", hints=False) == "No."


def test_the_order_of_the_list_says_nothing_about_the_thing() -> None:
    tasks = list(itertools.islice(TwentyQuestions(things=3, pool=3).tasks("train", random.Random(0)), 600))
    assert len({tuple(task.info["things"]) for task in tasks}) == 6
    places = [task.info["things"].index(task.answer) for task in tasks]
    assert all(150 < places.count(place) < 250 for place in range(3))


def test_a_smaller_pool_has_its_first_things_alone() -> None:
    tasks = itertools.islice(TwentyQuestions(things=3, pool=4).tasks("train", random.Random(0)), 50)
    assert {thing for task in tasks for thing in task.info["things"]} == {"ant", "apple", "ball", "bat"}


@pytest.mark.parametrize("settings", [{"things": 1}, {"things": 9, "pool": 8}, {"pool": 25}, {"questions": 0}])
def test_settings_that_make_no_sense(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--env\."):
        TwentyQuestions(**settings)
