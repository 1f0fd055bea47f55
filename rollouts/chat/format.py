"""ChatFormat: the model's own chat template, from messages to token ids and back.

`encode_prompt` returns the ids of a whole prompt. `extend` returns the ids that follow a sampled reply, and never
encodes that reply again. `parse` reads a reply as a Message. Sampling, and the segments of a rollout, are in
`rollouts.agent`.

When `extend` returns ids (design.md §4, invariant 1). Let P be the text of `before` with the generation prompt, which
the model received, and B the text of `before + [reply] + new` with the generation prompt. If B does not start with P,
the template now shows earlier turns, or the start of this turn, differently, and the result is None. Otherwise let R be
the text between P and the closing token: the reply as history shows it. R must be the same message as the sampled text.
That means the same characters, or the same parsed message, thinking included (for example, a call's JSON may have other
spaces). Then everything from the closing token on is appended. By induction from the first prompt, our ids always match
the template's text, except for spelling. If R is another message, the result is None too. After None, the caller opens
a new segment.

A conversation's own text may contain control tokens, so it is rendered with marks (`rollouts.chat.token_texts`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from rollouts.chat import token_texts
from rollouts.chat.preflight import TemplateReport, find_ends, inspect_template
from rollouts.chat.template_style import (
    PROBE_TOOL,
    USER,
    Tools,
    compared_literals,
    probe_call,
    probe_template_style,
    template_message,
    tool_reply,
)
from rollouts.chat.thoughts import find_thoughts
from rollouts.chat.token_texts import CUT, ControlTokens, decode, plain_backend, safe_cuts, unmarked
from rollouts.chat.tool_call_formats import TOOL_CALL_FORMATS, Parsed, detect_tool_call_format, parse_reply
from rollouts.errors import ConfigError, ModelError, near_misses
from rollouts.types import Message, ToolCall

if TYPE_CHECKING:
    from rollouts.chat.incremental import IncrementalRenderer, Rendering
    from rollouts.chat.tool_parsers import ChosenParser

_RESERVED = {"add_generation_prompt", "continue_final_message", "conversation", "messages", "tokenize", "tools"}
_CACHED_CHARACTERS_MAX = 16_000_000
_BATCH_MIN = 32  # texts for one call of the tokenizer; for fewer, starting its threads would cost more
_PROMPT_END = 64  # tokens that hold the end of a prompt
T = TypeVar("T")


class RenderedTurn(NamedTuple):
    """One assistant turn of a rendered conversation, and the text after it.

    `rest` starts with the closing token, whose id is `closer`. Texts are marked (`ChatFormat.render_marked`).
    """

    reply: str
    rest: str
    closer: int


class _Cache(Generic[T]):
    """A least-recently-used cache, limited by a size in characters. An empty key stores nothing."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes | str, tuple[T, int]] = OrderedDict()
        self._size = 0

    def get(self, key: bytes | str) -> T | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: bytes | str, value: T, size: int) -> None:
        if not key:
            return
        size += len(key)
        self._size += size - self._values.pop(key, (value, 0))[1]
        self._values[key] = value, size
        while self._size > _CACHED_CHARACTERS_MAX and len(self._values) > 1:
            self._size -= self._values.popitem(last=False)[1][1]


def _key(messages: list[Message], tools: Tools, generation_prompt: bool) -> bytes:
    """The cache key of a conversation; b"" if it cannot have one, for example because of half a surrogate pair."""
    try:
        return msgspec.msgpack.encode((messages, tools, generation_prompt))
    except (TypeError, UnicodeEncodeError, OverflowError, RecursionError):
        return b""


class ChatFormat:
    """A tokenizer with its chat template, from `load_chat_format`. It has a bounded cache; use it in one thread only.

    Attributes: `tokenizer`; `stop_ids`, the sorted ids that end a turn; `tool_call_format`, a name; `report`, the
    template's behavior; `closers`, the special tokens that end an assistant turn in the template (text to id);
    `cuts`, those of them before which a text can be split and encoded in two parts (text to id); `thoughts`, how
    thoughts are written; `marks`, texts that may begin or end a call or a thought; `literals`, the texts that the
    template looks for in messages; `kinds` and `shapes`, the shapes of messages whose contexts were shown to be
    right, each with the fields that are in no row (`rollouts.chat.masks.check_masks`); `sampled_shapes` and `watched`,
    what is checked of rollouts.
    """

    def __init__(
        self, tokenizer: Any, template_arguments: Mapping[str, Any], tool_parser: ChosenParser | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._parser = tool_parser
        self._writes_calls = False  # whether calls become text in the parser's format
        self._arguments = dict(template_arguments)
        text = _template_text(tokenizer)
        probe, refusal = probe_template_style(self._render, text)
        self._style = probe.style
        added = {str(token): int(index) for index, token in tokenizer.added_tokens_decoder.items()}
        special = {str(token): bool(token.special) for token in tokenizer.added_tokens_decoder.values()}
        self._ends = find_ends(probe, special, tokenizer.eos_token)
        self.closers = {token: added[token] for token in self._ends.tokens}
        call = probe(USER, probe_call(), tool_reply(), tools=True) if not refusal else None
        self.tool_call_format = detect_tool_call_format(_tail(call, probe(USER, tools=True, prompt=True)), text)
        call_format = TOOL_CALL_FORMATS[self.tool_call_format]
        self.thoughts = find_thoughts(probe)
        inline = "".join(probe.style.tags) if probe.style.thought == "inline" else ""
        self._control_tokens = ControlTokens(tokenizer, text, call_format.tokens + inline)
        self.stop_ids = _stop_ids(tokenizer, self.closers, added, text)
        prefix = _tail(probe(USER, prompt=True), probe(USER))
        self._texts: _Cache[str] = _Cache()
        self._renderings: _Cache[Rendering] = _Cache()
        self._marked_tools: _Cache[list[dict[str, Any]]] = _Cache()
        self._heads: _Cache[list[int]] = _Cache()
        self._incremental = _incremental_renderer(tokenizer, self._arguments)
        self.literals = tuple({*compared_literals(text), self.thoughts.opens, self.thoughts.closes} - {""})
        tags = re.findall(r"</?[\w:|]+[=>]|\[/?[A-Z_]+\]", call_format.example)
        # A parser of an author may read a call in any text.
        self.stops = frozenset(self.stop_ids)
        self.marks = ("",) if tool_parser else tuple({*tags, self.thoughts.opens, self.thoughts.closes} - {""})
        self.kinds: dict[Any, int] = {}
        self.shapes: dict[Any, list[str]] = {}
        self.sampled_shapes: set[Any] = set()
        self.watched: set[tuple[int, ...]] = set()
        self.cuts = safe_cuts(tokenizer, self.closers)
        self._cut = next(iter(self.cuts), "")
        self._backend = plain_backend(tokenizer, self.closers)
        self._anchor = self._find_anchor()
        self._read: Callable[..., Parsed] = functools.partial(
            parse_reply,
            call_format=call_format,
            parse_response=getattr(tokenizer, "parse_response", None),
            response_template=getattr(tokenizer, "response_template", None),
            prefix=prefix,
            thoughts=self.thoughts,
        )
        self.report: TemplateReport = inspect_template(probe, text, self.closers, refusal, self.thoughts)
        if tool_parser is not None:
            self._read = functools.partial(tool_parser.parse, thoughts=self.thoughts, keeps_text=False)
        reads_calls = not self.report.tools or self._reads_own_calls()
        if tool_parser is not None and not (self.report.tools and reads_calls):
            self._writes_calls = True
            self._read = functools.partial(tool_parser.parse, thoughts=self.thoughts, keeps_text=True)
            self.report = msgspec.structs.replace(self.report, calls_as_text=True)
        elif not reads_calls:
            unread = (
                f"it shows tool calls in a format that cannot be read back (the nearest known one is "
                f"{self.tool_call_format}); give the tokenizer a response_template"
            )
            refusals = [*self.report.refusals, unread]
            self.report = msgspec.structs.replace(self.report, reads_calls=False, refusals=refusals)

    @property
    def can_write_calls(self) -> bool:
        """Whether calls that the model did not write can be shown: by the template, or by the tool parser."""
        return not self._writes_calls or (self._parser is not None and self._parser.write is not None)

    @functools.cached_property
    def quiet(self) -> ChatFormat | None:
        """The same template in its own mode without thoughts; None if it has none."""
        words = set(re.findall(r"[A-Za-z_]\w*", _template_text(self.tokenizer)))
        modes = {name: False for name in ("enable_thinking", "thinking") if name in words - set(self._arguments)}
        return ChatFormat(self.tokenizer, {**self._arguments, **modes}, self._parser) if modes else None

    @functools.cached_property
    def text_of(self) -> Callable[[int], str]:
        """The text of one token, with a cache."""
        return functools.lru_cache(8192)(lambda token: self.decode([token]))

    @functools.cached_property
    def tokens_at_least(self) -> Callable[[Sequence[Message], Tools], int]:
        """How many tokens some messages and tools have at least, without rendering or encoding them."""
        density, keeps = token_texts.densities(self.tokenizer.get_vocab()), not self.report.drops_thinking
        return functools.partial(token_texts.least_tokens, density=density, shows_thoughts=keeps)

    def _reads_own_calls(self) -> bool:
        """Whether a rendered call parses as the same call."""
        before, call = [USER], probe_call()
        turn = self.find_turn(before, call, [tool_reply()], [PROBE_TOOL])
        if turn is None:  # history is rewritten, so test the call as the last message
            texts = (self.render(messages, [PROBE_TOOL], False) for messages in (before, [*before, call]))
            turn = self.split_turn(*texts)
        read = self._read(unmarked(turn.reply), tools=[PROBE_TOOL]).message.tool_calls if turn is not None else []
        return [(c.name, c.arguments) for c in read] == [(c.name, c.arguments) for c in call.tool_calls]

    def render(self, messages: list[Message], tools: Tools, generation_prompt: bool) -> str:
        """The text of a conversation. Raises ModelError if the template refuses it."""
        return unmarked(self.render_marked(messages, tools, generation_prompt))

    def render_marked(self, messages: list[Message], tools: Tools, generation_prompt: bool) -> str:
        """The text of a conversation for `encode_marked`, in which the text that is not the template's is marked as
        plain text.
        """
        key = _key(messages, tools, generation_prompt)
        known = self._texts.get(key)
        if known is not None:
            return known
        marked = self._marked(messages)
        try:
            text = self._render(marked, self._schemas(tools), generation_prompt)
        except Exception as error:  # a template may raise anything
            roles = ", ".join(message.role for message in messages)
            raise ModelError(
                f"the chat template of this model refuses a conversation of ({roles})"
                f"{' with tools' if tools else ''}: {error}"
            ) from error
        self._texts.put(key, text, len(text))
        return text

    def render_pair(
        self, before: list[Message], more: list[Message], tools: Tools, generation_prompt: bool
    ) -> tuple[str, str]:
        """The texts of `before` with the generation prompt, and of `before` and `more`, for `encode_marked`.

        The known common beginning is left out of both texts, so that the cost does not grow with the conversation.
        """
        whole = [*before, *more]
        if self._incremental is not None and (old := self._rendering(before, tools)) is not None:
            new = self._marked(more)
            done = self._incremental.tail(old, new, generation_prompt)
            if done is not None:
                if generation_prompt:
                    self._keep(_key(whole, tools, True), done[1])
                return old.last, done[0]
            again = self._incremental.whole([*old.messages, *new], old.tools, True) if generation_prompt else None
            if again is not None:
                self._keep(_key(whole, tools, True), again[1])
                self._texts.put(_key(whole, tools, True), again[0], len(again[0]))
        return self.render_marked(before, tools, True), self.render_marked(whole, tools, generation_prompt)

    def _rendering(self, messages: list[Message], tools: Tools) -> Rendering | None:
        """The cached rendering of a conversation with its generation prompt, for incremental rendering."""
        key = _key(messages, tools, True)
        known = self._renderings.get(key)
        if known is not None or self._incremental is None or not key:
            return known
        done = self._incremental.whole(self._marked(messages), self._schemas(tools), True)
        if done is None or done[0] != self.render_marked(messages, tools, True):
            return None
        self._keep(key, done[1])
        return done[1]

    def _keep(self, key: bytes, rendering: Rendering) -> None:
        self._renderings.put(key, rendering, len(rendering.before) + len(rendering.last) + 8 * len(rendering.messages))

    def _render(self, messages: list[dict[str, Any]], tools: Tools, prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt, **self._arguments
        )
        return text

    def _marked(self, messages: list[Message]) -> list[dict[str, Any]]:
        if self._parser is not None and self._writes_calls:
            messages = [self._parser.as_text(message) for message in messages]
        return [self._control_tokens.message(template_message(message, self._style)) for message in messages]

    def _schemas(self, tools: Tools) -> list[dict[str, Any]]:
        """The marked tools. Do not change them: all episodes share them."""
        if not tools:
            return []
        key = _key([], tools, False)
        marked = self._marked_tools.get(key)
        if marked is None:
            marked = self._control_tokens.foreign.mark(list(tools))
            self._marked_tools.put(key, marked, len(key))
        return marked

    def encode_prompt(self, messages: list[Message], tools: Tools) -> list[int]:
        """The ids [L] of a conversation with the generation prompt. Raises ModelError if the template refuses it."""
        head, rest = self.split_head(self.render_marked(messages, tools, True))
        return [*self.encode_head(head), *self.encode_marked(rest)]

    def split_head(self, text: str) -> tuple[str, str]:
        """A marked text as two that can be encoded apart. The first is the system message with its tools, if any: it is
        long and the same for many conversations.
        """
        at = max(0, text.find(self._cut)) if self._cut else 0
        return text[:at], text[at:]

    def encode_head(self, head: str) -> list[int]:
        """`encode_marked` with a cache. Do not change the list."""
        ids = self._heads.get(head)
        if ids is None:
            ids = self.encode_marked(head)
            self._heads.put(head, ids, 40 * len(ids))  # the bytes of an int and its place in the list
        return ids

    def encode_marked(self, text: str) -> list[int]:
        """The ids of a text from `render_marked`. Only the template's and the model's control tokens get their ids."""
        first, *rest = text.split(CUT)
        ids = list(self.encode(unmarked(first)))
        for piece in rest:
            ids += self._encode_behind(unmarked(piece))
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_marked` of each text. Many texts are encoded in one call of the tokenizer, which uses threads, unless
        `TOKENIZERS_PARALLELISM` is false.
        """
        if len(texts) < _BATCH_MIN or not self._is_backend_plain():
            return [self.encode_marked(text) for text in texts]
        places = [place for place, text in enumerate(texts) if CUT not in text]
        whole = [unmarked(texts[place]).encode("utf-8", "replace").decode() for place in places]
        encoded = self._backend.encode_batch_fast(whole, add_special_tokens=False)
        found = dict(zip(places, (each.ids for each in encoded), strict=True))
        return [found[place] if place in found else self.encode_marked(text) for place, text in enumerate(texts)]

    def _encode_behind(self, text: str) -> list[int]:
        """The ids of a text that starts in the middle of a word."""
        if self._anchor:
            start, whole = self.encode(self._anchor), self.encode(self._anchor + text)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return self.encode(text)

    def _find_anchor(self) -> str:
        """A prefix for `_encode_behind`, whose ids are removed again. A tokenizer that adds a space before a text needs
        it.
        """
        start, rest = "a<", "|b"
        for anchor in ("", "a", "\n", ".", "|"):
            behind = self.encode(anchor + rest)[len(self.encode(anchor)) :]
            if self.decode(self.encode(start) + behind) == start + rest:
                return anchor
        return ""

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text, without added tokens. Half a surrogate pair has no id and becomes `?`."""
        text = text.encode("utf-8", "replace").decode()
        if self._is_backend_plain():
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _is_backend_plain(self) -> bool:
        """Whether the Rust tokenizer can be used. Other users of the tokenizer may have switched on truncation or
        padding; its own `encode` switches them off.
        """
        backend = self._backend
        return backend is not None and not (backend.truncation or backend.padding or backend.encode_special_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, with special tokens, and without removing spaces (transformers' clean-up)."""
        return decode(self.tokenizer if self._backend is None else self._backend, tokens)

    def extend(
        self, before: list[Message], reply: Message, new: list[Message], tools: Tools, sampled: list[int]
    ) -> list[int] | None:
        """The ids to append after `sampled` for the model's next turn; None if a new segment must start.

        The ids are the rest of the assistant's closing, the new messages and the generation prompt. Raises ModelError
        if the template refuses the conversation.

        Args:
            before: the messages that the model received, encoded by `encode_prompt` or earlier calls of this method.
            reply: the model's reply, read by `parse`.
            new: the messages after the reply (tool answers, a user's message).
            tools: the offered tools.
            sampled: the ids of the reply [K], with the stop id if it has one.
        """
        turn = self.find_turn(before, reply, new, tools)
        if turn is None:
            return None
        ended = bool(sampled) and sampled[-1] in self.stop_ids
        if ended and sampled[-1] != turn.closer:
            return None  # the model's last token differs from the closing token in the history
        text = self.decode(sampled[:-1] if ended else sampled)
        shown = unmarked(turn.reply)
        # If the reply contains a closing token as text, the end of the turn is not certain.
        if any(token in shown for token in self.closers) or not self.shows(shown, text, tools):
            return None
        ids = self.encode_marked(turn.rest)
        assert ids[:1] == [turn.closer], f"the rest begins with {turn.rest[:20]!r} but encodes to {ids[:3]}"
        # Encoded with the closing token and then cut, because some tokens absorb the white space after them.
        return ids[1:] if ended else ids

    def find_turn(self, before: list[Message], reply: Message, new: list[Message], tools: Tools) -> RenderedTurn | None:
        """The reply as the whole conversation shows it; None if the text before the reply has changed."""
        return self.split_turn(*self.render_pair(before, [reply, *new], tools, True)) if self.closers else None

    def split_turn(self, prompt: str, whole: str) -> RenderedTurn | None:
        """Split the text after the prompt at its first closing token; None if there is no such token, or if the
        conversation does not start with the prompt.
        """
        rest = whole[len(prompt) :] if whole.startswith(prompt) else ""
        places = [(rest.find(token), token) for token in self.closers if token in rest]
        if not places:
            return None
        at, token = min(places)
        return RenderedTurn(rest[:at], rest[at:], self.closers[token])

    def end_of_turn(self, text: str, message: Message) -> RenderedTurn | None:
        """A reply as the last message, split at the token that ends it; None if it has no such token. If only the next
        message shows the end, because the end is the token of the next role, the usual token for this reply is added.
        """
        turn = self.split_turn("", text)
        token = self._ends.after_call if message.tool_calls else self._ends.after_text
        return RenderedTurn(text, token, self.closers[token]) if turn is None and token else turn

    def mark_reply(self, text: str) -> str:
        """A text that the assistant wrote, for `encode_marked`."""
        marked: str = self._control_tokens.message({"role": "assistant", "content": text})["content"]
        return marked

    def shows(self, shown: str, sampled: str, tools: Tools) -> bool:
        """Whether history shows the text of a reply, except for spelling."""
        if shown == sampled:
            return True
        form = self.thoughts
        if any((mark in shown) != (mark in sampled) for mark in (form.closes, form.header)):
            return False
        if form.is_open(sampled):
            return False  # the reply was cut off in a thought; the history would close the thought
        return self.same_message(shown, sampled, tools)

    def same_message(self, first: str, second: str, tools: Tools) -> bool:
        """Whether two texts are the same message: the same thinking, content and calls in the same order."""
        if first == second:
            return True
        one, other = self._read(first, tools=tools), self._read(second, tools=tools)
        return one.faithful and other.faithful and _meaning(one.message) == _meaning(other.message)

    def parse(self, tokens: Sequence[int], tools: Tools, context: Sequence[int] | None = None) -> Message:
        """Read sampled ids [K] (with or without the stop id) as the assistant's message. Never raises.

        `context` are the ids before them, which decide whether the prompt has opened a thought; None: the usual prompt.

        A malformed call becomes a ToolCall whose `error` is a text for the model. In this case the message's content is
        the raw text.
        """
        body = list(tokens)
        while body and body[-1] in self.stop_ids:
            body.pop()
        text = self.decode(body)
        thoughts = self.thoughts
        if context is not None:
            thoughts = thoughts._replace(prompt=thoughts.opened_by(self.decode(context[-_PROMPT_END:])))
        message = self._read(text, tools=tools, thoughts=thoughts).message
        shows_one = self.report.tools and not self.report.parallel_calls and not self.report.calls_as_text
        if len(message.tool_calls) > 1 and shows_one:
            return _one_call_only(message, self.thoughts.split(text)[0])
        return message


def chat_format(tokenizer: Any) -> ChatFormat:
    """`load_chat_format` of a tokenizer. The last formats are kept, until their tokenizers get another template."""
    return _kept_format(tokenizer, str(getattr(tokenizer, "chat_template", None)))


@functools.lru_cache(maxsize=4)
def _kept_format(tokenizer: Any, template: str) -> ChatFormat:
    return load_chat_format(tokenizer)


def load_chat_format(
    tokenizer: Any, template_arguments: dict[str, Any] | None = None, tool_parser: ChosenParser | None = None
) -> ChatFormat:
    """The chat format of a transformers tokenizer. `template_arguments`, such as `enable_thinking`, are passed to the
    template at every render. `tool_parser` None: the template decides how calls are read.

    Raises ModelError if the tokenizer has no chat template or the template cannot show text messages, and ConfigError
    for an argument that the template does not read.
    """
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "this model"
        raise ModelError(
            f"the tokenizer of {name} has no chat template; rollouts needs one to show a conversation to the model. "
            "Use the instruction-tuned version of the model, or put a chat_template.jinja beside tokenizer.json."
        )
    arguments = template_arguments or {}
    _check_arguments(arguments, _template_text(tokenizer))
    if tool_parser is not None:
        tool_parser.check()
    chat = ChatFormat(tokenizer, arguments, tool_parser)
    if not chat.report.plain:
        raise ModelError(
            f"the chat template cannot show a conversation of plain text: {'; '.join(chat.report.refusals)}. "
            "Use a model for text, or a chat template that accepts a message's content as a string."
        )
    return chat


def _check_arguments(arguments: Mapping[str, Any], text: str) -> None:
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    asked = sorted(set(re.findall(r"([A-Za-z_]\w*)\s+is\s+(?:not\s+)?defined", text)) - _RESERVED)
    for name in arguments:
        if name in _RESERVED or name not in words:
            near = near_misses(name, asked)
            raise ConfigError(
                f"the chat template has no argument {name!r}"
                + (f"; did you mean {' or '.join(near)}?" if near else ".")
                + (f" It reads: {', '.join(asked)}." if asked else " It reads none.")
            )


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def _incremental_renderer(tokenizer: Any, arguments: Mapping[str, Any]) -> IncrementalRenderer | None:
    """A renderer of new messages only; None if the template does not allow it. Without it, every turn renders the whole
    conversation.
    """
    from rollouts.chat.incremental import IncrementalRenderer, NotIncremental

    if isinstance(tokenizer.chat_template, str):
        with contextlib.suppress(NotIncremental):
            return IncrementalRenderer(
                tokenizer.chat_template, {**getattr(tokenizer, "special_tokens_map", {}), **arguments}
            )
    return None


def _stop_ids(tokenizer: Any, closers: Mapping[str, int], added: Mapping[str, int], text: str) -> tuple[int, ...]:
    found = {*closers.values(), *getattr(tokenizer, "model_ends", ())}
    eos = tokenizer.eos_token_id
    found.update(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
    # Llama ends a turn that calls a built-in tool with this token. Its template writes the token in the mode for
    # built-in tools only.
    if "<|eom_id|>" in text and "<|eom_id|>" in added:
        found.add(added["<|eom_id|>"])
    return tuple(sorted(found))


def _tail(text: str | None, head: str | None) -> str:
    """The text without its head."""
    if text is None or head is None or not text.startswith(head):
        return text or ""
    return text[len(head) :]


def _meaning(message: Message) -> tuple[str, str, str]:
    """The content of a message without its spelling."""
    calls = [(call.name, call.arguments, call.error) for call in message.tool_calls]
    return ((message.reasoning or "").strip(), message.text.strip(), json.dumps(calls))


def _one_call_only(message: Message, visible: str) -> Message:
    """The message for a template with one call per turn: the text without the thought, the first call, and errors for
    all later calls.
    """
    words = "Only one tool call can be made at a time; make this call again in your next turn."
    calls = [
        call if place == 0 or call.error else ToolCall(call.name, {}, call.id, words)
        for place, call in enumerate(message.tool_calls)
    ]
    return Message("assistant", visible, calls, reasoning=message.reasoning)
