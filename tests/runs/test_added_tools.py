"""`--tool`: a function of a package or a file is a tool of any environment, by the same path as its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import trio

from rollouts.cli import main
from rollouts.env.schema import tool_schema
from rollouts.env.tools import run_tool
from rollouts.errors import ConfigError, EnvironmentDefinitionError, SignatureError, UnknownComponentError
from rollouts.runs.chat import open_chat
from rollouts.runs.jobs.demonstrations import demonstration_samples
from rollouts.runs.run_model import model_plan
from rollouts.runs.session import load_chat
from rollouts.training.models import load_tokenizer
from rollouts.types import ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from composing import plan, refused

TOOLS = '''\
from __future__ import annotations

import time
from dataclasses import dataclass

import trio

from rollouts import tool


@dataclass(frozen=True)
class Notes:
    folder: str = "notes"


def search(query: str, limit: int = 100, *, top_k: int = 3, notes: Notes = Notes()) -> str:
    """Search the notes.

    Args:
        query: what to look for
        top_k: how many to return
    """
    return f"{top_k} of {notes.folder} about {query}"[:limit]


@tool(timeout_seconds=0.05)
def slow(query: str) -> str:
    """Take too long."""
    time.sleep(1)


@tool(isolate="process")
def apart(query: str, *, times: int = 2) -> str:
    """Repeat, in another process."""
    import os
    return f"{query * times} {os.getpid()}"


async def waits(query: str, *, seconds: float = 0.0) -> str:
    """Wait."""
    await trio.sleep(seconds)
    return query


class Counter:
    def __init__(self):
        self.words = {"hello": 3}

    def __call__(self, word: str) -> int:
        """Look a word up."""
        return self.words[word]


counter = Counter()


def calculator(expression: str) -> str:
    return expression


def without_hint(query):
    return query


def variadic(*queries: str) -> str:
    return ""
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def added(*names: str, **tables):
    """The added tools of a plan, by the names that the model sees."""
    tables |= {name: {"name": f"./parts.py:{name}"} for name in names}
    return {tool.name: tool for tool in plan(tool=tables).tools}


def outcome(tools, name: str, **arguments):
    return trio.run(run_tool, tools, ToolCall(name, arguments, "c1"))


def test_the_model_sees_the_positional_parameters():
    tools = added(find={"name": "./parts.py:search", "top_k": 5, "folder": "books"})
    schema = tool_schema(tools["find"].function, "find")["function"]
    assert (schema["name"], schema["description"]) == ("find", "Search the notes.")
    assert list(schema["parameters"]["properties"]) == ["query", "limit"]
    assert schema["parameters"]["properties"]["query"] == {"type": "string", "description": "what to look for"}
    assert outcome(tools, "find", query="stars").text == "5 of books about stars"
    assert outcome(tools, "find", query="stars", limit="4").text == "5 of"
    refused_by_schema = outcome(tools, "find", query="stars", top_k=100)
    assert refused_by_schema.failure == "bad_arguments" and "no argument 'top_k'" in refused_by_schema.text


def test_failures_are_those_of_a_tool_of_an_environment():
    tools = added("slow", "counter", "waits")
    assert outcome(tools, "slow", query="x").failure == "timeout"
    assert outcome(tools, "counter", word="hello").text == "3"
    raised = outcome(tools, "counter", word="bye")
    assert raised.failure == "exception" and raised.text == "Error: KeyError: 'bye'"
    assert outcome(tools, "waits", query="x").text == "x"
    assert outcome(tools, "counter").failure == "bad_arguments"


def test_a_tool_in_a_process_of_its_own_has_its_settings():
    import os

    tools = added(apart={"name": "./parts.py:apart", "times": 3})
    text, process = outcome(tools, "apart", query="ab").text.split()
    assert text == "ababab" and int(process) != os.getpid()


def test_bad_tools_are_refused():
    same = refused(ConfigError, tool=["./parts.py:calculator"])
    assert same == (
        "--tool ./parts.py:calculator: the environment calculator has a tool named 'calculator' too\n"
        "give the added one another name: --tool other_calculator=./parts.py:calculator"
    )
    refused(
        EnvironmentDefinitionError, "'without_hint'", "'query'", "has no type hint", tool=["./parts.py:without_hint"]
    )
    refused(SignatureError, "*queries", tool=["./parts.py:variadic"])
    refused(SignatureError, "Counter is a class, but a tool must be a function", tool=["./parts.py:Counter"])
    refused(UnknownComponentError, "no tool is named 'seerch'", tool=["seerch"])
    refused(ConfigError, "no setting 'topk'", "top_k", tool={"search": {"name": "./parts.py:search", "topk": 5}})


def test_a_run_offers_it_records_it_and_resumes_with_it(capsys):
    flags = ["--env", "calculator", "--tool", "find=./parts.py:search", "--tool.find.top-k", "5"]
    small = ["--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--max-tokens", "16"]
    assert main(["run", *flags, *small, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "tools: calculator, find" in shown and "call: find(query='1')" in shown
    assert "answer: '5 of notes about 1'" in shown
    assert main(["run", *flags, *small, "--eval-tasks", "2", "--out", "run"]) == 0
    assert main(["resume", "run", "--steps", "2"]) == 0
    for file in ("step_000000.jsonl", "step_000001.jsonl"):
        (episode, *_) = map(json.loads, Path("run/trajectories", file).read_text().splitlines())
        prompt = load_tokenizer("tiny").decode(episode["segments"][0]["tokens"])
        assert '"name": "find"' in prompt and "top_k" not in prompt
    with model_plan("run", {}, ("env", "tool", "mode")) as of_run, open_chat(of_run, None, print) as chat:
        assert chat.tools == ["calculator", "find"]
    with model_plan("tiny", {"tool": ["./parts.py:search"]}, ()) as bare, open_chat(bare, None, print) as chat:
        assert chat.tools == ["search"]


def test_demonstrations_are_of_the_same_tools():
    made = plan(mode="sft", tool=["./parts.py:search"], steps=1, prompts_per_step=1)
    chat = load_chat(made.settings, made.environments)
    (sample, *_) = demonstration_samples(made.environments, [], made.settings, chat)
    assert '"name": "search"' in chat.decode(sample.tokens)


def test_a_conversation_and_a_server_have_the_flags(capsys):
    for command, flags in (("chat", ("--tool NAME", "--tool-parser NAME")), ("serve", ("--tool-parser NAME",))):
        assert main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(flag in shown for flag in flags), command
