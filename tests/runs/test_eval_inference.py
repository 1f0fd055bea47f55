"""`--eval-inference`: an evaluation of the weights of one step, while training goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import rollouts
from rollouts.cli import main
from rollouts.errors import RunError
from rollouts.loggers.base import AddsToSteps
from rollouts.loggers.jsonl import JSONLLogger
from rollouts.models.folders import complete_checkpoints
from rollouts.training.weights.store import best_checkpoint, read_state

sys.path.insert(0, str(Path(__file__).parents[1] / "servers"))
from fake_engines import started

from rollouts.models.loading import TINY_PATH

PARTS = '''\
from pathlib import Path
import trio
from rollouts import Task, reward

import counts_of_the_test as Counts

class Texts:
    def tasks(self, split, rng):
        return [Task(f"{split} {i}: {rng.randrange(100)} + {rng.randrange(100)}") for i in range(200)]

    async def setup(self, task):
        if task.prompt.startswith("train"):
            Counts.trained += 1
        elif Counts.waits and 0 < Counts.trained < Counts.total:  # training is not over, so it goes on
            before = Counts.trained
            with trio.move_on_after(10):
                while Counts.trained == before or Counts.holds:
                    await trio.sleep(0.002)
                Counts.overlapped.append(Counts.trained)

    @reward
    def length(self, trajectory):
        return len(trajectory.last_text) % 11 / 10

class Plain:
    """A logger that takes steps in order alone."""
    def log(self, metrics, step):
        Counts.lines.append((step, dict(metrics)))
    def close(self):
        pass'''
SMALL = {
    "env": "./parts.py:Texts",
    "steps": 5,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "eval_tasks": 4,
    "eval_every": 2,
    "max_tokens": 12,
    "lr": 0.02,
    "checkpoint_every": 1,
    "quiet": True,
}
TIMED = ("time/", "perf/", "sync/", "rollout/latency")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def counts(monkeypatch):
    """What has happened in a run, and what an evaluation waits for."""
    found = SimpleNamespace(trained=0, total=0, overlapped=[], holds=False, waits=False, lines=[])
    monkeypatch.setitem(sys.modules, "counts_of_the_test", found)
    return found


def run(out, counts, **settings):
    given = SMALL | settings
    counts.trained, counts.total = 0, given["steps"] * given["prompts_per_step"] * given["samples_per_prompt"]
    counts.waits = "eval_inference" in settings and "stop_when" not in settings
    return rollouts.run(out=out, **given)


def lines_of(folder):
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


def evaluated(folder, done):
    lines = Path(folder, "trajectories", f"eval_{done:06d}.jsonl").read_text().splitlines()
    return [(line["task"]["prompt"], line["reward"], line["temperature"], line["messages"][-1])
            for line in map(json.loads, lines)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        pytest.param({}, id="full"),
        pytest.param({"lora_rank": 2}, id="lora", marks=pytest.mark.nightly),
        pytest.param({"mode": "rl", "staleness": 1}, id="ahead"),
    ],
)
def test_the_numbers_are_those_of_the_step_while_training_goes_on(own, counts):
    ahead = "staleness" in own
    if not ahead:
        run("waits", counts, **own)
        assert not counts.overlapped
    run("out", counts, eval_inference="hf", **own)
    assert counts.overlapped and max(counts.overlapped) > counts.overlapped[0] >= 9, "training went on"
    lines = lines_of("out")
    assert [line["step"] for line in lines] == list(range(5)), "one line for each step"
    assert [step for step, line in enumerate(lines) if "eval/reward_mean" in line] == [0, 1, 3, 4]
    if not ahead:
        assert lines == lines_of("waits")
        for done in (2, 4):
            assert evaluated("out", done) == evaluated("waits", done)
        assert len({lines[step]["eval/reward_mean"] for step in (1, 3, 4)}) > 1, "the weights have changed"
    for done in (2, 4):
        found = rollouts.run(mode="eval", model=f"out/checkpoints/step_{done:06d}", env=SMALL["env"], seed=0,
                             eval_tasks=4, max_tokens=12, out=f"again{done}", quiet=True)  # fmt: skip
        assert found["reward_mean"] == pytest.approx(lines[done - 1]["eval/reward_mean"])


@pytest.mark.slow
def test_a_server_gets_the_weights_of_the_step(counts):
    small = {"eval_tasks": 2, "max_tokens": 6, "steps": 3}
    run("waits", counts, **small)
    with started("vllm", TINY_PATH, numbers="transformers") as server:
        run("out", counts, eval_inference={"name": "vllm", "url": server.url}, **small)
        assert server.statistics()["loads"] == 1, "one for each evaluation between steps"
    assert counts.overlapped
    for one, other in zip(lines_of("out"), lines_of("waits"), strict=True):
        assert {name: one[name] for name in one if not name.startswith("eval/")} == {
            name: other[name] for name in other if not name.startswith("eval/")
        }
        assert ("eval/greedy_mean" in one) == ("eval/greedy_mean" in other)
        if "eval/greedy_mean" in one:  # what a server samples has its own random numbers
            assert one["eval/greedy_mean"] == other["eval/greedy_mean"]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_its_result_ranks_the_checkpoint_of_its_step(keep, counts):
    rank = {"keep_best": "eval/reward_mean", "keep_checkpoints": keep}
    one, other = run("waits", counts, **rank), run("out", counts, eval_inference="hf", **rank)
    assert one["best"] == other["best"]
    assert best_checkpoint(Path("out/checkpoints")).checkpoint.name == Path(one["best"]["checkpoint"]).name
    names = [[path.name for path in complete_checkpoints(Path(folder, "checkpoints"))] for folder in ("waits", "out")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_checkpoint_stays_until_its_evaluation_has_ended(counts, monkeypatch):
    """The best of all is the first one that is evaluated, and three newer ones are saved before this is known."""
    from rollouts.runs.jobs import evaluating

    plain = evaluating.HeldOutTasks.measure

    async def play(self, when, done, inference, **settings):
        found = await plain(self, when, done, inference, **settings)
        return found | {"reward_mean": 9.0 if done == 4 else 0.0}

    monkeypatch.setattr(evaluating.HeldOutTasks, "measure", play)
    seen = []

    def on_step(report):
        seen.append(sorted(path.name for path in Path("out/checkpoints").iterdir()))
        counts.holds = report.step < 6

    counts.holds = True
    done = run("out", counts, eval_inference="hf", steps=9, eval_every=4, keep_checkpoints=1, on_step=[on_step])
    assert seen[6] == ["step_000004", "step_000006"], "5 was removed, and 4 was not"
    assert done["best"]["checkpoint"].endswith("step_000004") and done["best"]["value"] == 9.0


@pytest.mark.slow
def test_a_kill_within_an_evaluation(counts, capsys):
    run("whole", counts)

    counts.holds = True
    for out, last, every in (("first", 2, 2), ("second", 4, 3)):

        def on_step(report, last=last):
            if report.step == last:
                raise ValueError("the end")

        with pytest.raises(RunError, match="the end"):
            run(out, counts, eval_inference="hf", on_step=[on_step], eval_every=every)
    counts.holds = False
    assert read_state("first/checkpoints/step_000002")["run"]["evaluating"] == 2, "what was being evaluated is saved"
    assert read_state("second/checkpoints/step_000004")["run"]["evaluating"] == 3
    assert "eval/reward_mean" not in lines_of("first")[1]
    counts.trained = 8
    assert main(["resume", "first"]) == 0
    assert lines_of("first") == lines_of("whole"), "the evaluation is repeated with the weights of the checkpoint"
    assert evaluated("first", 2) == evaluated("whole", 2)
    capsys.readouterr()
    counts.trained = 16
    assert main(["resume", "second"]) == 0
    assert "the evaluation after step 3 was not finished, and is left out" in capsys.readouterr().out
    assert [step for step, line in enumerate(lines_of("second")) if "eval/reward_mean" in line] == [0, 4]


def test_a_rule_to_stop_sees_it(counts):
    done = run("out", counts, eval_inference="hf", steps=40, stop_when=["eval/reward_mean >= 0"], eval_every=4)
    assert done["status"] == "done" and done["steps"] < 40 and done["stopped"]["by"] == "stop_when"


def test_a_logger_that_takes_steps_in_order_gets_it_with_the_next_step(counts):
    run("out", counts, eval_inference="hf", logger=["jsonl", "./parts.py:Plain"])
    lines = counts.lines
    assert [step for step, _ in lines][:5] == [0, 1, 2, 3, 4] and {step for step, _ in lines[5:]} == {4}
    late = [(step, line) for step, line in lines if line.get("eval/step", 4.0) < 4]
    own = lines_of("out")
    assert [line["eval/step"] for _, line in late] == [1.0, 3.0]
    last = lines[-1][1]  # the evaluation at the end
    assert last["eval/reward_mean"] == own[-1]["eval/reward_mean"] and last.get("eval/step", 4.0) == 4.0
    for step, line in late:
        assert step > line["eval/step"]
        assert line["eval/reward_mean"] == own[int(line["eval/step"])]["eval/reward_mean"]


def test_metrics_are_added_to_an_earlier_line(tmp_path):
    logger = JSONLLogger(tmp_path, 0)
    assert isinstance(logger, AddsToSteps)
    for step in range(3):
        logger.log({"a": float(step)}, step)
    logger.add({"b": 9.0}, 1)
    logger.add({"b": float("nan")}, 2)
    logger.log({"c": 1.0}, 2)
    logger.log({"a": 3.0}, 3)
    logger.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 0, "a": 0.0},
        {"step": 1, "a": 1.0, "b": 9.0},
        {"step": 2, "a": 2.0, "b": None, "c": 1.0},
        {"step": 3, "a": 3.0},
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--eval-inference", "openai"], "a chat API has its own weights, and not those of the run"),
        (["run", "--eval-inference", "vlm"], "did you mean: vllm?"),
        (["run", "--eval-inference", "hf", "--eval-inference.rows-mx", "3"], "rows-max"),
        (["eval", "--eval-inference", "hf"], "this is a setting of training"),
    ],
)
def test_mistakes(arguments, words, capsys):
    assert main([*arguments, "--env", "calculator", "--eval-every", "2", "--out", "out"]) == 2
    assert words in capsys.readouterr().err and not Path("out").exists()


def test_an_engine_that_shares_the_weights_is_refused(capsys):
    Path("shares.py").write_text(
        "from rollouts.inference.embedded.hf import create_hf_inference\n"
        "def shares(model, training, seed):\n    return create_hf_inference(model, training, seed)\n"
    )
    flags = ["--env", "calculator", "--eval-every", "2", "--eval-inference", "./shares.py:shares", "--out", "out"]
    assert main(["run", *flags]) == 2
    assert "it shares the weights of the trainer, which change while it evaluates" in capsys.readouterr().err
    assert main(["run", "--env", "calculator", "--eval-inference", "hf", "--dry-run"]) == 0
    assert "--eval-inference hf is not used: it is for evaluations between steps" in capsys.readouterr().out
