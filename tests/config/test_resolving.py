"""Trees into a Resolved: precedence, aliases, and what is refused."""

from __future__ import annotations

import copy
import tomllib

import pytest

from rollouts.config.files import Source
from rollouts.config.flags import read_flag, take_dotted_flags
from rollouts.config.merging import Component, merge, parse_component, settings_path
from rollouts.config.resolving import resolve
from rollouts.config.settings import COMPONENT_KINDS, Settings
from rollouts.errors import ConfigError


def flags(*argv, **core):
    """A tree as the command line makes it: core flags, then dotted ones."""
    tree = {
        name: [read_flag(text) for text in value] if isinstance(value, list) else read_flag(value)
        for name, value in core.items()
    }
    return merge(tree, take_dotted_flags(list(argv))[1])


def resolved(file="", *argv, **core):
    return resolve(merge(tomllib.loads(file), flags(**core), take_dotted_flags(list(argv))[1]), Source("a.toml", file))


def test_nothing_given_is_the_defaults():
    result = resolve({})
    assert result.settings == Settings()
    assert list(result.components) == list(COMPONENT_KINDS)
    assert result.components["env"] == []
    assert result.components["reward"] == [Component("env", {}, 1.0, "env")]
    assert result.components["loss"] == [Component("grpo", {})]


def test_flags_come_before_the_file_and_the_file_before_defaults():
    result = resolved('steps = 7\nseed = 3\nenv = "a"', steps="9").settings
    assert (result.steps, result.seed, result.env, result.max_turns) == (9, 3, "a", 8)


@pytest.mark.parametrize("file", ['env = "a"', '[env]\nname = "a"'])
def test_a_component_is_a_name_or_a_table(file):
    assert resolved(file, "--env.digits", "3").components["env"][0].name == "a"
    assert list(resolved(file, "--env.digits", "3").components["env"][0].settings) == ["digits"]


def test_another_name_drops_the_settings_of_the_one_before():
    file = '[env]\nname = "a"\ndigits = 3\n'
    assert resolved(file, env="b").components["env"] == [Component("b", {})]
    assert resolved(file, env="a").components["env"] == [Component("a", {"digits": 3})]
    assert resolved(file, "--env.name", "b").components["env"] == [Component("b", {})]


def test_a_table_without_a_name_is_for_the_default():
    assert resolved("[loss]\nclip_high = 0.28").components["loss"] == [Component("grpo", {"clip_high": 0.28})]


def test_the_advantage_of_the_algorithm_can_have_settings():
    result = resolved("[advantage]\neps = 0.1")
    assert result.components["advantage"] == [Component("", {"eps": 0.1})]
    assert result.settings.advantage == ""


def test_sft_has_its_own_default_loss():
    assert resolved(mode="sft").settings.loss == "sft"
    assert resolved('mode = "sft"\nloss = "ppo"').settings.loss == "ppo"


def test_the_supervised_phase_has_settings_of_its_own():
    file = 'mode = "sft+rl"\nsteps = 9\n[sft]\nsteps = 5\nlr = 1e-3\n[sft.env]\ndigits = 1\n'
    result = resolved(file, "--sft.steps", "7", "--sft.env.name", "e", "--sft.lora-rank", "0", env="e")
    assert (result.settings.steps, result.settings.loss) == (9, "grpo")
    found = result.settings.sft
    assert list(found) == ["steps", "lr", "env", "lora_rank"]
    assert (found["steps"], found["lr"], found["lora_rank"]) == (7, 1e-3, 0)
    assert found["env"]["digits"] == 1 and found["env"]["name"].value == "e"


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("reward", "env:1", ("env", 1.0, "env")),
        ("reward", "acme/brevity:-0.1", ("acme/brevity", -0.1, "brevity")),
        ("reward", "short=acme/my-brevity:1e-3", ("acme/my-brevity", 1e-3, "short")),
        ("reward", "acme/my-brevity", ("acme/my-brevity", 1.0, "my_brevity")),
        ("reward", "./f.py:fn", ("./f.py:fn", 1.0, "fn")),
        ("reward", "./f.py:fn:-2", ("./f.py:fn", -2.0, "fn")),
        ("reward", "x=./a=b.py:fn:.5", ("./a=b.py:fn", 0.5, "x")),
        ("reward", "./a=b.py:fn", ("./a=b.py:fn", 1.0, "fn")),
        ("reward", "pack/with:colon:2", ("pack/with:colon", 2.0, "colon")),
        ("filter", "./f.py:fn", ("./f.py:fn", 1.0, "fn")),
        ("logger", "my-log=acme/log", ("acme/log", 1.0, "my_log")),
    ],
)
def test_only_the_last_colon_separates_a_weight(key, text, expected):
    component = parse_component(key, text)
    assert (component.name, component.weight, component.alias) == expected


@pytest.mark.parametrize("text", ["brevity:2x", "a:1e", ":3", "pack/with:colon"])
def test_a_weight_that_is_no_number_is_refused(text):
    with pytest.raises(ConfigError, match="weight"):
        parse_component("reward", text)


def test_rewards_take_aliases_and_settings():
    result = resolved(
        "",
        "--reward.short.target-tokens",
        "50",
        "--reward.env.weight",
        "0.5",
        reward=["env:1", "short=pkg/brevity:-0.1"],
    )
    env, short = result.components["reward"]
    assert env == Component("env", {}, 0.5, "env")
    assert (short.name, short.weight, short.alias) == ("pkg/brevity", -0.1, "short")
    assert short.settings["target_tokens"].value == 50
    assert result.settings.reward == ("env:0.5", "short=pkg/brevity:-0.1")
    assert settings_path("reward", short) == ("reward", "short")


@pytest.mark.parametrize(
    "file",
    [
        'reward = ["env:1", "short=pkg/brevity:-0.1"]',
        '[reward.env]\n[reward.short]\nname = "pkg/brevity"\nweight = -0.1',
        'reward = [{name = "env"}, {name = "pkg/brevity", weight = -0.1, alias = "short"}]',
    ],
)
def test_lists_and_tables_of_a_file_say_the_same(file):
    assert resolved(file).settings.reward == ("env:1", "short=pkg/brevity:-0.1")


def test_tables_of_a_file_replace_the_default():
    assert resolved('[reward.short]\nname = "pkg/brevity"').settings.reward == ("short=pkg/brevity:1",)


def test_flags_replace_the_list_and_dotted_flags_adjust_it():
    file = '[reward.short]\nname = "pkg/brevity"\ntarget_tokens = 3\nother = 4\n'
    assert resolved(file, reward=["env:2"]).settings.reward == ("env:2",)
    short = resolved(file, "--reward.short.other", "5").components["reward"][0]
    assert short.settings["target_tokens"] == 3
    assert short.settings["other"].value == 5
    assert resolved("", "--reward.env.weight", "2").settings.reward == ("env:2",)
    assert resolved("", "--reward.other.name", "a/b").settings.reward == ("env:1", "other=a/b:1")


def test_a_list_can_be_emptied():
    assert resolved("", logger=["none"]).components["logger"] == []
    assert resolved("logger = []").settings.logger == ()
    assert resolved("", filter=["a", "b"]).settings.filter == ("a", "b")


def test_a_logger_is_added_to_the_runs_own():
    assert resolved("", logger=["wandb"]).settings.logger == ("jsonl", "wandb")
    assert resolved('logger = ["m=jsonl", "wandb"]').settings.logger == ("m=jsonl", "wandb")
    assert resolved('[logger.wandb]\n[logger.jsonl]\nfile = "x.jsonl"\n').settings.logger == ("wandb", "jsonl")
    own, _ = resolved("", "--logger.jsonl.file", "none", logger=["wandb"]).components["logger"]
    assert (own.name, own.settings["file"].text) == ("jsonl", "none")


def test_one_name_twice_gets_two_aliases():
    assert [c.alias for c in resolved("", reward=["a/x", "b/x", "x"]).components["reward"]] == ["x", "x_2", "x_3"]
    with pytest.raises(ConfigError, match="alias 'x'"):
        resolved("", reward=["x=a", "x=b"])


def test_template_arguments_are_free():
    result = resolved("[template]\na = 1\nb = 2", "--template.enable-thinking", "false", "--template.b", "none")
    assert result.settings.template == {"a": 1, "enable_thinking": False}


def test_none_means_unset():
    assert resolved('env = "a"\nlr = 1.0', env="none", lr="none").settings == Settings()
    assert resolved('advantage = "a"', advantage="none").components["advantage"] == []


def test_merge_changes_no_argument():
    trees = [{"reward": ["a:1"], "env": {"name": "x", "d": {"a": 1}}}, flags("--env.d.a", "2", "--reward.a.n", "3")]
    before = copy.deepcopy(trees)
    merged = merge(*trees)
    assert trees == before
    assert merged["env"]["d"]["a"].value == 2


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            "seed = 1\nstpes = 3",
            r"^a\.toml, line 2: stpes: there is no setting 'stpes'\ndid you mean: steps\?\nwrite a component's",
        ),
        ("prompts-per-step = 3", r"did you mean: prompts_per_step\?"),
        ("seed = 1\nsteps = 3.0", r"^a\.toml, line 2: steps: expected a whole number; got 3.0"),
        ('on_invalid_reward = "dorp"', r"one of: drop, zero, raise; got \"dorp\"\ndid you mean: drop\?"),
        ("steps = -1", r"line 1: steps: must be at least 0; got -1"),
        ("lr = 0", r"must be more than 0; got 0"),
        ("temperature = nan", r"must be more than 0; got nan"),
        ("temperature = inf", r"must be a finite number; got inf"),
        ("[steps]\na = 1", r"expected one value; `steps` has"),
        ("template = 3", r"template: expected a table"),
        ("[env]\ndigits = 3", r"line 2: env.digits: no env is chosen"),
        ("env = 3", r"env: expected the name of a component"),
        ("[reward]\nshort = 3", r"reward\.short: expected a table of settings"),
        ("[reward.a]\nseed = 2\nweight = 'x'", r"line 3: reward\.a\.weight: expected a number"),
        ("[reward.a]\nweight = inf", r"must be finite"),
        ("reward = [{weight = 1}]", r"needs a `name`"),
        ('loss = ""', r"--loss NAME"),
        ("sft = 3", r"^a\.toml, line 1: sft: expected a table, such as `--sft.steps 50`"),
        (
            'mode = "sft+rl"\n[sft]\nstpes = 3',
            r"line 3: sft\.stpes: 'stpes' is no setting\ndid you mean: steps\?\nthe settings of the supervised phase: ",
        ),
        (
            'mode = "sft+rl"\n[sft]\nseed = 3',
            r"line 3: sft\.seed: 'seed' cannot differ in the supervised phase",
        ),
        ('mode = "sft+rl"\n[sft]\nsteps = -3', r"line 3: sft\.steps: must be at least 0; got -3"),
        ('mode = "sft+rl"\n[sft]\nsteps = 2.5', r"line 3: sft\.steps: expected a whole number; got 2.5"),
        (
            "[sft]\nsteps = 3",
            r"line 2: sft\.steps: this setting is for .* the mode of this run is rl\ntype: rollouts run --mode sft\+rl",
        ),
    ],
)
def test_what_a_file_gets_wrong_is_said_with_its_line(file, words):
    with pytest.raises(ConfigError, match=words):
        resolved(file)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--evn.digits", "3"], r"^--evn\.digits: there is no setting 'evn'\ndid you mean: --env\.digits\?"),
        (["--steps.x", "3"], r"^--steps\.x: expected one value; `steps` has"),
        (["--env.digits", "3"], r"^--env\.digits: no env is chosen"),
        (
            ["--reward.evn.weight", "3"],
            r"^--reward\.evn\.weight: no reward with the alias 'evn'.*\ndid you mean: --reward\.env\?",
        ),
        (["--reward.env", "3"], r"^--reward\.env: expected a table"),
        (["--sft.stpes", "3"], r"^--sft\.stpes: 'stpes' is no setting\ndid you mean: --sft\.steps\?"),
        (["--sft.kl.coef", "3"], r"^--sft\.kl\.coef: 'kl' cannot differ in the supervised phase"),
        (["--sft.steps", "3"], r"^--sft\.steps: this setting is for the supervised phase of mode sft\+rl"),
        (["--template", "3"], None),
    ],
)
def test_what_a_flag_gets_wrong_is_said_with_its_name(argv, words):
    if words is None:
        assert take_dotted_flags(argv) == (argv, {})
        return
    with pytest.raises(ConfigError, match=words):
        resolved("", *argv)


def test_the_source_does_not_count_in_comparisons():
    assert resolve({}, Source("a", "b")) == resolve({})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("episode_seconds", "0", "must be more than 0; got 0"),
        ("turn_seconds", "-1", "must be more than 0; got -1"),
        ("tool_seconds", "soon", "expected a number"),
        ("reward_seconds", "inf", "must be a finite number; got inf"),
        ("setup_seconds", "nan", "must be more than 0; got nan"),
        ("cleanup_seconds", "none", "expected a number"),
        ("concurrency", "0", "must be at least 1; got 0"),
        ("retries", "-1", "must be at least 0; got -1"),
        ("max_failures", "1.5", "a whole number of failed rollouts, such as 20, or a share between 0 and 1"),
        ("max_failures", "1.0", "or a share between 0 and 1, such as 0.5; got 1.0"),
        ("max_failures", "0", "must be more than 0; got 0"),
        ("max_failures", "many", "expected a whole number or a number or none"),
    ],
)
def test_deadlines_and_budgets_that_make_no_sense(name, text, words):
    with pytest.raises(ConfigError) as caught:
        resolved(**{name: text})
    assert words in str(caught.value) and name.replace("_", "-") in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("20", 20), ("0.5", 0.5), ("none", None)])
def test_a_budget_of_failures_is_a_number_or_a_share(text, value):
    given = resolved(max_failures=text).settings.max_failures
    assert given == value and type(given) is type(value)
