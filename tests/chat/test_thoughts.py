"""Thoughts in the form of each template: trained, read back, and shown once. The templates are short real ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollouts.chat import ChatFormat, load_chat_format, tokenize_supervised
from rollouts.types import Message

sys.path.insert(0, str(Path(__file__).parent))
from tokenizers_for_tests import make_tokenizer


def template(before: str, content: str = "{{ m.content }}", prompt: str = "", line: str = "\n") -> str:
    """A template that writes `before` and `content` in each turn, and `prompt` behind the header of the next one."""
    turn = f"<|im_start|>{{{{ m.role }}}}{{{{ {line!r} }}}}{before}{content}<|im_end|>{{{{ {line!r} }}}}"
    behind = f"{{% if add_generation_prompt %}}<|im_start|>assistant{{{{ {line!r} }}}}{prompt}{{% endif %}}"
    return f"{{% for m in messages %}}{{% set mine = m.role == 'assistant' %}}{turn}{{% endfor %}}{behind}"


def tags(opens: str, closes: str, condition: str = "m.reasoning_content", otherwise: str = "") -> str:
    """The part of a template that writes a thought in tags."""
    thought = f"{{{{ {opens!r} + m.reasoning_content + {closes!r} }}}}"
    return f"{{% if {condition} %}}{thought}{{% elif mine %}}{{{{ {otherwise!r} }}}}{{% endif %}}"


EMPTY = "<think>\n\n</think>\n\n"
# gpt-oss
CHANNELS = template(
    tags("[channel]analysis[message]", "<|end|><|im_start|>assistant[channel]final[message]",
         "m.reasoning_content and loop.last", "[channel]final[message]"), line="",
)  # fmt: skip
SEED = template(tags("<seed:think>", "</seed:think>\n"))
# Qwen3-thinking
OPENED = template(tags("<think>\n", "\n</think>\n\n", otherwise=EMPTY), prompt="{{ '<think>\\n' }}")
LAST_ONLY = template(tags("<think>", "</think>\n", "m.reasoning_content and loop.last"))
IF_ASKED = template(tags("<think>", "</think>\n", "m.reasoning_content and enable_thinking"))
# Ministral
PARTS = template(
    "",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '[THINK]' + p.thinking + '[/THINK]' if p.type == 'thinking' else p.text }}{% endfor %}{% endif %}",
)
# SmolLM3
NONE = template(
    f"{{% if mine and quick %}}{{{{ {EMPTY!r} }}}}{{% endif %}}", prompt=f"{{{{ {EMPTY!r} if quick else '' }}}}"
)
OTHER_TAGS = template("", prompt="{% if quick %}[THINK][/THINK]{% endif %}")
# DeepSeek-V3.1
STRIPS = template("", "{{ m.content.split('</think>')[-1] }}")

USER, AGAIN = Message("user", "A river?"), Message("user", "And a lake?")
REPLY, THINKING = Message("assistant", "The Rhine."), Message("assistant", "The Rhine.", reasoning="Long ones.")


def chat_of(text: str, **arguments: object) -> ChatFormat:
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.chat_template = text
    return load_chat_format(tokenizer, dict(arguments))


def trained(chat: ChatFormat, *messages: Message) -> list[str]:
    rows = tokenize_supervised(list(messages), [], chat)
    return [chat.decode([token for token, weight in zip(*row, strict=True) if weight]) for row in rows]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (CHANNELS, "[channel]analysis[message]Long ones.<|end|><|im_start|>assistant[channel]final[message]The Rhine."),
        (SEED, "<seed:think>Long ones.</seed:think>\nThe Rhine."),
        (OPENED, "Long ones.\n</think>\n\nThe Rhine."),
        (LAST_ONLY, "<think>Long ones.</think>\nThe Rhine."),
        (PARTS, "[THINK]Long ones.[/THINK]The Rhine."),
        (NONE, "<think>\nLong ones.\n</think>\n\nThe Rhine."),
        (OTHER_TAGS, "[THINK]\nLong ones.\n[/THINK]\n\nThe Rhine."),
    ],
    ids=["channels", "seed", "opened by the prompt", "last only", "parts", "none", "none, other tags"],
)
def test_a_thought_is_trained_and_read_in_the_form_of_the_template(text: str, form: str) -> None:
    chat = chat_of(text)
    assert trained(chat, USER, THINKING) == [form + "<|im_end|>"]
    sampled = [*chat.encode(form), *chat.closers.values()]
    assert chat.parse(sampled, []) == THINKING and chat.report.reads_thoughts
    again = chat.extend([USER], THINKING, [AGAIN], [], sampled)
    shown = chat.render([USER, THINKING, AGAIN], [], True)
    assert shown.count("The Rhine.") == 1 and shown.count("final") <= 2, "the header of this reply and of no other"
    if again is not None:
        assert chat.decode([*chat.encode_prompt([USER], []), *sampled, *again]) == shown


def test_the_header_of_a_reply_stands_once() -> None:
    chat = chat_of(CHANNELS)
    sampled = [*chat.encode("[channel]final[message]The Rhine."), *chat.closers.values()]
    assert chat.parse(sampled, []) == REPLY
    again = chat.extend([USER], REPLY, [AGAIN], [], sampled)
    assert again is not None
    assert chat.decode([*sampled, *again]).count("[channel]final[message]") == 1
    bare = [*chat.encode("The Rhine."), *chat.closers.values()]
    assert chat.extend([USER], chat.parse(bare, []), [AGAIN], [], bare) is None, (
        "history shows a header that is not here"
    )


@pytest.mark.parametrize(
    ("text", "arguments"),
    [(IF_ASKED, {}), (STRIPS, {}), (NONE, {"quick": True})],
    ids=["shown on a condition", "stripped from the content", "a mode without thinking"],
)
def test_a_template_that_drops_thoughts_keeps_its_own_form(text: str, arguments: dict) -> None:
    chat = chat_of(text, **arguments)
    assert trained(chat, USER, THINKING) == trained(chat, USER, REPLY)
    assert chat.parse(chat.encode("<think>\nLong ones.\n</think>\n\nThe Rhine."), []) == THINKING
    assert trained(chat_of(IF_ASKED, enable_thinking=True), USER, THINKING)[0].startswith("<think>Long ones.</think>")


def test_a_thought_that_cannot_be_told_from_the_content_is_named_in_the_report() -> None:
    chat = chat_of(template("{{ m.reasoning_content }}"))
    assert not chat.report.reads_thoughts
    assert "The thoughts of this template are not read" in " ".join(chat.report.words())
