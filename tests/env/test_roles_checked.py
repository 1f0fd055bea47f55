"""Mistakes in the roles of an environment are refused before a model loads, with what to write instead."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rollouts import Role, metric, reward, tool
from rollouts.env.authoring import metrics_of, of_role, rewards_of, roles_of, tools_of
from rollouts.env.checks import check_environment
from rollouts.errors import EnvironmentDefinitionError
from rollouts.types import Message, Task

SELLER, BUYER = Role("seller", system="You sell a lamp."), Role("buyer")


class Market:
    roles: Any = (SELLER, BUYER)

    def tasks(self, split: str, rng: Any) -> list[Task]:
        return [Task("a lamp")]

    async def rollout(self, task: Task, model: Any) -> None:
        """The seller speaks."""

    @tool(role="seller")
    def stock(self) -> int:
        """How many lamps there are."""
        return 2

    @tool
    def clock(self) -> str:
        """The time."""
        return "noon"

    @reward(role="buyer", weight=0.5)
    def cheap(self, trajectory: Any) -> float:
        return 1.0

    @reward
    def polite(self, trajectory: Any) -> float:
        return 1.0

    @metric(role="seller")
    def patience(self) -> float:
        return 1.0


def test_marks_say_whose_tools_rewards_and_metrics_they_are() -> None:
    check_environment(Market())
    check_environment(Market)
    assert [role.name for role in roles_of(Market)] == ["seller", "buyer"]
    assert [each.name for each in of_role(tools_of(Market), "buyer")] == ["clock"]
    assert [each.name for each in of_role(tools_of(Market), "seller")] == ["stock", "clock"]
    assert [(each.name, each.weight) for each in of_role(rewards_of(Market), "buyer")] == [
        ("cheap", 0.5),
        ("polite", 1.0),
    ]
    assert [each.name for each in of_role(rewards_of(Market), "seller")] == ["polite"]
    assert of_role(metrics_of(Market), "buyer") == []


def test_roles_may_be_a_property_that_uses_the_settings() -> None:
    class Table(Market):
        def __init__(self, guests: int = 2) -> None:
            self.guests = guests

        @property
        def roles(self) -> tuple[Role, ...]:  # type: ignore[override]
            return (SELLER, BUYER, *(Role(f"guest{n}") for n in range(self.guests)))

    check_environment(Table)
    check_environment(Table(3))
    assert roles_of(Table) == () and len(roles_of(Table(3))) == 5


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ((SELLER, SELLER, BUYER), "two roles named 'seller'"),
        ((SELLER, BUYER, Role("judge", model="big")), "remove `model` here, and type: --role.judge.model MODEL"),
        (("seller", "buyer"), "not a tuple of Role; write `roles = (Role("),
        ((SELLER, BUYER, Role("the judge")), "a name has letters, digits"),
        ((SELLER, BUYER, Role("judge", system=Message("system", "?"))), "write text"),  # type: ignore[arg-type]
        (
            (Role("seler"), BUYER),
            "is marked @tool(role='seller'); the roles of Wrong are seler, buyer; did you mean 'seler'?",
        ),
        ((), "stock is marked @tool(role='seller'); Wrong has no `roles`"),
    ],
)
def test_roles_that_cannot_work_are_refused(roles: Any, said: str) -> None:
    wrong = type("Wrong", (Market,), {"roles": roles})
    with pytest.raises(EnvironmentDefinitionError, match=re.escape(said)):
        check_environment(wrong())


def test_a_misspelt_role_shows_the_near_miss_and_the_line() -> None:
    class Wrong(Market):
        @reward(role="byuer")
        def glad(self) -> float:
            return 1.0

    with pytest.raises(EnvironmentDefinitionError, match="did you mean 'buyer'") as refused:
        check_environment(Wrong())
    assert "test_roles_checked.py, line " in str(refused.value)


def test_roles_need_a_rollout() -> None:
    class Silent:
        roles = (SELLER, BUYER)

        def tasks(self, split: str, rng: Any) -> list[Task]:
            return []

    with pytest.raises(EnvironmentDefinitionError, match="has roles, but no `rollout`"):
        check_environment(Silent())
