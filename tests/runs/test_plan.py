"""make_plan: every mistake that can be seen before a model loads, each with its own message; and what a plan is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from random import Random

import pytest

from rollouts.config.resolving import resolve
from rollouts.errors import (
    ConfigError,
    EnvironmentDefinitionError,
    SignatureError,
    UnknownComponentError,
)
from rollouts.inference.embedded.hf import create_hf_inference
from rollouts.runs.plan import make_plan
from rollouts.types import Message

sys.path.insert(0, str(Path(__file__).parent))
from composing import plan, refused

PARTS = '''\
from dataclasses import dataclass, field

from rollouts import Message, Task, reward, tool


@dataclass
class Good:
    size: int = 2
    names: list = field(default_factory=list)
    color: str = "red"

    def tasks(self, split, rng):
        return [Task(f"{split} {number}", id=f"{split}-{number}") for number in range(self.size)]

    def demonstrations(self, split, rng):
        yield [Message("user", "a"), Message("assistant", "b")]

    @tool
    def shout(self, text: str) -> str:
        """Shout."""
        return text.upper()

    @reward
    def right(self, task, trajectory):
        return 1.0


class NoTasks:
    def task(self, split, rng):
        return []

    @reward
    def right(self):
        return 1.0


class NoHints(Good):
    @tool
    def add(self, first, second: int = 0):
        """Add."""
        return first + second


class NoReward:
    def tasks(self, split, rng):
        return ["a"]


class OddReward(Good):
    @reward
    def odd(self, task, trajectori):
        return 1.0


class OddTasks(Good):
    def tasks(self, split, rng):
        return 7


class AsyncTasks(Good):
    async def tasks(self, split, rng):
        return []


class NoDemonstration(Good):
    def demonstrations(self, split, rng):
        return []


def odd_reward(trajectory, model):
    return 1.0


def group_reward(tasks, trajectories, *, scale: float = 1.0):
    return [scale for _ in tasks]


def starred(*everything):
    return 1.0


def with_default(trajectory, task=None):
    return 1.0


def odd_filter(reward):
    return True


def kl_loss(logprobs, ref_logprobs):
    return logprobs - ref_logprobs


def critic_loss(logprobs, values):
    return values


def teacher_loss(logprobs, teacher_logprobs):
    return logprobs


def odd_loss(logprob):
    return logprob


def good_loss(logprobs, advantages, *, scale: float = 1.0):
    return -logprobs * advantages * scale


not_a_loss = 7
'''


@pytest.fixture
def parts(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return "./parts.py:"


def test_no_environment():
    refused(ConfigError, "no environment was named", "--env calculator", "rollouts plugins list", env="")


@pytest.mark.parametrize(
    ("settings", "near"),
    [
        ({"env": "calculater"}, "calculator"),
        ({"loss": "grppo"}, "grpo"),
        ({"filter": ["nonzero_sdt"]}, "nonzero_std"),
        ({"advantage": "group_nrom"}, "group_norm"),
        ({"inference": "fh"}, "hf"),
        ({"training": "troch"}, "torch"),
        ({"logger": ["json"]}, "jsonl"),
        ({"kl": "rk3_los"}, "rk3_loss"),
        ({"reference": "emma"}, "ema"),
        ({"correction": "icepop_"}, "icepop"),
        ({"mix": "lexicografic"}, "lexicographic"),
        ({"shaping": ["overlog"]}, "overlong"),
        ({"select": "reward_atleast"}, "reward_at_least"),
        ({"pairs": "best_wurst"}, "best_worst"),
    ],
)
def test_an_unknown_component(settings, near):
    (given,) = settings.values()
    refused(UnknownComponentError, given[0] if isinstance(given, list) else given, near, **settings)


def test_an_unknown_reward():
    refused(UnknownComponentError, "brevety", "reward", reward=["brevety"])


def test_a_name_for_a_component_that_is_installed_under_its_alias():
    words = ("no logger is named 'mine'", "`--logger.jsonl.name` chooses another logger", "rollouts plugins show jsonl")
    refused(UnknownComponentError, *words, logger={"jsonl": {"name": "mine"}})


def test_a_file_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(UnknownComponentError, "./none.py", env="./none.py:Env")


def test_a_name_that_the_file_does_not_have(parts):
    refused(UnknownComponentError, "Goood", "Good", env=f"{parts}Goood")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env": {"name": "calculator", "digit": 3}}, ["digit", "digits"]),
        ({"loss": {"name": "grpo", "clip": 3}}, ["clip", "clip_low", "clip_high"]),
        ({"advantage": {"name": "group_norm", "epz": 3}}, ["epz", "eps"]),
        ({"training": {"name": "torch", "warmup": 3}}, ["warmup", "warmup_steps"]),
        ({"inference": {"name": "hf", "row_max": 3}}, ["row_max", "rows_max"]),
        ({"logger": {"jsonl": {"fil": "x"}}}, ["fil", "file"]),
        ({"reward": {"env": {"size": 3}}}, ["size", "environment's own rewards"]),
    ],
)
def test_an_unknown_setting(settings, words):
    refused(ConfigError, *words, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env": {"name": "calculator", "digits": "many"}}, ["env.digits", "a whole number", "many"]),
        ({"loss": {"name": "grpo", "clip_low": "wide"}}, ["loss.clip_low", "a number", "wide"]),
        ({"advantage": {"name": "group_norm", "eps": "x"}}, ["advantage.eps", "a number"]),
        ({"training": {"name": "torch", "betas": 3}}, ["training.betas"]),
        ({"inference": {"name": "hf", "rows_max": 1.5}}, ["inference.rows_max", "a whole number", "1.5"]),
        ({"logger": {"jsonl": {"file": 3}}}, ["logger.jsonl.file", "text"]),
    ],
)
def test_a_mistyped_setting(settings, words):
    refused(ConfigError, *words, **settings)


def test_a_value_that_the_environment_refuses():
    refused(ConfigError, "--env.digits 0", "at least 1", env={"name": "calculator", "digits": 0})


def test_settings_of_the_algorithms_own_advantage():
    assert plan(advantage={"eps": 0.5}).chosen["advantage"][0].settings == {"eps": 0.5}
    refused(ConfigError, "epz", "the advantage of grpo", advantage={"epz": 0.5})


@pytest.mark.parametrize(
    ("name", "requested", "reason"),
    [
        ("critic_loss", "values", "no critic; type --critic head"),
        ("teacher_loss", "teacher_logprobs", "no teacher; type --teacher"),
    ],
)
def test_a_loss_that_needs_what_this_run_cannot_give(parts, name, requested, reason):
    refused(SignatureError, name, f"`{requested}`", reason, loss=parts + name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "odd_loss"}, ["logprob", "logprobs"]),
        ({"reward": ["odd_reward"]}, ["odd_reward", "model", "trajectory"]),
        ({"reward": ["starred"]}, ["starred", "*everything"]),
        ({"reward": ["with_default"]}, ["with_default", "task"]),
        ({"filter": ["odd_filter"]}, ["odd_filter", "reward", "rewards"]),
        ({"loss": "not_a_loss"}, ["not_a_loss"]),
    ],
)
def test_a_component_that_names_what_its_kind_does_not_offer(parts, settings, words):
    ((key, given),) = settings.items()
    value = [parts + each for each in given] if isinstance(given, list) else parts + given
    refused(SignatureError, *words, **{key: value})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoTasks", ["no method `tasks`", "'task'", "def tasks(self, split, rng)"]),
        ("NoHints", ["add", "first"]),
        ("NoReward", ["no @reward method", "--reward"]),
        ("OddReward", ["odd", "trajectori", "trajectory"]),
    ],
)
def test_an_environment_that_cannot_be_used(parts, name, words):
    refused(EnvironmentDefinitionError, *words, env=parts + name)


@pytest.mark.parametrize(("name", "given"), [("OddTasks", "int"), ("AsyncTasks", "coroutine")])
def test_tasks_that_cannot_be_iterated(parts, name, given):
    with pytest.raises(EnvironmentDefinitionError, match=f"gave {given}, which cannot be iterated"):
        plan(env=parts + name).eval_tasks()


def test_an_unknown_aggregation():
    refused(UnknownComponentError, "token_meen", "token_mean", "rollout_mean", aggregation="token_meen")


def test_data_for_an_environment_without():
    refused(ConfigError, "--data rows.jsonl", "calculator", "--env prompts", data="rows.jsonl")


def test_data_is_a_setting_of_the_environment():
    assert plan(env="prompts", data="rows.jsonl", reward=["constant"]).chosen["env"][0].settings["data"] == "rows.jsonl"


def test_mode_sft():
    refused(ConfigError, "--filter", "sft", mode="sft", loss="sft", filter=["nonzero_std"])
    message = refused(ConfigError, "--loss grpo", "advantages", "--loss sft", mode="sft", loss="grpo")
    assert "rollout_logprobs" in message or "old_logprobs" in message


def test_demonstrations(parts):
    sft = {"mode": "sft", "loss": "sft"}
    assert list(plan(env=f"{parts}Good", system="Be brief.", **sft).environments[0].demonstrations()) == [
        [Message("system", "Be brief."), Message("user", "a"), Message("assistant", "b")]
    ]
    with pytest.raises(EnvironmentDefinitionError, match="no demonstration"):
        list(plan(env=f"{parts}NoDemonstration", **sft).environments[0].demonstrations())
    with pytest.raises(EnvironmentDefinitionError, match="write `def demonstrations"):
        list(plan(env=f"{parts}NoReward", eval_tasks=0, **sft).environments[0].demonstrations())


# --- a plan that is right -------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_plan_loads_no_model():
    """torch comes with the training backend, whose signature is read; transformers waits until a model is loaded."""

    code = (
        "import sys; from rollouts.runs.plan import make_plan; from rollouts.config.resolving import resolve;"
        "make_plan(resolve({'env': 'calculator'})); print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_two_environments_share_no_list(parts):
    given = plan(env={"name": f"{parts}Good", "names": ["a"]})
    make = given.environments[0].make
    first, second = make(), make()
    first.names.append("b")
    assert second.names == ["a"] and given.environments[0].make().names == ["a"]


def test_every_setting_is_completed():
    """So that config.toml repeats the run, also when a default changes."""
    assert plan().resolved.components["env"][0].settings == {"digits": 2, "operators": "*"}
    settings = plan().resolved.components["loss"][0].settings
    assert settings == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "entropy_coef": 0.0}


def test_rewards(parts):
    rewards = plan(reward=["env:1", f"rank={parts}group_reward:0.5"]).rewards
    assert [(term.alias, term.weight, term.is_group) for term in rewards] == [("env", 1.0, False), ("rank", 0.5, True)]


def test_learning_rate():
    assert plan().lr == pytest.approx(3e-4)
    assert plan(lora_rank=8).lr == pytest.approx(3e-3)
    assert plan(lora_rank=8, lr=1e-5).lr == 1e-5


def test_replaced_parts_of_the_algorithm(parts):
    algorithm = plan(
        loss={"name": f"{parts}good_loss", "scale": 2.0}, advantage="group_mean", aggregation="rollout_mean"
    ).algorithm
    assert algorithm.aggregation.__name__ == "rollout_mean"
    assert algorithm.advantage.__name__ == "group_mean"
    assert algorithm.terms[0].function.keywords == {"scale": 2.0}
    assert plan(loss=f"{parts}good_loss").needs == ["advantages", "logprobs"]


def test_evaluation_tasks_are_drawn_by_the_seed():
    first, again, other = (plan(seed=seed, eval_tasks=8).eval_tasks() for seed in (0, 0, 1))
    assert first == again != other
    assert len({task.key for task in first}) == 8
    assert plan(eval_tasks=0).eval_tasks() == []


def test_an_endless_source_is_a_function_of_the_epoch():
    source = plan().environments[0].training_source()
    assert next(source(0)) == next(source(0)) != next(source(1))


def test_a_sequence_stays_one(parts):
    assert [task.id for task in plan(env=f"{parts}Good").environments[0].training_source()] == ["train-0", "train-1"]


def test_the_system_prompt_is_in_every_task_and_leaves_its_key(parts):
    with_system = plan(env=f"{parts}Good", system="Be brief.")
    bare_source = plan(env=f"{parts}Good").environments[0].training_source()
    for task, bare in zip(with_system.environments[0].training_source(), bare_source, strict=True):
        assert task.messages == [Message("system", "Be brief."), *bare.messages]
        assert task.key == bare.key
    calculator = plan(system="Be brief.")
    (task,) = [next(calculator.environments[0].training_source()(0))]
    bare = next(plan().environments[0].training_source()(0))
    assert task.prompt != bare.prompt and bare.key in task.key


def test_held_out_and_training_tasks_are_different_draws():
    def of(split):
        return next(iter(plan().environments[0]._tasks(split, Random("x"))))

    assert of("eval") == of("train"), "both splits are drawn alike: the seed's text tells them apart"
    assert plan().eval_tasks()[0] != next(plan().environments[0].training_source()(0))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def tasks(self, split, rng):\n        yield 1 / 0", "Broken.tasks('eval', rng) raised ZeroDivisionError"),
        ("def tasks(self, split, rng):\n        return [][0]", "Broken.tasks('eval', rng) raised IndexError"),
        ("def __post_init__(self):\n        {}['x']", "building the environment ./broken.py:Broken raised KeyError"),
    ],
)
def test_an_authors_bug_is_named_with_its_line(tmp_path, monkeypatch, body, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(
        "from dataclasses import dataclass\nfrom rollouts import reward\n\n@dataclass\nclass Broken:\n"
        f"    {body}\n    @reward\n    def good(self, task, trajectory):\n        return 1.0\n"
        + ("" if "tasks" in body else "    def tasks(self, split, rng):\n        return ['a']\n")
    )
    with pytest.raises(EnvironmentDefinitionError) as caught:
        make_plan(resolve({"env": "./broken.py:Broken"})).eval_tasks()
    assert words in str(caught.value) and "broken.py, line 7" in str(caught.value)


def test_an_engine_that_shares_the_trainers_weights_has_no_dtype_of_its_own():
    with pytest.raises(ConfigError, match=r"--training.dtype bfloat16"):
        create_hf_inference("tiny", object(), 0, dtype="bfloat16")


def test_an_aggregation_of_rollouts_is_not_for_demonstrations():
    with pytest.raises(ConfigError, match="--aggregation dr_grpo"):
        make_plan(resolve({"env": "calculator", "mode": "sft", "aggregation": "dr_grpo"}))


@pytest.mark.parametrize(
    ("settings", "lr"),
    [
        ({}, 3e-4),
        ({"lora_rank": 8}, 3e-3),
        ({"model": "some/model"}, 1e-6),
        ({"model": "some/model", "lora_rank": 8}, 1e-5),
        ({"model": "some/model", "mode": "sft"}, 1e-5),
        ({"lr": 0.5}, 0.5),
    ],
)
def test_a_trained_model_is_not_given_the_tiny_ones_learning_rate(settings, lr):
    assert make_plan(resolve({"env": "calculator", **settings})).lr == pytest.approx(lr)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"correction": {"name": "truncated", "cap": -1.0}}, "cap"),
        ({"loss": {"name": "grpo", "clip_low": -0.1}}, "clip_low"),
        ({"loss": {"name": "gspo", "clip_high": -1.0}}, "clip_high"),
        ({"loss": {"name": "dpo", "beta": 0.0}}, "beta"),
        ({"kl": "rk3_loss", "reference": {"name": "ema", "decay": 2.0}}, "decay"),
        ({"advantage": {"name": "reinforce_pp", "gamma": 7.0}}, "gamma"),
        ({"shaping": {"overlong": {"buffer": 4096}}}, "--shaping.overlong.buffer"),
        ({"aggregation": {"name": "dr_grpo", "length": 0}}, "its length is 0"),
        ({"select": {"name": "top", "count": 0}}, "count"),
    ],
)
def test_settings_out_of_their_domain_are_told_before_a_model_loads(given, words):
    with pytest.raises(ConfigError, match=words):
        plan(**given)


STRANGER = """\
from typing import Annotated

import msgspec

from rollouts.errors import ConfigError


def within(value, most=1.0):
    if value > most:
        raise ConfigError(f"the setting level is {value}, but it has to be {most} or less")


def loss(logprobs, advantages, *, level: float = 0.5):
    within(level)
    return -advantages * logprobs


def advantage(rewards, *, level: float = 0.5):
    within(level)
    return rewards


def aggregation(masks, *, level: float = 0.5):
    from rollouts.training.algorithms import TokenWeights

    within(level)
    return TokenWeights([list(mask) for mask in masks], 1.0)


def kl(logprobs, ref_logprobs, *, level: float = 0.5):
    within(level)
    return logprobs - ref_logprobs


def reference(reference, policy, *, level: float = 0.5):
    within(level)


def correction(old_logprobs, rollout_logprobs, *, level: float = 0.5):
    within(level)
    return old_logprobs


def mix(parts, weights, *, level: float = 0.5):
    within(level)
    return parts.sum(1)


def shaping(rewards, *, level: float = 0.5):
    within(level)
    return rewards


def select(rewards, *, level: float = 0.5):
    within(level)
    return rewards > level


def pairs(rewards, *, level: float = 0.5):
    within(level)
    return []


def of_many(rewards):
    assert len(rewards) == 8, "the invented numbers are two"
    return rewards


def of_four(rewards, *, level: float = 0.5):
    if len(rewards) < 4:
        raise ConfigError("it compares four rollouts or more")
    return rewards


class Seen:
    calls = 0

    def __call__(self, rewards):
        Seen.calls += 1
        return rewards


seen = Seen()


def bounded(logprobs, advantages, *, level: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5):
    return -advantages * logprobs


def one_a_rollout(logprobs, rollout_index):
    return logprobs.new_zeros(len(rollout_index.unique())), {"name": 1.0}


def of_pairs(masks, pair_index):
    from rollouts.training.algorithms import TokenWeights

    return TokenWeights([list(mask) for mask in masks], 1.0, "pair")


def of_rollouts(masks):
    from rollouts.training.algorithms import TokenWeights

    return TokenWeights([list(mask) for mask in masks], 1.0, "rollout")
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A file of somebody else's functions, and the run's folder."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    monkeypatch.chdir(tmp_path)
    return "./stranger.py:"


@pytest.mark.parametrize("key", "loss advantage aggregation kl reference correction mix shaping select pairs".split())
def test_settings_of_a_strangers_function_are_checked_as_the_cores_are(key, stranger):
    others = {"kl": "rk3_loss"} if key == "reference" else {}
    if key == "pairs":
        others = {"loss": "dpo"}

    def given(level):
        table = {"name": f"{stranger}{key}", "level": level}
        return others | {key: {"own": table} if key == "shaping" else table}

    assert plan(**given(1.0)).schedule
    with pytest.raises(ConfigError, match=r"the setting level is 2.0, but it has to be 1.0 or less"):
        plan(**given(2.0))


def test_a_strangers_bounds_are_those_of_its_hint(stranger):
    assert plan(loss={"name": f"{stranger}bounded", "level": 1.0}).schedule
    with pytest.raises(ConfigError, match=r"loss\.level: expected a number \(0 or more, 1 or less\); got 1\.5"):
        plan(loss={"name": f"{stranger}bounded", "level": 1.5})


def test_a_stranger_may_dislike_invented_numbers_and_objects_are_not_called(stranger):
    for name in ("of_many", "of_four"):
        assert plan(advantage=f"{stranger}{name}").schedule
    found = plan(advantage=f"{stranger}seen")
    assert found.algorithm.advantage.calls == 0


def test_a_strangers_loss_that_does_not_fit_the_aggregation_is_refused(stranger):
    with pytest.raises(
        ConfigError, match="takes one value per token, and the loss one_a_rollout gives one per rollout"
    ):
        plan(loss=f"{stranger}one_a_rollout")


def test_a_strangers_aggregation_says_what_it_takes(stranger):
    assert plan(loss="dpo", aggregation=f"{stranger}of_pairs").schedule
    with pytest.raises(ConfigError, match="--aggregation of_pairs: there are no pairs"):
        plan(aggregation=f"{stranger}of_pairs")
    with pytest.raises(ConfigError, match="a KL term has one value per token, and of_rollouts takes one per rollout"):
        plan(kl="rk3_loss", aggregation=f"{stranger}of_rollouts")


def test_what_the_core_probes_passes_with_its_defaults():
    for loss in ("cispo", "dapo", "dpo", "dr_grpo", "grpo", "gspo", "is", "reinforce", "reinforce_pp", "rft", "rloo"):
        assert plan(loss=loss).needs
    assert plan(loss="ppo", critic="head").auxiliary_models.critic == "head"


def test_a_kl_off_the_advantages_needs_a_loss_that_names_them():
    with pytest.raises(
        ConfigError, match=r"k1_reward is subtracted from the advantages, and the loss cross_entropy does not"
    ):
        plan(loss="rft", kl="k1_reward")
    with pytest.raises(ConfigError, match="per_rollout takes one per rollout"):
        plan(kl="rk3_loss", aggregation="per_rollout")


def test_terms_that_do_not_fit_the_aggregation_are_refused():
    with pytest.raises(
        ConfigError, match="per_rollout takes one value per rollout, and the loss ppo_clip gives one per token"
    ):
        plan(aggregation="per_rollout")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_coefficient_is_a_finite_number(value):
    with pytest.raises(ConfigError, match=r"entropy_coef is (nan|inf), but it has to be a finite number"):
        plan(loss={"name": "grpo", "entropy_coef": value})


def test_a_selection_and_an_estimator_of_the_whole_batch_do_not_go_together():
    with pytest.raises(ConfigError, match="the advantage reinforce_pp is computed on trained rollouts"):
        plan(loss="reinforce_pp", select="reward_at_least")


def test_an_algorithm_in_which_nothing_counts_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero.py").write_text(
        "from rollouts.training.algorithms import GRPO, Term\n"
        "from rollouts.training.algorithms.losses import reinforce\n"
        "ZERO = GRPO._replace(terms=(Term(reinforce, 0.0, 'main'),))\n"
    )
    with pytest.raises(ConfigError, match=r"every term of the loss has coefficient 0.*--loss\.main-coef"):
        plan(loss="./zero.py:ZERO")


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"name": "torch", "eps": -1}, "--training.eps -1"),
        ({"name": "torch", "lr_schedule": "cosin"}, "did you mean"),
        ({"name": "torch", "dtype": "float16"}, "which overflows without a scaled loss"),
        ({"name": "fsdp", "processes": 2, "replicas": 3}, "2 ranks cannot be split into 3 equal groups"),
        ({"name": "fsdp", "optimizer": "adafactor"}, "adafactor"),
        ({"name": "fsdp", "dtype": "float16"}, "expected float32 or bfloat16"),
        ({"name": "fsdp", "stall_seconds": 0}, "--training.stall-seconds 0: expected 1 or more"),
    ],
)
def test_what_a_training_backend_would_refuse_is_told_before_it_is_made(training, words):
    """So also in a dry run, and of the second phase of sft+rl before the first."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan(env="calculator", training=training)
    with pytest.raises(ConfigError, match=re.escape(words)):
        phases_described(env="calculator", mode="sft+rl", training=training, sft={"training": "torch"})


def test_a_setting_with_a_name_of_its_table_leaves_the_config_whole(tmp_path, monkeypatch):
    """The table has the name of the component and its weight, so that these settings are at their defaults."""
    monkeypatch.chdir(tmp_path)
    Path("named.py").write_text(
        "class Named:\n    def __init__(self, folder, *, name: str = '', group: str = ''):\n        pass\n\n"
        "def weighed(trajectory, *, weight: float = 1.0):\n    return weight\n"
    )
    made = plan(logger=["own=./named.py:Named"], reward=["env", "short=./named.py:weighed:-0.5"])
    again = make_plan(resolve(tomllib.loads(made.config)))
    assert (again.config, again.flat) == (made.config, made.flat)
    assert again.rewards[1].weight == -0.5 and [each.name for each in again.chosen["logger"]][-1] == "./named.py:Named"


def phases_described(**settings):
    from rollouts.runs.dry_run import dry_run

    return dry_run(resolve(settings))
