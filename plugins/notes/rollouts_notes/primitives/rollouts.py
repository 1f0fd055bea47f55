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
from typing import Any, NamedTuple

from rollouts.agent.records import turn_seed
from rollouts.author_code import shown
from rollouts.errors import ConfigError
from rollouts.inference.embedded.hf import context_tokens_max
from rollouts.types import Message, Task, ToolCall
from rollouts_notes.primitives.batches import sampled_logprobs, turns_of
from rollouts_notes.primitives.calls import call_given
from rollouts_notes.primitives.generation import (
    DEFAULT,
    Generator,
    Prompt,
    ToolParser,
    batch_generate,
    prompt_conversation,
    read_turn,
    turn_prompt,
)
from rollouts_notes.primitives.kl import KLFn, compute_batch_kl
from rollouts_notes.primitives.rewards import RewardFns, compute_batch_rewards
from rollouts_notes.primitives.tools import Tools, execute_tools, extract_tool_calls
from rollouts_notes.primitives.types import Conversation, Generation, GenerationConfig, Rollout

ToolExecutor = Callable[[Sequence[ToolCall], Tools], Sequence[Message | str]]
ToolTracker = Callable[[Rollout], Mapping[str, Any]]
StopCondition = Callable[[Conversation], bool]
ReplyFn = Callable[[Conversation], "str | Message | None"]
TemplateFn = Callable[[Sequence[Message], Sequence[dict[str, Any]]], str]


# --- one rollout ------------------------------------------------------------------------------------------------------


def create_rollout(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    gen_config: GenerationConfig = DEFAULT,
    *,
    metadata: Mapping[str, Any] | None = None,
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
    metadata: Mapping[str, Any] | None = None,
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


# --- many rollouts ----------------------------------------------------------------------------------------------------


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
    aggregator: Callable[[list[float]], float] | None = None,
    tools: Tools = (),
    tool_parser: ToolParser | None = None,
    tool_executor: ToolExecutor | None = None,
    tool_tracker: ToolTracker | None = None,
    generator: Generator | None = None,
    template_fn: TemplateFn | None = None,
    kl_fn: KLFn | None = None,
    metadata: Sequence[Mapping[str, Any]] = (),
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
    _check_prompts(prompts, metadata, samples_per_prompt, gen_config)
    plays = [_opened(prompt, tools) for prompt in prompts for _ in range(samples_per_prompt)]
    answers = _Answers(tool_parser, tool_executor, stop_condition, reply_fn, template_fn)
    _play_all(plays, model, tokenizer, gen_config, generator, answers)
    rollouts = []
    for number, play in enumerate(plays):
        place = number // samples_per_prompt
        rollout = play.rollout(prompts[place], metadata[place] if metadata else {})
        if tool_parser is not None or tool_tracker is not None or play.tool_calls:
            rollout = _tracked(rollout, play.tool_calls or _read_calls(rollout, tool_parser), tool_tracker)
        rollouts.append(rollout)
    if ref_model is not None and rollouts:
        known = sampled_logprobs(ref_model, rollouts)
        rollouts = [each._replace(ref_logprobs=ref) for each, ref in zip(rollouts, known, strict=True)]
        divergences = compute_batch_kl(rollouts, kl_fn=kl_fn)
        rollouts = [each._replace(kl_divergence=kl) for each, kl in zip(rollouts, divergences, strict=True)]
    return rollouts if reward_fn is None else compute_batch_rewards(rollouts, reward_fn, aggregator=aggregator)


def _check_prompts(
    prompts: Any, metadata: Sequence[Any], samples_per_prompt: int, gen_config: GenerationConfig
) -> None:
    if isinstance(prompts, str | Conversation) or not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts is {type(prompts).__name__}; expected a list of prompts, such as [prompt]")
    if samples_per_prompt < 1 or (metadata and len(metadata) != len(prompts)):
        given = f"{len(prompts)} prompts, {len(metadata)} metadata and samples_per_prompt={samples_per_prompt}"
        raise ConfigError(f"{given}; give one mapping of metadata for each prompt, and 1 or more samples")
    if gen_config.max_turns < 1:
        raise ConfigError(f"max_turns is {gen_config.max_turns}; expected 1 or more replies")


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
    return _tracked(rollout, _read_calls(rollout, tool_parser), tool_tracker)


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
        prompt = prompt_conversation(rollout.prompt)
        reply = Message("assistant", rollout.generation.text)
        conversation = Conversation([*prompt.messages, reply], tools)
    results = execute_tools(calls, tools or conversation.tools, tool_executor=tool_executor) if calls else []
    conversation = conversation._replace(messages=[*conversation.messages, *results])
    return track_tool_calls(
        rollout._replace(conversation=conversation), tool_parser=tool_parser, tool_tracker=tool_tracker
    )


def _read_calls(rollout: Rollout, tool_parser: ToolParser | None) -> list[ToolCall]:
    return [call for turn in turns_of(rollout) for call in extract_tool_calls(turn, tool_parser=tool_parser)]


def _tracked(rollout: Rollout, calls: Sequence[ToolCall], tool_tracker: ToolTracker | None) -> Rollout:
    rollout = rollout._replace(tool_calls=list(calls))
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


class _Play:
    """A rollout while it is sampled. `conversation` is None for a text or ids, which get one reply."""

    def __init__(self, prompt: Prompt, conversation: Conversation | None) -> None:
        self.given, self.conversation = prompt, conversation
        self.turns: list[Generation] = []
        self.tool_calls: list[ToolCall] = []

    def prompt(self, tokenizer: Any, template_fn: TemplateFn | None) -> Prompt:
        """What the model receives next."""
        if self.conversation is None:
            return self.given
        previous = self.turns[-1] if self.turns else None
        return turn_prompt(tokenizer, self.conversation, template_fn=template_fn, previous=previous)

    def take(self, tokenizer: Any, reply: Generation, answers: _Answers, *, is_last: bool) -> bool:
        """Record a reply, and answer it. Returns whether the model is to reply again."""
        self.turns.append(reply)
        if self.conversation is None:
            return False
        turn = read_turn(
            tokenizer, self.conversation, reply, template_fn=answers.template_fn, tool_parser=answers.tool_parser
        )
        self.conversation = turn.conversation
        self.tool_calls += turn.tool_calls
        if reply.finish_reason == "length" or self._stops(answers) or is_last:
            return False
        added: list[Message] = []
        if turn.tool_calls:
            added = execute_tools(turn.tool_calls, self.conversation.tools, tool_executor=answers.tool_executor)
        elif answers.reply_fn is not None:
            said: Any = call_given("reply_fn(conversation)", answers.reply_fn, self.conversation)
            if said is not None and not isinstance(said, str | Message):
                raise ConfigError(f"the reply_fn returned {shown(said)}; expected text, a Message, or None to end")
            added = [] if said is None else [Message("user", said) if isinstance(said, str) else said]
        self.conversation = self.conversation._replace(messages=[*self.conversation.messages, *added])
        return bool(added) and not self._stops(answers)

    def _stops(self, answers: _Answers) -> bool:
        stop = answers.stop_condition
        return stop is not None and bool(call_given("stop_condition(conversation)", stop, self.conversation))

    def rollout(self, prompt: Prompt, metadata: Mapping[str, Any]) -> Rollout:
        """The rollout so far."""
        of_task = {}
        if isinstance(prompt, Task):
            of_task = {"answer": prompt.answer, **prompt.info}
            prompt = prompt.prompt
        messages = prompt.messages if isinstance(prompt, Conversation) else prompt
        return Rollout(
            messages,  # type: ignore[arg-type]  # a list of ids is its own prompt
            self.turns[-1],
            conversation=self.conversation,
            metadata={**of_task, **metadata},
            turns=self.turns if len(self.turns) > 1 else (),
        )


def _opened(prompt: Prompt, tools: Tools) -> _Play:
    is_plain = isinstance(prompt, str) or (
        not isinstance(prompt, Conversation | Task) and all(isinstance(each, int) for each in prompt)
    )
    if is_plain:
        return _Play(prompt, None)
    conversation = prompt_conversation(prompt)
    return _Play(prompt, conversation if conversation.tools else conversation._replace(tools=tools))


def _play_all(
    plays: Sequence[_Play],
    model: Any,
    tokenizer: Any,
    config: GenerationConfig,
    generator: Generator | None,
    answers: _Answers,
) -> None:
    """Play all rollouts to their ends, one turn of all of them at a time."""
    most = None if generator is not None else context_tokens_max(model)
    active = list(plays)
    for turn in range(config.max_turns):
        prompts = [(play, play.prompt(tokenizer, answers.template_fn)) for play in active]
        fitting = [(play, prompt) for play, prompt in prompts if not play.turns or not _is_full(prompt, most)]
        for play, _ in prompts:
            if all(play is not each for each, _ in fitting):  # its context is full
                play.turns[-1] = play.turns[-1]._replace(finish_reason="length")
        seeded = config._replace(seed=turn_seed(config.seed, 0, 0, 0, turn)) if turn else config
        replies = batch_generate(model, tokenizer, [prompt for _, prompt in fitting], seeded, generator=generator)
        # After the last reply, tools only run for `create_rollout`, whose only reply is the last one.
        is_last = turn == config.max_turns - 1 and (turn > 0 or answers.tool_executor is None)
        active = [
            play
            for (play, _), reply in zip(fitting, replies, strict=True)
            if play.take(tokenizer, reply, answers, is_last=is_last)
        ]
        if not active:
            return


def _is_full(prompt: Prompt, most: int | None) -> bool:
    return most is not None and isinstance(prompt, list) and len(prompt) >= most
