"""`--tool`: a function of a package or a file is a tool of any environment, by the same path as its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import trio

from rollouts.cli import main
from rollouts.env.schema import tool_schema
from rollouts.env.shared import shared_values
from rollouts.env.tools import run_tool
from rollouts.errors import ConfigError, EnvironmentDefinitionError, SignatureError, UnknownComponentError
from rollouts.inference.chatting import ChatReply
from rollouts.models.loading import load_tokenizer
from rollouts.runs.chat import open_chat
from rollouts.runs.jobs.chat_data import demonstration_samples
from rollouts.runs.play import play_episode
from rollouts.runs.run_model import model_plan
from rollouts.runs.session import load_chat
from rollouts.types import Message, Status, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from composing import plan, refused

TOOLBOX = '''\
from pathlib import Path

from rollouts import Tool, tool
from rollouts.errors import ServiceLostError


class Desk:
    """A desk with notes."""

    def __init__(self, folder: str = "notes", twice: bool = False):
        self.folder, self.twice = folder, twice

    def shared(self):
        yield ["shared"]
        Path("ended.txt").write_text("the clean-up ran")

    def setup(self, task, shared):
        self.task, self.seen = task, list(shared)

    @tool
    def note(self, name: str) -> str:
        """Read a note."""
        if name == "lost":
            raise ServiceLostError("the desk is gone")
        self.seen.append(name)
        return f"{self.folder}: {self.seen}"

    def tools(self, task):
        counted = Tool("count", lambda: len(self.seen), "How many were read.")
        return [self.note, counted, *([Tool("calculator", lambda: 0)] if self.twice else [])]

    def close(self):
        with open("closed.txt", "a") as file:
            file.write(f"{self.seen}\\n")


class Marked:
    """Two tools."""

    @tool
    def one(self) -> str:
        """One."""
        return "one"

    @tool
    def two(self) -> str:
        """Two."""
        return "two"


class WithSandbox(Marked):
    def setup(self, task, sandbox):
        pass


class WithoutTask(Marked):
    def setup(self):
        pass
'''

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
    (tmp_path / "toolbox.py").write_text(TOOLBOX)
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
    refused(SignatureError, "Counter is a class without tools", "counter = Counter()", tool=["./parts.py:Counter"])
    refused(UnknownComponentError, "no tool is named 'seerch'", tool=["seerch"])
    refused(ConfigError, "no setting 'topk'", "top_k", tool={"search": {"name": "./parts.py:search", "topk": 5}})


@pytest.mark.slow
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
        assert chat.title.endswith(" · tools: calculator, find")
    with model_plan("tiny", {"tool": ["./parts.py:search"]}, ()) as bare, open_chat(bare, None, print) as chat:
        assert chat.title.endswith(" · tools: search")


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


# --- classes of tools -------------------------------------------------------------------------------------------------

DESK = ("--env", "calculator", "--tool", "desk=./toolbox.py:Desk")


def play(*replies, tool="./toolbox.py:Desk"):
    """An episode of the calculator with the class of tools and these replies."""
    made = plan(tool={"desk": {"name": tool}})
    given = iter([*replies, Message("assistant", "Done.")])
    with shared_values():
        return play_episode(made, made.environments[0].held_out(1)[0], 0, lambda _: ChatReply(next(given), "stop"))


def called(name, /, **arguments):
    return Message("assistant", "", [ToolCall(name, arguments, "c1")])


def test_a_class_offers_several_tools_with_an_object_for_each_episode():
    for _ in range(2):
        episode = play(called("note", name="a"), called("note", name="b"), called("count"))
        results = [message.text for message in episode.trajectory.messages if message.role == "tool"]
        assert results == ["notes: ['shared', 'a']", "notes: ['shared', 'a', 'b']", "3"]
    assert Path("closed.txt").read_text() == "['shared', 'a', 'b']\n" * 2
    assert Path("ended.txt").is_file()


def test_a_lost_service_fails_the_episode_and_is_not_scored():
    episode = play(called("note", name="lost"))
    assert episode.trajectory.status is Status.ENVIRONMENT_ERROR and "the desk is gone" in episode.trajectory.error
    assert episode.score.value is None and episode.may_retry
    assert Path("closed.txt").read_text() == "['shared']\n"


def test_the_dry_run_calls_the_tools_of_a_class(capsys):
    assert main(["run", *DESK, "--tool.desk.folder", "books", "--steps", "1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "answer: \"books: ['shared', '1']\"" in shown and "call: count()" in shown
    assert main(["run", *DESK, "--tool.desk.twice", "true", "--steps", "1", "--dry-run"]) == 2
    assert "has a tool named 'calculator' already, and --tool desk adds one" in capsys.readouterr().err
    assert main(["check", "./toolbox.py:Marked", "--kind", "tool"]) == 0
    assert "tools: one, two" in capsys.readouterr().out


def test_marked_methods_of_a_class_are_tools_of_demonstrations_too():
    (env,) = plan(tool=["./toolbox.py:Marked"]).environments
    assert [each["function"]["name"] for each in env.schemas()] == ["calculator", "one", "two"]


def test_mistakes_of_a_class_are_found_before_a_model_loads():
    refused(EnvironmentDefinitionError, "names `sandbox`, which only env", tool=["./toolbox.py:WithSandbox"])
    refused(EnvironmentDefinitionError, "def setup(self, task)", tool=["./toolbox.py:WithoutTask"])
    refused(ConfigError, "no setting 'foldr'", "folder", tool={"desk": {"name": "./toolbox.py:Desk", "foldr": "x"}})
