"""`--tool-parser`: the core's own by name, and one of a file with a format that no template writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat.format import load_chat_format
from rollouts.chat.masks import tokenize_supervised
from rollouts.chat.tool_parsers import ChosenParser, hermes, llama3, mistral, xml
from rollouts.chat.tool_parsers import json as json_calls
from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.env import tool
from rollouts.env.schema import tool_schema
from rollouts.errors import ConfigError, ModelError, SignatureError
from rollouts.inference.base import Generation, VersionSpan
from rollouts.models.loading import load_tokenizer
from rollouts.runs.plan import make_plan
from rollouts.runs.rehearsal import ScriptedEngine
from rollouts.runs.session import load_chat
from rollouts.types import Message, Task, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from tokenizers_for_tests import make_tokenizer

PARSERS = '''\
import re

from rollouts import ToolCall


def parse(text, *, word: str = "CALL"):
    """Calls such as CALL add(a=1, b=2)."""
    found = list(re.finditer(word + r" (\\w+)\\((.*?)\\)", text))
    calls = [ToolCall(each[1], dict(re.findall(r"(\\w+)=([^,]*)", each[2]))) for each in found]
    return calls, re.sub(word + r" \\w+\\(.*?\\)", "", text).strip()


class Both:
    def __call__(self, text):
        return parse(text)

    def write(self, calls):
        lines = [f"CALL {each.name}({', '.join(f'{k}={v}' for k, v in each.arguments.items())})" for each in calls]
        return "\\n".join(lines)


both = Both()


class Wrong(Both):
    def write(self, calls):
        return "nothing"


wrong = Wrong()


def raising(text):
    raise ValueError("no parser")


def junk(text):
    return text


def greedy(text):
    return [ToolCall("x", {})], ""


def late(text, tools):
    if "CALL" in text:
        raise KeyError(tools[0]["function"]["name"])
    return [], text


def other(reply):
    return [], reply
'''

TOKENIZER = load_tokenizer("tiny")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "parsers.py").write_text(PARSERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(name: str = "", **settings):
    return make_plan(resolve({"env": "calculator", "tool_parser": f"./parsers.py:{name}"} | settings))


def chat_of(name: str, **settings):
    return load_chat_format(TOKENIZER, {}, plan(name, **settings).tool_parser)


def reply(chat, text: str, tools=()) -> Message:
    return chat.parse([*chat.encode(text), chat.stop_ids[0]], list(tools))


class Adder:
    """Adds."""

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b


SCHEMA = tool_schema(Adder.add)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (hermes, 'So: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        (xml, "So: <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        (mistral, 'So: [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
        (llama3, '{"name": "add", "parameters": {"a": 1}}'),
        (json_calls, '{"name": "add", "arguments": {"a": 1}}'),
    ],
    ids=["hermes", "xml", "mistral", "llama3", "json"],
)
def test_the_core_s_own(parser, text):
    (call,), rest = parser(text, [SCHEMA])
    assert call.name == "add" and str(call.arguments["a"]) == "1" and call.error is None
    assert rest == ("So:" if text.startswith("So") else "")
    assert parser("Just text.", [SCHEMA]) == ([], "Just text.")


def test_the_template_s_own_format_by_name_reads_and_shows_as_before():
    named, detected = chat_of("", tool_parser="hermes"), load_chat_format(TOKENIZER, {})
    messages = [Message("user", "1 + 2?"), Message("assistant", "", [ToolCall("add", {"a": 1, "b": 2}, "c00000001")])]
    messages += [Message("tool", "3", tool_call_id="c00000001"), Message("assistant", "3")]
    assert not named.report.calls_as_text
    assert tokenize_supervised(messages, [SCHEMA], named) == tokenize_supervised(messages, [SCHEMA], detected)
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert reply(named, text, [SCHEMA]) == reply(detected, text, [SCHEMA])
    cut = reply(named, '<tool_call>\n{"name": "add", ', [SCHEMA])
    assert cut.tool_calls[0].error is not None and cut.text.startswith("<tool_call>")


def test_a_format_that_no_template_writes_stays_text():
    chat = chat_of("parse")
    before, new = [Message("user", "1 + 2?")], Message("tool", "3")
    message = reply(chat, "I add: CALL add(a=1, b=2)", [SCHEMA])
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert message.text == "I add: CALL add(a=1, b=2)" and chat.report.calls_as_text
    sampled = [*chat.encode(message.text), chat.stop_ids[0]]
    added = chat.extend(before, message, [new], [SCHEMA], sampled)
    assert added is not None, "one segment"
    whole = chat.render([*before, message, new], [SCHEMA], True)
    assert chat.decode(chat.encode_prompt(before, [SCHEMA]) + sampled + added) == whole
    assert whole.count("CALL add(a=1, b=2)") == 1 and '"arguments": {"a"' not in whole
    assert reply(chat, "CALL add(a=1)").tool_calls == [], "no tools are offered"
    other = chat_of("parse", tool_parser={"name": "./parsers.py:parse", "word": "DO"})
    assert reply(other, "DO add(a=1)", [SCHEMA]).tool_calls


def test_demonstrations_are_in_the_format_that_write_returns():
    messages = [Message("user", "1 + 2?"), Message("assistant", "", [ToolCall("add", {"a": 1, "b": 2}, "x")])]
    (row,) = tokenize_supervised(messages, [SCHEMA], chat := chat_of("both"))
    live = [token for token, weight in zip(row.tokens, row.loss_mask, strict=True) if weight]
    assert chat.decode(live).startswith("CALL add(a=1, b=2)")
    with pytest.raises(ModelError, match="give the parser a function `write`"):
        tokenize_supervised(messages, [SCHEMA], chat_of("parse"))


def test_a_write_that_exits_is_an_error():
    def parse(text):
        return [], text

    vars(parse)["write"] = lambda calls: sys.exit(4)
    with pytest.raises(ConfigError, match=r"the `write` of the tool parser mine fails: .*sys.exit\(4\)"):
        ChosenParser("mine", parse, {}).check()


class Scripted(ScriptedEngine):
    """Says these texts."""

    def __init__(self, chat, *texts: str) -> None:
        self._texts = [[*chat.encode(text), chat.stop_ids[0]] for text in texts]

    async def generate(self, request):
        tokens = self._texts[request.order[-1]]
        return Generation(tokens, [-0.5] * len(tokens), "stop", [VersionSpan(0, 0, len(tokens))])


def played(chat, *texts: str):
    async def run():
        return await run_episode(
            Task("1 + 2?"), make_env=Adder, chat=chat, inference=Scripted(chat, *texts), limits=EpisodeLimits(),
            rewards=(), session="s", order=(0, 0), seed=0,
        )  # fmt: skip

    return trio.run(run)


def test_an_episode_is_one_segment_and_its_calls_are_run():
    trajectory = played(chat_of("parse"), "I add: CALL add(a=1, b=2)", "It is 3.").trajectory
    assert [message.text for message in trajectory.messages[1:]] == ["I add: CALL add(a=1, b=2)", "3", "It is 3."]
    assert len(trajectory.segments) == 1


def test_a_parser_that_raises_in_a_run_is_a_message_to_the_model():
    episode = played(chat_of("late"), "CALL add(a=1)", "Sorry.")
    assert episode.metrics["tool_failure/malformed"] == 1
    answer = episode.trajectory.messages[2]
    assert answer.text == "Error: The tool call could not be read: KeyError: 'add'"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("raising", ConfigError, ["fails at plain text: ValueError: no parser", "parsers.py, line"]),
        ("junk", ConfigError, ["expected (calls, text)"]),
        ("greedy", ConfigError, ["in plain text"]),
        ("wrong", ConfigError, ["does not read the call that its own `write` returns"]),
        ("other", SignatureError, ["it names 'reply'", "text:"]),
    ],
)
def test_bad_parsers_are_refused_before_a_run(name, error, words):
    with pytest.raises(error) as caught:
        chat_of(name)
    for word in words:
        assert word in str(caught.value)


def test_tools_whose_calls_cannot_be_read_are_refused_before_a_run():
    tokenizer = make_tokenizer("deepseekv3")
    for settings in ({}, {"mode": "eval"}, {"mode": "sft"}):
        made = make_plan(resolve({"env": "calculator"} | settings))
        with pytest.raises(ModelError, match=r"calculator has tools, but .*cannot be read back.*--tool-parser"):
            load_chat(made.settings, made.environments, tokenizer)
    made = make_plan(resolve({"env": "calculator", "mode": "sft", "eval_tasks": 0}))
    assert not load_chat(made.settings, made.environments, tokenizer).report.reads_calls, "no reply is read"
    assert load_chat(plan("both").settings, plan("both").environments, tokenizer, plan("both").tool_parser)


def test_bad_settings():
    with pytest.raises(ConfigError, match="no setting 'word'"):
        make_plan(resolve({"env": "calculator", "tool_parser": {"name": "auto", "word": "x"}}))
    with pytest.raises(ConfigError, match="reads the calls itself"):
        make_plan(resolve({"mode": "eval", "env": "calculator", "tool_parser": "hermes", "inference": "openai"}))


def test_a_run_records_its_parser_and_resumes_with_it(capsys):
    small = ["--steps", "1", "--prompts-per-step", "2", "--eval-tasks", "0"]
    flags = ["--env", "calculator", "--tool-parser", "./parsers.py:both"]
    assert main(["sft", *flags, *small, "--out", "run"]) == 0
    assert 'tool_parser]\nname = "./parsers.py:both"' in Path("run/config.toml").read_text()
    assert main(["resume", "run", "--steps", "2"]) == 0
    capsys.readouterr()
    assert main(["run", *flags[:2], "--tool-parser", "./parsers.py:parse", "--dry-run"]) == 0
    assert "no tool was called, because the tool parser has no `write`" in capsys.readouterr().out
