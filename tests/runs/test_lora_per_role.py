"""`--lora-per-role`: one run from its first step to an evaluation and an export; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rollouts
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, ModelError
from rollouts.models.folders import role_adapters
from rollouts.models.loading import load_tokenizer, resolve_model_name
from rollouts.runs.export import export, model_of_role
from rollouts.runs.plan import make_plan
from rollouts.runs.serve import served_name

GAME = '''
from rollouts import Message, Role, Task, reward


class Opposites:
    """Both roles get the same question: one earns for long answers, the other for short ones."""

    roles = (Role("long"), Role("my-short"))

    def tasks(self, split, rng):
        while True:
            yield Task(f"game {rng.random()}")

    async def rollout(self, task, model):
        for name in ("long", "my-short", "long"):
            await model.role(name).say("What is 1 + 1?")

    @reward(role="long")
    def many(self, trajectory):
        return len(trajectory.last_text) / 50

    @reward(role="my-short")
    def few(self, trajectory):
        return -len(trajectory.last_text) / 50


    def demonstrations(self, split, rng):
        while True:
            yield [Message("user", f"{rng.random()}"), Message("assistant", "1")]


class Alone:
    """Without roles."""

    tasks = Opposites.tasks

    @reward
    def none(self):
        return 0.0
'''

ENV = "./game.py:Opposites"


@pytest.fixture(autouse=True)
def game(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("game.py").write_text(GAME)


def plan(**settings):
    return make_plan(resolve({"env": ENV, "lora_per_role": True, "lora_rank": 2, **settings}))


@pytest.mark.slow
def test_a_run_with_an_adapter_a_role():
    few = {"env": ENV, "max_tokens": 12, "eval_tasks": 1, "quiet": True}
    own = {"lora_rank": 2, "lora_per_role": True, "prompts_per_step": 1, "samples_per_prompt": 2, "filter": ()}
    rollouts.run(**few, **own, steps=1, checkpoint_every=1, out="run")
    summary = rollouts.resume("run", steps=2)
    assert set(summary["evaluation"]["after"]["roles"]) == {"long", "my-short"}
    rows = [json.loads(row) for row in Path("run/trajectories/step_000001.jsonl").read_text().splitlines()]
    assert {row["role"] for row in rows} == {"long", "my-short"}

    step = Path("run/checkpoints/step_000002")
    assert role_adapters(step) == {role: step / "adapters" / role for role in ("long", "my-short")}
    assert model_of_role("run", "long") == str(step / "adapters" / "long")
    assert served_name(model_of_role("run", "long")) == "run"
    assert load_tokenizer(str(step)).vocab_size == load_tokenizer("tiny").vocab_size
    with pytest.raises(ModelError, match=r"has an adapter for each role; give that of one role: .*adapters/long, "):
        resolve_model_name(str(step))
    for role, why in (("", r"which role\?: run has an adapter for each of long, my-short"), ("x", "--role x: run has")):
        with pytest.raises(ConfigError, match=why):
            model_of_role("run", role)
    assert export(model_of_role("run", "my-short"), "out").merged == 1
    (opponent,) = plan(role={"my_short": {"model": "run"}}).opponents
    assert opponent.model == model_of_role("run", "my-short"), "an opponent has the adapter of its role"

    both = rollouts.run(**few, mode="eval", model="run", seed=1, out="eval")["roles"]
    alone = rollouts.run(**few, mode="eval", model="out", seed=1, out="alone")["roles"]
    assert set(both) == {"long", "my-short"}
    assert both["my-short"]["reward_mean"] == alone["my-short"]["reward_mean"], "merged, it says the same"
    with pytest.raises(ConfigError, match=r"the environment .*Alone has no roles; give another one, or give that of"):
        rollouts.run(**few | {"env": "./game.py:Alone"}, mode="eval", model="run", out="none")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lora_rank": 0}, "--lora-per-role: there are no adapters, because every weight is trained; type --lora-rank"),
        ({"env": "./game.py:Alone"}, "--lora-per-role, and the environment .*Alone has no roles"),
        ({"inference": "vllm"}, "--inference vllm serves one adapter at a time; type --inference hf, or leave it out"),
        ({"inference": "sglang"}, "--inference sglang serves one adapter at a time"),
        ({"training": "fsdp"}, "--training fsdp trains one adapter at a time; type --training torch"),
        ({"mode": "sft"}, "--lora-per-role: demonstrations do not say whose they are"),
    ],
    ids=["rank", "roles", "vllm", "sglang", "fsdp", "sft"],
)
def test_what_cannot_be_is_refused_before_a_model_loads(settings, message):
    with pytest.raises(ConfigError, match=message):
        plan(**settings)


def test_a_role_of_another_model_has_no_adapter():
    assert plan().lora_roles == ("long", "my-short")
    assert plan(role={"my_short": {"model": "tiny"}}).lora_roles == ("long",)
    assert plan(lora_per_role=False).lora_roles == ()
