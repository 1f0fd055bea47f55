"""Roles that another model plays: a frozen model, a checkpoint, or an API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rollouts
from rollouts.errors import ConfigError

GAME = '''
from rollouts import Role, Task, reward


class Duel:
    """Both roles say a digit, and the larger one wins."""

    roles = (Role("first"), Role("my-second"))

    def tasks(self, split, rng):
        while True:
            yield Task(f"duel {rng.random()}")

    def setup(self, task):
        self.said = {}

    async def rollout(self, task, model):
        for name in ("first", "my-second"):
            reply = await model.role(name).say("What is 1 + 1?")
            self.said[name] = max((int(c) for c in reply.text if c.isdigit()), default=-1)

    @reward(role="first")
    def won(self):
        return float(self.said.get("first", -1) > self.said.get("my-second", -1))

    @reward(role="my-second")
    def lost(self):
        return 1.0 - self.won()
'''

SHORT = {"env": "./game.py:Duel", "steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 12}


@pytest.fixture(autouse=True)
def game(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("game.py").write_text(GAME)


def lines(run, file):
    return [json.loads(line) for line in Path(run, "trajectories", file).read_text().splitlines()]


def test_a_frozen_role_keeps_its_weights_and_is_not_trained():
    summary = rollouts.run(**SHORT, role={"my_second": {"model": "tiny"}}, eval_tasks=4, out="run", seed=3)
    assert set(summary["evaluation"]["after"]["roles"]) == {"first"}
    of_step = lines("run", "step_000001.jsonl")
    first, second = ([line for line in of_step if line["role"] == role] for role in ("first", "my-second"))
    assert len(first) == len(second) == 16
    assert {line["reward"] for line in second} == {None} and second[0]["why"] == "another model played this role"
    assert all(line["advantage"] is None for line in second)
    versions = [
        {version for line in each for s in line["segments"] for version in s["versions"]} for each in (first, second)
    ]
    assert versions == [{-1, 1}, {-1, 0}], "the policy has had one update, and the frozen model none"
    assert '[role.my_second]\nmodel = "tiny"' in Path("run/config.toml").read_text()

    # A checkpoint of this run as the opponent, in an evaluation: it is resolved to the newest one.
    summary = rollouts.run(
        mode="eval",
        env="./game.py:Duel",
        model="tiny",
        role={"my-second": {"model": "run"}},
        eval_tasks=4,
        max_tokens=12,
        out="eval",
    )
    assert set(summary["roles"]) == {"first"}


MISTAKES = [
    ({"first_one": {"model": "tiny"}}, r"--role.first_one: the roles are first, my-second"),
    ({"first": {"model": "tiny"}, "my_second": {"model": "tiny"}}, r"other models play every role"),
    ({"first": {"inference": "hf"}}, r"which model\? type: --role.first.model MODEL"),
    ({"first": {"inference": "openai"}}, r"--role.first: .*--model gpt"),
    ({"first": {"model": "tiny", "cache_gb": 2}}, r"cache_gb'\ndid you mean: cache_gib"),
    (
        {"first": {"inference": "openai", "model": "m", "url": "http://127.0.0.1:9/v1", "attempts": 1}},
        r"--role.first: .*127.0.0.1:9",
    ),
    ({"first": "tiny"}, r"type: --role.first.model tiny"),
]


@pytest.mark.parametrize(("role", "words"), MISTAKES)
def test_a_mistake_is_found_before_the_run(role, words):
    with pytest.raises(ConfigError, match=words):
        rollouts.run(**SHORT, role=role, out="run")
    assert not Path("run").exists()


def test_an_environment_without_roles_has_none_to_give_away():
    with pytest.raises(ConfigError, match="the environment has no roles"):
        rollouts.run(env="calculator", role={"first": {"model": "tiny"}}, out="run")
