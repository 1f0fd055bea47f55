"""Environments in worker processes: the same numbers and the same messages as in the process of the run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import psutil
import pytest
from comparing import ENVS, SHORT, both, episodes_of, logged, workers
from rollouts_fsdp.rank import without_episodes

import rollouts
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, EnvironmentDefinitionError, RunError, UserError
from rollouts.runs.dry_run import dry_run
from rollouts.runs.plan import make_plan
from rollouts.runs.workers import pools_of, worker_pools


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with worker_pools():
        yield
    assert not workers()


@pytest.mark.parametrize(
    "worker", ["process", pytest.param({"kind": "process", "count": 2}, marks=pytest.mark.nightly)]
)
def test_the_main_job_has_the_same_metrics(worker):
    _, apart = both("calculator", worker, loss="grpo")
    assert len(logged(apart)) == 2
    assert 'kind = "process"' in (apart / "config.toml").read_text()


@pytest.mark.parametrize("worker", ["inline", "process"])
def test_rows_that_are_not_there_are_named_before_a_reward_that_is_missing(worker):
    with pytest.raises(ConfigError, match=r"missing.jsonl cannot be read: No such file"):
        make_plan(resolve({"env": "prompts", "data": "missing.jsonl", "worker": worker}))
    Path("there.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    with pytest.raises(EnvironmentDefinitionError, match="has no @reward method"):
        make_plan(resolve({"env": "prompts", "data": "there.jsonl", "worker": worker}))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Counting", "OwnRollout"])
def test_other_environments_have_the_same_metrics(name):
    both(f"{ENVS}:{name}")


@pytest.mark.slow
def test_an_agent_with_its_own_client_has_the_same_episodes():
    for out, worker in (("inline", "inline"), ("apart", "process")):
        rollouts.run(env=f"{ENVS}:OwnClient", out=out, worker=worker, mode="eval", **{**SHORT, "eval_tasks": 2})

    # No batch waits for such an agent, so the order of the episodes differs, and the last digits of logprobs.
    def episodes(out):
        return sorted(episodes_of(Path(out)), key=lambda line: (line["group"], line["rollout"]))

    for inline, apart in zip(episodes("inline"), episodes("apart"), strict=True):
        assert inline["info"] == apart["info"] and inline["info"]["statuses"][-1] == 400
        assert inline["messages"] == apart["messages"]
        for one, other in zip(inline["segments"], apart["segments"], strict=True):
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
            assert {**one, "logprobs": []} == {**other, "logprobs": []}


@pytest.mark.nightly
def test_roles_tools_by_task_and_rewards_by_turn_are_the_same():
    _, apart = both(f"{ENVS}:Market", loss="grpo", advantage={"name": "turn_return", "gamma": 0.9}, steps=3, seed=3)
    episodes, last = episodes_of(apart), logged(apart)[-1]
    assert {episode["role"] for episode in episodes} == {"seller", "buyer"}
    assert any(episode["metrics"]["tool_calls"] for episode in episodes)
    assert {"role/seller/reward", "role/buyer/reward", "role/seller/reward_part/turns"} <= last.keys()


def test_demonstrations_are_the_same():
    found = []
    for worker in ("inline", "process"):
        (env,) = make_plan(resolve({"env": f"{ENVS}:Counting", "worker": worker, "eval_tasks": 0})).environments
        found.append(list(itertools.islice(env.demonstrations(), 5)))
    assert found[0] == found[1] and len(found[0]) == 5


@pytest.mark.nightly
def test_training_on_demonstrations_is_the_same():
    inline, apart = both(f"{ENVS}:Counting", mode="sft+rl", sft={"steps": 2})
    assert logged(inline / "sft") == logged(apart / "sft") and len(logged(apart / "sft")) == 2


def test_an_evaluation_is_the_same():
    """Of an environment with tools and a user, of one with its own rollout, and of one with roles."""
    names = ("Counting", "OwnRollout", "Market")
    _, apart = both({name.lower(): {"name": f"{ENVS}:{name}"} for name in names}, mode="eval", eval_tasks=6)
    roles = {episode.get("role") or "" for episode in episodes_of(apart)}
    assert roles == {"", "seller", "buyer"}


def test_an_object_in_a_worker_has_what_the_environment_has():
    plan = make_plan(resolve({"env": f"{ENVS}:Counting", "worker": "process", "eval_tasks": 3}))
    (pool,) = pools_of(plan.environments).values()
    env = plan.environments[0].make()
    assert [tool.name for tool in plan.environments[0].all_tools()] == ["add", "fail", "wait"]
    assert type(env).__name__ == "Counting" and not hasattr(env, "rollout") and hasattr(env, "reply")
    assert env.remote_warnings() == []
    pool.close()
    assert not workers()


@pytest.mark.parametrize("kind", ["raise", pytest.param("none", marks=pytest.mark.nightly), "metric", "setup"])
def test_errors_of_the_author_are_the_same(kind):
    given = {**SHORT, "mode": "eval", "retries": 0}
    found = []
    for out, worker in (("inline", "inline"), ("apart", "process")):
        env = {"name": f"{ENVS}:Broken", "kind": kind}
        with contextlib.suppress(RunError):
            rollouts.run(env=env, out=out, worker=worker, **given)
        log = Path(out, "errors.log")
        lines = log.read_text().splitlines() if log.exists() else []
        mine = [line for line in lines if line.startswith("===") or "worker_envs.py" in line or " x " in line]
        summary = json.loads(Path(out, "summary.json").read_text())
        found.append((mine, logged(out), summary["status"], str(summary.get("error")).replace(out, "OUT")))
    assert found[0] == found[1]
    assert bool(found[0][0]) == (kind != "none")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"name": f"{ENVS}:Counting", "digits": "many"}, marks=pytest.mark.nightly),
        pytest.param({"name": f"{ENVS}:Counting", "mood": "sad"}, marks=pytest.mark.nightly),
        {"name": f"{ENVS}:Counting", "digit": 3},
        {"name": f"{ENVS}:Broken", "kind": "tasks"},
        pytest.param({"name": f"{ENVS}:Broken", "kind": "nan"}, marks=pytest.mark.nightly),
        pytest.param({"name": f"{ENVS}:Nobody"}, marks=pytest.mark.nightly),
        pytest.param({"name": "./nowhere.py:Nobody"}, marks=pytest.mark.nightly),
    ],
)
def test_mistakes_have_the_same_message(given):
    messages = []
    for out, worker in (("inline", "inline"), ("apart", "process")):
        with pytest.raises((UserError, RunError)) as caught:
            rollouts.run(env=given, out=out, worker=worker, **SHORT)
        messages.append((type(caught.value), str(caught.value).replace(out, "OUT")))
    assert messages[0] == messages[1]


def test_a_dry_run_is_the_same(capsys):
    texts = []
    for worker in ("inline", "process"):
        tree = {"env": f"{ENVS}:Counting", "worker": worker, "eval_tasks": 3}
        lines = dry_run(resolve(tree)).splitlines()
        texts.append(
            [line for line in lines if line not in ("worker = {}", "[worker]", 'kind = "process"', 'kind = "inline"')]
        )
        assert not workers()
    assert [line for line in texts[0] if line] == [line for line in texts[1] if line]


def test_an_object_of_the_program_is_refused():
    class Here:
        def tasks(self, split, rng):
            return ["Say 1."]

    with pytest.raises(ConfigError, match=r"--worker process: Here is an object of this program"):
        rollouts.run(env=Here, worker="process", **SHORT)


def test_rows_in_memory_are_refused():
    with pytest.raises(ConfigError, match=r'--worker process: the rows of `prompts` .*\n.*data="rows.jsonl"'):
        rollouts.run(env="prompts", prompts=["Say 1.", "Say 2."], reward="match", worker="process", **SHORT)
    assert not workers()


def test_no_worker_is_left_of_a_run_that_is_refused():
    Path("mine.py").write_text("def nosy(trajectory, env):\n    return 1.0\n")
    given = {"env": f"{ENVS}:Counting", "worker": "process"}
    message = r"the reward nosy names `env`, and the environment .*:Counting runs in a worker"
    with pytest.raises(ConfigError, match=message):  # it needs the description of a worker
        rollouts.run(reward="./mine.py:nosy", **given, **SHORT)
    assert not workers()


def test_a_rank_above_0_starts_no_worker():
    given = {"env": f"{ENVS}:Counting", "worker": {"kind": "process", "Counting": "process"}, "loss": "grpo"}
    resolved = resolve({**given, "data": "", "steps": 7})
    plan = make_plan(without_episodes(resolved), needs_environment=False)
    assert not workers() and not plan.environments
    of_rank_0 = make_plan(resolved)
    assert workers()
    ours, theirs = plan.training_arguments(), of_rank_0.training_arguments()
    assert ours.keys() == theirs.keys()
    for name in set(ours) - {"algorithms"}:
        assert ours[name] == theirs[name], name
    assert list(ours["algorithms"]) == list(theirs["algorithms"]) and plan.needs == of_rank_0.needs


def test_an_alias_that_no_environment_has_is_refused():
    with pytest.raises(ConfigError, match="no environment has the alias 'hard'; there are: calculator"):
        make_plan(resolve({"env": "calculator", "worker": ["hard=process"]}))


def test_tasks_are_read_on_in_another_worker():
    plan = make_plan(resolve({"env": f"{ENVS}:Hostile", "worker": "process", "eval_tasks": 3}))
    source = plan.environments[0].training_source()
    drawn = iter(source(0))
    first = [next(drawn).prompt for _ in range(5)]
    for worker in workers():
        worker.send_signal(signal.SIGKILL)
    rest = [next(drawn).prompt for _ in range(995)]
    assert first + rest == [f"Say {n}." for n in range(1000)]
    (pool,) = pools_of(plan.environments).values()
    assert pool.deaths == 1
    pool.close()


RUN = """\
import sys
import rollouts
rollouts.run(env="calculator", worker="process", out="run", steps=1000, prompts_per_step=2, samples_per_prompt=2,
    eval_tasks=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_no_worker_outlives_its_run(number):
    process = forks.popen([sys.executable, "-c", RUN], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (Path("run/metrics.jsonl").exists() and Path("run/metrics.jsonl").read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("rollouts.env.workers.process" in " ".join(child.cmdline()) for child in children)
        os.kill(process.pid, number)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    finally:
        process.kill()
        process.wait()


def test_the_constructor_may_fail():
    file = Path("bad.py")
    file.write_text(
        "class Bad:\n    def __init__(self):\n        raise OSError('no disk')\n    def tasks(self, split, rng): ...\n"
    )
    messages = []
    for worker in ("inline", "process"):
        with pytest.raises(EnvironmentDefinitionError) as caught:
            make_plan(resolve({"env": "./bad.py:Bad", "worker": worker}))
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "building the environment ./bad.py:Bad raised OSError: no disk" in messages[0]
