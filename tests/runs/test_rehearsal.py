"""What a dry run tries out: a scripted episode, and a small training step through every function of the algorithm."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.errors import ConfigError, EnvironmentDefinitionError, RewardError, UserError
from rollouts.runs.rehearsal import REPLY, example_of, rehearse, script_of
from rollouts.types import Message, ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from composing import plan

PARTS = '''\
from rollouts import Task, metric, reward, tool


class Base:
    def tasks(self, split, rng):
        while True:
            yield Task(f"Say {rng.randrange(1000)}.")

    @tool
    def look(self, color: str, number: int = 3) -> str:
        """Look at it."""
        return f"{color} {number}"

    @reward
    def good(self, trajectory):
        return float(trajectory.last_text == "This is a scripted reply.")

    def demonstrations(self, split, rng):
        from rollouts import Message
        yield [Message("user", "Hello"), Message("assistant", "Hi")]


class Unjudged(Base):
    @reward
    def shy(self, task):
        return None


class RaisingReward(Base):
    @reward
    def few(self, trajectory):
        return trajectory.metrics["no_such_count"]


class NaN(Base):
    @reward
    def bad(self, task):
        return float("nan")


class RaisingTool(Base):
    @tool
    def look(self, color: str) -> str:
        """Look at it."""
        return {}[color]


class Chatty(Base):
    @tool
    def name(self) -> str:
        """Say your name."""
        raise ValueError("no name")

    def reply(self, trajectory):
        return f"Is that all, after {trajectory.turns} turns?"


class RaisingSetup(Base):
    def setup(self, task):
        raise OSError("no such board")


class Talking(Base):
    @metric
    def turns(self, trajectory):
        return trajectory.turns

    def reply(self, trajectory):
        return "And then?" if trajectory.turns < 4 else None


class Endless(Base):
    def reply(self, trajectory):
        return "And then?"


class Loop(Base):
    async def rollout(self, task, model):
        return await model.chat(task.messages)


def group_reward(tasks, trajectories):
    return [1.0]


def named_reward(tasks, trajectories):
    return {0: 1.0, 1: 0.5}


def broken_filter(rewards):
    return rewards[7]


def mean_loss(logprobs, advantages):
    return -(logprobs * advantages).mean()


def misspelt_loss(logprobs, advantages):
    return -logprobs * advantage


class _Loss:
    def __call__(self, logprobs, advantages):
        return mean_loss(logprobs, advantages)


loss_object = _Loss()


def long_loss(logprobs, advantages):
    if len(logprobs) > 3:
        raise ValueError("too many tokens")
    return -logprobs * advantages


def one_advantage(rewards):
    return rewards.mean()


def batch_advantage(batch, rewards, mask):
    return rewards


def scalar_kl(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).mean()


def float_correction(old_logprobs, rollout_logprobs):
    return 1.0


def float_selector(rewards):
    return rewards


def broken_reference(reference, policy):
    reference[0] = policy[10_000]


def broken_pairs(rewards):
    return [(0, 0)]


def broken_mixer(parts, weights):
    return parts


def broken_shaping(rewards):
    return rewards.sum()
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(PARTS)


def tried(env="Base", **settings) -> str:
    """What is found in a small run of this environment."""
    made = plan(env=f"./parts.py:{env}", eval_tasks=2, **settings)
    return "\n".join(rehearse(made, made.eval_tasks())[0])


def test_an_episode_is_played_by_a_script(here):
    text = tried("Talking")
    assert "a scripted episode: 8 messages, completed" in text
    assert r"<|im_start|>assistant\n'" in text
    said = "\n  assistant: 'This is a scripted reply.'"
    assert f"call: look(color='1')\n  answer: '1 3'{said}\n  user: 'And then?'{said}" in text
    assert f"\n  user: 'And then?'{said}\n  reward: 1 (good 1)\n  metrics: turns 4" in text
    assert re.search(r"\n  user: 'Say \d+\.'\n  call", text)
    assert "every function was called; ppo_clip gives one value per token, as token_mean takes" in text


def test_a_reply_that_never_ends_the_episode_is_noted(here):
    assert "\n  note: `reply` never ended the episode; it ended at --max-turns 5\n" in tried("Endless", max_turns=5)
    assert "never ended" not in tried("Talking") + tried(max_turns=1)


def test_a_loop_of_the_environments_own_is_played_too(here):
    assert "a scripted episode: 2 messages, completed" in tried("Loop")


def test_without_a_tokenizer_the_episode_is_one_of_messages(here):
    text = tried(model="org/absent")
    assert "prompt: not shown, because the tokenizer of org/absent is not on this machine" in text
    assert "answer: '1 3'\n  assistant: 'This is a scripted reply.'\n  reward: 1 (good 1)" in text


def test_a_reward_may_say_that_it_cannot_judge(here):
    unjudged = tried("Unjudged")
    assert "reward: none (good 1, shy none); shy could not judge: it returned None (" in unjudged
    assert "def shy(self" in unjudged and "did you forget `return`?" in unjudged


def test_a_tool_may_refuse_invented_arguments(here):
    text = tried("RaisingTool")
    assert "answer: \"Error: KeyError: '1'\"" in text and "a tool failed (exception)" in text
    assert re.search(r"\n    look: KeyError: '1' \(parts\.py, line \d+: return \{\}\[color\]\)", text)


@pytest.mark.parametrize("limits", [{}, {"max_turns": 3, "max_tokens": 64}])
def test_every_tool_is_called_and_a_long_conversation_is_cut(here, limits):
    text = tried("Chatty", **{"max_turns": 30, "max_tokens": 2000} | limits)
    assert "call: look(color='1')\n  answer: '1 3'\n  call: name()\n  answer: 'Error: ValueError: no name'" in text
    assert "\n    name: ValueError: no name (parts.py, line " in text
    assert "user: 'Is that all, after 3 turns?'" in text
    assert ("more messages\n" in text) is (not limits) and text.count("\n  user: ") <= 8


@pytest.mark.parametrize(
    "error, words, settings",
    [
        (
            ConfigError,
            "in a test episode with scripted replies, the reward few could not judge: KeyError",
            {"env": "RaisingReward"},
        ),
        (ConfigError, "'bad' returned nan", {"env": "NaN"}),
        (EnvironmentDefinitionError, "environment_error: running setup: OSError: no such", {"env": "RaisingSetup"}),
        (ConfigError, "'group_reward' returned [1.0] for 2 rollouts", {"reward": ["./parts.py:group_reward"]}),
        (ConfigError, "'named_reward' returned {0: 1.0, 1: 0.5} for 2", {"reward": ["./parts.py:named_reward"]}),
        (ConfigError, "broken_filter raised IndexError", {"filter": ["./parts.py:broken_filter"]}),
        (ConfigError, "the loss mean_loss returned a scalar", {"loss": "./parts.py:mean_loss"}),
        (ConfigError, "misspelt_loss raised NameError", {"loss": "./parts.py:misspelt_loss"}),
        (ConfigError, "the loss _Loss returned a scalar", {"loss": "./parts.py:loss_object"}),
        (ConfigError, "long_loss raised ValueError: too many tokens", {"loss": "./parts.py:long_loss"}),
        (ConfigError, "one_advantage got 2 rewards and", {"advantage": "./parts.py:one_advantage"}),
        (ConfigError, "batch_advantage returned as advantages shape", {"advantage": "./parts.py:batch_advantage"}),
        (ConfigError, "the KL estimator scalar_kl returned a scalar", {"kl": "./parts.py:scalar_kl"}),
        (ConfigError, "float_correction returned float", {"correction": "./parts.py:float_correction"}),
        (ConfigError, "float_selector got 4 rewards", {"select": "./parts.py:float_selector"}),
        (ConfigError, "broken_reference raised", {"kl": "rk3_loss", "reference": "./parts.py:broken_reference"}),
        (ConfigError, "returned the pair (0, 0)", {"loss": "dpo", "pairs": "./parts.py:broken_pairs"}),
        (ConfigError, "broken_mixer got", {"mix": "./parts.py:broken_mixer"}),
        (ConfigError, "broken_shaping got", {"shaping": ["./parts.py:broken_shaping"]}),
        (
            ConfigError,
            "[[schedule]], from step 5: the loss _Loss returned a scalar",
            {"schedule": [{"step": 5, "loss": "./parts.py:loss_object"}]},
        ),
    ],
    ids=lambda value: str(next(iter(value.values()))) if isinstance(value, dict) else "",
)
def test_what_fails_in_a_run_fails_here(here, error, words, settings):
    with pytest.raises(UserError) as caught:
        tried(**settings)
    assert isinstance(caught.value, error) and not isinstance(caught.value, RewardError)
    assert words in str(caught.value)
    if " raised " in words:
        assert "parts.py, line " in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "./parts.py:mean_loss"},
        {"loss": "./parts.py:misspelt_loss"},
        {"advantage": "./parts.py:one_advantage"},
        {"kl": "./parts.py:scalar_kl"},
    ],
)
def test_a_wrong_shape_is_found_when_a_run_is_composed(here, settings):
    with pytest.raises(ConfigError):
        plan(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "ppo", "critic": "head"},
        {"loss": "ppo", "critic": "tiny"},
        {"loss": "opd_topk", "teacher": "tiny"},
        {"loss": "dpo"},
        {"loss": "rft"},
        {"loss": "gspo", "minibatches": 2},
        {"kl": "k1_reward", "lora_rank": 4},
        {"loss": "reinforce_pp", "samples_per_prompt": 1},
        {"schedule": [{"step": 5, "loss": "cispo"}]},
    ],
    ids=str,
)
def test_every_kind_of_algorithm_is_tried(here, settings):
    assert tried(**settings).count("every function was called") == 1 + len(settings.get("schedule", ()))


def test_demonstrations_are_tried(here):
    text = tried(mode="sft", steps=2, prompts_per_step=3)
    assert "\n6 demonstrations: " in text and "cross_entropy gives one value per token" in text


NOT_REPLAYED = (
    "ok: everything was checked; no model was loaded, no demonstration was replayed (`rollouts check` does it), and "
    "nothing was written\n"
)


@pytest.mark.parametrize("rows", [False, True])
def test_a_dry_run_says_how_many_conversations_it_tried(here, capsys, rows):
    lines = [json.dumps({"prompt": f"What is {n}?", "response": str(n)}) for n in range(130)]
    Path("all.jsonl").write_text("\n".join(lines[:100]))
    Path("more.jsonl").write_text("\n".join(lines))
    of_all, of_more = ["--data", "all.jsonl"], ["--data", "more.jsonl"]
    if not rows:
        of_all = ["--env", "./parts.py:Base", "--steps", "10", "--prompts-per-step", "10"]
        of_more = ["--env", "./parts.py:Base", "--steps", "13", "--prompts-per-step", "10"]
    assert main(["sft", *of_all, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "\n100 " in out and out.endswith(
        "ok: everything was checked; no model was loaded, and nothing was written\n" if rows else NOT_REPLAYED
    )
    assert main(["sft", *of_more, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        "\nthe first 100 " in out and "ok: everything was checked, and of the data the first 100 conversations; " in out
    )


def test_a_bad_conversation_among_the_first_is_refused(here, capsys):
    rows = [json.dumps({"prompt": "a", "response": "b"})] * 7 + ['{"prompt": "a"}', "no JSON"]
    Path("bad.jsonl").write_text("\n".join(rows))
    assert main(["sft", "--data", "bad.jsonl", "--dry-run"]) == 2
    assert "bad.jsonl, line 8" in capsys.readouterr().err
    assert main(["sft", "--data", "bad.jsonl", "--data.bad-rows", "skip", "--dry-run"]) == 0
    assert "7 conversations from prompt and response: " in (out := capsys.readouterr().out) and "2 rows skipped" in out


def test_the_command_says_what_it_found(here, capsys):
    assert main(["run", "--env", "./parts.py:Base", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith(f"takes\n\n{NOT_REPLAYED}")
    assert main(["run", "--env", "./parts.py:RaisingSetup", "--dry-run"]) == 2
    assert "no such board" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} <= {"parts.py", "__pycache__"}


def test_a_script_fits_its_tools():
    assert script_of([]) == [Message("assistant", REPLY)]
    schema = {
        "type": "object",
        "properties": {"deep": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        "required": ["deep"],
    }
    call, reply = script_of([{"function": {"name": "f", "parameters": schema}}])
    assert call.tool_calls == [ToolCall("f", {"deep": {"n": 1}}, "call_1")] and reply.text == REPLY


@pytest.mark.parametrize(
    "schema, value",
    [
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, 1.0),
        ({"type": ["boolean", "null"]}, True),
        ({"const": "only"}, "only"),
        ({"type": "integer", "minimum": 5}, 5),
        ({"type": "object"}, {}),
        ({"type": "integer", "default": 0}, 0),
        ({"type": "integer", "exclusiveMinimum": 3, "maximum": 9}, 4),
        ({"type": "number", "exclusiveMaximum": -1.5}, -2.5),
    ],
)
def test_an_example_fits_its_schema(schema, value):
    assert example_of(schema) == value


def test_the_simulated_user_of_the_documentation_is_played(here):
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    (code,) = (block for block in page.split("```") if "class Cafe" in block)
    Path("cafe.py").write_text(code.removeprefix("python\n"))
    made = plan(env="./cafe.py:Cafe", eval_tasks=2)
    text = "\n".join(rehearse(made, made.eval_tasks())[0])
    assert "a scripted episode: 6 messages, completed" in text
    assert "answer: 'Error: ValueError: there is no 1; we have tea, cake'" in text
    assert "user: 'How much is that? Answer with a number only.'\n  assistant: '" in text
