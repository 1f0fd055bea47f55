"""Rollouts keep the ids that were sampled, and end where they should."""

from __future__ import annotations

import random

import pytest
import torch
import trio
from rollouts_calculator import Calculator
from rollouts_notes.primitives.rollouts import rollout_samples

from rollouts.agent.episode import run_episode
from rollouts.agent.model import EpisodeLimits
from rollouts.chat import load_chat_format
from rollouts.errors import ConfigError, RewardError, TrainingError
from rollouts.inference.base import Capabilities, VersionSpan
from rollouts.inference.base import Generation as EngineGeneration
from rollouts.primitives import (
    Conversation,
    Generation,
    GenerationConfig,
    Rollout,
    ToolCall,
    compute_dapo_pairs,
    compute_grpo_advantages,
    create_batch,
    create_batch_rollouts,
    create_multiturn_rollout,
    create_rollout,
    create_scripted_generator,
    execute_and_track_tools,
    load_model,
    load_rollouts,
    load_tokenizer,
    save_rollouts,
    track_tool_calls,
)
from rollouts.training.samples import episode_samples
from rollouts.types import Task

TOKENIZER = load_tokenizer("tiny")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "7 * 8"}}\n</tool_call>'
TASK = Task("What is 7 * 8?", answer=56, info={"level": 1})


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")


def scripted(*texts):
    """Replies as a model samples them: with the id that ends the turn, and with logprobs."""
    script = []
    for text in texts:
        ids = TOKENIZER.encode(text + "<|im_end|>")
        script.append(Generation(text, ids, [-0.25] * len(ids)))
    replies = create_scripted_generator(script)

    def generator(model, tokenizer, prompt, config):
        return replies(model, tokenizer, prompt, config)._replace(prompt_tokens=prompt)

    return generator


CALCULATOR = [Calculator().calculator]
CONFIG = GenerationConfig()


def play(*texts, prompt=TASK, config=CONFIG, **options):
    return create_multiturn_rollout(
        None, TOKENIZER, prompt, config, generator=scripted(*texts), tools=CALCULATOR, **options
    )


class ScriptedEngine:
    """The same replies for an episode of the engine."""

    capabilities = Capabilities()
    vocabulary_size, version, context_tokens_max = 469, 0, 4096

    def __init__(self, turns):
        self.turns = list(turns)

    def close_session(self, session):
        pass

    async def generate(self, request):
        await trio.lowlevel.checkpoint()
        turn = self.turns.pop(0)
        return EngineGeneration(turn.tokens, turn.logprobs, "stop", [VersionSpan(0, 0, len(turn.tokens))])


def test_a_conversation_has_the_tokens_of_the_engine_s_episode():
    rollout = play(CALL, "56")
    assert [message.role for message in rollout.conversation.messages] == ["user", "assistant", "tool", "assistant"]

    async def make_env():
        return Calculator()

    async def episode():
        chat, engine = load_chat_format(TOKENIZER), ScriptedEngine(rollout.turns)
        limits = EpisodeLimits()
        return await run_episode(
            TASK,
            make_env=make_env,
            chat=chat,
            inference=engine,
            limits=limits,
            rewards=[],
            session="s",
            order=(0, 0),
            seed=0,
        )

    (theirs,) = episode_samples(trio.run(episode), 0, 0)
    (own,) = rollout_samples([rollout._replace(rewards=1.0)])
    assert own.tokens == theirs.tokens and own.rollout_log_probs == theirs.rollout_log_probs
    assert own.loss_mask == [float(version >= 0) for version in theirs.policy_versions]
    trained = [token for token, weight in zip(own.tokens, own.loss_mask, strict=True) if weight > 0]
    assert TOKENIZER.decode(trained) == f"{CALL}<|im_end|>56<|im_end|>"


def test_sampled_conversations_are_scored_as_they_were_sampled(model):
    tasks = Calculator(digits=1).tasks("train", random.Random(0))
    config = GenerationConfig(max_tokens=48, max_turns=3)
    tools, prompts = CALCULATOR, [next(tasks) for _ in range(4)]
    rollouts = create_batch_rollouts(
        model, TOKENIZER, prompts, config, samples_per_prompt=4, tools=tools, ref_model=model, reward_fn=lambda r: 1.0
    )
    assert create_batch(None, rollouts).group_index.unique_consecutive().tolist() == [0, 1, 2, 3]
    assert len({each.generation.text for each in rollouts}) > 4  # the same prompt, other seeds
    several = [each for each in rollouts if each.turns]
    assert several and all(each.tool_calls for each in several)
    assert all(len(rollout_samples([each])) == 1 for each in several)  # one row: nothing was encoded again
    batch = create_batch(model, rollouts)
    torch.testing.assert_close(batch.logprobs.detach(), batch.old_logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(batch.ref_logprobs, batch.logprobs.detach(), rtol=0, atol=1e-5)
    assert max(abs(each.kl_divergence) for each in rollouts) < 1e-5
    assert rollouts == create_batch_rollouts(
        model, TOKENIZER, prompts, config, samples_per_prompt=4, tools=tools, ref_model=model, reward_fn=lambda r: 1.0
    )


def test_where_a_conversation_ends():
    assert len(play("56", CALL).turns) == 0  # a reply without a call
    assert len(play(CALL, CALL, CALL, config=GenerationConfig(max_turns=2)).turns) == 2
    done = play(CALL, "never", stop_condition=lambda conversation: conversation.messages[-1].role == "tool")
    assert not done.turns and done.conversation.messages[-1].content == "56"
    asked = play("one", "two DONE", reply_fn=lambda c: "Go on.", stop_condition=lambda c: "DONE" in c.messages[-1].text)
    assert [message.content for message in asked.conversation.messages[1:]] == ["one", "Go on.", "two DONE"]
    assert len(play("one", "two", reply_fn=lambda c: None if len(c.messages) > 2 else "Go on.").turns) == 2

    def cut(model, tokenizer, prompt, config):
        return Generation(CALL, TOKENIZER.encode(CALL), None, "length", prompt)

    rollout = create_multiturn_rollout(None, TOKENIZER, TASK, generator=cut, tools=CALCULATOR)
    assert not rollout.turns and rollout.conversation.messages[-1].role == "assistant"


def test_a_full_context_ends_a_conversation_as_cut_off(model):
    config = GenerationConfig(max_tokens=8, max_turns=50)
    rollout = create_multiturn_rollout(
        model, TOKENIZER, "Hi", config, reply_fn=lambda c: "word " * 500 if len(c.messages) < 5 else None
    )
    assert rollout.generation.finish_reason == "length"


def test_one_reply_can_run_its_tools():
    once = create_rollout(None, TOKENIZER, TASK, generator=scripted(CALL), tools=CALCULATOR)
    assert len(once.conversation.messages) == 2 and [call.name for call in once.tool_calls] == ["calculator"]
    own = create_rollout(
        None, TOKENIZER, TASK, generator=scripted(CALL), tool_executor=lambda calls, tools: [f"{len(calls)} ran"],
        tool_tracker=lambda rollout: {"last": rollout.conversation.messages[-1].content},
    )  # fmt: skip
    assert own.metadata == {"answer": 56, "level": 1, "last": "1 ran"}


def test_tool_calls_of_a_text_are_tracked():
    parser = lambda text: [ToolCall(text.split("(")[0])]  # noqa: E731
    rollout = create_rollout(None, TOKENIZER, "Add.", generator=lambda *given: "add(1)", tool_parser=parser)
    assert rollout.conversation is None and rollout.metadata == {"tool_counts": {"add": 1}}
    turns = [Generation("add(1)"), Generation("mul(2)"), Generation("add(3)")]
    tracked = track_tool_calls(Rollout("p", turns[-1], turns=turns), tool_parser=parser)
    assert tracked.metadata == {"tool_counts": {"add": 2, "mul": 1}}
    run = execute_and_track_tools(
        Rollout("p", turns[0]), tool_parser=parser, tool_executor=lambda calls, tools: [calls[0].name.upper()]
    )
    assert [message.content for message in run.conversation.messages] == ["p", "add(1)", "ADD"]


def test_a_reward_sees_the_answer_and_the_kl(model):
    seen = []
    rollout = create_rollout(
        model, TOKENIZER, TASK, GenerationConfig(max_tokens=4), ref_model=model, kl_fn=lambda lp, ref: 0.5,
        reward_fn=lambda rollout: seen.append(rollout) or [1.0, 0.25], metadata={"tag": "x"},
    )  # fmt: skip
    assert seen[0].metadata == {"answer": 56, "level": 1, "tag": "x"} and seen[0].kl_divergence == 0.5
    assert rollout.rewards == 1.25 and rollout.metadata["reward_vector"] == [1.0, 0.25]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: create_batch_rollouts(None, TOKENIZER, "Hi"), ConfigError, "prompts is str; expected a list"),
        (lambda: create_batch_rollouts(None, TOKENIZER, ["a"], samples_per_prompt=0), ConfigError, "1 or more samples"),
        (lambda: create_batch_rollouts(None, TOKENIZER, ["a"], metadata=[{}, {}]), ConfigError, "one mapping"),
        (lambda: play("56", reward_fn=lambda rollout: "good"), RewardError, "returned 'good'"),
        (lambda: play("56", reward_fn=lambda rollout: 1 / 0), RewardError, "division by zero"),
        (lambda: play("56", stop_condition=lambda c: 1 / 0), TrainingError, "stop_condition <lambda> raised ZeroDiv"),
        (lambda: play("56", reply_fn=lambda: "Go on."), ConfigError, r"cannot be called as reply_fn\(conversation\)"),
        (lambda: play("56", reply_fn=lambda c: 3), ConfigError, "reply_fn returned 3; expected text"),
        (lambda: play("56", tool_tracker=lambda rollout: 3), ConfigError, "tool_tracker returned 3; expected a dict"),
        (lambda: play(CALL, tool_executor=lambda calls, tools: []), ConfigError, "a list of 1 texts"),
        (lambda: play("56", prompt=Conversation([3])), ConfigError, "no conversation"),
        (lambda: play("56", config=GenerationConfig(max_turns=0)), ConfigError, "max_turns is 0"),
    ],
)
def test_bad_input_is_one_clear_error(call, error, words):
    with pytest.raises(error, match=words):
        call()


REWARDS = {"easy": {"a": 0.8, "b": 1.0}, "hard": {"a": 0.0, "b": 0.2}}


def sampled(prompts, texts):
    """Rollouts of one call; in `REWARDS`, "b" is the better reply to both prompts."""
    script = [Generation(text, [20 + ord(text)], [-0.7], prompt_tokens=[1, 2]) for text in texts]
    return create_batch_rollouts(
        None,
        TOKENIZER,
        prompts,
        GenerationConfig(max_tokens=4),
        samples_per_prompt=len(texts) // len(prompts),
        generator=create_scripted_generator(script),
        reward_fn=lambda rollout: REWARDS[rollout.prompt][rollout.generation.text],
    )


@pytest.mark.parametrize("collect", ["one call", "a call for each prompt", "a call for each reply", "files"])
def test_rollouts_are_compared_within_their_prompt_however_they_were_collected(collect, tmp_path):
    prompts = list(REWARDS)
    if collect == "one call":
        rollouts = sampled(prompts, "abab")
    elif collect == "a call for each reply":
        rollouts = [sampled([prompt], text)[0] for prompt in prompts for text in "ab"]
    else:
        rollouts = [rollout for prompt in prompts for rollout in sampled([prompt], "ab")]
    if collect == "files":
        for place, prompt in enumerate(prompts):
            save_rollouts(tmp_path / f"{prompt}.jsonl", rollouts[2 * place : 2 * place + 2])
        rollouts = [rollout for prompt in prompts for rollout in load_rollouts(tmp_path / f"{prompt}.jsonl")]
    batch = create_batch(None, rollouts)
    assert compute_grpo_advantages(batch).sign().tolist() == [-1, 1, -1, 1]
    assert compute_dapo_pairs(batch) == [(1, 0), (3, 2)]
