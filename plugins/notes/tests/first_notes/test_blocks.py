"""Every code block of the notes is used by a test of this folder, or belongs to a later part of the project."""

from __future__ import annotations

from pathlib import Path

import pytest
from note_blocks import block, execute, names_of_blocks

LATER = {
    "002/deploy": "`deploy_training`: starting a training on another machine is not built yet",
}


def test_every_block_is_run():
    forgotten = []
    for name in names_of_blocks():
        note, _, title = name.partition("/")
        tests = (Path(__file__).parent / f"test_note_{note}.py").read_text()
        if f'"{name}"' not in tests and f'"{title}"' not in tests:
            forgotten.append(name)
    assert set(forgotten) == set(LATER)


def test_a_change_must_apply():
    with pytest.raises(AssertionError, match="does not hold 'no such text'"):
        block("001/sample", {"no such text": ""})
    with pytest.raises(AssertionError, match="there is no block 001/nothing"):
        block("001/nothing")


def test_an_await_outside_of_a_function():
    async def four():
        return 4

    assert execute("x = await four()\ny = x + 1", four=four)["y"] == 5
