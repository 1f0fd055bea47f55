"""Rules that end a run early: what they mean, and what is no rule."""

from __future__ import annotations

import math

import pytest

from rollouts.config.files import Source
from rollouts.config.flags import read_flag
from rollouts.config.resolving import resolve
from rollouts.config.settings import Settings
from rollouts.config.stopping import StopRule, read_rule
from rollouts.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "below", "at", "above"),
    [
        ("m >= 0.5", False, True, True),
        ("m>0.5", False, False, True),
        (" m <= .5 ", True, True, False),
        ("m < 5e-1", True, False, False),
        ("m == 0.5", False, True, False),
        ("m != 0.5", True, False, True),
    ],
)
def test_the_operators(text, below, at, above):
    rule = read_rule(text)
    assert [rule.holds({"m": value}) for value in (0.25, 0.5, 0.75)] == [below, at, above]
    assert not rule.holds({"m": math.nan}) and not rule.holds({"other": 0.5})
    assert read_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected METRIC OPERATOR NUMBER"),
        ("reward/mean", "in quotes"),
        ("reward/mean >=", "in quotes"),
        ("reward/mean = 1", "did you mean ==?"),
        ("reward/mean => 1", "did you mean >=?"),
        ("reward/mean >> 1", "there are >= <= == != > <"),
        ("reward/mean >= 95%", "95% is no number"),
        ("reward/mean >= nan", "nan is no number"),
        ("a > 1 and b < 2", "give each rule its own --stop-when"),
    ],
)
def test_what_is_no_rule(text, words):
    with pytest.raises(ConfigError) as caught:
        read_rule(text)
    assert words in str(caught.value) and "--stop-when 'eval/reward_mean >= 0.95'" in str(caught.value)
    with pytest.raises(ConfigError, match="stop_when"):
        resolve({"env": "calculator", "stop_when": [text]}, Source("a.toml", f"stop_when = [{text!r}]\n"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_best": "reward/mean >"}, "is no metric"),
        ({"keep_best": "least:m"}, "is no metric"),
        ({"keep_best": "min:reward_mean"}, "did you mean: reward/mean?"),
        ({"keep_best": "eval/greedy_mean"}, "type: --eval-every 10"),
    ],
)
def test_what_ranks_no_checkpoints(settings, words):
    with pytest.raises(ConfigError, match=r"keep.best") as caught:
        resolve({"env": "calculator"} | settings)
    assert words in str(caught.value)


@pytest.mark.parametrize("given", ["m > 1", ["m > 1"], [read_flag("m > 1")], ("m > 1",)])
def test_one_rule_needs_no_list(given):
    assert resolve({"stop_when": given}).settings.stop_when == ("m > 1",)


@pytest.mark.parametrize("given", ["none", [read_flag("none")], []])
def test_none_is_no_rule(given):
    assert resolve({"stop_when": given}).settings == Settings()


def test_a_rule_on_evaluations_needs_evaluations():
    rule = {"stop_when": "eval/reward_mean >= 0.9"}
    assert resolve(rule | {"eval_every": 5}).settings.stop_when
    with pytest.raises(ConfigError, match=r"has no effect.*\n.*--eval-every 10"):
        resolve(rule)
    with pytest.raises(ConfigError, match=r"has no effect.*\n.*--eval-tasks"):
        resolve(rule | {"eval_every": 5, "eval_tasks": 0})


@pytest.mark.parametrize("name", ["reward_mean", "reward.mean", "reward/maen", "Reward/mean"])
def test_a_misspelled_metric_is_refused(name):
    with pytest.raises(ConfigError, match=r"no metric is named .*\ndid you mean: reward/mean\?"):
        resolve({"stop_when": f"{name} >= 0.5"})
    with pytest.raises(ConfigError, match=r"did you mean: eval/reward_mean\?"):  # before the lack of --eval-every
        resolve({"stop_when": "eval/reward_meen >= 0.5"})


@pytest.mark.parametrize(
    "name", ["reward/mean", "reward/pass@k", "metric/reward_mean", "policy/mean", "reward_part/mean"]
)
def test_another_metric_is_no_misspelled_one(name):
    assert resolve({"stop_when": f"{name} >= 0.5"}).settings.stop_when == (f"{name} >= 0.5",)


def test_a_rule_in_words():
    assert str(StopRule("eval/reward_mean", ">=", 0.95)) == "eval/reward_mean >= 0.95"
