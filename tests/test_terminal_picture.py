"""scripts/terminal_picture.py records a command in a real terminal and draws it."""

from __future__ import annotations

import runpy
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("pyte", reason="requirements-test.txt brings pyte")
pytest.importorskip("pty", reason="this system has no pseudo-terminals")
SCRIPT = Path(__file__).parents[1] / "scripts" / "terminal_picture.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def picture():
    return runpy.run_path(str(SCRIPT))


def shown(drawn):
    """The words of each screen, and all styles of their letters."""
    root = ElementTree.fromstring(drawn)
    lines = {each.get("id"): each for each in root.iter(f"{SVG}g") if each.get("id")}
    film = next(each for each in root.iter(f"{SVG}g") if each.get("class") == "film")
    screens = [" ".join("".join(lines[use.get("href")[1:]].itertext()) for use in screen) for screen in film]
    return screens, {(each.text, each.get("fill")) for each in root.iter(f"{SVG}text")}


def test_screens_of_a_recording(picture):
    output = picture["Output"]
    recording = [
        output(0.0, "first \x1b[32mgreen\x1b[0m <b>\r\n1 %"),
        output(5.0, "\r\x1b[K50 %"),
        output(10.0, "\r\x1b[Klast"),
    ]
    assert picture["load"](picture["dump"]("go & see", recording)) == ("go & see", recording)
    frames = picture["frames_of"]("go & see", recording, 4.0)
    drawn = picture["draw"](frames, "go & see")
    screens, letters = shown(drawn)
    assert len(screens) == len(frames) <= picture["FRAMES_MAX"]
    assert screens[0].startswith("$") and "go & see" in screens[2] and "first" not in screens[1]
    assert [next(words for words in ("last", "50 %", "1 %") if words in each) for each in screens[-3:]] == [
        "1 %", "50 %", "last",
    ]  # fmt: skip
    assert "50 %" not in screens[-1] and "<b>" in screens[-1]
    assert ("green", picture["COLORS"]["green"]) in letters
    assert "<script" not in drawn and drawn.count("http") == 1, "the name space alone"
    assert sum(each.seconds for each in frames[:-1]) <= 4.0 + 2 * picture["TYPING_SECONDS"]


def test_a_command_runs_in_a_terminal(picture, tmp_path):
    code = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size().columns, os.getcwd())"
    said = "".join(text for _, text in picture["record"](shlex.join([sys.executable, "-c", code]), str(tmp_path)))
    assert said.split() == ["True", str(picture["COLUMNS"]), str(tmp_path)]
    with pytest.raises(SystemExit, match="ended with exit code 3"):
        list(picture["record"](shlex.join([sys.executable, "-c", "raise SystemExit(3)"]), str(tmp_path)))


def test_the_picture_of_the_docs_is_small():
    file = SCRIPT.parents[1] / "docs" / "terminal.svg"
    screens, _ = shown(file.read_text())
    assert file.stat().st_size < 150_000 and "rollouts run --env calculator --loss grpo" in screens[10]
