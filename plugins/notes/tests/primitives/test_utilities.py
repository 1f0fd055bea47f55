"""Helpers around the primitives: reward builders, prompts, files of rollouts, and models for tests."""

from __future__ import annotations

import json
import random

import pytest

from rollouts.errors import ConfigError, OutputError
from rollouts.plugins.signature import call_with, check_signature
from rollouts.primitives import (
    Conversation,
    Generation,
    Message,
    Rollout,
    ToolCall,
    as_component,
    batch_generate,
    compute_scalar_reward,
    create_exact_match_reward,
    create_prompt_loader,
    create_regex_reward,
    create_scripted_generator,
    create_truncated_kl,
    create_weighted_reward,
    encode_prompt,
    format_rollout,
    generate,
    length_reward,
    load_prompts,
    load_rollouts,
    load_tokenizer,
    rollout_of,
    save_rollouts,
    split_prompts,
    weighted_sum,
)
from rollouts.types import Segment, Status, Task, Trajectory

ROLLOUT = Rollout("2 + 3", Generation("2 + 3 = 5.", [9] * 8, [-0.5] * 8), metadata={"answer": 5})


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_rewards_that_compare_with_the_answer():
    assert create_exact_match_reward()(ROLLOUT) == 0.0
    assert create_exact_match_reward()(ROLLOUT._replace(generation=Generation(" 5\n"))) == 1.0
    assert create_regex_reward(r"-?\d+")(ROLLOUT) == 1.0
    assert create_regex_reward(r"= (\d+)", {"2 + 3": "5"})(ROLLOUT) == 1.0
    assert create_regex_reward(r"= (\d+)", {"2 + 3": "6"})(ROLLOUT) == 0.0
    assert create_regex_reward("five")(ROLLOUT) == 0.0
    assert create_regex_reward(r"=", compares=False)(ROLLOUT._replace(metadata={})) == 1.0
    messages = ROLLOUT._replace(prompt=[Message("system", "Be brief."), Message("user", "2 + 3")])
    assert create_regex_reward(r"\d", {"2 + 3": 5})(messages) == 1.0


def test_rewards_made_of_others():
    assert length_reward(ROLLOUT) == 1.0 and length_reward(ROLLOUT, target_tokens=2) == 0.25
    mixed = create_weighted_reward({"right": (create_regex_reward(r"\d+"), 2.0), "short": (length_reward, -0.5)})
    assert mixed(ROLLOUT) == 1.5
    assert create_weighted_reward({"unknown": (lambda rollout: None, 1.0)})(ROLLOUT) is None
    assert weighted_sum([1.0, 2.0]) == 3.0 and weighted_sum([1.0, None]) is None
    assert compute_scalar_reward(ROLLOUT, mixed) == 1.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: create_regex_reward("("), "no regular expression"),
        (lambda: create_regex_reward(5), "5 is no regular expression"),
        (lambda: create_weighted_reward({}), "expected a dict such as"),
        (lambda: create_weighted_reward([length_reward]), "expected a dict such as"),
        (lambda: length_reward(ROLLOUT, target_tokens=0), "target_tokens=100"),
        (lambda: create_exact_match_reward()(ROLLOUT._replace(metadata={})), r'no answer in metadata\["answer"\]'),
        (lambda: create_exact_match_reward({"3": 3})(ROLLOUT), "'2 \\+ 3' has no answer in answers"),
        (lambda: split_prompts(["a"], 1.5), r"split_prompts\(prompts, 0.1\)"),
        (lambda: create_prompt_loader([], 1), "there are no prompts"),
        (lambda: create_prompt_loader(["a"], 0), "batch_size=8"),
    ],
)
def test_what_is_wrong(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_a_reward_function_becomes_a_component_of_a_run():
    segment = Segment([1, 2, 9, 8], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, -0.5, -0.25], [-1, -1, 3, 3])
    call = ToolCall("add", {"a": 2})
    messages = [Message("user", "2 + 3"), Message("assistant", "", [call]), Message("assistant", "5")]
    task = Task("2 + 3", answer=5, info={"level": 1})
    trajectory = Trajectory(task, messages, [segment], Status.TRUNCATED)
    rollout = rollout_of(task, trajectory)
    assert rollout.generation == Generation("5", [9, 8], [-0.5, -0.25], "length")
    assert rollout.tool_calls == [call] and rollout.metadata == {"answer": 5, "level": 1}
    component = as_component(create_exact_match_reward())
    assert check_signature(component, "rewards", "mine").requests == ("task", "trajectory")
    assert call_with(component, {"task": task, "trajectory": trajectory, "env": None}) == 1.0
    assert component.__name__ == "exact_match"


def test_a_run_takes_them(tmp_path):
    import rollouts

    small = {"steps": 1, "eval_tasks": 0, "prompts_per_step": 2, "samples_per_prompt": 2, "quiet": True}
    rollouts.run(
        env="calculator",
        loss="grpo",
        reward=as_component(create_regex_reward(r"\d", compares=False)),
        kl=create_truncated_kl(threshold=2.0),
        advantage=lambda rewards: rewards - rewards.mean(),
        out=str(tmp_path / "run"),
        **small,
    )
    (metrics,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert 0 <= metrics["reward/mean"] <= 1 and "reward_part/regex_match" in metrics
    assert "policy/kl_ref" in metrics


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_of_files(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 3", "answer": 5, "level": 1}\n')
    assert load_prompts(rows) == [Task("2 + 3", 5, {"level": 1})]
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_prompts(tmp_path / "no.jsonl")


def test_a_task_is_a_prompt_of_its_messages():
    tokenizer = load_tokenizer("tiny")
    assert encode_prompt(tokenizer, Task("2 + 3")) == encode_prompt(tokenizer, [Message("user", "2 + 3")])


def test_splits():
    prompts = [f"{a} + {b}" for a in range(9) for b in range(9)]
    train, held_out = split_prompts([*prompts, prompts[0]], 0.3)
    assert not set(train) & set(held_out) and sorted([*train, *held_out]) == sorted([*prompts, prompts[0]])
    assert set(held_out) <= set(split_prompts([*prompts, "new"], 0.3)[1])
    tasks = [Task(prompt) for prompt in prompts]
    assert [task.prompt for task in split_prompts(tasks, 0.3)[1]] == split_prompts(prompts, 0.3)[1]


def test_a_prompt_loader_is_a_function_of_the_iteration():
    prompts = list("abcdefg")
    load = create_prompt_loader(prompts, 3, seed=1)
    seen = [prompt for iteration in range(7) for prompt in load(iteration)]
    assert sorted(seen) == sorted(prompts * 3) and seen[:7] != seen[7:14]
    random.seed(9)
    assert load(5) == create_prompt_loader(prompts, 3, seed=1)(5) == seen[15:18]


# --- files ------------------------------------------------------------------------------------------------------------


def add(a: int) -> int:
    """Add."""
    return a


def test_rollouts_are_read_as_they_were_written(tmp_path):
    call = ToolCall("add", {"a": 2}, "id1")
    messages = [Message("user", "2\u2028"), Message("assistant", "", [call]), Message("tool", "2", tool_call_id="id1")]
    turn = Generation("5", [9, 8], [-0.5, -0.25], "stop", [1, 2])
    whole = Rollout(messages[:1], turn, [1.0, None], 0.25, [-0.5, -0.75], None, [call], {"answer": 5}, [turn, turn])
    plain = ROLLOUT._replace(generation=ROLLOUT.generation._replace(prompt_tokens=[]), tool_calls=[], turns=[])
    path = tmp_path / "rollouts.jsonl"
    save_rollouts(path, [whole, plain])
    assert load_rollouts(path) == [whole, plain]
    save_rollouts(path, [whole._replace(conversation=Conversation(messages, [add]))])
    (read,) = load_rollouts(str(path))
    assert read.conversation.messages == messages and read.conversation.tools[0]["function"]["name"] == "add"
    path.write_text(path.read_text() + '{"prompt": "2"}\n')
    with pytest.raises(ConfigError, match=r"rollouts.jsonl, line 2: no rollout of save_rollouts \(KeyError"):
        load_rollouts(path)
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match="line 1: no rollout"):
        load_rollouts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_rollouts(tmp_path / "no.jsonl")
    with pytest.raises(OutputError, match="cannot be written: No such file or directory; give a file in an existing"):
        save_rollouts(tmp_path / "no" / "rollouts.jsonl", [plain])


def test_a_rollout_for_people():
    call = ToolCall("add", {"a": 2})
    messages = [Message("user", "2 + 3"), Message("assistant", "", [call]), Message("tool", "5")]
    shown = format_rollout(ROLLOUT._replace(conversation=Conversation(messages), rewards=[1.0, None]))
    assert shown.splitlines() == [
        "user: 2 + 3",
        "assistant: add(" + json.dumps({"a": 2}) + ")",
        "tool: 5",
        "reward 1 none, 8 tokens, stop",
    ]
    asked = format_rollout(ROLLOUT._replace(prompt=messages[:1]))
    assert asked.splitlines() == ["user: 2 + 3", "reply: 2 + 3 = 5.", "reward none, 8 tokens, stop"]


# --- tests ------------------------------------------------------------------------------------------------------------


def test_a_script():
    tokenizer = load_tokenizer("tiny")
    script = create_scripted_generator(["5", Generation("7", [3], [-1.0])])
    assert [each.text for each in batch_generate(None, tokenizer, ["a", "b"], generator=script)] == ["5", "7"]
    with pytest.raises(ConfigError, match="the script has 2 replies, and reply 3 was requested"):
        generate(None, tokenizer, "c", generator=script)
