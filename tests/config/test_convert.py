"""Values into types, and a component's settings by its signature."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest

from rollouts.config.convert import convert_value, describe_type
from rollouts.config.files import Source
from rollouts.config.flags import Flag, read_flag
from rollouts.config.settings import REQUIRED, Setting
from rollouts.errors import ConfigError
from rollouts.plugins.signature import Signature, complete_settings, convert_settings, read_signature

PATH = ("env", "x")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Mixed(enum.Enum):
    A = "a"
    B = 1


@dataclass(frozen=True)
class Rules:
    limit: int = 1
    name: str = "r"


@dataclass
class Limits:
    turns: int = 3
    names: list[str] = field(default_factory=list)


class Row(TypedDict):
    n: int


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        (".5", float, 0.5),
        ("3", str, "3"),
        ("3.10", str, "3.10"),
        ("007", str, "007"),
        ("true", str, "true"),
        ("none", str, "none"),
        ('"quoted"', str, "quoted"),
        ("2024-01-31", str, "2024-01-31"),
        ("none", str | None, None),
        ("none", int | None, None),
        ("none", Literal["none", "mean"], "none"),
        ("none", Literal["none", "mean"] | None, "none"),
        ("3", int | str, 3),
        ("x", int | str, "x"),
        ("false", bool, False),
        ("[1, 2]", list[int], [1, 2]),
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ('["a"]', Sequence[str], ["a"]),
        ("red", Color, Color.RED),
        ("1", Mixed, Mixed.B),
        ("a/b", Path, Path("a/b")),
        ("{ turns = 5 }", Limits, Limits(5)),
        ("{ n = 5 }", Row, {"n": 5}),
        ("3", Any, 3),
        ("none", Any, None),
        ("word", Any, "word"),
    ],
)
def test_a_flag_is_converted_by_the_type(text, hint, value):
    converted = convert_value(read_flag(text), hint, PATH)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("value", "hint", "converted"),
    [
        (3, float, 3.0),
        ("none", int | None, None),
        (None, int | None, None),
        ("x", str, "x"),
        ([1], set[int], {1}),
        (3, "?", 3),
    ],
)
def test_a_file_value_is_converted_by_the_type(value, hint, converted):
    assert convert_value(value, hint, PATH) == converted


@pytest.mark.parametrize(
    ("value", "hint", "words"),
    [
        (3.0, int, "expected a whole number; got 3.0"),
        (True, int, "expected a whole number; got true"),
        ("3", int, 'expected a whole number; got "3"'),
        (3, str, "expected text; got 3"),
        (1, bool, "expected true or false; got 1"),
        (None, int, "expected a whole number; got none"),
        (
            [1, "a"],
            list[int],
            r"expected a list of a whole number; got \[1, \"a\"\] \(Expected `int`, got `str` at \[1\]\)",
        ),
        ("rad", Literal["rad", "red"] | None, None),
        ("rid", Literal["rad", "red"] | None, r"one of: rad, red, none; got \"rid\"\ndid you mean: .*red"),
        ("gren", Color, "one of: red, blue"),
        ("zzz", Mixed, "one of: a, 1"),
        ("x", dict[str, int], "expected a table"),
        ("x", int | None, "expected a whole number or none"),
    ],
)
def test_a_wrong_file_value_says_what_was_expected(value, hint, words):
    source = Source("a.toml", "[env]\ny = 1\nx = 2\n")
    if words is None:
        assert convert_value(value, hint, PATH, source) == value
        return
    with pytest.raises(ConfigError, match=r"a\.toml, line 3: env\.x: .*" + words):
        convert_value(value, hint, PATH, source)


@pytest.mark.parametrize(
    ("text", "hint", "words"),
    [
        ("3.0", int, r"--env\.x: expected a whole number; got 3.0\nfor example: --env\.x 3"),
        ("abc", int, r'got "abc"'),
        ("none", int, r"got none"),
        ("1", bool, r"true or false; got 1\nfor example: --env\.x true"),
        ("a,b", list[str], r"""for example: --env\.x '\["a", "b"\]'"""),
    ],
)
def test_a_wrong_flag_names_the_flag_and_an_example(text, hint, words):
    with pytest.raises(ConfigError, match=words):
        convert_value(read_flag(text), hint, PATH)


def test_flags_inside_a_table_are_converted_each_by_its_field():
    given = {"turns": read_flag("5"), "names": read_flag('["1"]')}
    assert convert_value(given, Limits, PATH) == Limits(5, ["1"])
    assert convert_value({"a": read_flag("3")}, dict[str, str], PATH) == {"a": "3"}


@pytest.mark.parametrize(
    ("value", "hint", "words"),
    [
        (
            {"turms": 1},
            Limits,
            r"env\.x\.turms: Limits has no setting 'turms'\ndid you mean: turns\?\nits settings: turns",
        ),
        ({"a": {"turms": 1}}, dict[str, Limits], r"env\.x\.a\.turms"),
        ([{"turms": 1}], list[Limits], r"Limits has no setting 'turms'"),
        ({"m": 1}, Row | None, r"Row has no setting 'm'"),
        ({"turms": Flag("1", 1)}, Limits | None, r"--env\.x\.turms: .*\ndid you mean: --env\.x\.turns\?"),
    ],
)
def test_unknown_keys_are_refused_at_every_depth(value, hint, words):
    with pytest.raises(ConfigError, match=words):
        convert_value(value, hint, PATH)


def test_a_table_whose_type_has_an_unknown_hint_is_left_to_the_component():
    hinted = make_dataclass("Hinted", [("limit", "Unknown")])  # as a type under TYPE_CHECKING is
    assert convert_value({"limit": read_flag("3")}, hinted, PATH) == {"limit": 3}
    with pytest.raises(ConfigError, match="Hinted has no setting 'limits'"):
        convert_value({"limits": 3}, hinted, PATH)


SIGNATURE = Signature(
    ("task",),
    (Setting("digits", int, 2, "Digits."), Setting("style", str | None, None, ""), Setting("path", str, REQUIRED, "")),
)


def test_settings_are_converted_by_the_signature():
    given = {"digits": read_flag("3"), "path": read_flag("4")}
    converted = convert_settings(SIGNATURE, given, "environment e", path=("env",))
    assert converted == {"digits": 3, "path": "4"}
    assert complete_settings(SIGNATURE, converted) == {"digits": 3, "style": None, "path": "4"}


def test_an_unknown_setting_lists_the_right_ones():
    with pytest.raises(ConfigError) as caught:
        convert_settings(SIGNATURE, {"digit": read_flag("3")}, "environment e", path=("env",))
    assert str(caught.value) == (
        "--env.digit: environment e has no setting 'digit'\ndid you mean: --env.digits?\n"
        "its settings: digits (a whole number; default 2), style (text or none; default none), path (text; no default)"
    )


def test_a_missing_setting_says_what_to_type():
    with pytest.raises(
        ConfigError, match=r"environment e needs `path` \(text\)\ntype: --env\.path VALUE, or .* \[env\]"
    ):
        convert_settings(SIGNATURE, {}, "environment e", path=("env",))


def test_a_real_signature():
    def brevity(trajectory, *, target_tokens: int = 200, scale=1.0) -> float: ...

    signature = read_signature(brevity, "rewards")
    given = {"target_tokens": read_flag("50"), "scale": read_flag("2")}
    assert convert_settings(signature, given, "reward brevity") == {"target_tokens": 50, "scale": 2.0}


def test_the_fields_of_a_dataclass_are_flat_settings():
    def judged(trajectory, *, rules: Rules = Rules(limit=2), strict: bool = True): ...

    signature = read_signature(judged, "rewards")
    converted = convert_settings(signature, {"limit": read_flag("5")}, "reward judged", path=("reward", "judged"))
    assert converted == {"limit": 5}
    assert complete_settings(signature, converted) == {"limit": 5, "name": "r", "strict": True}
    with pytest.raises(ConfigError, match="did you mean: limit"):
        convert_settings(signature, {"limits": 5}, "reward judged")


def test_a_default_that_no_file_can_hold_is_left_out():
    signature = Signature((), (Setting("hook", Any, print, ""), Setting("pair", Any, (1, "a"), "")))
    assert complete_settings(signature, {}) == {"pair": (1, "a")}


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "a whole number or none"),
        (list[str], "a list of text"),
        (tuple[float, float], "a list of a number"),
        (Literal["a", "b"], "one of: a, b"),
        (dict[str, int], "a table"),
        (Path, "a path"),
        (Any, "anything"),
        (Limits, "a table"),
    ],
)
def test_types_in_words(hint, words):
    assert describe_type(hint) == words
