"""Settings are the keyword-only parameters; a component receives what it names."""

from __future__ import annotations

import functools
import gc
import importlib.util
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steps import count_steps

from rollouts.config import hints
from rollouts.config.settings import REQUIRED, Setting
from rollouts.errors import ConfigError, SignatureError
from rollouts.plugins import protocols, signature
from rollouts.plugins.checks import checked_by, run_check
from rollouts.plugins.index import KIND_WORDS, KINDS
from rollouts.plugins.signature import bind, call_with, check_signature, read_signature
from rollouts.plugins.vocabulary import VOCABULARY


@pytest.fixture(scope="module")
def late():
    """tests/plugins/late_hints.py as a module."""
    spec = importlib.util.spec_from_file_location("late_hints_under_test", Path(__file__).with_name("late_hints.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def settings_of(component, kind):
    return {setting.name: setting for setting in read_signature(component, kind).settings}


def test_loss_whose_tensor_exists_only_for_type_checkers(late):
    read = check_signature(late.ppo_clip, "losses", "loss acme/ppo")
    assert read.requests == ("logprobs", "old_logprobs", "advantages")
    assert read.settings == (
        Setting("clip_low", float, 0.2, "how far the ratio may fall below one."),
        Setting("clip_high", float | None, None, "how far it may rise: None means clip_low."),
        Setting("mode", Literal["sum", "mean"], "mean", ""),
        Setting("thing", Any, None, ""),
        Setting("names", list[str], [], ""),
        Setting("bare", int, 3, ""),
    )


def test_environment_dataclass(late):
    settings = settings_of(late.Calculator, "environments")
    assert list(settings) == ["mode", "digits", "operators", "seen", "start", "rng", "needed"]
    assert settings["mode"] == Setting("mode", Literal["sum", "mean"], "sum", "how tasks combine")
    assert settings["digits"] == Setting("digits", int, 2, "--env.digits")
    assert settings["operators"] == Setting("operators", tuple[str, ...], ("+",), "which of + - * /")
    assert settings["seen"] == Setting("seen", list[int], [], "")
    assert settings["start"][:3] == ("start", int, 5)
    assert settings["rng"].type == random.Random | None
    assert settings["needed"] == Setting("needed", Any, REQUIRED, "")
    assert read_signature(late.Calculator, "environments").requests == ()
    check_signature(late.Calculator, "environments", "environment x")


def test_inherited_fields_resolve_in_their_own_module(late):
    @dataclass
    class Child(late.Base):
        extra: float = 0.5

    assert settings_of(Child, "environments")["mode"].type == Literal["sum", "mean"]
    assert settings_of(Child, "environments")["mode"].doc == "how tasks combine"
    assert settings_of(Child, "environments")["extra"].type is float


def test_environment_that_is_a_plain_class_or_a_function(late):
    settings = settings_of(late.Plain, "environments")
    assert settings["digits"][:3] == ("digits", int, 2)
    assert settings["name"][:3] == ("name", str, REQUIRED)
    assert settings["limit"][:3] == ("limit", Any, None)

    def make(digits: int = 2): ...

    assert settings_of(make, "environments")["digits"].default == 2

    class Empty: ...

    assert check_signature(Empty, "environments", "x") == ((), ())


def test_class_of_a_backend_is_read_by_its_constructor():
    class Backend:
        """A backend.

        Args:
            rows_max: rows of a batch
        """

        def __init__(self, model: str, training, seed: int, *, rows_max: int = 256):
            self.given = (model, training, seed, rows_max)

    read = check_signature(Backend, "inference", "inference x")
    assert read == (("model", "training", "seed"), (Setting("rows_max", int, 256, "rows of a batch"),))
    made = call_with(Backend, {"seed": 1, "model": "m", "training": None, "other": 0}, {"rows_max": 2})
    assert made.given == ("m", None, 1, 2)

    @dataclass
    class Logger:
        folder: str
        period: int = 1

    with pytest.raises(SignatureError, match="'period' is positional and has a default"):
        check_signature(Logger, "loggers", "logger x")


@dataclass(frozen=True)
class Retries:
    """How a judge is asked again.

    Args:
        count: how often at most
    """

    count: int = 3
    wait_seconds: float = 1.0  # between two requests
    names: tuple[str, ...] = ()
    made: str = field(init=False, default="here")

    def __post_init__(self):
        if self.count < 1:
            raise ValueError("count")


def judged(trajectory, *, strict: bool = True, retries: Retries = Retries(count=5), depth: int = 1):
    """Ask a judge.

    Args:
        wait_seconds: how long it waits
    """
    return trajectory, strict, retries, depth


def test_the_fields_of_a_dataclass_are_settings():
    assert check_signature(judged, "rewards", "reward x") == (
        ("trajectory",),
        (
            Setting("strict", bool, True, ""),
            Setting("count", int, 5, "how often at most"),
            Setting("wait_seconds", float, 1.0, "how long it waits"),
            Setting("names", tuple[str, ...], (), ""),
            Setting("depth", int, 1, ""),
        ),
    )
    assert call_with(judged, {"trajectory": 1}) == (1, True, Retries(count=5), 1)
    assert call_with(judged, {"trajectory": 1}, {"depth": 2}) == (1, True, Retries(count=5), 2)
    settings = {"wait_seconds": 0.5, "depth": 3}
    assert call_with(judged, {"trajectory": 1}, settings) == (1, True, Retries(5, 0.5), 3)
    assert settings == {"wait_seconds": 0.5, "depth": 3}
    with pytest.raises(ConfigError, match="judged does not take count 0: ValueError: count"):
        call_with(judged, {"trajectory": 1}, {"count": 0})


def test_bound_fields_of_a_dataclass_are_the_new_defaults():
    bound = bind(judged, {"count": 7, "strict": False})
    assert settings_of(bound, "rewards")["count"].default == 7
    assert bound(1) == (1, False, Retries(count=7), 1)
    again = bind(bound, {"wait_seconds": 2.0})
    assert again(1) == (1, False, Retries(7, 2.0), 1)
    assert call_with(again, {"trajectory": 1}, {"count": 8}) == (1, False, Retries(8, 2.0), 1)
    assert bind(judged, {}) is judged


def test_a_class_and_a_check_receive_the_dataclass():
    seen = []

    @checked_by(seen.append)
    class Backend:
        def __init__(self, model, *, retries: Retries = Retries()):
            self.retries = retries

    assert list(settings_of(Backend, "inference")) == ["count", "wait_seconds", "names"]
    assert call_with(Backend, {"model": "m"}, {"count": 2}).retries == Retries(2)
    run_check(Backend, {"model": "m"}, {"count": 2})
    assert seen == [{"model": "m", "retries": Retries(2)}]
    with pytest.raises(ConfigError, match="count"):
        run_check(Backend, {"model": "m"}, {"count": 0})


def test_fields_of_a_dataclass_do_not_share_a_name():
    def twice(task, *, count: int = 1, retries: Retries = Retries()): ...

    def two(task, *, first: Retries = Retries(), second: Retries = Retries()): ...

    @dataclass
    class Asked:
        task: str = ""

    asked = Asked()

    def requested(task, *, options: Asked = asked): ...

    for component, words in ((twice, "'count'"), (two, "'count', 'wait_seconds', 'names'"), (requested, "'task'")):
        with pytest.raises(SignatureError, match=f"is a setting, and {words} is already an input or a setting"):
            check_signature(component, "rewards", "reward x")


def test_a_dataclass_of_an_environment_or_without_an_instance_is_one_setting():
    @dataclass(kw_only=True)
    class Env:
        retries: Retries = Retries()

    assert settings_of(Env, "environments")["retries"].type is Retries

    def needed(task, *, retries: Retries, other: Retries | None = None): ...

    assert list(settings_of(needed, "rewards")) == ["retries", "other"]


def test_partials_bound_methods_callable_objects_and_wraps():
    def brevity(task, trajectory, *, target: int = 200): ...

    class Judge:
        def __call__(self, trajectory, *, strict: bool = False): ...

        def method(self, env, *, depth: int = 1): ...

    @functools.wraps(brevity)
    def wrapped(*args, **kwargs): ...

    partial = read_signature(functools.partial(brevity, target=50), "rewards")
    assert partial == (("task", "trajectory"), (Setting("target", int, 50, ""),))
    assert read_signature(functools.partial(brevity, None), "rewards").requests == ("trajectory",)
    assert read_signature(Judge(), "rewards") == (("trajectory",), (Setting("strict", bool, False, ""),))
    assert read_signature(Judge().method, "rewards") == (("env",), (Setting("depth", int, 1, ""),))
    assert read_signature(wrapped, "rewards") == read_signature(brevity, "rewards")
    check_signature(wrapped, "rewards", "reward x")


def test_composition_is_the_union_of_its_terms(late):
    def entropy_bonus(entropy, logprobs, *, floor: float = 0.0, clip_low: float = 9.0): ...

    class Term(NamedTuple):
        function: Any
        coefficient: float = 1.0

    class Algorithm(NamedTuple):
        advantage: Any
        aggregation: str
        terms: tuple

    recipe = Algorithm(len, "token_mean", (Term(late.ppo_clip), Term(entropy_bonus, -0.01)))
    read = check_signature(recipe, "losses", "loss grpo")
    assert read.requests == ("logprobs", "old_logprobs", "advantages", "entropy")
    assert [setting.name for setting in read.settings][-1] == "floor"
    assert settings_of(recipe, "losses")["clip_low"].default == 0.2
    with pytest.raises(SignatureError, match=r"loss grpo, term .*<lambda>: it names 'logprob'"):
        check_signature(Algorithm(len, "m", (Term(lambda logprob: 0),)), "losses", "loss grpo")


def test_a_term_with_a_name_has_a_coefficient():
    class Term(NamedTuple):
        function: Any
        coefficient: float = 1.0
        name: str = ""

    class Algorithm(NamedTuple):
        terms: tuple

    def entropy_bonus(entropy, *, floor: float = 0.0): ...

    def own(logprobs, *, entropy_coef: float = 7.0): ...

    settings = settings_of(Algorithm((Term(entropy_bonus, 0.25, "entropy"),)), "losses")
    assert settings["entropy_coef"] == Setting("entropy_coef", float, 0.25, "the coefficient of the entropy term")
    both = Algorithm((Term(own), Term(entropy_bonus, 0.25, "entropy")))
    assert settings_of(both, "losses")["entropy_coef"].default == 7.0


CALLED_DIRECTLY = (
    *"advantages aggregations corrections curricula filters kl losses mixers".split(),
    *"pairings references selectors shapings".split(),
)


@pytest.mark.parametrize("kind", CALLED_DIRECTLY)
def test_what_is_never_awaited_may_not_be_async(kind):
    names = VOCABULARY[kind]

    async def part(): ...

    with pytest.raises(SignatureError, match=r"is async, but an? .* is called and never awaited"):
        check_signature(part, kind, "a part")
    assert names and kind in KINDS


def test_every_kind_that_is_called_has_a_protocol():
    """Named for the word of its kind; `kl` is a KLEstimator; groups, metrics and returned weights have their own."""
    words = {"".join(KIND_WORDS[kind].title().split()) for kind in ("environments", "rewards", *CALLED_DIRECTLY)}
    short = {
        "KlEstimator": "KLEstimator",
        "Off-PolicyCorrection": "Correction",
        "PairSelector": "Pairing",
        "ReferencePolicy": "Reference",
        "RewardMixer": "Mixer",
        "RewardShaping": "Shaping",
        "RolloutSelector": "Selector",
    }
    expected = {short.get(word, word) for word in words}
    own = {name for name, each in vars(protocols).items() if getattr(each, "__module__", "") == protocols.__name__}
    assert own == expected | {"GroupReward", "Metric", "Optimizer", "TaskSampler", "ToolParser", "Weights"}


class _Unreadable:
    __signature__ = "not a signature"

    def __call__(self): ...


async def _asynchronous(rewards): ...


async def _generator(rewards):
    yield 0


class _AsyncCall:
    async def __call__(self, rewards): ...


REFUSED = {
    "async filter": (_asynchronous, "filters", "_asynchronous is async, but a filter is called and never awaited"),
    "async advantage": (functools.partial(_asynchronous), "advantages", "is async, but an advantage is called"),
    "async loss": (_AsyncCall(), "losses", r"is async, but a loss is called(.|\n)*write `def`"),
    "async generator": (_generator, "filters", "_generator is async"),
    "async in a partial": (functools.partial(_AsyncCall()), "filters", "is async"),
    "unknown": (lambda trajectry: 0, "rewards", r"it names 'trajectry'(.|\n)*did you mean: trajectory, trajectories\?"),
    "lists all": (lambda answer: 0, "rewards", r"a reward may name:\n  task: (.|\n)*after a `\*`: `\*, answer=...`"),
    "args": (lambda *inputs: 0, "rewards", r"it takes \*inputs"),
    "kwargs": (lambda task, **rest: 0, "rewards", r"it takes \*\*rest"),
    "default": (lambda task, target=1: 0, "rewards", r"'target' is positional and has a default"),
    "keyword input": (lambda *, trajectory: 0, "rewards", r"'trajectory' is an input(.|\n)*before the `\*`"),
    "group mix": (lambda task, trajectories: 0, "rewards", r"names 'task' of one(.|\n)*'trajectories' of a whole"),
    "group env": (lambda tasks, env: 0, "rewards", r"names 'env' of one episode"),
    "both": (lambda trajectory, trajectories: 0, "rewards", "whole group"),
    "groups mix": (
        lambda tasks, groups: 0,
        "rewards",
        r"'tasks' of one group and 'groups' of several\nname groups alone",
    ),
    "batch missing": (lambda rewards, values: 0, "advantages", r"'values', but not 'batch'(.|\n)*name `batch` too"),
    "batch lengths": (lambda batch, lengths: 0, "advantages", r"'batch' and 'lengths', but only a group"),
    "no call": (3, "losses", "int cannot be called"),
    "class": (dict, "losses", "dict is a class, but a loss must be a function"),
    "builtin": (max, "losses", "no readable signature"),
    "broken": (_Unreadable(), "filters", "no readable signature"),
    "env args": (type("E", (), {"__init__": lambda self, **rest: None}), "environments", r"\*\*rest"),
    "env slash": (type("E", (), {"__init__": lambda self, digits, /: None}), "environments", "positional-only"),
    "metric": (lambda trajectories: 0, "metrics", "a metric has no such input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    component, kind, message = REFUSED[case]
    with pytest.raises(SignatureError, match=message) as caught:
        check_signature(component, kind, "thing acme/x")
    assert str(caught.value).startswith("thing acme/x: ")


async def _asynchronous_reward(trajectory): ...


@pytest.mark.parametrize(
    ("component", "kind"),
    [
        (lambda: 0, "rewards"),
        (lambda task, trajectory, env: 0, "rewards"),
        (lambda tasks, trajectories, *, weight=1: 0, "rewards"),
        (lambda rewards, lengths, turn_rewards: 0, "advantages"),
        (lambda batch, rewards, values, mask, rollout_index, group_index: 0, "advantages"),
        (lambda batch, ref_logprobs, teacher_logprobs, rollout_logprobs: 0, "advantages"),
        (lambda rewards, samples, trajectories, step: True, "filters"),
        (lambda logprobs, /, mask: 0, "losses"),
        (lambda anything, at_all=1: 0, "tools"),
        (_asynchronous_reward, "rewards"),
    ],
)
def test_accepted(component, kind):
    assert check_signature(component, kind, "x").settings is not None


@pytest.mark.parametrize("kind", ["filters", "losses", "training", "inference", "loggers", "metrics"])
def test_every_name_of_the_vocabulary_is_accepted_and_described(kind):
    for name, meaning in VOCABULARY[kind].items():
        namespace: dict[str, Any] = {}
        exec(f"def component({name}): ...", namespace)
        assert check_signature(namespace["component"], kind, "x").requests == (name,)
        assert meaning


def test_vocabulary_kinds():
    assert set(VOCABULARY) - {"metrics"} <= set(KINDS)


@given(st.permutations(["task", "trajectory", "env"]), st.integers(0, 3), st.integers())
def test_call_with_passes_by_name_whatever_the_order(order, count, setting):
    names = order[:count]
    namespace: dict[str, Any] = {}
    exec(f"def component({', '.join([*names, '*', 'extra=0'])}): return [{', '.join([*names, 'extra'])}]", namespace)
    available = {"task": "T", "trajectory": "J", "env": "E", "never": object()}
    assert call_with(namespace["component"], available, {"extra": setting}) == [*map(available.get, names), setting]
    assert call_with(namespace["component"], available) == [*map(available.get, names), 0]


def test_call_with_says_what_the_run_cannot_give():
    with pytest.raises(SignatureError, match=r"names 'teacher_logprobs', which(.|\n)*has: logprobs, mask"):
        call_with(lambda logprobs, teacher_logprobs: 0, {"mask": 1, "logprobs": 2})


def test_a_key_error_of_the_component_or_the_mapping_stays_its_own():
    class Lazy(dict):
        def __getitem__(self, key):
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        call_with(lambda task: 0, Lazy(task=1))
    with pytest.raises(KeyError, match="mine"):
        call_with(lambda task: {}["mine"], {"task": 1})


def test_requests_are_cached_by_identity_and_die_with_the_function(monkeypatch):
    read = []
    original = signature._parameters
    monkeypatch.setattr(signature, "_parameters", lambda *args: read.append(1) or original(*args))

    class Env:
        def reward(self, task): ...

        def __call__(self, trajectory):
            return trajectory

    def function(task):
        return task

    gc.collect()
    before = len(signature._CACHE)
    for _ in range(3):
        assert call_with(function, {"task": 1}) == 1
        call_with(Env().reward, {"task": 1})
        assert call_with(Env(), {"trajectory": 2}) == 2
        call_with(Env.reward, {"self": 0, "task": 1})
    assert len(read) == 4, "one reading for each: function, bound method, callable object, plain method"
    assert len(signature._CACHE) == before + 4
    del function, Env
    gc.collect()
    assert len(signature._CACHE) == before


def test_builtins_do_not_share_an_entry():
    assert call_with(math.sqrt, {"x": 9.0}) == 3.0
    assert call_with(math.isqrt, {"n": 9}) == 3
    with pytest.raises(SignatureError, match="names 'n'"):
        call_with(math.isqrt, {"x": 9})


def test_call_with_is_fast():
    def reward(task, trajectory, *, target=1):
        return 0.0

    available = {"task": 1, "trajectory": 2, "env": 3}
    first, later = (count_steps(lambda: call_with(reward, available)) for _ in range(2))
    assert later <= 30 and first > 10 * later, f"{first} steps, and {later} when the signature is known"


def test_required_shows_and_travels():
    import pickle

    assert repr(REQUIRED) == "REQUIRED"
    assert pickle.loads(pickle.dumps(REQUIRED)) is REQUIRED


def test_argument_docs():
    text = """Do.

    Args:
        a: first.
            more: with a colon
        *b (int): second

        c : third

    Returns:
        d: not an argument
    """
    assert hints.argument_docs(text) == {"a": "first. more: with a colon", "b": "second", "c": "third"}
    assert hints.argument_docs(None) == hints.argument_docs("Args are: none") == {}


def test_implicit_none_and_hints_that_fail():
    def loss(logprobs, *, limit: int = None, odd: "list[" = 2, text: "str" = "x"): ...  # noqa: F722, RUF013, UP037

    types = {setting.name: setting.type for setting in read_signature(loss, "losses").settings}
    assert types == {"limit": int | None, "odd": int, "text": str}
