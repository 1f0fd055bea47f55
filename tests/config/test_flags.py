"""Dotted flags and the values of flags."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.config.flags import Flag, flag_name, read_flag, take_dotted_flags
from rollouts.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.1", -0.1),
        ("3e-4", 3e-4),
        (".5", 0.5),
        ("007", 7),
        ("true", True),
        ("True", True),
        ("none", None),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ('{ a = "b" }', {"a": "b"}),
        ('"3"', "3"),
        ("./f.py:fn", "./f.py:fn"),
        ("a b", "a b"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
        ("2024-01-31", datetime.date(2024, 1, 31)),
    ],
)
def test_a_value_is_read_as_toml_else_as_text(text, value):
    flag = read_flag(text)
    assert flag == Flag(text, value)
    assert type(flag.value) is type(value)


def test_dotted_flags_are_taken_from_anywhere():
    argv = ["--env.digits", "3", "run", "f.toml", "--loss.clip-high=0.28", "--steps", "4", "--reward.my-short.n", "-5"]
    rest, tree = take_dotted_flags(argv)
    assert rest == ["run", "f.toml", "--steps", "4"]
    assert tree == {
        "env": {"digits": Flag("3", 3)},
        "loss": {"clip_high": Flag("0.28", 0.28)},
        "reward": {"my_short": {"n": Flag("-5", -5)}},
    }


def test_only_names_with_dots_are_dotted_flags():
    argv = ["run", "a.toml", "--model", "./x.y", "--out=a.b", "-x.y", "--data", "rows.jsonl"]
    assert take_dotted_flags(argv) == (argv, {})


def test_a_bare_double_dash_ends_the_flags():
    assert take_dotted_flags(["--env.a", "1", "--", "--env.b", "2"]) == (
        ["--", "--env.b", "2"],
        {"env": {"a": Flag("1", 1)}},
    )


@pytest.mark.parametrize("argv", [["--env.flag"], ["--env.flag", "--steps", "3"], ["--env.flag", "--"]])
def test_a_missing_value_is_said(argv):
    with pytest.raises(ConfigError, match=r"--env\.flag needs a value.*\n.*`true` or `false`"):
        take_dotted_flags(argv)


def test_an_equals_sign_gives_any_value():
    assert take_dotted_flags(["--env.a=--b", "--env.c="])[1] == {"env": {"a": Flag("--b", "--b"), "c": Flag("", "")}}


@pytest.mark.parametrize("argv", [["--env.a", "1", "--env.a.b", "2"], ["--env.a.b", "2", "--env.a", "1"]])
def test_flags_that_contradict_each_other_are_refused(argv):
    with pytest.raises(ConfigError, match=r"--env\.a"):
        take_dotted_flags(argv)


def test_the_last_of_a_repeated_flag_counts():
    assert take_dotted_flags(["--env.a", "1", "--env.a", "2"])[1] == {"env": {"a": Flag("2", 2)}}


@given(
    st.lists(st.from_regex(r"[a-z]{1,5}(_[a-z]{1,3})?", fullmatch=True), min_size=2, max_size=4), st.text(max_size=20)
)
def test_a_flag_name_is_read_back_to_its_path(path, text):
    rest, tree = take_dotted_flags([f"{flag_name(path)}={text}"])
    assert rest == []
    for key in path:
        tree = tree[key]
    assert tree == read_flag(text)


def test_a_component_of_the_supervised_phase_is_named_and_told_its_settings():
    for argv in (["--sft.env", "a", "--sft.env.b", "2"], ["--sft.env.b", "2", "--sft.env", "a"]):
        rest, tree = take_dotted_flags(argv)
        assert rest == [] and tree == {"sft": {"env": {"name": read_flag("a"), "b": read_flag("2")}}}
    assert take_dotted_flags(["--sft.steps", "3"])[1] == {"sft": {"steps": read_flag("3")}}
