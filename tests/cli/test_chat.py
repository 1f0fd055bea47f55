"""`rollouts chat`: a conversation through a pipe and in a terminal, with the tiny model."""

from __future__ import annotations

import io
import json
import os
import signal

import pytest
from terminal import Terminal

import rollouts
from rollouts.cli import main

ENVIRONMENT = '''\
import time
from rollouts import Task, reward, tool


class Game:
    """A game that can hang."""

    def __init__(self, hangs: bool = False):
        self.hangs = hangs

    def tasks(self, split, rng):
        return [Task(f"Say {number}.", answer=number, id=str(number)) for number in range(40)]

    def setup(self, task):
        self.task = task

    @tool
    def look(self) -> str:
        """Look."""
        return "nothing"

    def reply(self, trajectory):
        if self.hangs:
            print("HANGS", flush=True)
            time.sleep(60)

    @reward
    def length(self, trajectory):
        return float(len(trajectory.messages))
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step in an environment in a file."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "game.py").write_text(ENVIRONMENT)
    rollouts.run(
        env=f"{folder / 'game.py'}:Game",
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=2,
        max_tokens=8,
        eval_tasks=8,
        system="Be brief.",
        out=str(folder / "run"),
    )
    return folder / "run"


def say(monkeypatch, *lines):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_lines_of_a_pipe_are_messages(run, tmp_path, monkeypatch, capsys):
    say(monkeypatch, "Hello", "", "  Again ")
    assert main(["chat", str(run), "--out", str(tmp_path / "talk.jsonl"), "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "user: Hello" and "user: Again" in lines
    assert "game.py:Game · tools: look" in err
    assert "Type --task 0" in err  # `setup` did not run
    messages = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert [m["role"] for m in messages[:3]] == ["system", "user", "assistant"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["Hello", "Again"]
    say(monkeypatch, "Hello")
    assert main(["chat", str(run), "--temperature", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == lines[1]  # greedy: the same


def test_a_new_conversation_forgets_the_old_one(run, tmp_path, monkeypatch, capsys):
    say(monkeypatch, "Hello", "/new", "Hello")
    assert main(["chat", str(run), "--out", str(tmp_path / "talk.jsonl"), "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    first, second = out.split("user: Hello\n")[1:]
    assert first == second, "greedy: the same question has the same reply"
    assert "(a new conversation)" in err
    messages = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert [m["role"] for m in messages].count("system") == 2
    say(monkeypatch, "/new")
    assert main(["chat", str(run), "--task", "2"]) == 0
    assert capsys.readouterr().out.count("reward: 3 (length 3)") == 2


def test_a_task_opens_the_conversation_with_its_reward(run, monkeypatch, capsys):
    say(monkeypatch)
    assert main(["chat", str(run), "--task", "2"]) == 0
    out, err = capsys.readouterr()
    assert "system: Be brief." in out and "user: Say " in out
    assert "reward: 3 (length 3)" in out
    assert "Type --task 0" not in err


def test_what_was_typed_gets_no_note(run, monkeypatch, capsys):
    say(monkeypatch)
    assert main(["chat", str(run), "--max-tokens", "4", "--system", "", "--env.hangs", "true"]) == 0
    assert "the run used" not in capsys.readouterr().err


def test_a_plain_model_has_no_tools_unless_an_environment_is_named(run, monkeypatch, capsys):
    say(monkeypatch, "Hello")
    assert main(["chat", "tiny", "--max-tokens", "4"]) == 0
    assert "tiny · no environment (type --env NAME for its tools) · no tools" in capsys.readouterr().err
    say(monkeypatch)
    assert main(["chat", "tiny", "--env", "calculator", "--env.digits", "1", "--task", "0"]) == 0
    out, err = capsys.readouterr()
    assert "tools: calculator" in err and "reward: " in out


def test_what_a_terminal_would_obey_is_shown_as_text(run, monkeypatch, capsys):
    say(monkeypatch, "\x1b[31mred\x07")
    assert main(["chat", "tiny", "--max-tokens", "4"]) == 0
    assert r"user: \x1b[31mred\x07" in capsys.readouterr().out
    say(monkeypatch)
    (run.parent / "judge.py").write_text(
        "from rollouts import Task, reward\n"
        "class Judge:\n"
        "    def tasks(self, split, rng): return [Task(str(n)) for n in range(20)]\n"
        "    @reward\n"
        "    def fails(self): raise ValueError('\\x1b[31mred')\n"
    )
    assert main(["chat", "tiny", "--env", f"{run.parent / 'judge.py'}:Judge", "--task", "0"]) == 0
    out = capsys.readouterr().out
    assert r"reward: – (fails –): fails could not judge: ValueError: \x1b[31mred" in out, out


PARSER = """\
from rollouts import ToolCall
from rollouts.chat.tool_call_formats import EXAMPLE, UNREADABLE


def unreadable(text):
    if "without calls" in text:  # of the check before the conversation
        return [], text
    return [ToolCall("look", error=f"{UNREADABLE}no JSON{EXAMPLE}\\n<tool_call>\\n{{}}\\n</tool_call>")], text
"""


def test_a_call_that_cannot_be_read_is_one_line(run, tmp_path, monkeypatch, capsys):
    """The answer to it repeats the reason, and an example of a call. The transcript has it."""
    (tmp_path / "parser.py").write_text(PARSER)
    say(monkeypatch, "Hello")
    parser = ["--tool-parser", f"{tmp_path / 'parser.py'}:unreadable", "--out", str(tmp_path / "talk.jsonl")]
    assert main(["chat", str(run), *parser, "--max-turns", "3", "--max-tokens", "60", "--temperature", "0"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "user: Hello"
    assert 1 <= len(out[1:]) <= 3, out
    assert all(line.startswith("assistant: (a call that was not run: no JSON)") for line in out[1:])
    written = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    answers = [message["content"] for message in written if message["role"] == "tool"]
    assert answers and all("Write it like this:\n<tool_call>" in answer for answer in answers)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny", "--task", "0"], "there is no environment to take a task from; type --env NAME"),
        (["RUN", "--task", "99"], "there are 8 held-out tasks; give a number from 0 to 7"),
        (["RUN", "--env", "gmae"], "no environment is named 'gmae'"),
        (["RUN", "--temperature", "-1"], "must be at least 0; got -1"),
        (["RUN", "--steps", "3"], "has no option --steps"),
        (["RUN", "--out", "TAKEN"], "this file exists already and is not overwritten"),
        (["RUN", "--out", "/no/such/folder/x"], "cannot be written: No such file or directory"),
        (["no/such/run"], "no/such/run"),
        ([""], "no model was named"),
    ],
)
def test_mistakes_are_one_message(run, tmp_path, monkeypatch, capsys, words, said):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    say(monkeypatch, "Hello")
    assert main(["chat", *(word.replace("RUN", str(run)).replace("TAKEN", str(taken)) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert said in err and "Traceback" not in err and out == ""
    assert taken.read_text() == "mine"


def test_a_transcript_of_nothing_is_no_file(run, tmp_path, monkeypatch, capsys):
    say(monkeypatch)
    assert main(["chat", "tiny", "--out", str(tmp_path / "talk.jsonl")]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_stops_a_reply_and_ctrl_d_ends(run):
    with Terminal("chat", str(run), "--env.hangs", "true", "--task", "0") as terminal:
        terminal.until("HANGS")
        terminal.until("(stopped; this exchange is not part of the conversation)\r\n", typing="\x03")
        terminal.until("> ")
        terminal.until("assistant: ", typing="Hello\r")
        terminal.until("> ")
        terminal.until("Ctrl-D ends the conversation", typing="\x03")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0


def test_sigterm_ends_a_conversation_in_the_middle_of_a_reply(run):
    with Terminal("chat", str(run), "--env.hangs", "true", "--task", "0") as terminal:
        terminal.until("HANGS")
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.exit_code() == 143
