"""ChatFormat by its properties: what was sampled stays as it was, and what is shown is what the template shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import count_steps

from rollouts.chat import ChatFormat, load_chat_format
from rollouts.errors import ConfigError, ModelError
from rollouts.types import Message, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from tokenizers_for_tests import by_bytes, chat_for, make_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
USER = Message("user", "What is 12 * 123?")
WITH_TOOLS = ["qwen2_5", "qwen3", "qwen3_training", "qwen3_instruct_2507", "llama3_1", "llama3_2", "mistral"]
WITHOUT_TOOLS = ["phi3", "gemma3", "llama3", "deepseekv3", "deepseek_r1_distill"]

# What a reply of these must begin with to be what the template shows, or to be more than an unfinished thought.
THOUGHTS = {
    "qwen3_training": "<think>\n\n</think>\n\n",
    "deepseekv3": "so\n</think>\n\n",
    "deepseek_r1_distill": "so\n</think>\n\n",
}


def spell(chat: ChatFormat, content: str, arguments: list[dict], loose: bool = False) -> str:
    """A reply as a model of this family writes it; loosely: with other white space than the template's."""
    gaps = {"indent": 1, "separators": (",", " :  ")} if loose else {}
    key = "parameters" if chat.tool_call_format == "llama3" else "arguments"
    bodies = [json.dumps({"name": "calculator", key: a}, ensure_ascii=False, **gaps) for a in arguments]
    if chat.tool_call_format == "hermes":
        calls = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
        return content + ("\n" if content and calls else "") + calls
    if not bodies:
        return (" " if chat.tool_call_format == "mistral" else "") + content
    return "[TOOL_CALLS] [" + ", ".join(bodies) + "]" if chat.tool_call_format == "mistral" else "; ".join(bodies)


def sample(chat: ChatFormat, text: str, stop: bool = True) -> list[int]:
    """The text as a model might sample it: byte by byte, special tokens (tags) as themselves, then the stop id."""
    ids: list[int] = []
    for token in chat.tokenizer.encode(text, add_special_tokens=False):
        piece = chat.tokenizer.convert_ids_to_tokens(token)
        added = token in chat.tokenizer.added_tokens_decoder
        ids += [token] if added else chat.tokenizer.convert_tokens_to_ids(list(piece))
    return [*ids, next(iter(chat.closers.values()))] if stop else ids


words = st.text(max_size=12).map(lambda text: f"say {text}.")
turn = st.fixed_dictionaries(
    {
        "content": st.one_of(words, st.just("hello the 123")),
        "arguments": st.lists(st.dictionaries(st.sampled_from(["expression", "x"]), st.text(max_size=8)), max_size=2),
        "loose": st.booleans(),
        "answer": st.text(max_size=8),
    }
)


def play(name: str, turns: list[dict], with_tools: bool) -> tuple[list[dict], list[Message]]:
    """Play a conversation; returns its segments (`tokens`, `spans` of sampled ids, `exact`) and its messages."""
    chat, tools = chat_for(name), TOOLS if with_tools else []
    messages = [USER]
    tokens = chat.encode_prompt(messages, tools)
    segments = [{"tokens": tokens, "spans": [], "exact": True}]
    for planned in turns:
        arguments = planned["arguments"] if with_tools else []
        if chat.tool_call_format in ("llama3", "mistral"):
            arguments = arguments[:1]  # Llama shows one call a turn, and neither shows text beside calls
        beside = "" if arguments and chat.tool_call_format != "hermes" else planned["content"]
        loose = planned["loose"] and bool(arguments)
        text = THOUGHTS.get(name, "") + spell(chat, beside, arguments, loose)
        sampled = sample(chat, text)
        reply = chat.parse(sampled, tools)
        assert [call.arguments for call in reply.tool_calls] == arguments, text
        assert reply.text.strip() == beside.strip()
        new = [Message("tool", planned["answer"], tool_call_id=c.id, name=c.name) for c in reply.tool_calls]
        new = new or [Message("user", "again " + planned["answer"])]
        suffix = chat.extend(messages, reply, new, tools, sampled)
        last = segments[-1]
        last["spans"].append((len(last["tokens"]), sampled))
        last["tokens"] = last["tokens"] + sampled
        messages = [*messages, reply, *new]
        if suffix is None:
            segments.append({"tokens": chat.encode_prompt(messages, tools), "spans": [], "exact": True})
        else:
            last["tokens"] = last["tokens"] + suffix
            # Mistral's template shows an id in each call, which this reply did not have.
            last["exact"] &= not loose and not (arguments and chat.tool_call_format == "mistral")
    return segments, messages


def check(chat: ChatFormat, segments: list[dict], messages: list[Message], with_tools: bool) -> None:
    for segment in segments:
        for start, sampled in segment["spans"]:
            assert segment["tokens"][start : start + len(sampled)] == sampled
    if segments[-1]["exact"]:
        shown = chat.render(messages, TOOLS if with_tools else [], True)
        assert chat.decode(segments[-1]["tokens"]) == shown


@pytest.mark.parametrize("name", WITH_TOOLS + WITHOUT_TOOLS)
@settings(derandomize=True)
@given(turns=st.lists(turn, min_size=1, max_size=4))
def test_sampled_ids_stay_and_the_text_is_the_templates(name: str, turns: list[dict]) -> None:
    chat = chat_for(name)
    with_tools = name in WITH_TOOLS
    segments, messages = play(name, turns, with_tools)
    check(chat, segments, messages, with_tools)
    if chat.report.append_only:
        assert len(segments) == 1, "an append-only template never opens a second segment"


def test_a_version_that_encodes_again_fails_the_property() -> None:
    chat = chat_for("qwen2_5")
    turns = [{"content": "hello the 123", "arguments": [], "loose": False, "answer": "x"}]
    segments, messages = play("qwen2_5", turns, True)
    start, sampled = segments[0]["spans"][0]
    segments[0]["tokens"] = chat.tokenizer.encode(chat.render(messages, TOOLS, True), add_special_tokens=False)
    assert segments[0]["tokens"][start : start + len(sampled)] != sampled
    with pytest.raises(AssertionError):
        check(chat, segments, messages, True)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "mistral"])
def test_a_tool_turn_appends_in_one_segment(name: str) -> None:
    turns = [{"content": "", "arguments": [{"expression": "1+1"}], "loose": True, "answer": "2"}] * 3
    segments, _ = play(name, turns, True)
    assert len(segments) == 1


def test_a_reply_that_was_cut_off_gets_the_whole_close() -> None:
    chat = chat_for("qwen2_5")
    sampled = sample(chat, "hello", stop=False)
    reply = chat.parse(sampled, [])
    suffix = chat.extend([USER], reply, [Message("user", "go on")], [], sampled)
    assert chat.decode(suffix) == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    ended = chat.extend([USER], reply, [Message("user", "go on")], [], [*sampled, suffix[0]])
    assert ended == suffix[1:]


def test_another_stop_token_than_historys_opens_a_segment() -> None:
    chat = chat_for("phi3")
    assert len(chat.stop_ids) == 2
    sampled = [*sample(chat, "hello", stop=False), chat.tokenizer.eos_token_id]
    assert chat.extend([USER], chat.parse(sampled, []), [USER], [], sampled) is None
    sampled = sample(chat, "hello")
    assert chat.extend([USER], chat.parse(sampled, []), [USER], [], sampled) is not None


@pytest.mark.parametrize(
    ("name", "text", "new", "appends"),
    [
        ("qwen3", "<think>\nso\n</think>\n\nfour", Message("user", "and?"), False),
        ("qwen3", "four", Message("user", "and?"), True),
        ("qwen3_training", "<think>\nso\n</think>\n\nfour", Message("user", "and?"), True),
        ("qwen3_training", "four", Message("user", "and?"), False),  # it shows an empty thought that was not there
        ("qwen2_5", "<think>\nso\n</think>\n\nfour", Message("user", "and?"), True),
        ("deepseek_r1_distill", "so\n</think>\n\nfour", Message("user", "and?"), False),
        ("qwen3", "<think>\nso", Message("user", "and?"), False),
        ("qwen2_5", "<think>\nso", Message("user", "and?"), False),
        ("qwen2_5", "four<|im_end|>five", Message("user", "and?"), False),  # spelt in bytes
        ("llama3_1", "  four ", Message("user", "and?"), True),
    ],
)
def test_thinking_and_other_histories(name: str, text: str, new: Message, appends: bool) -> None:
    chat = chat_for(name)
    sampled = [*by_bytes(chat.tokenizer, text), next(iter(chat.closers.values()))]
    reply = chat.parse(sampled, [])
    assert (chat.extend([USER], reply, [new], [], sampled) is not None) is appends
    if "</think>" in text:
        assert (reply.reasoning, reply.text) == ("so", "four")


@pytest.mark.parametrize(("thinks", "appends"), [(True, True), (False, True)])
def test_qwen3_keeps_what_was_thought_before_a_tool_answer(thinks: bool, appends: bool) -> None:
    chat = chat_for("qwen3")
    call = spell(chat, "", [{"expression": "1"}])
    sampled = sample(chat, ("<think>\nso\n</think>\n\n" if thinks else "") + call)
    reply = chat.parse(sampled, TOOLS)
    suffix = chat.extend([USER], reply, [Message("tool", "1")], TOOLS, sampled)
    assert (suffix is not None) is appends
    # An empty thought is not shown again once the tool has answered: the ids would show more than the template.
    sampled = sample(chat, "<think>\n\n</think>\n\n" + call)
    assert chat.extend([USER], chat.parse(sampled, TOOLS), [Message("tool", "1")], TOOLS, sampled) is None


def test_no_thinking_mode_opens_segments_because_the_empty_thought_goes() -> None:
    chat = chat_for("qwen3", enable_thinking=False)
    assert chat.render([USER], [], True).endswith("<think>\n\n</think>\n\n")
    sampled = sample(chat, "four")
    assert chat.extend([USER], chat.parse(sampled, []), [USER], [], sampled) is None
    assert not chat_for("qwen3").report.rewrites_on_user_turn
    assert chat.report.rewrites_on_user_turn and chat.report.rewrites_on_tool_turn and not chat.report.append_only


def test_text_between_calls_and_extra_keys_are_not_the_same_history() -> None:
    chat = chat_for("qwen2_5")
    call = spell(chat, "", [{"expression": "1"}])
    for text in (call + "\nand then", call.replace('{"name"', '{"why": 1, "name"')):
        sampled = sample(chat, text)
        reply = chat.parse(sampled, TOOLS)
        assert reply.tool_calls[0].error is None
        assert chat.extend([USER], reply, [Message("tool", "1")], TOOLS, sampled) is None


def test_a_malformed_call_stays_as_it_was_written() -> None:
    chat = chat_for("qwen2_5")
    sampled = sample(chat, 'look <tool_call>\n{"name": "calculator", "arguments": {"expression": }}\n</tool_call>')
    reply = chat.parse(sampled, TOOLS)
    assert reply.tool_calls[0].error and reply.tool_calls[0].name == "calculator"
    suffix = chat.extend([USER], reply, [Message("tool", reply.tool_calls[0].error)], TOOLS, sampled)
    assert suffix is not None
    whole = chat.encode_prompt([USER], TOOLS) + sampled + suffix
    assert chat.decode(whole) == chat.render([USER, reply, Message("tool", reply.tool_calls[0].error)], TOOLS, True)


def test_llama_makes_one_call_at_a_time() -> None:
    chat = chat_for("llama3_1")
    sampled = sample(chat, spell(chat, "", [{"expression": "1"}, {"expression": "2"}]))
    reply = chat.parse(sampled, TOOLS)
    assert [call.error is None for call in reply.tool_calls] == [True, False]
    new = [Message("tool", "1"), Message("tool", reply.tool_calls[1].error or "")]
    assert chat.extend([USER], reply, new, TOOLS, sampled) is not None


@settings(derandomize=True)
@given(st.lists(st.integers(0, 330), max_size=30), st.sampled_from(WITH_TOOLS))
def test_parse_never_raises(tokens: list[int], name: str) -> None:
    chat = chat_for(name)
    tokens = [token % len(chat.tokenizer) for token in tokens]
    assert chat.parse(tokens, TOOLS).role == "assistant"


def test_a_prompt_in_pieces_is_the_prompt_whole() -> None:
    for name in WITH_TOOLS:
        chat = chat_for(name)
        system = [] if name == "mistral" else [Message("system", "be  brief \n")]
        for messages in ([*system, USER], [*system, Message("user", "  the \n\n 123 <|im_en|> hello")]):
            whole = chat.tokenizer.encode(chat.render(messages, TOOLS, True), add_special_tokens=False)
            assert chat.encode_prompt(messages, TOOLS) == whole == chat.encode_prompt(messages, TOOLS)


def test_tokens_that_swallow_white_space() -> None:
    # Phi's <|end|> takes the line break behind it: pieces encoded apart would bring it back.
    chat = load_chat_format(make_tokenizer("phi3", swallows="<|end|>"))
    sampled = [*chat.encode("hello"), chat.closers["<|end|>"]]
    reply, new = chat.parse(sampled, []), [Message("user", "again")]
    suffix = chat.extend([USER], reply, new, [], sampled)
    assert chat.encode_prompt([USER], []) + sampled + suffix == chat.encode_prompt([USER, reply, *new], [])


def test_an_earlier_turn_that_changes_is_seen_even_at_equal_length() -> None:
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.chat_template = (
        "{{ messages|length }} messages{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = load_chat_format(tokenizer)
    sampled = sample(chat, "hello")
    assert chat.extend([USER], chat.parse(sampled, []), [USER], [], sampled) is None
    assert chat.report.rewrites_on_user_turn


def test_rendering_does_not_confuse_conversations() -> None:
    chat = chat_for("qwen2_5")
    call = Message("assistant", "", [ToolCall("calculator", {"x": 1})])
    other = Message("assistant", "", [ToolCall("calculator", {"x": True})])
    assert '"x": 1}' in chat.render([USER, call], TOOLS, False)
    assert '"x": true}' in chat.render([USER, other], TOOLS, False)
    assert chat.encode("\ud800") == chat.encode("?")


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma", "mistral"])
def test_parts_are_shown_as_their_text_or_refused(name: str) -> None:
    """Several templates print a list as Python does, others raise, others leave parts out."""
    chat = chat_for(name)
    parts = [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1?"}]
    assert chat.render([Message("user", parts)], [], True) == chat.render([Message("user", "1 + 1?")], [], True)
    with pytest.raises(ModelError, match="role user has a part of type 'image', and the model reads text only"):
        chat.encode_prompt([Message("user", [*parts, {"type": "image", "image": "cat.png"}])], [])


def test_users_mistakes() -> None:
    tokenizer = make_tokenizer("qwen3")
    with pytest.raises(ConfigError, match=r"no argument 'enable_thinkin'; did you mean enable_thinking\?"):
        load_chat_format(tokenizer, {"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"no argument 'color'\. It reads"):
        load_chat_format(tokenizer, {"color": "red"})
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        load_chat_format(tokenizer)
    with pytest.raises(ModelError, match=r"refuses a conversation of \(system, user\): System role not supported$"):
        chat_for("gemma").encode_prompt([Message("system", "x"), USER], [])
    with pytest.raises(ModelError, match="cannot show a conversation of plain text"):
        chat_for("smolvlm")


def test_extending_a_short_conversation_is_quick() -> None:
    chat = chat_for("qwen2_5")

    def steps(index: int) -> int:
        before = [Message("user", f"What is {index}?")]
        chat.encode_prompt(before, TOOLS)
        sampled = sample(chat, spell(chat, "", [{"expression": str(index)}]))
        reply = chat.parse(sampled, TOOLS)
        found: list[list[int] | None] = []
        taken = count_steps(lambda: found.append(chat.extend(before, reply, [Message("tool", "4")], TOOLS, sampled)))
        assert found[0] is not None
        return taken

    assert max(map(steps, range(5))) < 3000, "measured 1272; far above it, a cache no longer works"
