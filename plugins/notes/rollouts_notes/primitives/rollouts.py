"""Rollouts: sample replies or whole conversations, run tools, and reward; what a model gives to sampled ids.

    rollout = create_rollout(model, tokenizer, Task("What is 2 + 3?", answer=5), config, reward_fn=reward)
    rollouts = create_batch_rollouts(model, tokenizer, tasks, config, samples_per_prompt=8, reward_fn=reward)
    batch = create_batch(model, rollouts)

A text or a list of ids gets one reply. A conversation (Conversation, messages, Task) goes on while the model calls
tools: the calls are run, their results are added, and the model replies again. All conversations of a batch take their
turns together, so that each turn is one batch for the model. What a rollout keeps are the ids as they were sampled.

Prompts and tool results are context: they are run, and have no position in a batch. What is scored is what was sampled;
no text is encoded again.

The estimators of the KL are the engine's (`rollouts.training.algorithms.kl`). They take logprobs of tokens that the
policy sampled, and average to the KL. A *KL function* `kl_fn(logprobs, ref_logprobs)` takes two tensors [K] and returns
one value per token [K], or one number. A custom one is used instead of the estimator.

Legend: N rollouts, G of one prompt, T sampled ids of all of them, K of a reply; p the policy's probability of a token,
q the reference's.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections import Counter, abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rollouts.agent.records import turn_seed
from rollouts.author_code import shown
from rollouts.errors import ConfigError, TrainingError
from rollouts.training.algorithms import kl as engine
from rollouts.training.algorithms.algorithm import function_label
from rollouts.training.algorithms.losses import check_setting
from rollouts.training.batching import make_batch
from rollouts.types import Message, Sample, Status, Task, ToolCall
from rollouts_notes.primitives.generation import (
    DEFAULT,
    Generator,
    Prompt,
    TemplateFn,
    ToolExecutor,
    ToolParser,
    Tools,
    batch_generate,
    call_given,
    check_model,
    execute_tools,
    extract_tool_calls,
    generate,
    prompt_conversation,
    read_turn,
    turn_prompt,
)
from rollouts_notes.primitives.types import Batch, Conversation, Generation, GenerationConfig, Rollout
from rollouts_notes.primitives.utilities import Aggregator, RewardFns, compute_batch_rewards, reward_of

if TYPE_CHECKING:
    from torch import Tensor

Metadata = Mapping[str, Any]
ToolTracker = Callable[[Rollout], Metadata]
StopCondition = Callable[[Conversation], bool]
ReplyFn = Callable[[Conversation], "str | Message | None"]
KLFn = Callable[[Any, Any], Any]
UpdateFn = Callable[..., Any]
LogprobExtractor = Callable[[Any, Generation], Any]
LogprobsLike = Sequence[float] | Any
"""[K]: a tensor or a list."""


# --- rollouts ---------------------------------------------------------------------------------------------------------


def create_rollout(
    model: Any, tokenizer: Any, prompt: Prompt, gen_config: GenerationConfig = DEFAULT, **options: Any
) -> Rollout:
    """One reply to a prompt, with its reward, its KL and its tool calls. The calls run if there is a `tool_executor`.

    `options` are those of `create_batch_rollouts`, such as `ref_model`, `reward_fn` and `tool_parser`, with one mapping
    as `metadata`. Raises like it.

    >>> from rollouts.primitives import load_model, load_tokenizer
    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> rollout = create_rollout(
    ...     model, tokenizer, "2 + 3 =", GenerationConfig(max_tokens=8), ref_model=model,
    ...     reward_fn=lambda rollout: len(rollout.generation.tokens),
    ... )
    >>> rollout.rewards == len(rollout.generation.tokens), round(rollout.kl_divergence, 4)
    (True, 0.0)
    """
    options["metadata"] = [options.get("metadata") or {}]
    return create_batch_rollouts(model, tokenizer, [prompt], gen_config._replace(max_turns=1), **options)[0]


def create_multiturn_rollout(
    model: Any, tokenizer: Any, conversation: Prompt, gen_config: GenerationConfig = DEFAULT, **options: Any
) -> Rollout:
    """One conversation: the model replies, its tool calls run, and it replies again.

    It ends after a reply without tool calls, after `gen_config.max_turns` replies, if a reply reaches `max_tokens`, or
    if the model's context is full. The trained ids are those of all replies; tool results are context. A text counts as
    the user's message. `options` are those of `create_rollout`. Raises like it.

    >>> from rollouts.primitives import Conversation, create_scripted_generator, load_tokenizer
    >>> def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> script = ['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "The sum is 5. DONE"]
    >>> rollout = create_multiturn_rollout(
    ...     None, load_tokenizer("tiny"), Conversation([Message("user", "2 + 3?")], [add]),
    ...     generator=create_scripted_generator(script),
    ...     stop_condition=lambda conversation: "DONE" in conversation.messages[-1].content,
    ... )
    >>> [message.role for message in rollout.conversation.messages], rollout.conversation.messages[2].content
    (['user', 'assistant', 'tool', 'assistant'], '5')
    """
    given = prompt_conversation(conversation) if isinstance(conversation, str) else conversation
    options["metadata"] = [options.get("metadata") or {}]
    return create_batch_rollouts(model, tokenizer, [given], gen_config, **options)[0]


def create_batch_rollouts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    gen_config: GenerationConfig = DEFAULT,
    *,
    samples_per_prompt: int = 1,
    stop_condition: StopCondition | None = None,
    reply_fn: ReplyFn | None = None,
    ref_model: Any = None,
    reward_fn: RewardFns | None = None,
    aggregator: Aggregator | None = None,
    tools: Tools = (),
    tool_parser: ToolParser | None = None,
    tool_executor: ToolExecutor | None = None,
    tool_tracker: ToolTracker | None = None,
    generator: Generator | None = None,
    template_fn: TemplateFn | None = None,
    kl_fn: KLFn | None = None,
    metadata: Sequence[Metadata] = (),
) -> list[Rollout]:
    """`samples_per_prompt` rollouts of each prompt, those of one prompt side by side.

    A conversation has several turns if the model calls tools, as in `create_multiturn_rollout`. Raises ConfigError for
    wrong arguments, RewardError if a reward function fails, and InferenceError if the model does.

    >>> from rollouts.primitives import create_scripted_generator, load_tokenizer
    >>> rollouts = create_batch_rollouts(
    ...     None, load_tokenizer("tiny"), ["2 + 3 =", "2 + 4 ="], samples_per_prompt=2,
    ...     metadata=[{"sum": 5}, {"sum": 6}], generator=create_scripted_generator(["5", "6", "5", "6"]),
    ...     reward_fn=lambda rollout: rollout.generation.text == str(rollout.metadata["sum"]),
    ... )
    >>> [(rollout.prompt, rollout.rewards) for rollout in rollouts]
    [('2 + 3 =', 1.0), ('2 + 3 =', 0.0), ('2 + 4 =', 0.0), ('2 + 4 =', 1.0)]

    Args:
        stop_condition: `stop_condition(conversation)` ends the conversation; asked after each message
        reply_fn: `reply_fn(conversation)` answers a reply without tool calls: a text, a Message, or None to end
        ref_model: the reference of the KL
        reward_fn: `reward_fn(rollout)`, or several functions (see `compute_batch_rewards`)
        aggregator: `aggregator(vector)` makes one reward of several
        tools: functions or schemas that the model may call, for a conversation without its own
        tool_parser: `tool_parser(text)` reads the tool calls of a reply, as in `generate_conversation_turn`
        tool_executor: `tool_executor(tool_calls, tools)` returns a result for each call
        tool_tracker: `tool_tracker(rollout)` returns what is added to `metadata`
        generator: samples instead of the model (see `generate`)
        template_fn: `template_fn(messages, tools)` renders a conversation
        kl_fn: `kl_fn(logprobs, ref_logprobs)` replaces the KL
        metadata: one mapping for each prompt, added to the answer and the info of a Task
    """
    if isinstance(prompts, str | Conversation) or not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts is {type(prompts).__name__}; expected a list of prompts, such as [prompt]")
    if samples_per_prompt < 1 or (metadata and len(metadata) != len(prompts)):
        given = f"{len(prompts)} prompts, {len(metadata)} metadata and samples_per_prompt={samples_per_prompt}"
        raise ConfigError(f"{given}; give one mapping of metadata for each prompt, and 1 or more samples")
    if gen_config.max_turns < 1:
        raise ConfigError(f"max_turns is {gen_config.max_turns}; expected 1 or more replies")
    answers = _Answers(tool_parser, tool_executor, stop_condition, reply_fn, template_fn)
    play = functools.partial(_play, tools=tools, tokenizer=tokenizer, max_turns=gen_config.max_turns, answers=answers)
    pairs = list(zip(prompts, metadata or [{}] * len(prompts), strict=True))
    plays = [play(*pair) for pair in pairs for _ in range(samples_per_prompt)]
    rollouts = _play_all(plays, model, tokenizer, gen_config, generator)
    tracks = tool_parser is not None or tool_tracker is not None
    rollouts = [_tracked(each, tool_parser, tool_tracker) if tracks or each.tool_calls else each for each in rollouts]
    if ref_model is not None and rollouts:
        known = sampled_logprobs(ref_model, rollouts)
        rollouts = [each._replace(ref_logprobs=ref) for each, ref in zip(rollouts, known, strict=True)]
        divergences = compute_batch_kl(rollouts, kl_fn=kl_fn)
        rollouts = [each._replace(kl_divergence=kl) for each, kl in zip(rollouts, divergences, strict=True)]
    return rollouts if reward_fn is None else compute_batch_rewards(rollouts, reward_fn, aggregator=aggregator)


# --- tool calls -------------------------------------------------------------------------------------------------------


def track_tool_calls(
    rollout: Rollout, *, tool_parser: ToolParser | None = None, tool_tracker: ToolTracker | None = None
) -> Rollout:
    """The rollout with the `tool_calls` of all its replies, and what `tool_tracker(rollout)` adds to its `metadata`.

    Without a tracker, `metadata["tool_counts"]` counts the calls of each tool. Raises ConfigError if parser or tracker
    return something else.

    >>> reply = Generation('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>')
    >>> track_tool_calls(Rollout("2 + 3?", reply)).metadata
    {'tool_counts': {'add': 1}}
    """
    return _tracked(rollout._replace(tool_calls=()), tool_parser, tool_tracker)


def execute_and_track_tools(
    rollout: Rollout,
    tools: Tools = (),
    *,
    tool_parser: ToolParser | None = None,
    tool_executor: ToolExecutor | None = None,
    tool_tracker: ToolTracker | None = None,
) -> Rollout:
    """Run the tool calls of the last reply, and add the results to the rollout's conversation. Then track all calls.

    Without a conversation, one begins with the prompt and the reply. Raises ConfigError like `execute_tools`.

    >>> def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> reply = Generation('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>')
    >>> rollout = execute_and_track_tools(Rollout("2 + 3?", reply), [add])
    >>> rollout.conversation.messages[-1].content, rollout.metadata
    ('5', {'tool_counts': {'add': 1}})
    """
    conversation, calls = rollout.conversation, extract_tool_calls(rollout.generation, tool_parser=tool_parser)
    if conversation is None:
        prompt = prompt_conversation(rollout.prompt).messages
        conversation = Conversation([*prompt, Message("assistant", rollout.generation.text)], tools)
    results = execute_tools(calls, tools or conversation.tools, tool_executor=tool_executor) if calls else []
    conversation = conversation._replace(messages=[*conversation.messages, *results])
    return _tracked(rollout._replace(conversation=conversation, tool_calls=()), tool_parser, tool_tracker)


def _tracked(rollout: Rollout, tool_parser: ToolParser | None, tool_tracker: ToolTracker | None) -> Rollout:
    """The rollout with its tool calls, or those in its replies if it has none, and what the tracker adds."""
    read = (extract_tool_calls(turn, tool_parser=tool_parser) for turn in rollout.all_turns)
    rollout = rollout._replace(tool_calls=rollout.tool_calls or [call for turn in read for call in turn])
    found: Any = call_given("tool_tracker(rollout)", tool_tracker or _tool_counts, rollout)
    if not isinstance(found, Mapping):
        raise ConfigError(f"the tool_tracker returned {shown(found)}; expected a dict, which is added to the metadata")
    return rollout._replace(metadata={**rollout.metadata, **found})


def _tool_counts(rollout: Rollout) -> dict[str, Any]:
    return {"tool_counts": dict(Counter(call.name for call in rollout.tool_calls))}


# --- turns ------------------------------------------------------------------------------------------------------------


class _Answers(NamedTuple):
    """The functions with which a conversation goes on."""

    tool_parser: ToolParser | None
    tool_executor: ToolExecutor | None
    stop_condition: StopCondition | None
    reply_fn: ReplyFn | None
    template_fn: TemplateFn | None

    def stop(self, conversation: Conversation) -> bool:
        """Whether the conversation ends here."""
        function = self.stop_condition
        return function is not None and bool(call_given("stop_condition(conversation)", function, conversation))

    def messages(self, conversation: Conversation, calls: Sequence[ToolCall]) -> list[Message]:
        """What is said to the model's reply: the results of its tool calls, or the reply of `reply_fn`."""
        if calls:
            return execute_tools(calls, conversation.tools, tool_executor=self.tool_executor)
        if self.reply_fn is None:
            return []
        said: Any = call_given("reply_fn(conversation)", self.reply_fn, conversation)
        if said is not None and not isinstance(said, str | Message):
            raise ConfigError(f"the reply_fn returned {shown(said)}; expected text, a Message, or None to end")
        return [] if said is None else [Message("user", said) if isinstance(said, str) else said]


Playing = abc.Generator[Prompt, "Generation | None", Rollout]
"""A rollout while it is sampled: it yields the prompt of each turn, and is sent the reply, or None if the prompt fills
the model's context.
"""


def _play(
    prompt: Any, metadata: Metadata, *, tools: Tools, tokenizer: Any, max_turns: int, answers: _Answers
) -> Playing:
    """Play one rollout. A text or ids get one reply, anything else is a conversation."""
    is_ids = not isinstance(prompt, str | Conversation | Task) and all(isinstance(each, int) for each in prompt)
    if isinstance(prompt, str) or is_ids:
        reply = yield prompt
        assert reply is not None, "only later turns can fill the context"
        return Rollout(prompt, reply, metadata={**metadata})
    conversation = prompt_conversation(prompt)
    conversation = conversation._replace(tools=conversation.tools or tools)
    if isinstance(prompt, Task):
        prompt, metadata = prompt.prompt, {"answer": prompt.answer, **prompt.info, **metadata}
    turns: list[Generation] = []
    tool_calls: list[ToolCall] = []
    template_fn, previous = answers.template_fn, None
    for turn in range(max_turns):
        reply = yield turn_prompt(tokenizer, conversation, template_fn=template_fn, previous=previous)
        if reply is None:
            turns[-1] = turns[-1]._replace(finish_reason="length")
            break
        previous = reply
        turns.append(reply)
        conversation, _, calls = read_turn(
            tokenizer, conversation, reply, template_fn=template_fn, tool_parser=answers.tool_parser
        )
        tool_calls += calls
        # After the last reply, tools only run for `create_rollout`, whose only reply is the last one.
        is_last = turn == max_turns - 1 and (turn > 0 or answers.tool_executor is None)
        if reply.finish_reason == "length" or answers.stop(conversation) or is_last:
            break
        added = answers.messages(conversation, calls)
        conversation = conversation._replace(messages=[*conversation.messages, *added])
        if not added or answers.stop(conversation):
            break
    messages, several = prompt.messages if isinstance(prompt, Conversation) else prompt, turns if turns[1:] else ()
    return Rollout(messages, turns[-1], None, None, None, conversation, tool_calls, {**metadata}, several)


def _play_all(
    plays: Sequence[Playing], model: Any, tokenizer: Any, config: GenerationConfig, generator: Generator | None
) -> list[Rollout]:
    """Play all rollouts to their ends, one turn of all of them at a time."""
    from rollouts.inference.embedded.hf import context_tokens_max

    most = None if generator is not None else context_tokens_max(model)
    done: dict[int, Rollout] = {}
    prompts, turn = {place: next(play) for place, play in enumerate(plays)}, 0
    while prompts:
        full = {n for n, each in prompts.items() if turn and most and isinstance(each, list) and len(each) >= most}
        fitting = [place for place in prompts if place not in full]
        seeded = config._replace(seed=turn_seed(config.seed, 0, 0, 0, turn)) if turn else config
        asked = [prompts[place] for place in fitting]
        replies = dict(zip(fitting, batch_generate(model, tokenizer, asked, seeded, generator=generator), strict=True))
        for place in list(prompts):
            try:
                prompts[place] = plays[place].send(replies.get(place))
            except StopIteration as ended:
                done[place] = ended.value
                del prompts[place]
        turn += 1
    return [done[place] for place in range(len(plays))]


# --- logprobs ---------------------------------------------------------------------------------------------------------


def generate_with_logprobs(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    config: GenerationConfig = DEFAULT,
    *,
    generator: Generator | None = None,
    logprob_extractor: LogprobExtractor | None = None,
) -> Generation:
    """Sample one reply whose logprobs [K] are known. Raises like `generate`, and ConfigError for a wrong number of
    logprobs.

    Without `logprob_extractor` they are the sampler's own. If a generator reports none, `model` computes them at the
    sampling temperature (`compute_logprobs`).

    >>> from rollouts.primitives import load_model, load_tokenizer
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
    own: dict[str, Any] = {"temperature": config.temperature, "logprob_extractor": logprob_extractor}
    return reply._replace(logprobs=get_reference_logprobs(model, reply, **own).tolist())


def get_reference_logprobs(
    ref_model: Any,
    generation: Generation,
    *,
    temperature: float | None = None,
    logprob_extractor: LogprobExtractor | None = None,
) -> Tensor:
    """The reference's logprobs of a reply's sampled ids [K], without gradient.

    The temperature is that of the reply, so that both are comparable. Raises TrainingError for another one, and
    ConfigError if the extractor does not return K numbers.

    >>> get_reference_logprobs(None, Generation("5", [9]), logprob_extractor=lambda ref_model, generation: [-1.0])
    tensor([-1.])

    Args:
        logprob_extractor: `logprob_extractor(ref_model, generation)` returns [K]; None: `compute_logprobs`
    """
    import torch

    with torch.no_grad():
        if logprob_extractor is None:
            return compute_logprobs(ref_model, [generation], temperature=temperature)[0]
        form = "logprob_extractor(model, generation)"
        found = torch.as_tensor(call_given(form, logprob_extractor, ref_model, generation)).detach()
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

    >>> from rollouts.primitives import load_model, load_tokenizer
    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> reply = generate(model, tokenizer, "2 + 3 =", GenerationConfig(max_tokens=4))
    >>> logprobs = compute_logprobs(model, [reply])[0]
    >>> max(abs(a - b) for a, b in zip(logprobs.tolist(), reply.logprobs)) < 1e-4, logprobs.requires_grad
    (True, True)
    """
    import torch

    counts = [len(each.tokens) for each in generations]
    if not sum(counts):
        return [torch.zeros(0) for _ in generations]
    check_model(model)
    for number, each in enumerate(generations):
        if not each.prompt_tokens:
            raise ConfigError(f"generation {number} has no prompt_tokens, so the model cannot predict its first token")
    # Replies to equal ids are a group, whose prompt runs once.
    replies = [Rollout(str(list(e.prompt_tokens)), e._replace(logprobs=None)) for e in generations if e.tokens]
    return list(torch.split(_scored(model, replies, temperature)[0], counts))


def sampled_logprobs(model: Any, rollouts: Sequence[Rollout]) -> list[list[float]]:
    """The model's logprobs of the sampled ids of each rollout, all turns in order, without gradient."""
    import torch

    with torch.no_grad():
        logprobs, _ = _scored(model, rollouts, None)
    counts = [sum(len(turn.tokens) for turn in rollout.all_turns) for rollout in rollouts]
    return [each.tolist() for each in torch.split(logprobs, counts)]


def _scored(model: Any, rollouts: Sequence[Rollout], temperature: float | None) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy [T] of the sampled ids, in the order of the rollouts, as the engine's backends compute them.

    Shared prompts run once. The model runs in evaluation mode, without dropout.
    """
    from rollouts.training.backends.forward import Models
    from rollouts.training.backends.transformer import inspect_model

    temperature = temperature_of([turn for rollout in rollouts for turn in rollout.all_turns], temperature)
    samples = [replace(s, reward=0.0, rollout_log_probs=None) for s in rollout_samples(rollouts)]
    rows = make_batch(samples, [0.0] * len(rollouts), aggregation="token_mean", step=0).rows
    was_training = model.training
    model.eval()
    try:
        models = Models(inspect_model(model), None, None)
        inputs = models.inputs(rows)
        assert inputs is not None, "a rollout has sampled tokens"
        with models.attending():
            scored = models.score(inputs, temperature, frozenset())
    finally:
        model.train(was_training)
    return scored.logprobs, scored.entropy


def temperature_of(replies: Iterable[Generation], given: float | None) -> float:
    """The sampling temperature of replies, `given` or known; 1 for a greedy or an unknown one.

    Raises TrainingError if two differ: logprobs of different temperatures cannot be compared.

    >>> temperature_of([Generation("4", temperature=0.5), Generation("5")], None)
    0.5
    """
    known = {each or 1.0 for each in (*(reply.temperature for reply in replies), given) if each is not None}
    if len(known) > 1:
        listed = " and ".join(f"{each:g}" for each in sorted(known))
        raise TrainingError(
            f"replies were sampled at one temperature and are used at another one: {listed}; leave `temperature` out, "
            "and train replies of different temperatures in calls of their own"
        )
    return known.pop() if known else 1.0


# --- rollouts as samples and tensors ----------------------------------------------------------------------------------


def group_numbers(rollouts: Sequence[Rollout]) -> list[int]:
    """The group [N] of each rollout, numbered from 0 in the order of their first rollouts.

    >>> reply = Generation("Hello")
    >>> group_numbers([Rollout("Hi", reply), Rollout("Hello", reply), Rollout("Hi", reply)])
    [0, 1, 0]
    """
    numbers: dict[Any, int] = {}
    keys = [repr(each.prompt) if each.group_index is None else each.group_index for each in rollouts]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def rollout_samples(rollouts: Sequence[Rollout]) -> list[Sample]:
    """The engine's samples of rollouts, one for each segment: `tokens`, and a `loss_mask` with 1.0 at sampled ids.

    A turn continues the segment of the turn before it if its prompt begins with that segment. Otherwise, a new segment
    starts. Raises TrainingError if a rollout has no sampled ids.
    """
    samples: list[Sample] = []
    for number, (rollout, group) in enumerate(zip(rollouts, group_numbers(rollouts), strict=True)):
        first = len(samples)
        for place, turn in enumerate(rollout.all_turns):
            prompt, which = list(turn.prompt_tokens), f"turn {place} of rollout {number} has"
            known = [math.nan] * len(turn.tokens) if turn.logprobs is None else [min(p, 0.0) for p in turn.logprobs]
            if not turn.tokens or not prompt or len(known) != len(turn.tokens):
                given = f"{len(prompt)} prompt ids and {len(turn.tokens)} sampled ids with {len(known)} logprobs"
                expected = "return Generation(text, tokens, logprobs or None, prompt_tokens=...) from the generator"
                raise TrainingError(f"{which} {given}, so it cannot be trained; {expected}")
            if samples[first:] and samples[-1].tokens == prompt[: len(samples[-1].tokens)]:
                prompt = prompt[len(samples[-1].tokens) :]
            else:
                sample = Sample(reward=reward_of(rollout), group_index=group, rollout_index=number)
                sample.status = Status.TRUNCATED if rollout.is_cut_off else Status.COMPLETED
                sample.prompt_length = 0 if samples[first:] else len(prompt)
                samples.append(sample)
            sample = samples[-1]
            sample.tokens += [*prompt, *turn.tokens]
            sample.loss_mask += [0.0] * len(prompt) + [1.0] * len(turn.tokens)
            sample.rollout_log_probs = [*(sample.rollout_log_probs or ()), *([0.0] * len(prompt)), *known]
    return samples


def create_batch(
    model: Any, rollouts: Sequence[Rollout], *, temperature: float | None = None, train_truncated: bool = False
) -> Batch:
    """Rollouts as tensors, with the policy's logprobs of all sampled ids, which have a gradient.

    They are those of the sampling `temperature`; None: that of the rollouts. `model` None leaves out logprobs and
    entropy, which advantages do not need. A rollout without a reward is not
    trained; one whose last reply was cut off is only trained if `train_truncated`. Raises TrainingError for no
    rollouts, for a rollout without ids, and if a rollout has ids and logprobs of different lengths or another
    temperature.

    >>> reply = Generation("4", tokens=[7, 2], logprobs=[-0.5, -0.25], prompt_tokens=[1, 3])
    >>> batch = create_batch(None, [Rollout("2 + 2", reply, rewards=1.0), Rollout("2 + 2", reply, rewards=0.0)])
    >>> batch.old_logprobs.tolist(), batch.rollout_index.tolist(), batch.rewards.tolist()
    ([-0.5, -0.25, -0.5, -0.25], [0, 0, 1, 1], [1.0, 0.0])
    """
    import torch

    if not rollouts:
        raise TrainingError("there are no rollouts to train; give one or more")
    if not all(isinstance(each, Rollout) for each in rollouts):
        raise ConfigError(f"expected a list of rollouts, got {shown(rollouts)}; create_batch_rollouts returns one")
    samples, rewards = rollout_samples(rollouts), [reward_of(each) for each in rollouts]
    places = [(sample, at) for sample in samples for at, weight in enumerate(sample.loss_mask) if weight > 0]
    trained = [
        float(reward is not None and (train_truncated or not rollout.is_cut_off))
        for reward, rollout in zip(rewards, rollouts, strict=True)
    ]
    numbers: dict[str, Any] = {
        "old_logprobs": [(sample.rollout_log_probs or [])[at] for sample, at in places],
        "mask": [trained[sample.rollout_index or 0] for sample, _ in places],
        "rollout_index": [sample.rollout_index for sample, _ in places],
        "group_index": [sample.group_index for sample, _ in places],
        "tokens": [sample.tokens[at] for sample, at in places],
    }
    if all(each.ref_logprobs is not None for each in rollouts):
        numbers["ref_logprobs"] = known = [p for each in rollouts for p in each.ref_logprobs or ()]
        if len(known) != len(places):
            given = f"{len(places)} sampled ids and {len(known)} ref_logprobs"
            raise TrainingError(f"the rollouts have {given}; a reference gives one for each")
    tensors: dict[str, Any] = {name: torch.tensor(values) for name, values in numbers.items()}
    values = [math.nan if reward is None else reward for reward in rewards]
    batch = Batch(list(rollouts), None, rewards=torch.tensor(values, dtype=torch.float64), **tensors)
    if model is None:
        return batch
    logprobs, entropy = _scored(model, rollouts, temperature)
    batch = to_device(batch, logprobs.device)
    old = torch.where(batch.old_logprobs.isnan(), logprobs.detach(), batch.old_logprobs)
    return batch._replace(logprobs=logprobs, entropy=entropy, old_logprobs=old)


def to_device(batch: Batch, device: Any) -> Batch:
    """The batch with its tensors on this device, with float32 rewards on one without float64 (mps)."""
    import torch

    if torch.device(device).type == "mps":
        batch = batch._replace(rewards=batch.rewards.float())
    return Batch._make(each.to(device) if isinstance(each, torch.Tensor) else each for each in batch)


def ids_at(batch: Batch, chosen: Tensor) -> Batch:
    """The batch with the ids at the positions `chosen` only. Rollouts and rewards stay."""
    fields = batch._asdict()
    del fields["rollouts"], fields["rewards"]
    return batch._replace(**{name: value[chosen] for name, value in fields.items() if value is not None})


# --- the KL -----------------------------------------------------------------------------------------------------------


def compute_forward_kl(
    logprobs: LogprobsLike, ref_logprobs: LogprobsLike, *, kl_fn: KLFn | None = None, mask: LogprobsLike | None = None
) -> Tensor:
    """KL(reference || policy), in nats per token: the mean of (q/p) log(q/p) - q/p + 1 over the tokens. A scalar tensor
    with gradient.

    Raises ConfigError if the shapes differ, or if `kl_fn` returns another shape.

    >>> round(float(compute_forward_kl([-1.0, -2.0], [-1.1, -1.5])), 4)
    0.0902
    >>> compute_forward_kl([-1.0], [-2.0], kl_fn=lambda logprobs, ref_logprobs: logprobs - ref_logprobs)
    tensor(1.)

    Args:
        mask: [K], the weight of each token in the mean; None: all count
    """
    return _mean(kl_fn or _forward, logprobs, ref_logprobs, mask)


def compute_reverse_kl(
    logprobs: LogprobsLike, ref_logprobs: LogprobsLike, *, kl_fn: KLFn | None = None, mask: LogprobsLike | None = None
) -> Tensor:
    """KL(policy || reference), in nats per token: the mean of q/p - 1 - log(q/p) over the tokens. A scalar tensor with
    the gradient of the reverse KL. Arguments and errors are those of `compute_forward_kl`.

    >>> round(float(compute_reverse_kl([-1.0, -2.0], [-1.1, -1.5])), 4)
    0.0768
    """
    return _mean(kl_fn or _reverse, logprobs, ref_logprobs, mask)


def compute_per_token_kl(logprobs: LogprobsLike, ref_logprobs: LogprobsLike, *, kl_fn: KLFn | None = None) -> Tensor:
    """The KL of each token [K], never negative: q/p - 1 - log(q/p), or what `kl_fn` returns. Raises ConfigError.

    >>> [round(each, 3) for each in compute_per_token_kl([-1.0, -2.0], [-1.1, -1.5]).tolist()]
    [0.005, 0.149]
    """
    values = _values(kl_fn or _reverse, logprobs, ref_logprobs)
    if values.dim() == 0:
        raise ConfigError(f"the kl_fn {function_label(kl_fn)} returned one number; expected one per token")
    return values


def compute_batch_kl(rollouts: Sequence[Rollout], *, kl_fn: KLFn | None = None) -> list[float | None]:
    """The reverse KL of each rollout [N], in nats per token; None without `ref_logprobs` or the sampler's logprobs.

    >>> rollout = Rollout("2 + 3", Generation("5", [9], [-1.0]), ref_logprobs=[-1.1])
    >>> [None if each is None else round(each, 4) for each in compute_batch_kl([rollout, rollout._replace(
    ...     ref_logprobs=None)])]
    [0.0048, None]
    """
    found: list[float | None] = []
    for rollout in rollouts:
        sampled = [turn.logprobs for turn in rollout.all_turns]
        if rollout.ref_logprobs is None or None in sampled:
            found.append(None)
            continue
        logprobs = [logprob for turn in sampled for logprob in turn or ()]
        found.append(float(compute_reverse_kl(logprobs, rollout.ref_logprobs, kl_fn=kl_fn).detach()))
    return found


def create_truncated_kl(threshold: float = 1.0, *, kl_fn: KLFn | None = None) -> KLFn:
    """A KL function that cuts the value of each token to `threshold` nats: min(kl, threshold) [K].

    A cut token has no gradient. Raises ConfigError for a threshold of 0 or less.

    >>> compute_per_token_kl([-1.0, -1.0], [-1.0, -9.0], kl_fn=create_truncated_kl(threshold=2.0)).tolist()
    [0.0, 2.0]

    Args:
        kl_fn: the KL per token that is cut; None: the reverse KL
    """
    check_setting("threshold", threshold, threshold > 0, "a number above 0", "create_truncated_kl(threshold=1.0)")

    def truncated_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return compute_per_token_kl(logprobs, ref_logprobs, kl_fn=kl_fn).clamp(max=threshold)

    return truncated_kl


def create_adaptive_kl(confidence_threshold: float = 0.1, *, kl_fn: KLFn | None = None) -> KLFn:
    """A KL function that weighs each token by the policy's confidence: min(1, p / confidence_threshold) kl [K].

    A token to which the policy gives at least `confidence_threshold` counts in full. A less likely token counts in
    proportion, so exploring costs less. The weight has no gradient. Raises ConfigError for a threshold outside of (0,
    1].

    >>> import math
    >>> per_token = compute_per_token_kl([math.log(0.5), math.log(0.05)], [math.log(0.25), math.log(0.025)])
    >>> adaptive = create_adaptive_kl(confidence_threshold=0.1)
    >>> weighed = adaptive([math.log(0.5), math.log(0.05)], [math.log(0.25), math.log(0.025)])
    >>> [round(each, 3) for each in (weighed / per_token).tolist()]
    [1.0, 0.5]

    Args:
        kl_fn: the KL per token that is weighed; None: the reverse KL
    """
    is_valid, example = 0 < confidence_threshold <= 1, "create_adaptive_kl(confidence_threshold=0.1)"
    check_setting("confidence_threshold", confidence_threshold, is_valid, "a probability above 0", example)

    def adaptive_kl(logprobs: LogprobsLike, ref_logprobs: LogprobsLike) -> Tensor:
        policy = _floats(logprobs)
        confidence = (policy.detach().exp() / confidence_threshold).clamp(max=1.0)
        return confidence * compute_per_token_kl(policy, ref_logprobs, kl_fn=kl_fn)

    return adaptive_kl


def _forward(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return engine.forward_kl_loss(logprobs, logprobs.detach(), ref_logprobs)


def _reverse(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return engine.rk3_loss(logprobs, logprobs.detach(), ref_logprobs)


def _mean(kl_fn: KLFn, logprobs: LogprobsLike, ref_logprobs: LogprobsLike, mask: LogprobsLike | None) -> Tensor:
    import torch

    values = _values(kl_fn, logprobs, ref_logprobs)
    if values.dim() == 0:
        return values
    weights = torch.ones_like(values) if mask is None else _floats(mask).to(values)
    if weights.shape != values.shape:
        raise ConfigError(f"the mask has shape {list(weights.shape)}, but the logprobs {list(values.shape)}")
    return (values.where(weights > 0, 0.0) * weights).sum() / weights.sum().clamp(min=1e-12)


def _values(kl_fn: KLFn, logprobs: LogprobsLike, ref_logprobs: LogprobsLike) -> Tensor:
    """The result of a KL function: [K], or a scalar. Raises ConfigError."""
    import torch

    policy, reference = _floats(logprobs), _floats(ref_logprobs)
    if policy.shape != reference.shape or policy.dim() != 1:
        expected = "expected two lists or tensors of one length, with one logprob per sampled token"
        raise ConfigError(f"shapes {list(policy.shape)} and {list(reference.shape)} of logprobs; {expected}")
    returned = call_given("kl_fn(logprobs, ref_logprobs)", kl_fn, policy, reference.to(policy))
    what = f"the kl_fn {function_label(kl_fn)} returned"
    try:
        values = torch.as_tensor(returned)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{what} {type(returned).__name__}; expected numbers") from error
    if values.dim() and values.shape != policy.shape:
        expected = f"one value per token, shape {list(policy.shape)}, or one number"
        raise ConfigError(f"{what} shape {list(values.shape)}; expected {expected}")
    return values


def _floats(values: LogprobsLike) -> Tensor:
    import torch

    return values if isinstance(values, torch.Tensor) else torch.tensor(list(values), dtype=torch.float32)


# --- the reference ----------------------------------------------------------------------------------------------------


def create_reference_model(model: Any, *, ref_model_fn: Callable[[Any], Any] | None = None) -> Any:
    """The reference: a frozen copy of the model in evaluation mode, or the result of `ref_model_fn(model)`.

    A function may return any other model with the same tokenizer: `lambda model: load_model("another")`.

    >>> from rollouts.primitives import load_model
    >>> reference = create_reference_model(load_model("tiny"))
    >>> reference.training, any(parameter.requires_grad for parameter in reference.parameters())
    (False, False)
    """
    if ref_model_fn is not None:
        return call_given("ref_model_fn(model)", ref_model_fn, model)
    return copy.deepcopy(model).requires_grad_(False).eval()


def update_reference_model(
    ref_model: Any, model: Any, *, update_fn: UpdateFn | None = None, iteration: int | None = None
) -> Any:
    """The reference after an iteration: the result of `update_fn(ref_model, model)`. Without a function it stays.

    Raises ConfigError if the function returns None.

    >>> update_reference_model("reference", "policy", update_fn=lambda ref, policy: policy)
    'policy'

    Args:
        iteration: the number of finished iterations, passed to an `update_fn` with a parameter of this name
    """
    if update_fn is None:
        return ref_model
    function = update_fn
    if callable(update_fn) and "iteration" in inspect.signature(update_fn).parameters:
        function = functools.partial(update_fn, iteration=iteration)
    updated = call_given("update_fn(ref_model, model)", function, ref_model, model)
    if updated is None:
        raise ConfigError(f"the update_fn {function_label(update_fn)} returned None; return the reference model")
    return updated


def create_ema_updater(decay: float = 0.999) -> UpdateFn:
    """An update function: reference <- decay reference + (1 - decay) policy, in place. Returns the reference.

    Raises ConfigError for a decay outside of [0, 1], and if the two models have other parameters.

    >>> import torch
    >>> policy, reference = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    >>> policy.weight.data[0], reference.weight.data[0] = 1.0, 0.0
    >>> create_ema_updater(decay=0.75)(reference, policy).weight.tolist()
    [[0.25]]
    """
    check_setting("decay", decay, 0 <= decay <= 1, "a number from 0 to 1", "create_ema_updater(decay=0.999)")

    def ema_update(ref_model: Any, model: Any) -> Any:
        engine.ema(*_parameters(ref_model, model), version=1, decay=decay)
        return ref_model

    return ema_update


def create_periodic_updater(update_every: int = 10) -> UpdateFn:
    """An update function: the reference becomes the policy after every `update_every` iterations, in place. Returns the
    reference.

    If you call it without `iteration`, it counts its own calls. Raises ConfigError for `update_every` below 1, and if
    the two models have other parameters.

    >>> import torch
    >>> policy, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> update = create_periodic_updater(update_every=2)
    >>> [update(reference, policy).weight.equal(policy.weight) for call in range(2)]
    [False, True]
    """
    is_valid, example = update_every >= 1, "create_periodic_updater(10)"
    check_setting("update_every", update_every, is_valid, "a number of 1 or more", example)
    calls = itertools.count(1)

    def periodic_update(ref_model: Any, model: Any, iteration: int | None = None) -> Any:
        number = next(calls) if iteration is None else iteration
        engine.every_n(*_parameters(ref_model, model), version=number, steps=update_every)
        return ref_model

    return periodic_update


def _parameters(ref_model: Any, model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of both models. Raises ConfigError if their shapes differ."""
    reference, policy = list(ref_model.parameters()), [each.detach() for each in model.parameters()]
    if [each.shape for each in reference] != [each.shape for each in policy]:
        sizes = [sum(each.numel() for each in parameters) for parameters in (reference, policy)]
        raise ConfigError(
            f"the reference has {sizes[0]:g} parameters and the policy {sizes[1]:g}, in other shapes, so the reference "
            "cannot follow; use `lambda ref, policy: ref`, or a copy of the policy (create_reference_model)"
        )
    return reference, policy
