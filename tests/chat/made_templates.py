"""Chat templates whose true spans are known, because this module writes both.

`choose(seed)` draws the choices of one template. `jinja_of` writes them as a Jinja template, and `Made.pieces` says in
plain Python what that template must render. `Made.turns` derives from the pieces what each assistant turn must be
trained on. Nothing here uses `rollouts.chat`; only the messages are `rollouts.types`.

Texts are *marked*: a special token is written between `OPEN` and `CLOSE` where the template writes it, and bare where
the conversation's own text spells it. So a text that is compared says which control tokens are ids.

    python tests/chat/made_templates.py --seed 0 --count 300
"""

from __future__ import annotations

import functools
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from made_choices import THINK, Choices, draw
from made_jinja import jinja_of

from rollouts.types import Message

OPEN, CLOSE = "\x02", "\x03"  # around a special token


class Refused(Exception):
    """The template raises at this conversation."""


class Form(NamedTuple):
    """One assistant turn as the template shows it: its text from the end of the plain generation prompt to its end
    token. `think`: None without tags, "" if they are empty.
    """

    place: int
    think: str | None
    content: str
    calls: str
    end: str
    text: str

    @property
    def thinks_behind_calls(self) -> bool:
        return bool(self.calls) and THINK[0] in self.text.partition(self.calls)[2]

    def same(self, other: Form) -> bool:
        """Whether two forms are one message in other words."""
        return (self.think is None) == (other.think is None) and (
            ((self.think or "").strip(), self.content.strip(), self.calls, self.end)
            == ((other.think or "").strip(), other.content.strip(), other.calls, other.end)
        )


class Span(NamedTuple):
    """One right way to train a turn: behind the prompt `before`, with the marked text `reply`. `opening`: the end of
    `before` that belongs to the turn's form.
    """

    before: list[str | Form]
    opening: str
    reply: str
    form: Form
    content: str
    thought: str | None
    way: str = ""  # how the reply differs from the plain case


class Turn(NamedTuple):
    """What is true of one assistant turn: the spans of which one must be trained, the fields that are in no sequence,
    and why the turn cannot be shown ("" if it can).
    """

    place: int
    spans: list[Span]
    left_out: tuple[str, ...] = ()
    refused: str = ""


@dataclass
class Made:
    """One made template: its choices without tools and with tools."""

    choices: Choices
    with_tools: Choices | None = None
    seed: int = 0
    _special: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._special = re.compile("|".join(map(re.escape, sorted(self.special, key=len, reverse=True))))

    @property
    def special(self) -> tuple[str, ...]:
        return self.choices.special

    @property
    def chat_template(self) -> str | dict[str, str]:
        """What a tokenizer has as its `chat_template`."""
        if self.with_tools is None:
            return jinja_of(self.choices)
        return {"default": jinja_of(self.choices), "tool_use": jinja_of(self.with_tools)}

    @property
    def arguments(self) -> dict[str, Any]:
        value = self.choices.enable_thinking
        return {} if value is None else {"enable_thinking": value}

    def of(self, tools: Sequence[Any]) -> Choices:
        return self.with_tools if tools and self.with_tools is not None else self.choices

    @property
    def stops(self) -> tuple[str, ...]:
        """The tokens that may end a reply, as text."""
        found: list[str] = []
        for c in (self.choices, self.with_tools or self.choices):
            found += [c.end, c.call_end, c.last_end] if c.end else [c.user, c.tool, c.eos]
        return tuple(dict.fromkeys(token for text in found for token in self._special.findall(text)))

    def mark(self, text: str) -> str:
        """The text with its special tokens marked."""
        return self._special.sub(lambda found: OPEN + found[0] + CLOSE, text)

    def pieces(self, messages: Sequence[Message], tools: Sequence[Any], prompt: bool) -> list[str | Form]:
        """The conversation as the template shows it: marked texts, and the assistant's turns as forms."""
        return list(_Writer(self, messages, tools).write(prompt))

    def text(self, messages: Sequence[Message], tools: Sequence[Any], prompt: bool) -> str:
        """The same as one text without marks."""
        return unmarked(joined(self.pieces(messages, tools, prompt)))

    def turns(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[Turn]:
        """What is true of each assistant turn."""
        places = [place for place, message in enumerate(messages) if message.role == "assistant"]
        return [self.turn(messages, place, tools) for place in places]

    def turn(self, messages: Sequence[Message], place: int, tools: Sequence[Any]) -> Turn:
        """What is true of the assistant turn `messages[place]`, given the messages before it."""
        found = self._turn(list(messages), place, tools)
        c = self.of(tools)
        if c.think in ("no", "hidden") and any(each.reasoning for each in messages[: place + 1]):
            # The template has no place for a thought, so a program may write it into the content.
            try:
                shuts = str(self.pieces(messages[:place], tools, True)[-1]).endswith(c.nothing)
            except Refused:
                return found
            others = [_inlined(each) if at != place or not shuts else each for at, each in enumerate(messages)]
            inline = self._turn(others, place, tools)
            # A thought behind a call, where the template writes content, is no form that a model samples.
            begins = [each for each in inline.spans if not each.form.thinks_behind_calls]
            spans = [self._as_said(each, messages[place], others[place]) for each in begins]
            found = found._replace(spans=[*found.spans, *spans])
        return found

    def _as_said(self, span: Span, message: Message, inlined: Message) -> Span:
        """A span of a message whose thought is in its content."""
        if message is inlined or not message.reasoning or THINK[0] not in span.form.text:
            return span._replace(way=span.way or "inline")
        return span._replace(way="inline", thought=message.reasoning, content=message.text)

    def _turn(self, messages: list[Message], place: int, tools: Sequence[Any]) -> Turn:
        c, message = self.of(tools), messages[place]
        left_out: list[str] = []
        try:
            before = self.pieces(messages[:place], tools, True)
            form = _Writer(self, messages[: place + 1], tools).form(place, message)
            if message.reasoning and not form.think:
                left_out.append("reasoning")
            if message.text.strip() and not form.content.strip():
                left_out.append("content")
            if c.prompt_tail:
                left_out.append("the end of the prompt")
            _Writer(self, messages[: place + 1], tools).refuse()
        except Refused as why:
            return Turn(place, [], (), str(why))
        is_cut = c.place == "cut_off" or (c.place == "behind" and message.text.strip())
        if message.tool_calls and c.end and is_cut:
            return Turn(place, [], (), "the end token is between content and calls")
        if c.no_end:
            return Turn(place, [], (), "no token ends the reply")
        spans = self._spans(c, before, form, message.reasoning)
        if c.trim == "history" and message.text != message.text.strip():  # the history's spelling of the same message
            trimmed = replace_message(message, content=message.text.strip())
            writer = _Writer(self, [*messages[:place], trimmed], tools)
            spans += self._spans(c, before, writer.form(place, trimmed), message.reasoning)
        if not spans:  # the prompt shows an empty thought, so the reply cannot think
            left_out.append("reasoning")
            writer = _Writer(self, [*messages[:place], replace_message(message, reasoning=None)], tools)
            spans = self._spans(c, before, writer.form(place, writer.messages[place]), None)
        ends = [""] if c.end else [OPEN + token + CLOSE for token in self.stops]
        if not c.end and any(each.role == "assistant" for each in messages[place + 1 :]):
            role = messages[place + 1].role
            role = "user" if role == "tool" and c.tool_style == "user" else role
            if role != "assistant":  # the token of its own role stops no reply
                ends = [self.mark(self._special.findall(getattr(c, role))[0])]
        spans += [self._as_history(each) for each in spans if c.last_end and each.form.end == self.mark(c.last_end)]
        ended = [each._replace(reply=each.reply + end) for each in spans for end in ends]
        return Turn(place, ended, tuple(left_out))

    def _as_history(self, span: Span) -> Span:
        """The span with the end token that the turn has once another message follows."""
        end, cut = self.mark(self.choices.end), len(span.form.end)
        form = span.form._replace(end=end, text=span.form.text[:-cut] + end)
        return span._replace(form=form, reply=span.reply[:-cut] + end)

    def _spans(self, c: Choices, before: list[str | Form], form: Form, thought: str | None) -> list[Span]:
        opening = str(before[-1])[len(self.mark(c.assistant)) :]
        span = functools.partial(Span, form=form, content=form.content, thought=form.think)
        if form.text.startswith(opening):
            return [span(before, opening, form.text[len(opening) :])]
        if opening in (c.nothing, c.prompt_tail):
            if c.prompt_tail:
                return [span(before, opening, form.text)]
            return [] if form.think else [span(before, opening, form.text, form=form._replace(think=""))]
        assert not form.think, "a thought begins with the opened tag"
        head = [*before[:-1], str(before[-1])[: -len(opening)]]
        rest = form.text[len(c.nothing) :] if form.think == "" else form.text
        empty = functools.partial(span, form=form._replace(think=""))
        is_closed = c.prompt == "switch" or bool(c.word) or form.think == ""
        found = [empty(before, opening, c.tags[1] + rest, way="closed" if is_closed else "sampled")]
        if thought:
            thinks = functools.partial(span, form=form._replace(think=thought), thought=thought)
            found.append(thinks(before, opening, thought + c.tags[1] + rest, way="written"))
        if is_closed and c.nothing.startswith(opening):
            found.append(empty(before, opening, c.nothing[len(opening) :] + rest, way="closed"))
        if c.prompt == "switch":  # the prompt of the template's own no-thinking mode
            return [*found, empty([*head[:-1], str(head[-1]) + c.nothing], c.nothing, rest, way="closed")]
        found.append(span(head, "", form.text, way="prefix"))
        if form.think == "":  # the prompt and the empty thought begin with the same tag
            tag = c.tags[0].strip()
            found.append(span([*head[:-1], str(head[-1]) + tag], tag, form.text[len(tag) :], way="prefix"))
        return found


def replace_message(message: Message, **changes: Any) -> Message:
    kept = {name: getattr(message, name) for name in message.__struct_fields__}
    return Message(**(kept | changes))


def _inlined(message: Message) -> Message:
    if not message.reasoning:
        return message
    return replace_message(message, reasoning=None, content=f"{message.reasoning.join(THINK)}{message.text}")


def joined(pieces: Sequence[str | Form]) -> str:
    return "".join(each if isinstance(each, str) else each.text for each in pieces)


def unmarked(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def pattern(pieces: Sequence[str | Form], said: Mapping[int, Sequence[tuple[Form, str]]]) -> re.Pattern[str]:
    """What equals these pieces, if `said` has the trained or sampled forms of earlier turns, with their texts: such a
    text may stand for the turn if it is the same message.
    """
    parts = []
    for each in pieces:
        if isinstance(each, str):
            parts.append(re.escape(each))
            continue
        others = [text for form, text in said.get(each.place, ()) if form.same(each)]
        parts.append("(?:" + "|".join(map(re.escape, [each.text, *others])) + ")")
    return re.compile("".join(parts), re.DOTALL)


class _Writer:
    """Writes one conversation as the template must."""

    def __init__(self, made: Made, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        self.c, self.mark, self.messages, self.tools = made.of(tools), made.mark, list(messages), list(tools)
        self.users = [place for place, each in enumerate(messages) if each.role == "user"]
        self.finals = [p for p, m in enumerate(messages) if m.role == "assistant" and not m.tool_calls]

    def refuse(self) -> None:
        """Raise Refused where the template raises."""
        c, expects = self.c, "user"
        if c.needs_tools and not self.tools:
            raise Refused("needs tools")
        for message in self.messages:
            if message.role == "system" and c.system_in == "no":
                raise Refused("system")
            if c.tools_in == "no" and (message.role == "tool" or message.tool_calls):
                raise Refused("calls")
            if len(message.tool_calls) > 1 and not c.parallel:
                raise Refused("several calls")
            if c.alternates and (message.role == "user" or (message.role == "assistant" and not message.tool_calls)):
                if message.role != expects:
                    raise Refused("order of roles")
                expects = "assistant" if expects == "user" else "user"

    def write(self, prompt: bool) -> list[str | Form]:
        self.refuse()
        c, mark = self.c, self.mark
        first = self.messages[0] if self.messages and self.messages[0].role == "system" else None
        pieces: list[str | Form] = [mark(c.bos)]
        if c.tools_in == "head" and self.tools:
            pieces.append(self.tool_list())
        if c.system_in == "own" and (first or c.head or (c.tools_in == "system" and self.tools)):
            tools = self.tool_list() if c.tools_in == "system" and self.tools else ""
            text = self.shown(first) if first else ""
            pieces.append(mark(c.system + c.gap + c.head) + text + tools + mark(c.user_end))
        elif c.head:
            pieces.append(mark(c.head))
        for place, message in enumerate(self.messages):
            if message.role == "user":
                pieces.append(self.user(place, message))
            elif message.role == "tool":
                pieces.append(self.tool(place, message))
            elif message.role == "assistant":
                pieces += [mark(c.assistant), self.form(place, message), mark(c.after)]
        if prompt:
            pieces.append(mark(c.assistant) + c.prompt_tail + self.opening())
        elif c.tail:
            pieces.append(mark(c.eos))
        return pieces

    def opening(self) -> str:
        """What the generation prompt writes behind the assistant's header."""
        c = self.c
        is_told = bool(c.word and self.users and c.word in self.messages[self.users[-1]].text)
        if is_told or (c.enable_thinking is False and c.prompt in ("switch", "no_think")):
            return c.nothing
        return c.tags[0] if c.prompt in ("open", "switch") else ""

    def tool_list(self) -> str:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in self.tools)
        return self.mark("\n\n# Tools\n") + listed + self.mark("\n")

    def shown(self, message: Message) -> str:
        """The content of a message that is no assistant's."""
        trims = self.c.trim == "all" or (self.c.trim == "user" and message.role == "user")
        return message.text.strip() if trims else message.text

    def user(self, place: int, message: Message) -> str:
        c, text = self.c, self.mark(self.c.user + self.c.gap)
        if c.tools_in == "last_user" and self.tools and place == self.users[-1]:
            text += self.tool_list()
        if self.messages[0].role == "system":
            is_here = {
                "first": place == self.users[0],
                "last": place == self.users[-1],
                "last_message": place == len(self.messages) - 1,
                "every": True,
            }.get(c.system_in, False)
            text += self.shown(self.messages[0]) + "\n\n" if is_here else ""
        return text + self.shown(message) + self.mark(c.user_end)

    def tool(self, place: int, message: Message) -> str:
        c, is_last = self.c, place == len(self.messages) - 1
        begins = not (c.tool_merge and place and self.messages[place - 1].role == "tool")
        ends = not (c.tool_merge and not is_last and self.messages[place + 1].role == "tool")
        header = c.user if c.tool_style == "user" else c.tool
        text = self.mark(header + c.gap) if begins else "\n"
        content = self.shown(message)
        text += f"<tool_response>\n{content}\n</tool_response>" if c.tool_style == "user" else content
        text += {"newline": "" if is_last else "\n", "note": "\n(last)" if is_last else ""}.get(c.tool_last, "")
        return text + (self.mark(c.user_end) if ends and not (c.tool_last == "no_end" and is_last) else "")

    def form(self, place: int, message: Message) -> Form:
        """The assistant's turn at this place."""
        c, is_last = self.c, place == len(self.messages) - 1
        think = self.thought(place, message)
        content = message.text
        if c.think == "stripped" and "</think>" in content:
            content = content.split("</think>")[-1].lstrip("\n")
        if c.trim in ("all", "assistant") or (c.trim == "history" and not is_last):
            content = content.strip()
        calls = self.calls(message)
        if calls and c.place == "instead":
            content = ""
        body = "" if think is None else c.tags[0] + think + c.tags[1] if think else c.nothing
        end = self.mark((c.call_end if calls else c.last_end if is_last else "") or c.end)
        if calls and c.place == "before":
            body += calls + ("\n" + content if content else "")
        elif calls and c.place == "behind":
            body += (content + self.mark(c.end) + "\n" if content else "") + calls
        elif calls and c.place == "cut_off":
            body += content + self.mark(c.end) + "\n" + calls
        else:
            body += content + ("\n" if calls and content else "") + calls
        return Form(place, think, content, calls, end, self.mark(c.gap) + body + end)

    def thought(self, place: int, message: Message) -> str | None:
        c, is_last = self.c, place == len(self.messages) - 1
        shows = {
            "kept": True,
            "at_once": is_last,
            "last_query": place > (self.users[-1] if self.users else -1),
            "final": not any(each > place for each in self.finals),
        }.get(c.think, False)
        if shows and message.reasoning:
            return message.reasoning
        inserts = {"last": is_last, "history": not is_last, "always": True}.get(c.empty, False)
        return "" if inserts else None

    def calls(self, message: Message) -> str:
        return (
            ("; " if self.c.calls in ("json", "llama3") else "\n").join(self.call(each) for each in message.tool_calls)
            if self.c.calls != "mistral"
            else self.mistral(message)
        )

    def mistral(self, message: Message) -> str:
        if not message.tool_calls:
            return ""
        each = [
            f'{{"name": "{c.name}", "arguments": {_json(c.arguments)}, "id": "{c.id}"}}' for c in message.tool_calls
        ]
        return self.mark("[TOOL_CALLS]") + "[" + ", ".join(each) + "]"

    def call(self, call: Any) -> str:
        name, arguments = call.name, _json(call.arguments)
        if self.c.calls == "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        if self.c.calls == "xml":
            values = ((k, v if isinstance(v, str) else _json(v)) for k, v in call.arguments.items())
            inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
            return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
        key = "parameters" if self.c.calls == "llama3" else "arguments"
        python = self.mark("<|python_tag|>") if self.c.calls == "llama3" and "<|python_tag|>" in self.c.special else ""
        return f'{python}{{"name": "{name}", "{key}": {arguments}}}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def choose(seed: int, foreign: bool = False) -> Made:
    """The template of this seed. `foreign`: its thoughts have tags of other families than <think>."""
    rng = random.Random(f"made template {seed}")
    choices = draw(rng, foreign)
    if choices.tools_in != "no" and not choices.needs_tools and rng.random() < 0.15:
        plain = replace(choices, tools_in="no", tool_last="same", tool_merge=False, place="inside", call_end="")
        return Made(plain, choices, seed)
    return Made(choices, None, seed)


if __name__ == "__main__":
    from judge_templates import main

    main()
