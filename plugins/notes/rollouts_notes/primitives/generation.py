"""Load a model, sample replies, continue conversations; read the tool calls in a reply, and run them.

The model is a plain causal LM of transformers, sampled by the embedded engine: a batch is one batch, and each reply
depends on its own seed only.

    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    reply = generate(model, tokenizer, "What is 2 + 3?", GenerationConfig(max_tokens=16))

A *generator* is a function `generator(model, tokenizer, prompt, config)` that returns a Generation, or its text. Its
`prompt` is the text that you gave, or the ids of a conversation. It decides what `model` is. `vllm_generator` and
`sglang_generator` ask a running server. They send and receive ids, and the server's tokenizer is checked. The server
samples with its own weights: a change of your model does not reach it.

A *tool parser* takes the text of a reply and returns tool calls, or tool calls and the remaining text. A call that
cannot be read has an `error`, which is a text for the model. `parse_tools` reads every format that the engine knows.

Legend: P ids of a prompt, K sampled ids of a reply, N replies.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio

from rollouts.agent.records import turn_seed
from rollouts.author_code import shown
from rollouts.chat.format import chat_format
from rollouts.chat.tool_call_formats import TOOL_CALL_FORMATS, detect_tool_call_format, parse_reply
from rollouts.env.authoring import TOOL_MARK, ToolMethod, mark_of
from rollouts.env.schema import schema_of
from rollouts.env.tools import run_tool
from rollouts.errors import ConfigError, InferenceError, RolloutsError, TrainingError, words_of
from rollouts.inference.base import GenerateRequest
from rollouts.models import loading
from rollouts.training.algorithms.algorithm import function_label
from rollouts.types import Message, Task, ToolCall
from rollouts_notes.primitives.types import Conversation, Generation, GenerationConfig, ModelConfig, Turn

if TYPE_CHECKING:
    from rollouts_servers.dialect import Dialect

T = TypeVar("T")
Prompt = str | Sequence[int] | Conversation | Sequence[Message] | Task
"""Text as the model is to see it, token ids, or a conversation or task, which the model's chat template renders."""

Generator = Callable[[Any, Any, Any, GenerationConfig], Generation | str]
TemplateFn = Callable[[Sequence[Message], Sequence[dict[str, Any]]], str]
ToolParser = Callable[..., Sequence[ToolCall] | tuple[Sequence[ToolCall], str]]
"""`tool_parser(text)` or `tool_parser(text, tools)`: the calls and the remaining text, or the calls alone."""
Tools = Sequence[Callable[..., Any] | dict[str, Any]]
ToolExecutor = Callable[[Sequence[ToolCall], Tools], Sequence[Message | str]]

DEFAULT = GenerationConfig()
_NUMBERS: dict[str, tuple[Any, float, str]] = {
    "max_tokens": (int, 1, "an integer of 1 or more"),
    "temperature": (int | float, 0, "a number of 0 or more"),
    "seed": (int, -math.inf, "an integer"),
}
_ANY_TOOL: list[dict[str, Any]] = [{}]  # formats without tags read calls only if tools were offered


def call_given(form: str, function: Callable[..., T], *given: Any, error: type[RolloutsError] = TrainingError) -> T:
    """Call a user's function. `form` is the documented call, such as "reward_fn(rollout)".

    Raises ConfigError if the function does not take these arguments, and `error` if it raises.

    >>> call_given("scorer(model, rollout)", lambda model: 1.0, "a model", "a rollout")
    Traceback (most recent call last):
    rollouts.errors.ConfigError: <lambda> cannot be called as scorer(model, rollout): too many positional arguments
    """
    try:
        return function(*given)
    except RolloutsError:
        raise
    except Exception as failure:  # a user's function may raise anything
        label, why = function_label(function), ""
        if isinstance(failure, TypeError):
            try:
                inspect.signature(function).bind(*given)
            except TypeError as refusal:
                why = str(refusal) if callable(function) else "it is not callable"
            except ValueError:  # a builtin may have no readable signature
                pass
        if why:
            raise ConfigError(f"{label} cannot be called as {form}: {why}") from failure
        raise error(f"the {form.partition('(')[0]} {label} raised {words_of(failure)}") from failure


# --- loading ----------------------------------------------------------------------------------------------------------


def load_model(config: ModelConfig | str, *, model_loader: Callable[[ModelConfig], Any] | None = None) -> Any:
    """Load a causal LM in evaluation mode, with its parameters trainable. `model_loader(config)` replaces this.

    Raises ModelError if the model cannot be loaded, and ConfigError for an unknown device.

    >>> load_model("tiny").config.vocab_size
    469
    """
    return _load(config, model_loader, lambda c: loading.load_hf_model(c.name, dtype=c.dtype, device=c.device))


def load_tokenizer(config: ModelConfig | str, *, tokenizer_loader: Callable[[ModelConfig], Any] | None = None) -> Any:
    """Load the tokenizer of a model. `tokenizer_loader(config)` replaces this. Raises ModelError.

    >>> load_tokenizer("tiny").eos_token
    '<|im_end|>'
    """
    return _load(config, tokenizer_loader, lambda c: loading.load_tokenizer(c.name))


def _load(config: Any, loader: Callable[..., Any] | None, usual: Callable[[ModelConfig], Any]) -> Any:
    config = ModelConfig(config) if isinstance(config, str) else config
    if not isinstance(config, ModelConfig):
        raise ConfigError(f'expected a model\'s name or a ModelConfig, got {shown(config)}; write load_model("tiny")')
    if loader is not None:
        return loader(config)
    with loading.remote_code(config.trust_remote_code):
        return usual(config)


# --- replies ----------------------------------------------------------------------------------------------------------


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    config: GenerationConfig = DEFAULT,
    *,
    generator: Generator | None = None,
) -> Generation:
    """Sample one reply: ids [K] with their logprobs [K]. The same seed gives the same reply.

    A text is encoded as it is. Give a Conversation, or a list of messages, to use the model's chat template. If the
    prompt leaves less room than `max_tokens` in the model's context, the reply is limited to this room.

    Raises ConfigError for an empty prompt, for settings that cannot be used, and for a generator that returns neither
    text nor a Generation. Raises InferenceError if the context has no room, the logits are not finite, or the generator
    raises.

    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> reply = generate(model, tokenizer, "2 + 3 =", GenerationConfig(max_tokens=8))
    >>> len(reply.tokens) == len(reply.logprobs) <= 8, reply.prompt_tokens == tokenizer.encode("2 + 3 =")
    (True, True)
    >>> generate(model, tokenizer, "2 + 3 =", generator=lambda model, tokenizer, prompt, config: "5").text
    '5'

    Args:
        generator: samples instead of the embedded engine
    """
    _check_config(config)
    if generator is not None:
        return _from_generator(generator, model, tokenizer, prompt, config)
    return batch_generate(model, tokenizer, [prompt], config)[0]


def batch_generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: GenerationConfig = DEFAULT,
    *,
    generator: Generator | None = None,
    workers: int = 1,
) -> list[Generation]:
    """Sample one reply for each prompt [N], in one batch. Raises like `generate`.

    Each reply has its own seed, made from `config.seed` and its place. So a prompt that you give four times gets four
    different replies.

    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> replies = batch_generate(model, tokenizer, ["2 + 3 ="] * 4, GenerationConfig(max_tokens=4))
    >>> len(replies), len({reply.text for reply in replies}) > 1
    (4, True)

    Args:
        generator: samples instead of the embedded engine, one prompt per call
        workers: how many calls of the generator run at the same time, in threads
    """
    if isinstance(prompts, str | Conversation):
        raise ConfigError(f"prompts is {type(prompts).__name__}; expected a list: batch_generate(..., [prompt])")
    _check_config(config)
    configs = [config._replace(seed=turn_seed(config.seed, row, 0, 0, 0)) for row in range(len(prompts))]
    if generator is None:
        from rollouts.inference.embedded.hf import HFInference

        check_model(model)
        rows = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        return _sampled(HFInference(model), tokenizer, rows, configs) if rows else []
    own = functools.partial(_from_generator, generator, model, tokenizer)
    if workers <= 1:
        return list(map(own, prompts, configs))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(own, prompts, configs))


def _check_config(config: Any) -> None:
    """Raise ConfigError for settings that cannot be used."""
    if not isinstance(config, GenerationConfig):
        raise ConfigError(f"the config is {shown(config)}; expected a GenerationConfig, such as GenerationConfig(64)")
    for name, (kinds, least, expected) in _NUMBERS.items():
        value = getattr(config, name)
        if not isinstance(value, kinds) or not least <= value < math.inf:
            raise ConfigError(f"GenerationConfig({name}={shown(value)}): expected {expected}")
    _stop_texts(config)


def check_model(model: Any) -> None:
    """Raise ConfigError for anything but a causal LM."""
    if not hasattr(model, "get_input_embeddings"):
        raise ConfigError(f'the model is {shown(model)}; expected a causal LM, such as load_model("tiny")')


def _from_generator(
    generator: Generator, model: Any, tokenizer: Any, prompt: Prompt, config: GenerationConfig
) -> Generation:
    """The generator's reply; a text becomes a Generation with ids and without logprobs."""
    given = prompt if isinstance(prompt, str) else encode_prompt(tokenizer, prompt)
    form = "generator(model, tokenizer, prompt, config)"
    reply = call_given(form, generator, model, tokenizer, given, config, error=InferenceError)
    if isinstance(reply, Generation):
        return reply if reply.temperature is not None else reply._replace(temperature=config.temperature)
    if not isinstance(reply, str):
        what = f"the generator {function_label(generator)} returned {shown(reply)}"
        raise ConfigError(f"{what}; expected a Generation, or its text")
    tokens = tokenizer.encode(reply, add_special_tokens=False)
    return Generation(reply, tokens, prompt_tokens=encode_prompt(tokenizer, given), temperature=config.temperature)


def _sampled(
    engine: Any, tokenizer: Any, rows: Sequence[list[int]], configs: Sequence[GenerationConfig]
) -> list[Generation]:
    """The replies of an engine to prompts [N] of ids, all in flight at the same time. The engine is closed. Raises
    ConfigError for settings that cannot be used and inside of trio, and InferenceError.
    """
    requests = []
    for row, config in zip(rows, configs, strict=True):
        _check_config(config)
        stop_ids = (*_turn_ends(tokenizer), *_ids_with(tokenizer, _stop_texts(config)))
        requests.append(GenerateRequest(row, config.max_tokens, stop_ids, config.seed, config.temperature))
    replies = run_sync(_replies, engine, requests)
    return [_generation(tokenizer, *each) for each in zip(rows, replies, configs, strict=True)]


async def _replies(engine: Any, requests: Sequence[GenerateRequest]) -> list[Any]:
    from rollouts.training.weights.probe import gather

    async def reply(place: int) -> Any:
        request, most = requests[place], engine.context_tokens_max
        try:
            room = most - len(request.tokens)
            if room < 1:
                what = f"the prompt has {len(request.tokens)} tokens, and the model's context holds {most}"
                raise InferenceError(what)
            limit = min(request.max_tokens, room)
            changed = {"max_tokens": limit, "session": sessions[place], "order": (place,)}
            return await engine.generate(msgspec.structs.replace(request, **changed))
        finally:
            engine.close_session(sessions[place])

    async with engine:
        sessions = [engine.open_session((place,)) for place in range(len(requests))]
        replies = await gather(reply, range(len(requests)))
    for each in replies:
        if isinstance(each, Exception):
            raise each
    return replies


def _generation(tokenizer: Any, row: list[int], reply: Any, config: GenerationConfig) -> Generation:
    """The reply, cut after the first stop text."""
    tokens, finish, stop = list(reply.tokens), reply.finish, _stop_texts(config)
    for size in range(1, len(tokens) + 1) if stop else ():
        if any(each in tokenizer.decode(tokens[:size]) for each in stop):
            tokens, finish = tokens[:size], "stop"
            break
    body = tokens[:-1] if tokens and tokens[-1] in _turn_ends(tokenizer) else tokens
    known = reply.logprobs[: len(tokens)]
    return Generation(tokenizer.decode(body), tokens, known, finish, row, config.temperature)


def _stop_texts(config: GenerationConfig) -> tuple[str, ...]:
    """The stop texts. Raises ConfigError for one that is empty or no text."""
    stop = (config.stop,) if isinstance(config.stop, str) else config.stop
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
        raise ConfigError(f'stop={shown(config.stop)}: expected texts of one character or more, as in ("DONE",)')
    return tuple(stop)


@functools.lru_cache(maxsize=4)
def _ids_with(tokenizer: Any, stop: tuple[str, ...]) -> tuple[int, ...]:
    """The ids whose own text contains a stop text. They end a reply at once; a stop text of several ids is cut off
    later (`_generation`).
    """
    texts = tokenizer.batch_decode([[index] for index in range(len(tokenizer))]) if stop else []
    return tuple(index for index, text in enumerate(texts) if any(each in text for each in stop))


def run_sync(function: Callable[..., Any], *args: Any) -> Any:
    """Run an async function to its end. Raises ConfigError inside of trio."""
    if trio.lowlevel.in_trio_run():
        raise ConfigError(
            "this function waits for its result, so trio cannot call it; write "
            "`await trio.to_thread.run_sync(functools.partial(generate, ...))`"
        )
    return trio.run(function, *args)


# --- servers ----------------------------------------------------------------------------------------------------------


def vllm_generator(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    config: GenerationConfig,
    *,
    url: str = "http://127.0.0.1:8000",
    served_model: str = "",
    api_key_env: str = "VLLM_API_KEY",
    dialect: Dialect | None = None,
) -> Generation:
    """Sample one reply from the vLLM server at `url`. `model` is not used, unless it is a URL: then it replaces `url`.

    Raises ConfigError if the server does not fit (another tokenizer, an old version), and InferenceError if it fails.

    Args:
        served_model: the server's name for the model; empty: its first model
        api_key_env: the environment variable with the API key, if the server requires one
        dialect: how the server speaks; None: as vLLM does
    """
    from rollouts_servers.checks import ServerSetup
    from rollouts_servers.options import PROBE_TEXT
    from rollouts_servers.server import Server
    from rollouts_servers.vllm import VLLM

    setup = ServerSetup(
        vocabulary_size=len(tokenizer),
        model=served_model,
        temperature=config.temperature,
        tokenizer=(PROBE_TEXT, tokenizer.encode(PROBE_TEXT, add_special_tokens=False)),
        takes_weights=False,
        api_key=os.environ.get(api_key_env, ""),
    )
    engine = Server(dialect or VLLM(), model if isinstance(model, str) and "://" in model else url, setup)
    return _sampled(engine, tokenizer, [encode_prompt(tokenizer, prompt)], [config])[0]


def sglang_generator(
    model: Any, tokenizer: Any, prompt: Prompt, config: GenerationConfig, **options: Any
) -> Generation:
    """Sample one reply from the SGLang server at `url`, http://127.0.0.1:30000 by default. `options` are those of
    `vllm_generator`; the default of `api_key_env` is SGLANG_API_KEY.
    """
    from rollouts_servers.sglang import SGLang

    usual: dict[str, Any] = {"url": "http://127.0.0.1:30000", "api_key_env": "SGLANG_API_KEY", "dialect": SGLang()}
    return vllm_generator(model, tokenizer, prompt, config, **usual | options)


# --- prompts and conversations ----------------------------------------------------------------------------------------


def _turn_ends(tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a reply: those of the chat template, the tokenizer's end-of-text id, and those of the model."""
    if getattr(tokenizer, "chat_template", None):
        return chat_format(tokenizer).stop_ids
    own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return tuple(sorted({*own, *getattr(tokenizer, "model_ends", ())}))


def prompt_conversation(prompt: Prompt) -> Conversation:
    """A Conversation of a text (one message of the user), a Task, messages (also as dicts), or a Conversation.

    Raises ConfigError for anything else.

    >>> prompt_conversation([{"role": "user", "content": "Hello"}]).messages[0].text
    'Hello'
    """
    if isinstance(prompt, str | Task):
        prompt = Conversation(Task(prompt).messages if isinstance(prompt, str) else prompt.messages)
    messages, tools = prompt if isinstance(prompt, Conversation) else (prompt, ())
    try:
        given = [each if isinstance(each, Message) else msgspec.convert(each, Message) for each in messages]
    except (msgspec.ValidationError, TypeError) as error:
        expected = 'expected messages, such as [Message("user", "Hello")]'
        raise ConfigError(f"{shown(messages)} is no conversation ({error}); {expected}") from error
    if not given:
        raise ConfigError('the conversation has no messages; give one or more, such as [Message("user", "Hello")]')
    return Conversation(given, tools)


def schemas_of(tools: Tools) -> list[dict[str, Any]]:
    """The OpenAI schemas of tools. Raises EnvironmentDefinitionError if a function has no readable type hints."""
    return [each if isinstance(each, dict) else schema_of(_method(each)) for each in tools]


def _method(tool: Callable[..., Any]) -> ToolMethod:
    """A function as a tool. The model sees the name of `@tool(name=...)`, or the function's. Raises ConfigError."""
    if not callable(tool):
        raise ConfigError(f"the tool {shown(tool)} is no function; give functions with type hints, or OpenAI schemas")
    name, timeout_seconds, isolate, _ = mark_of(tool, TOOL_MARK) or ("", 30.0, None, None)
    return ToolMethod(name or getattr(tool, "__name__", type(tool).__name__), tool, timeout_seconds, isolate)


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The ids [P] of a prompt. A conversation gets the chat template with its generation prompt.

    The text of a message never becomes a control token. Raises ConfigError for an empty prompt, and ModelError if the
    chat template refuses the conversation.

    >>> tokenizer = load_tokenizer("tiny")
    >>> encode_prompt(tokenizer, [Message("user", "Hello")]) == encode_prompt(
    ...     tokenizer, apply_chat_template(tokenizer, [Message("user", "Hello")])
    ... )
    True
    """
    if not hasattr(tokenizer, "encode"):
        raise ConfigError(f'the tokenizer is {shown(tokenizer)}; expected that of the model: load_tokenizer("tiny")')
    if isinstance(prompt, str):
        opens = tokenizer.bos_token and prompt.startswith(tokenizer.bos_token)  # a rendered template has it already
        ids = tokenizer.encode(prompt, add_special_tokens=not opens)
    elif isinstance(prompt, Sequence) and all(isinstance(each, int) for each in prompt):
        ids = prompt
    else:
        messages, tools = prompt_conversation(prompt)
        ids = chat_format(tokenizer).encode_prompt(list(messages), schemas_of(tools))
    if not ids:
        raise ConfigError("the prompt is empty; give it at least one token")
    return list(ids)


def apply_chat_template(tokenizer: Any, prompt: Prompt, *, template_fn: TemplateFn | None = None) -> str:
    """The text of a conversation as the model sees it, with the generation prompt. A text is one message of the user.

    Raises ModelError if the template refuses the conversation.

    >>> print(apply_chat_template(load_tokenizer("tiny"), "Hello"))
    <|im_start|>user
    Hello<|im_end|>
    <|im_start|>assistant
    <BLANKLINE>

    Args:
        template_fn: `template_fn(messages, tools)` renders instead of the tokenizer's template; `tools` are schemas
    """
    messages, tools = prompt_conversation(prompt)
    if template_fn is not None:
        return call_given("template_fn(messages, tools)", template_fn, list(messages), schemas_of(tools))
    return chat_format(tokenizer).render(list(messages), schemas_of(tools), True)


def generate_conversation_turn(
    model: Any,
    tokenizer: Any,
    conversation: Conversation,
    config: GenerationConfig = DEFAULT,
    *,
    generator: Generator | None = None,
    template_fn: TemplateFn | None = None,
    tool_parser: ToolParser | None = None,
    previous: Generation | None = None,
) -> Turn:
    """The model's next message: the conversation with it, the reply's ids and logprobs, and its tool calls.

    The message has its `tool_calls` if the chat template writes calls as the model did. If only `tool_parser` reads
    them, the message keeps the model's text as it is. Raises like `generate`.

    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> turn = generate_conversation_turn(
    ...     model, tokenizer, Conversation([Message("user", "Hi")]), generator=lambda *given: "Hello."
    ... )
    >>> [message.content for message in turn.conversation.messages]
    ['Hi', 'Hello.']

    Args:
        template_fn: as in `apply_chat_template`
        tool_parser: `tool_parser(text)` returns the tool calls and the remaining text, as the tool parser of a run
            does. It may return the calls alone, as `parse_tools` does
        previous: the last turn's reply. Its ids are continued exactly as they were sampled, if the template allows it
    """
    prompt = turn_prompt(tokenizer, conversation, template_fn=template_fn, previous=previous)
    reply = generate(model, tokenizer, prompt, config, generator=generator)
    return read_turn(tokenizer, conversation, reply, template_fn=template_fn, tool_parser=tool_parser)


def turn_prompt(
    tokenizer: Any,
    conversation: Conversation,
    *,
    template_fn: TemplateFn | None = None,
    previous: Generation | None = None,
) -> Prompt:
    """The prompt of the next turn of a conversation (see `generate_conversation_turn`)."""
    messages, tools = conversation = prompt_conversation(conversation)
    if template_fn is not None:
        return apply_chat_template(tokenizer, conversation, template_fn=template_fn)
    at = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=len(messages))
    if previous is not None and previous.prompt_tokens and messages[at + 1 :]:
        sampled, parts = list(previous.tokens), (list(messages[:at]), messages[at], list(messages[at + 1 :]))
        # None: the template rewrites earlier turns, so the ids of the last reply cannot be continued.
        new = chat_format(tokenizer).extend(*parts, schemas_of(tools), sampled)
        if new is not None:
            return [*previous.prompt_tokens, *sampled, *new]
    return encode_prompt(tokenizer, conversation)


def read_turn(
    tokenizer: Any,
    conversation: Conversation,
    reply: Generation,
    *,
    template_fn: TemplateFn | None = None,
    tool_parser: ToolParser | None = None,
) -> Turn:
    """The conversation with this reply to it (see `generate_conversation_turn`)."""
    conversation = prompt_conversation(conversation)
    message, schemas = Message("assistant", reply.text), schemas_of(conversation.tools)
    if template_fn is None:
        message = chat_format(tokenizer).parse(reply.tokens, schemas)
    calls = message.tool_calls
    if tool_parser is not None:
        read = _parsed(tool_parser, reply.text, schemas)
        if _meaning(read) != _meaning(calls):
            message, calls = Message("assistant", reply.text), read
    return Turn(conversation._replace(messages=[*conversation.messages, message]), reply, calls)


def _meaning(calls: Sequence[ToolCall]) -> list[tuple[str, Any, str | None]]:
    return [(each.name, each.arguments, each.error) for each in calls]


# --- tools ------------------------------------------------------------------------------------------------------------


def parse_tools(text: str) -> list[ToolCall]:
    """The tool calls in a text, in any format: `<tool_call>` tags, `[TOOL_CALLS]`, or a bare JSON object.

    >>> parse_tools('Let me see. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')[0].arguments
    {'a': 2}
    >>> parse_tools("5")
    []
    """
    return _read(text, detect_tool_call_format(text, ""))


def parse_xml_tools(text: str) -> list[ToolCall]:
    """The tool calls between `<tool_call>` tags, as JSON or as `<function=name>`; other text is no call.

    >>> parse_xml_tools("<tool_call><function=add><parameter=a>2</parameter></function></tool_call>")[0].name
    'add'
    """
    return _read(text, "xml" if "<function=" in text else "hermes")


def parse_functions(text: str) -> list[ToolCall]:
    """The tool calls in a reply that is JSON: `{"name": ..., "arguments": {...}}`, also with `parameters`.

    >>> [call.name for call in parse_functions('{"name": "add", "parameters": {"a": 2}}')]
    ['add']
    """
    return _read(text, "json")


def _read(text: str, name: str) -> list[ToolCall]:
    return parse_reply(text, TOOL_CALL_FORMATS[name], _ANY_TOOL).message.tool_calls


def extract_tool_calls(generation: Generation | str, *, tool_parser: ToolParser | None = None) -> list[ToolCall]:
    """The tool calls of a reply. `tool_parser(text)` replaces `parse_tools`, and may also return the remaining text.

    Raises ConfigError if the parser returns anything but tool calls.

    >>> extract_tool_calls("add(2, 3)", tool_parser=lambda text: [ToolCall(text.partition("(")[0])])[0].name
    'add'
    """
    text = generation if isinstance(generation, str) else generation.text
    return _parsed(tool_parser or parse_tools, text, _ANY_TOOL)


def _parsed(tool_parser: ToolParser, text: str, tools: Sequence[dict[str, Any]]) -> list[ToolCall]:
    """The calls that a tool parser finds. `tools` are the schemas of the offered tools, for a parser that names them.
    Raises ConfigError if it returns anything else.
    """
    try:
        names_tools = "tools" in inspect.signature(tool_parser).parameters
    except (TypeError, ValueError):  # a builtin may have no readable signature
        names_tools = False
    given = (text, list(tools)) if names_tools else (text,)
    calls: Any = call_given(f"tool_parser(text{', tools' * names_tools})", tool_parser, *given)
    if isinstance(calls, tuple) and len(calls) == 2 and isinstance(calls[1], str):
        calls = calls[0]
    if not isinstance(calls, Sequence) or not all(isinstance(each, ToolCall) for each in calls):
        what = f"the tool_parser {function_label(tool_parser)} returned {shown(calls)}"
        raise ConfigError(f"{what}; expected a list of ToolCall and the remaining text, or the list alone")
    return list(calls)


def execute_functions(tool_calls: Sequence[ToolCall], tools: Tools) -> list[str]:
    """Run each call with the function that has its name, in order. Returns a text for each call.

    Arguments are checked against the function's type hints. A failure becomes a text for the model. Functions may be
    async; `@tool(timeout_seconds=5)` gives one a deadline (30 s without it).

    >>> def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> execute_functions([ToolCall("add", {"a": 2, "b": 3}), ToolCall("sub")], [add])
    ['5', "Error: there is no tool 'sub'. The tools are: add"]
    """
    # A schema has no function, so its call becomes "there is no tool".
    methods = {method.name: method for method in (_method(each) for each in tools if not isinstance(each, dict))}
    return [run_sync(run_tool, methods, each).text for each in tool_calls]


def execute_tools(
    tool_calls: Sequence[ToolCall], tools: Tools = (), *, tool_executor: ToolExecutor | None = None
) -> list[Message]:
    """Run the calls, and return one message with the role `tool` for each.

    Raises ConfigError if the executor does not return one result per call.

    >>> execute_tools([ToolCall("add")], tool_executor=lambda calls, tools: ["5"])[0].content
    '5'

    Args:
        tools: the functions that the calls may name
        tool_executor: `tool_executor(tool_calls, tools)` replaces `execute_functions`; it returns texts or messages
    """
    results = call_given("tool_executor(tool_calls, tools)", tool_executor or execute_functions, tool_calls, tools)
    if isinstance(results, str) or not isinstance(results, Sequence) or len(results) != len(tool_calls):
        expected = f"a list of {len(tool_calls)} texts or messages, one per call"
        raise ConfigError(f"the tool_executor returned {shown(results)}; expected {expected}")
    return [
        result
        if isinstance(result, Message)
        else Message("tool", str(result), tool_call_id=call.id or None, name=call.name)
        for result, call in zip(results, tool_calls, strict=True)
    ]
