"""`rollouts data inspect`: what is trained, and how long it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollouts
from rollouts.chat.token_texts import token_texts
from rollouts.cli.app import main
from rollouts.models.loading import load_tokenizer
from rollouts.runs.inspecting import inspect_data

ROWS = [
    {
        "messages": [
            {"role": "user", "content": "Say 3 🙂.", "id": 1},
            {"role": "assistant", "content": "3 🙂"},
            {"role": "user", "content": "And 4?"},
            {"role": "assistant", "content": "4", "weight": 0.5, "id": 2},
        ],
        "source": "a",
    },
    {"messages": [{"role": "tool", "content": "x"}]},
    {"instruction": "Add.", "input": "1 + 1", "output": "2\x1b[31m"},
]


@pytest.fixture
def chat(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


def test_trained_text_is_marked_and_bad_rows_are_named(chat, capsys):
    assert main(["data", "inspect", "chat.jsonl"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"\[\[(.*?)\]\]", out) == ["3 🙂<|im_end|>", "4<|im_end|>", "2\\x1b[31m<|im_end|>"]
    assert "\x1b" not in out, "a terminal would obey what a row says"
    assert "2 conversations: 1 from messages, 1 from instruction, input and output (Alpaca); tokens of tiny" in out
    assert "chat.jsonl, line 2: message 1: a tool result without its call\nthe row: {'messages'" in out
    assert out.splitlines()[1] == "not read: messages[].id, source", "named once"
    found = inspect_data("chat.jsonl", {})
    assert [set(each.weights) for each in found.shown] == [{0.0, 0.5, 1.0}, {0.0, 1.0}]
    assert f"median {sum(found.lengths) / 2:g}, longest {max(found.lengths)}; {sum(found.trained)} of" in out


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
ASKED, TOLD = {"from": "human", "value": "time?"}, {"from": "gpt", "value": "noon"}
RESULT = {"from": "tool", "value": "<tool_response>\nnoon\n</tool_response>"}


@pytest.mark.parametrize(
    ("rows", "trained", "words"),
    [
        (
            [
                {
                    "messages": [
                        said("user", [{"type": "input_text", "text": "Name a river."}]),
                        said("assistant", [{"type": "output_text", "text": "The Rhine."}]),
                    ]
                },
                {"messages": [said("user", [{"type": "image", "image": "cat.png"}]), said("assistant", "A cat.")]},
            ],
            ["The Rhine.<|im_end|>"],
            "chat.jsonl, line 2: message 1: a part of type 'image' is not text",
        ),
        (
            [
                {
                    "prompt": [said("user", "Say one."), said("assistant", "one"), said("user", "Say two.")],
                    "completion": [said("assistant", "two")],
                },
                {"instruction": "Say three.", "input": "", "output": "three", "history": [["Say zero.", "zero"]]},
            ],
            ["two<|im_end|>", "three<|im_end|>"],
            "",
        ),
        (
            [
                {
                    "messages": [
                        said("user", "x"),
                        said("assistant", "one", train=False),
                        said("user", "y"),
                        said("assistant", "two"),
                    ]
                },
                {"messages": [said("user", "x"), said("assistant", "one", loss=True)], "train": False},
            ],
            ["two<|im_end|>"],
            "chat.jsonl, line 2: no turn of the assistant is trained: marks of the turns or of the row say so",
        ),
        ([{"conversations": [{"from": "gpt", "value": "I am first."}, ASKED, TOLD]}], ["noon<|im_end|>"], ""),
        (
            [{"conversations": [ASKED, {"from": "gpt", "value": CALL}, RESULT, TOLD]}],
            [f"{CALL}<|im_end|>", "noon<|im_end|>"],
            "",
        ),
    ],
)
def test_what_other_libraries_write_is_read_or_named(rows, trained, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["data", "inspect", "chat.jsonl"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"\[\[(.*?)\]\]", out, re.DOTALL) == trained and words in out


def test_settings_of_the_data_and_limits(chat, capsys):
    assert main(["data", "inspect", "chat.jsonl", "--show", "1", "--first", "1", "--data.turns", "last"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"\[\[(.*?)\]\]", out) == ["4<|im_end|>"]
    assert "1 conversation from messages; tokens of tiny" in out


PARSER = """
import json
from rollouts import ToolCall

class Dollar:
    def __call__(self, text):
        name, _, arguments = text.removeprefix("$").partition(" ")
        return ([ToolCall(name, json.loads(arguments))], "") if text.startswith("$") else ([], text)

    def write(self, calls):
        return "".join(f"${each.name} {json.dumps(each.arguments)}" for each in calls)

dollar = Dollar()
"""


def test_calls_are_shown_as_the_tool_parser_writes_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("parsers.py").write_text(PARSER)
    call = {"role": "assistant", "tool_calls": [{"name": "now", "arguments": {}}]}
    Path("chat.jsonl").write_text(json.dumps({"messages": [said("user", "?"), call]}))
    flags = ["--tool-parser", "./parsers.py:dollar"]
    assert main(["data", "inspect", "chat.jsonl", *flags]) == 0
    assert re.findall(r"\[\[(.*?)\]\]", capsys.readouterr().out, re.DOTALL) == ["$now {}<|im_end|>"]
    assert main(["data", "inspect", "chat.jsonl", "--tool-parser", "./parsers.py:none"]) == 2
    assert "none" in capsys.readouterr().err


@given(st.text(max_size=40))
def test_texts_of_tokens_join_to_the_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_a_run_shows_what_it_sampled(chat, capsys):
    rollouts.run(
        env="calculator", steps=1, prompts_per_step=1, samples_per_prompt=2, eval_tasks=0, out="run", quiet=True
    )
    capsys.readouterr()
    assert main(["data", "inspect", "run", "--show", "2"]) == 0
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in Path("run/trajectories/step_000000.jsonl").read_text().splitlines()]
    assert "step_000000, group 0, rollout 1" in out and "run: 2 saved rollouts; tokens of tiny" in out
    sampled = sum(weight > 0 for line in lines for segment in line["segments"] for weight in segment["loss_mask"])
    assert f"{sampled} of" in out.splitlines()[-1]
    assert main(["data", "inspect", "run", "--data.turns", "last"]) == 2
    assert "settings of --data do not apply" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.jsonl"], "nothing.jsonl"),
        (["empty.jsonl"], "it holds no conversations"),
        (["bad.jsonl"], "bad.jsonl, line 1: "),
        (["cut.jsonl"], """cut.jsonl, line 1: not JSON: Expecting value (column 15): '{"messages": ['\n"""),
        (["chat.jsonl", "--show", "-1"], "--show -1: expected 0 or more"),
        (["chat.jsonl", "--first", "0"], "--first 0: expected 1 or more"),
        (["chat.jsonl", "--data.turn", "last"], "did you mean: --data.turns?"),
        (["chat.jsonl", "--data.messages", "dialog"], "dialog"),
    ],
)
def test_mistakes(chat, capsys, arguments, words):
    Path("empty.jsonl").write_text("")
    Path("cut.jsonl").write_text('{"messages": [')
    Path("bad.jsonl").write_text('{"messages": [{"content": "no role"}]}')
    assert main(["data", "inspect", *arguments]) == 2
    assert words in capsys.readouterr().err
