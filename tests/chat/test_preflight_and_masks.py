"""What the preflight says of real templates, and the masks of supervised rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.chat import tokenize_supervised
from rollouts.chat.template_style import TemplateStyle, template_message
from rollouts.errors import ModelError
from rollouts.types import Message, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from tokenizers_for_tests import chat_for

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CONVERSATION = [
    Message("user", "1 + 1?"),
    Message("assistant", "", [ToolCall("add", {"a": 1}, "c00000001")]),
    Message("tool", "2", tool_call_id="c00000001", name="add"),
    Message("assistant", "It is 2."),
    Message("user", "thanks"),
    Message("assistant", "Hello."),
]
THINKING = [
    Message("user", "1 + 1?"),
    Message("assistant", "2", reasoning="one and one"),
    Message("user", "thanks"),
    Message("assistant", "Hello.", reasoning="be kind"),
]


@pytest.mark.parametrize(
    ("name", "append_only", "tools", "tool_after_text", "drops_thinking", "masks"),
    [
        ("qwen2_5", True, True, True, False, False),
        ("qwen3", False, True, True, True, False),
        ("qwen3_training", True, True, True, False, True),
        ("llama3_1", False, True, True, True, False),
        ("deepseekv3", False, True, True, True, False),
        ("phi3", True, False, False, False, False),
        ("gemma", True, False, False, False, False),
    ],
)
def test_reports(name, append_only, tools, tool_after_text, drops_thinking, masks) -> None:
    report = chat_for(name).report
    assert report.append_only is append_only
    assert (report.tools, report.tool_after_text) == (tools, tool_after_text)
    assert (report.drops_thinking, report.generation_masks) == (drops_thinking, masks)
    assert any("append-only" in line for line in report.words()) is append_only


def test_words_say_what_is_refused() -> None:
    words = " ".join(chat_for("gemma").report.words())
    assert "refuses a system message: System role not supported" in words
    assert "refuses a tool conversation: Conversation roles must alternate" in words
    assert "leaves the tool call or the tool's answer out" in " ".join(chat_for("phi3").report.words())
    assert "rewrites history at the next user turn" in " ".join(chat_for("mistral").report.words())
    assert "cannot be read back" in " ".join(chat_for("deepseekv3").report.words())
    assert "cannot be read back" not in " ".join(chat_for("qwen3_5_think").report.words())


def test_stop_ids() -> None:
    for name, tokens in (("qwen3", ["<|im_end|>"]), ("llama3_1", ["<|eot_id|>", "<|eom_id|>"])):
        chat = chat_for(name)
        assert chat.stop_ids == tuple(sorted(chat.tokenizer.convert_tokens_to_ids(tokens)))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_training", "llama3_1"])
def test_one_row_trains_what_the_assistant_said(name: str) -> None:
    chat = chat_for(name)
    rows = tokenize_supervised(CONVERSATION[:4], TOOLS, chat)
    (row,) = rows
    assert len(row.tokens) == len(row.loss_mask)
    assert chat.decode(row.tokens) == chat.render(CONVERSATION[:4], TOOLS, False).rstrip("\n")
    trained = chat.decode([t for t, weight in zip(*row, strict=True) if weight == 1.0])
    close = chat.decode([next(iter(chat.closers.values()))])
    assert trained.count(close) == 2 and trained.endswith(f"It is 2.{close}")
    assert '"add"' in trained and "1 + 1?" not in trained and "tool_response" not in trained


@pytest.mark.parametrize("name", ["qwen3_training", "qwen2_5_training", "qwen3_instruct_2507_training"])
def test_the_templates_own_masks_agree(name: str) -> None:
    chat = chat_for(name)
    (row,) = tokenize_supervised(CONVERSATION, TOOLS, chat)
    own = chat.tokenizer.apply_chat_template(
        [template_message(message, TemplateStyle()) for message in CONVERSATION],
        tools=TOOLS,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    theirs = chat.decode([t for t, m in zip(own["input_ids"], own["assistant_masks"], strict=True) if m])
    ours = chat.decode([t for t, m in zip(*row, strict=True) if m])
    # The templates count the line breaks around a turn as the assistant's; nothing samples those.
    assert ours.replace("<|im_end|>", " <|im_end|> ").split() == theirs.replace("<|im_end|>", " <|im_end|> ").split()


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1_distill"])
def test_a_template_that_drops_thinking_gives_a_row_a_turn(name: str) -> None:
    chat = chat_for(name)
    rows = tokenize_supervised(THINKING, [], chat)
    trained = [chat.decode([t for t, m in zip(*row, strict=True) if m]) for row in rows]
    if name == "qwen3":
        assert len(rows) == 2
        assert "one and one" in trained[0] and "be kind" in trained[1]
        assert "one and one" not in chat.decode(rows[1].tokens)
    assert [text.count("Hello.") for text in trained].count(1) == 1 and sum("2" in text for text in trained) == 1


def test_mistral_rows_and_no_reply_no_row() -> None:
    chat = chat_for("mistral")
    rows = tokenize_supervised(CONVERSATION, TOOLS, chat)
    assert len(rows) == 2, "the tools move to the last user message"
    text = "".join(chat.decode([t for t, m in zip(*row, strict=True) if m]) for row in rows)
    assert text.count("</s>") == 3
    assert tokenize_supervised(CONVERSATION[:1], TOOLS, chat) == []
    with pytest.raises(ModelError, match="does not end an assistant turn with a special token"):
        tokenize_supervised(CONVERSATION[3:5][::-1] + CONVERSATION[3:4], [], chat_for("cohere2"))


def test_the_face_is_light() -> None:
    heavy = "{'torch', 'transformers', 'jinja2', 'trio', 'httpx'}"
    code = f"import sys, rollouts.chat.format, rollouts.chat.masks; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
