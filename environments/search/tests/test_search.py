from __future__ import annotations

import random

import pytest
from rollouts_search import Search, make_corpus

from rollouts.check import check_environment_class
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory


@pytest.mark.parametrize(
    "only", [["settings", "oracle"], pytest.param([], marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_the_contract(only: list[str]) -> None:
    check_environment_class(Search, towns=10, tasks=2, only=only, skip=["wheel", "imports"])


def test_every_question_is_answered_by_its_pages_and_by_no_other() -> None:
    corpus = make_corpus(60)
    assert len(corpus.questions) == 180 and len(corpus.pages) == 120
    assert len({text for text, _, _ in corpus.questions}) == 180
    for text, answer, pages in corpus.questions:
        assert answer in corpus.pages[pages[-1]] and answer not in text
        assert all(page in corpus.pages for page in pages)
        assert len(pages) == 1 or pages[1] in corpus.pages[pages[0]]


def test_the_page_of_a_town_is_found_by_its_name() -> None:
    env = Search()
    env.setup(Task(""), env.shared())
    for town in [title for title in env.corpus.pages if " " not in title]:
        assert town in env.search(f"How many people live in {town}?").splitlines()


def test_splits_have_no_town_in_common() -> None:
    env = Search()
    corpus = env.shared()
    towns = {
        split: {task.info["pages"][0] for task in env.tasks(split, random.Random(0), corpus)}
        for split in ("train", "eval")
    }
    assert not towns["train"] & towns["eval"] and (len(towns["train"]), len(towns["eval"])) == (48, 12)


@pytest.mark.parametrize(("text", "expected"), [("Arby", 1.0), ("arby.", 1.0), ("Arby, Belby", 0.0), ("", 0.0)])
def test_the_reward(text: str, expected: float) -> None:
    task = Task("Which town?", answer="Arby")
    assert Search().correct(task, Trajectory(task, [Message("assistant", text)])) == expected


@pytest.mark.parametrize("query", ["", "!?", "日本"])
def test_a_query_without_words(query: str) -> None:
    env = Search(towns=3)
    env.setup(Task(""), env.shared())
    with pytest.raises(ValueError, match="no words"):
        env.search(query)


@pytest.mark.parametrize("towns", [2, 151])
def test_settings_that_make_no_sense(towns: int) -> None:
    with pytest.raises(ConfigError, match=r"--env\.towns"):
        Search(towns=towns)
