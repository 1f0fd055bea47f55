"""The parts of an algorithm: what is replaced, what is bound, what a stage changes, and what is refused before a model
loads.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from rollouts.config.files import load_file
from rollouts.config.flags import take_dotted_flags
from rollouts.config.merging import merge
from rollouts.config.render import to_toml
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, ModelError, SignatureError
from rollouts.runs.dry_run import describe, objective_words
from rollouts.runs.manifest import make_manifest
from rollouts.runs.plan import make_plan
from rollouts.training.algorithms.algorithm import Stage, function_label, stage_at, stage_name
from rollouts.training.algorithms.kl import adapter_off, frozen

sys.path.insert(0, str(Path(__file__).parent))
from composing import plan, refused

LOSSES = "grpo dapo dr_grpo gspo cispo reinforce reinforce_pp rloo is rft dpo".split()

PARTS = """\
from rollouts import Task, reward


def my_kl(logprobs, ref_logprobs, *, power: float = 2.0):
    return (logprobs - ref_logprobs) ** power


def clashing_kl(logprobs, ref_logprobs, *, coef: float = 2.0):
    return logprobs


def my_reference(reference, policy, *, often: int = 3): ...


def my_correction(old_logprobs, rollout_logprobs, *, most: float = 1.5): ...


def my_aggregation(masks, *, by: float = 2.0): ...


def my_mixer(parts, weights, *, first: int = 0): ...


def my_shaping(rewards, lengths, *, off: float = 0.5): ...


def my_selector(rewards, *, least: float = 0.0): ...


def my_pairing(rewards, *, apart: float = 0.1): ...


async def slow_selector(rewards): ...


def odd_mixer(part): ...


def pair_loss(logprobs, pair_index):
    return logprobs


def old_backend(model, algorithms): ...


def old_name(model, companions): ...


def wants_values(batch, values):
    return values


def half(old_logprobs):
    return old_logprobs * 0 + 0.5


class Toolless:
    def tasks(self, split, rng):
        yield Task("?")

    @reward
    def good(self, task):
        return 1.0
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    (tmp_path / "algorithm_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return "./algorithm_parts.py:"


def of_flags(line, **settings):
    """As the command line gives it: dotted flags after plain settings."""
    return make_plan(resolve(merge({"env": "calculator"} | settings, take_dotted_flags(line.split())[1])))


def keywords(function):
    return function.keywords


# --- what a flag replaces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_every_shipped_algorithm_composes(loss):
    found = plan(loss=loss)
    (stage,) = found.schedule
    assert stage[:3] == (0, "main", found.algorithm) and stage.correction_auto == (
        found.algorithm.correction is not None
    )
    assert (found.algorithms == {"main": found.algorithm} and found.auxiliary_models is None) or loss == "dpo"
    assert found.notes == ()


def test_every_part_is_replaced_and_told_its_settings():
    algorithm = plan(
        loss="gspo",
        advantage="rloo",
        aggregation={"name": "dr_grpo", "length": 7},
        kl={"name": "k2_loss", "coef": 0.5, "threshold": 3.0},
        correction={"name": "icepop", "low": 0.25},
        mix={"name": "lexicographic", "tolerance": 0.5},
        shaping=[{"name": "overlong", "buffer": 32}],
        select={"name": "top", "count": 2},
    ).algorithm
    assert function_label(algorithm.advantage) == "rloo"
    assert keywords(algorithm.aggregation) == {"length": 7}
    assert (algorithm.kl.coefficient, algorithm.kl.threshold, algorithm.kl.target) == (0.5, 3.0, None)
    assert keywords(algorithm.correction) == {"low": 0.25, "high": 5.0}
    assert keywords(algorithm.mix) == {"tolerance": 0.5}
    assert [keywords(each) for each in algorithm.shaping] == [{"buffer": 32, "factor": 1.0}]
    assert keywords(algorithm.select) == {"count": 2}


@pytest.mark.parametrize(
    ("key", "name", "setting"),
    [
        ("kl", "my_kl", {"power": 3.0}),
        ("reference", "my_reference", {"often": 5}),
        ("correction", "my_correction", {"most": 2.5}),
        ("aggregation", "my_aggregation", {"by": 4.0}),
        ("mix", "my_mixer", {"first": 1}),
        ("select", "my_selector", {"least": 0.5}),
    ],
)
def test_a_strangers_part(parts, key, name, setting):
    found = plan(**({"kl": "rk3_loss"} | {key: {"name": parts + name, **setting}}))
    algorithm = found.algorithm
    functions = algorithm._asdict() | {"kl": algorithm.kl.function, "reference": found.auxiliary_models.reference}
    assert functions[key].func.__name__ == name and keywords(functions[key]) == setting


def test_a_strangers_shaping_and_pairs(parts):
    (shaping,) = plan(shaping=[{"name": f"{parts}my_shaping", "off": 0.25, "alias": "mine"}]).algorithm.shaping
    assert keywords(shaping) == {"off": 0.25}
    pairs = plan(loss="dpo", pairs={"name": f"{parts}my_pairing", "apart": 0.5}).algorithm.pairs
    assert keywords(pairs) == {"apart": 0.5}


def test_the_entropy_term_counts_where_it_is_told():
    assert plan(loss={"name": "grpo", "entropy_coef": 0.001}).needs == [
        "advantages",
        "entropy",
        "logprobs",
        "old_logprobs",
    ]
    assert "entropy" not in plan().needs


def test_settings_go_to_the_algorithms_own_part():
    found = of_flags("--select.threshold 0.5 --loss.entropy-coef 0.1", loss="rft")
    assert keywords(found.algorithm.select) == {"threshold": 0.5}
    assert found.resolved.components["select"][0] == ("", {"threshold": 0.5}, 1.0, "")
    assert keywords(of_flags("--aggregation.length 9", loss="dr_grpo").algorithm.aggregation) == {"length": 9}
    assert of_flags("--shaping.algorithm.buffer 9", loss="dapo").algorithm.shaping[0].keywords["buffer"] == 9
    (own,) = of_flags("--filter.algorithm.spread-min 0.5", loss="dapo").filters
    assert own.name == "accuracy_std" and keywords(own.function) == {"part": "", "spread_min": 0.5}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--kl.coef 0.1", ["--kl.coef: the loss grpo has no KL estimator of its own", "type: --kl rk3_loss"]),
        (
            "--select.threshold 1",
            ["--select.threshold: ", "no rollout selector of its own", "--select reward_at_least"],
        ),
        ("--mix.tolerance 1", ["--mix.tolerance: ", "no reward mixer of its own", "--mix lexicographic"]),
        ("--pairs.margin 1", ["--pairs.margin: ", "no pair selector of its own", "--pairs best_worst"]),
        ("--shaping.algorithm.buffer 1", ["--shaping.algorithm.buffer: ", "no reward shaping of its own", "overlong"]),
        ("--filter.algorithm.x 1", ["--filter.algorithm.x: ", "no filter of its own", "--filter nonzero_std"]),
        ("--reference.decay 0.5", ["--reference.decay: no reference is chosen", "type: --reference NAME"]),
        ("--shaping.overlong.buffer 1", ["no shaping with the alias 'overlong' is chosen"]),
    ],
)
def test_settings_for_a_part_that_the_algorithm_does_not_have(line, words):
    with pytest.raises(ConfigError) as caught:
        of_flags(line)
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_setting_of_the_algorithms_own_part():
    refused(ConfigError, "the rollout selector of rft", "threshold", loss="rft", select={"treshold": 1})
    refused(ConfigError, "KL estimator rk3_loss", "'coeff'", "coef", kl={"name": "rk3_loss", "coeff": 1})


# --- shaping and filters --------------------------------------------------------------------------------------------


def test_an_algorithm_brings_shaping_and_filters():
    found = plan(loss="dapo")
    assert [function_label(each) for each in found.algorithm.shaping] == ["overlong"]
    assert [each.name for each in found.filters] == ["accuracy_std"]
    none = plan(loss="dapo", shaping="none", filter="none")
    assert none.algorithm.shaping == () and none.filters == ()
    mine = plan(loss="dapo", filter=["any_success"], shaping=["algorithm", "overlong"])
    assert [each.name for each in mine.filters] == ["any_success"] and len(mine.algorithm.shaping) == 2
    assert [each.name for each in plan(loss="dapo", filter=["any_success", "algorithm"]).filters] == [
        "any_success",
        "accuracy_std",
    ]


# --- correction -----------------------------------------------------------------------------------------------------


def test_the_correction_is_the_runs_unless_it_is_named():
    auto = plan()
    assert auto.schedule[0].correction_auto and keywords(auto.algorithm.correction) == {"cap": 2.0}
    assert auto.needs == ["advantages", "logprobs", "old_logprobs"]
    capped = of_flags("--correction.cap 3")
    assert capped.schedule[0].correction_auto and keywords(capped.algorithm.correction) == {"cap": 3.0}
    named = plan(correction="truncated")
    assert not named.schedule[0].correction_auto and keywords(named.algorithm.correction) == {"cap": 2.0}
    none = plan(correction="none")
    assert not none.schedule[0].correction_auto and none.algorithm.correction is None
    assert plan(loss="dpo").algorithm.correction is None  # values of pairs are not weighed by token
    refused(ConfigError, "correction.kap", "cap", correction={"name": "auto", "kap": 1})


def test_a_loss_that_ignores_the_rewards_gives_a_warning():
    words = "sft does not use the rewards: it trains on every rollout alike; type --select reward_at_least"
    for settings in ({}, {"kl": "rk3_loss"}):
        (note,) = plan(loss="sft", **settings).notes
        assert words in note
    (note,) = plan(schedule=[{"step": 5, "loss": "sft"}]).notes
    assert f"[[schedule]], from step 5: {words}" in note
    for settings in ({"select": "reward_at_least"}, {"filter": ["nonzero_std"]}, {"mode": "sft"}):
        assert plan(loss="sft", **settings).notes == ()
    assert plan(schedule=[{"step": 5, "loss": "sft"}], filter=["nonzero_std"]).notes == ()
    for loss, more in {"rft": {}, "dpo": {}, "opd_topk": {"teacher": "tiny"}, "ppo": {"critic": "head"}}.items():
        assert plan(loss=loss, **more).notes == ()


# --- KL and reference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k1", "k1_loss"])
def test_k1_as_a_loss_is_refused_with_the_reason(name):
    refused(ConfigError, f"--kl {name}", "expected gradient of zero", "--kl k1_reward", kl=name)


def test_k3_is_allowed_with_a_warning_and_told_once():
    schedule = [{"step": 5, "loss": "cispo"}]
    (note,) = plan(kl="k3_loss", schedule=schedule).notes
    assert "k3_loss" in note and "rk3_loss" in note
    assert plan(kl="rk3_loss").notes == ()


def test_a_kl_of_coefficient_0_is_not_computed():
    assert plan(kl={"name": "rk3_loss", "coef": 0.0}).algorithm.kl is None


def test_a_kl_whose_settings_clash_with_those_of_every_kl(parts):
    refused(SignatureError, "clashing_kl", "coef", kl=f"{parts}clashing_kl")


def test_a_kl_out_of_its_domain():
    refused(ConfigError, "coef", "-1", "--kl.coef 0.01", kl={"name": "rk3_loss", "coef": -1.0})


def test_the_reference_is_there_where_something_needs_it():
    assert plan().auxiliary_models is None
    assert plan(kl="rk3_loss").auxiliary_models.reference is frozen
    assert plan(kl="rk3_loss", lora_rank=4).auxiliary_models.reference is adapter_off
    assert plan(loss="dpo").auxiliary_models.reference is frozen
    followed = plan(kl="k1_reward", reference={"name": "ema", "decay": 0.5}).auxiliary_models
    assert keywords(followed.reference) == {"decay": 0.5}
    assert plan(schedule=[{"step": 3, "kl": "rk3_loss"}]).auxiliary_models.reference is frozen


def test_a_reference_that_nothing_needs_is_not_kept():
    assert plan(reference="ema").auxiliary_models is None


def test_adapter_off_needs_adapters(parts):
    message = refused(ConfigError, "--reference adapter_off", "--lora-rank 16", kl="rk3_loss", reference="adapter_off")
    assert "--reference frozen" in message
    assert plan(kl="rk3_loss", reference="adapter_off", lora_rank=2).auxiliary_models.reference is adapter_off


# --- critic and teacher ----------------------------------------------------------------------------------------------


def test_ppo_needs_a_critic():
    message = refused(SignatureError, "--loss ppo", "value_loss names `values`", "--critic head", loss="ppo")
    assert "--loss grpo" in message and "gae names `values`" in message
    found = plan(loss="ppo", critic="head")
    assert (found.auxiliary_models.critic, found.auxiliary_models.critic_lr) == ("head", pytest.approx(3e-3))
    assert plan(loss="ppo", critic="head", critic_lr=0.5).auxiliary_models.critic_lr == 0.5
    no_critic = plan(loss={"name": "ppo", "value_coef": 0.0}, advantage="group_norm")
    assert no_critic.auxiliary_models is None


def test_a_critic_that_nothing_trains_is_refused():
    said = "gae names `values`, but no term of the loss names `values`, so nothing would train the critic"
    message = refused(ConfigError, "--critic head", said, loss="reinforce", advantage="gae", critic="head")
    assert "--loss ppo" in message and "--advantage group_norm" in message
    off = {"name": "ppo", "value_coef": 0.0}
    refused(ConfigError, said, "type --loss.value-coef 0.5", loss=off, critic="tiny")
    later = plan(loss="ppo", critic="head", schedule=[{"step": 5, "loss": "reinforce", "advantage": "gae"}])
    assert later.auxiliary_models.critic == "head"  # trained before


def test_an_advantage_needs_a_critic_too(parts):
    refused(SignatureError, "wants_values names `values`", "--critic head", advantage=f"{parts}wants_values")


def test_a_teacher():
    refused(SignatureError, "teacher_logprobs", "--teacher", loss="opd")
    refused(SignatureError, "topk_logprobs", "--teacher", loss="opd_topk")
    beside = plan(loss="opd", teacher="tiny", teacher_top_k=4).auxiliary_models
    assert (beside.teacher, beside.teacher_top_k, beside.reference, beside.critic) == ("tiny", 4, None, "")
    assert plan(loss="opd_topk", teacher="tiny", mode="sft").auxiliary_models.teacher == "tiny"


def test_models_that_nothing_needs_are_told_and_not_loaded():
    found = plan(critic="head", teacher="tiny")
    assert found.auxiliary_models is None and [note.split()[0] for note in found.notes] == ["--critic", "--teacher"]


@pytest.mark.parametrize("name", ["critic", "teacher"])
def test_a_model_beside_the_policy_that_does_not_exist(name):
    refused(ModelError, f"--{name}: there is no folder ./absent", **{name: "./absent"})
    refused(ModelError, f"--{name}: there is no folder ./absent", loss="ppo", **{"critic": "head", name: "./absent"})


def test_a_training_backend_that_takes_no_model_beside_the_policy(parts):
    training = f"{parts}old_backend"
    assert plan(training=training).notes == ()
    message = refused(ConfigError, f"--training {training}", "(frozen)", training=training, kl="rk3_loss")
    assert "--training torch" in message
    refused(ConfigError, "a critic (head)", training=training, loss="ppo", critic="head")
    refused(ConfigError, "a teacher (tiny)", training=training, loss="opd", teacher="tiny")


def test_a_training_backend_may_use_the_older_name_of_auxiliary_models(parts):
    made = plan(training=f"{parts}old_name", kl="rk3_loss")
    assert made.training_arguments()["companions"].reference is frozen


# --- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"minibatches": 9}, ["--minibatches 9", "--prompts-per-step is 8", "--minibatches 8"]),
        ({"pairs": "best_worst"}, ["--pairs best_worst", "pair_index", "--loss dpo"]),
        ({"loss": "dpo", "select": "top"}, ["--pairs best_worst and --select top"]),
        ({"loss": "dpo", "samples_per_prompt": 1}, ["--samples-per-prompt 1", "2 or more"]),
        ({"loss": "dpo", "kl": "rk3_loss"}, ["--kl rk3_loss", "leave --kl out"]),
        ({"loss": "dpo", "aggregation": "token_mean"}, ["--aggregation token_mean", "pair_mean"]),
        ({"aggregation": "pair_mean"}, ["--aggregation pair_mean", "--pairs best_worst"]),
    ],
)
def test_parts_that_do_not_go_together(settings, words):
    refused(ConfigError, *words, **settings)
    if "kl" not in settings and "loss" not in settings:
        key, value = next(iter(settings.items()))
        if key != "minibatches":
            refused(ConfigError, "[[schedule]], from step 5: ", *words, schedule=[{"step": 5, key: value}])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"select": "slow_selector"}, ["slow_selector", "async"]),
        ({"mix": "odd_mixer"}, ["odd_mixer", "part", "parts"]),
    ],
)
def test_a_part_that_cannot_be_called(parts, settings, words):
    ((key, name),) = settings.items()
    refused(SignatureError, *words, **{key: parts + name})


ONE = {"samples_per_prompt": 1, "advantage": "baseline"}
TOOLLESS = "./algorithm_parts.py:Toolless"


@pytest.mark.parametrize(
    ("words", "settings", "used"),
    [
        ("--advantage rloo is not used: pairs are", {"loss": "dpo", "advantage": "rloo"}, {"loss": "grpo"}),
        ("--advantage rloo is not used: the loss cross", {"loss": "rft", "advantage": "rloo"}, {"loss": "grpo"}),
        ("--kl rk3_loss is not used", {"kl": {"name": "rk3_loss", "coef": 0.0}}, {"kl": "rk3_loss"}),
        ("--reference ema is not used", {"reference": "ema"}, {"kl": "rk3_loss"}),
        ("--correction icepop is not used: hf", {"correction": "icepop"}, {"over_sampling": 1.5}),
        ("--correction truncated is not used: hf", {"correction": "truncated"}, {"staleness": 1}),
        ("--correction truncated is not used: the loss",
         {"loss": "rft", "correction": "truncated", "staleness": 1}, {"loss": "is"}),
        ("--mix product is not used: nothing",
         {"loss": "opd", "teacher": "tiny", "mix": "product", "reward": ["env:2"]}, {"filter": ["any_success"]}),
        ("--shaping overlong is not used",
         {"loss": "opd", "teacher": "tiny", "shaping": ["overlong"]}, {"filter": ["any_success"]}),
        ("the filter nonzero_std drops every group", ONE | {"filter": ["nonzero_std"]}, {"samples_per_prompt": 2}),
        ("the filter accuracy_std drops every group", ONE | {"loss": "dapo"}, {"filter": "none"}),
        ("--tool-parser hermes is not used", {"env": TOOLLESS, "tool_parser": "hermes"}, {"env": "calculator"}),
        ("--tool-parser hermes is not used",
         {"env": TOOLLESS, "tool_parser": "hermes", "mode": "eval"}, {"env": "calculator"}),
        ("--sampler difficulty is not used", {"mode": "sft", "sampler": "difficulty"}, {"mode": "rl"}),
        ("--inference vllm is not used", {"mode": "sft", "eval_tasks": 0, "inference": "vllm"}, {"eval_tasks": 4}),
        ("--reward constant is not used",
         {"mode": "sft", "eval_tasks": 0, "reward": ["env", "constant"]}, {"eval_tasks": 4}),
        ("--eval-inference hf is not used",
         {"eval_inference": "hf", "eval_every": 2, "eval_tasks": 0}, {"eval_tasks": 4}),
        ("--env calculator is not used: its weight",
         {"env": ["a=calculator:1", "b=calculator:0"]}, {"env": "calculator"}),
        ("--env calculator: its weight is not used", {"env": "calculator:2"}, {"env": "calculator"}),
        ("--critic head is not used: nothing names", {"critic": "head"}, {"loss": "ppo"}),
        ("--critic tiny is trained, and nothing uses",
         {"critic": "tiny", "loss": "ppo", "advantage": "group_norm"}, {"advantage": "gae"}),
        ("--critic-lr 0.5 is not used", {"critic_lr": 0.5}, {"critic": "head", "loss": "ppo"}),
        ("--teacher tiny is not used: nothing names", {"teacher": "tiny"}, {"loss": "opd"}),
        ("--teacher-top-k 3 is not used",
         {"loss": "opd", "teacher": "tiny", "teacher_top_k": 3}, {"loss": "opd_topk"}),
        ("--refill 3 is not used", {"refill": 3}, {"filter": ["nonzero_std"]}),
        ("from step 5: --advantage rloo is not used",
         {"advantage": "rloo", "schedule": [{"step": 5, "loss": "dpo"}]}, {"schedule": []}),
        ("from step 5: --correction icepop is not used: hf",
         {"schedule": [{"step": 5, "correction": "icepop"}]}, {"over_sampling": 1.5}),
        ("from step 5: it changes nothing",
         {"schedule": [{"step": 5, "loss": "grpo"}]}, {"schedule": [{"step": 5, "loss": "cispo"}]}),
    ],
)  # fmt: skip
def test_what_is_chosen_and_has_no_effect_is_named(parts, words, settings, used):
    """And not if something uses it: with the settings `used`."""
    (note,) = plan(**settings).notes
    assert words in note
    assert plan(**(settings | used)).notes == ()


def test_a_correction_of_an_author_may_have_an_effect(parts):
    assert plan(correction=f"{parts}half").notes == ()


def test_what_a_run_on_saved_groups_does_not_use(tmp_path):
    """It trains on the rewards that were saved, and draws no tasks."""
    (tmp_path / "config.toml").write_text('mode = "rl"\nreward = ["env:1"]\n[env]\nname = "calculator"\n')
    saved = {"from_run": [str(tmp_path)], "loss": "rft"}
    assert plan(**saved).notes == () == plan(**saved, reward=["env:1"]).notes
    (note,) = plan(**saved, reward=["env:1", "constant"]).notes
    assert "--reward constant is not used: --from trains on the rewards that were saved" in note and "rescore" in note
    (note,) = plan(**saved, sampler="difficulty").notes
    assert "--sampler difficulty is not used" in note
    (tmp_path / "config.toml").write_text('reward = ["env:1", "constant:1"]\n[env]\nname = "calculator"\n')
    assert plan(**saved).notes == () == plan(**saved, reward=["env:1", "constant"]).notes, "the run had this reward"


def test_conversations_alone_have_no_held_out_tasks(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"prompt": "1?", "completion": "2"}\n')
    composed = make_plan(resolve({"mode": "sft", "data": str(tmp_path / "chat.jsonl"), "eval_tasks": 2}))
    assert composed.eval_tasks() == []
    assert "--eval-tasks 2 is not used: conversations alone have no tasks; name an --env" in composed.notes


# --- mode sft --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"advantage": "rloo"}, "--advantage rloo"),
        ({"kl": "rk3_loss"}, "--kl rk3_loss"),
        ({"reference": "ema"}, "--reference ema"),
        ({"correction": "icepop"}, "--correction icepop"),
        ({"mix": "product"}, "--mix product"),
        ({"shaping": ["overlong"]}, "--shaping overlong"),
        ({"select": "top"}, "--select top"),
        ({"pairs": "best_worst"}, "--pairs best_worst"),
        ({"filter": ["nonzero_std"]}, "--filter nonzero_std"),
        ({"critic": "head"}, "--critic head"),
        ({"minibatches": 2}, "--minibatches 2"),
        ({"schedule": [{"step": 2, "kl": "rk3_loss"}]}, "from step 2: --kl rk3_loss"),
    ],
)
def test_demonstrations_have_no_rollouts(settings, flag):
    refused(ConfigError, flag, "mode sft", "--mode rl", mode="sft", **settings)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("grpo", "asks for advantages, old_logprobs"),
        ("rft", "brings a selector (reward_at_least)"),
        ("dpo", "brings a pair selector (best_worst)"),
        ("ppo", "values"),
    ],
)
def test_algorithms_that_demonstrations_cannot_feed(loss, words):
    refused(ConfigError, f"--loss {loss}", words, "--loss sft", mode="sft", loss=loss)


def test_a_schedule_of_demonstrations():
    found = plan(mode="sft", schedule=[{"step": 4, "aggregation": "rollout_mean"}])
    assert [stage.step for stage in found.schedule] == [0, 4]
    assert found.algorithm.correction is None and found.filters == ()
    assert keywords(plan(mode="sft", aggregation={"name": "dr_grpo", "length": 9}).algorithm.aggregation)["length"] == 9


# --- the schedule ----------------------------------------------------------------------------------------------------

SCHEDULE = """\
env = "calculator"
loss = { name = "grpo", clip_high = 0.3 }
kl = "rk3_loss"

[[schedule]]
step = 80
kl = { coef = 0.0 }
loss = { entropy_coef = 0.001 }

[[schedule]]
step = 50
loss = "cispo"
"""


def of_text(tmp_path, text):
    file = tmp_path / "a.toml"
    file.write_text(text)
    tree, source = load_file(file)
    return make_plan(resolve(tree, source))


def test_stages_are_merged_over_what_was_in_force_before(tmp_path):
    found = of_text(tmp_path, SCHEDULE)
    assert [(stage.step, stage.name) for stage in found.schedule] == [
        (0, "main"),
        (50, "from_step_50"),
        (80, "from_step_80"),
    ]
    first, second, third = (stage.algorithm for stage in found.schedule)
    assert found.algorithms == {"main": first, "from_step_50": second, "from_step_80": third}
    assert keywords(first.terms[0].function)["clip_high"] == 0.3
    assert [function_label(each.terms[0].function) for each in (first, second, third)] == ["ppo_clip", "cispo", "cispo"]
    assert keywords(second.terms[0].function)["clip_high"] == 4.0
    assert (first.kl.coefficient, second.kl.coefficient, third.kl) == (0.01, 0.01, None)
    assert third.terms[1].coefficient == 0.001 and second.terms[1].coefficient == 0.0


@pytest.mark.parametrize("suffix", ["toml", "json", "py"])
def test_a_schedule_survives_being_written_down(tmp_path, suffix):
    found = of_text(tmp_path, SCHEDULE)
    tree = tomllib.loads(to_toml(found.resolved))
    file = tmp_path / f"config.{suffix}"
    if suffix == "toml":
        file.write_text(to_toml(found.resolved))
    elif suffix == "json":
        file.write_text(json.dumps(tree))
    else:
        file.write_text(f"config = {tree!r}\n")
    again, source = load_file(file)
    resolved = resolve(again, source)
    assert objectives(make_plan(resolved)) == objectives(found)
    assert make_plan(resolved).resolved == found.resolved


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": "none", "shaping": "none", "filter": "none"},
        {"loss": "dapo", "shaping": {"algorithm": {"buffer": 8}}, "correction": {"name": "auto", "cap": 3.0}},
        {"loss": "rft", "select": {"threshold": 0.5}, "schedule": [{"step": 3, "shaping": [], "select": "top"}]},
        {"mode": "sft", "lora_rank": 2},
        {"kl": "rk3_loss", "reference": {"name": "every_n", "steps": 7}, "minibatches": 2},
        {"loss": "ppo", "critic": "head", "critic_lr": 0.5, "teacher_top_k": 4, "teacher": "tiny"},
    ],
)
def test_what_was_composed_survives_being_written_down(settings):
    found = plan(**settings)
    again = make_plan(resolve(tomllib.loads(to_toml(found.resolved))))
    assert again.resolved == found.resolved and again.notes == found.notes
    assert objectives(again) == objectives(found)
    assert again.schedule[0].correction_auto == found.schedule[0].correction_auto and len(again.filters) == len(
        found.filters
    )


def objectives(found):
    return [(stage.step, objective_words(stage.algorithm)) for stage in found.schedule]


def test_settings_of_an_algorithms_own_parts_go_with_it():
    """rft's own selector was told something; cispo has none, and nothing is left for it."""
    found = plan(loss="rft", select={"threshold": 0.5}, schedule=[{"step": 5, "loss": "cispo"}])
    assert found.schedule[1].algorithm.select is None
    kept = plan(loss="rft", select={"threshold": 0.5}, schedule=[{"step": 5, "kl": "rk3_loss"}])
    assert keywords(kept.schedule[1].algorithm.select) == {"threshold": 0.5}


def test_a_stage_knows_what_the_whole_run_is_told():
    assert plan(steps=50, schedule=[{"step": 50, "loss": "cispo"}]).notes == (
        "[[schedule]]: step 50 is never reached; the run has 50 steps",
    )
    (note,) = plan(schedule=[{"step": 5, "loss": "dapo"}]).notes
    assert "the filters of dapo are not used" in note and "--filter accuracy_std" in note
    refused(SignatureError, "[[schedule]], from step 5: ", "--critic head", schedule=[{"step": 5, "loss": "ppo"}])
    one = plan(correction="none", schedule=[{"step": 5, "correction": "auto"}])
    assert [stage.correction_auto for stage in one.schedule] == [False, True] and one.algorithm.correction is None
    both = plan(schedule=[{"step": 5, "correction": "icepop"}]).schedule
    assert [stage.correction_auto for stage in both] == [True, False], "each stage decides for itself"


@pytest.mark.parametrize(
    ("table", "line", "words"),
    [
        ('step = 5\nlss = "cispo"', 6, "schedule[0].lss: this setting cannot change at a step\ndid you mean: loss?"),
        ("step = 5\nlr = 0.1", 6, "a [[schedule]] table holds: step, loss, advantage, aggregation, kl,"),
        ('loss = "cispo"', 4, "schedule[0]: the table has no step; write `step = 50` into it"),
        ("step = 0", 5, "schedule[0].step: expected a whole number, 1 or more; got 0"),
        ("step = 2.5", 5, "schedule[0].step: expected a whole number, 1 or more; got 2.5"),
        ("step = true", 5, "expected a whole number"),
        ('step = 5\nloss = "a"\n[[schedule]]\nstep = 5', 8, "schedule[1].step: two tables have step 5"),
        ("step = 5\nloss = 3", 4, "schedule[0]: loss: expected the name of a component"),
        ('step = 5\nloss = { name = "cispo", clip = 1 }', 6, "schedule[0].loss.clip: loss cispo has no setting 'clip'"),
        ('step = 5\n[schedule.kl]\nname = "rk3_loss"\ncoef = "x"', 8, "schedule[0].kl.coef: expected a number"),
        ("step = 5\n[schedule.kl]\ncoef = 0.1", 7, "schedule[0].kl.coef: the loss grpo has no KL estimator of its own"),
        (
            "step = 5\n[schedule.correction]\nname = ''\ncap = 1",
            8,
            "schedule[0].correction.cap: no correction is chosen",
        ),
    ],
)
def test_a_mistake_in_a_schedule_is_told_with_its_line(tmp_path, table, line, words):
    with pytest.raises(ConfigError) as caught:
        of_text(tmp_path, f'env = "calculator"\nsteps = 9\n\n[[schedule]]\n{table}\n')
    assert str(caught.value).startswith(f"{tmp_path}/a.toml, line {line}: ")
    assert words in str(caught.value)


def test_a_schedule_of_one_table_in_single_brackets(tmp_path):
    with pytest.raises(ConfigError, match=r"line 2: schedule: expected a list of tables"):
        of_text(tmp_path, 'env = "calculator"\n[schedule]\nstep = 3\n')


def test_the_stage_in_force():
    algorithm = plan().algorithm
    stages = [Stage(step, stage_name(step), algorithm) for step in (0, 5, 9)]
    assert [stage_at(stages, step).step for step in (0, 4, 5, 8, 9, 1000)] == [0, 0, 5, 5, 9, 9]
    with pytest.raises(AssertionError, match=r"\[5, 9\]"):
        stage_at(stages[1:], 7)
    with pytest.raises(AssertionError):
        stage_at([], 0)


# --- in words --------------------------------------------------------------------------------------------------------


def test_a_plan_in_words(tmp_path):
    text = describe(of_text(tmp_path, SCHEDULE + '[[schedule]]\nstep = 90\nkl = "k1_reward"\n')).text
    assert "objective: ppo_clip(clip_high=0.3); KL 0.01 * rk3_loss in the loss; advantage group_norm" in text
    assert "objective from step 50: cispo; KL 0.01 * rk3_loss in the loss" in text
    assert "objective from step 80: cispo + 0.001 * entropy_bonus; advantage" in text
    assert "KL 0.01 * k1_reward off the advantages" in text
    assert "from step 50: loss: cispo (rollouts-rl" in text
    assert "reference: frozen" in text and "correction truncated where another engine samples" in text
    assert "note: " not in text
    assert "note: --kl k3_loss" in describe(plan(kl="k3_loss")).text


def test_every_part_has_its_words():
    found = plan(loss="dapo", mix="minimum", select={"name": "top", "count": 3}, kl={"name": "k2_loss", "target": 0.1})
    words = objective_words(found.algorithm)
    assert words == (
        "ppo_clip(clip_high=0.28); KL 0.01 * k2_loss in the loss, steered to 0.1 nats a token; advantage group_norm; "
        "aggregation token_mean; mix minimum; select top(count=3); shaping overlong; correction truncated"
    )
    assert objective_words(plan(loss="dpo").algorithm) == "dpo; aggregation pair_mean; pairs best_worst"


def test_the_manifest_names_what_later_stages_bring():
    made = plan(schedule=[{"step": 5, "loss": "cispo"}, {"step": 6, "loss": "grpo"}])
    found = make_manifest(made.settings.seed, made.references)
    losses = [each["name"] for each in found["components"] if each["kind"] == "losses"]
    assert losses == ["grpo", "cispo"]
