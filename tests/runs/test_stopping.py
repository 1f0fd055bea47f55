"""Runs that end before their last step: by a rule, or because their hours are over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rollouts
from rollouts.cli import main
from rollouts.config.settings import Settings
from rollouts.runs.jobs.stopping import Stopping

SHORT = "--env calculator --prompts-per-step 2 --samples-per-prompt 4 --max-tokens 16 --eval-tasks 2 --out r"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(arguments, capsys, command="run"):
    """Run it; gives what it said and its summary."""
    given = [*(SHORT.split() if command == "run" else ()), *arguments]
    assert main([command, *given]) == 0, capsys.readouterr().err
    return capsys.readouterr().out, json.loads(Path("r/summary.json").read_text())


def steps_logged():
    return [json.loads(line)["step"] for line in Path("r/metrics.jsonl").read_text().splitlines()]


RULE = "eval/reward_mean >= 0"


def test_a_rule_ends_the_run_where_it_holds_and_resume_leaves_it(capsys):
    out, summary = run(
        ["--steps", "9", "--eval-every", "2", "--stop-when", RULE, "--stop-when", "metric/used_tol > 9"], capsys
    )
    assert (summary["status"], summary["steps"], summary["checkpoint"]) == ("done", 2, "checkpoints/step_000002")
    assert summary["stopped"]["by"] == "stop_when" and summary["stopped"]["rule"] == RULE
    assert summary["evaluation"]["before"] and summary["evaluation"]["after"]
    assert f"stopped before step 3 of 9: --stop-when '{RULE}': eval/reward_mean was " in out
    assert (
        out.count("--stop-when 'metric/used_tol > 9': no metric metric/used_tol has been logged so far; did you mean")
        == 1
    )
    (again,) = (words for words in summary["warnings"] if "used_tol" in words)
    assert again.startswith("--stop-when 'metric/used_tol > 9' had no effect: no step logged a metric metric/used_tol;")
    assert f"warning: {again}\n" in out
    assert "'eval/reward_mean" not in out.partition("held-out, after")[0], "it was logged where it was first evaluated"
    assert steps_logged() == [0, 1]
    assert [path.name for path in Path("r/checkpoints").iterdir()] == ["step_000002"]

    out, again = run(["r"], capsys, "resume")
    assert again == summary and "r is finished: --stop-when" in out and "rollouts resume r --stop-when none" in out

    assert "rollouts resume r --steps 5 --stop-when none" in run(["r", "--steps", "5"], capsys, "resume")[0]

    out, longer = run(["r", "--stop-when", "none", "--steps", "3"], capsys, "resume")
    assert (longer["steps"], longer["resumed_from"], "stopped" in longer) == (3, 2, False)
    assert steps_logged() == [0, 1, 2]


def test_the_evaluation_of_the_last_step_is_not_played_again(capsys, monkeypatch):
    played = []
    from rollouts.runs.jobs import evaluating

    evaluate = evaluating.evaluate

    async def counted(tasks, **given):
        played.append(len(tasks))
        return await evaluate(tasks, **given)

    monkeypatch.setattr(evaluating, "evaluate", counted)
    _, summary = run(["--steps", "9", "--eval-every", "1", "--stop-when", RULE], capsys)
    assert summary["steps"] == 1 and len(played) == 4, "sampled and greedy, before and after one step"
    last = json.loads(Path("r/metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/reward_mean"] == summary["evaluation"]["after"]["reward_mean"]


@pytest.mark.parametrize(
    "more",
    [
        ["--mode", "sft"],
        *(
            pytest.param(each, marks=pytest.mark.nightly)
            for each in ([], ["--staleness", "1"], ["--checkpoint-every", "1"])
        ),
    ],
)
def test_hours_that_are_over_end_it_after_a_step_and_resume_continues(more, capsys):
    out, summary = run(["--steps", "3", "--max-hours", "1e-9", *more], capsys)
    assert (summary["status"], summary["steps"], summary["stopped"]["by"]) == ("done", 1, "max_hours")
    assert "to continue, type: rollouts resume r" in out
    _, again = run(["r"], capsys, "resume")
    assert (again["steps"], again["stopped"]["rule"]) == (2, "1e-09"), "each process has its hours"
    _, last = run(["r", "--max-hours", "none"], capsys, "resume")
    assert (last["steps"], "stopped" in last) == (3, False) and steps_logged() == [0, 1, 2]


@pytest.mark.slow
def test_a_stopped_and_resumed_run_is_the_unbroken_one(capsys):
    def values():
        lines = [json.loads(line) for line in Path("r/metrics.jsonl").read_text().splitlines()]
        other = ("time/", "perf/", "rollout/latency", "eval/", "sync/seconds")
        return [{name: value for name, value in line.items() if not name.startswith(other)} for line in lines]

    run(["--steps", "2"], capsys)
    unbroken = values()
    Path("r").rename("unbroken")
    run(["--steps", "2", "--stop-when", "reward/mean >= 0"], capsys)
    run(["r", "--stop-when", "none"], capsys, "resume")
    assert values() == unbroken


def test_a_rule_that_holds_in_the_last_step_stops_nothing(capsys):
    _, summary = run(["--steps", "1", "--stop-when", "reward/mean >= 0"], capsys)
    assert summary["steps"] == 1 and "stopped" not in summary


def test_a_metric_that_appears_later_is_no_warning_at_the_end():
    noted = []
    stopping = Stopping(Settings(stop_when=("metric/a > 1", "metric/b > 1")), 0.0, noted.append)
    stopping.reason(1, {"loss": 1.0})
    stopping.reason(2, {"loss": 1.0, "metric/a": 0.0})
    assert len(noted) == 2
    assert stopping.at_the_end() == [
        "--stop-when 'metric/b > 1' had no effect: no step logged a metric metric/b; there are loss"
    ]


def test_both_phases(capsys):
    both = ["--mode", "sft+rl", "--sft.steps", "2", "--steps", "3"]
    _, summary = run([*both, "--stop-when", "policy/loss > -9", "--max-hours", "1e-9"], capsys)
    assert summary["stopped"]["by"] == "max_hours" and summary["phases"]["rl"] is None
    assert summary["phases"]["sft"]["steps"] == 1, "rules are for the reinforcement"
    _, summary = run(["r", "--max-hours", "none"], capsys, "resume")
    assert summary["phases"]["sft"]["steps"] == 2 and summary["steps"] == 1
    assert summary["stopped"]["rule"] == "policy/loss > -9"
    out, again = run(["r"], capsys, "resume")
    assert "r is finished" in out and again == summary


def test_rules_are_settings(capsys):
    Path("a.toml").write_text(
        'env = "calculator"\nsteps = 4\neval_tasks = 0\nprompts_per_step = 2\nstop_when = "policy/loss > -9"\n'
    )
    _, summary = run(["a.toml"], capsys)
    assert summary["steps"] == 1
    assert 'stop_when = ["policy/loss > -9"]' in Path("r/config.toml").read_text()
    summary = rollouts.run(env="calculator", steps=4, eval_tasks=0, prompts_per_step=2, stop_when="policy/loss > -9")
    assert summary["steps"] == 1


def test_without_quotes_the_shell_takes_the_number_for_a_file(capsys):
    assert main(["run", "--env", "calculator", "--stop-when", "reward/mean", "0.95"]) == 2
    assert "expected METRIC OPERATOR NUMBER in quotes" in capsys.readouterr().err


PARTS = '''\
import itertools
import os
import signal
from pathlib import Path

from rollouts_calculator import Calculator as Base


class Once:
    """A logger that refuses a step that it has."""

    in_step = True

    def __init__(self):
        self.last = -1

    def log(self, metrics, step):
        if Path("strict").exists() and step <= self.last:
            raise ValueError("the step is there already")
        self.last = step
        with open("logged.txt", "a") as file:
            print(step, "eval/reward_mean" in metrics, file=file)

    def close(self):
        pass


class Calculator(Base):
    numbers = itertools.count(1)

    def setup(self, task):
        """The flag says in which episode Ctrl-C comes. Episodes are set up in several threads at once."""
        number = next(Calculator.numbers)
        if Path("flag").exists() and number == int(Path("flag").read_text()):
            os.kill(os.getpid(), signal.SIGINT)
'''


def test_a_rule_that_was_met_holds_after_ctrl_c_in_the_last_evaluation(capsys):
    Path("mine.py").write_text(PARTS)
    Path("flag").write_text(str(4 + 8 + 1))
    rule = ["--stop-when", "reward/mean >= 0"]
    assert main(["run", *SHORT.replace("calculator", "./mine.py:Calculator").split(), "--steps", "3", *rule]) == 130
    assert "interrupted after 1 of 3 steps" in capsys.readouterr().err
    Path("flag").unlink()
    _, summary = run(["r"], capsys, "resume")
    assert (summary["steps"], summary["stopped"]["rule"]) == (1, "reward/mean >= 0") and steps_logged() == [0]
    _, summary = run(["r", "--stop-when", "none", "--steps", "2"], capsys, "resume")
    assert summary["steps"] == 2 and "stopped" not in summary


def test_a_logger_that_takes_no_step_twice_loses_no_step(capsys):
    Path("mine.py").write_text(PARTS)
    Path("strict").touch()
    loggers = ["--logger", "jsonl", "--logger", "./mine.py:Once"]
    assert main(["run", *SHORT.split(), "--steps", "2", *loggers]) == 1
    error = capsys.readouterr().err
    assert "the logger Once failed: ValueError: the step is there already" in error
    assert [path.name for path in Path("r/checkpoints").iterdir()] == ["step_000002"]
    Path("strict").unlink()
    _, summary = run(["r"], capsys, "resume")
    assert summary["resumed_from"] == summary["steps"] == 2 and steps_logged() == [0, 1]
    assert Path("logged.txt").read_text().splitlines() == ["0 True", "1 False", "1 True"]


def test_a_first_phase_that_is_made_shorter_than_its_hours_is_over(capsys):
    both = ["--mode", "sft+rl", "--sft.steps", "3", "--steps", "1", "--max-hours", "1e-9"]
    _, summary = run(both, capsys)
    assert summary["phases"]["sft"]["steps"] == 1 and summary["phases"]["rl"] is None
    _, summary = run(["r", "--sft.steps", "1"], capsys, "resume")
    assert summary["steps"] == 1 and summary["phases"]["rl"]["steps"] == 1


def test_patience_continues_after_a_resume():
    """However often the run is resumed, it ends at the evaluation at which the unbroken one ends."""
    losses = [3.0, 2.0, 2.5, 2.25, 1.75, 2.0, 1.75, 1.75]

    def ended(resumed_at):
        own = Stopping(Settings(), 0.0, print, 3)
        for number, loss in enumerate(losses):
            if number in resumed_at:
                own = Stopping(Settings(), 0.0, print, 3, json.loads(json.dumps(own.state)))
            if (stop := own.reason(number, {"eval/loss": loss})) is not None:
                return number, stop
            assert own.reason(number, {"policy/loss": 0.5}) is None, "no evaluation"
        return None

    assert Stopping(Settings(), 0.0, print, 3).state == {}
    whole = ended([])
    assert whole is not None and whole[0] == 7 and whole[1].by == "patience" and "below 1.7500" in whole[1].why
    assert ended([6]) == ended([1, 5, 7]) == ended(range(8)) == whole
