"""Environments of rollouts, played from gymnasium."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading

import forks
import gymnasium
import pytest
from gymnasium.error import Error, ResetNeeded
from gymnasium.utils.env_checker import check_env
from rollouts_gymnasium import envs, registry
from rollouts_gymnasium.bridge import RolloutsEnv, as_text, reply_of
from rollouts_gymnasium.spaces import AnyText

from rollouts.errors import ConfigError, UnknownComponentError
from rollouts.types import Message, ToolCall

HIGHER = '''\
from pathlib import Path

from rollouts import Role, Task, Tool, reward, tool


class Higher:
    """Guess a number in a few turns."""

    def __init__(self, log: str = "", broken: bool = False, verdict: bool = True):
        self.log, self.broken, self.verdict = log, broken, verdict

    def tasks(self, split, rng):
        while True:
            number = rng.randint(1, 99)
            yield Task(f"Guess my number. It is {'even' if number % 2 == 0 else 'odd'}. ☃", answer=number)

    def setup(self, task):
        self.answer, self.left = task.answer, 3
        if self.broken:
            raise OSError("no numbers today")

    @tool
    def hint(self, digits: int) -> str:
        """The last digits.

        Args:
            digits: how many
        """
        return str(self.answer)[-digits:]

    def reply(self, trajectory):
        self.left -= 1
        if trajectory.last_text == str(self.answer) or self.left == 0:
            return None
        return "Wrong."

    def close(self):
        if self.log:
            with Path(self.log).open("a") as file:
                file.write("closed ")

    @reward
    def right(self, task, trajectory):
        return float(trajectory.last_text == str(task.answer)) if self.verdict else None


class Listed(Higher):
    def tasks(self, split, rng):
        return [Task(f"Guess number {number}.", answer=number) for number in range(20)]


class Both:
    """A seller and a buyer."""

    roles = (Role("seller", system="You sell."), Role("buyer", system="You buy."))

    def tasks(self, split, rng):
        while True:
            yield Task(f"A lamp for {rng.randint(1, 999)}.")

    async def rollout(self, task, model):
        said = await model.role("seller").say(task.prompt)
        await model.role("buyer").say(said.text)

    @reward(role="seller")
    def sells(self, trajectory):
        return float(trajectory.last_text == "sell")

    @reward(role="buyer")
    def buys(self, trajectory):
        return float(trajectory.last_text == "buy")
'''


@pytest.fixture
def higher(tmp_path):
    (tmp_path / "higher.py").write_text(HIGHER)
    return f"{tmp_path}/higher.py:Higher"


def call(name, **arguments):
    return json.dumps({"tool_calls": [{"name": name, "arguments": arguments}]})


def play(env, replies, seed=3):
    """What an agent reads and earns with these replies."""
    steps = [env.reset(seed=seed)]
    for reply in replies:
        steps.append(env.step(reply))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


@pytest.mark.parametrize("name", ["calculator", "Higher", "Listed", "Both"])
def test_gymnasiums_own_checker_finds_nothing(higher, name):
    names = {"calculator": "rollouts/calculator-v0"}
    kwargs = {} if name in names else {"environment": higher.replace("Higher", name)}
    env = gymnasium.make(names.get(name, envs.ANY), render_mode="ansi", **kwargs)
    check_env(env.unwrapped)
    env.close()


def test_a_random_agent_plays(higher):
    for env_id, kwargs in (("rollouts/calculator-v0", {}), (envs.ANY, {"environment": higher})):
        env = gymnasium.make(env_id, **kwargs)
        env.action_space.seed(1)
        for seed in range(5):
            text, _ = env.reset(seed=seed)
            assert text in env.observation_space
            ended = False
            while not ended:
                text, reward, terminated, truncated, info = env.step(env.action_space.sample())
                ended = terminated or truncated
                assert text in env.observation_space and reward == 0.0
            assert info["status"] == "completed"
        env.close()


def test_an_agent_that_calls_the_tool_earns_the_reward():
    env = gymnasium.make("rollouts/calculator-v0", settings={"digits": 3})
    for seed in range(4):
        text, info = env.reset(seed=seed)
        tools, question = text.removeprefix("[tools]\n").split("\n\n")
        assert json.loads(tools) == info["tools"][0]
        expression = question.removeprefix("What is ").removesuffix("?")
        text, reward, *ends, info = env.step(call("calculator", expression=expression))
        assert text == f"[tool calculator] {eval(expression)}" and reward == 0.0 and ends == [False, False]
        _, reward, terminated, truncated, info = env.step(f"It is {eval(expression)}.")
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert info["parts"] == {"correct": 1.0} and info["metrics"]["tool_calls"] == 1
    env.close()


def test_a_seed_gives_the_same_task_again_and_others_give_others(higher):
    for environment in (higher, higher.replace("Higher", "Listed")):
        env, other = RolloutsEnv(environment), RolloutsEnv(environment)
        assert play(env, ["1", "2", "3"]) == play(other, ["1", "2", "3"])
        found = {env.reset(seed=seed)[1]["task"] for seed in range(30)}
        assert len(found) > 1
        first = [env.reset(seed=0), *(env.reset() for _ in range(3))]
        assert first == [other.reset(seed=0), *(other.reset() for _ in range(3))]
        env.close(), other.close()


def test_held_out_tasks_are_not_those_of_training(higher):
    environment = higher.replace("Higher", "Listed")
    env, held_out = RolloutsEnv(environment), RolloutsEnv(environment, split="eval", run={"eval_tasks": 3})
    assert len({held_out.reset(seed=seed)[1]["task"] for seed in range(30)}) == 3
    env.close(), held_out.close()


def test_environments_in_a_vector_are_reset_by_their_seeds(higher):
    vector = gymnasium.make_vec(envs.ANY, num_envs=3, vectorization_mode="sync", environment=higher)
    single = RolloutsEnv(higher)
    for seeds in ([5, 6, 7], 5):
        texts, _ = vector.reset(seed=seeds)
        assert list(texts) == [single.reset(seed=seed)[0] for seed in (5, 6, 7)]
    texts, rewards, *_ = vector.step(("1", call("hint", digits=1), "3"))
    assert len(texts) == 3 and texts[1].startswith("[tool hint] ") and rewards.tolist() == [0.0, 0.0, 0.0]
    vector.close(), single.close()


def test_rewards_and_ends(higher):
    env = RolloutsEnv(higher, run={"max_turns": 2})
    assert [step[1:4] for step in play(env, ["1", "2"])[1:]] == [(0.0, False, False), (0.0, False, True)]
    env.close()
    env = RolloutsEnv(higher, {"verdict": False})
    steps = play(env, ["1", "2", "3"])
    assert math.isnan(steps[-1][1]) and steps[-1][4]["score"] is None and len(steps) == 4
    with pytest.raises(ResetNeeded, match="call reset first"):
        env.step("4")
    env.close()


def test_every_role_is_played(higher):
    env = RolloutsEnv(higher.replace("Higher", "Both"))
    text, info = env.reset(seed=0)
    assert text.startswith("[system] You sell.\n\nA lamp for ") and info["role"] == "seller"
    text, _, _, _, info = env.step("sell")
    assert text.startswith("[system] You buy.") and text.endswith("sell") and info["role"] == "buyer"
    assert env.step("no")[1] == 0.5
    env.close()


def test_an_episode_that_is_left_is_closed(higher, tmp_path):
    threads, log = threading.active_count(), tmp_path / "log"
    env = RolloutsEnv(higher, {"log": str(log)})
    env.reset(seed=0)
    env.reset(seed=1)
    assert log.read_text() == "closed "
    env.step("1")
    env.close()
    env.close()
    assert log.read_text() == "closed closed "
    assert threading.active_count() <= threads + 2  # trio keeps idle worker threads for a while


def test_an_environment_that_fails_says_why(higher):
    env = RolloutsEnv(higher, {"broken": True})
    with pytest.raises(Error, match=r"the episode failed: environment_error: .*no numbers today"):
        env.reset(seed=0)
    env.close()


def test_mistakes():
    for make, kind, message in (
        (lambda: gymnasium.make(envs.ANY, environment="calulator"), UnknownComponentError, "did you mean: calculator"),
        (lambda: RolloutsEnv("calculator", {"digts": 1}), ConfigError, "did you mean"),
        (lambda: RolloutsEnv("calculator", run={"max_turn": 1}), ConfigError, "did you mean"),
        (lambda: RolloutsEnv("calculator", split="test"), Error, "expected 'train' or 'eval'"),
    ):
        with pytest.raises(kind, match=message):
            make()


def test_the_form_of_replies():
    assert (
        reply_of("plain").text == "plain" and reply_of("[1]").text == "[1]" and reply_of('{"a": 1}').text == '{"a": 1}'
    )
    both = reply_of(
        '{"content": "Let me see.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}, {"name": "end"}]}'
    )
    assert both.text == "Let me see." and [each.arguments for each in both.tool_calls] == [{"a": 1}, {}]
    assert len({each.id for each in both.tool_calls}) == 2
    for wrong in ('["add"]', '[{"name": 1}]', '[{"name": "add", "arguments": "1"}]'):
        (made,) = reply_of(f'{{"tool_calls": {wrong}}}').tool_calls
        assert made.error.startswith("a call is an object such as")


def test_messages_as_text():
    calls = [ToolCall("add", {"a": 1}, "x")]
    messages = [Message("system", "Be brief."), Message("user", "1 + 1?"), Message("assistant", "", calls)]
    messages += [Message("tool", "2", tool_call_id="x", name="add")]
    assert as_text(messages) == (
        '[system] Be brief.\n\n1 + 1?\n\n[assistant] {"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}\n\n'
        "[tool add] 2"
    )


def test_texts_of_any_characters():
    space = AnyText(seed=0)
    assert "☃" in space and "" in space and 3 not in space and "abc" not in AnyText(2)
    samples = [space.sample() for _ in range(50)]
    assert samples == [each for each in samples if each in space] and len(set(samples)) > 40
    again = AnyText(seed=0)
    assert [again.sample() for _ in range(50)] == samples and again == space != AnyText(5)


def test_registering_imports_no_environment_and_needs_no_order():
    code = (
        "import gymnasium, sys; env = gymnasium.make('rollouts_gymnasium.envs:rollouts/calculator-v0'); "
        "text, info = env.reset(seed=0); assert '\\n\\nWhat is ' in text, text; env.close()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    code = "import sys, rollouts_gymnasium.envs; assert 'rollouts_calculator' not in sys.modules"
    assert forks.run([sys.executable, "-c", code], timeout=120).returncode == 0
    assert envs.register() == envs.register() and "rollouts/calculator-v0" in envs.register()


def test_ours_are_not_offered_again():
    assert envs.ANY in gymnasium.registry
    assert not [name for name in registry.known_ids() if name.startswith("rollouts/")]
