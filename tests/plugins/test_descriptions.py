"""The description of a component comes from the source of its module, which is never imported."""

from __future__ import annotations

import sys

import pytest
from rollouts_check.descriptions import description, find_definition, first_sentence

from rollouts.plugins.index import find_component, installed_components

SOURCE = '''\
raise RuntimeError("this module was imported")
import os.path
from .inner import deep as renamed
from elsewhere import gone


def short(
    trajectory,
    *,
    n: int = 3,
):
    """Shorter is better (Dr. Short
    et al. 2020). The rest is detail.

    Args:
        n: a number
    """
    shorter = 1


class Big:
    """A class."""

    def short(self):
        """Not this one."""


VALUE = dict(
    a=1,
)
"""A value
with two lines."""
silent = VALUE.copy()
"not documentation"[0]


async def waits(task):
    return 1
'''


@pytest.fixture
def package(make_distribution):
    names = ("short", "Big", "VALUE", "silent", "waits", "renamed", "gone", "absent")
    groups = {"rollouts.rewards": {name.lower(): f"acme_text:{name}" for name in names}}
    groups["rollouts.rewards"] |= {
        "nowhere": "acme_nowhere.a.b:c",
        "a_module": "acme_text",
        "extra": "acme_text:Big [x]",
    }
    folder = make_distribution("acme-text", groups)
    (folder / "acme_text").mkdir()
    (folder / "acme_text" / "__init__.py").write_text(SOURCE)
    (folder / "acme_text" / "inner.py").write_text("from acme_text.most import deepest as deep\n")
    (folder / "acme_text" / "most.py").write_text('deepest = lambda task: 1\n"""Deep."""\n')
    return folder


def test_descriptions_are_read_without_an_import(package):
    found = {ref.name: description(ref) for ref in installed_components("rewards") if ref.distribution == "acme-text"}
    assert found == {
        "short": "Shorter is better (Dr. Short et al. 2020)",
        "big": "A class",
        "value": "A value with two lines",
        "silent": "",
        "waits": "",
        "renamed": "Deep",
        "gone": "",
        "absent": "",
        "nowhere": "",
        "a_module": "",
        "extra": "A class",
    }
    assert not [name for name in sys.modules if name.startswith("acme_text")]


def test_the_place_of_a_definition(package, tmp_path):
    place = find_definition(find_component("rewards", "short"))
    assert (place.file, place.line) == (package / "acme_text" / "__init__.py", 7)
    file = tmp_path / "mine.py"
    file.write_text('x = 1\ndef mine(task):\n    """Mine."""\n')
    assert find_definition(find_component("rewards", f"{file}:mine"))[1:] == (2, "Mine.")


@pytest.mark.parametrize("source", ["def broken(:\n", "broken = \x00", "\xff"])
def test_a_source_that_cannot_be_read_has_no_description(make_distribution, source):
    folder = make_distribution("acme-odd", {"rollouts.rewards": {"odd": "acme_odd:broken"}})
    (folder / "acme_odd.py").write_bytes(source.encode("latin-1"))
    assert description(find_component("rewards", "odd")) == ""


def test_a_module_that_imports_itself_ends(make_distribution):
    make_distribution(
        "acme-loop", {"rollouts.rewards": {"loop": "acme_loop:a"}}, {"acme_loop": "from acme_loop import a"}
    )
    assert description(find_component("rewards", "loop")) == ""


def test_the_first_sentence_ends_at_a_full_stop_outside_of_brackets():
    assert first_sentence("One (Dr. Two) is three. Four.") == "One (Dr. Two) is three"
    assert first_sentence("\n  About 0.5 of it.\n\nMore.") == "About 0.5 of it"
