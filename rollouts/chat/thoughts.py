"""Thoughts: where a chat template writes them, and how they are read out of a reply.

Families write a thought in tags (`<think>…</think>`, `[THINK]…[/THINK]`) or in a channel with a header. `find_thoughts`
renders a message with a thought and looks at what surrounds it, so it needs no list of families.
"""

from __future__ import annotations

import functools
import os
import re
from typing import NamedTuple

from rollouts.chat.template_style import PROBE_TEXT, PROBE_THOUGHT, PROBE_VALUE, USER, Prober, probe_call, tool_reply
from rollouts.types import Message

_TAG = re.compile(r"\s*(<[^<>\n]+>|\[[^\[\]\n]+\])")


class ThoughtForm(NamedTuple):
    """How a template writes thoughts and content, without the white space around each part.

    Attributes:
        opens: the text before a thought; "": a thought begins where the reply begins.
        closes: the text behind a thought.
        after: more text that the template writes between `closes` and the content, such as the header of a channel.
        header: the text before the content of a reply without a thought.
        prompt: the part of the generation prompt that opens a thought and leaves it open (`<think>\\n`), or "".
        is_read: whether a thought that the template shows is read back.
        is_split: whether the template takes a thought out of a message's text. If not, it has to be in its own field.
    """

    opens: str
    closes: str
    after: str = ""
    header: str = ""
    prompt: str = ""
    is_read: bool = True
    is_split: bool = True

    def split(self, text: str) -> tuple[str, str]:
        """The content of a reply's text, and its thought.

        >>> ThoughtForm("<think>", "</think>").split("<think>\\nTwo.\\n</think>\\n\\n2")
        ('2', 'Two.')
        >>> ThoughtForm("[analysis]", "[end]", "[start][final]", "[final]").split("[final]2")
        ('2', '')
        """
        text, thought = _without(self.header, self.prompt + text), ""
        begun = text.lstrip()
        if begun.startswith(self.closes):  # DeepSeek V3.2: a reply without a thought begins with the closing tag
            return _without(self.closes, begun), ""
        if begun.startswith(self.opens) and (self.opens or self.closes in text):
            thought, _, text = begun[len(self.opens) :].partition(self.closes)
            text = _without(self.header, _without(self.after, text.lstrip()))
        return text, thought.strip()

    def of_prompt(self, text: str) -> str:
        """The end of a prompt that opens a thought, or opens and closes one; "" if it does neither.

        >>> THINK_TAGS.of_prompt("<|assistant|>\\n<think>\\n")
        '<think>\\n'
        """
        opens, closes = re.escape(self.opens), re.escape(self.closes)
        found = re.search(rf"{opens}\s*(?:{closes}\s*)?\Z", text) if opens else None
        return "" if found is None else found[0]

    def opened_by(self, text: str) -> str:
        """The end of a prompt that opens a thought and leaves it open, or ""."""
        found = self.of_prompt(text)
        return "" if self.closes in found else found

    def is_open(self, text: str) -> bool:
        """Whether a reply was cut off inside its thought."""
        whole = self.prompt + text
        return bool(self.opens) and self.opens in whole and self.closes not in whole


def _without(start: str, text: str) -> str:
    begun = text.lstrip()
    return begun[len(start) :].lstrip() if start and begun.startswith(start) else text


THINK_TAGS = ThoughtForm("<think>", "</think>")
"""The tags of most families."""


def find_thoughts(probe: Prober) -> ThoughtForm:
    """How a template writes thoughts in the style of the prober; in the tags of the style if it shows none."""
    form = ThoughtForm(*probe.style.tags)
    said = Message("assistant", PROBE_TEXT, reasoning=PROBE_THOUGHT), Message("assistant", PROBE_TEXT)
    called = probe_call(reasoning=PROBE_THOUGHT), probe_call()
    places = ((said, (), PROBE_TEXT), (called, (tool_reply(),), PROBE_VALUE), (said, (USER,), PROBE_TEXT))
    for (thinking, plain), behind, mark in places:  # Gemma 4 shows a thought before a call only
        render = functools.partial(probe, tools=mark == PROBE_VALUE)
        shown = render(USER, thinking, *behind) or ""
        if PROBE_THOUGHT in shown:
            found = _surroundings(shown, mark, render(USER, prompt=True) or "", render(USER, plain, *behind) or "")
            form = form._replace(is_read=False) if found is None else found
            break
    prompt, bare = probe(USER, prompt=True) or "", probe(USER, said[1]) or ""
    begun = _common(prompt, bare)
    header = bare[len(begun) :].partition(PROBE_TEXT)[0].strip()
    if USER.text in header or form.closes in header:  # an earlier message, or an empty thought
        header = ""
    turn = prompt.removeprefix(probe(USER) or "")
    opened = turn[turn.rfind(form.opens) :] if form.opens and form.opens in turn else ""
    form = form._replace(header=header, prompt="" if form.closes in opened else opened)
    both = (PROBE_TEXT, PROBE_THOUGHT)
    inline = Message("assistant", f"{form.opens}\n{PROBE_THOUGHT}\n{form.closes}\n\n{PROBE_TEXT}")
    read, read_inline = (_read_back(form, prompt, probe(USER, each) or "") for each in (said[0], inline))
    is_key = probe.style.thought == "key" and bool(form.opens) and read == both
    is_read = form.is_read and read in (None, both)
    return form._replace(is_read=is_read, is_split=not is_key or read_inline in (None, both))


def _read_back(form: ThoughtForm, prompt: str, whole: str) -> tuple[str, str] | None:
    """What is read of the reply in a rendered conversation; None if it does not show the thought behind the prompt."""
    reply = whole[len(prompt) :].partition(PROBE_TEXT)[0] + PROBE_TEXT
    return form.split(reply) if PROBE_THOUGHT in reply and whole.startswith(prompt) else None


def _surroundings(shown: str, mark: str, prompt: str, bare: str) -> ThoughtForm | None:
    """What surrounds the thought in a rendered conversation; None if that is not clear. `mark` is in the text behind
    it. `bare` is the same conversation without the thought.
    """
    before, found, behind = shown.partition(PROBE_THOUGHT)
    if not found or mark not in behind or not prompt or not bare:
        return None
    between = behind.partition(mark)[0]
    tag = _TAG.match(between)
    closes = tag.group(1) if tag is not None else between.strip()
    if not closes or (tag is None and mark != PROBE_TEXT):
        return None
    opens = closes.replace("/", "", 1)
    if "/" not in closes or opens not in before:
        opens = before[min(len(_common(shown, prompt)), len(_common(shown, bare))) :].strip()
    last = _TAG.match(before[before.rfind("<") :])
    if not opens and last is not None and prompt.endswith(last.group(1) + closes):
        opens = last.group(1)  # Cohere: the prompt and each turn have an empty thought
    after = between.partition(closes)[2].strip() if mark == PROBE_TEXT else ""
    return ThoughtForm(opens, closes, after)


def _common(one: str, other: str) -> str:
    """The common start of two texts, which does not end inside a tag."""
    same = os.path.commonprefix([one, other])  # noqa: RUF071
    return min((same[: same.rfind(a)] if same.rfind(a) > same.rfind(b) else same for a, b in ("<>", "[]")), key=len)
