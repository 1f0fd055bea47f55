"""Rollouts: sample replies or whole conversations, run tools, measure the KL to a reference, and reward.

    rollout = create_rollout(model, tokenizer, Task("What is 2 + 3?", answer=5), config, reward_fn=reward)
    rollouts = create_batch_rollouts(model, tokenizer, tasks, config, samples_per_prompt=8, reward_fn=reward)

A text or a list of ids gets one reply. A conversation (Conversation, messages, Task) goes on while the model calls
tools: the calls are run, their results are added, and the model replies again. All conversations of a batch take their
turns together, so that each turn is one batch for the model. What a rollout keeps are the ids as they were sampled.

Legend: N rollouts, G rollouts of one prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollouts.agent.records import turn_seed
from rollouts.author_code import shown
from rollouts.errors import ConfigError
from rollouts.types import Message, Task, ToolCall
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
    execute_tools,
    extract_tool_calls,
    prompt_conversation,
    read_turn,
    turn_prompt,
)
from rollouts_notes.primitives.scoring import KLFn, compute_batch_kl, sampled_logprobs
from rollouts_notes.primitives.types import Conversation, Generation, GenerationConfig, Rollout
from rollouts_notes.primitives.utilities import Aggregator, RewardFns, compute_batch_rewards

ToolTracker = Callable[[Rollout], Mapping[str, Any]]
StopCondition = Callable[[Conversation], bool]
ReplyFn = Callable[[Conversation], "str | Message | None"]
Metadata = Mapping[str, Any]


def create_rollout(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    gen_config: GenerationConfig = DEFAULT,
    *,
    metadata: Metadata | None = None,
    **options: Any,
) -> Rollout:
    """One reply to a prompt, with its reward, its KL and its tool calls. The calls run if there is a `tool_executor`.

    `options` are those of `create_batch_rollouts`, such as `ref_model`, `reward_fn` and `tool_parser`. Raises like it.

    >>> from rollouts.primitives import load_model, load_tokenizer
    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> rollout = create_rollout(
    ...     model, tokenizer, "2 + 3 =", GenerationConfig(max_tokens=8), ref_model=model,
    ...     reward_fn=lambda rollout: len(rollout.generation.tokens),
    ... )
    >>> rollout.rewards == len(rollout.generation.tokens), round(rollout.kl_divergence, 4)
    (True, 0.0)
    """
    once = gen_config._replace(max_turns=1)
    return create_batch_rollouts(model, tokenizer, [prompt], once, metadata=[metadata or {}], **options)[0]


def create_multiturn_rollout(
    model: Any,
    tokenizer: Any,
    conversation: Prompt,
    gen_config: GenerationConfig = DEFAULT,
    *,
    metadata: Metadata | None = None,
    **options: Any,
) -> Rollout:
    """One conversation: the model replies, its tool calls run, and it replies again.

    It ends after a reply without tool calls, after `gen_config.max_turns` replies, if a reply reaches `max_tokens`, or
    if the model's context is full. The trained ids are those of all replies; tool results are context. A text counts as
    the user's message. `options` are those of `create_batch_rollouts`. Raises like it.

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
    return create_batch_rollouts(model, tokenizer, [given], gen_config, metadata=[metadata or {}], **options)[0]


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

    A conversation has several turns if the model calls tools, as in `create_multiturn_rollout`. The answer and the info
    of a Task are in the rollout's `metadata`. Raises ConfigError for wrong arguments, RewardError if a reward function
    fails, and InferenceError if the model does.

    >>> from rollouts.primitives import create_scripted_generator, load_tokenizer
    >>> rollouts = create_batch_rollouts(
    ...     None, load_tokenizer("tiny"), ["2 + 3 =", "2 + 4 ="], samples_per_prompt=2,
    ...     metadata=[{"sum": 5}, {"sum": 6}],
    ...     generator=create_scripted_generator(["5", "6", "5", "6"]),
    ...     reward_fn=lambda rollout: rollout.generation.text == str(rollout.metadata["sum"]),
    ... )
    >>> [(rollout.prompt, rollout.rewards) for rollout in rollouts]
    [('2 + 3 =', 1.0), ('2 + 3 =', 0.0), ('2 + 4 =', 0.0), ('2 + 4 =', 1.0)]

    Args:
        stop_condition: `stop_condition(conversation)` ends the conversation; asked after each message
        reply_fn: `reply_fn(conversation)` answers a reply without tool calls, as the user or an environment: a text, a
            Message, or None to end
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
    pairs = zip(prompts, metadata or [{}] * len(prompts), strict=True)
    plays = [_opened(prompt, tools, own) for prompt, own in pairs for _ in range(samples_per_prompt)]
    answers = _Answers(tool_parser, tool_executor, stop_condition, reply_fn, template_fn)
    _play_all(plays, model, tokenizer, gen_config, generator, answers)
    rollouts = [play.rollout(tool_parser, tool_tracker) for play in plays]
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
    return _tracked(rollout, (), tool_parser, tool_tracker)


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
    return _tracked(rollout._replace(conversation=conversation), (), tool_parser, tool_tracker)


def _tracked(
    rollout: Rollout, calls: Sequence[ToolCall], tool_parser: ToolParser | None, tool_tracker: ToolTracker | None
) -> Rollout:
    """The rollout with these tool calls, or those in its replies if there are none, and what the tracker adds."""
    read = (extract_tool_calls(turn, tool_parser=tool_parser) for turn in rollout.all_turns)
    rollout = rollout._replace(tool_calls=list(calls) or [call for turn in read for call in turn])
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


@dataclass(eq=False)
class _Play:
    """A rollout while it is sampled. `conversation` is None for a text or ids, which get one reply."""

    prompt: Any
    conversation: Conversation | None
    metadata: Metadata
    turns: list[Generation] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)

    def take(self, tokenizer: Any, reply: Generation, answers: _Answers, *, is_last: bool) -> bool:
        """Record a reply, and answer it. Returns whether the model is to reply again."""
        self.turns.append(reply)
        if self.conversation is None:
            return False
        functions = {"template_fn": answers.template_fn, "tool_parser": answers.tool_parser}
        self.conversation, _, calls = read_turn(tokenizer, self.conversation, reply, **functions)  # type: ignore[arg-type]
        self.tool_calls += calls
        if reply.finish_reason == "length" or answers.stop(self.conversation) or is_last:
            return False
        added = answers.messages(self.conversation, calls)
        self.conversation = self.conversation._replace(messages=[*self.conversation.messages, *added])
        return bool(added) and not answers.stop(self.conversation)

    def rollout(self, tool_parser: ToolParser | None, tool_tracker: ToolTracker | None) -> Rollout:
        """The rollout so far, with its tool calls if it has any, or if there is a function that reads them."""
        turns = self.turns if len(self.turns) > 1 else ()
        own = (self.conversation, self.tool_calls, self.metadata, turns)
        rollout = Rollout(self.prompt, self.turns[-1], None, None, None, *own)
        if tool_parser is None and tool_tracker is None and not self.tool_calls:
            return rollout
        return _tracked(rollout, self.tool_calls, tool_parser, tool_tracker)


def _opened(prompt: Prompt, tools: Tools, metadata: Metadata) -> _Play:
    is_ids = not isinstance(prompt, str | Conversation | Task) and all(isinstance(each, int) for each in prompt)
    if isinstance(prompt, str) or is_ids:
        return _Play(prompt, None, {**metadata})
    conversation = prompt_conversation(prompt)
    if isinstance(prompt, Task):
        metadata, prompt = {"answer": prompt.answer, **prompt.info, **metadata}, prompt.prompt
    messages = prompt.messages if isinstance(prompt, Conversation) else prompt
    return _Play(messages, conversation._replace(tools=conversation.tools or tools), {**metadata})


def _play_all(
    plays: Sequence[_Play],
    model: Any,
    tokenizer: Any,
    config: GenerationConfig,
    generator: Generator | None,
    answers: _Answers,
) -> None:
    """Play all rollouts to their ends, one turn of all of them at a time."""
    from rollouts.inference.embedded.hf import context_tokens_max

    most = None if generator is not None else context_tokens_max(model)
    active = list(plays)
    for turn in range(config.max_turns):
        fitting, prompts = [], []
        for play in active:
            prompt, previous = play.prompt, play.turns[-1] if play.turns else None
            if play.conversation is not None:
                functions = {"template_fn": answers.template_fn, "previous": previous}
                prompt = turn_prompt(tokenizer, play.conversation, **functions)  # type: ignore[arg-type]
            if previous is not None and most is not None and isinstance(prompt, list) and len(prompt) >= most:
                play.turns[-1] = previous._replace(finish_reason="length")  # its context is full
                continue
            fitting.append(play)
            prompts.append(prompt)
        seeded = config._replace(seed=turn_seed(config.seed, 0, 0, 0, turn)) if turn else config
        replies = batch_generate(model, tokenizer, prompts, seeded, generator=generator)
        # After the last reply, tools only run for `create_rollout`, whose only reply is the last one.
        is_last = turn == config.max_turns - 1 and (turn > 0 or answers.tool_executor is None)
        pairs = zip(fitting, replies, strict=True)
        active = [play for play, reply in pairs if play.take(tokenizer, reply, answers, is_last=is_last)]
        if not active:
            return
