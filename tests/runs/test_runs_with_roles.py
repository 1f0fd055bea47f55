"""Whole runs of an environment with roles: metrics, files, resume, other algorithms, several environments, refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from rollouts.cli import main

ENVIRONMENT = f"{Path(__file__).parents[2] / 'benchmarks' / 'two_roles.py'}:Counting"
SHORT = (
    "--prompts-per-step 2 --samples-per-prompt 4 --max-tokens 6 --eval-tasks 2 --model tiny --loss grpo --filter none"
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, *flags, environment=ENVIRONMENT, code=0):
    """Run it; returns the output, or the error if `code` is not 0."""
    assert main(["run", "--env", environment, *SHORT.split(), *flags]) == code, capsys.readouterr().err
    found = capsys.readouterr()
    return found.err if code else found.out


def metrics_of(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def learned(folder):
    """What a run computed, without times and speeds."""
    apart = ("time/", "perf/", "rollout/latency", "sync/seconds")
    return [{name: n for name, n in line.items() if not name.startswith(apart)} for line in metrics_of(folder)]


@pytest.mark.slow
def test_a_run_its_files_and_its_resume(capsys):
    out = run(capsys, "--steps", "2", "--out", "whole")
    assert "--- a rollout of step 1 (caller, reward" in out and "--- a rollout of step 1 (counter, reward" in out
    for line in metrics_of("whole"):
        assert {f"role/{role}/reward" for role in ("caller", "counter")} <= set(line)
    assert "eval/role/counter/reward_mean" in metrics_of("whole")[-1]
    records = [json.loads(line) for line in Path("whole/trajectories/step_000000.jsonl").read_text().splitlines()]
    assert [(r["group"], r["role"], r["rollout"]) for r in records] == list(
        itertools.product((0, 1), ("caller", "counter"), range(4))
    )
    for record in records:
        (name,) = {"caller": ["same"], "counter": ["above"]}[record["role"]]
        assert list(record["parts"]) == [name] and record["messages"][0]["role"] == "system"
        assert record["messages"][0]["content"].startswith("Repeat" if record["role"] == "caller" else "Is it above")
        (segment,) = record["segments"]
        assert sum(segment["loss_mask"]) in (0, len([v for v in segment["versions"] if v >= 0]))
    run(capsys, "--steps", "2", "--out", "again")
    assert learned("again") == learned("whole"), "a seed fixes the result"
    run(capsys, "--steps", "1", "--out", "parts")
    assert main(["resume", "parts", "--steps", "2"]) == 0, capsys.readouterr().err
    assert learned("parts")[1] == learned("whole")[1]


@pytest.mark.parametrize(
    "flags",
    [
        ["--loss", "dpo"],
        ["--staleness", "1", "--over-sampling", "1.5", "--correction", "truncated"],
        *(
            pytest.param(flags, marks=pytest.mark.nightly)
            for flags in (
                ["--select", "reward_at_least"],
                ["--loss", "dapo", "--refill", "1", "--minibatches", "2"],
                ["--loss", "reinforce_pp"],
            )
        ),
    ],
    ids=lambda flags: flags[1],
)
def test_other_ways_to_train(flags, capsys):
    run(capsys, "--steps", "2", "--out", "run", *flags)
    lines = metrics_of("run")
    assert len(lines) == 2 and all("role/caller/reward" in line and "role/counter/reward" in line for line in lines)


def test_one_environment_with_roles_and_one_without(capsys):
    flags = ["--env", "sums=calculator", "--steps", "2", "--out", "run", "--prompts-per-step", "4", "--eval-tasks", "4"]
    run(capsys, *flags, environment=f"game={ENVIRONMENT}")
    lines = metrics_of("run")
    together = set().union(*lines)
    assert {"env/game/role/caller/reward", "env/game/role/counter/reward", "env/sums/reward"} <= together
    assert not any("sums/role" in name for name in together)
    assert {"eval/game/role/caller/reward_mean", "eval/sums/reward_mean"} <= set(lines[-1])


def test_evaluate_chat_and_show(capsys):
    flags = "--model tiny --eval-tasks 3 --max-tokens 6 --samples-per-prompt 2 --out e".split()
    assert main(["eval", "--env", ENVIRONMENT, *flags]) == 0, capsys.readouterr().err
    assert "caller" in capsys.readouterr().out
    summary = json.loads(Path("e/summary.json").read_text())
    assert (summary["episodes"], set(summary["roles"])) == (6, {"caller", "counter"})
    assert summary["roles"]["caller"]["episodes"] == 6 and list(summary["roles"]["caller"]["parts"]) == ["same"]
    assert main(["plugins", "show", ENVIRONMENT]) == 0
    shown = capsys.readouterr().out
    assert "roles\n  caller   Repeat the last digit." in shown and "above (counter)" in shown
    assert main(["run", "--env", ENVIRONMENT, *SHORT.split(), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "a scripted episode, the caller: 3 messages" in shown and "reward: 0 (above 0)" in shown


def test_chat_has_one_role(capsys, monkeypatch):
    import io

    def chat(*flags, code=0):
        monkeypatch.setattr("sys.stdin", io.StringIO("7\n"))
        assert main(["chat", "tiny", "--env", ENVIRONMENT, "--max-tokens", "4", "--out", "talk", *flags]) == code
        return capsys.readouterr().err

    assert "the model is the caller; for another role type --role counter" in chat()
    assert json.loads(Path("talk").read_text().splitlines()[0])["content"] == "Repeat the last digit."
    Path("talk").unlink()
    assert "the counter" in chat("--role", "counter")
    assert json.loads(Path("talk").read_text().splitlines()[0])["content"] == "Is it above four?"
    Path("talk").unlink()
    assert "--role nobody: the roles are caller, counter" in chat("--role", "nobody", code=2)


def test_a_system_prompt_of_the_run_is_refused(capsys):
    said = run(capsys, "--system", "Be brief.", "--steps", "1", code=2)
    assert "--system: the environment" in said and "(caller, counter)" in said


def test_demonstrations_get_the_tools_of_their_role(tmp_path):
    from rollouts import Message, Role, tool
    from rollouts.errors import EnvironmentDefinitionError
    from rollouts.runs.components import Chosen
    from rollouts.runs.environments import PlannedEnvironment

    class Shop:
        roles = (Role("seller", system="Sell."), Role("buyer", system="Buy."), Role("guest"))

        @tool(role="seller")
        def stock(self) -> int:
            """How many."""
            return 1

        @tool
        def clock(self) -> str:
            """The time."""
            return "noon"

    made = PlannedEnvironment(Chosen("Shop", Shop, {}, None), 1.0, None, 1.0, 0, "")
    of = made.schemas_of_demonstrations()

    def names(*messages):
        return [schema["function"]["name"] for schema in of(list(messages))]

    assert names(Message("system", "Sell."), Message("user", "?")) == ["stock", "clock"]
    assert names(Message("system", "Buy."), Message("user", "?")) == ["clock"]
    assert names(Message("user", "?")) == ["clock"], "the guest has no system prompt"
    with pytest.raises(EnvironmentDefinitionError, match="does not say whose conversation"):
        of([Message("system", "Steal."), Message("user", "?")])


@pytest.mark.nightly
def test_both_roles_learn(tmp_path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("two_roles", ENVIRONMENT.removesuffix(":Counting"))
    assert spec is not None and spec.loader is not None
    two_roles = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(two_roles)
    found = two_roles.train(0, tmp_path / "run")
    assert set(found) == {"caller", "counter"}
    for role, (before, after) in found.items():
        assert after - before >= two_roles.RISE_MIN, (role, before, after)
