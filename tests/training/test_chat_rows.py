"""Conversations as trained rows: hand-labeled masks of real templates, weights, cuts, and files of prepared rows."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat import ChatFormat, SupervisedRow
from rollouts.chat.tool_parsers import ChosenParser
from rollouts.data.conversations import BadRowError, read_conversation
from rollouts.data.loaders import NotARow
from rollouts.data.source import DataRow
from rollouts.errors import ConfigError, ModelError
from rollouts.training.datasets import prepared as prepared_module
from rollouts.training.datasets.chat_rows import ChatOptions, Cut, supervised_rows
from rollouts.training.datasets.prepared import Preparer, ShuffledSamples, divided, prepare
from rollouts.types import Message, ToolCall

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))
from tokenizers_for_tests import chat_for


def call(number: int) -> dict[str, Any]:
    return {"id": f"c0000000{number}", "function": {"name": "add", "arguments": {"a": number}}}


ASKED = {"role": "user", "content": "1 + 1?"}
CALLS = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [call(1), call(2)]},
    {"role": "tool", "content": "2", "tool_call_id": "c00000001"},
    {"role": "tool", "content": "3", "tool_call_id": "c00000002"},
    {"role": "assistant", "content": "é🙂 2"},
]
ONE_CALL = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call(1)]}, CALLS[2], CALLS[4]]
EMPTY = [
    ASKED,
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "Really?"},
    {"role": "assistant", "content": "é🙂 2"},
]
THOUGHT = [ASKED, {"role": "assistant", "content": "2", "reasoning": "easy"}]

# Written by hand from the families' published formats; what is trained is in ⟦ ⟧.
HEAD = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
DATE = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n<|eot_id|>"
)
QWEN = """<|im_start|>user
1 + 1?<|im_end|>
<|im_start|>assistant
⟦<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"a": 2}}
</tool_call><|im_end|>⟧
<|im_start|>user
<tool_response>
2
</tool_response>
<tool_response>
3
</tool_response><|im_end|>
<|im_start|>assistant
⟦é🙂 2<|im_end|>⟧"""
QWEN_EMPTY = """<|im_start|>user
1 + 1?<|im_end|>
<|im_start|>assistant
⟦<|im_end|>⟧
<|im_start|>user
Really?<|im_end|>
<|im_start|>assistant
⟦é🙂 2<|im_end|>⟧"""
DEEP = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    "<｜end▁of▁sentence｜>"
)
DEEP_ASKED = "<|begin_of_text|><｜User｜>1 + 1?<｜Assistant｜>"
NO_THOUGHT = "<think>\n\n</think>\n\n"  # Qwen3 writes it before a last turn without a thought


def quiet_rows(text: str) -> list[str]:
    """Two turns in the form that Qwen3 gives a last one: a row each, as the history has no empty thought."""
    first, second, last = text.split("⟦")
    return [f"{first}⟦{NO_THOUGHT}{second.partition('⟧')[0]}⟧", f"{first}{second.replace('⟧', '')}⟦{NO_THOUGHT}{last}"]


LABELED = [
    ("qwen2_5", CALLS, [HEAD + QWEN]),
    ("qwen2_5", EMPTY, [HEAD + QWEN_EMPTY]),
    ("qwen3", CALLS, quiet_rows(QWEN)),
    ("qwen3", EMPTY, quiet_rows(QWEN_EMPTY)),
    (
        "qwen3",
        THOUGHT,
        ["<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n⟦<think>\neasy\n</think>\n\n2<|im_end|>⟧"],
    ),
    (
        "llama3_1",
        EMPTY,
        [
            DATE + "<|start_header_id|>user<|end_header_id|>\n\n1 + 1?<|eot_id|><|start_header_id|>assistant"
            "<|end_header_id|>\n\n⟦<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\nReally?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦é🙂 2<|eot_id|>⟧"
        ],
    ),
    (
        "llama3_1",
        ONE_CALL,
        [
            DATE + "<|start_header_id|>user<|end_header_id|>\n\n1 + 1?<|eot_id|><|start_header_id|>assistant"
            '<|end_header_id|>\n\n⟦{"name": "add", "parameters": {"a": 1}}<|eot_id|>⟧<|start_header_id|>ipython'
            '<|end_header_id|>\n\n"2"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦é🙂 2<|eot_id|>⟧'
        ],
    ),
    (
        "deepseekv3",
        CALLS,
        [
            f"{DEEP_ASKED}⟦{DEEP}⟧",
            f"{DEEP_ASKED}{DEEP}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>2<｜tool▁output▁end｜><｜tool▁output▁begin｜>"
            "3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>⟦é🙂 2<｜end▁of▁sentence｜>⟧",
        ],
    ),
    (
        "phi3",
        EMPTY,
        ["<|user|>\n1 + 1?<|end|>\n<|assistant|>\n⟦<|end|>⟧\n<|user|>\nReally?<|end|>\n<|assistant|>\n⟦é🙂 2<|end|>⟧"],
    ),
    (
        "gemma",
        EMPTY,
        [
            "<|begin_of_text|><start_of_turn>user\n1 + 1?<end_of_turn>\n<start_of_turn>model\n⟦<end_of_turn>⟧\n"
            "<start_of_turn>user\nReally?<end_of_turn>\n<start_of_turn>model\n⟦é🙂 2<end_of_turn>⟧"
        ],
    ),
    (
        "mistral",
        CALLS,
        [
            '<|begin_of_text|>[INST] 1 + 1?[/INST]⟦[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": '
            '"c00000001"}, {"name": "add", "arguments": {"a": 2}, "id": "c00000002"}]</s>⟧[TOOL_RESULTS] {"content": '
            '"2", "call_id": "c00000001"}[/TOOL_RESULTS][TOOL_RESULTS] {"content": "3", "call_id": "c00000002"}'
            "[/TOOL_RESULTS]⟦ é🙂 2</s>⟧"
        ],
    ),
]


def rows_of(messages: list[dict[str, Any]], chat: ChatFormat, **options: Any) -> tuple[list[SupervisedRow], Cut]:
    rows, cut, _ = supervised_rows(read_conversation({"messages": messages}), chat, ChatOptions(**options))
    return rows, cut


def labeled(row: SupervisedRow, chat: ChatFormat) -> str:
    """The text of a row, with its trained parts in ⟦ ⟧."""
    text = ""
    for weight, run in itertools.groupby(zip(*row, strict=True), key=lambda pair: pair[1]):
        part = chat.decode([token for token, _ in run])
        text += f"⟦{part}⟧" if weight else part
    return text


@pytest.mark.parametrize(("name", "messages", "expected"), LABELED, ids=itertools.count())
def test_masks_equal_hand_labeled_ones(name: str, messages: list[dict[str, Any]], expected: list[str]) -> None:
    """Seven families: parallel calls, empty turns, thinking, characters of several tokens."""
    chat = chat_for(name)
    rows, cut = rows_of(messages, chat)
    assert [labeled(row, chat) for row in rows] == expected and cut == Cut()


_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12).map(str.strip)


@given(st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=4))
def test_masked_text_joined_is_the_assistants_text(turns: list[tuple[str, str]]) -> None:
    chat = chat_for("qwen2_5")
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    (row,), _ = rows_of(messages, chat)
    trained = chat.decode([token for token, weight in zip(*row, strict=True) if weight])
    assert trained == "".join(f"{reply}<|im_end|>" for _, reply in turns)


def test_which_turns_are_trained_and_with_which_weight() -> None:
    chat = chat_for("qwen2_5")

    def weights(messages: list[dict[str, Any]], **options: Any) -> list[float]:
        ((_, mask),), _ = rows_of(messages, chat, **options)
        return [weight for weight, _ in itertools.groupby(mask) if weight]

    assert weights(CALLS) == [1.0, 1.0] and weights(CALLS, turns="last") == [1.0]
    half = [*EMPTY[:1], {**EMPTY[1], "weight": 0.5}, EMPTY[2], {**EMPTY[3], "weight": 0}]
    assert weights(half) == [0.5]
    with pytest.raises(BadRowError, match="no turn of the assistant is trained: marks of the turns or of the row say"):
        weights(half, turns="last")
    with pytest.raises(BadRowError, match="no message is of the role assistant"):
        weights([ASKED])
    with pytest.raises(BadRowError, match="cannot show its tool calls"):
        rows_of(CALLS, chat_for("phi3"))
    inside = [ASKED, {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"}]
    for thinking in (THOUGHT, inside):
        (row,), _ = rows_of(thinking, chat_for("qwen3"), thinking="drop")
        assert "easy" not in chat_for("qwen3").decode(row.tokens)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "deepseekv3", "phi3", "gemma", "mistral"])
def test_a_conversation_that_the_assistant_begins(name: str) -> None:
    """Its first reply is context, in the words of the template; or the error says what is wrong."""
    chat = chat_for(name)
    begun = [{"role": "assistant", "content": "I am first."}, ASKED, {"role": "assistant", "content": "2"}]
    if name == "gemma":
        with pytest.raises(ModelError, match="the conversation begins with the assistant: the chat template of"):
            rows_of(begun, chat)
        return
    ((tokens, mask),), _ = rows_of(begun, chat)
    whole = [Message(each["role"], each["content"]) for each in begun]
    assert chat.render(whole, [], False).startswith(chat.decode(tokens))
    trained = chat.decode([token for token, weight in zip(tokens, mask, strict=True) if weight])
    assert trained.removesuffix(next(end for end in chat.closers if trained.endswith(end))).split()[-1] == "2"
    assert "first" in chat.decode(tokens) and "first" not in trained
    for turns in ("all", "last"):
        with pytest.raises(BadRowError, match="begins with the assistant, and has no later turn of it"):
            rows_of(begun[:2], chat, turns=turns)


def test_no_cut_is_inside_of_a_tool_call() -> None:
    """For every length: whole turns, or the start of a first turn of text; what is missing is counted."""
    chat = chat_for("qwen2_5")
    for messages, may_cut_inside in ((CALLS, False), (EMPTY[2:], True)):
        (whole,), _ = rows_of(messages, chat)
        first = whole.loss_mask.index(1.0)
        seen = set()
        for length in range(2, len(whole.tokens) + 1):
            rows, cut = rows_of(messages, chat, max_length=length)
            kept = [token for row in rows for token in row.tokens]
            assert kept == whole.tokens[: len(kept)] and len(kept) <= length
            assert cut.tokens == len(whole.tokens) - len(kept)
            assert (cut.rows, cut.left_out) == (0 < len(kept) < len(whole.tokens), not kept)
            assert not kept or kept[-1] == whole.tokens[-1] or (may_cut_inside and len(kept) == length > first)
            seen.add(len(kept))
        assert 0 in seen and len(whole.tokens) in seen


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[DataRow]:
    monkeypatch.setattr(prepared_module, "PIECE_ROWS", 4)
    return [
        DataRow(
            f"f, row {n}",
            {"messages": [{**ASKED, "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}], f"c{n}": 1},
        )
        for n in range(11)
    ]


def preparer(**options: Any) -> Preparer:
    chat = chat_for("qwen3")
    return Preparer(chat.tokenizer, {}, ChatOptions(**options), chat)


def test_prepared_rows_are_those_of_each_conversation(rows: list[DataRow], tmp_path: Path) -> None:
    """By one process or two. A second preparation, one after a kill, and a longer file only prepare what is new."""
    asked: list[str] = []

    class Counting(Preparer):
        def prepare(self, content: bytes, path: str) -> None:
            asked.append(path)
            super().prepare(content, path)

    one = prepare(rows, Counting(*vars(preparer()).values()), processes=1, folder=tmp_path / "one")
    chat = chat_for("qwen3")
    for number, row in enumerate(rows):
        ((tokens, mask),), *_ = supervised_rows(read_conversation(row.value), chat)
        (index,) = one.rows_of(number)
        sample = one.sample(index, 7)
        assert (sample.tokens, sample.loss_mask, sample.rollout_index) == (tokens, mask, 7)
    two = prepare(rows[:8], preparer(), processes=2, folder=tmp_path / "two")  # the second piece by a child
    assert [two.sample(n, 0) for n in range(8)] == [one.sample(n, 0) for n in range(8)]
    columns = ", ".join(sorted(f"c{n}" for n in range(11)))
    assert one.words("f") == ["f: 11 conversations from messages", f"f: not read: {columns}"] and len(asked) == 3
    prepare(rows, Counting(*vars(preparer()).values()), processes=1, folder=tmp_path / "one")
    assert len(asked) == 3, "all found"
    Path(asked[1]).unlink()
    again = prepare([*rows, *rows[:1]], Counting(*vars(preparer()).values()), processes=1, folder=tmp_path / "one")
    assert len(asked) == 5 and asked[3] == asked[1] and len(again) == 12
    prepare(rows, Counting(*vars(preparer(turns="last")).values()), processes=1, folder=tmp_path / "one")
    assert len(asked) == 8, "other settings, other tokens"


def read_lines(text: str) -> tuple[list[ToolCall], str]:
    """A tool parser: a call is a line of JSON behind `CALL`."""
    return [ToolCall(*json.loads(each)) for each in re.findall("CALL (.*)", text)], re.sub("CALL .*", "", text).strip()


def write_lines(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"CALL {json.dumps([each.name, each.arguments])}" for each in calls)


def test_rows_are_prepared_with_the_tool_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pieces, and not from the files of a run without it: this template cannot show calls itself."""
    monkeypatch.setattr(prepared_module, "PIECE_ROWS", 2)
    monkeypatch.setattr(read_lines, "write", write_lines, raising=False)
    talks = [DataRow(f"f, row {n}", {"messages": [{**ASKED, "content": f"{n}?"}, ONE_CALL[1]]}) for n in range(4)]
    alone = Preparer(chat_for("phi3").tokenizer, {}, ChatOptions())
    with pytest.raises(ConfigError, match="row 0: the chat template cannot show its tool calls"):
        prepare(talks, alone, processes=2, folder=tmp_path)
    parsing = Preparer(alone.tokenizer, {}, ChatOptions(), parser=ChosenParser("lines", read_lines, {}))
    found = prepare(talks, parsing, processes=2, folder=tmp_path)
    texts = [chat_for("phi3").decode(found.sample(number, 0).tokens) for number in range(4)]
    assert texts == [f'<|user|>\n{n}?<|end|>\n<|assistant|>\nCALL ["add", {{"a": 1}}]<|end|>' for n in range(4)]


def test_each_epoch_has_every_row_once_in_another_order(rows: list[DataRow], tmp_path: Path) -> None:
    prepared = prepare([*rows, rows[3]], preparer(), processes=1, folder=tmp_path)
    trained, held_out = divided(prepared, 0.4)
    assert sorted([*trained, *held_out]) == list(range(12)) and (3 in trained) == (11 in trained)
    samples = ShuffledSamples(prepared, trained, 3 * len(trained), seed=1)
    epochs = [samples[n * len(trained) : (n + 1) * len(trained)] for n in range(3)]
    orders = [[sample.rollout_index - 12 * n for sample in epoch] for n, epoch in enumerate(epochs)]
    assert all(sorted(order) == trained for order in orders) and orders[0] != orders[1]
    longer = ShuffledSamples(prepared, trained, 9 * len(trained), seed=1)
    assert longer[: len(samples)] == samples[:], "more steps change no order"
    with pytest.raises(ConfigError, match=r"--data\.held-out 1e-09: of 12 conversations, 0 would be held out"):
        divided(prepared, 1e-9)


def test_bad_rows_are_fatal_or_counted(rows: list[DataRow], tmp_path: Path) -> None:
    bad = [*rows[:5], DataRow("f, row 5", {"messages": [{"content": "x"}]}), DataRow("f, row 6", {"text": "y"})]
    with pytest.raises(ConfigError, match=r'f, row 5: message 1: it has no role\nthe row: {"messages".*\n.*skip'):
        prepare(bad, preparer(), processes=1, folder=tmp_path)
    found = prepare(bad, preparer(), processes=1, folder=tmp_path, skips=True)
    assert len(found) == 5 and [place for place, *_ in found.bad] == ["f, row 5", "f, row 6"]
    broken = prepare(
        [*bad, DataRow("f, row 7", NotARow("not JSON"))], preparer(), processes=1, folder=tmp_path, skips=True
    )
    assert [place for place, *_ in broken.bad] == ["f, row 7", "f, row 5", "f, row 6"]
    assert found.words("f")[-1].startswith("f: skipped 2 rows, such as f, row 5: message 1: it has no role")
    for nothing, words in (([], "f: it holds no rows"), (bad[5:], "f: no row is a conversation to train on: f, row 5")):
        with pytest.raises(ConfigError, match=words):
            prepare(nothing, preparer(), processes=1, folder=tmp_path, skips=True, name="f")
    with pytest.raises(ConfigError, match="max_length 2 leaves nothing"):
        prepare(rows, preparer(max_length=2), processes=1, folder=tmp_path)


def test_a_run_learns_from_rows_and_stops_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment. The loss of held-out conversations is that of the model, and ends the run."""
    from rollouts.config.resolving import resolve
    from rollouts.runs import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLOUTS_CACHE", str(tmp_path / "cache"))
    talk = [
        {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "It is so."}]}
        for n in range(12)
    ]
    Path("chat.json").write_text(json.dumps(talk))
    data = {"name": "chat.json", "held_out": 0.3, "patience": 1}
    tree = {"mode": "sft", "data": data, "steps": 6, "prompts_per_step": 2, "eval_every": 1, "lr": 0.3, "out": "o"}
    summary = run(resolve(tree))
    losses = summary["held_out_loss"]
    assert summary["stopped"]["by"] == "patience" and summary["steps"] < 6
    (state,) = Path("o/checkpoints").glob("*/state.json")
    assert json.loads(state.read_text())["run"]["patience"] == {"lowest": min(list(losses.values())[1:]), "since": 1}
    assert losses[str(summary["steps"])] > min(losses.values()), "it ends after a loss that is not the lowest"
    logged = [json.loads(line) for line in Path("o/metrics.jsonl").read_text().splitlines()]
    assert {line["eval/loss"] for line in logged if "eval/loss" in line} == {
        loss for step, loss in losses.items() if step != "0"
    }
    assert re.search(r'^name = "chat.json"$', Path("o/config.toml").read_text(), re.MULTILINE)
    with pytest.raises(ConfigError, match=r"--data\.held-out: this setting is for conversations to learn from"):
        run(resolve({"data": {"name": "chat.json", "held_out": 0.3}, "reward": ["constant"]}))
    with pytest.raises(ConfigError, match=r"--data\.patience 1: it compares evaluations"):
        run(resolve({"mode": "sft", "data": {"name": "chat.json", "patience": 1}}))
