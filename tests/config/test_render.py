"""A Resolved as a file: running the file again repeats the run."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.config.convert import toml_value
from rollouts.config.render import to_toml
from rollouts.config.resolving import resolve
from rollouts.config.settings import (
    COMPONENT_KINDS,
    EVAL_ONLY,
    MULTIPLE,
    REQUIRED,
    SCHEDULED,
    SFT,
    SINGLE,
    Setting,
    setting_infos,
)
from rollouts.config.stopping import OPERATORS
from rollouts.config.workers import KINDS
from rollouts.errors import ConfigError

WORD = st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(lambda word: word not in ("none", "name", "weight", "alias"))
NAME = st.builds(lambda a, b: "/".join(filter(None, [a, b])), st.sampled_from(["", "dist", "a-b"]), WORD)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: text.lower() != "none")
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
LEAF = st.booleans() | st.integers() | FLOAT | TEXT
VALUE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=5
)
SIGN = st.sampled_from(sorted(OPERATORS))
TABLE = st.dictionaries(WORD, VALUE, max_size=3)
WORKER = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from((*KINDS, "wss://host:80")),
        "count": st.integers(1, 9),
        "memory_gib": st.none() | st.floats(1e-3, 1e3),
        "certificate": TEXT,
    },
)
WORKERS = st.tuples(
    WORKER, st.dictionaries(WORD.filter(lambda word: word not in ("kind", "count")), WORKER, max_size=2)
)


def core_value(info):
    if info.choices:
        return st.sampled_from(info.choices)
    if info.name == "tasks":
        return st.sampled_from(["", "0-9,17"])
    if info.name == "answer_pattern":
        return st.sampled_from(["", r"-?\d+", "(a)|b"])
    if info.name == "keep_best":
        return st.sampled_from(["", "reward/mean", "min:policy/loss", "max:m"])
    if info.name == "keep_trajectories":
        return st.integers(1, 2**40) | st.just("all")
    if info.name == "schedule":
        return SCHEDULES
    if info.name == "stop_when":
        return st.lists(st.builds("{} {} {:g}".format, st.sampled_from(["reward/mean", "m"]), SIGN, FLOAT), max_size=2)
    if info.name == "sft":
        return st.deferred(lambda: PHASES)
    if info.name == "worker":
        return WORKERS.map(lambda pair: pair[0] | pair[1])
    if info.name == "role":
        return st.dictionaries(WORD, TABLE, max_size=2)
    if info.default is None:
        return st.none() | st.floats(1e-9, 1.0, exclude_max=True)
    if isinstance(info.default, float):
        return st.floats(max(info.minimum, 1e-3), 1e3)
    if isinstance(info.default, bool):
        return st.booleans()
    if isinstance(info.default, int):
        return st.integers(int(max(info.minimum, 0)), 2**40)
    return TABLE if isinstance(info.default, dict) else TEXT


def component(key):
    if key in SINGLE:
        return st.builds(lambda name, table: {"name": name, **table}, NAME, TABLE)
    weight = st.fixed_dictionaries({"weight": FLOAT}) if key == "reward" else st.just({})
    entry = st.builds(lambda name, table, weight: {"name": name, **table, **weight}, NAME, TABLE, weight)
    return st.dictionaries(WORD, entry, max_size=3)


STAGE = st.fixed_dictionaries({}, optional={key: NAME | component(key) for key in SCHEDULED})
SCHEDULES = st.lists(st.integers(1, 2**20), unique=True, max_size=3).flatmap(
    lambda steps: st.tuples(*(st.builds(lambda table, at=at: {"step": at, **table}, STAGE) for at in steps)).map(list)
)

PHASES = st.fixed_dictionaries(
    {},
    optional={
        **{
            info.name: core_value(info)
            for info in setting_infos()
            if info.name in SFT and info.name not in COMPONENT_KINDS
        },
        **{key: component(key) for key in SFT if key in COMPONENT_KINDS},
    },
)


def in_its_mode(tree):
    """The supervised phase has settings of its own in one mode only, and only an evaluation chooses tasks."""
    tree = tree | {"mode": "sft+rl"} if tree.get("sft") else tree
    return {key: value for key, value in tree.items() if key not in EVAL_ONLY or tree.get("mode") == "eval"}


TREES = st.fixed_dictionaries(
    {},
    optional={
        **{
            info.name: core_value(info)
            for info in setting_infos()
            if info.name not in COMPONENT_KINDS and info.name != "from_run"  # it names the folder of a run
        },
        **{key: component(key) for key in COMPONENT_KINDS},
    },
).map(in_its_mode)


@given(TREES, st.booleans())
def test_a_file_resolves_to_what_it_was_written_from(tree, commented):
    result = resolve(tree)
    assert resolve(tomllib.loads(to_toml(result, commented))) == result


def test_a_schedule_is_read_back():
    schedule = [
        {"step": 9, "loss": "cispo", "shaping": []},
        {"step": 5, "kl": {"coef": 0.0}, "shaping": {"long": {"name": "overlong", "buffer": 3}}},
    ]
    text = to_toml(resolve({"kl": "rk3_loss", "schedule": schedule}))
    assert text.endswith(
        '[[schedule]]\nstep = 9\nloss = "cispo"\nshaping = []\n\n'
        '[[schedule]]\nstep = 5\n[schedule.kl]\ncoef = 0.0\n[schedule.shaping.long]\nname = "overlong"\nbuffer = 3\n'
    )
    assert tomllib.loads(text)["schedule"] == schedule


@given(VALUE)
def test_a_value_is_read_back(value):
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


def test_the_file_is_whole():
    tree = tomllib.loads(to_toml(resolve({})))
    assert {info.name for info in setting_infos()} <= set(tree)


def test_the_commented_file_explains_every_setting():
    text = to_toml(resolve({}), commented=True)
    for info in setting_infos():
        if info.name not in MULTIPLE:
            assert info.doc in text
            assert f"Default: {info.default_text}." in text


def test_components_settings_are_explained_where_their_signature_is_known():
    known = (Setting("digits", int, 2, "Digits of\n each number."), Setting("path", str, REQUIRED, ""))
    result = resolve({"env": {"name": "e", "digits": 2}, "reward": ["s=a/b:0.5"]})
    signatures = {("env",): known, ("reward", "s"): (Setting("n", Any, None, "How many."),)}
    text = to_toml(result, commented=True, signatures=signatures)
    assert '[env]\nname = "e"\n# Digits of each number. (a whole number; default 2)\ndigits = 2\n' in text
    assert "# (text; no default)\n# path =\n" in text
    assert '[reward.s]\nname = "a/b"\nweight = 0.5\n# How many. (anything; default none)\n# n =\n' in text
    assert resolve(tomllib.loads(text)) == result


def test_what_no_file_can_hold_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"--env\.hook: TOML cannot hold"):
        to_toml(resolve({"env": {"name": "e", "hook": object()}}))
