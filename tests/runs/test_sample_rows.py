"""The rollouts that loggers get: which ones, how often, what a row has, and what a logger's mistake does."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rollouts.errors import BrokenPluginError, ConfigError
from rollouts.loggers import MetricsLogger, SampleLogger, SampleSettings
from rollouts.runs import loggers
from rollouts.runs.loggers import Loggers
from rollouts.runs.sample_rows import Judged, conversation_text, sample_rows
from rollouts.types import Episode, Message, Score, Segment, Status, Task, ToolCall, Trajectory

LOGGER = """
import json
from pathlib import Path
from rollouts.loggers import SampleSettings


class Tables:
    def __init__(self, folder, *, samples: SampleSettings = SampleSettings(samples=3, samples_every=2)):
        self.sample_settings, self.file = samples, Path(folder) / "tables.jsonl"

    def log(self, metrics, step):
        self.write(["log", step, sorted(metrics)])

    def log_samples(self, name, rows, step):
        self.write([name, step, [dict(row) for row in rows]])

    def close(self):
        pass

    def write(self, line):
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\\n")


class OnlyMetrics:
    def __init__(self, folder):
        self.file = Path(folder) / "steps.txt"

    def log(self, metrics, step):
        with self.file.open("a") as file:
            file.write(f"{step}\\n")

    def close(self):
        pass


class Breaks(Tables):
    def log_samples(self, name, rows, step):
        if name == "samples":
            raise ValueError("the table is full")
"""


def episode(reward, order=0, text="4", **changed):
    task = Task("2 + 2?", id="sum-1")
    segment = Segment([1, 2, 3], [0.0, 1.0, 1.0], [0.0, -1.0, -1.0], [-1, 0, 0])
    messages = [*task.messages, Message("assistant", text)]
    trajectory = Trajectory(task, messages, [segment], Status.COMPLETED)
    return Episode(
        (0, order), task, [trajectory], Score(reward, {} if reward is None else {"right": reward}), {}, **changed
    )


def test_rollouts_are_spread_from_the_lowest_reward_to_the_highest():
    rewards = [0.5, None, 1.0, 0.25, 0.75, 0.0]
    rollouts = [Judged(episode(reward, order), 0.5) for order, reward in enumerate(rewards)]
    rows = sample_rows(rollouts, SampleSettings(samples=3))
    assert [row["reward"] for row in rows] == [None, 0.25, 1.0]
    assert len({tuple(row) for row in rows}) == 1, "all rows have the same columns"
    assert rows[0]["part/right"] is None and rows[2]["part/right"] == 1.0
    assert len(sample_rows(rollouts, SampleSettings(samples=99))) == 6
    assert [row["reward"] for row in sample_rows(rollouts, SampleSettings(samples=1))] == [None]
    assert sample_rows(rollouts, SampleSettings(samples=0)) == sample_rows([], SampleSettings()) == []


def test_a_row_has_what_is_known_of_a_rollout():
    (row,) = sample_rows([Judged(episode(1.0, 3), -0.5)], SampleSettings())
    assert row == {
        "group": 0, "rollout": 3, "task": "sum-1", "conversation": "user: 2 + 2?\n\nassistant: 4", "reward": 1.0,
        "part/right": 1.0, "advantage": -0.5, "status": "completed", "why": "", "turns": 1, "tokens": 2,
    }  # fmt: skip
    (row,) = sample_rows([Judged(episode(1.0, role="seller"), None, "all rewards are equal")], SampleSettings())
    assert (row["role"], row["dropped"], row["advantage"]) == ("seller", "all rewards are equal", None)
    (row,) = sample_rows([Judged(episode(1.0), temperature=0.0)], SampleSettings())
    assert row["temperature"] == 0.0 and "advantage" not in row


def test_a_long_conversation_keeps_its_beginning_and_its_end():
    call = ToolCall("add", {"a": 2})
    messages = [
        Message("user", "begin" + "x" * 500),
        Message("assistant", "", [call]),
        Message("tool", "y" * 500 + "end"),
    ]
    text = conversation_text(Trajectory(Task("?"), messages), 100)
    assert text.startswith("user: begin") and text.endswith("end") and len(text) < 150
    assert "… (945 characters) …" in text
    assert "assistant: [add(a=2)]" in conversation_text(Trajectory(Task("?"), messages), 2000)


@pytest.mark.parametrize("bad", [{"samples": -1}, {"samples_every": 0}, {"sample_characters": 0}])
def test_settings_that_cannot_work_are_refused(bad):
    (name,) = bad
    with pytest.raises(ConfigError, match=f"{name} = "):
        SampleSettings(**bad)


def test_a_logger_declares_what_it_takes(monkeypatch):
    class Plain:
        def log(self, metrics, step): ...
        def close(self): ...

    class Half(Plain):
        def log_samples(self, name, rows, step): ...

    class Wrong(Half):
        sample_settings = 8

    class Whole(Half):
        sample_settings = SampleSettings()

    assert [isinstance(each(), SampleLogger) for each in (Plain, Half, Wrong, Whole)] == [False, False, True, True]
    assert all(isinstance(each(), MetricsLogger) for each in (Plain, Half, Wrong, Whole))
    monkeypatch.setattr(loggers, "make_component", lambda *given: Wrong())
    with pytest.raises(BrokenPluginError, match=r"the logger acme has `log_samples`, .* it is a int"):
        loggers._make_logger(SimpleNamespace(alias="acme"), {})


def test_each_logger_gets_its_own_number_of_rows_when_it_is_time():
    seen = []

    class Takes:
        def __init__(self, **settings):
            self.sample_settings = SampleSettings(**settings)

        def log_samples(self, name, rows, step):
            seen.append((self.sample_settings.samples, name, step, len(rows)))

        def log(self, metrics, step): ...
        def close(self): ...

    loggers = Loggers()
    loggers._loggers = {
        "a": Takes(samples=1, samples_every=2),
        "b": Takes(samples=2, samples_every=3),
        "none": object(),
    }
    rollouts = [Judged(episode(each / 4), 0.0) for each in range(4)]
    for step in range(4):
        loggers.log_samples("samples", rollouts, step)
    loggers.log_samples("eval_samples", rollouts, 3)
    of_a = [(1, "samples", 0, 1), (1, "samples", 2, 1), (1, "eval_samples", 3, 1)]
    of_b = [(2, "samples", 0, 2), (2, "samples", 3, 2), (2, "eval_samples", 3, 2)]
    assert sorted(seen) == sorted(of_a + of_b)


@pytest.fixture
def logger_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loggers.py").write_text(LOGGER)
    return "./my_loggers.py"


def settings(*loggers, **changed):
    return {"env": "calculator", "prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 16, "eval_tasks": 2,
            "logger": ["jsonl", *loggers], "out": "run", "quiet": True, **changed}  # fmt: skip


def test_a_run_sends_them_beside_the_metrics(logger_file, tmp_path):
    import rollouts

    table = {"tables": {"name": f"{logger_file}:Tables", "samples": 2}}
    loggers = {"jsonl": {"name": "jsonl"}, **table, "plain": {"name": f"{logger_file}:OnlyMetrics"}}
    rollouts.run(steps=3, **settings() | {"logger": loggers})
    lines = [json.loads(line) for line in (tmp_path / "run" / "tables.jsonl").read_text().splitlines()]
    assert [(name, step) for name, step, _ in lines] == [
        ("eval_samples", 0), ("log", 0), ("samples", 0), ("log", 1), ("log", 2), ("samples", 2),
        ("eval_samples", 2), ("log", 2),
    ]  # fmt: skip
    written = [json.loads(line) for line in (tmp_path / "run/trajectories/step_000002.jsonl").read_text().splitlines()]
    rows = lines[5][2]
    assert len(rows) == 2
    for row in rows:
        (of_file,) = [w for w in written if (w["group"], w["rollout"]) == (row["group"], row["rollout"])]
        assert row["reward"] == of_file["reward"] and row["advantage"] == of_file["advantage"]
        assert of_file["messages"][-1].get("content", "").strip() in row["conversation"]
    assert {row["temperature"] for row in lines[0][2]} <= {0.0, 1.0}
    assert (tmp_path / "run" / "steps.txt").read_text() == "0\n1\n2\n2\n", "a logger without tables is as before"


def test_an_evaluation_sends_them_too(logger_file, tmp_path):
    import rollouts

    rollouts.run(mode="eval", **settings(f"{logger_file}:Tables", eval_tasks=4) | {"prompts_per_step": None})
    lines = [json.loads(line) for line in (tmp_path / "run" / "tables.jsonl").read_text().splitlines()]
    assert [(name, step) for name, step, _ in lines] == [("eval_samples", 0), ("log", 0)]
    assert len(lines[0][2]) == 3


@pytest.mark.parametrize("keeps", [True, False])
def test_a_logger_that_fails_there_ends_no_run(logger_file, tmp_path, monkeypatch, keeps):
    """Its other calls are recorded, and the summary has what is lost. Naming it keeps metrics.jsonl."""
    import rollouts

    monkeypatch.setattr("rollouts.loggers.background.PAUSES_SECONDS", (0.0, 0.0))
    loggers = [f"{logger_file}:Breaks"] if keeps else [f"{logger_file}:Breaks", {"name": "jsonl", "file": "none"}]
    summary = rollouts.run(steps=2, **settings() | {"logger": loggers})
    assert (summary["status"], summary["lost_by_loggers"]) == ("done", {"Breaks": 1})
    (fault,) = summary["faults"]
    assert "logger Breaks: lost 1 of its 6 calls: ValueError: the table is full" in fault
    lines = [json.loads(line) for line in (tmp_path / "run" / "tables.jsonl").read_text().splitlines()]
    assert [(name, step) for name, step, _ in lines] == [("log", 0), ("log", 1), ("log", 1)]
    files = {path.name for path in (tmp_path / "run").glob("*.jsonl")}
    assert files == {"tables.jsonl", "metrics.jsonl"} if keeps else {"tables.jsonl"}
