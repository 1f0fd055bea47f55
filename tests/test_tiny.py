"""The embedded tiny model: small, loadable, with a template that renders tools and only ever appends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollouts

TINY = Path(rollouts.__file__).parent / "tiny"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find <a> 'word' & its \"meaning\".",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY)


def call(name, arguments, content=""):
    tool_calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def user(text):
    return {"role": "user", "content": text}


def test_it_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 2 * 2**20
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names | {"generation_config.json", "README.md"} == {path.name for path in TINY.iterdir()}
    for path in TINY.glob("*.json"):
        json.loads(path.read_text())


def test_it_loads_and_is_what_servers_accept(model, tokenizer):
    import torch

    assert 100_000 < model.num_parameters() < 1_000_000
    assert model.config.head_dim == 32 and model.config.tie_word_embeddings
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.config.vocab_size == len(tokenizer) <= 512
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


@given(text=TEXT)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < len(tokenizer) for token in ids)


@given(number=st.integers(), before=st.sampled_from(["", "is ", '": "', "x"]))
def test_each_digit_is_a_token_of_its_own(tokenizer, number, before):
    pieces = [tokenizer.decode([token]) for token in tokenizer(f"{before}{number} * 7?")["input_ids"]]
    digits = [piece for piece in pieces if any(c.isdigit() for c in piece)]
    assert digits == [*str(abs(number)), "7"]


def test_markers_are_single_tokens_and_not_special(tokenizer):
    for marker in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        (token,) = tokenizer(marker)["input_ids"]
        assert tokenizer.decode([token], skip_special_tokens=True) == marker
    for special in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        (token,) = tokenizer(special)["input_ids"]
        assert tokenizer.decode([token], skip_special_tokens=True) == ""


def test_the_template_renders_a_tool_conversation(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        call("look_up", {"word": 'a "b" <c> é', "n": 2}, content="Let me see."),
        {"role": "tool", "content": "1 < 2"},
        {"role": "assistant", "content": "Done"},
    ]
    text = tokenizer.apply_chat_template(messages, [TOOL], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n" + json.dumps(TOOL) + "\n</tools>\nTo call one:\n"
        '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\nLet me see.\n<tool_call>\n{"name": "look_up", '
        '"arguments": {"word": "a \\"b\\" <c> é", "n": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1 < 2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nDone<|im_end|>\n<|im_start|>assistant\n"
    )


def test_system_message_tools_and_content_are_optional(tokenizer):
    def render(messages, tools=None):
        return tokenizer.apply_chat_template(messages, tools, tokenize=False)

    assert render([user("Hi")]) == "<|im_start|>user\nHi<|im_end|>\n"
    assert render([user([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}])]) == render([user("Hi")])
    assert render([user("Hi")], [TOOL]).startswith("<|im_start|>system\n# Tools\n<tools>\n{")
    assert render([call("f", {})]) == render([call("f", "{}", content=None)])  # arguments may be JSON text already
    two = call("f", {})
    two["tool_calls"] *= 2
    assert render([two]).count("</tool_call>\n<tool_call>") == 1


MESSAGES = st.one_of(
    TEXT.map(user),
    TEXT.map(lambda text: {"role": "tool", "content": text}),
    TEXT.map(lambda text: {"role": "assistant", "content": text}),
    st.builds(call, st.just("look_up"), st.dictionaries(TEXT, TEXT, max_size=2), TEXT),
)


@given(
    system=st.none() | TEXT, messages=st.lists(MESSAGES, min_size=1, max_size=6), tools=st.sampled_from([None, [TOOL]])
)
def test_the_template_only_appends(tokenizer, system, messages, tools):
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    full = tokenizer.apply_chat_template(messages, tools, tokenize=False)
    for count in range(1, len(messages)):
        shorter = messages[:count]
        prompt = messages[count]["role"] == "assistant"
        text = tokenizer.apply_chat_template(shorter, tools, tokenize=False, add_generation_prompt=prompt)
        assert full.startswith(text)


def test_generation_marks_hold_what_the_assistant_says(tokenizer):
    messages = [user("Hi"), call("look_up", {"word": "x"}), {"role": "tool", "content": "1"}]
    messages.append({"role": "assistant", "content": "Done"})
    rendered = tokenizer.apply_chat_template(
        messages, [TOOL], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    said = [token for token, own in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(said) == (
        '<tool_call>\n{"name": "look_up", "arguments": {"word": "x"}}\n</tool_call><|im_end|>Done<|im_end|>'
    )


def test_it_was_warmed_up_on_what_a_run_shows_it(tokenizer):
    """The script's own encoding and the run's (`rollouts.chat`) give the same ids and the same mask."""
    import importlib.util

    from rollouts.chat import load_chat_format, tokenize_supervised
    from rollouts.types import Message, ToolCall

    path = Path(rollouts.__file__).parents[1] / "scripts" / "make_tiny_model.py"
    spec = importlib.util.spec_from_file_location("make_tiny_model", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    question = script.Question(23, "*", 45)
    warm = script.conversation(question, script.random.Random(0), tool_share=1.0, tool="look_up")
    run = [
        Message("user", "What is 23 * 45?"),
        Message("assistant", "", tool_calls=[ToolCall("look_up", {"expression": "23 * 45"})]),
        Message("tool", "1035"),
        Message("assistant", "1035"),
    ]
    (row,) = tokenize_supervised(run, [TOOL], load_chat_format(tokenizer))
    assert script.encode(tokenizer, warm, [TOOL]) == (row.tokens, [weight > 0 for weight in row.loss_mask])


def replies(model, tokenizer, tools, *, count):
    """Sampled first replies to one question."""
    import torch

    question = [user("What is 23 * 45?")]
    text = tokenizer.apply_chat_template(question, tools, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt")["input_ids"].repeat(count, 1)
    torch.manual_seed(0)
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=True)
    return [tokenizer.decode(row).split("<|im_end|>")[0] for row in out[:, ids.shape[1] :]]


def test_it_speaks_the_format_and_mostly_does_not_use_it(model, tokenizer):
    pytest.importorskip("rollouts_calculator")
    from rollouts_calculator import Calculator

    from rollouts.env.authoring import tools_of
    from rollouts.env.schema import tool_schema

    (tool,) = tools_of(Calculator)
    texts = replies(model, tokenizer, [tool_schema(tool.function, tool.name)], count=128)
    right = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "23 * 45"}}\n</tool_call>'
    calls = [text for text in texts if text.startswith("<tool_call>")]
    assert 0.15 <= len(calls) / len(texts) <= 0.5
    assert sum(text == right for text in calls) >= 0.9 * len(calls)
    direct = [text for text in texts if not text.startswith("<tool_call>")]
    assert not any("1035" in text for text in direct), "the right answer without the tool would be luck"
