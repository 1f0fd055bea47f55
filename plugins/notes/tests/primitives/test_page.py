"""The page of the primitives names everything that the package offers."""

from __future__ import annotations

import re
from pathlib import Path

import rollouts.primitives

PAGE = Path(__file__).parents[4] / "docs" / "primitives.md"


def test_every_name_is_on_the_page():
    code = " ".join(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.M | re.S)))
    missing = set(rollouts.primitives.__all__) - set(re.findall(r"\w+", code))
    assert missing == set()
