"""Supervised rows and rollouts of templates whose true spans are known. `make test-templates` takes 300 of them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import judge_templates
from judge_templates import REFUSED_MAX, Texts, judge, show, tokenizer_for
from made_choices import FAMILIES
from made_conversations import conversations
from made_templates import Made, Refused, choose, joined

from rollouts.chat import SupervisedRow, tokenize_supervised
from rollouts.errors import ModelError
from rollouts.types import Message


def shown(message: Message, text_arguments: bool) -> dict:
    """The message as a template reads it, written here so that nothing of the package takes part."""
    given = {"role": message.role, "content": message.content, "tool_call_id": message.tool_call_id}
    if message.reasoning:
        given["reasoning_content"] = message.reasoning
    functions = [
        {"name": each.name, "arguments": json.dumps(each.arguments, ensure_ascii=False)}
        if text_arguments
        else {"name": each.name, "arguments": each.arguments}
        for each in message.tool_calls
    ]
    calls = zip(message.tool_calls, functions, strict=True)
    given["tool_calls"] = [{"id": each.id, "type": "function", "function": function} for each, function in calls]
    return {key: value for key, value in given.items() if value or key == "content"}


def rendered(made: Made, tokenizer, messages, tools, prompt) -> str:
    """What the Jinja template writes; "" if it refuses the conversation."""
    given = [shown(message, made.of(tools).text_arguments) for message in messages]
    try:
        return tokenizer.apply_chat_template(
            given, tools=tools or None, tokenize=False, add_generation_prompt=prompt, **made.arguments
        )
    except Exception as error:
        assert type(error).__name__ == "TemplateError", error
        return ""


def expected(made: Made, messages, tools, prompt) -> str:
    try:
        return made.text(messages, tools, prompt)
    except Refused:
        return ""


@pytest.mark.parametrize("seed", range(4))
def test_the_template_writes_what_is_said_to_be_true(seed: int) -> None:
    made = choose(seed)
    tokenizer = tokenizer_for(made)
    for conversation in conversations(seed, made.choices.word):
        for count in range(1, len(conversation.messages) + 1):
            messages, tools = conversation.messages[:count], conversation.tools
            for prompt in (True, False):
                assert rendered(made, tokenizer, messages, tools, prompt) == expected(made, messages, tools, prompt)


@pytest.mark.parametrize("count", [12, pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mode", ["supervised", "rollout"])
def test_replies_are_trained_and_recorded_where_they_belong(mode: str, count: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(count):
        made = choose(seed)
        for each in judge(made, [mode]):
            assert each.outcome != "wrong", show(made, each)
            outcomes[each.outcome] += 1
    assert outcomes["refused"] <= REFUSED_MAX * (outcomes["right"] + outcomes["refused"]), outcomes
    assert outcomes["right"] > outcomes["not shown"], outcomes


def moved(row, by: int):
    """The row with its mask moved by so many tokens."""
    return row._replace(loss_mask=[*row.loss_mask[-by:], *row.loss_mask[:-by]])


HARMS = {
    "the reply begins a token early": lambda rows: [moved(row, -1) for row in rows],
    "the reply begins a token late": lambda rows: [moved(row, 1) for row in rows],
    "a row is missing": lambda rows: rows[1:],
    "a row is trained twice": lambda rows: [*rows, rows[0]],
    "everything is trained": lambda rows: [row._replace(loss_mask=[1.0] * len(row.tokens)) for row in rows],
    "the prompt lacks its first token": lambda rows: [type(row)(*(part[1:] for part in row)) for row in rows],
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_planted_fault_is_found(harm: str, monkeypatch) -> None:
    made = Made(FAMILIES["chatml"])
    assert {each.outcome for each in judge(made, ["supervised"])} == {"right", "not shown"}
    monkeypatch.setattr(judge_templates, "tokenize_supervised", lambda *given: HARMS[harm](tokenize_supervised(*given)))
    assert {each.outcome for each in judge(made, ["supervised"])} == {"wrong", "not shown"}


def test_rows_that_are_right_are_found_right(monkeypatch) -> None:
    for seed in range(6):
        made = choose(seed)
        texts = Texts(tokenizer_for(made))

        def rows(messages, tools, chat, made=made, texts=texts):
            turns = made.turns(messages, tools)
            if any(turn.refused for turn in turns):
                raise ModelError("the template cannot show it")
            spans = [next(each for each in turn.spans if each.way != "sampled") for turn in turns]
            pairs = [(texts.encode(joined(each.before)), texts.encode(each.reply)) for each in spans]
            return [SupervisedRow(a + b, [0.0] * len(a) + [1.0] * len(b)) for a, b in pairs]

        monkeypatch.setattr(judge_templates, "tokenize_supervised", rows)
        monkeypatch.setattr(
            judge_templates, "load_chat_format", lambda *_, ids=texts.ids: SimpleNamespace(stop_ids=tuple(ids.values()))
        )
        assert {each.outcome for each in judge(made, ["supervised"])} <= {"right", "not shown"}
