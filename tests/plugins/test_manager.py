"""Hook plugins: late, one by one, each failure named, nothing else stopped."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
from rollouts_check.descriptions import description

from rollouts.errors import AmbiguousComponentError, BrokenPluginError, UnknownComponentError
from rollouts.plugins import hookspecs
from rollouts.plugins.hookspecs import hookimpl
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.manager import PluginManager

PACK = """
from rollouts.plugins import hookimpl

asked = []

@hookimpl
def rollouts_list_components(kind):
    return ["rgym/countdown", "rgym/chess"] if kind == "environments" else None

@hookimpl
def rollouts_find_component(kind, name):
    asked.append((kind, name))
    if kind == "environments" and name in rollouts_list_components(kind):
        return lambda: name
"""


@pytest.fixture
def pack(make_distribution):
    make_distribution("rollouts-rgym", {"rollouts": {"rgym": "rgym_hooks"}}, {"rgym_hooks": PACK}, version="0.5")


def plugin(**functions):
    return SimpleNamespace(**{name: hookimpl(function) for name, function in functions.items()})


def test_metadata_first_hooks_load_only_on_a_failed_look_up(make_distribution, pack):
    make_distribution("acme", {"rollouts.environments": {"calc9": "acme9:X"}}, {"acme9": "class X: ..."})
    manager = PluginManager()
    assert manager.find("environments", "calc9").qualified == "acme/calc9"
    assert "calc9" in [ref.name for ref in manager.list("environments")]
    assert "rgym_hooks" not in sys.modules and "acme9" not in sys.modules
    ref = manager.find("environments", "rgym/countdown")
    assert ref == ComponentRef("environments", "rgym/countdown", "", "rollouts-rgym", "0.5")
    assert manager.load(ref)() == "rgym/countdown"
    assert sys.modules["rgym_hooks"].asked == [("environments", "rgym/countdown")]
    assert "acme9" not in sys.modules
    assert manager.load(manager.find("environments", "calc9")).__name__ == "X"


def test_distribution_before_packs(make_distribution, pack):
    make_distribution("rgym", {"rollouts.environments": {"chess": "real:Chess"}}, {"real": "class Chess: ..."})
    manager = PluginManager()
    assert manager.find("environments", "rgym/chess").value == "real:Chess"
    assert manager.find("environments", "rgym/countdown").distribution == "rollouts-rgym"


def test_a_packs_qualified_name(pack):
    manager = PluginManager()
    listed = [ref for ref in manager.list("environments", hooks=True) if ref.distribution == "rollouts-rgym"]
    assert [ref.name for ref in listed] == ["rgym/chess", "rgym/countdown"]
    assert manager.load(listed[0])() == "rgym/chess"
    assert manager.find("environments", "Rollouts_RGym/rgym/chess") == listed[0]
    assert not [ref for ref in manager.list("environments") if ref.distribution == "rollouts-rgym"]


def test_a_failed_look_up_names_packs_and_those_that_could_not_answer(make_distribution, pack):
    make_distribution("dead-pack", {"rollouts": {"dead": "dead_hooks"}}, {"dead_hooks": "import zz_gone"}, version="9")
    manager = PluginManager()
    with pytest.raises(UnknownComponentError) as caught:
        manager.find("environments", "rgym/countdwn")
    assert "rgym/countdown" in str(caught.value)
    failed = "this hook plugin failed: dead-pack 9: dead_hooks: ModuleNotFoundError: No module named 'zz_gone'"
    assert failed in str(caught.value)
    assert "; install the package that has the module zz_gone" in str(caught.value), "two sentences"
    assert "dead-pack" in [fault.distribution for fault in manager.faults]
    with pytest.raises(UnknownComponentError):
        manager.find("rewards", "rgym/countdown")
    assert len(set(manager.faults)) == len(manager.faults), "a fault once"


def test_files_do_not_reach_the_packs(pack):
    with pytest.raises(UnknownComponentError, match="there is no file"):
        PluginManager().find("environments", "./nothing_here.py:X")
    assert "rgym_hooks" not in sys.modules


def test_ambiguity_is_no_reason_to_ask_packs(make_distribution, pack):
    for name in ("acme", "other"):
        make_distribution(name, {"rollouts.environments": {"twice": "m:X"}})
    with pytest.raises(AmbiguousComponentError):
        PluginManager().find("environments", "twice")
    assert "rgym_hooks" not in sys.modules


def test_a_pack_that_raises_is_named_and_the_next_is_asked():
    def bad(kind, name):
        raise LookupError("no network")

    manager = PluginManager()
    manager.register(plugin(rollouts_find_component=lambda kind, name: len), distribution="good", version="1")
    manager.register(plugin(rollouts_find_component=bad), distribution="bad", version="2")
    ref = manager.find("rewards", "x/y")
    assert ref.distribution == "good" and manager.load(ref) is len
    (fault,) = manager.faults
    assert fault[:2] == ("bad", "2")
    assert re.search(
        r"rollouts_find_component: LookupError: no network \(.*, line \d+: raise LookupError\(", fault.cause
    )


def test_a_pack_may_answer_with_a_reference(make_distribution):
    make_distribution("acme", {"rollouts.rewards": {"b9": "acme_b9:b"}}, {"acme_b9": "def b(): ..."})
    manager = PluginManager()
    ref = manager.find("rewards", "b9")
    manager.register(plugin(rollouts_find_component=lambda kind, name: ref), distribution="alias")
    assert manager.find("rewards", "anything") == ref
    assert manager.load(ref).__name__ == "b"


@pytest.mark.parametrize(
    ("names", "cause"),
    [
        ("abc", "the text 'abc'"),
        ([1], "returned 1 among"),
        ((1 // 0 for _ in "x"), "ZeroDivisionError"),
        (7, "TypeError"),
        ({"a/b": None}, "returned None among"),
    ],
)
def test_wrong_lists_are_named(names, cause):
    manager = PluginManager()
    manager.register(plugin(rollouts_list_components=lambda kind: names), distribution="odd")
    manager.list("rewards", hooks=True)
    assert any(fault.distribution == "odd" and cause in fault.cause for fault in manager.faults)


def test_a_list_may_have_descriptions():
    manager = PluginManager(installed=False)
    names = {"a/one": "The first one. It is easy.", "a/two": ""}
    manager.register(
        plugin(rollouts_list_components=lambda kind: names if kind == "rewards" else None), distribution="a"
    )
    listed = {ref.name: description(ref) for ref in manager.list("rewards", hooks=True)}
    assert {name: listed[name] for name in names} == {"a/one": "The first one", "a/two": ""}


def test_events_are_called_one_at_a_time_with_what_they_name():
    seen = []

    def bad(metrics):
        raise RuntimeError("disk\nfull")

    manager = PluginManager()
    manager.register(plugin(rollouts_step_end=lambda step: seen.append(step)), distribution="a")
    manager.register(plugin(rollouts_step_end=bad), distribution="b", version="3")
    manager.register(plugin(rollouts_step_end=lambda metrics, step: seen.append(metrics)), distribution="c")
    faults = manager.call_event("rollouts_step_end", metrics={"loss": 1.0}, step=4)
    (fault,) = faults
    assert fault[:2] == ("b", "3")
    assert seen == [{"loss": 1.0}, 4]
    assert re.match(r"b 3: rollouts_step_end: RuntimeError: disk full \(.*, line \d+: raise RuntimeError", str(fault))
    assert manager.faults == [], "a fault of an event is the caller's to report"


def test_a_hook_that_returns_a_coroutine_is_named():
    async def later():
        return None

    manager = PluginManager()
    manager.register(plugin(rollouts_run_end=lambda summary: later()), distribution="a")
    (fault,) = manager.call_event("rollouts_run_end", summary={})
    assert "coroutine" in fault.cause
    manager.register(plugin(rollouts_list_components=lambda kind: later()), distribution="b")
    manager.list("rewards", hooks=True)
    assert manager.faults[-1].cause == "rollouts_list_components returned a coroutine; hooks are plain functions"


def test_our_own_wrong_calls_are_assertions():
    with pytest.raises(AssertionError, match="no event"):
        PluginManager().call_event("rollouts_find_component", kind="rewards", name="x")
    with pytest.raises(AssertionError, match=r"takes \['metrics', 'step'\]"):
        PluginManager().call_event("rollouts_step_end", step=1)


async def _async_hook(summary): ...


async def _async_generator_hook(summary):
    yield


def _generator_hook(summary):
    yield


@pytest.mark.parametrize(
    ("function", "cause"),
    [(_async_hook, "is async"), (_async_generator_hook, "is async"), (_generator_hook, "is a generator")],
)
def test_hooks_that_would_never_run_are_refused_alone(function, cause):
    seen = []
    manager = PluginManager()
    faults = manager.register(
        plugin(rollouts_run_end=function, rollouts_step_end=lambda step: seen.append(step)),
        distribution="a",
        version="1",
    )
    assert [fault.cause.startswith("rollouts_run_end " + cause) for fault in faults] == [True]
    assert manager.faults == faults
    assert manager.call_event("rollouts_run_end", summary={}) == []
    manager.call_event("rollouts_step_end", metrics={}, step=2)
    assert seen == [2]


def test_wrappers_classes_and_wrong_arguments_are_refused():
    manager = PluginManager()

    @hookimpl(wrapper=True)
    def rollouts_run_end(summary):
        return (yield)

    class Hooks:
        @hookimpl
        def rollouts_run_end(self, summary): ...

    causes = [
        manager.register(SimpleNamespace(rollouts_run_end=rollouts_run_end), distribution="a")[0].cause,
        manager.register(Hooks, distribution="b")[0].cause,
        manager.register(plugin(rollouts_step_end=lambda metricz: None), distribution="c")[0].cause,
    ]
    assert "is a hook wrapper" in causes[0] and "is a class" in causes[1]
    assert "metricz" in causes[2] and causes[2].endswith("the arguments of the hook: metrics, step")
    assert manager.register(Hooks(), distribution="b") == []
    assert manager.call_event("rollouts_step_end", metrics={}, step=0) == [], "the refused one is gone"


def test_registering_twice_does_nothing():
    seen = []
    hooks = plugin(rollouts_step_end=lambda step: seen.append(step))
    manager = PluginManager()
    manager.register(hooks, distribution="a")
    manager.register(hooks, distribution="a")
    manager.call_event("rollouts_step_end", metrics={}, step=0)
    assert seen == [0]


def test_one_plugin_that_fails_stops_nothing_but_itself(make_distribution):
    make_distribution("bad-hooks", {"rollouts": {"bad": "bad_hooks"}}, {"bad_hooks": "raise OSError('x')"}, version="2")
    good = "from rollouts import hookimpl\nseen = []\n@hookimpl\ndef rollouts_run_start(folder): seen.append(folder)\n"
    make_distribution("good-hooks", {"rollouts": {"good": "good_hooks"}}, {"good_hooks": good})
    manager = PluginManager()
    assert manager.call_event("rollouts_run_start", settings={}, folder="runs/x") == []
    assert sys.modules["good_hooks"].seen == ["runs/x"]
    (fault,) = manager.faults
    assert fault[:2] == ("bad-hooks", "2")
    assert re.fullmatch(r"bad_hooks: OSError: x \(.*bad_hooks.py, line 1: raise OSError\('x'\)\)", fault.cause)
    assert manager.load_hooks() == [], "loading happens once"


def test_events_reach_plugins_in_the_order_of_distributions(make_distribution):
    for name in ("zeta", "Alpha", "mid"):
        source = f"from rollouts import hookimpl\n@hookimpl\ndef rollouts_run_end(summary): summary.append({name!r})\n"
        make_distribution(name, {"rollouts": {"h": f"{name}_hooks"}}, {f"{name}_hooks": source})
    seen = []
    PluginManager().call_event("rollouts_run_end", summary=seen)
    assert seen == ["Alpha", "mid", "zeta"]


def test_doctor_reports_each_kind_of_fault(make_distribution):
    source = """
        from rollouts import hookimpl
        def rollouts_step_end(metrics): ...
        @hookimpl
        def rollouts_step_ends(metrics): ...
        @hookimpl
        async def rollouts_run_end(summary): ...
        def good(trajectory): return 1.0
        def greedy(trajectory, answer): return 1.0
        rollouts_version = "text is fine"
    """
    rewards = {"d_good": "sick:good", "d_greedy": "sick:greedy", "d_gone": "sick:gone"}
    make_distribution("sick", {"rollouts": {"s": "sick"}, "rollouts.rewards": rewards}, {"sick": source}, version="7")
    make_distribution("twin", {"rollouts.rewards": {"d_good": "sick:good"}})
    reports = [report for report in PluginManager().doctor().faults if "sick" in report]
    expected = [
        "sick 7: its reward 'd_gone' (sick:gone) does not import\nAttributeError",
        "sick 7: reward d_greedy: it names 'answer'",
        "sick 7: rollouts_run_end is async",
        "sick 7: rollouts_step_end has no @hookimpl",
        "sick 7: rollouts_step_ends is no hook of rollouts, so it is never called; did you mean: rollouts_step_end",
        "reward 'd_good' is offered by 2 distributions; type one of: sick/d_good, twin/d_good",
    ]
    for part in expected:
        assert len([report for report in reports if part in report]) == 1, (part, reports)
    assert len(reports) == len(expected)


def test_doctor_has_nothing_to_say_about_a_healthy_plugin(make_distribution, pack):
    groups = {"rollouts.rewards": {"fine9": "fine9:f"}}
    make_distribution("fine", groups, {"fine9": "def f(task, trajectory, env, *, x=1): ..."})
    assert not [report for report in PluginManager().doctor().faults if "fine" in report or "rgym" in report]


def test_a_pack_refuses_to_be_loaded_past_the_manager():
    with pytest.raises(UnknownComponentError):
        PluginManager().load(ComponentRef("rewards", "a/b", "", "gone-pack", "1"))
    with pytest.raises(BrokenPluginError):
        PluginManager().load(ComponentRef("rewards", "b", "zz_gone_module:b", "gone", "1"))


def test_every_hook_is_documented_and_specified():
    names = [name for name in vars(hookspecs) if name.startswith("rollouts_")]
    assert set(hookspecs.EVENTS) | {"rollouts_find_component", "rollouts_list_components"} == set(names)
    for name in names:
        assert getattr(hookspecs, name).__doc__
        assert hasattr(getattr(hookspecs, name), "rollouts_spec")
