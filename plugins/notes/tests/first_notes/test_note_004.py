"""Note 004: its snippets run on `rollouts.primitives`, with the tiny model."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from fake_engines import started
from note_blocks import block, execute

from rollouts import primitives
from rollouts.models.loading import TINY_PATH
from rollouts.primitives import (
    Conversation,
    Generation,
    GenerationConfig,
    Message,
    ModelConfig,
    Rollout,
    TrainingState,
    create_algorithm_config,
    create_multiturn_rollout,
    create_reference_model,
    create_rollout,
    load_model,
    load_tokenizer,
    parse_xml_tools,
)

NAMES = """
    load_model load_tokenizer generate generate_with_logprobs batch_generate apply_chat_template
    generate_conversation_turn extract_tool_calls execute_tools
    compute_scalar_reward compute_vector_reward aggregate_vector_rewards compute_batch_rewards normalize_rewards
    apply_reward_shaping load_reward_model compute_reward_model_score
    compute_forward_kl compute_reverse_kl compute_per_token_kl compute_batch_kl create_reference_model
    update_reference_model get_reference_logprobs
    create_rollout create_batch_rollouts track_tool_calls execute_and_track_tools create_multiturn_rollout
    compute_grpo_advantages compute_grpo_loss compute_dapo_pairs compute_dapo_loss compute_ppo_advantages
    compute_ppo_loss create_algorithm_config compute_loss_by_algorithm
    training_step training_iteration train log_to_console log_to_wandb save_checkpoint load_checkpoint
""".split()
"""The note counts 45 in six groups, and names these 44."""


@pytest.fixture(scope="module")
def tiny():
    """The model, its tokenizer, a reference and small settings: nothing here trains this model."""
    model, config = load_model(ModelConfig("tiny", device="cpu")), GenerationConfig(max_tokens=4, seed=1)
    return {
        "model": model,
        "tokenizer": load_tokenizer("tiny"),
        "ref_model": create_reference_model(model),
        "prompt": "What is 2 + 3?",
        "conversation": Conversation([Message("user", "What is 2 + 3?")]),
        "gen_config": config,
        "config": config,
    } | {name: getattr(primitives, name) for name in primitives.__all__}


def length_of(rollout: Rollout) -> float:
    return float(len(rollout.generation.text))


def made(text: str = "DONE 5", **fields) -> Rollout:
    return Rollout("?", Generation(text, (5, 6), (-0.5, -1.5), prompt_tokens=(7,)), **fields)


def test_all_functions_are_there_with_an_example():
    assert len(NAMES) == len(set(NAMES)) == 44
    missing = [name for name in NAMES if name not in primitives.__all__]
    assert missing == []
    silent = [name for name in NAMES if ">>> " not in (getattr(primitives, name).__doc__ or "")]
    assert silent == []


def test_functions_over_classes():
    compute_reward = execute(block("004/functions").partition("# We have:")[2])["compute_reward"]
    assert compute_reward(made("four"), length_of) == primitives.compute_scalar_reward(made("four"), length_of) == 4.0


def test_explicit_data_flow(tiny):
    """Everything is an argument; nothing is hidden."""
    given = {"custom_reward": length_of, "parse_tools": parse_xml_tools}
    code = block("004/explicit_data_flow", {"tool_parser=parse_tools": "tool_parser=parse_tools,"})
    rollout = execute(code, **tiny | given)["rollout"]
    assert rollout.rewards == len(rollout.generation.text) and len(rollout.generation.tokens) <= 4
    assert rollout.kl_divergence == pytest.approx(0.0, abs=1e-5)  # the reference is still a copy


def test_extension_points(tiny):
    """A generator, a KL and a loss of one's own are called."""
    called = []

    def vllm_generator(model, tokenizer, prompt, config):
        called.append("generator")
        return "5"

    def truncated_kl(logprobs, ref_logprobs):
        called.append("kl")
        return (logprobs - ref_logprobs).clamp(max=0.5)

    def custom_loss(logprobs, advantages):
        called.append("loss")
        return -logprobs * advantages

    rollouts = [made(rewards=0.0), made("6", rewards=1.0)]
    given = {
        "vllm_generator": vllm_generator,
        "truncated_kl": truncated_kl,
        "custom_loss": custom_loss,
        "logprobs": torch.tensor([-1.0, -2.0]),
        "ref_logprobs": torch.tensor([-2.0, -2.0]),
        "batch": primitives.create_batch(tiny["model"], rollouts),
        "advantages": torch.tensor([1.0, -1.0]),
    }
    found = execute(block("004/extension_points"), **tiny | given)
    assert called == ["generator", "kl", "loss"]
    assert found["generation"].text == "5"
    assert float(found["kl"]) == pytest.approx(0.25)
    assert torch.as_tensor(found["loss"]).requires_grad


def test_a_rollout_is_a_named_tuple():
    for field in ("prompt", "generation", "rewards", "kl_divergence"):
        assert f"    {field}:" in block("004/named_tuples")
        assert field in Rollout._fields
    assert made()._replace(rewards=[1.0, 2.0]).rewards == [1.0, 2.0]
    with pytest.raises(AttributeError):
        made().rewards = 3.0


def test_hackability_1_swap_reward_functions():
    given = {"correctness": lambda r: 1.0, "safety": lambda r: 0.5, "helpfulness": lambda r: 0.25}
    code = block("004/swap_rewards")
    scalar, vector = code.split("# Vector reward with aggregation")
    found = execute(scalar)["reward_fn"]
    assert primitives.compute_scalar_reward(made("four"), found) == 4.0
    found = execute(vector, **given, weighted_sum=primitives.weighted_sum)["reward_fn"]
    assert primitives.compute_scalar_reward(made(), found) == 1.75


def test_hackability_2_change_the_kl(tiny):
    code = block("004/change_kl")
    parts = ["kl_fn =" + part.partition("\n\n")[0] for part in code.split("kl_fn =")[1:]]
    logprobs, ref_logprobs = torch.tensor([-1.0, -9.0, -0.01]), torch.tensor([-4.0, -8.0, -0.02])
    given = tiny | {"my_custom_logic": lambda lp, ref_lp: lp - ref_lp}
    kls = [execute(part, **given)["kl_fn"] for part in parts]
    values = [primitives.compute_per_token_kl(logprobs, ref_logprobs, kl_fn=kl).tolist() for kl in kls]
    assert max(values[0]) <= 1.0 and min(values[0]) >= 0.0
    assert values[2] == pytest.approx([3.0, -1.0, 0.01], abs=1e-5)
    assert len(values[1]) == 3 and values[1] != values[0]


def test_hackability_3_switch_algorithms():
    get_algorithm = execute(block("004/switch_algorithms"), create_algorithm_config=create_algorithm_config)[
        "get_algorithm"
    ]
    first, second, third = (get_algorithm(iteration) for iteration in (0, 30, 60))
    assert first != second and type(first) is type(second) is type(third)
    assert "0.2" in repr(first) and "0.05" in repr(second) and "0.1" in repr(third)


def test_hackability_4_update_the_reference(tiny):
    parts = ["ref_update =" + part.partition("\n\n")[0] for part in block("004/update_reference").split("ref_update =")]
    policy = create_reference_model(tiny["model"])
    with torch.no_grad():
        next(iter(policy.parameters())).add_(1.0)
    moved = []
    for part in parts[1:]:
        update = execute(part, **tiny)["ref_update"]
        reference = create_reference_model(tiny["model"])
        for iteration in range(1, 11):
            reference = primitives.update_reference_model(reference, policy, update_fn=update, iteration=iteration)
        difference = next(iter(reference.parameters())) - next(iter(tiny["model"].parameters()))
        moved.append(difference.mean().item())
    assert moved == pytest.approx([1 - 0.999**10, 1.0, 0.0], abs=1e-4)


def test_hackability_5_track_tool_calls(tiny):
    """The model calls a tool, sees its result, and ends with DONE."""
    replies = itertools.cycle(['<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "DONE 5"])
    given = tiny | {
        "execute_functions": lambda calls, tools: [str(sum(call.arguments.values())) for call in calls],
        "create_multiturn_rollout": partial(create_multiturn_rollout, generator=lambda *_: next(replies)),
    }
    rollout = execute(block("004/track_tools"), **given)["rollout"]
    assert [call.name for call in rollout.tool_calls] == ["add"]
    assert [message.role for message in rollout.conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.conversation.messages[2].content == "5"
    assert rollout.conversation.messages[-1].content == "DONE 5"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_hackability_6_swap_the_generation_backend(tiny, kind):
    """Against the contract fake of each server; the note's functions have no address, so one is bound."""
    both = block("004/custom_backend").split("# Swap to SGLang")
    code = both[kind == "sglang"].partition("generation =")
    with started(kind, TINY_PATH, numbers="transformers") as server:
        bound = {f"{kind}_generator": partial(getattr(primitives, f"{kind}_generator"), url=server.url)}
        generation = execute("generation =" + code[2], **tiny | bound)["generation"]
    assert len(generation.tokens) <= 4 and len(generation.logprobs) == len(generation.tokens)
    assert all(math.isfinite(each) and each <= 0 for each in generation.logprobs)


def test_pattern_1_quick_start():
    changes = {'"meta-llama/Llama-3-8B"': '"tiny"', "num_iterations=100": "num_iterations=1"}
    given = {"my_prompts": ["What is 2 + 3?", "What is 4 + 4?"], "my_reward": length_of}
    quick_start = primitives.quick_start_training
    state = execute(block("004/quick_start", changes), quick_start_training=quick_start, **given)["final_state"]
    assert isinstance(state, TrainingState) and state.iteration == 1


def test_pattern_2_custom_everything(tiny, tmp_path):
    """Each of the functions is called, with what it needs."""
    called = []

    def note(name, value=None):
        def function(*args, **kwargs):
            called.append(name)
            return value

        return function

    model = load_model(ModelConfig("tiny", device="cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference = create_reference_model(model)
    given = {
        "state": TrainingState(model, tiny["tokenizer"], optimizer, reference),
        "custom_prompts": note("prompts", ["What is 2 + 3?"]),
        "algorithm_config": create_algorithm_config("grpo", {"kl_coef": 0.1}),
        "custom_reward": length_of,
        "ema_update": note("reference", reference),
        "save_checkpoint": note("checkpoint"),
        "evaluate": note("eval", {"score": 1.0}),
        "log_to_wandb": note("log"),
    }
    code = block("004/custom_everything", {"num_iterations=100": "num_iterations=2"})
    final = execute(code, train=primitives.train, gen_config=tiny["gen_config"], **given)["final_state"]
    assert final.iteration == 2
    counts = {name: called.count(name) for name in called}
    assert counts == {"prompts": 2, "reference": 2, "log": 2, "eval": 1, "checkpoint": 1}  # every tenth, and at the end


def test_pattern_3_iterative_development(tiny):
    """`...` are the four arguments of the first call."""
    code = block("004/iterative", {"create_rollout(...,": "create_rollout(model, tokenizer, prompt, gen_config,"})
    given = {
        "length_reward": length_of,
        "parse_tools": parse_xml_tools,
        "multi_objective_reward": lambda rollout: [length_of(rollout), 1.0],
        "execute_tools": lambda calls, tools: ["5" for _ in calls],
    }
    kept = []

    def recorded(function):
        def call(*args, **kwargs):
            kept.append(function(*args, **kwargs))
            return kept[-1]

        return call

    both = {"create_rollout": recorded(create_rollout), "create_multiturn_rollout": recorded(create_multiturn_rollout)}
    execute(code, **tiny | given | both)
    plain, rewarded, with_kl, with_tools, composed = kept
    assert plain.rewards is None and plain.kl_divergence is None
    assert rewarded.rewards == float(len(rewarded.generation.text))
    assert with_kl.kl_divergence == pytest.approx(0.0, abs=1e-5)
    assert list(with_tools.tool_calls) == [] and composed.conversation is not None
    assert (
        composed.metadata["reward_vector"] == [length_of(composed), 1.0] and composed.rewards == length_of(composed) + 1
    )
