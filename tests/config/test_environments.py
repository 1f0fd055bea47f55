"""One environment, or several: every way to write them, what flags change, and the way back into a file."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.config.convert import unflagged
from rollouts.config.files import Source
from rollouts.config.flags import read_flag, take_dotted_flags
from rollouts.config.merging import Component, merge
from rollouts.config.render import to_toml
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError

TWO = ("--env", "easy=calculator:2", "--env", "hard=calculator")
TWO_TABLES = """
[[env]]
name = "calculator"
alias = "easy"
weight = 2
digits = 1

[[env]]
name = "calculator"
alias = "hard"
digits = 3
"""


def resolved(text, *arguments):
    """A file with flags over it: `--env` may come several times, the others are dotted."""
    rest, dotted = take_dotted_flags(arguments)
    names = {"env": [read_flag(text) for text in rest[1::2]]} if rest else {}
    return resolve(merge(tomllib.loads(text), names, dotted), Source("run.toml", text))


def envs(text, *arguments):
    found = resolved(text, *arguments).components["env"]
    return [each._replace(settings=unflagged(each.settings)) for each in found]


def refused(text, *arguments):
    with pytest.raises(ConfigError) as caught:
        resolved(text, *arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('env = "calculator"', []),
        ('env = ["calculator"]', []),
        ('[env]\nname = "calculator"', []),
        ('[[env]]\nname = "calculator"', []),
        ("", ["--env", "calculator"]),
        (TWO_TABLES, ["--env", "calculator"]),
        ("", [*TWO, "--env", "none", "--env", "calculator"]),
    ],
)
def test_one_environment_has_neither_alias_nor_weight(text, arguments):
    assert envs(text, *arguments) == [Component("calculator", {})]
    assert envs(text, *arguments, "--env.digits", "3") == [Component("calculator", {"digits": 3})]
    assert resolved(text, *arguments).settings.env == "calculator"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", TWO),
        ('env = ["easy=calculator:2", "hard=calculator"]', []),
        ('env = ["easy=calculator:2", {name = "calculator", alias = "hard"}]', []),
        ('[env.easy]\nname = "calculator"\nweight = 2\n[env.hard]\nname = "calculator"', []),
        ('[[env]]\nname = "calculator"\nalias = "easy"\nweight = 2\n[[env]]\nname = "calculator"\nalias = "hard"', []),
        ('[env]\nname = "another"\ndigits = 4', TWO),
        ("", ["--env.easy.name", "calculator", "--env.easy.weight", "2", "--env.hard.name", "calculator"]),
    ],
)
def test_several_have_aliases_and_weights(text, arguments):
    easy, hard = Component("calculator", {}, 2.0, "easy"), Component("calculator", {}, 1.0, "hard")
    assert envs(text, *arguments) == [easy, hard]
    changed = envs(text, *arguments, "--env.hard.digits", "3", "--env.easy.weight", "0.5")
    assert changed == [easy._replace(weight=0.5), hard._replace(settings={"digits": 3})]
    assert resolved(text, *arguments).settings.env == ("easy=calculator:2", "hard=calculator:1")


def test_aliases_that_are_not_given_are_the_last_part_of_the_name():
    found = envs("", "--env", "gym/FrozenLake-v1", "--env", "./f.py:Other:3", "--env", "./g.py:Other")
    assert [(each.alias, each.name, each.weight) for each in found] == [
        ("FrozenLake_v1", "gym/FrozenLake-v1", 1.0), ("Other", "./f.py:Other", 3.0), ("Other_2", "./g.py:Other", 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        ("3", 3.0),
        ("0", 0.0),
        ('"./c.py:harder"', {"name": "./c.py:harder"}),
        ('{ name = "./c.py:harder", until = 5 }', {"name": "./c.py:harder", "until": 5}),
        ("[[0, 0.0], [100, 1]]", [[0, 0.0], [100, 1]]),
    ],
)
def test_a_weight_is_a_number_points_or_a_curriculum(given, weight):
    text = f'[[env]]\nname = "a"\n[[env]]\nname = "b"\nweight = {given}\n'
    result = resolved(text)
    assert result.components["env"][1].weight == weight
    assert resolve(tomllib.loads(to_toml(result))) == result
    flag = unflagged(read_flag(given))
    if not isinstance(flag, dict):
        assert envs('env = ["a", "b"]', "--env.b.weight", given.strip('"'))[1].weight == weight


def test_a_setting_that_stands_in_a_table_inside_is_no_alias():
    assert envs('[env]\nname = "a"', "--env.options.name", "x") == [Component("a", {"options": {"name": "x"}})]


WORD = st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(lambda word: word not in ("none", "name", "weight", "alias"))
POINTS = st.lists(st.integers(0, 999), min_size=2, max_size=4, unique=True).map(
    lambda at: [[x, 1.5] for x in sorted(at)]
)
WEIGHT = (
    st.floats(0.1, 1e6) | st.integers(1, 9) | POINTS | WORD | st.fixed_dictionaries({"name": WORD, "n": st.integers()})
)
TABLE = st.dictionaries(WORD, st.integers() | WORD | st.lists(st.booleans(), max_size=2), max_size=2)
ENTRY = st.builds(lambda name, table, more: {"name": name, **table, **more}, WORD, TABLE,
                  st.fixed_dictionaries({}, optional={"weight": WEIGHT, "alias": WORD}))  # fmt: skip
TREE = st.lists(ENTRY, min_size=1, max_size=4, unique_by=lambda entry: entry.get("alias", entry["name"]))


@given(entries=TREE, in_phase=TREE | st.none(), commented=st.booleans())
def test_the_resolved_file_says_the_same(entries, in_phase, commented):
    result = resolve({"env": entries} | ({"mode": "sft+rl", "sft": {"env": in_phase}} if in_phase else {}))
    text = to_toml(result, commented=commented)
    assert resolve(tomllib.loads(text)) == result
    assert to_toml(resolve(tomllib.loads(text)), commented=commented) == text


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (
            "",
            [*TWO, "--env.digits", "3"],
            ["--env.digits: there are several", "--env.easy.digits or --env.hard.digits"],
        ),
        ("[env]\ndigits = 3", TWO, ["env.digits: there are several", "--env.easy.digits"]),
        ("", [*TWO, "--env.hrad.digits", "3"], ["no env with the alias 'hrad'", "did you mean: --env.hard?"]),
        ("", ["--env", "x=a", "--env", "x=b"], ["two entries have the alias 'x'", "--env OTHER=name"]),
        ("", ["--env", "name=a", "--env", "b"], ["cannot have the alias `name`"]),
        ("", ["--env", "a:0", "--env", "b:0"], ["the weights of a and b are 0", "--env.a.weight 1"]),
        ("", ["--env", "a:-1", "--env", "b"], ["env.a.weight", "0 or more", "got -1.0"]),
        ("", [*TWO, "--env.hard.weight", "-2"], ["--env.hard.weight", "0 or more", "got -2"]),
        ("", [*TWO, "--env.hard.weight", "[[5, 1], [2, 1]]"], ["the steps of the points must increase"]),
        ("", [*TWO, "--env.hard.weight", "[[5, 1]]"], ["two or more points (step, weight)"]),
        ("", [*TWO, "--env.hard.weight", "true"], ["--env.hard.weight", "got True"]),
        (TWO_TABLES + "weight = -3", [], ["run.toml, line 12: env.hard.weight", "got -3"]),
        ('[[env]]\nweight = 1\n[[env]]\nname = "b"', [], ["an entry of the list needs a `name`"]),
        ('[env]\ndigits = 3\n[env.hard]\nname = "b"', [], ["there are several", "--env.hard.digits"]),
    ],
)
def test_mistakes_say_what_to_type(text, arguments, words):
    message = refused(text, *arguments)
    for word in words:
        assert word in message, message
