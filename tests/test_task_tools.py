"""`tools(self, task)` and `Tool`: the tools of one task, in episodes and in the commands."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

import rollouts
from rollouts import Role, Task, Tool, tool
from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.env.schema import read_arguments, schema_of
from rollouts.errors import EnvironmentDefinitionError
from rollouts.models.loading import load_tokenizer
from rollouts.runs.jobs.chat_data import demonstration_samples
from rollouts.runs.plan import make_plan
from rollouts.runs.session import load_chat
from rollouts.types import Status

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import FakeEngine, Quiz, check_exact, play

NUMBER: dict[str, Any] = {"type": "integer"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": NUMBER, "unit": {"type": "string", "enum": ["cm", "m"]}},
    "required": ["n"],
}


@tool(timeout_seconds=3)
def halve(n: int) -> int:
    """Halve a number."""
    return n // 2


def triple(n: int, unit: str = "cm") -> str:
    return f"{3 * n} {unit}"


class Chooser(Quiz):
    """Offers what `task.info["tools"]` names."""

    @tool(name="add")
    def plus(self, n: int) -> int:
        """Add one."""
        return n + self.one

    @staticmethod
    @tool
    def square(n: int) -> int:
        """Square."""
        return n * n

    def setup(self, task: Task) -> None:
        self.one = 1

    def tools(self, task: Task) -> list[Any]:
        known = {
            "method": self.plus,
            "static": self.square,
            "function": halve,
            "explicit": Tool("triple", triple, "Triple a number.", SCHEMA),
        }
        return [known.get(name, name) for name in task.info["tools"]]


def offered(env: Any, *names: Any, said: str = "42") -> Any:
    return play(env, FakeEngine(said, "done"), task=Task("?", info={"tools": list(names)}, answer=42))


def test_every_kind_of_tool_may_be_returned_in_any_order() -> None:
    episode = offered(Chooser, "explicit", "double", "static", "method", "function")
    names = [schema["function"]["name"] for schema in episode.trajectory.tools]
    assert names == ["triple", "double", "square", "add", "halve"]
    explicit = episode.trajectory.tools[0]["function"]
    assert explicit == {"name": "triple", "description": "Triple a number.", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("offers", "said", "answer"),
    [
        ("method", '[add {"n": 2}]', "3"),
        ("static", '[square {"n": 3}]', "9"),
        ("function", '[halve {"n": 8}]', "4"),
        ("explicit", '[triple {"n": 2, "unit": "m"}]', "6 m"),
        ("add", '[add {"n": "2"}]', "3"),
        ("method", '[double {"n": 2}]', "Error: there is no tool 'double'. The tools are: add"),
        ("explicit", "[triple {}]", "Error: triple needs the argument 'n' (integer)"),
        ("explicit", '[triple {"m": 1}]', "Error: triple has no argument 'm'"),
        ("explicit", '[triple {"n": "x"}]', "Error: argument 'n' of triple must be integer: Expected `int`, got `str`"),
        ("explicit", '[triple {"n": 1, "unit": "km"}]', "Error: argument 'unit' of triple must be one of cm, m"),
    ],
)
def test_a_call_reaches_the_tool_of_the_task_alone(offers: str, said: str, answer: str) -> None:
    episode = offered(Chooser, offers, said=said)
    assert episode.trajectory.messages[2].text.startswith(answer)


def test_a_task_without_tools_has_none_and_two_tasks_differ() -> None:
    assert offered(Chooser).trajectory.tools == []
    engine = FakeEngine('[double {"n": 21}]', "42")
    episode = play(Chooser, engine, task=Task("?", info={"tools": ["double"]}, answer=42))
    assert episode.score.value == 1.0
    check_exact(episode, engine)


async def trio_tool(**arguments: Any) -> list[str]:
    await trio.lowlevel.checkpoint()
    return sorted(arguments)


async def asyncio_tool(**arguments: Any) -> list[str]:
    await asyncio.sleep(0)
    return sorted(arguments)


@pytest.mark.parametrize("function", [trio_tool, asyncio_tool, lambda **arguments: sorted(arguments)])
def test_an_explicit_tool_may_be_plain_trio_or_asyncio_with_names_that_are_no_identifiers(function: Any) -> None:
    parameters = {"properties": {"max-results": NUMBER}, "additionalProperties": True}

    class Any_(Quiz):
        async def tools(self, task: Task) -> tuple[Tool, ...]:
            await trio.lowlevel.checkpoint()
            return (Tool("find", function, parameters=parameters),)

    answers = play(Any_, FakeEngine('[find {"max-results": 3, "class": 1}]', "x")).trajectory.messages
    assert answers[2].text == '["class","max-results"]'


def test_the_deadline_of_an_explicit_tool() -> None:
    async def sleeps() -> None:
        await trio.sleep(60)

    class Slow(Quiz):
        def tools(self, task: Task) -> list[Tool]:
            return [Tool("sleeps", sleeps, timeout_seconds=0.05)]

    episode = play(Slow, FakeEngine("[sleeps {}]", "x"))
    assert episode.metrics["tool_failure/timeout"] == 1


# --- arguments against a schema -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "given", "read"),
    [
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, 3, 3),
        ({"type": "boolean"}, "true", True),
        ({"type": ["integer", "null"]}, None, None),
        ({"type": "integer", "nullable": True}, None, None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None, None),
        ({"type": "array", "items": NUMBER}, ["1", 2], [1, 2]),
        ({"type": "array"}, ["1", 2], ["1", 2]),
        ({"type": "object"}, {"a": [1]}, {"a": [1]}),
        ({"enum": [1, "two"]}, "two", "two"),
        ({"enum": [True, 2.5]}, 7, 7),  # not checked
        ({"$ref": "#/$defs/X"}, {"a": 1}, {"a": 1}),
        ({"anyOf": [{"type": "array", "items": NUMBER}, {"type": "array", "items": {"type": "string"}}]}, [1], [1]),
        ({"type": "number"}, True, "argument 'x' of t must be number: Expected `int | float`, got `bool`"),
        ({"type": "string"}, 3, "argument 'x' of t must be string: Expected `str`, got `int`"),
        ({"type": ["integer", "null"]}, "x", "argument 'x' of t must be integer or null"),
        ({"type": "array", "items": NUMBER}, ["x"], "argument 'x' of t must be array of integer"),
        ({"enum": ["a"]}, "b", "argument 'x' of t must be one of a: Invalid enum value 'b'"),
    ],
)
def test_simple_types_of_a_schema_are_checked(schema: dict[str, Any], given: Any, read: Any) -> None:
    made = Tool("t", lambda **arguments: None, parameters={"properties": {"x": schema}, "required": ["x"]})
    found = read_arguments(made.method, {"x": given})
    if isinstance(found, str):
        assert isinstance(read, str) and found.startswith(read)
    else:
        assert found == {"x": read} and type(found["x"]) is type(read)


def test_a_schema_is_a_copy_and_has_every_key() -> None:
    parameters: dict[str, Any] = {"properties": {"x": True}, "$defs": {"X": {}}}
    method = Tool("t", lambda x=0: x, "Say x.", parameters).method
    schema = schema_of(method)
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"x": {}},
        "required": [],
        "$defs": {"X": {}},
    }
    schema["function"]["parameters"]["properties"].clear()
    assert schema_of(method)["function"]["parameters"]["properties"] == {"x": {}}
    assert parameters == {"properties": {"x": True}, "$defs": {"X": {}}}
    assert schema_of(Tool("t", lambda: None).method)["function"]["parameters"]["properties"] == {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tool("", triple), "the name that the model sees is a text"),
        (lambda: Tool("t", 3), "its function is 3"),
        (lambda: Tool("t", triple, 3), "its description is 3"),
        (lambda: Tool("t", triple, "", SCHEMA, 0), "timeout_seconds is 0"),
        (lambda: Tool("t", triple, "", SCHEMA, "5"), "timeout_seconds is '5'"),
        (lambda: Tool("t", triple, "", {"type": "string"}), "have the type 'string', expected 'object'"),
        (lambda: Tool("t", triple, "", {"properties": ["n"]}), "`properties` is ['n']"),
        (lambda: Tool("t", triple, "", {"required": ["n"]}), "`required` has ['n']"),
        (lambda: Tool("t", triple, "", {"properties": {"n": object()}}), "which is no JSON schema"),
        (lambda: Tool("t", triple, "", "query"), "which is no JSON schema"),
        (lambda: Tool("t", triple), "cannot be called with the arguments (none) (missing a required argument: 'n')"),
        (lambda: Tool("t", triple, "", {**SCHEMA, "required": []}), "cannot be called with the arguments (none)"),
        (lambda: Tool("t", halve, "", SCHEMA), "cannot be called with the arguments n, unit"),
    ],
)
def test_a_tool_that_cannot_work_is_refused_when_it_is_made(make: Any, words: str) -> None:
    with pytest.raises(EnvironmentDefinitionError) as caught:
        make()
    assert words in str(caught.value)


# --- what tools() may not return ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None; expected a list of marked methods"),
        ("double", "returned 'double'; expected a list"),
        (["duble"], "named the tool 'duble', which the class does not mark; did you mean 'double'?"),
        (["other"], "its marked tools are: double"),
        ([triple], "write @tool above its `def`, or wrap it"),
        ([3], "returned 3 among its tools; expected"),
        ([halve, halve], "returned two tools named 'halve'"),
        (["double", Tool("double", lambda: None)], "returned two tools named 'double'"),
        ([Tool("t", lambda: None, role="seller")], "for the role 'seller'; the environment has no `roles`"),
    ],
)
def test_a_value_that_is_no_tool_ends_the_run_with_the_line_of_tools(returned: Any, words: str) -> None:
    class Wrong(Quiz):
        def tools(self, task: Task) -> Any:
            return returned

    with pytest.raises(EnvironmentDefinitionError) as caught:
        play(Wrong)
    assert words in str(caught.value) and "Wrong.tools(task)" in str(caught.value)
    assert "test_task_tools.py, line " in str(caught.value)


def test_a_tool_of_another_object_is_not_taken_for_the_own_one() -> None:
    """A bound method of another environment object keeps its own `self`."""

    class Two(Quiz):
        def __init__(self, factor: int = 2) -> None:
            self.factor = factor

        @tool
        def times(self, n: int) -> int:
            """Multiply."""
            return self.factor * n

        def tools(self, task: Task) -> list[Any]:
            return [type(self)(5).times]

    assert play(Two, FakeEngine('[times {"n": 2}]', "x")).trajectory.messages[2].text == "10"


def test_each_role_has_its_own_tools_of_the_task() -> None:
    class Two(Quiz):
        roles = (Role("seller"), Role("buyer"))

        def tools(self, task: Task) -> list[Any]:
            return ["double", Tool("bid", lambda: "5", role="buyer"), Tool("ask", lambda: "9", role="seller")]

        async def rollout(self, task: Task, model: Any) -> None:
            for role in ("seller", "buyer"):
                await model.role(role).say("Your turn.")

    episode = play(Two, FakeEngine("[bid {}]", "a", "[bid {}]", "b"))
    answers = {each.role: (each.tools, each.messages[-2].text) for each in episode.trajectories}
    names = {role: [tool["function"]["name"] for tool in tools] for role, (tools, _) in answers.items()}
    assert names == {"seller": ["double", "ask"], "buyer": ["double", "bid"]}
    assert answers["seller"][1].startswith("Error: there is no tool 'bid'") and answers["buyer"][1] == "5"


def test_tools_that_raises_or_hangs_fails_its_episode_alone() -> None:
    class Raises(Quiz):
        def tools(self, task: Task) -> Any:
            raise KeyError("index")

    class Hangs(Quiz):
        async def tools(self, task: Task) -> Any:
            await trio.sleep_forever()

    episode = play(Raises)
    assert (episode.status, episode.may_retry) == (Status.ENVIRONMENT_ERROR, True)
    assert str(episode.trajectory.error).startswith("running tools: KeyError: 'index'")
    episode = play(Hangs, setup_seconds=1.0)
    assert (episode.status, episode.trajectory.error) == (Status.TIMEOUT, "running tools took longer than 1 seconds")


# --- commands -------------------------------------------------------------------------------------------------------

ENVIRONMENT = '''\
from rollouts import Message, Task, Tool, reward, tool


def lookup(key):
    return {"a": "1"}[key]


class Library:
    """Another shelf for each task."""

    def tasks(self, split, rng):
        while True:
            yield Task(f"Look {rng.randrange(1000)} up.", info={"shelf": "north"})

    def setup(self, task):
        self.shelf = task.info["shelf"]

    @tool
    def note(self, text: str) -> str:
        """Write a note."""
        return text

    def tools(self, task):
        """A shelf, and the notes."""
        keys = {"key": {"type": "string", "enum": ["a"]}}
        return ["note", Tool(f"shelf_{self.shelf}", lookup, "Read.", {"properties": keys, "required": ["key"]})]

    @reward
    def said(self, trajectory):
        return float(len(trajectory.messages))

    def demonstrations(self, split, rng):
        yield [Message("user", "Hello"), Message("assistant", "Hi")]
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "library.py").write_text(ENVIRONMENT)
    return "./library.py:Library"


def test_a_dry_run_calls_the_tools_of_its_task(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--env", library, "--dry-run", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "tools: note; tools(task) chooses those of each task" in said
    assert "call: note(text='1')" in said and "call: shelf_north(key='a')" in said
    assert said.index("call: shelf_north") < said.index("answer: '1'", said.index("call: shelf_north"))


def test_a_dry_run_says_why_tools_failed(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("library.py").write_text(ENVIRONMENT.replace('"""A shelf, and the notes."""', "raise KeyError('shelf')"))
    assert main(["run", "--env", library, "--dry-run", "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert "running tools: KeyError: 'shelf'" in said and "library.py:" in said


def test_an_added_tool_of_the_same_name_is_refused(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    added = ["--tool", "shelf_north=./library.py:lookup"]
    Path("library.py").write_text(ENVIRONMENT.replace("lookup(key)", "lookup(key: str)"))
    assert main(["run", "--env", library, *added, "--dry-run", "--steps", "1"]) == 2
    assert "give the added one another name: --tool other_shelf_north=..." in capsys.readouterr().err


def test_plugins_show_says_that_each_task_has_its_tools(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", library]) == 0
    said = capsys.readouterr().out
    assert "note(text: string)" in said
    assert "tools(task): the tools of each task  A shelf, and the notes\n" in said


def test_a_conversation_has_the_tools_of_its_task(
    library: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for more, words in ((["--task", "0"], "tools: note, shelf_north"), ([], "tools: note · ")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        assert main(["chat", "tiny", "--env", library, *more, "--max-tokens", "2"]) == 0
        said = capsys.readouterr()
        assert words in said.out + said.err


def test_the_prompt_shows_the_tools_of_the_task_and_a_demonstration_those_of_the_class(
    library: str, tmp_path: Path
) -> None:
    rollouts.run(
        env=library,
        out=str(tmp_path / "run"),
        steps=1,
        prompts_per_step=1,
        samples_per_prompt=2,
        eval_tasks=1,
        max_tokens=4,
        quiet=True,
    )
    tokenizer = load_tokenizer("tiny")
    text = (tmp_path / "run" / "trajectories" / "step_000000.jsonl").read_text()
    for line in text.splitlines():
        prompt = tokenizer.decode(json.loads(line)["segments"][0]["tokens"])
        assert '"note"' in prompt and '"shelf_north"' in prompt and '"enum": ["a"]' in prompt
    made = make_plan(resolve({"env": library, "mode": "sft", "steps": 1, "prompts_per_step": 1}))
    assert any("(note), not those of tools(task)" in note for note in made.notes)
    (sample,) = demonstration_samples(made.environments, (), made.settings, load_chat(made.settings, ()))
    shown = tokenizer.decode(sample.tokens)
    assert '"note"' in shown and "shelf" not in shown
