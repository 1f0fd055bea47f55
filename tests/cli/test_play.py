"""`rollouts play`: an episode without a model, through a pipe and in a terminal; by a person, a script or chance."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from pathlib import Path

import hash_seeds
import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal import Terminal

from rollouts.chat.format import load_chat_format
from rollouts.cli import main
from rollouts.cli.play import typed_reply
from rollouts.env.methods import as_conversation
from rollouts.env.schema import tool_schema
from rollouts.errors import ConfigError
from rollouts.inference.chatting import ChatRequest
from rollouts.models.loading import load_tokenizer
from rollouts.runs.play import random_value
from rollouts.types import Message, ToolCall

ENVIRONMENT = '''\
from pathlib import Path
from typing import Literal

from rollouts import Role, Score, Task, metric, reward, tool


class Cafe:
    """A guest orders and pays."""

    def __init__(self, closed: str = "", failing: bool = False):
        self.closed, self.failing = closed, failing

    def tasks(self, split, rng):
        return [Task(f"{number} tea, please.", answer=3 * number, id=str(number)) for number in range(40)]

    def setup(self, task):
        if self.failing:
            raise OSError("the kitchen burns")
        self.has_asked = False

    def close(self):
        if self.closed:
            Path(self.closed).write_text("closed")

    @tool
    def price(self, thing: Literal["tea", "cake"], count: int = 1) -> int:
        """The price of some things."""
        return {"tea": 3, "cake": 4}[thing] * count

    def reply(self, trajectory):
        if not self.has_asked:
            self.has_asked = True
            return "How much is that?"

    @reward
    def correct(self, task, trajectory):
        right = trajectory.last_text == str(task.answer)
        return Score(float(right), {"polite": 0.5}, "" if right else f"it is {task.answer}")

    @metric
    def used_tool(self, trajectory):
        return trajectory.metrics.get("tool_calls", 0.0)


class Market(Cafe):
    """Two agents."""

    roles = (Role("seller", system="You sell a lamp."), Role("buyer"))

    async def rollout(self, task, model):
        offer = await model.role("seller").say("A buyer is here.")
        await model.role("buyer").say(f"The seller says: {offer.text}")

    @reward(role="buyer")
    def short(self, trajectory):
        return float(len(trajectory.last_text) < 5)


class Shell(Cafe):
    """A sandbox."""

    def setup(self, task, sandbox):
        self.has_asked, self.sandbox = True, sandbox

    @tool
    def run(self, command: str) -> str:
        """Run a command."""
        return self.sandbox.exec(command).text


def best_of_group(trajectories, *, value: float = 7.0):
    return [value for _ in trajectories]
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "cafe.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    return "./cafe.py:Cafe"


@pytest.fixture
def play(monkeypatch, capsys):
    """play(arguments, lines of the input) -> (exit code, output, errors)"""

    def run(*arguments: str, lines: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["play", *arguments])
        return (code, *capsys.readouterr())

    return run


def task_of(out: str) -> int:
    return int(out.partition("user: ")[2].split()[0])


def test_a_person_sees_what_a_model_sees_and_is_judged(file, play):
    _, out, _ = play(file)
    answer = str(3 * task_of(out))
    typed = ("/tool price thing=tea count=2", "With pleasure.", answer)
    code, out, err = play(file, lines=typed)
    assert code == 0 and "left" not in err
    assert out.splitlines() == [
        "tool: price(thing: cake|tea, [count: integer])  The price of some things.",
        out.splitlines()[1],
        "assistant: [price(thing='tea', count=2)]",
        "tool: 6",
        "assistant: With pleasure.",
        "user: How much is that?",
        f"assistant: {answer}",
        "completed",
        "reward 1",
        "  correct: 1",
        "  polite: 0.5",
        "  metrics: used_tool 1, turns 3, tool_calls 1, tool_failures 0",
    ]


def test_a_reward_says_why(file, play):
    code, out, _ = play(file, lines=("hm", "1000"))
    assert code == 0 and f"reward 0\n  correct: 0\n  polite: 0.5\n  why: correct: it is {3 * task_of(out)}" in out


def test_the_end_of_the_input_judges_nothing_and_closes(file, play, tmp_path):
    code, out, err = play(file, "--env.closed", "gone", "--json", "talk.jsonl", lines=("hello",))
    assert code == 0 and "nothing was judged" in err and "reward" not in out
    assert (tmp_path / "gone").read_text() == "closed" and not (tmp_path / "talk.jsonl").exists()


def test_an_episode_can_be_ended_and_judged(file, play):
    code, out, _ = play(file, lines=("hello", "/end"))
    assert code == 0 and "truncated: you ended the episode" in out and "reward 0\n" in out


def test_other_rewards_tools_and_limits_of_a_run(file, play):
    (Path("notes.py")).write_text('def search(query: str) -> str:\n    """Find."""\n    return query.upper()\n')
    rewards = ("--reward", "env:0.5", "--reward", "best=./cafe.py:best_of_group:2", "--reward.best.value", "3")
    more = ("--tool", "./notes.py:search", "--system", "Be brief.", "--max-turns", "1", "--task", "2")
    code, out, err = play(file, *rewards, *more, lines=("/tool search 'a b'",))
    assert code == 0, err
    assert "system: Be brief." in out and "tool: A B" in out and "completed: its only turn is used" in out
    assert "reward 6\n" in out and "best: 3, weight 2" in out and "correct: 0, weight 0.5" in out


def test_each_role_is_named(file, play):
    code, out, _ = play("./cafe.py:Market", lines=("I sell", "no"))
    assert code == 0
    seller, buyer = out.split("--- you are buyer\n")
    assert seller.startswith("--- you are seller\n") and "system: You sell a lamp." in seller
    assert "user: The seller says: I sell" in buyer and "You sell" not in buyer
    assert "buyer: completed" in buyer and "  short: 1" in buyer.partition("buyer: completed")[2]
    assert "  short" not in buyer.partition("seller: completed")[2].partition("buyer: completed")[0]


def test_an_environment_has_its_sandbox(file, play):
    code, out, _ = play("./cafe.py:Shell", lines=("/tool run 'echo $((6 * 7))'", "done"))
    assert code == 0 and "tool: 42" in out and "completed" in out


def test_saved_conversations_are_demonstrations(file, play, tmp_path, capsys):
    lines = ("/tool price tea", "Yes.", "/save saved.jsonl", "3")
    code, _, err = play(file, "--json", "played.jsonl", lines=lines)
    assert code == 0 and "messages are saved in saved.jsonl" in err
    saved, played = (json.loads((tmp_path / name).read_text()) for name in ("saved.jsonl", "played.jsonl"))
    assert played["messages"][:-1] == saved["messages"] and played["status"] == "completed"
    assert played["parts"]["polite"] == 0.5 and "reward" in played
    messages = as_conversation(saved["messages"], "saved")
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages[1].tool_calls[0].arguments == {"thing": "tea"}
    row = {"messages": [message for message in played["messages"] if message["role"] != "tool"][-2:]}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"id": str(n)}) for n in range(20)))
    assert main(["sft", "--env", "prompts", "--data", "rows.jsonl", "--eval-tasks", "0", "--dry-run"]) == 0, (
        capsys.readouterr().err
    )


def test_several_lines_and_slashes(file, play):
    _, out, _ = play(file, lines=('"""', "one", "", "two", '"""', "//help"))
    assert "assistant: one\n\ntwo\n" in out and "assistant: /help\n" in out


def test_the_exact_text_is_shown_to_the_end_of_the_episode(file, play):
    _, out, _ = play(file, lines=("/help", "/text", "/tool price cake"))
    assert "from here to the end of the episode" in out
    assert out.count("<|im_start|>assistant") == 2, "of this turn, and of the next one"


def test_the_exact_text_is_that_of_the_template(file, play):
    _, out, _ = play(file, "--show-text", lines=("/tool price cake",))
    shown = "\n".join(line.removeprefix("| ") for line in out.splitlines() if line.startswith("| "))
    first, second = shown.split("<|im_start|>assistant\n", 1)
    chat = load_chat_format(load_tokenizer("tiny"), {}, None)
    function = tool_schema(lambda: None, "x")  # the shape of a schema; the names come from what was shown
    assert function["type"] == "function" and '"name": "price"' in first
    messages = [Message("user", out.partition("user: ")[2].partition("\n")[0])]
    call = ToolCall("price", {"thing": "cake"}, "call_1")
    later = [*messages, Message("assistant", "", [call]), Message("tool", "4", tool_call_id="call_1", name="price")]
    schema = json.loads(next(line for line in first.splitlines() if '"price"' in line))
    assert chat.render(later, [schema], True) == (first + "<|im_start|>assistant\n" + second) + "\n"


def test_a_script_plays_the_demonstrations(play, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = play("calculator", "--agent", "scripted", "--episodes", "4", "--json", "d.jsonl")
    assert [line for line in out.splitlines() if line.endswith(" ")] == []
    assert code == 0
    assert out.splitlines()[-1].split() == ["mean", "2", "1", "1", "1"] and "--- episode 4 of 4" in out
    rows = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert len({row["messages"][0]["content"] for row in rows}) == 4
    assert all(row["reward"] == 1.0 for row in rows)


def test_a_script_without_demonstrations_calls_every_tool(file, play):
    code, out, _ = play(file, "--agent", "scripted", "--task", "3")
    assert code == 0 and "assistant: [price(thing='cake')]" in out and "scripted reply" in out


def test_chance_is_decided_by_the_seed(file, play):
    arguments = (file, "--agent", "random", "--episodes", "5")
    runs = [play(*arguments, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert runs[0] == runs[1] != runs[2]
    assert "bad_arguments" not in runs[0] and "[price(thing='" in runs[0]


TYPES = st.recursive(
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": 3, "maximum": 5},
            {"type": "integer", "minimum": 200},
            {"type": "number", "minimum": -2, "maximum": -1},
            {"enum": ["a", "b"]},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda each: {"type": "array", "items": each, "minItems": 1}, inner),
        st.builds(lambda *each: {"anyOf": list(each)}, inner, inner),
        st.builds(lambda a, b: {"type": "object", "properties": {"a": a, "b": b}, "required": ["a"]}, inner, inner),
    ),
    max_leaves=6,
)


def fits(value, schema) -> bool:
    """Whether the value fits the schema, for the words that TYPES has."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = {"string": str, "boolean": bool, "null": type(None), "integer": int, "number": float, "array": list}
    if schema["type"] == "object":
        if not isinstance(value, dict):
            return False
        known = schema["properties"]
        return "a" in value and all(fits(each, known[name]) for name, each in value.items())
    if not isinstance(value, kind[schema["type"]]) or (schema["type"] == "integer" and isinstance(value, bool)):
        return False
    if schema["type"] == "array":
        return len(value) >= 1 and all(fits(each, schema["items"]) for each in value)
    return schema.get("minimum", value) <= value <= schema.get("maximum", value) if "minimum" in schema else True


@given(TYPES, st.integers(0, 2**32))
def test_random_values_fit_their_schema(schema, seed):
    assert fits(random_value(schema, random.Random(seed)), schema)


def test_a_failed_episode_is_shown_and_has_exit_code_1(file, play):
    code, out, _ = play(file, "--env.failing", "true", "--agent", "scripted")
    assert code == 1 and "environment_error: running setup: OSError: the kitchen burns" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calculater"], ["no environment is named", "calculator"]),
        (["./cafe.py:Cafe", "--task", "99"], ["--task 99: there are 40 held-out tasks", "0 to 39"]),
        (["./cafe.py:Cafe", "--task", "-1"], ["--task -1"]),
        (["./cafe.py:Cafe", "--episodes", "0"], ["--episodes 0: expected 1 or more"]),
        (["./cafe.py:Cafe", "--agent", "gpt"], ["person"]),
        (["./cafe.py:Cafe", "--json", "cafe.py"], ["exists already"]),
        (["./cafe.py:Cafe", "--env.clozed", "x"], ["closed"]),
        (["./cafe.py:Cafe", "--steps", "3"], ["no option --steps"]),
    ],
)
def test_mistakes_are_one_message(file, play, arguments, words):
    code, _, err = play(*arguments, lines=("hello",))
    assert code == 2 and err.startswith("error: ") and all(word in err for word in words), err


SCHEMAS = [
    {"function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {
        "price": {"thing": {"type": "string"}, "count": {"type": "integer"}, "flags": {"type": "array"}},
        "stop": {},
    }.items()
]


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("/tool price thing=tea count=2", {"thing": "tea", "count": 2}),
        ("/tool price tea 2", {"thing": "tea", "count": 2}),
        ("/tool price 'two words' flags=[1,2]", {"thing": "two words", "flags": [1, 2]}),
        ("/tool price thing=12 count=none", {"thing": "12", "count": None}),
        ("/tool price 1+1=2", {"thing": "1+1=2"}),
        ("/tool stop", {}),
        ('/call {"name": "price", "arguments": {"thing": "x"}}', {"thing": "x"}),
        ('/call {"name": "stop"}', {}),
    ],
)
def test_a_typed_call(line, arguments):
    (call,) = typed_reply(line, ChatRequest([], SCHEMAS, 0, 0)).tool_calls
    assert call.arguments == arguments and call.error is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/tool pryce tea", "the tools are: price, stop"),
        ("/tool", "the tools are: price, stop"),
        ("/tool stop now", "it takes none"),
        ("/tool price a b c d", "'d' is one too many; it takes thing, count, flags"),
        ("/tool price 'a", "No closing quotation"),
        ("/call price", "is no call"),
        ("/call [1]", "is no call"),
        ('/call {"name": "price", "arguments": 3}', "is no call"),
    ],
)
def test_a_call_with_a_mistake(line, words):
    with pytest.raises(ConfigError) as error:
        typed_reply(line, ChatRequest([], SCHEMAS, 0, 0))
    assert words in str(error.value)


def test_a_mistake_at_the_prompt_is_asked_again(file, play):
    lines = ("/helf", "/help", "/save", "/tools", "/tool nothing", "hello", "/end")
    code, out, err = play(file, lines=lines)
    assert code == 0 and "/help" in err and "/save needs a file" in err and "there is no tool 'nothing'" in err
    assert "end the episode now" in out and '"description": "The price of some things."' in out


def test_it_needs_no_torch(file, tmp_path):
    code = (
        "import sys\nsys.modules.update(dict.fromkeys(['torch', 'transformers', 'numpy'], None))\n"
        "from rollouts.cli import main\nsys.exit(main())"
    )
    command = [sys.executable, "-c", code, "play", file, "--agent", "scripted"]
    done = hash_seeds.run(command, cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and "reward 0" in done.stdout, done.stderr


@pytest.mark.parametrize(("key", "code", "words"), [("\x04", 0, "nothing was judged"), ("\x03", 130, "interrupted")])
def test_a_key_ends_it_in_a_terminal(file, tmp_path, key, code, words):
    with Terminal("play", file, "--env.closed", str(tmp_path / "gone")) as terminal:
        terminal.until("tea, please.")
        terminal.until("> ")
        terminal.until("How much is that?", typing="Hello\r")
        terminal.until("> ")
        terminal.until(words, typing=key)
        assert terminal.exit_code() == code
    assert (tmp_path / "gone").read_text() == "closed"
    assert os.listdir(tmp_path)
