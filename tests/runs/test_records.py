"""One trajectory is read by the index of its file, and an index that does not fit the file is made anew."""

from __future__ import annotations

import os
import random
import time
from array import array

import pytest

from rollouts.errors import ConfigError
from rollouts.runs import times
from rollouts.runs.folder import CONFIG, RunFolder, episode_records
from rollouts.runs.records import count_lines, read_record, steps_of
from rollouts.runs.times import index_of, open_lines, write_index
from rollouts.runs.token_files import TokenSpan, TokenTable, encode_table
from rollouts.types import Episode, Score, Segment, Status, Task, Trajectory


def content_of(lines):
    return b"".join(line + b"\n" for line in lines)


@pytest.fixture
def file(tmp_path):
    """A file of 300 lines of random lengths, empty ones and long ones too."""
    generator = random.Random(0)
    lines = [b"%d" % number * generator.choice([0, 1, 7, 400_000 if number == 5 else 3]) for number in range(299)]
    lines.append(b"the last line")
    path = tmp_path / "step_000000.jsonl"
    path.write_bytes(content_of(lines))
    return path, lines


def all_of(path):
    lines = open_lines(path)
    return [lines.read(number) for number in range(lines.total)]


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_every_line_with_and_without_an_index(block, file, monkeypatch):
    path, lines = file
    path.write_bytes(content_of(lines[:5]) if block == 1 else content_of(lines))
    expected = path.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(times, "BLOCK", block)
    assert all_of(path) == expected
    assert index_of(path).exists()
    monkeypatch.setattr(times, "_scan", lambda file: pytest.fail("the index was not used"))
    assert all_of(path) == expected
    write_index(path, map(len, expected))
    assert all_of(path) == expected


@pytest.mark.parametrize("change", ["longer", "same size", "cut", "damaged", "a wrong place", "empty", "no newline"])
def test_an_index_that_does_not_fit_is_made_anew(change, file):
    path, lines = file
    open_lines(path)
    index = index_of(path)
    saved = index.read_bytes()
    time.sleep(0.02)
    if change == "longer":
        path.write_bytes(content_of([*lines, b"more"]))
    elif change == "same size":
        path.write_bytes(content_of(lines[::-1]))
    elif change == "cut":
        index.write_bytes(saved[:-3])
    elif change == "damaged":
        index.write_bytes(b"{" + saved)
    elif change == "a wrong place":  # as a crash of the machine can leave it: the right length, and zeros
        index.write_bytes(saved[:-80] + bytes(8) + saved[-72:])
    elif change == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(content_of(lines)[:-1])
    assert all_of(path) == path.read_bytes().splitlines(keepends=True)
    os.utime(path)
    assert all_of(path) == path.read_bytes().splitlines(keepends=True)


def test_a_file_or_an_index_that_changes_after_it_was_opened_gives_no_wrong_line(file):
    path, lines = file
    made, by_index = open_lines(path), open_lines(path)
    path.write_bytes(b"x" + content_of(lines))
    for number in (5, 298):
        with pytest.raises(ConfigError, match="has changed"):
            made.read(number)
        assert by_index.read(number) == lines[number] + b"\n"
    index = index_of(path)
    kept = index.read_bytes()
    for number in range(0, 299, 23):  # zeros, and a place that is off by one
        at = times.HEAD_BYTES + 8 * number
        for wrong in (bytes(16), bytes([kept[at] ^ 1]) + kept[at + 1 : at + 16]):
            index.write_bytes(kept[:at] + wrong + kept[at + 16 :])
            assert open_lines(path).read(number) == (b"x" if number == 0 else b"") + lines[number] + b"\n"


def test_lines_that_are_not_there(file):
    path, _ = file
    for number in (-1, 300):
        with pytest.raises(ConfigError, match="300 lines"):
            open_lines(path).read(number)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_lines(path.with_name("none.jsonl"))


def test_a_folder_that_cannot_be_written(file, monkeypatch):
    path, _ = file

    def refuse(*args, **settings):
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(times, "write_whole", refuse)
    assert all_of(path) == path.read_bytes().splitlines(keepends=True)
    assert not index_of(path).exists()


def test_one_of_many_is_read_without_the_others(tmp_path):
    """A line of 200,000 by its index, in milliseconds: 50 of them take less than reading the file once."""
    path = tmp_path / "step_000000.jsonl"
    path.write_bytes(content_of(b'{"number":%d,"fill":"%s"}' % (number, b"x" * 100) for number in range(200_000)))
    open_lines(path)
    began = time.perf_counter()
    for _ in range(3):
        assert open_lines(path).read(123_456).startswith(b'{"number":123456,')
    assert (time.perf_counter() - began) / 3 < 0.05


def episode(number):
    tokens = [number, number + 1, number + 2]
    segment = Segment(tokens, [0.0, 1.0, 1.0], [0.0, -0.5, -0.25], [-1, 0, 0])
    task = Task(f"task {number}")
    own = [Trajectory(task, task.messages, [segment], Status.COMPLETED)]
    return Episode((0, number), task, own, Score(float(number), {}, ""), {})


@pytest.fixture
def run(tmp_path):
    """Step 3 with tokens, and an evaluation without."""
    folder = RunFolder(tmp_path / "run")
    folder.write_text(CONFIG, 'mode = "rl"\n')
    records = [line for number in range(5) for line in episode_records(episode(number), advantage=0.0)]
    folder.write_trajectories("step_000003", records)
    table = TokenTable([TokenSpan(2, 0, 0, 2)], {"position": array("I", [1, 2]), "entropy": array("f", [0.5, 0.25])})
    folder.write_tokens("step_000003", encode_table(table))
    folder.write_trajectories("eval_000004", [{"temperature": 1.0} | line for line in records[:2]])
    folder.close()
    return tmp_path / "run"


def test_a_record_is_the_trajectory_and_its_tokens(run):
    assert steps_of(run) == [3] and steps_of(run, evaluations=True) == [4]
    assert count_lines(run, 3) == 5 and count_lines(run, 4, evaluation=True) == 2
    for number in range(5):
        found = read_record(run, 3, number)
        assert found.line.trajectory() == episode(number).trajectory and found.line.reward == number
        tokens = {0: {"position": array("I", [1, 2]), "entropy": array("f", [0.5, 0.25])}} if number == 2 else {}
        assert found.tokens == tokens
    assert read_record(str(run), 4, 1, evaluation=True).line.task.prompt == "task 1"


def test_files_of_a_step_come_with_an_index_and_go_with_it(run):
    there = sorted(path.name for path in (run / "trajectories").iterdir())
    indices = [".eval_000004.index", ".step_000003.index"]
    assert there == [*indices, "eval_000004.jsonl", "step_000003.jsonl", "step_000003.tokens"]
    folder = RunFolder.reopen(run)
    folder.forget_steps(3)
    folder.close()
    assert not list((run / "trajectories").iterdir())


def test_what_is_not_there_says_what_is(run, tmp_path):
    with pytest.raises(ConfigError, match="step 0; it has those from 3 to 3"):
        read_record(run, 0, 0)
    with pytest.raises(ConfigError, match="evaluation after 0; it has those from 4"):
        read_record(run, 0, 0, evaluation=True)
    with pytest.raises(ConfigError, match="holds no run"):
        read_record(tmp_path, 0, 0)
    with pytest.raises(ConfigError, match="5 lines"):
        read_record(run, 3, 5)
    file = run / "trajectories/step_000003.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"task 1"', b'"task 1'))
    with pytest.raises(ConfigError, match="line 2"):
        read_record(run, 3, 1)
