"""Note 004: primitives."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

from first_notes import rows
from first_notes.rows import Table

ROWS = Table()
ROOT = Path(__file__).parents[2]
QUESTION = "What is 2 + 3?"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@cache
def parts() -> tuple[Any, Any, Any]:
    """The tiny model, its tokenizer, and settings for four tokens."""
    from rollouts.primitives import GenerationConfig, load_model, load_tokenizer

    return load_model("tiny"), load_tokenizer("tiny"), GenerationConfig(max_tokens=4, seed=1)


def made(
    text: str = "four", reward: Any = None, answer: str = "", logprobs: tuple = (-0.5, -1.5), **fields: Any
) -> Any:
    """A rollout of two sampled ids."""
    from rollouts.primitives import Generation, Rollout

    generation = Generation(text, (5, 6), logprobs, prompt_tokens=(7,))
    return Rollout("?", generation, rewards=reward, metadata={"answer": answer}, **fields)


def batch_of(*rewards: float) -> Any:
    """Rollouts of one prompt, with gradient."""
    from rollouts.primitives import create_batch

    return create_batch(parts()[0], [made(reward=reward, group_index=0) for reward in rewards])


def near(value: Any, wanted: float, tolerance: float = 1e-5) -> bool:
    return math.isclose(float(value), wanted, rel_tol=tolerance, abs_tol=tolerance)


# --- 1 generation ---


@ROWS("fn load_model", "ext model_loader", "ModelConfig (NamedTuple)")
def _() -> None:
    from rollouts.primitives import ModelConfig, load_model

    assert load_model(ModelConfig("tiny", device="cpu")).config.vocab_size > 0
    assert load_model(ModelConfig("mine"), model_loader=lambda config: config.name) == "mine"


@ROWS("fn load_tokenizer", "ext tokenizer_loader")
def _() -> None:
    from rollouts.primitives import ModelConfig, load_tokenizer

    assert load_tokenizer(ModelConfig("tiny")).decode(load_tokenizer("tiny")("abc")["input_ids"]) == "abc"
    assert load_tokenizer("mine", tokenizer_loader=lambda config: config.name) == "mine"


@ROWS("fn generate", "ext generator", "GenerationConfig", "Generation")
def _() -> None:
    from rollouts.primitives import generate

    model, tokenizer, config = parts()
    first, again = (generate(model, tokenizer, QUESTION, config) for _ in range(2))
    assert first == again and 0 < len(first.tokens) <= 4 and isinstance(first.text, str)
    assert generate(model, tokenizer, QUESTION, config, generator=lambda *_: "5").text == "5"
    assert config._replace(seed=2) != config


@ROWS("fn generate_with_logprobs", "ext logprob_extractor")
def _() -> None:
    from rollouts.primitives import generate_with_logprobs

    model, tokenizer, config = parts()
    reply = generate_with_logprobs(model, tokenizer, QUESTION, config)
    assert len(reply.logprobs) == len(reply.tokens) and all(each <= 0 for each in reply.logprobs)
    own = generate_with_logprobs(
        model, tokenizer, QUESTION, config, logprob_extractor=lambda model, reply: [-1.0] * len(reply.tokens)
    )
    assert set(own.logprobs) == {-1.0}


@ROWS("fn batch_generate")
def _() -> None:
    from rollouts.primitives import batch_generate

    replies = batch_generate(*parts()[:2], [QUESTION, "What is 1 + 1?"], parts()[2])
    assert len(replies) == 2 and all(len(reply.tokens) <= 4 for reply in replies)


@ROWS("fn apply_chat_template", "ext template_fn")
def _() -> None:
    from rollouts.primitives import Message, apply_chat_template

    _, tokenizer, _ = parts()
    assert QUESTION in apply_chat_template(tokenizer, [Message("user", QUESTION)])
    shown = apply_chat_template(tokenizer, QUESTION, template_fn=lambda messages, tools: messages[0].content.upper())
    assert shown == QUESTION.upper()


@ROWS("fn generate_conversation_turn", "Conversation", "Message")
def _() -> None:
    from rollouts.primitives import Conversation, Message, generate_conversation_turn

    turn = generate_conversation_turn(*parts()[:2], Conversation([Message("user", QUESTION)], [add]), parts()[2])
    assert [message.role for message in turn.conversation.messages] == ["user", "assistant"]


@ROWS("fn extract_tool_calls", "ext tool_parser", "parse_xml_tools / parse_functions")
def _() -> None:
    from rollouts.primitives import extract_tool_calls, parse_functions, parse_xml_tools
    from rollouts.types import ToolCall

    assert [(call.name, call.arguments) for call in extract_tool_calls(CALL)] == [("add", {"a": 2, "b": 3})]
    assert extract_tool_calls("x", tool_parser=lambda text: [ToolCall(text)])[0].name == "x"
    assert extract_tool_calls(CALL, tool_parser=parse_xml_tools)[0].arguments == {"a": 2, "b": 3}
    assert callable(parse_functions)


@ROWS("fn execute_tools", "ext tool_executor")
def _() -> None:
    from rollouts.primitives import execute_tools, extract_tool_calls

    calls = extract_tool_calls(CALL)
    assert [message.content for message in execute_tools(calls, [add])] == ["5"]
    assert execute_tools(calls, tool_executor=lambda calls, tools: ["own"])[0].content == "own"


# --- 2 rewards ---


@ROWS("fn compute_scalar_reward", "ext reward_fn")
def _() -> None:
    from rollouts.primitives import compute_scalar_reward

    assert compute_scalar_reward(made("four"), lambda rollout: len(rollout.generation.text)) == 4.0
    with rows.refused("nan"):
        compute_scalar_reward(made(), lambda rollout: math.nan)


@ROWS("fn compute_vector_reward")
def _() -> None:
    from rollouts.primitives import compute_vector_reward

    assert compute_vector_reward(made(), [lambda rollout: 1.0, lambda rollout: 0.5]) == [1.0, 0.5]


@ROWS("fn aggregate_vector_rewards", "ext aggregator", "vector reward functions with aggregation")
def _() -> None:
    from rollouts.primitives import aggregate_vector_rewards

    assert aggregate_vector_rewards([1.0, 0.5], weights=[1.0, 2.0]) == 2.0
    assert aggregate_vector_rewards([1.0, 0.5], aggregator=min) == 0.5


@ROWS("fn compute_batch_rewards")
def _() -> None:
    from rollouts.primitives import compute_batch_rewards

    before = [made("a"), made("bb")]
    after = compute_batch_rewards(before, lambda rollout: float(len(rollout.generation.text)))
    assert [rollout.rewards for rollout in after] == [1.0, 2.0] and before[0].rewards is None


@ROWS("fn normalize_rewards", "ext normalizer")
def _() -> None:
    from rollouts.primitives import normalize_rewards

    low, none, high = normalize_rewards([0.0, None, 1.0])
    assert low == -high != 0 and none is None
    assert normalize_rewards([1.0, 2.0], normalizer=lambda rewards: [0.0 for _ in rewards]) == [0.0, 0.0]


@ROWS("fn apply_reward_shaping", "ext shaping_fn")
def _() -> None:
    from rollouts.primitives import apply_reward_shaping

    shaped = apply_reward_shaping(made(reward=1.0), shaping_fn=lambda reward, rollout: reward - 0.25)
    assert shaped.rewards == 0.75


@ROWS("fn load_reward_model")
def _() -> None:
    from rollouts.primitives import load_reward_model

    assert load_reward_model("mine", model_loader=lambda name: name) == "mine"


@ROWS("fn compute_reward_model_score", "ext scorer")
def _() -> None:
    from rollouts.primitives import compute_reward_model_score

    assert compute_reward_model_score("m", made("four"), scorer=lambda model, rollout: len(rollout[1].text)) == 4.0


# --- 3 KL ---


@ROWS("fn compute_forward_kl", "fn compute_reverse_kl", "ext kl_fn")
def _() -> None:
    import torch

    from rollouts.primitives import compute_forward_kl, compute_reverse_kl

    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    for compute in (compute_forward_kl, compute_reverse_kl):
        assert near(compute(policy, policy), 0.0) and compute(policy, reference) > 0
        assert near(compute(policy, reference, kl_fn=lambda a, b: (a - b).abs()), 1.0)


@ROWS("fn compute_per_token_kl")
def _() -> None:
    import torch

    from rollouts.primitives import compute_per_token_kl

    assert compute_per_token_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])).tolist()[0] == 0.0


@ROWS("fn compute_batch_kl")
def _() -> None:
    from rollouts.primitives import compute_batch_kl

    with_reference, without = compute_batch_kl([made(ref_logprobs=(-0.5, -1.5)), made()])
    assert near(with_reference, 0.0) and without is None


@ROWS("fn create_reference_model", "ext ref_model_fn")
def _() -> None:
    from rollouts.primitives import create_reference_model

    model = parts()[0]
    reference = create_reference_model(model)
    assert reference is not model and not any(each.requires_grad for each in reference.parameters())
    assert create_reference_model(model, ref_model_fn=lambda model: "another") == "another"


def moved(update: Any, iterations: int) -> float:
    """How far the reference moves towards a policy whose first weights are 1 larger."""
    import torch

    from rollouts.primitives import create_reference_model, update_reference_model

    reference, policy = (create_reference_model(parts()[0]) for _ in range(2))
    with torch.no_grad():
        next(iter(policy.parameters())).add_(1.0)
    for iteration in range(1, iterations + 1):
        reference = update_reference_model(reference, policy, update_fn=update, iteration=iteration)
    return float((next(iter(reference.parameters())) - next(iter(parts()[0].parameters()))).mean())


@ROWS("fn update_reference_model", "ext update_fn", "create_ema_updater", "create_periodic_updater")
def _() -> None:
    from rollouts.primitives import create_ema_updater, create_periodic_updater

    assert near(moved(create_ema_updater(decay=0.5), 2), 0.75, 1e-4)
    assert near(moved(create_periodic_updater(update_every=3), 2), 0.0, 1e-4)
    assert near(moved(create_periodic_updater(update_every=3), 3), 1.0, 1e-4)
    assert near(moved(lambda ref, policy: ref, 3), 0.0, 1e-4)


@ROWS("fn get_reference_logprobs", "ext ref logprob_extractor")
def _() -> None:
    from rollouts.primitives import generate_with_logprobs, get_reference_logprobs

    model, tokenizer, config = parts()
    reply = generate_with_logprobs(model, tokenizer, QUESTION, config)
    found = get_reference_logprobs(model, reply)
    assert all(near(a, b, 1e-4) for a, b in zip(found, reply.logprobs, strict=True))
    own = get_reference_logprobs(model, reply, logprob_extractor=lambda model, reply: [-1.0] * len(reply.tokens))
    assert set(map(float, own)) == {-1.0}


@ROWS("create_truncated_kl", "create_adaptive_kl(confidence_threshold)")
def _() -> None:
    import torch

    from rollouts.primitives import compute_per_token_kl, create_adaptive_kl, create_truncated_kl

    policy, reference = torch.tensor([-1.0, -0.01]), torch.tensor([-6.0, -0.02])
    truncated = compute_per_token_kl(policy, reference, kl_fn=create_truncated_kl(threshold=0.5))
    assert truncated.max() <= 0.5 and near(compute_per_token_kl(policy, policy, kl_fn=create_truncated_kl())[0], 0.0)
    policy = torch.tensor([math.log(0.05), math.log(0.5)])  # the first one is below the threshold
    reference = policy - 1.0
    weighed = compute_per_token_kl(policy, reference, kl_fn=create_adaptive_kl(confidence_threshold=0.1))
    halves = (weighed / compute_per_token_kl(policy, reference)).tolist()
    assert near(halves[0], 0.5, 1e-4) and near(halves[1], 1.0, 1e-4)


# --- 4 rollouts ---


@ROWS("fn create_rollout", "Rollout")
def _() -> None:
    from rollouts.primitives import create_reference_model, create_rollout

    model, tokenizer, config = parts()
    rollout = create_rollout(
        model,
        tokenizer,
        QUESTION,
        config,
        ref_model=create_reference_model(model),
        reward_fn=lambda rollout: 1.0,
        generator=None,
    )
    assert rollout.prompt == QUESTION and rollout.rewards == 1.0 and near(rollout.kl_divergence, 0.0, 1e-4)
    assert rollout._replace(rewards=[1.0, 2.0]).rewards == [1.0, 2.0]


@ROWS("fn create_batch_rollouts")
def _() -> None:
    from rollouts.primitives import create_batch_rollouts

    found = create_batch_rollouts(*parts()[:2], [QUESTION, "1 + 1?"], parts()[2], samples_per_prompt=2)
    assert [rollout.prompt for rollout in found] == [QUESTION, QUESTION, "1 + 1?", "1 + 1?"]


@ROWS("fn track_tool_calls", "ext tool_tracker")
def _() -> None:
    from rollouts.primitives import track_tool_calls

    assert [call.name for call in track_tool_calls(made(CALL)).tool_calls] == ["add"]
    tracked = track_tool_calls(made(CALL), tool_tracker=lambda *given: {"tools_used": 1})
    assert tracked.metadata["tools_used"] == 1


@ROWS("fn execute_and_track_tools")
def _() -> None:
    from rollouts.primitives import execute_and_track_tools

    found = execute_and_track_tools(made(CALL), [add])
    assert [call.name for call in found.tool_calls] == ["add"] and "5" in repr(found)


@ROWS("fn create_multiturn_rollout", "ext stop_condition", "tool-call tracking, multi-turn")
def _() -> None:
    from rollouts.primitives import Conversation, Message, create_multiturn_rollout, parse_xml_tools

    replies = itertools.cycle([CALL, "5", "DONE 5"])
    rollout = create_multiturn_rollout(
        *parts()[:2],
        Conversation([Message("user", QUESTION)], [add]),
        parts()[2],
        tool_parser=parse_xml_tools,
        stop_condition=lambda conversation: "5" in conversation.messages[-1].content,
        generator=lambda *_: next(replies),
    )
    assert [call.name for call in rollout.tool_calls] == ["add"] and rollout.conversation.messages[2].content == "5"


# --- 5 algorithms ---


@ROWS("fn compute_grpo_advantages", "ext advantage_fn", "Batch")
def _() -> None:
    from rollouts.primitives import compute_grpo_advantages

    batch = batch_of(1.0, 0.0)
    first, second = compute_grpo_advantages(batch).tolist()
    assert first == -second > 0 and batch.rewards.tolist() == [1.0, 0.0]
    own = compute_grpo_advantages(batch, advantage_fn=lambda rewards: [2.0 for _ in rewards])
    assert [float(each) for each in own] == [2.0, 2.0]


@ROWS("fn compute_grpo_loss", "ext loss_fn")
def _() -> None:
    from rollouts.primitives import compute_grpo_advantages, compute_grpo_loss

    batch = batch_of(1.0, 0.0)
    advantages = compute_grpo_advantages(batch)
    loss = compute_grpo_loss(batch, advantages)
    loss.backward()
    assert any(each.grad is not None and each.grad.abs().sum() > 0 for each in parts()[0].parameters())
    parts()[0].zero_grad()
    assert near(compute_grpo_loss(batch, advantages, loss_fn=lambda logprobs: logprobs * 0 + 2.0), 2.0)


@ROWS("fn compute_dapo_pairs", "ext pair_selector")
def _() -> None:
    from rollouts.primitives import compute_dapo_pairs

    batch = batch_of(0.0, 1.0)
    assert [tuple(pair) for pair in compute_dapo_pairs(batch)] == [(1, 0)]
    assert list(compute_dapo_pairs(batch, pair_selector=lambda rewards: [])) == []


@ROWS("fn compute_dapo_loss (beta)")
def _() -> None:
    from rollouts.primitives import compute_dapo_loss, compute_dapo_pairs, create_batch

    batch = create_batch(
        parts()[0], [made(reward=reward, group_index=0, ref_logprobs=(-0.5, -1.5)) for reward in (0.0, 1.0)]
    )
    loss = compute_dapo_loss(batch, compute_dapo_pairs(batch), beta=0.1)
    assert near(loss, math.log(2), 1e-3)  # both replies have the same ids


@ROWS("fn compute_ppo_advantages", "ext value_fn")
def _() -> None:
    from rollouts.primitives import compute_ppo_advantages

    batch = batch_of(1.0, 0.0)
    found = compute_ppo_advantages(batch, value_fn=lambda batch: batch.mask * 0.5, whiten=False)
    assert found.values.tolist() == (batch.mask * 0.5).tolist() and len(found.advantages) == len(batch.mask)


@ROWS("fn compute_ppo_loss")
def _() -> None:
    from rollouts.primitives import compute_ppo_advantages, compute_ppo_loss

    batch = batch_of(1.0, 0.0)
    loss = compute_ppo_loss(batch, compute_ppo_advantages(batch))
    assert loss.requires_grad and math.isfinite(float(loss))


@ROWS("fn create_algorithm_config", "fn compute_loss_by_algorithm")
def _() -> None:
    from rollouts.primitives import compute_loss_by_algorithm, create_algorithm_config

    losses = {
        name: float(compute_loss_by_algorithm(batch_of(1.0, 0.0), create_algorithm_config(name)))
        for name in ("grpo", "ppo")
    }
    assert all(map(math.isfinite, losses.values()))
    assert create_algorithm_config("grpo", {"kl_coef": 0.2}) != create_algorithm_config("grpo", {"kl_coef": 0.1})
    with rows.refused("grpoo"):
        create_algorithm_config("grpoo")


@ROWS("switch algorithm mid-training (get_algorithm(iteration))")
def _() -> None:
    from rollouts.primitives import create_algorithm_config

    seen = []

    def get_algorithm(iteration: int) -> Any:
        seen.append(iteration)
        return create_algorithm_config("grpo" if iteration < 1 else "dapo", {} if iteration < 1 else {"beta": 0.1})

    trained(algorithm_config=get_algorithm)
    assert sorted(set(seen)) == [0, 1]


# --- 6 training ---


def state() -> Any:
    """A model to train, with a reference."""
    import torch

    from rollouts.primitives import TrainingState, create_reference_model

    model = rows.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return TrainingState(model, parts()[1], optimizer, create_reference_model(model))


def trained(**given: Any) -> Any:
    """Two iterations of `train`, with two replies of four tokens."""
    from rollouts.primitives import create_algorithm_config, train

    settings = {
        "initial_state": state(),
        "prompt_loader": lambda iteration: [QUESTION],
        "num_iterations": 2,
        "gen_config": parts()[2],
        "algorithm_config": create_algorithm_config("grpo"),
        "reward_fn": lambda rollout: float(len(rollout.generation.text)),
        "samples_per_prompt": 2,
        "logger": None,
    }
    return train(**settings | given)


@ROWS("fn training_step", "TrainingState", "TrainingStats", "ext optimizer_step_fn")
def _() -> None:
    from rollouts.primitives import create_algorithm_config, training_step

    begun = state()
    before = next(iter(begun.model.parameters())).detach().clone()
    rollouts = [made(reward=1.0, group_index=0), made("x", reward=0.0, group_index=0)]
    stats = training_step(begun, rollouts, create_algorithm_config("grpo"))[1]
    assert math.isfinite(stats.loss) and stats.grad_norm > 0 and stats.mean_reward == 0.5
    assert not before.equal(next(iter(begun.model.parameters())))
    called = []
    own = {"optimizer_step_fn": lambda *given, **named: called.append(1)}
    training_step(state(), rollouts, create_algorithm_config("grpo"), **own)
    assert called == [1]


@ROWS("fn training_iteration")
def _() -> None:
    from rollouts.primitives import create_algorithm_config, training_iteration

    config = create_algorithm_config("grpo")
    after, stats = training_iteration(
        state(), [QUESTION], parts()[2], config, lambda rollout: 1.0, samples_per_prompt=2
    )
    assert after.iteration == 1 and stats.mean_reward == 1.0


@ROWS(
    "fn train(initial_state, prompt_loader, …12 functions)",
    "ext prompt_loader",
    "ext checkpoint_fn",
    "ext eval_fn",
    "ext logger",
)
def _() -> None:
    called: dict[str, int] = {}

    def note(name: str, value: Any = None) -> Any:
        def function(*args: Any, **named: Any) -> Any:
            called[name] = called.get(name, 0) + 1
            return value

        return function

    reference = state().ref_model
    final = trained(
        prompt_loader=note("prompts", [QUESTION]),
        ref_model_update_fn=note("reference", reference),
        checkpoint_fn=note("checkpoint"),
        eval_fn=note("eval", {"score": 1.0}),
        logger=note("logger"),
        checkpoint_every=1,
        eval_every=1,
    )
    assert final.iteration == 2 and final.ref_model is reference
    assert called == dict.fromkeys(("prompts", "reference", "checkpoint", "eval", "logger"), 2), called


@ROWS("fn log_to_console")
def _() -> None:
    import contextlib
    import io

    from rollouts.primitives import TrainingStats, log_to_console

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        log_to_console(TrainingStats(3, 0.5, 0.25))
    assert "3" in out.getvalue() and "0.5" in out.getvalue() and "0.25" in out.getvalue()


@ROWS("fn log_to_wandb")
def _() -> None:
    import sys
    from unittest.mock import MagicMock, patch

    from rollouts.primitives import TrainingStats, log_to_wandb

    fake = MagicMock(Error=Exception)  # W&B itself is tested in plugins/wandb
    with patch.dict(sys.modules, {"wandb": fake}):
        log_to_wandb(TrainingStats(3, 0.5, 0.25), folder=rows.new_folder())
    assert "'train/mean_reward': 0.25" in repr(fake.mock_calls)


@ROWS("fn save_checkpoint", "fn load_checkpoint")
def _() -> None:
    import torch

    from rollouts.primitives import load_checkpoint, save_checkpoint

    begun, folder = state()._replace(iteration=3), rows.new_folder()
    with torch.no_grad():
        next(iter(begun.model.parameters())).add_(1.0)
    save_checkpoint(begun, folder)
    found = load_checkpoint(state(), folder)
    assert found.iteration == 3
    assert next(iter(found.model.parameters())).equal(next(iter(begun.model.parameters())))


@ROWS("quick_start_training(model_name, prompts, reward_fn, num_iterations)")
def _() -> None:
    from rollouts.primitives import quick_start_training

    config = parts()[2]
    final = quick_start_training("tiny", [QUESTION], lambda rollout: 1.0, 1, gen_config=config)
    assert final.iteration == 1


# --- generators, documentation, style ---


@ROWS("vllm_generator / sglang_generator")
def _() -> None:
    from rollouts.primitives import generate, sglang_generator, vllm_generator

    for generator in (vllm_generator, sglang_generator):
        with rows.refused("127.0.0.1:9"):  # nothing listens there
            generate(*parts()[:2], QUESTION, parts()[2], generator=partial(generator, url="http://127.0.0.1:9"))


@ROWS("docs ARCHITECTURE.md / README")
def _() -> None:
    from rollouts import primitives

    page = (ROOT / "docs" / "primitives.md").read_text()
    assert [name for name in primitives.__all__ if f"`{name}" not in page] == []


@ROWS("docs EXAMPLES.md: 6 worked examples")
def _() -> None:
    found = [path for path in (ROOT / "examples").rglob("*.py") if "rollouts.primitives" in path.read_text()]
    assert len(found) >= 6, [path.name for path in found]


@ROWS("docs UTILITIES.md: reward builders, prompt management, visualization, testing utilities, quick-start template")
def _() -> None:
    from rollouts import primitives
    from rollouts.primitives import utilities

    exact = utilities.create_exact_match_reward()
    assert exact(made("5", answer="5")) == 1.0 and exact(made("6", answer="5")) == 0.0
    path = rows.new_folder() / "rollouts.jsonl"
    utilities.save_rollouts(path, [made("5", answer="5")])
    assert [rollout.generation.text for rollout in utilities.load_rollouts(path)] == ["5"]
    assert len(utilities.create_prompt_loader(["a", "b", "c"], 2)(0)) == 2
    assert "four" in utilities.format_rollout(made("four"))
    scripted = utilities.create_scripted_generator(["a", "b"])
    replies = [primitives.generate(*parts()[:2], QUESTION, parts()[2], generator=scripted).text for _ in range(2)]
    assert replies == ["a", "b"]


@ROWS("pure functions / NamedTuples")
def _() -> None:
    from rollouts import primitives

    kinds = ("ModelConfig", "GenerationConfig", "Conversation", "Generation", "Rollout", "Batch", "TrainingState")
    assert all(issubclass(getattr(primitives, name), tuple) for name in (*kinds, "TrainingStats"))
    before = made(reward=1.0)
    primitives.apply_reward_shaping(before, shaping_fn=lambda reward, rollout: 0.0)
    assert before.rewards == 1.0
