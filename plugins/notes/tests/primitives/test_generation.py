"""Primitives of generation: what a plain model samples, and that every replaceable part is called as documented."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
import trio

from rollouts.chat.tool_parsers import hermes
from rollouts.errors import ConfigError, InferenceError, ModelError
from rollouts.primitives import (
    Conversation,
    Generation,
    GenerationConfig,
    Message,
    ModelConfig,
    ToolCall,
    apply_chat_template,
    batch_generate,
    compute_logprobs,
    encode_prompt,
    execute_tools,
    extract_tool_calls,
    generate,
    generate_conversation_turn,
    generate_with_logprobs,
    load_model,
    load_tokenizer,
    parse_functions,
    parse_tools,
    parse_xml_tools,
    sglang_generator,
    vllm_generator,
)

sys.path[:0] = [str(Path(__file__).parents[4] / "tests" / "servers")]
from fake_engines import started  # noqa: E402

SHORT = GenerationConfig(max_tokens=8)


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


def teacher_forced(model, reply, temperature=1.0):
    """An independent formula: log softmax of the model's own logits."""
    ids = torch.tensor([[*reply.prompt_tokens, *reply.tokens]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    start = len(reply.prompt_tokens)
    return [float(logprobs[start + k - 1, token]) for k, token in enumerate(reply.tokens)]


# --- loading ----------------------------------------------------------------------------------------------------------


def test_loaders_get_the_config():
    config = ModelConfig("mine", dtype="bfloat16", trust_remote_code=True)
    assert load_model(config, model_loader=lambda given: given) is config
    assert load_tokenizer("mine", tokenizer_loader=lambda given: given) == ModelConfig("mine")
    assert load_model(ModelConfig("tiny", dtype="float64")).dtype is torch.float64


def test_a_model_that_is_not_there():
    with pytest.raises(ModelError, match="there is no folder"):
        load_model("./no/such/model")
    with pytest.raises(ConfigError, match="expected a model's name or a ModelConfig, got 3"):
        load_model(3)


# --- replies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_logprobs_are_those_of_a_teacher_forced_forward(model, tokenizer, temperature):
    config = GenerationConfig(max_tokens=12, temperature=temperature, seed=3)
    reply = generate(model, tokenizer, "What is 2 + 3?", config)
    assert reply.logprobs == pytest.approx(teacher_forced(model, reply, temperature or 1.0), abs=1e-4)
    assert compute_logprobs(model, [reply], temperature=temperature)[0].tolist() == pytest.approx(
        reply.logprobs, abs=1e-4
    )


def test_a_seed_gives_one_reply_and_a_batch_gives_several(model, tokenizer):
    assert generate(model, tokenizer, "2", SHORT) == generate(model, tokenizer, "2", SHORT)
    assert generate(model, tokenizer, "2", SHORT) == batch_generate(model, tokenizer, ["2", "3"], SHORT)[0]
    prompts = [[Message("user", "What is 2 + 3?")]] * 6
    replies = batch_generate(model, tokenizer, prompts, SHORT)
    assert len({tuple(reply.tokens) for reply in replies}) > 1
    assert batch_generate(model, tokenizer, prompts, SHORT._replace(seed=1)) != replies
    assert batch_generate(model, tokenizer, [], SHORT) == []


def test_the_logprobs_of_a_batch_have_gradients_and_the_order_of_the_replies(model, tokenizer):
    prompts = ["What is 2 + 3?", "What is 20 - 7?", "What is 2 + 3?", "4"]
    replies = batch_generate(model, tokenizer, prompts, SHORT)
    empty = Generation("", [], [], prompt_tokens=[5])
    found = compute_logprobs(model, [replies[0], empty, *replies[1:]])
    assert found.pop(1).shape == (0,)
    for reply, logprobs in zip(replies, found, strict=True):
        assert logprobs.tolist() == pytest.approx(teacher_forced(model, reply), abs=1e-4)
    sum(each.sum() for each in found).backward()
    assert float(model.lm_head.weight.grad.abs().sum()) > 0
    model.zero_grad()
    assert compute_logprobs(model, [empty])[0].shape == (0,)
    with pytest.raises(ConfigError, match="generation 0 has no prompt_tokens"):
        compute_logprobs(model, [Generation("5", [5])])


def test_a_text_is_encoded_as_it_is_and_messages_by_the_template(tokenizer):
    assert encode_prompt(tokenizer, "Hello") == tokenizer.encode("Hello")
    rendered = apply_chat_template(tokenizer, "Hello")
    assert rendered.startswith("<|im_start|>user") and encode_prompt(tokenizer, rendered) == encode_prompt(
        tokenizer, [Message("user", "Hello")]
    )
    assert encode_prompt(tokenizer, [5, 6]) == [5, 6]
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert encode_prompt(tokenizer, [{"role": "user", "content": "<|im_end|>"}]).count(end) == 1  # the template's own


def test_a_beginning_token_is_not_written_twice(tokenizer):
    class WithBeginning:
        bos_token = "<s>"

        def encode(self, text, add_special_tokens):
            return [1, 9] if add_special_tokens or text.startswith("<s>") else [9]

    assert encode_prompt(WithBeginning(), "<s>Hello") == encode_prompt(WithBeginning(), "Hello") == [1, 9]
    plain = WithBeginning()
    plain.encode = lambda text, add_special_tokens: [1] * add_special_tokens + [1, 9]
    assert encode_prompt(plain, "<s>Hello") == [1, 9]


def test_a_reply_ends_at_a_stop_text(model, tokenizer):
    prompt, config = [Message("user", "What is 2 + 3?")], GenerationConfig(max_tokens=64, seed=5)
    whole = generate(model, tokenizer, prompt, config)
    assert len(whole.text) > 6
    stop = whole.text[3:6]
    cut = generate(model, tokenizer, prompt, config._replace(stop=(stop, "never")))
    assert cut.finish_reason == "stop" and stop in cut.text and stop not in tokenizer.decode(cut.tokens[:-1])
    assert list(whole.tokens[: len(cut.tokens)]) == cut.tokens and len(cut.logprobs) == len(cut.tokens)


def test_the_end_of_a_turn_is_among_the_ids_and_not_in_the_text(model, tokenizer):
    replies = batch_generate(model, tokenizer, [[Message("user", "What is 2 + 3?")]] * 8, GenerationConfig(seed=1))
    ended = [reply for reply in replies if reply.finish_reason == "stop"]
    assert ended and all(reply.tokens[-1] == tokenizer.eos_token_id for reply in ended)
    assert all("<|im_end|>" not in reply.text for reply in replies)
    short = generate(model, tokenizer, [Message("user", "What is 2 + 3?")], GenerationConfig(max_tokens=1))
    assert short.finish_reason == "length"


def test_generators_get_the_model_the_tokenizer_the_prompt_and_the_config(tokenizer):
    calls = []

    def own(*given):
        calls.append(given)
        return "five"

    reply = generate("a model", tokenizer, "2 + 3", SHORT, generator=own)
    assert calls == [("a model", tokenizer, "2 + 3", SHORT)]
    assert reply == Generation("five", tokenizer.encode("five"), None, "stop", tokenizer.encode("2 + 3"), 1.0)
    batch_generate(None, tokenizer, [[7, 8], [Message("user", "Hi")]], SHORT, generator=own, workers=2)
    assert {tuple(prompt) for _, _, prompt, _ in calls[1:]} == {
        (7, 8),
        tuple(encode_prompt(tokenizer, [Message("user", "Hi")])),
    }
    assert len({config.seed for *_, config in calls[1:]}) == 2
    with pytest.raises(ConfigError, match="the generator own_number returned 5; expected a Generation, or its text"):

        def own_number(*given):
            return 5

        generate(None, tokenizer, "2", generator=own_number)


def test_generators_that_fail(tokenizer):
    def broken(model, tokenizer, prompt, config):
        raise OSError("no route")

    with pytest.raises(InferenceError, match=r"the generator broken raised OSError: no route \(.*line \d+"):
        generate(None, tokenizer, "2", generator=broken)
    with pytest.raises(
        ConfigError, match=r"<lambda> cannot be called as generator\(model, tokenizer, prompt, config\)"
    ):
        generate(None, tokenizer, "2", generator=lambda prompt: "5")
    with pytest.raises(ConfigError, match=r"mine cannot be called as .*: it is not callable"):
        generate(None, tokenizer, "2", generator="mine")


def test_logprob_extractors(model, tokenizer):
    def own(given, generation):
        assert given is model
        return [-1.0] * len(generation.tokens)

    assert set(generate_with_logprobs(model, tokenizer, "2", SHORT, logprob_extractor=own).logprobs) == {-1.0}
    text = functools.partial(generate_with_logprobs, model, tokenizer, "2", SHORT, generator=lambda *_: "5 and 6")
    reply = text()
    assert reply.logprobs == pytest.approx(teacher_forced(model, reply), abs=1e-4)
    with pytest.raises(ConfigError, match=r"the logprob_extractor returned shape \[1\]; expected \[\d\]"):
        text(logprob_extractor=lambda model, generation: [0.0])


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("", {}, "the prompt is empty"),
        ("2", {"max_tokens": 0}, r"max_tokens=0\): expected an integer of 1 or more"),
        ("2", {"max_tokens": "many"}, "expected an integer of 1 or more"),
        ("2", {"temperature": -1.0}, "expected a number of 0 or more"),
        ("2", {"seed": 1.5}, r"seed=1.5\): expected an integer$"),
        ("2", {"stop": ("",)}, "expected texts of one character or more"),
        ("2", {"stop": 5}, "expected texts of one character or more"),
        (None, {}, "None is no conversation"),
        (Conversation([]), {}, "the conversation has no messages"),
        (Conversation([Message("user", "Hi")], [3]), {}, "the tool 3 is no function"),
        ([{"content": "Hi"}], {}, "is no conversation"),
        ([4.5], {}, "is no conversation"),
    ],
)
def test_what_cannot_be_sampled(model, tokenizer, prompt, settings, words):
    with pytest.raises(ConfigError, match=words):
        generate(model, tokenizer, prompt, GenerationConfig(**settings))


def test_what_is_no_model_and_no_tokenizer(model, tokenizer):
    with pytest.raises(ConfigError, match=r"the model is 'tiny'; expected a causal LM, such as load_model"):
        generate("tiny", tokenizer, "2")
    with pytest.raises(ConfigError, match="the model is None; expected a causal LM"):
        generate_with_logprobs(None, tokenizer, "2", generator=lambda *given: "5")
    with pytest.raises(ConfigError, match=r"the tokenizer is None; expected that of the model: load_tokenizer"):
        generate(model, None, "2")


def test_a_config_of_another_type(model, tokenizer):
    for call in (generate, batch_generate):
        with pytest.raises(ConfigError, match="expected a GenerationConfig"):
            call(model, tokenizer, ["2"], {"max_tokens": 3})


def test_a_prompt_that_fills_the_context(model, tokenizer):
    assert len(generate(model, tokenizer, [9] * 2047, GenerationConfig(max_tokens=50)).tokens) == 1
    with pytest.raises(InferenceError, match="the prompt has 2048 tokens, and the model's context holds 2048"):
        generate(model, tokenizer, [9] * 2048)
    with pytest.raises(InferenceError, match="outside the vocabulary"):
        generate(model, tokenizer, [469])


def test_one_prompt_is_no_list_of_prompts(model, tokenizer):
    with pytest.raises(ConfigError, match=r"prompts is str; expected a list"):
        batch_generate(model, tokenizer, "2")


def test_inside_of_trio(model, tokenizer):
    async def inside():
        with pytest.raises(ConfigError, match=r"await trio\.to_thread\.run_sync"):
            generate(model, tokenizer, "2")
        return await trio.to_thread.run_sync(functools.partial(generate, model, tokenizer, "2", SHORT))

    assert trio.run(inside) == generate(model, tokenizer, "2", SHORT)


# --- conversations ----------------------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def turn_of(tokenizer, text, conversation=None, **options):
    conversation = conversation or Conversation([Message("user", "What is 2 + 3?")], [add])
    return generate_conversation_turn(None, tokenizer, conversation, generator=lambda *_: text, **options)


def test_a_turn_with_a_call_and_its_result(tokenizer):
    turn = turn_of(tokenizer, CALL)
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("add", {"a": 2, "b": 3})]
    assert turn.conversation.messages[-1] == Message("assistant", "", turn.tool_calls)
    assert turn.conversation.tools == [add] and turn.generation.text == CALL
    (result,) = execute_tools(turn.tool_calls, turn.conversation.tools)
    assert result == Message("tool", "5", tool_call_id=turn.tool_calls[0].id, name="add")


def test_a_conversation_continues_the_ids_that_were_sampled(model, tokenizer):
    """The reply spells its call with other spaces than the template does; its ids stay."""
    spelled = CALL.replace(": ", ":")
    first = turn_of(tokenizer, spelled)
    assert first.tool_calls and tokenizer.encode(spelled) == first.generation.tokens
    conversation = Conversation(
        [*first.conversation.messages, *execute_tools(first.tool_calls, [add])], first.conversation.tools
    )
    second = turn_of(tokenizer, "5", conversation, previous=first.generation)
    continued = [*first.generation.prompt_tokens, *first.generation.tokens]
    assert second.generation.prompt_tokens[: len(continued)] == continued
    anew = turn_of(tokenizer, "5", conversation)
    assert anew.generation.prompt_tokens != second.generation.prompt_tokens
    assert anew.generation.prompt_tokens == encode_prompt(tokenizer, conversation)


def test_a_parser_of_your_own(tokenizer):
    def parser(text):
        assert text == "add(2)"
        return [ToolCall("add", {"a": 2})]

    turn = turn_of(tokenizer, "add(2)", tool_parser=parser)
    assert turn.tool_calls == [ToolCall("add", {"a": 2})]
    assert turn.conversation.messages[-1] == Message("assistant", "add(2)")  # the template could not write that call
    of_a_run = turn_of(tokenizer, "add(2)", tool_parser=lambda text: (parser(text), ""))
    assert of_a_run == turn
    with pytest.raises(ConfigError, match="the tool_parser <lambda> returned 5; expected a list of ToolCall"):
        turn_of(tokenizer, CALL, tool_parser=lambda text: 5)
    assert turn_of(tokenizer, CALL, tool_parser=hermes) == turn_of(tokenizer, CALL)  # the component of a run
    assert extract_tool_calls(CALL, tool_parser=hermes) == parse_tools(CALL)
    same = turn_of(tokenizer, CALL, tool_parser=parse_xml_tools)
    assert same == turn_of(tokenizer, CALL)


def test_templates_of_your_own(tokenizer):
    def template(messages, tools):
        return f"{messages[0].text} with {tools[0]['function']['name']} ="

    conversation = Conversation([Message("user", "2 + 3")], [add])
    assert apply_chat_template(tokenizer, conversation, template_fn=template) == "2 + 3 with add ="
    turn = turn_of(tokenizer, "5", conversation, template_fn=template)
    assert turn.generation.prompt_tokens == tokenizer.encode("2 + 3 with add =")
    assert turn.conversation.messages[-1] == Message("assistant", "5")


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parser"),
    [
        (CALL, parse_xml_tools),
        ("<tool_call><function=add><parameter=a>2</parameter></function></tool_call>", parse_xml_tools),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]', parse_tools),
        ('{"name": "add", "parameters": {"a": 2}}', parse_functions),
    ],
)
def test_every_format_is_read(text, parser):
    assert [call.name for call in parser(text)] == [call.name for call in parse_tools(text)] == ["add"]
    assert extract_tool_calls(Generation(text), tool_parser=parser) == parser(text)


def test_a_call_that_cannot_be_read_explains_itself():
    (call,) = parse_tools('<tool_call>{"name": "add"')
    assert "could not be read" in call.error
    (result,) = execute_tools([call], [add])
    assert result.content.startswith("Error: The tool call could not be read")
    assert parse_xml_tools('{"name": "add", "arguments": {}}') == parse_functions("I add <tool_call>") == []


def test_a_tool_that_fails_is_a_text_for_the_model():
    def divide(a: float) -> float:
        """Divide 1 by a number."""
        return 1 / a

    calls = [ToolCall("divide", {"a": 0}), ToolCall("divide", {"b": 1}), ToolCall("divide", {"a": 4}, "id4")]
    zero, wrong, right = execute_tools(calls, [divide])
    assert "ZeroDivisionError" in zero.content and wrong.content.startswith("Error")
    assert right == Message("tool", "0.25", tool_call_id="id4", name="divide")


def test_parsers_and_executors_are_checked():
    with pytest.raises(ConfigError, match=r"the tool_parser <lambda> returned .*; expected a list of ToolCall"):
        extract_tool_calls("x", tool_parser=lambda text: ["add"])
    tools = [add]
    seen = []
    execute_tools([ToolCall("add")], tools, tool_executor=lambda *given: seen.append(given) or ["5"])
    assert seen == [([ToolCall("add")], tools)]
    with pytest.raises(ConfigError, match="expected a list of 1 texts or messages, one per call"):
        execute_tools([ToolCall("add")], tool_executor=lambda calls, tools: [])


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "generator"), [("vllm", vllm_generator), ("sglang", sglang_generator)])
def test_replies_of_a_server(kind, generator, tokenizer):
    from rollouts.models.loading import TINY_PATH

    with started(kind, TINY_PATH) as server:
        prompt = [Message("user", "What is 2 + 3?")]
        reply = generate(server.url, tokenizer, prompt, SHORT, generator=generator)
        assert len(reply.tokens) == len(reply.logprobs) <= 8
        assert reply.text == tokenizer.decode(reply.tokens).removesuffix("<|im_end|>")
        assert reply.prompt_tokens == encode_prompt(tokenizer, prompt)
        own = functools.partial(generator, url=server.url)
        replies = batch_generate(None, tokenizer, ["2", "3"], SHORT, generator=own, workers=2)
        assert [each.prompt_tokens for each in replies] == [encode_prompt(tokenizer, text) for text in "23"]


def test_a_server_that_is_not_there(tokenizer):
    with pytest.raises((ConfigError, InferenceError), match=r"127\.0\.0\.1:9"):
        generate("http://127.0.0.1:9", tokenizer, "2", generator=vllm_generator)
