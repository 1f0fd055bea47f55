from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
from steps import count_steps

from rollouts.env import metric, reward, tool
from rollouts.env.authoring import metrics_of, rewards_of, tools_of
from rollouts.env.checks import check_environment, requests_of, reward_term
from rollouts.env.mixing import env_term
from rollouts.errors import EnvironmentDefinitionError, SignatureError


class Base:
    def tasks(self, split: str, rng: Any) -> list[Any]:
        return []

    @tool
    def look(self) -> str:
        return "looked"

    @tool(timeout_seconds=2, name="go_on")
    def go(self, steps: int) -> str:
        return "went"

    @tool
    @staticmethod
    def helper(x: int) -> int:
        return x

    @reward(weight=0.5)
    def good(self, task: Any, trajectory: Any) -> float:
        return 1.0

    @metric
    def steps(self, trajectory: Any) -> float:
        return 2.0


class Derived(Base):
    @tool
    def jump(self) -> str:
        return "jumped"

    def look(self) -> str:  # no longer a tool
        return "no"

    @reward
    def also(self) -> float:
        return 0.0


def test_marks_are_collected_in_definition_order_and_inherited() -> None:
    assert [t.name for t in tools_of(Base())] == ["look", "go_on", "helper"]
    assert [t.name for t in tools_of(Derived)] == ["go_on", "helper", "jump"]
    assert {t.name: t.timeout_seconds for t in tools_of(Base())} == {"look": 30.0, "go_on": 2.0, "helper": 30.0}
    assert [(r.name, r.weight) for r in rewards_of(Derived())] == [("good", 0.5), ("also", 1.0)]
    assert [m.name for m in metrics_of(Derived())] == ["steps"]


def test_marked_methods_stay_ordinary_ones() -> None:
    env = Base()
    assert env.look() == "looked" and env.go(1) == "went" and env.good(None, None) == 1.0
    assert tools_of(env)[1].function(steps=3) == "went"


def test_two_tools_of_one_name_and_a_deadline_of_nothing() -> None:
    class Twice(Base):
        @tool(name="look")
        def other(self) -> str:
            return ""

    with pytest.raises(EnvironmentDefinitionError, match="two tools named 'look'"):
        tools_of(Twice)
    with pytest.raises(EnvironmentDefinitionError, match="positive number of seconds"):
        tool(timeout_seconds=0)


def test_properties_are_not_run_by_collecting() -> None:
    class Lazy(Base):
        @property
        def loud(self) -> str:
            raise AssertionError("must not be read")

    assert len(tools_of(Lazy())) == 3


@pytest.mark.parametrize("make", [lambda c: c, lambda c: c()])
def test_a_good_environment_passes(make: Any) -> None:
    check_environment(make(Base), [env_term()])
    check_environment(make(Derived))


def wrong(**members: Any) -> type:
    return type("Wrong", (Base,), members)


def untyped(self, x):
    """A tool without hints."""


def two(self) -> None: ...


async def own(self, task: Any, model: Any) -> None: ...


def asks(self, trajectry: Any) -> float: ...


def asks_too(self, trajectry: Any) -> float: ...


def star(self, *inputs: Any) -> float: ...


def asks_group(self, trajectories: Any) -> float: ...


def demands(self, *, k: int) -> float: ...


def no_self() -> float: ...


@pytest.mark.parametrize("make", [lambda c: c, lambda c: c()])
@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (type("Empty", (), {}), "no method `tasks`"),
        (type("Typo", (), {"task": two}), r"it has 'task'"),
        (wrong(tasks=3), "Wrong.tasks is int, not a method"),
        (wrong(tasks=two), r"write `def tasks\(self, split, rng\)`"),
        (wrong(setup=two), r"write `def setup\(self, task\)`"),
        (wrong(reply=two), r"write `def reply\(self, trajectory\)`"),
        (wrong(rollout=lambda self, task, model: None), "must be `async def rollout"),
        (wrong(rollout=own, async_library="asyncio"), "but rollout runs under trio: use trio.sleep, "),
        (wrong(bad=tool(untyped)), "'bad', parameter 'x' has no type hint"),
        (wrong(bad=reward(asks)), "@reward Wrong.bad asks for 'trajectry'; .* did you mean 'trajectory'?"),
        (wrong(bad=reward(asks_group)), "'trajectories'; a method of an environment may name task, trajectory, env"),
        (wrong(bad=reward(demands)), "'k' is keyword-only and has no default"),
        (wrong(bad=metric(asks_too)), "@metric Wrong.bad asks for 'trajectry'"),
        (wrong(bad=reward(star)), r"@reward Wrong.bad: it takes \*inputs"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(cls: type, words: str, make: Any) -> None:
    with pytest.raises(EnvironmentDefinitionError, match=words):
        check_environment(make(cls))


def test_a_method_without_self() -> None:
    with pytest.raises(EnvironmentDefinitionError, match="has no `self`, so it takes no environment; write `def bad"):
        check_environment(wrong(bad=reward(no_self)))


def test_somebody_must_judge() -> None:
    class Silent:
        def tasks(self, split: str, rng: Any) -> list[Any]:
            return []

    check_environment(Silent, [env_term(), reward_term("short", lambda trajectory: 1.0)])
    with pytest.raises(EnvironmentDefinitionError, match="Silent has no @reward method") as caught:
        check_environment(Silent, [env_term()])
    assert "type --reward pkg/name or --reward ./file.py:function" in str(caught.value)
    check_environment(wrong(rollout=own, async_library="trio"))
    with pytest.raises(EnvironmentDefinitionError, match="no reward was named"):
        check_environment(Base, [])


def test_a_misspelt_async_library() -> None:
    with pytest.raises(EnvironmentDefinitionError, match="'asynco'; it may be 'trio' or 'asyncio'"):
        check_environment(wrong(async_library="asynco")())


def test_requests_and_terms() -> None:
    assert requests_of(Base().good) == ("task", "trajectory")
    assert requests_of(Derived().also) == ()
    term = reward_term("g", lambda tasks, trajectories: [], 2.0)
    assert term.is_group and term.requests == ("tasks", "trajectories") and term.weight == 2.0
    assert not reward_term("r", lambda env, task, *, k=1: 0.0, settings={"k": 2}).is_group
    with pytest.raises(SignatureError, match="reward r: it names 'answer'"):
        reward_term("r", lambda answer: 0.0)


def test_importing_the_marks_imports_nothing_heavy() -> None:
    code = (
        "import sys, rollouts.env; from rollouts.env import tool, reward, metric; "
        "print(sorted({'torch', 'trio', 'httpx', 'msgspec', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_class_that_changes_is_looked_at_again() -> None:
    class Changing(Base):
        pass

    def listen(self: Any) -> str:
        return "heard"

    assert [each.name for each in tools_of(Changing())] == ["look", "go_on", "helper"]
    Changing.look = listen  # type: ignore[assignment, method-assign]
    assert [each.name for each in tools_of(Changing())] == ["go_on", "helper"]
    Changing.look = tool(listen)  # type: ignore[assignment, method-assign]
    found = tools_of(Changing())
    assert [each.name for each in found] == ["look", "go_on", "helper"] and found[0].function() == "heard"
    del Changing.look
    assert tools_of(Changing())[0].function() == "looked"


def test_an_object_is_not_scanned_where_its_class_is_known() -> None:
    def steps(constants: int) -> list[int]:
        many = type("Many", (Base,), {f"constant_{number}": number for number in range(constants)})
        env = many()
        return [count_steps(lambda: (tools_of(env), rewards_of(env), metrics_of(env))) for _ in range(2)]

    (unknown, known), (unknown_large, known_large) = steps(40), steps(400)
    # It is listed three times, for its tools, rewards and metrics: three steps for each of 360 more.
    assert known_large - known <= 6 * 360, "measured 3 a constant"
    assert unknown_large - unknown > 20 * 360, "measured 26 a constant"


def test_a_class_without_a_hash_has_its_tools() -> None:
    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            return cls is other

    class Unhashable(Base, metaclass=Meta):
        pass

    for _ in range(2):
        assert [each.name for each in tools_of(Unhashable())] == [each.name for each in tools_of(Base())]


def test_classes_that_are_made_for_an_episode_do_not_stay() -> None:
    @tool
    def mine(self: Any) -> str:
        return "mine"

    def make() -> Any:
        made = type("Made", (), {"mine": mine})
        assert [each.name for each in tools_of(made())] == ["mine"]
        return weakref.ref(made)

    made = [make() for _ in range(200)]
    gc.collect()
    assert sum(each() is not None for each in made) <= 64
