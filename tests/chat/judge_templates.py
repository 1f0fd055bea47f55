"""Compares what `rollouts.chat` trains and records on made templates with what is true of them.

python tests/chat/made_templates.py --seed 0 --count 300
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trio
from made_conversations import Conversation, conversations
from made_templates import CLOSE, OPEN, Form, Made, Span, Turn, choose, joined, pattern
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import rollouts
from rollouts.agent.model import ChatModel, EpisodeLimits
from rollouts.chat import load_chat_format, tokenize_supervised
from rollouts.errors import InferenceError, ModelError
from rollouts.inference.base import Capabilities, Generation, VersionSpan
from rollouts.inference.suspend import SuspendableEngine
from rollouts.types import Message, Task

TINY = Path(rollouts.__file__).parent / "tiny" / "tokenizer.json"
TAGS = ("<think>", "</think>")  # tokens of some tokenizers
REFUSED_MAX = 0.05  # of the conversations that can be shown
MODES = ("supervised", "rollout")
OUTCOMES = ("right", "wrong", "refused", "not shown")


class Judged(NamedTuple):
    """The outcome of one conversation: right, wrong, refused (though it can be shown), or not shown (refused, and it
    cannot be shown). `detail` says what was got and what was expected.
    """

    mode: str
    conversation: Conversation
    outcome: str
    kind: str = ""
    detail: str = ""


def tokenizer_for(made: Made) -> PreTrainedTokenizerFast:
    """The embedded tokenizer with the template and its special tokens."""
    backend = Tokenizer.from_str(TINY.read_text(encoding="utf-8"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in made.special])
    if made.seed % 2:
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    c = made.choices
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=c.eos, bos_token=c.bos or None)
    tokenizer.chat_template = made.chat_template
    return tokenizer


class Texts:
    """Ids to marked texts and back, by the tokenizer alone."""

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.special = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.ids = {text: index for index, text in self.special.items()}

    def marked(self, ids: Sequence[int]) -> str:
        """The text of ids, with the special tokens marked."""
        parts, run = [], []
        for index in [*ids, -1]:
            if index != -1 and index not in self.special:
                run.append(index)
                continue
            parts.append(self.tokenizer.decode(run, clean_up_tokenization_spaces=False) if run else "")
            run = []
            if index != -1:
                parts.append(OPEN + self.special[index] + CLOSE)
        return "".join(parts)

    def encode(self, marked: str, by_bytes: bool = False) -> list[int]:
        """The ids of a marked text, as a model may sample them. Bare text never becomes a special token. `by_bytes`:
        each byte is a token, as the tokenizer would never write it.
        """
        ids: list[int] = []
        for at, part in enumerate(marked.replace(CLOSE, OPEN).split(OPEN)):
            if at % 2:
                ids.append(self.ids[part])
                continue
            for text in self.special.values():
                part = part.replace(text, text[0] + OPEN + text[1:])
            for piece in part.split(OPEN):
                if by_bytes:
                    symbols = self.level.pre_tokenize_str(piece)[0][0] if piece else ""
                    ids += [self.tokenizer.convert_tokens_to_ids(symbol) for symbol in symbols]
                else:
                    ids += self.tokenizer.encode(piece, add_special_tokens=False) if piece else []
        return ids


def judge(made: Made, modes: Sequence[str] = MODES) -> Iterator[Judged]:
    """The outcome of each conversation, as supervised rows and as a rollout."""
    checks = {"supervised": supervised, "rollout": rollout}
    tokenizer = tokenizer_for(made)
    texts, refusal, chat = Texts(tokenizer), "", None
    try:
        chat = load_chat_format(tokenizer, made.arguments)
    except Exception as error:
        refusal = _words(error)
    for conversation in conversations(made.seed, made.choices.word):
        turns = made.turns(conversation.messages, conversation.tools)
        trained = [turn._replace(spans=[s for s in turn.spans if s.way != "sampled"]) for turn in turns]
        for mode in modes:
            give = functools.partial(Judged, mode, conversation)
            try:
                if chat is None:
                    raise ModelError(refusal)
                wrong = checks[mode](made, conversation, trained, chat, texts)
                yield give("wrong", *wrong) if wrong else give("right")
            except ModelError as error:
                is_shown = not any(turn.refused for turn in turns)
                lost = any(turn.left_out for turn in turns)
                yield give("refused" if is_shown and not lost else "not shown", _kind(error), str(error))
            except Exception as error:
                yield give("wrong", f"raises {type(error).__name__}", _words(error))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _kind(error: Exception) -> str:
    return str(error).split("\n")[0][:110]


Wrong = tuple[str, str]


def supervised(made: Made, conversation: Conversation, turns: list[Turn], chat: Any, texts: Texts) -> Wrong | None:
    """What is wrong with the rows of a conversation; None if they are right."""
    rows = tokenize_supervised(conversation.messages, conversation.tools, chat)
    stops = {texts.ids[text] for text in made.stops}
    said: dict[int, list[tuple[Form, str]]] = {
        turn.place: [(each.form, each.opening + each.reply) for each in turn.spans] for turn in turns
    }
    if not made.of(conversation.tools).end:  # the end of such a turn belongs to the next one
        said = {place: [(f, text[: text.rfind(OPEN)]) for f, text in each] for place, each in said.items()}
    trained: Counter[int] = Counter()
    # A template that shows no thought, or an empty one in its own form, does not say which white space is around one.
    is_unsaid = made.choices.think in ("no", "hidden", "stripped") or made.choices.void
    blanks = re.compile(rf"\s*{re.escape(TAGS[1])}\s*" if is_unsaid else "(?!)")

    def same(one: str, other: str) -> bool:
        return blanks.sub(TAGS[1], one) == blanks.sub(TAGS[1], other)

    for row in rows:
        if len(row.tokens) != len(row.loss_mask) or not set(row.loss_mask) <= {0.0, 1.0}:
            return "streams", f"{len(row.tokens)} tokens, weights {row.loss_mask}"
        for a, b in runs(row.tokens, row.loss_mask, stops):
            context, reply = texts.marked(row.tokens[:a]), texts.marked(row.tokens[a:b])
            found = [
                turn.place
                for turn in turns
                if any(same(each.reply, reply) and pattern(each.before, said).fullmatch(context) for each in turn.spans)
            ]
            if found and row.tokens[b - 1] not in chat.stop_ids and row.tokens[b - 1] in stops:
                return "the end is no stop id", texts.marked(row.tokens[b - 1 : b])
            if not found:
                return _why(turns, context, reply, said), _got(context, reply, turns)
            trained[found[0]] += 1
    for turn in turns:
        if trained[turn.place] > 1:
            return "a reply is trained twice", f"message {turn.place}"
        if not trained[turn.place] and not turn.refused:
            return "a reply is not trained", f"message {turn.place}\n" + _got("", "", [turn])
    return None


def runs(tokens: Sequence[int], weights: Sequence[float], stops: set[int]) -> Iterator[tuple[int, int]]:
    """The stretches that are trained: each ends with a stop id, or where the weights end."""
    start = None
    for place, (token, weight) in enumerate(zip(tokens, weights, strict=True)):
        if weight and start is None:
            start = place
        if start is not None and not weight:
            yield start, place
            start = None
        if start is not None and token in stops:
            yield start, place + 1
            start = None
    if start is not None:
        yield start, len(tokens)


def _why(turns: Sequence[Turn], context: str, reply: str, said: Any) -> str:
    """The kind of wrongness of a stretch that is none of the right ones."""
    spans = [each for turn in turns for each in turn.spans]
    asked = [joined(each.before) for each in spans]
    if any(pattern(each.before, said).fullmatch(context) for each in spans):
        ends = any(reply and each.reply.startswith(reply) for each in spans)
        return "the reply lacks its end" if ends else "another reply behind the right prompt"
    if any(each.reply == reply for each in spans):
        shorter = any(text.startswith(context) for text in asked)
        return "the context lacks the end of the prompt" if shorter else "the context is another than the prompt"
    if any(text.startswith(context) and (context + reply).startswith(text) for text in asked):
        return "the reply begins inside the prompt"
    if any(context.startswith(text) for text in asked):
        return "the reply begins behind its start"
    return "a refused conversation is trained" if any(turn.refused for turn in turns) else "another text is trained"


def short(text: str) -> str:
    """A text to print, without the schemas of the tools."""
    return repr(re.sub(r'\n\{"type": "function".*\}(?=\n)', "\nTOOLS", text))


def _got(context: str, reply: str, turns: Sequence[Turn]) -> str:
    lines = [f"got context  {short(context)}", f"got reply    {reply!r}"]
    same = [turn for turn in turns if any(each.reply == reply or joined(each.before) == context for each in turn.spans)]
    turns = same or turns
    for turn in turns:
        for each in turn.spans:
            lines += [f"right: message {turn.place} {each.way}", f"     context {short(joined(each.before))}"]
            lines += [f"     reply   {each.reply!r}"]
        lines += [f"message {turn.place} cannot be shown: {turn.refused}"] if turn.refused else []
    return "\n".join(lines)


class Fault(Exception):
    """Something is wrong: its kind, and what was got and expected."""


class _Speaker:
    """An engine that samples a true reply to the prompt that it is given."""

    capabilities = Capabilities()
    vocabulary_size = version = 0
    context_tokens_max = 100_000

    def __init__(self, texts: Texts, rng: random.Random) -> None:
        self.texts, self.rng = texts, rng
        self.said: dict[int, list[tuple[Form, str]]] = {}  # the forms of each turn, with the text that was sampled
        self.sampled: list[list[int]] = []

    def close_session(self, session: str) -> None:
        pass

    def ask(self, turn: Turn) -> None:
        """The turn that the next request is for."""
        self.turn = turn

    async def generate(self, request: Any) -> Generation:
        await trio.lowlevel.checkpoint()
        got, turn = self.texts.marked(request.tokens), self.turn
        right = [each for each in turn.spans if pattern(each.before, self.said).fullmatch(got)]
        if not right:
            expected = "\n".join(f"expected {short(joined(each.before))}" for each in turn.spans)
            raise Fault("the prompt is another", f"got      {short(got)}\n{expected}")
        ends = [self.texts.marked([index]) for index in request.stop_ids]
        known = [each for each in right if each.reply.endswith(tuple(ends))]
        self.span = self.rng.choice(known or right)  # a turn may end as in the history, or as the last one
        text = self.span.reply
        if self.span.form.calls and self.rng.random() < 0.4:  # JSON as the model likes it
            text = text.replace('": ', '":').replace(', "', ',"')
        ids = self.texts.encode(text, by_bytes=self.rng.random() < 0.3)
        if ids[-1] not in request.stop_ids:
            stops = self.texts.marked(request.stop_ids)
            raise Fault("the end is no stop id", f"{self.texts.marked(ids[-1:])!r} is none of {stops!r}")
        self.sampled.append(ids)
        self.text = text
        return Generation(ids, [0.0] * len(ids), "stop", [VersionSpan(0, 0, len(ids))])


def rollout(made: Made, conversation: Conversation, turns: list[Turn], chat: Any, texts: Texts) -> Wrong | None:
    """What is wrong with the record of a rollout in which the model samples the true replies; None if it is right."""
    try:
        return trio.run(_rollout, made, conversation, chat, texts)
    except InferenceError as error:
        if isinstance(error.__cause__, Fault):
            return error.__cause__.args
        raise


async def _rollout(made: Made, conversation: Conversation, chat: Any, texts: Texts) -> Wrong | None:
    engine = _Speaker(texts, random.Random(f"rollout {made.seed} {conversation.kind}"))
    suspendable = SuspendableEngine(engine, None, (0, 0), "s")
    suspendable.clock.begin()
    tools = conversation.tools
    model = ChatModel(suspendable, Task("t"), chat, EpisodeLimits(100_000, 100), 1, {}, tools)
    messages: list[Message] = []
    for place, message in enumerate(conversation.messages):
        if message.role != "assistant":
            messages.append(_answering(message, messages))
            continue
        turn = made.turn([*messages, message], place, tools)
        asks_nothing = place and messages[-1].role == "assistant"
        if turn.refused or asks_nothing or not any(each.way != "prefix" for each in turn.spans):
            break
        engine.ask(turn)
        reply = await model.chat(list(messages), tools)
        if difference := _difference(message, reply, engine.span):
            return f"the reply is read otherwise: {difference[0]}", f"{engine.text!r}\nread as {reply}\n{difference[1]}"
        messages = [*messages, reply]
        text = engine.span.opening + engine.text
        text = text if made.of(tools).end else text[: text.rfind(OPEN)]
        engine.said[place] = [(each.form, text) for each in [engine.span, *made.turn(messages, place, tools).spans]]
    return _record(model.trajectory, engine.sampled) if model.trajectory else None


def _answering(message: Message, before: Sequence[Message]) -> Message:
    """A tool's message with the id of the call that the model made."""
    if message.role != "tool":
        return message
    called = next(place for place in range(len(before) - 1, -1, -1) if before[place].role == "assistant")
    calls, at = before[called].tool_calls, len(before) - called - 1
    return Message("tool", message.content, [], calls[at].id if at < len(calls) else "", message.name)


def _difference(message: Message, reply: Message, span: Span) -> tuple[str, str] | None:
    """The field in which the reply that was read is not what was said."""
    if span.content.strip() != reply.text.strip():
        return "content", f"expected {span.content!r}"
    if (span.thought or "").strip() != (reply.reasoning or "").strip():
        return "reasoning", f"expected {span.thought!r}"
    calls = [(each.name, each.arguments) for each in (message.tool_calls if span.form.calls else [])]
    read = [(each.name, each.arguments) for each in reply.tool_calls]
    if calls != read and _untyped(calls) != _untyped(read):
        return "calls", f"expected {calls}"
    return None


def _untyped(value: Any) -> Any:
    """Arguments with what their texts mean: an XML call writes no types, and the tool's schema gives them later."""
    if isinstance(value, dict):
        return {key: _untyped(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_untyped(each) for each in value]
    with contextlib.suppress(ValueError, TypeError):
        return json.loads(value)
    return value


def _record(trajectory: Any, sampled: Sequence[Sequence[int]]) -> Wrong | None:
    """Whether every sampled id is in the segments once, with weight, in its place."""
    found = []
    for segment in trajectory.segments:
        segment.check()
        weights = [0.0] * len(segment.tokens)
        for number, at in segment.turns:
            found.append(number)
            end = at + len(sampled[number])
            if segment.tokens[at:end] != sampled[number]:
                return "other ids are recorded", f"turn {number}"
            weights[at:end] = [1.0] * len(sampled[number])
        if weights != segment.loss_mask:
            return "another mask is recorded", f"{segment.loss_mask}"
    return None if found == list(range(len(sampled))) else ("a turn is not recorded once", f"{found}")


def show(made: Made, judged: Judged) -> str:
    """One small case to print."""
    lines = [f"--- seed {made.seed}, {judged.mode}, {judged.conversation.kind}: {judged.outcome}: {judged.kind}"]
    choices = made.of(judged.conversation.tools).differences()
    lines.append("choices: " + json.dumps(choices, ensure_ascii=False))
    for place, message in enumerate(judged.conversation.messages):
        shown = {"role": message.role, "content": message.content, "reasoning": message.reasoning}
        calls = [{"name": each.name, "arguments": each.arguments} for each in message.tool_calls]
        shown = {key: value for key, value in (shown | {"calls": calls}).items() if value}
        lines.append(f"  {place} " + json.dumps(shown, ensure_ascii=False))
    return "\n".join([*lines, judged.detail])


def main() -> None:
    """Print how many conversations are right, wrong and refused, and why. Exits with 1 if any is wrong, or if too many
    that can be shown are refused.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first template")
    parser.add_argument("--count", type=int, default=300, help="the number of templates")
    parser.add_argument("--show", type=int, default=0, help="print so many cases of each kind")
    parser.add_argument("--kind", default="", help="print only kinds that contain this text")
    parser.add_argument("--mode", default="", help="supervised or rollout")
    parser.add_argument("--template", action="store_true", help="print the Jinja text of each case")
    parser.add_argument("--foreign", action="store_true", help="templates whose thoughts have other tags than <think>")
    asked = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    kinds: dict[tuple[str, str, str], list[tuple[Made, Judged]]] = {}
    began = time.process_time()
    for seed in range(asked.seed, asked.seed + asked.count):
        made = choose(seed, asked.foreign)
        for judged in judge(made, [asked.mode] if asked.mode else MODES):
            counts[judged.mode, judged.outcome] += 1
            if judged.outcome != "right":
                kinds.setdefault((judged.mode, judged.outcome, judged.kind), []).append((made, judged))
    for mode in MODES:
        print(f"{mode:11}", *(f"{name} {counts[mode, name]:5}" for name in OUTCOMES))
    for key, cases in sorted(kinds.items(), key=lambda item: (item[0][:2], -len(item[1]))):
        mode, outcome, kind = key
        if asked.kind not in kind:
            continue
        seeds = sorted({made.seed for made, _ in cases})
        print(f"{len(cases):5} {mode} {outcome}: {kind}  (seeds {', '.join(map(str, seeds[:6]))})")
        for made, judged in cases[: asked.show]:
            print(show(made, judged))
            if asked.template:
                print(made.chat_template)
    print(f"{time.process_time() - began:.1f} s", file=sys.stderr)
    refused, right = (sum(counts[mode, name] for mode in MODES) for name in ("refused", "right"))
    if any(counts[mode, "wrong"] for mode in MODES) or refused > REFUSED_MAX * (refused + right):
        sys.exit(1)
