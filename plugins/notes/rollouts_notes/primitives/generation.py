"""Load a model, sample replies with their logprobs, and continue conversations.

The model is a plain causal LM of transformers, sampled by the embedded engine: a batch is one batch, and each reply
depends on its own seed only. Tools are in tools.py, generators that use a server in servers.py.

    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    reply = generate(model, tokenizer, "What is 2 + 3?", GenerationConfig(max_tokens=16))

A *generator* is a function `generator(model, tokenizer, prompt, config)` that returns a Generation, or its text. Its
`prompt` is the text that you gave, or the ids of a conversation. It decides what `model` is.

Legend: P ids of a prompt, K sampled ids of a reply, N replies.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rollouts.agent.records import turn_seed
from rollouts.author_code import shown
from rollouts.chat.format import chat_format
from rollouts.env.authoring import TOOL_MARK, mark_of
from rollouts.env.schema import tool_schema
from rollouts.errors import ConfigError, InferenceError
from rollouts.training.algorithms.algorithm import function_label
from rollouts.types import Message, Sample, Task, ToolCall
from rollouts_notes.primitives.calls import call_given
from rollouts_notes.primitives.types import Conversation, Generation, GenerationConfig, ModelConfig, Turn

if TYPE_CHECKING:
    from torch import Tensor

    from rollouts.inference.base import InferenceBackend

Prompt = str | Sequence[int] | Conversation | Sequence[Message] | Task
"""Text as the model is to see it, token ids, or a conversation or task, which the model's chat template renders."""

Generator = Callable[[Any, Any, Any, GenerationConfig], Generation | str]
ToolParser = Callable[..., Sequence[ToolCall] | tuple[Sequence[ToolCall], str]]
"""`tool_parser(text)` or `tool_parser(text, tools)`: the calls and the remaining text, or the calls alone."""

DEFAULT = GenerationConfig()
ANY_TOOL: list[dict[str, Any]] = [{}]  # formats without tags read calls only if tools were offered


# --- loading ----------------------------------------------------------------------------------------------------------


def load_model(config: ModelConfig | str, *, model_loader: Callable[[ModelConfig], Any] | None = None) -> Any:
    """Load a causal LM in evaluation mode, with its parameters trainable. `model_loader(config)` replaces this.

    Raises ModelError if the model cannot be loaded, and ConfigError for an unknown device.

    >>> load_model("tiny").config.vocab_size
    469
    """
    config = _model_config(config)
    if model_loader is not None:
        return model_loader(config)
    from rollouts.models.loading import load_hf_model, remote_code

    with remote_code(config.trust_remote_code):
        return load_hf_model(config.name, dtype=config.dtype, device=config.device)


def load_tokenizer(config: ModelConfig | str, *, tokenizer_loader: Callable[[ModelConfig], Any] | None = None) -> Any:
    """Load the tokenizer of a model. `tokenizer_loader(config)` replaces this. Raises ModelError.

    >>> load_tokenizer("tiny").eos_token
    '<|im_end|>'
    """
    config = _model_config(config)
    if tokenizer_loader is not None:
        return tokenizer_loader(config)
    from rollouts.models import loading as models

    with models.remote_code(config.trust_remote_code):
        return models.load_tokenizer(config.name)


def _model_config(config: ModelConfig | str) -> ModelConfig:
    if isinstance(config, ModelConfig):
        return config
    if not isinstance(config, str):
        raise ConfigError(f'expected a model\'s name or a ModelConfig, got {shown(config)}; write load_model("tiny")')
    return ModelConfig(config)


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

        _check_model(model)
        rows = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        return sample_replies(cast("InferenceBackend", HFInference(model)), tokenizer, rows, configs) if rows else []
    own = functools.partial(_from_generator, generator, model, tokenizer)
    if workers <= 1:
        return list(map(own, prompts, configs))
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(own, prompts, configs))


def _check_config(config: Any) -> None:
    """Raise ConfigError for settings that cannot be used."""
    if not isinstance(config, GenerationConfig):
        raise ConfigError(f"the config is {shown(config)}; expected a GenerationConfig, such as GenerationConfig(64)")
    for name, value, kinds, least in (
        ("max_tokens", config.max_tokens, int, 1),
        ("temperature", config.temperature, int | float, 0),
        ("seed", config.seed, int, -math.inf),
    ):
        if not isinstance(value, kinds) or not least <= value < math.inf:
            word = "an integer" if kinds is int else "a number"
            least_words = "" if least == -math.inf else f" of {least} or more"
            raise ConfigError(f"GenerationConfig({name}={shown(value)}): expected {word}{least_words}")
    _stop_texts(config)


def _check_model(model: Any) -> None:
    if not hasattr(model, "get_input_embeddings"):
        raise ConfigError(f'the model is {shown(model)}; expected a causal LM, such as load_model("tiny")')


def generate_with_logprobs(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    config: GenerationConfig = DEFAULT,
    *,
    generator: Generator | None = None,
    logprob_extractor: Callable[[Any, Generation], Any] | None = None,
) -> Generation:
    """Sample one reply whose logprobs [K] are known. Raises like `generate`, and ConfigError for a wrong number of
    logprobs.

    Without `logprob_extractor` they are the sampler's own. If a generator reports none, `model` computes them at the
    sampling temperature (`compute_logprobs`).

    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> reply = generate_with_logprobs(model, tokenizer, "2 + 3 =", generator=lambda *given: "5")
    >>> len(reply.logprobs) == len(reply.tokens) and max(reply.logprobs) <= 0
    True

    Args:
        logprob_extractor: `logprob_extractor(model, generation)` returns [K]
    """
    reply = generate(model, tokenizer, prompt, config, generator=generator)
    if logprob_extractor is None and reply.logprobs is not None:
        return reply
    return reply._replace(logprobs=extract_logprobs(model, reply, config.temperature, logprob_extractor).tolist())


def extract_logprobs(
    model: Any,
    generation: Generation,
    temperature: float | None,
    logprob_extractor: Callable[[Any, Generation], Any] | None,
) -> Tensor:
    """The logprobs [K] of a reply under `model`, by the extractor or by `compute_logprobs`, without gradient.

    Raises ConfigError if the extractor does not return K numbers.
    """
    import torch

    with torch.no_grad():
        if logprob_extractor is None:
            return compute_logprobs(model, [generation], temperature=temperature)[0]
        form = "logprob_extractor(model, generation)"
        found = torch.as_tensor(call_given(form, logprob_extractor, model, generation)).detach()
    if found.shape != (len(generation.tokens),):
        expected = f"[{len(generation.tokens)}], one number per sampled token"
        raise ConfigError(f"the logprob_extractor returned shape {list(found.shape)}; expected {expected}")
    return found


def compute_logprobs(
    model: Any, generations: Sequence[Generation], *, temperature: float | None = None
) -> list[Tensor]:
    """The logprobs of the sampled ids of each reply, N tensors [K], in one batch and with gradient.

    Prompts that several replies share run once. Use `torch.no_grad()` if you need no gradient. `temperature` None is
    that of the replies, and 0 counts as 1. Raises TrainingError if it is another one than theirs.

    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> reply = generate(model, tokenizer, "2 + 3 =", GenerationConfig(max_tokens=4))
    >>> logprobs = compute_logprobs(model, [reply])[0]
    >>> max(abs(a - b) for a, b in zip(logprobs.tolist(), reply.logprobs)) < 1e-4, logprobs.requires_grad
    (True, True)
    """
    import torch

    from rollouts_notes.primitives.batches import score_samples, temperature_of

    counts = [len(each.tokens) for each in generations]
    if not sum(counts):
        return [torch.zeros(0) for _ in generations]
    _check_model(model)
    samples = []
    groups: dict[tuple[int, ...], int] = {}
    for number, each in enumerate(generations):
        if not each.prompt_tokens:
            raise ConfigError(f"generation {number} has no prompt_tokens, so the model cannot predict its first token")
        group, start = groups.setdefault(tuple(each.prompt_tokens), len(groups)), len(each.prompt_tokens)
        tokens, mask = [*each.prompt_tokens, *each.tokens], [0.0] * start + [1.0] * len(each.tokens)
        samples.append(Sample("", "", tokens, mask, 0.0, group, rollout_index=number, prompt_length=start))
    return list(torch.split(score_samples(model, samples, temperature_of(generations, temperature))[0], counts))


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


def sample_replies(
    engine: InferenceBackend, tokenizer: Any, rows: Sequence[Sequence[int]], configs: Sequence[GenerationConfig]
) -> list[Generation]:
    """The replies of an engine to prompts [N] of ids, all in flight at the same time. The engine is closed.

    Raises ConfigError for settings that cannot be used and inside of trio, and InferenceError.
    """
    from rollouts.inference.base import GenerateRequest

    requests = []
    for row, config in zip(rows, configs, strict=True):
        _check_config(config)
        stop_ids = (*turn_ends(tokenizer), *_ids_with(tokenizer, _stop_texts(config)))
        requests.append(GenerateRequest(list(row), config.max_tokens, stop_ids, config.seed, config.temperature))
    replies = run_sync(_sample, engine, requests)
    return [_generation(tokenizer, *each) for each in zip(rows, replies, configs, strict=True)]


async def _sample(engine: InferenceBackend, requests: Sequence[Any]) -> list[Any]:
    import trio

    replies: list[Any] = [None] * len(requests)

    async def reply(place: int, session: str) -> None:
        request = requests[place]
        room = engine.context_tokens_max - len(request.tokens)
        try:
            if room < 1:
                most = f"the model's context holds {engine.context_tokens_max}"
                raise InferenceError(f"the prompt has {len(request.tokens)} tokens, and {most}")
            limit = min(request.max_tokens, room)
            replies[place] = await engine.generate(
                msgspec.structs.replace(request, max_tokens=limit, session=session, order=(place,))
            )
        except InferenceError as error:
            replies[place] = error
        finally:
            engine.close_session(session)

    async with engine:
        sessions = [engine.open_session((place,)) for place in range(len(requests))]
        async with trio.open_nursery() as nursery:
            for place, session in enumerate(sessions):
                nursery.start_soon(reply, place, session)
    for each in replies:
        if isinstance(each, InferenceError):
            raise each
    return replies


def _generation(tokenizer: Any, row: Sequence[int], reply: Any, config: GenerationConfig) -> Generation:
    """The reply, cut after the first stop text."""
    tokens, finish = list(reply.tokens), reply.finish
    for size in range(1, len(tokens) + 1) if config.stop else ():
        text = tokenizer.decode(tokens[:size])
        if any(stop in text for stop in _stop_texts(config)):
            tokens, finish = tokens[:size], "stop"
            break
    ends = turn_ends(tokenizer)
    body = tokens[:-1] if tokens and tokens[-1] in ends else tokens
    known = reply.logprobs[: len(tokens)]
    return Generation(tokenizer.decode(body), tokens, known, finish, list(row), config.temperature)


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
    import trio

    if trio.lowlevel.in_trio_run():
        raise ConfigError(
            "this function waits for its result, so trio cannot call it; write "
            "`await trio.to_thread.run_sync(functools.partial(generate, ...))`"
        )
    return trio.run(function, *args)


# --- prompts and conversations ----------------------------------------------------------------------------------------


def turn_ends(tokenizer: Any) -> tuple[int, ...]:
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
    messages, tools = (prompt.messages, prompt.tools) if isinstance(prompt, Conversation) else (prompt, ())
    try:
        given = [each if isinstance(each, Message) else msgspec.convert(each, Message) for each in messages]
    except (msgspec.ValidationError, TypeError) as error:
        expected = 'expected messages, such as [Message("user", "Hello")]'
        raise ConfigError(f"{shown(messages)} is no conversation ({error}); {expected}") from error
    if not given:
        raise ConfigError('the conversation has no messages; give one or more, such as [Message("user", "Hello")]')
    return Conversation(given, tools)


def schemas_of(tools: Sequence[Callable[..., Any] | dict[str, Any]]) -> list[dict[str, Any]]:
    """The OpenAI schemas of tools. Raises EnvironmentDefinitionError if a function has no readable type hints."""
    return [each if isinstance(each, dict) else tool_schema(each, tool_name(each)) for each in tools]


def tool_name(tool: Callable[..., Any]) -> str:
    """The name that the model sees: that of `@tool(name=...)`, or the function's. Raises ConfigError."""
    if not callable(tool):
        raise ConfigError(f"the tool {shown(tool)} is no function; give functions with type hints, or OpenAI schemas")
    mark = mark_of(tool, TOOL_MARK)
    return str((mark and mark[0]) or getattr(tool, "__name__", type(tool).__name__))


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
        ids = list(prompt)
    else:
        conversation = prompt_conversation(prompt)
        ids = chat_format(tokenizer).encode_prompt(list(conversation.messages), schemas_of(conversation.tools))
    if not ids:
        raise ConfigError("the prompt is empty; give it at least one token")
    return list(ids)


def apply_chat_template(
    tokenizer: Any,
    prompt: Prompt,
    *,
    template_fn: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str] | None = None,
) -> str:
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
    template_fn: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str] | None = None,
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
            does. It may return the calls alone, as those of tools.py do
        previous: the last turn's reply. Its ids are continued exactly as they were sampled, if the template allows it
    """
    prompt = turn_prompt(tokenizer, conversation, template_fn=template_fn, previous=previous)
    reply = generate(model, tokenizer, prompt, config, generator=generator)
    return read_turn(tokenizer, conversation, reply, template_fn=template_fn, tool_parser=tool_parser)


def turn_prompt(
    tokenizer: Any,
    conversation: Conversation,
    *,
    template_fn: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str] | None = None,
    previous: Generation | None = None,
) -> Prompt:
    """The prompt of the next turn of a conversation (see `generate_conversation_turn`)."""
    conversation = prompt_conversation(conversation)
    if template_fn is not None:
        return apply_chat_template(tokenizer, conversation, template_fn=template_fn)
    messages, schemas = list(conversation.messages), schemas_of(conversation.tools)
    continued = None if previous is None else _continued(tokenizer, messages, schemas, previous)
    return continued or encode_prompt(tokenizer, conversation)


def read_turn(
    tokenizer: Any,
    conversation: Conversation,
    reply: Generation,
    *,
    template_fn: Callable[[Sequence[Message], Sequence[dict[str, Any]]], str] | None = None,
    tool_parser: ToolParser | None = None,
) -> Turn:
    """The conversation with this reply to it (see `generate_conversation_turn`)."""
    conversation = prompt_conversation(conversation)
    message, calls = Message("assistant", reply.text), []
    if template_fn is None:
        message = chat_format(tokenizer).parse(reply.tokens, schemas_of(conversation.tools))
        calls = message.tool_calls
    if tool_parser is not None:
        read = parse_calls(tool_parser, reply.text, schemas_of(conversation.tools))
        if [(each.name, each.arguments, each.error) for each in read] != [
            (each.name, each.arguments, each.error) for each in calls
        ]:
            message, calls = Message("assistant", reply.text), read
    return Turn(conversation._replace(messages=[*conversation.messages, message]), reply, calls)


def parse_calls(tool_parser: ToolParser, text: str, tools: Sequence[dict[str, Any]] = ANY_TOOL) -> list[ToolCall]:
    """The calls that a tool parser finds. `tools` are the schemas of the offered tools, for a parser that names them.

    Raises ConfigError if it returns anything else.
    """
    if _names_tools(tool_parser):
        calls: Any = call_given("tool_parser(text, tools)", tool_parser, text, list(tools))
    else:
        calls = call_given("tool_parser(text)", tool_parser, text)
    if isinstance(calls, tuple) and len(calls) == 2 and isinstance(calls[1], str):
        calls = calls[0]
    if not isinstance(calls, Sequence) or not all(isinstance(each, ToolCall) for each in calls):
        raise ConfigError(
            f"the tool_parser {function_label(tool_parser)} returned {shown(calls)}; expected a list of ToolCall "
            "and the remaining text, or the list alone"
        )
    return list(calls)


def _names_tools(tool_parser: ToolParser) -> bool:
    try:
        return "tools" in inspect.signature(tool_parser).parameters
    except (TypeError, ValueError):  # a builtin may have no readable signature
        return False


def _continued(
    tokenizer: Any, messages: list[Message], schemas: list[dict[str, Any]], previous: Generation
) -> list[int] | None:
    """The ids of the conversation behind the last reply as it was sampled; None if the template rewrites it."""
    at = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=len(messages))
    if not messages[at + 1 :] or not previous.prompt_tokens:
        return None
    sampled = list(previous.tokens)
    new = chat_format(tokenizer).extend(messages[:at], messages[at], messages[at + 1 :], schemas, sampled)
    return None if new is None else [*previous.prompt_tokens, *sampled, *new]
