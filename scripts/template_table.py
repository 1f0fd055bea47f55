"""What supervised rows and replies of many chat templates are, as a table.

    python scripts/template_table.py FOLDER                     # one line for each *.jinja, and one for each family
    python scripts/template_table.py FOLDER --ids ids.jsonl     # also write the ids of all rows
    python scripts/template_table.py FOLDER --before ids.jsonl  # also print the rows that differ from those

Each template gets the embedded tokenizer, with the control tokens that the template names. It renders a fixed set of
conversations in which every text is a word that appears once. The rows are judged from outside: each word of the
assistant is trained once, no other word is, each trained stretch ends with its only stop id, and the text before it is
the prompt that `apply_chat_template` renders. Nothing is downloaded, and no template is part of the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

import rollouts
from rollouts.chat import load_chat_format, tokenize_supervised
from rollouts.errors import RolloutsError
from rollouts.types import Message, ToolCall

TINY = Path(rollouts.__file__).parent / "tiny" / "tokenizer.json"
SPECIAL = re.compile(
    r"<\|[^<>\n'\"|]{1,40}\|>|<\|[a-z_]{1,20}>|<[a-z_]{1,20}\|>|<｜[^<>\n'\"]{1,40}｜>|\[/?[A-Z_]{2,30}\]|\[\|[a-z]+\|\]"
    r"|\[gMASK\]|<sop>|</?s>|<bos>|<eos>|<(?:start|end)_of_[a-z]+>"
    r"|<seed:(?:bos|eos)>|<SPECIAL_\d+>|<sep>|<end_of_utterance>"
)
TAG = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value|seed:think|seed:tool_call|tool_calls)>")
OPENED = re.compile(r"<(?:seed:)?think>\s*$|\[THINK\]\s*$|THINKING\|>\s*$(?<!END_THINKING\|>)|channel>\w+\s*$")
ENDS = ("<|im_end|>", "<|endoftext|>", "</s>", "<eos>")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def user(word: str) -> Message:
    return Message("user", f"quest{word}")


def reply(word: str, *calls: str, thought: str = "") -> Message:
    made = [ToolCall("look_up", {"word": f"argum{each}"}, f"callid{each:0>3}"[:9]) for each in calls]
    return Message(
        "assistant", f"reply{word}" if word else "", made, reasoning=f"thought{thought}" if thought else None
    )


def result(word: str) -> Message:
    return Message("tool", f"result{word}", [], f"callid{word:0>3}"[:9], "look_up")


CONVERSATIONS = {
    "plain": [user("one"), reply("one"), user("two"), reply("two"), user("three")],
    "system": [Message("system", "systemword"), user("one"), reply("one"), user("two"), reply("two")],
    "thoughts": [user("one"), reply("one", thought="one"), user("two"), reply("two", thought="two")],
    "call": [user("one"), reply("", "one"), result("one"), reply("two"), user("two"), reply("six")],
    "calls": [user("one"), reply("", "one", "two"), result("one"), result("two"), reply("three")],
    "text and call": [user("one"), reply("one", "one"), result("one"), reply("two")],
    "thought and call": [user("one"), reply("", "one", thought="one"), result("one"), reply("two", thought="two")],
}
WORDS = re.compile(r"(?:quest|reply|argum|result|thought)(?:one|two|three|six)|systemword")
OUTCOMES = ("right", "prefix", "lost", "wrong", "refused")
READINGS = ("calls read", "calls unread", "thoughts read", "thoughts unread", "thoughts lost")


class Row(NamedTuple):
    """The outcome of one conversation, and why; `ids` are its rows. Beside right, wrong and refused, `lost` says that
    the template cannot show a call or a content, and the rest is trained, and `prefix` that the prompt opens a thought
    which is not in the text before the reply.
    """

    outcome: str
    why: str = ""
    ids: Sequence[Any] = ()
    lost: tuple[str, ...] = ()


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """The embedded tokenizer with the template and the control tokens that it names."""
    backend = Tokenizer.from_str(TINY.read_text(encoding="utf-8"))
    special = sorted({*SPECIAL.findall(template), *ENDS})
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in sorted(set(TAG.findall(template)))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    tokenizer.chat_template = template
    tokenizer.eos_token = ending(tokenizer, special)
    return tokenizer


def ending(tokenizer: PreTrainedTokenizerFast, special: Sequence[str]) -> str:
    """The token that ends a reply: the first one behind it, unless it is the one that begins a user's turn."""
    messages = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "REPLY"}]
    try:
        text = tokenizer.apply_chat_template([*messages, *messages], tokenize=False)
    except Exception:
        return "</s>"
    before, behind = text.partition("QUESTION")[0], text.partition("REPLY")[2]
    begins = max(((before.rfind(token), token) for token in special if token in before), default=(0, ""))[1]
    ends = min(((behind.find(token), token) for token in special if token in behind), default=(0, "</s>"))[1]
    return "<|endoftext|>" if ends == begins else ends


def prompts(tokenizer: Any, messages: Sequence[Message], tools: list[Any], arguments: dict[str, Any]) -> list[str]:
    """The prompts before each reply, as transformers renders them. A call's arguments may be text, an empty content may
    be none, and a thought may be in the content. Only the renderings that show most are kept.
    """
    found: list[str] = []
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        texts = []
        for as_text, none, inline in itertools.product((False, True), repeat=3):
            given = [as_given(each, as_text, none, inline) for each in messages[:place]]
            with contextlib.suppress(Exception):  # a template may raise anything
                texts.append(
                    tokenizer.apply_chat_template(
                        given, tools=tools or None, tokenize=False, add_generation_prompt=True, **arguments
                    )
                )
        calls = [sum(not word.startswith("thought") for word in WORDS.findall(text)) for text in texts]
        found += [text for text, count in zip(texts, calls, strict=True) if count == max(calls)]
    return found


def as_given(message: Message, as_text: bool, none: bool, inline: bool) -> dict[str, Any]:
    """A message as a template reads it."""
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning and inline:
        given["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{message.text}"
    elif message.reasoning:
        given["reasoning_content"] = message.reasoning
    if message.tool_calls:
        calls = [(c.id, c.name, json.dumps(c.arguments) if as_text else c.arguments) for c in message.tool_calls]
        functions = [(i, {"name": name, "arguments": arguments}) for i, name, arguments in calls]
        given["tool_calls"] = [{"id": i, "type": "function", "function": function} for i, function in functions]
        given["content"] = given["content"] or (None if none else "")
    if message.tool_call_id:
        given |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return given


def judge(chat: Any, messages: list[Message], tools: list[Any], arguments: dict[str, Any]) -> Row:
    """Whether the rows of a conversation are right, by the words in them."""
    try:
        rows = tokenize_supervised(messages, tools, chat)
    except RolloutsError as error:
        return Row("refused", str(error).split("\n")[0])
    asked = prompts(chat.tokenizer, messages, tools, arguments)
    own = [word for message in messages if message.role == "assistant" for word in words_of(message)]
    trained: Counter[str] = Counter()
    faults, shorter = [], []
    count = 0
    for row in rows:
        for a, b in stretches(row.tokens, row.loss_mask, set(chat.stop_ids)):
            count += 1
            context, text = chat.decode(row.tokens[:a]), chat.decode(row.tokens[a:b])
            trained.update(WORDS.findall(text))
            if row.tokens[b - 1] not in chat.stop_ids:
                faults.append("no stop id at the end")
            same = [each for each in asked if WORDS.findall(each) == WORDS.findall(context)]
            if not same and asked:
                faults.append("another prompt")
            elif asked and context not in same:
                longer = [each for each in same if each.startswith(context)]
                where = f"the prompt goes on {longer[0][len(context) :]!r}" if longer else difference(same[0], context)
                is_opened = bool(longer and OPENED.search(longer[0]))
                (shorter if is_opened else faults).append(where)
    faults += [f"{word} is trained" for word in trained if word not in own]
    faults += [f"{word} is trained {trained[word]} times" for word in own if trained[word] > 1]
    lost = tuple(word for word in own if not trained[word])
    shown = " ".join(chat.decode(row.tokens) for row in rows)
    faults += [f"{word} is not trained, and shown" for word in lost if word in shown]
    turns = sum(message.role == "assistant" for message in messages)
    faults += [f"{count} stretches for {turns} replies"] if count != turns else []
    gone = [f"{word} is in no sequence" for word in lost if word[:7] != "thought" and word not in shown]
    outcome = "wrong" if faults else "prefix" if shorter else "lost" if gone else "right"
    ids = [(row.tokens, row.loss_mask) for row in rows]
    return Row(outcome, "; ".join(dict.fromkeys([*faults, *shorter, *gone])), ids, lost)


def difference(expected: str, got: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    return f"the prompt has {expected[at : at + 24]!r}, got {got[at : at + 24]!r}"


def words_of(message: Message) -> list[str]:
    calls = [str(value) for call in message.tool_calls for value in call.arguments.values()]
    return [*WORDS.findall(message.text), *calls, *([message.reasoning] if message.reasoning else [])]


def stretches(tokens: Sequence[int], weights: Sequence[float], stops: set[int]) -> Iterator[tuple[int, int]]:
    """The trained stretches, each up to its first stop id."""
    start = None
    for place, weight in enumerate([*weights, 0.0]):
        if start is not None and (not weight or tokens[place - 1] in stops):
            yield start, place
            start = None
        if weight and start is None:
            start = place


def reads(chat: Any, row: Row, tools: list[Any], messages: Sequence[Message]) -> str:
    """Whether the trained replies are read as the messages: yes, or the first field that differs."""
    replies = [message for message in messages if message.role == "assistant"]
    for tokens, weights in row.ids:
        for a, b in stretches(tokens, weights, set(chat.stop_ids)):
            text = chat.decode(tokens[a:b])
            said = next((m for m in replies if set(words_of(m)) & set(WORDS.findall(text))), None)
            if said is None:
                continue
            read = chat.parse(tokens[a:b], tools)
            calls = [(call.name, call.arguments) for call in said.tool_calls]
            if calls != [(call.name, call.arguments) for call in read.tool_calls]:
                return "calls"
            if read.text.strip() != said.text.strip():
                return "content"
            if (said.reasoning or "") not in row.lost and (said.reasoning or "") != (read.reasoning or "").strip():
                return "thought"
    return "yes"


def table_row(template: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The outcome of each conversation with one template."""
    try:
        chat = load_chat_format(tokenizer_for(template), arguments)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}".split("\n")[0]}
    found: dict[str, Any] = {"eos": chat.tokenizer.eos_token, "format": chat.tool_call_format}
    for name, messages in CONVERSATIONS.items():
        tools = [TOOL] if "call" in name else []
        try:
            row = judge(chat, messages, tools, arguments)
            read = reads(chat, row, tools, messages) if row.ids else ""
        except Exception as error:
            row, read = Row("wrong", f"raises {type(error).__name__}: {error}"), ""
        found[name] = {**row._asdict(), "read": read}
    return found


def family_of(name: str) -> str:
    """The family in a template's file name."""
    known = """qwq deepseek qwen hermes nemotron rwkv functionary firefunction llama mistral ministral devstral pixtral
        gemma glm phi cohere command aya kimi smollm granite exaone falcon lfm gpt-oss gptoss step giga apertus apriel
        seed mimo miro reka idefics llava jamba zephyr vicuna alpaca saiga openchat chatml solar amber chatqa
        metharme"""
    return next((each for each in known.split() if each in name.lower()), "other")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ids", type=Path, help="write the ids of all rows to this file, a line for each conversation")
    parser.add_argument("--before", type=Path, help="a file that --ids wrote: print the rows that differ from it")
    asked = parser.parse_args()
    found = {}
    for path in sorted(asked.folder.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        found[path.stem] = table_row(template, {})
        for value in (True, False) if "enable_thinking" in template else ():
            found[f"{path.stem}, enable_thinking={value}"] = table_row(template, {"enable_thinking": value})
    if not found:
        sys.exit(f"no *.jinja in {asked.folder}")
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for name in sorted(found, key=lambda each: (family_of(each), each)):
        totals[family_of(name)].update([print_template(name, found[name]), *reading(found[name])])
    columns = (*OUTCOMES, *READINGS)
    print(f"\n{'family':14}", *columns, sep="  ")
    for family, counts in [*totals.items(), ("all", sum(totals.values(), Counter()))]:
        print(f"{family:14}", *(f"{counts[name]:{len(name)}}" for name in columns), sep="  ")
    lines = [
        {"template": name, "conversation": each, **({"why": row["refused"]} if "refused" in row else row[each])}
        for name, row in found.items()
        for each in CONVERSATIONS
    ]
    if asked.before:
        print_changes(asked.before, lines)
    if asked.ids:
        asked.ids.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def reading(row: dict[str, Any]) -> list[str]:
    """Whether the calls and thoughts that are trained are read as what they are."""
    if "refused" in row:
        return []
    calls = [row[name]["read"] for name in ("call", "calls") if row[name]["outcome"] in ("right", "prefix")]
    thought = row["thoughts"]
    is_lost = any(word.startswith("thought") for word in thought["lost"])
    thoughts = "lost" if is_lost else "read" if thought["read"] == "yes" else "unread" if thought["read"] else ""
    found = [f"calls {'read' if set(calls) == {'yes'} else 'unread'}"] if calls else []
    return [*found, f"thoughts {thoughts}"] if thoughts else found


def print_changes(before: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Print the conversations whose rows differ from those in the file `before`."""
    old = [json.loads(line) for line in before.read_text(encoding="utf-8").splitlines()]
    known = {(line["template"], line["conversation"]): line for line in old}
    print("\nrows that differ")
    for line in json.loads(json.dumps(lines)):
        was = known.get((line["template"], line["conversation"]))
        if was is not None and was.get("ids") != line.get("ids"):
            outcomes = f"{was.get('outcome', 'refused')} -> {line.get('outcome', 'refused')}"
            print(f"    {line['template']}, {line['conversation']}: {outcomes}; {was.get('why', '')[:120]}")


def print_template(name: str, row: dict[str, Any]) -> str:
    """Print one template; returns its outcome: that of plain text if it is refused, else the worst that is trained."""
    if "refused" in row:
        print(f"{name:52} refused: {row['refused'][:150]}")
        return "refused"
    each = {key: row[key] for key in CONVERSATIONS}
    outcomes = {value["outcome"] for value in each.values()}
    kind = next(name for name in ("wrong", "prefix", "lost", "right", "refused") if name in outcomes)
    print(f"{name:52} {kind:7} {row['eos']} {row['format']}", dict(Counter(v["outcome"] for v in each.values())))
    reasons: dict[str, list[str]] = defaultdict(list)
    for key, value in each.items():
        if value["why"]:
            reasons[f"{value['outcome']}: {value['why'][:200]}"].append(key)
        if value["read"] not in ("", "yes"):
            reasons[f"{value['read']} read otherwise"].append(key)
        if any(word.startswith("thought") for word in value["lost"]):
            reasons["thoughts in no sequence"].append(key)
    for reason, keys in reasons.items():
        print(f"    {', '.join(keys)}: {reason}")
    return kind


if __name__ == "__main__":
    main()
