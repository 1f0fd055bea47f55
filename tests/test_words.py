"""Words that hide who does what do not appear in code, docs, help and errors: write subject, verb, object instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = ("README.md", "docs", "rollouts", "plugins", "environments")
SUFFIXES = {".py", ".md", ".toml", ".jinja"}
WORDS = ("told", "stands", "whoever", "nobody", "gone on with", "of then", "what becomes of")
PATTERN = re.compile("(?<![a-z])(" + "|".join(WORDS).replace(" ", r"\s+") + ")(?![a-z])", re.IGNORECASE)


def files_of(place):
    path = ROOT / place
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.suffix in SUFFIXES]


def found_in(text):
    return [(text.count("\n", 0, found.start()) + 1, found[1]) for found in PATTERN.finditer(text)]


@pytest.mark.parametrize("place", PLACES)
def test_plain_words(place):
    files = files_of(place)
    assert files, place
    found = [
        f"{file.relative_to(ROOT)}, line {line}: {word!r}"
        for file in files
        for line, word in found_in(file.read_text(encoding="utf-8"))
    ]
    assert found == [], "say in plain words what happens, and who does it"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It is told\nthat NOBODY asks.", [(1, "told"), (2, "NOBODY")]),
        ("a run that is gone\n    on with", [(1, "gone\n    on with")]),
        ("_told = 1; told_twice = 2", [(1, "told"), (1, "told")]),
        ("understands, a stand, the seed of thence, 'nobodys'", []),
    ],
)
def test_the_check_finds_words_and_parts_of_names(text, words):
    assert found_in(text) == words
