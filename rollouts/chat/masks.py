"""Loss masks for supervised conversations: only the assistant's tokens are trained.

Rows are built like those of a rollout. The prompt is encoded. The assistant's text, with its closing token, is encoded
separately, as a model would sample it: in the form that the template gives the last message. The text after the closing
token is encoded and appended. So templates need no generation marks. If the template rewrites history, a new row
starts. Each turn is trained in one row only.

`supervised_texts` finds the texts of the rows, `encode_rows` encodes those of many conversations at once, and
`check_masks` shows that the result is right.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence, Set
from typing import Any, NamedTuple

import msgspec

from rollouts.chat.format import ChatFormat, RenderedTurn
from rollouts.chat.shown import SHAPES_MAX, Field, check_rows, lost_fields, sentinels, shapes
from rollouts.chat.token_texts import unmarked
from rollouts.errors import ModelError
from rollouts.types import Message


class SupervisedRow(NamedTuple):
    """One row: `tokens` [L] and `loss_mask` [L], 1.0 on the assistant's tokens and their closing tokens, else 0.0."""

    tokens: list[int]
    loss_mask: list[float]


class TurnText(NamedTuple):
    """One turn of a row: the reply, the text from its closing token to the next turn, the id of the closing token, and
    the number of the message. Texts are marked (`ChatFormat.render_marked`).
    """

    reply: str
    rest: str
    closer: int
    place: int


class RowText(NamedTuple):
    """The texts of one row, marked: the beginning that other conversations may share, the rest of the prompt, and the
    turns. The row ends with the closing token of its last turn.
    """

    head: str
    prompt: str
    turns: list[TurnText]


class TurnsRow(NamedTuple):
    """One row: `tokens` [L], and the assistant's turns, each as its start, its end and the number of the message."""

    tokens: list[int]
    turns: list[tuple[int, int, int]]

    def masked(self, weights: Sequence[float] | None = None) -> SupervisedRow:
        """The row with its loss mask. `weights` has the weight of each message; None: each turn has 1.0."""
        mask = [0.0] * len(self.tokens)
        for start, end, place in self.turns:
            mask[start:end] = [1.0 if weights is None else weights[place]] * (end - start)
        return SupervisedRow(self.tokens, mask)


def tokenize_supervised(
    messages: list[Message], tools: Sequence[dict[str, Any]], chat: ChatFormat, weights: Sequence[float] | None = None
) -> list[SupervisedRow]:
    """The rows of one conversation: one row if the template is append-only, else one per segment. `weights` has the
    weight of each message in place of 1.0; only those of the assistant count, and a turn with weight 0 is context.

    Messages after the last trained turn are left out. A conversation without a trained turn has no rows. Raises
    ModelError if the template refuses the conversation, or if its mask cannot be shown to be right
    (`rollouts.chat.shown`).
    """
    messages, trained = thoughts_apart(messages, chat), trained_turns(messages, weights)
    texts = supervised_texts(messages, tools, chat, trained)
    rows = encode_rows(texts, chat)
    check_masks(messages, tools, chat, trained, texts, rows)
    return [row.masked(weights) for row in rows]


def thoughts_apart(messages: list[Message], chat: ChatFormat) -> list[Message]:
    """The messages, with a thought at the start of a reply's text in its own field, if the template finds it there
    only. A text with more than one thought stays as it is.
    """
    form = chat.thoughts._replace(prompt="")
    if form.is_split:
        return messages
    found = []
    for message in messages:
        text = message.content if message.role == "assistant" and not message.reasoning else ""
        if isinstance(text, str) and text.lstrip().startswith(form.opens) and text.count(form.closes) == 1:
            content, thought = form.split(text)
            if form.opens not in content + thought:
                message = msgspec.structs.replace(message, content=content, reasoning=thought or None)
        found.append(message)
    return found


def trained_turns(messages: Sequence[Message], weights: Sequence[float] | None = None) -> list[int]:
    """The numbers of the assistant's messages with a weight. A first message has no prompt, so it is context."""
    return [
        place
        for place, message in enumerate(messages)
        if place and message.role == "assistant" and (weights is None or weights[place])
    ]


def supervised_texts(
    messages: list[Message], tools: Sequence[dict[str, Any]], chat: ChatFormat, trained: Sequence[int] | None = None
) -> list[RowText]:
    """The texts of the rows of one conversation. `trained` are the numbers of the turns to train, in order; None: all.
    Raises ModelError if the template refuses the conversation, or does not show how a turn ends.
    """
    trained = trained_turns(messages) if trained is None else trained
    if not trained:
        return []
    messages = messages[: trained[-1] + 1]
    talk = _Talk(messages, tools, chat)
    is_shared = bool(tools) or messages[0].role == "system"
    rows: list[RowText] = []
    is_open = False
    for place, next_place in zip(trained, [*trained[1:], None], strict=True):
        turn, missing = _own_turn(place, talk)
        if not is_open or missing:
            prompt = talk.text(place, True)
            prompt = prompt[: len(prompt) - missing]
            rows.append(RowText(*(chat.split_head(prompt) if is_shared else ("", prompt)), []))
        following = chat.split_turn(*talk.pair(place, next_place, True)) if next_place else None
        # The history may show this turn otherwise (drop its thinking, for example). Then its row ends here.
        is_open = (
            following is not None
            and not missing
            and following.closer == turn.closer
            and chat.shows(unmarked(following.reply), unmarked(turn.reply), tools)
        )
        if following is not None and is_open:
            turn = turn._replace(rest=following.rest)
        rows[-1].turns.append(TurnText(*turn, place))
    return rows


def check_masks(
    messages: list[Message],
    tools: Sequence[dict[str, Any]],
    chat: ChatFormat,
    trained: Sequence[int],
    texts: Sequence[RowText],
    rows: Sequence[TurnsRow],
) -> list[str]:
    """The fields of a conversation that are in none of its rows, each as often as it occurs. Raises ModelError if the
    rows cannot be shown to be right. Each shape of message is checked in full once, also with unmistakable texts.
    """
    if not trained:
        return []
    messages = messages[: trained[-1] + 1]
    found = shapes(messages, tools, chat, trained)
    known = [chat.shapes.get(shape) for shape in found]
    new = {place for place, fields in enumerate(known) if fields is None}
    suspects = {place for place in trained if new & {place - 1, place, place + 1}} if new else new
    replies = {turn.place: unmarked(turn.reply) for text in texts for turn in text.turns}
    lost = check_rows(rows, messages, tools, trained, chat, suspects, replies)
    if new and len(chat.shapes) < SHAPES_MAX:
        fields = _lost_in_shapes(messages, tools, chat, trained, suspects)
        for place in new if fields is not None else ():
            known[place] = chat.shapes[found[place]] = [field.name for field in fields or () if field.place == place]
    return [name for names in known for name in names or ()] + [name for place, name in lost if known[place] is None]


def _lost_in_shapes(
    messages: list[Message],
    tools: Sequence[dict[str, Any]],
    chat: ChatFormat,
    trained: Sequence[int],
    suspects: Collection[int],
) -> list[Field] | None:
    """The fields in no row with unmistakable texts. None if the template wants texts of its own choice: then such
    conversations are checked in full each time.
    """
    made, fields = sentinels(messages, chat.literals)
    try:
        rows = encode_rows(supervised_texts(made, tools, chat, trained), chat)
        lost = check_rows(rows, made, tools, trained, chat, suspects)
    except ModelError:
        return None
    return lost + lost_fields(rows, fields, chat)


def encode_rows(rows: Sequence[RowText], chat: ChatFormat) -> list[TurnsRow]:
    """The rows as tokens, in one call of the tokenizer."""
    texts: list[str] = []
    cuts = frozenset(chat.cuts.values())
    for row in rows:
        texts.append(row.prompt)
        for turn in row.turns:
            texts += (turn.reply + turn.rest,) if turn.closer in cuts else (turn.reply, turn.rest)
    encoded = iter(chat.encode_all(texts))
    return [_encoded_row(row, encoded, cuts, chat) for row in rows]


def _encoded_row(row: RowText, encoded: Iterator[list[int]], cuts: Set[int], chat: ChatFormat) -> TurnsRow:
    tokens = [*chat.encode_head(row.head), *next(encoded)] if row.head else next(encoded)
    turns = []
    for turn in row.turns:
        ids = next(encoded)
        if turn.closer in cuts:
            size = ids.index(turn.closer) + 1
        else:
            size = len(ids) + 1
            ids += next(encoded)
        turns.append((len(tokens), len(tokens) + size, turn.place))
        tokens += ids if turn is not row.turns[-1] else ids[:size]
    return TurnsRow(tokens, turns)


class _Talk(NamedTuple):
    """A conversation, its tools, and the format that renders it."""

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    chat: ChatFormat

    def text(self, count: int, generation_prompt: bool) -> str:
        """The text of the first `count` messages."""
        return self.chat.render_marked(self.messages[:count], self.tools, generation_prompt)

    def pair(self, before: int, count: int, generation_prompt: bool) -> tuple[str, str]:
        """The texts of the first `before` messages with the generation prompt, and of the first `count`, both without
        the known common beginning.
        """
        return self.chat.render_pair(self.messages[:before], self.messages[before:count], self.tools, generation_prompt)


def _own_turn(place: int, talk: _Talk) -> tuple[RenderedTurn, int]:
    """The reply as the last message, which is the form that the model must write, and the number of characters at the
    end of the prompt that this form does without.
    """
    message = talk.messages[place]
    prompt, whole = talk.pair(place, place + 1, False)
    reply, missing = whole[len(prompt) :], 0
    if not whole.startswith(prompt):
        reply, missing = _reply_elsewhere(place, talk)
    turn = talk.chat.end_of_turn(reply, message)
    if turn is None:
        raise ModelError(
            "the chat template does not end an assistant turn with a special token, so the model could not learn to "
            "stop; use a chat template that closes each turn (as `<|im_end|>` does)."
        )
    return turn, missing


def _reply_elsewhere(place: int, talk: _Talk) -> tuple[str, int]:
    """The text behind the prompt, if the template shows what is before the reply otherwise once there is a reply, and
    the number of characters at the end of the prompt that the reply does without.
    """
    chat, before, message = talk.chat, talk.messages[:place], talk.messages[place]
    prompt = chat.render_marked(before, talk.tools, True)
    opens, closes = chat.thoughts.opens, chat.thoughts.closes
    thought = chat.thoughts.of_prompt(prompt)
    unthinking = msgspec.structs.replace(message, reasoning=None)
    if closes in thought:  # the prompt forbids a thought
        rest = _behind_header(prompt.removesuffix(thought), place, unthinking, talk)
        if rest.startswith(opens):
            rest = rest.partition(closes)[2].lstrip()
        return rest.removeprefix(closes), 0
    rest = _behind_header(prompt.removesuffix(thought), place, message, talk)
    if not thought or rest.startswith((thought, closes)):
        return rest.removeprefix(thought), 0
    if rest.startswith(opens):  # with other white space
        return rest[len(opens) :].lstrip(), 0
    quiet = chat.quiet.render_marked(before, talk.tools, True) if chat.quiet is not None else ""
    usual = f"\n{closes}\n\n" if thought.endswith("\n") else closes
    if message.reasoning:  # the template drops all thoughts, but its prompt asks for one
        rest = _behind_header(prompt.removesuffix(thought), place, unthinking, talk)
        return chat.mark_reply(message.reasoning) + usual + rest.lstrip(), 0
    if quiet.startswith(prompt):
        return quiet[len(prompt) :] + rest, 0
    return (usual + rest, 0) if closes in chat.thoughts.of_prompt(quiet) else (rest, len(thought))


def _behind_header(prompt: str, place: int, message: Message, talk: _Talk) -> str:
    """What the template writes for a message behind the prompt, or else behind the last header of a reply before the
    message's own words. Without a header: behind the longest end of the prompt that occurs there. Mistral has none, and
    moves the system text to the last user message.
    """
    chat, before = talk.chat, talk.messages[:place]
    whole = chat.render_marked([*before, message], talk.tools, False)
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    words = [chat.mark_reply(each) for each in (message.reasoning or "", message.text.strip()) if each]
    words += [call.name for call in message.tool_calls]
    at = min((at for each in words if (at := whole.rfind(each)) >= 0), default=len(whole))
    at -= len(chat.thoughts.of_prompt(whole[:at]))  # a thought of the reply is behind the header too
    shown = chat.render_marked(before, talk.tools, False)
    header = prompt[len(shown) :] if prompt.startswith(shown) else ""
    if header.strip() and header in whole[:at]:
        return whole[whole.rfind(header, 0, at) + len(header) :]
    if (words_only := header.rstrip()) and words_only in whole[:at]:  # the prompt ends with other white space
        rest = whole[whole.rfind(words_only, 0, at) + len(words_only) :]
        return rest[len(os.path.commonprefix([rest, header[len(words_only) :]])) :]  # noqa: RUF071
    low, high = 0, min(len(prompt), at)
    while low < high:  # if an end occurs, so does every shorter one
        middle = (low + high + 1) // 2
        low, high = (middle, high) if prompt[-middle:] in whole[:at] else (low, middle - 1)
    return whole[whole.rfind(prompt[len(prompt) - low :], 0, at) + low :]
