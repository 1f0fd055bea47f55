from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys

import forks
import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Sequence
from rollouts_gymnasium.environment import environment_class
from rollouts_gymnasium.views import colors_as_tags

from rollouts.check import check_environment_class
from rollouts.cli import main
from rollouts.errors import ConfigError
from rollouts.runs.play import play_episode, play_plan, scripted
from rollouts.types import Message, Status, ToolCall, Trajectory

DRY = {"is_slippery": False}


class Rooms(gymnasium.Env):
    """Walk to the last room.

    ## Description
    There are three rooms in a row.

    ## Action Space
    Not shown.
    """

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = Dict({"place": Discrete(3), "image": Box(0, 255, (64, 64, 3), np.uint8)})
    action_space = Discrete(2)

    def __init__(self, render_mode=None, is_fair=True, has_image=True, sees=None, acts=None):
        self.is_fair, self.place = is_fair, 0
        if not has_image:
            self.observation_space = Dict({"place": Discrete(3)})
        self.observation_space = sees or self.observation_space
        self.action_space = acts or self.action_space

    def _seen(self):
        return {"place": self.place, "image": np.zeros((64, 64, 3), np.uint8)}, {"where": f"room {self.place}"}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(2)) if self.is_fair else random.randrange(10**9)
        return self._seen()

    def step(self, action):
        self.place = min(self.place + int(np.sum(action)), 2)
        seen, info = self._seen()
        return seen, 1.0, self.place == 2, False, info


@pytest.fixture
def rooms():
    """The ids of registered environments of this file."""
    gymnasium.register("test/Rooms-v0", Rooms, max_episode_steps=4)
    gymnasium.register("test/Plain-v0", Rooms, kwargs={"has_image": False})
    gymnasium.register("test/Unfair-v0", Rooms, kwargs={"has_image": False, "is_fair": False})
    gymnasium.register("test/Acts-v0", Rooms, kwargs={"has_image": False, "acts": Sequence(Discrete(2))})
    gymnasium.register("test/Chance-v0", Rooms, nondeterministic=True)
    yield
    for name in ("Rooms", "Plain", "Unfair", "Acts", "Chance"):
        del gymnasium.registry[f"test/{name}-v0"]


def episode(name, reply, *, max_turns=50, **settings):
    """A real episode, in which `reply` is a list of replies, or a function. The last reply is repeated."""
    with play_plan({"env": {"name": name, **settings}, "max_turns": max_turns}) as plan:
        task = next(plan.environments[0].draw("train", random.Random(0)))
        messages = [Message("assistant", each) if isinstance(each, str) else each for each in reply]
        return play_episode(plan, task, 0, scripted(messages))


def act(action):
    return Message("assistant", "", [ToolCall("act", {"action": action}, "call_0")])


def texts(played, role):
    return [message.text for message in played.trajectory.messages if message.role == role]


def demonstration(env, split="train"):
    """The first task of an environment, and its demonstration."""
    task = next(env.tasks(split, random.Random(5)))
    return task, next(env.demonstrations(split, random.Random(5)))


# --- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actions", ["text", "tool"])
@pytest.mark.parametrize("rewards", ["sum", "turn"])
def test_an_expert_in_a_real_episode(actions, rewards):
    env = environment_class("FrozenLake-v1")(kwargs=DRY, actions=actions)
    task, messages = demonstration(env)
    assert messages[0].text == task.prompt
    replies = [message for message in messages if message.role == "assistant"]
    played = episode("gym/FrozenLake-v1", replies, kwargs=DRY, actions=actions, rewards=rewards)
    assert played.status is Status.COMPLETED and played.score.value == 1.0
    assert played.score.turns == ([] if rewards == "sum" else [0, 0, 0, 0, 0, 1] + [0] * (actions == "tool"))
    assert played.metrics["metric/steps"] == 6
    theirs = [(message.role, message.text) for message in messages]
    assert [(message.role, message.text) for message in played.trajectory.messages] == theirs


def test_the_prompt_says_how_to_act_and_when_it_ends():
    task = next(environment_class("FrozenLake-v1")().tasks("train", random.Random(0)))
    rules, how, limit, seen = task.prompt.rsplit("\n\n", 3)
    assert rules.startswith("Frozen lake involves crossing") and "Action Space" not in rules
    assert how == "Reply with your action and nothing else: one of: left, down, right, up."
    assert limit == "The episode ends after 100 steps."
    assert seen == "<red>S</red>FFF\nFHFH\nFFFH\nHFFG"
    short = environment_class("FrozenLake-v1")(instructions="", observe="observation")
    assert next(short.tasks("train", random.Random(0))).prompt == "0"


@pytest.mark.parametrize("count", [0, 2])
def test_invalid_actions_are_bounded(count):
    played = episode("gym/FrozenLake-v1", ["fly"], max_errors=count)
    assert played.trajectory.turns == count + 1 and played.score.value == 0.0
    wrong = "Error: 'fly' is no legal action. Write one of: left, down, right, up."
    assert texts(played, "user")[1:] == [wrong] * count
    assert played.metrics["metric/invalid_actions"] == count + 1 and played.metrics["metric/steps"] == 0


def test_a_model_that_corrects_itself_goes_on():
    played = episode("gym/FrozenLake-v1", ["fly", *["down", "down", "right", "right", "down", "right"]], kwargs=DRY,
                     rewards="turn")  # fmt: skip
    assert played.score.turns == [0, 0, 0, 0, 0, 0, 1]


def test_a_wrong_call_is_an_error_that_names_the_legal_actions():
    calls = [act("fly"), Message("assistant", "hello"), act("down"), "bye"]
    played = episode("gym/FrozenLake-v1", calls, actions="tool", max_errors=1, kwargs=DRY)
    first, second = texts(played, "tool")
    assert first.startswith("Error: argument 'action' of act must be one of down, left, right, up")
    assert second.startswith("  (Down)\nSFFF\n<red>F</red>HFH")
    assert texts(played, "user")[1:] == ["Error: call the tool act with your action: one of: left, down, right, up."]


def test_a_call_after_the_end_is_refused_and_has_no_reward():
    calls = [act(action) for action in ("down", "right")] + [act("left"), "done"]  # (1, 1) is a hole
    played = episode("gym/FrozenLake-v1", calls, actions="tool", kwargs=DRY, rewards="turn")
    *_, last, after = texts(played, "tool")
    assert last.endswith("<red>H</red>FH\nFFFH\nHFFG\n\nThe episode is over.")
    assert after.startswith("Error: ") and "the episode is over; write a last message" in after
    assert played.score.turns == [0.0] * 4 and played.metrics["metric/steps"] == 2


def test_several_calls_in_one_turn_earn_in_that_turn():
    both = [ToolCall("act", {"action": "right"}, "a"), ToolCall("act", {"action": "right"}, "b")]
    calls = [Message("assistant", "", both), act("up"), "done"]
    played = episode("gym/CliffWalking-v1", calls, actions="tool", rewards="turn", max_turns=3)
    assert played.score.turns == [-200.0, -1.0, 0.0]


def test_the_step_limit_ends_the_episode():
    played = episode("gym/FrozenLake-v1", ["left"], max_steps=3)
    assert played.trajectory.turns == 3 and "after 3 steps" in played.task.prompt
    assert episode("gym/CartPole-v1", ["left"]).trajectory.turns < 15


def test_a_step_whose_deadline_passed_leaves_no_false_reward():
    env = environment_class("CliffWalking-v1")(actions="tool")
    task = next(env.tasks("train", random.Random(0)))
    env.setup(task)
    result = env._act("up")
    late = "Error: act took longer than 30 seconds"
    for text, expected in ((result, -1.0), (late, None)):
        messages = [*task.messages, act("up"), Message("tool", text, name="act", tool_call_id="call_0")]
        found = env.upstream(Trajectory(task, messages))
        assert (found if isinstance(found, float) else found.value) == expected
    env.close()


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Blackjack-v1", "BabyAI-GoToRedBall-v0", "Pendulum-v1"])
def test_a_restored_episode_goes_on_as_the_first_one(name):
    def replies(env, task, actions):
        messages = list(task.messages)
        for action in actions:
            messages.append(Message("assistant", action))
            yield env.reply(Trajectory(task, messages))

    cls = environment_class(name)
    space = cls().facts().action_space
    space.seed(3)
    codec = cls()._codec
    actions = ["nonsense", *(codec.write(space.sample()) for _ in range(12))]
    for cut in (0, 1, 5):
        first, second = cls(rewards="turn"), cls(rewards="turn")
        task = next(first.tasks("train", random.Random(2)))
        first.setup(task)
        list(replies(first, task, actions[:cut]))
        state = json.loads(json.dumps(first.state()))
        second.setup(task)
        second.restore(state)
        ours, theirs = (list(replies(env, task, actions[cut:])) for env in (second, first))
        assert ours == theirs and second._gains == first._gains and second.state() == first.state()
        first.close(), second.close()


def test_a_state_of_another_episode_is_refused():
    env = environment_class("CartPole-v1")()
    tasks = env.tasks("train", random.Random(0))
    env.setup(next(tasks))
    state = env.state()
    env.setup(next(tasks))
    with pytest.raises(RuntimeError, match="the same actions led to another observation; CartPole-v1 is not"):
        env.restore(state)
    env.close()


def test_a_seed_that_does_not_decide_the_environment(rooms):
    played = episode("gym/test/Unfair-v0", ["0"])
    assert played.status is Status.ENVIRONMENT_ERROR
    assert "gave another first observation than when the task was drawn" in played.trajectory.error


def test_an_environment_of_a_module(tmp_path, monkeypatch):
    code = "import gymnasium; gymnasium.register('Own-v0', 'gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv')"
    (tmp_path / "own_environments.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert episode("gym/own_environments:Own-v0", ["0"], max_turns=2).metrics["metric/steps"] == 2
    del gymnasium.registry["Own-v0"]


# --- codecs and views -------------------------------------------------------------------------------------------------

CODEC = """\
import json


class Codec:
    legal = "stay or go"

    def __init__(self):
        self.words = ["stay", "go"]

    def show(self, observation, info, env):
        assert env.unwrapped.place == observation["place"]
        return f"You are in {info['where']}."

    def read(self, text):
        if text not in self.words:
            raise ValueError(f"{text} is neither stay nor go")
        return self.words.index(text)


def show(observation, info):
    return "at " + str(observation["place"])


def read(text):
    return int(text)


class Other:
    pass
"""


def test_a_space_without_codec_says_how_to_give_one(rooms, capsys):
    assert main(["play", "gym/test/Rooms-v0"]) == 2
    printed = capsys.readouterr().err
    assert "the observation space has no text codec: Box(64, 64, 3) has 12288 numbers" in printed
    assert "--env.codec ./my_codec.py:Codec" in printed and "def show(self, observation, info)" in printed
    assert "--env.observe ansi, or info:KEY" in printed
    assert main(["play", "gym/test/Acts-v0"]) == 2
    assert "the action space has no text codec: Sequence is not one of Discrete" in capsys.readouterr().err


@pytest.mark.parametrize("actions", ["text", "tool"])
def test_a_codec_of_your_own(rooms, tmp_path, actions):
    (tmp_path / "codec.py").write_text(CODEC)
    calls = ["jump", "stay", "go", "go"]
    calls = [*map(act, calls), "done"] if actions == "tool" else calls
    played = episode("gym/test/Rooms-v0", calls, codec=f"{tmp_path}/codec.py:Codec", actions=actions)
    read = texts(played, "tool" if actions == "tool" else "user")
    assert "stay or go" in played.task.prompt and "in room" in played.task.prompt
    assert any("jump is neither stay nor go" in text for text in read)
    assert played.score.value == played.metrics["metric/steps"] >= 2.0


def test_a_codec_of_two_functions_or_of_one(rooms, tmp_path):
    (tmp_path / "codec.py").write_text(CODEC)
    both = [f"{tmp_path}/codec.py:show", f"{tmp_path}/codec.py:read"]
    played = episode("gym/test/Rooms-v0", ["0", "1", "1"], codec=both)
    assert "at " in played.task.prompt and played.score.value >= 2
    played = episode("gym/test/Rooms-v0", ["one", "1", "1"], codec=[both[0], ""])
    assert "Write a whole number from 0 to 1." in texts(played, "user")[1]
    played = episode("gym/test/Plain-v0", ["1", "1"], codec=["", both[1]])
    assert "place: " in played.task.prompt


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("codec.py:Other", "it has neither `show` nor `read`"),
        ("codec.py:Codecs", "did you mean: Codec"),
        ("missing.py:Codec", "there is no file"),
        ("codec", "expected ./my_codec.py:Codec, or module:Codec"),
        (["codec.py:show"] * 3, "expected two functions"),
    ],
)
def test_a_codec_that_is_none(rooms, tmp_path, monkeypatch, capsys, codec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "codec.py").write_text(CODEC)
    given = codec if isinstance(codec, str) else json.dumps(codec)
    assert main(["play", "gym/test/Rooms-v0", "--env.codec", given]) == 2
    assert message in capsys.readouterr().err


def test_a_view_of_info_and_names_of_actions(rooms):
    settings = {"observe": "info:where", "action_names": ["stay", "go"]}
    played = episode("gym/test/Rooms-v0", ["stay", "go", "go"], **settings)
    assert [text[:5] for text in texts(played, "user")[1:]] == ["room "] * (played.trajectory.turns - 1)
    assert "one of: stay, go" in played.task.prompt and "There are three rooms in a row." in played.task.prompt
    assert "Not shown" not in played.task.prompt


def test_colors_become_tags():
    assert colors_as_tags("|\x1b[34;1mR\x1b[0m: |\x1b[43m \x1b[0m|\n") == "|<blue>R</blue>: |<yellow> </yellow>|"
    assert colors_as_tags("\x1b[34m\x1b[42mR\x1b[0m\x1b[0m") == "<blue><green>R</green></blue>"
    assert colors_as_tags("plain\x1b[0m") == "plain"


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kwargs", "best"),
    [
        ("FrozenLake-v1", DRY, 6),  # the shortest way is 6 steps
        ("FrozenLake8x8-v1", DRY, 14),
        ("CliffWalking-v1", {}, 13),  # one up, 11 right, one down
    ],
)
def test_an_expert_takes_the_shortest_way(name, kwargs, best):
    env = environment_class(name)(kwargs=kwargs)
    first = itertools.islice(env.demonstrations("train", random.Random(0)), 8)
    ways = [[message.text for message in each if message.role == "assistant"] for each in first]
    assert set(map(len, ways)) == {best}
    assert (len(set(map(tuple, ways))) > 1) == (name != "CliffWalking-v1")  # equally good ways differ


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "CliffWalkingSlippery-v1", "BabyAI-PickupLoc-v0"])
def test_demonstrations_are_of_the_tasks_in_the_same_order_and_can_be_replayed(name):
    env = environment_class(name)()
    tasks = env.tasks("train", random.Random(4))
    for messages, task in itertools.islice(zip(env.demonstrations("train", random.Random(4)), tasks, strict=False), 5):
        assert messages[0].text == task.prompt
        again = environment_class(name)()
        again.setup(task)
        for place in range(1, len(messages), 2):
            answer = again.reply(Trajectory(task, messages[: place + 1]))
            assert answer == (messages[place + 1].text if place + 1 < len(messages) else None)
        assert again._gains[-1] == {"Taxi-v4": 20, "CliffWalkingSlippery-v1": -1}.get(name, again._gains[-1]) != 0
        again.close()


def test_an_environment_without_expert_has_no_demonstrations(capsys):
    assert not hasattr(environment_class("CartPole-v1"), "demonstrations")
    assert not hasattr(environment_class("BabyAI-KeyInBox-v0"), "demonstrations")
    assert main(["sft", "--env", "gym/CartPole-v1", "--dry-run"]) == 2
    assert "has no demonstrations" in capsys.readouterr().err


# --- mistakes, and what is imported -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gym/FrozenLak-v1"], "did you mean: gym/FrozenLake-v1"),
        (
            ["gym/LunarLander-v3"],
            "needs the module Box2D, which is not installed\ntype: pip install",
        ),
        (
            ["gym/HalfCheetah-v2"],
            "gym/HalfCheetah-v2 cannot be made: ImportError: The mujoco v2",
        ),
        (["gym/no_such_module:Rooms-v0"], "No module named 'no_such_module'"),
        (["gym/FrozenLake-v1", "--env.kwargs.foo", "3"], "unexpected keyword argument 'foo'"),
        (["gym/FrozenLake-v1", "--env.kwargs.foo", "3"], 'its keyword arguments are {"foo": 3}'),
        (["gym/FrozenLake-v1", "--env.kwargs.render_mode", "ansi"], "type --env.observe ansi"),
        (["gym/FrozenLake-v1", "--env.observe", "anso"], "did you mean: --env.observe ansi?"),
        (["gym/CartPole-v1", "--env.observe", "info:x"], "gym/CartPole-v1 has: auto, observation"),
        (["gym/FrozenLake-v1", "--env.action-names", '["a"]'], "expected 4 different names"),
        (["gym/Pendulum-v1", "--env.action-names", '["a"]'], "is not Discrete"),
        (["gym/FrozenLake-v1", "--env.max-errors", "-1"], "expected at least 0"),
        (["gym/FrozenLake-v1", "--env.max-steps", "0"], "expected at least 1"),
        (["gym/FrozenLake-v1", "--env.actions", "words"], "text, tool"),
        (["gym/test/Chance-v0"], "is registered as nondeterministic"),
    ],
)
def test_mistakes_are_one_message(rooms, capsys, words, message):
    assert main(["play", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed and len(printed) < 1500


def test_an_unknown_name_does_not_list_all_environments(capsys):
    assert main(["play", "no_such_environment"]) == 2
    printed = capsys.readouterr().err
    assert "gym/... (" in printed and "gym/CartPole-v1" not in printed
    assert "to see everything: rollouts plugins list --all" in printed


def test_the_hooks_import_no_gymnasium():
    code = (
        "import sys; from rollouts.plugins import PluginManager; manager = PluginManager(); "
        "faults = manager.load_hooks(); assert not faults, faults; "
        "assert 'rollouts_gymnasium.hooks' in sys.modules; assert 'gymnasium' not in sys.modules; "
        "names = [ref.name for ref in manager.list('environments', hooks=True)]; "
        "assert 'gym/CartPole-v1' in names and 'gym/LunarLander-v3' not in names, names"
    )
    done = forks.run([sys.executable, "-c", code], timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_text_on_stdout_is_ours_alone():
    code = "from rollouts_gymnasium import registry; registry.make('BabyAI-GoToRedBall-v0', {}).reset(seed=3)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_two_objects_with_equal_settings_are_equal():
    cls = environment_class("FrozenLake-v1")
    assert cls(actions="tool") == cls(actions="tool") != cls()
    assert environment_class("FrozenLake-v1") is cls and environment_class("no-such-id") is None
    with pytest.raises(ConfigError, match="render_mode"):
        cls(kwargs={"render_mode": "ansi"})


LAKE = ("gym/FrozenLake-v1", {"actions": "tool", "kwargs": DRY})


@pytest.mark.parametrize(
    ("name", "settings", "only"),
    [
        (*LAKE, ["settings", "rewards", "restore"]),
        pytest.param(*LAKE, [], marks=pytest.mark.nightly),
        pytest.param("gym/Taxi-v4", {"rewards": "turn"}, [], marks=pytest.mark.nightly),
        pytest.param("gym/Pendulum-v1", {"actions": "tool"}, [], marks=pytest.mark.nightly),
        pytest.param("gym/BabyAI-GoToRedBall-v0", {}, [], marks=pytest.mark.nightly),
    ],
)
def test_the_contract_is_kept(name, settings, only):
    check_environment_class(name, skip=["wheel"], tasks=3, only=only, **settings)
