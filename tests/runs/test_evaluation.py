"""Mode eval is composed without anything of training, and its numbers are those of the episodes."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

import rollouts
from rollouts.config.render import to_toml
from rollouts.config.resolving import resolve
from rollouts.config.settings import EVAL, setting_infos
from rollouts.errors import ConfigError, EnvironmentDefinitionError, RunError
from rollouts.runs.earlier_run import is_written_by_run
from rollouts.runs.plan import make_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))
from mock_engine import started

ROOT = Path(__file__).parents[2]
VLLM = f"{ROOT / 'plugins' / 'servers' / 'rollouts_servers' / 'vllm.py'}:create_vllm_inference"
OPENAI = f"{ROOT / 'plugins' / 'servers' / 'rollouts_servers' / 'openai.py'}:create_openai_inference"

PARTS = '''\
from dataclasses import dataclass
from pathlib import Path
from rollouts import Task, reward

@dataclass
class Sums:
    answer: int = 46
    tasks_given: int = 3
    def tasks(self, split, rng):
        return [Task(f"{split} {i} of {self.answer}", answer=self.answer) for i in range(self.tasks_given)]
    @reward
    def correct(self, task, trajectory):
        return float(str(task.answer) in trajectory.last_text)

def share(tasks, trajectories):
    """A reward of the whole group: how many rollouts it has."""
    return [float(len(tasks))] * len(tasks)

class Memory:
    def __init__(self, folder, settings, first_step):
        self.path = Path(folder) / "memory.txt"
        self.settings = settings
    def log(self, metrics, step):
        self.path.write_text(f"{step} {metrics['eval/reward_mean']} {sorted(self.settings)}")
    def close(self):
        pass

class Late:
    def __init__(self, folder, settings, first_step):
        found = (Path(folder) / "summary.json").read_text()
        (Path(folder) / "found.json").write_text(found)
    def log(self, metrics, step):
        pass
    def close(self):
        pass

class Down:
    def __init__(self, folder, settings, first_step):
        raise ConnectionError("no answer")
    log = close = None
'''


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def evaluation(**settings):
    return resolve({"mode": "eval", "env": "./parts.py:Sums"} | settings)


def served(url, **settings):
    inference = {"name": OPENAI, "url": f"{url}/v1"}
    return rollouts.run(mode="eval", model="m1", inference=inference, out="out", **settings)


def test_the_keys_are_settings_and_the_file_holds_no_other():
    known = {info.name for info in setting_infos()}
    assert set(EVAL) <= known
    written = {
        line.split(" =")[0] for line in to_toml(resolve({"mode": "eval", "env": "e"})).splitlines() if " = " in line
    }
    assert written & known <= {*EVAL}
    again = resolve({"mode": "eval", "env": "e", "samples_per_prompt": 3, "temperature": 0.0})
    assert resolve(tomllib.loads(to_toml(again))) == again


def test_its_plan_has_nothing_of_training(parts):
    plan = make_plan(evaluation())
    assert set(plan.chosen) == {"env", "data", "tool", "tool_parser", "reward", "inference", "sandbox", "logger"}
    assert not plan.is_chat
    assert plan.schedule == plan.stages_chosen == plan.filters == () and plan.auxiliary_models is None
    assert len(plan.eval_tasks()) == 3


def test_what_a_run_wrote_is_not_evaluated_by_servers_that_nobody_gave_it_to(parts):
    run, model = parts / "first", parts / "model"
    checkpoint = run / "checkpoints" / "step_000003"
    for folder, names in ((checkpoint, ["adapter_config.json", "manifest.json"]), (model, ["config.json"])):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("{}")
    engine = {"name": VLLM, "url": "http://gpu7:8000,http://gpu8:8000"}
    for given in (run, checkpoint):
        with pytest.raises(
            ConfigError, match=r"an evaluation sends no weights.*Leave --inference\.url out.*served-model NAME"
        ):
            make_plan(evaluation(model=str(given), inference=engine))
        plan = make_plan(evaluation(model=str(given), inference=engine | {"served_model": "mine"}))
        assert (
            "http://gpu7:8000,http://gpu8:8000 serves as 'mine'" in plan.notes[-1] and str(checkpoint) in plan.notes[-1]
        )
    # What somebody would have started a server with.
    for name in (str(model), "tiny", "org/model"):
        assert make_plan(evaluation(model=name, inference=engine)).notes == ()
    make_plan(evaluation(model=str(checkpoint), inference={"name": VLLM}))  # which will start one
    assert not is_written_by_run(model)
    (model / "state.json").write_text("{}")  # a checkpoint of all weights
    assert is_written_by_run(model)


def test_an_environment_without_held_out_tasks(parts):
    plan = make_plan(evaluation(env={"name": "./parts.py:Sums", "tasks_given": 0}))
    with pytest.raises(EnvironmentDefinitionError, match=r"tasks\('eval', rng\)"):
        plan.eval_tasks()


def test_several_environments_have_their_own_numbers(parts):
    env = [
        {"name": "./parts.py:Sums", "alias": "right", "weight": 2.0},
        {"name": "./parts.py:Sums", "alias": "wrong", "answer": 7, "weight": 1.0},
    ]
    with started(delay_seconds=0.0, calls=0) as server:
        summary = served(server.url, env=env, eval_tasks=3)
    assert summary["reward_mean"] == pytest.approx(2 / 3) and summary["tasks"] == 3
    own = summary["environments"]
    assert (own["right"]["reward_mean"], own["wrong"]["reward_mean"]) == (1.0, 0.0)
    assert (own["right"]["tasks"], own["wrong"]["tasks"]) == (2, 1)
    assert own["right"]["reward_stderr"] == 0.0 and own["wrong"]["reward_stderr"] is None


def test_rewards_of_a_whole_group_see_the_samples_of_one_task(parts):
    rewards = {"env": {"name": "env"}, "share": {"name": "./parts.py:share"}}
    with started(delay_seconds=0.0, calls=0) as server:
        summary = served(server.url, env="./parts.py:Sums", reward=rewards, samples_per_prompt=4)
    assert summary["parts"] == {"correct": 1.0, "share": 4.0} and summary["reward_mean"] == 5.0
    assert summary["pass@k"] == {}  # graded rewards do not say what passes
    rows = [json.loads(line) for line in (parts / "out" / "trajectories" / "eval.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [5.0] * 12


def test_loggers_are_told_once(parts):
    logger = {"own": {"name": "./parts.py:Memory"}}
    with started(delay_seconds=0.0, calls=0) as server:
        summary = served(server.url, env="./parts.py:Sums", logger=logger)
    assert (summary["model"], summary["url"]) == ("m1", f"{server.url}/v1") and "served_model" not in summary
    step, mean, settings = (parts / "out" / "memory.txt").read_text().split(" ", 2)
    assert (step, mean) == ("0", "1.0") and "'temperature'" in settings and "'lr'" not in settings


def test_an_evaluation_does_not_fail_because_a_logger_cannot_be_made(parts):
    """It is made at the end, when all episodes are played."""
    logger = {"own": {"name": "./parts.py:Down"}}
    with started(delay_seconds=0.0, calls=0) as server:
        summary = served(server.url, env="./parts.py:Sums", logger=logger)
    assert summary == json.loads((parts / "out" / "summary.json").read_text())
    assert (summary["reward_mean"], summary["status"]) == (1.0, "done") and "no answer" in summary["faults"][0]
    assert (parts / "out" / "metrics.jsonl").exists()


def test_numbers_are_there_before_a_logger_is_made(parts):
    """A kill while it waits for its server leaves a whole folder."""
    with started(delay_seconds=0.0, calls=0) as server:
        summary = served(server.url, env="./parts.py:Sums", logger={"own": {"name": "./parts.py:Late"}})
    assert json.loads((parts / "out" / "found.json").read_text()) == summary


def test_numbers_stay_where_a_logger_is_interrupted(parts, monkeypatch):
    def interrupted(loggers, *arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("rollouts.runs.session.Loggers.open", interrupted)
    with started(delay_seconds=0.0, calls=0) as server:
        with pytest.raises(KeyboardInterrupt, match="3 of 3 episodes are done"):
            served(server.url, env="./parts.py:Sums")
    summary = json.loads((parts / "out" / "summary.json").read_text())
    assert (summary["reward_mean"], summary["status"]) == (1.0, "interrupted")


def test_that_nothing_was_judged_comes_before_a_logger_that_fails(parts):
    (parts / "unsure.py").write_text("def unsure(task, trajectory):\n    return None\n")
    with started(delay_seconds=0.0, calls=0) as server, pytest.raises(RunError, match="not one of the 3 rollouts"):
        served(
            server.url,
            env="./parts.py:Sums",
            reward={"unsure": {"name": "./unsure.py:unsure"}},
            logger={"own": {"name": "./parts.py:Down"}},
        )
    assert json.loads((parts / "out" / "summary.json").read_text())["judged"] == 0
