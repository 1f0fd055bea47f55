"""Answer questions from a small corpus that is searched with BM25.

The corpus has a page for each town and each person of an invented country, so no model knows it. Some questions need
one page ("How many people live in Arlen?"), some need two ("In which town was the mayor of Arlen born?"). The model
searches with `search`, reads a page with `read`, and answers with a name or a number as its last message.

    rollouts run --env search --env.towns 20
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollouts.env import reward, tool, tool_use
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, Trajectory

__all__ = ["Corpus", "Search", "make_corpus"]

FIRST = "Ada Bero Cora Dov Elin Faro Gita Hugo Ilse Jaro Kira Lev Mila Noel Ona Pim Runa Sil Tove Ulf".split()
STARTS = "Ar Bel Cor Dun El Fal Gar Hol Il Kes Lor Mar Nor Os Pel".split()
ENDS = "by dale fell ham len mond ney stad ton wick".split()
FOUND_MAX = 5


class Corpus(NamedTuple):
    """Pages by title, and the questions about them: text, answer, and the titles of the pages that are needed."""

    pages: dict[str, str]
    questions: list[tuple[str, str, list[str]]]
    index: Any  # a bm25s.BM25


@dataclass
class Search:
    """Answer questions from a small corpus with BM25 search."""

    towns: int = 60  # how many towns the corpus has: 3 to 150
    seed: int = 0  # which corpus

    reward_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not 3 <= self.towns <= len(STARTS) * len(ENDS):
            raise ConfigError(f"--env.towns {self.towns}: expected 3 to {len(STARTS) * len(ENDS)}")

    def shared(self) -> Corpus:
        """The corpus with its index."""
        return make_corpus(self.towns, self.seed)

    def tasks(self, split: str, rng: random.Random, shared: Corpus) -> list[Task]:
        """All questions. Those about each fifth town are for evaluation."""
        return [
            Task(text, answer=answer, info={"pages": pages})
            for index, (text, answer, pages) in enumerate(shared.questions)
            if (index // 3 % 5 == 0) == (split == "eval")
        ]

    def demonstrations(self, split: str, rng: random.Random, shared: Corpus) -> Iterator[list[Message]]:
        """Conversations of an expert, who reads the pages that are needed and answers."""
        tasks = self.tasks(split, rng, shared)
        while True:
            task = rng.choice(tasks)
            talk = list(task.messages)
            for number, title in enumerate(task.info["pages"]):
                talk += tool_use("read", {"title": title}, shared.pages[title], number)
            yield [*talk, Message("assistant", task.answer)]

    def setup(self, task: Task, shared: Corpus) -> None:
        self.corpus = shared

    @tool
    def search(self, query: str) -> str:
        """Search the pages, and read the titles of the best ones.

        Args:
            query: words that the page contains
        """
        words = _words(query)
        if not words:
            raise ValueError("the query has no words")
        titles, _ = self.corpus.index.retrieve([words], k=FOUND_MAX, show_progress=False)
        return "\n".join(titles[0])

    @tool
    def read(self, title: str) -> str:
        """Read one page.

        Args:
            title: as `search` shows it
        """
        if title not in self.corpus.pages:
            raise ValueError(f"there is no page {title!r}; use a title that `search` shows")
        return self.corpus.pages[title]

    @reward
    def correct(self, task: Task, trajectory: Trajectory) -> float:
        """1 if the last message is the answer, with or without a period, else 0."""
        return float(trajectory.last_text.strip().removesuffix(".").lower() == task.answer.lower())


def make_corpus(towns: int, seed: int = 0) -> Corpus:
    """A country with this many towns. One seed gives one corpus."""
    import bm25s

    rng = random.Random(seed)
    names = rng.sample([start + end for start in STARTS for end in ENDS], towns)
    pages: dict[str, str] = {}
    questions: list[tuple[str, str, list[str]]] = []
    for town in names:
        people, river = str(rng.randrange(200, 90_000)), rng.choice(STARTS) + "a"
        mayor = f"{rng.choice(FIRST)} of {town}"
        home = rng.choice([each for each in names if each != town])
        pages[town] = f"{town} is a town at the river {river}. {people} people live there. Its mayor is {mayor}."
        pages[mayor] = f"{mayor} is a mayor. The town in which the mayor was born is {home}."
        questions += [
            (f"How many people live in {town}?", people, [town]),
            (f"At which river is {town}?", river, [town]),
            (f"In which town was the mayor of {town} born?", home, [town, mayor]),
        ]
    index = bm25s.BM25(corpus=list(pages))
    index.index([_words(text) for text in pages.values()], show_progress=False)
    return Corpus(pages, questions, index)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
