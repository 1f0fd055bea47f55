"""`rollouts runs`: what is listed and compared is what the runs wrote, and cleaning takes nothing that is needed."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from rollouts_view import listing
from rollouts_view.comparing import differing_settings
from rollouts_view.listing import read_run, sampled_lines

import rollouts
from rollouts.cli.app import main
from rollouts.runs import comparing
from rollouts.runs.folder import RunFolder, removed_steps

TRAINED = {"env": "calculator", "steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 4}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The folder `runs` with a run that trained, and an evaluation of its model."""
    runs = tmp_path_factory.mktemp("real") / "runs"
    rollouts.run(**TRAINED, checkpoint_every=1, out=str(runs / "trained"))
    rollouts.run(mode="eval", env="calculator", model=str(runs / "trained"), eval_tasks=4, out=str(runs / "judged"))
    return runs


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def make_run(folder, summary=None, config='mode = "rl"\nsteps = 9\nmodel = "tiny"\n[env]\nname = "toy"\n', rewards=()):
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    lines = [json.dumps({"step": step, "reward/mean": value}) for step, value in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def judged(folder, rewards, config=None, **more):
    """An evaluation that earned these rewards, by task."""
    mean = float(np.mean([each or 0 for each in rewards.values()]))
    own = {} if config is None else {"config": config}
    make_run(folder, {"status": "done", "reward_mean": mean, "tasks": len(rewards), **more}, **own)
    (folder / "trajectories").mkdir()
    rows = [{"task": {"prompt": "?", "id": key}, "reward": value} for key, value in rewards.items()]
    (folder / "trajectories" / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def said(capsys, *argv):
    """The exit code and the output of a command."""
    code = main(["runs", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_run_is_listed_as_it_was(real, monkeypatch, capsys):
    monkeypatch.chdir(real.parent)
    code, out = said(capsys, "list", "--json")
    found = {each["name"]: each for each in json.loads(out)}
    trained, evaluated = found["runs/trained"], found["runs/judged"]
    summary = json.loads((real / "trained" / "summary.json").read_text())
    metrics = [json.loads(line) for line in (real / "trained" / "metrics.jsonl").read_text().splitlines()]
    in_order = sorted(found, key=lambda name: (found[name]["started"], name))  # both may begin in one second
    assert (code, list(found)) == (0, in_order), "in the order in which they began"
    assert trained["curve"] == [line["reward/mean"] for line in metrics] and trained["reward"] == trained["curve"][-1]
    assert (trained["state"], trained["steps"], trained["steps_asked"], trained["loss"]) == ("done", 3, 3, "grpo")
    assert trained["bytes"] == sum(path.stat().st_size for path in (real / "trained").rglob("*") if path.is_file())
    assert (evaluated["mode"], evaluated["model"]) == ("eval", "runs/trained") or Path(evaluated["model"]).is_dir()
    assert evaluated["reward"] == summary["evaluation"]["after"]["reward_mean"], "the same model on the same tasks"
    code, out = said(capsys, "list", "--search", "JUDGED")
    assert "runs/judged" in out and "runs/trained " not in out and "1 run, " in out


def test_states(runs, capsys):
    make_run(runs / "a", {"status": "done", "steps": 2}, rewards=[0.0, 1.0])
    make_run(runs / "b", {"status": "failed", "steps": 1, "error": "no disk\nat all"}, rewards=[0.5])
    make_run(runs / "seeds" / "seed-1", None, rewards=[0.1, 0.2])
    make_run(runs / "cut", None, config="mode = ")
    (make_run(runs / "torn", None) / "summary.json").write_text('{"status": "do')
    (runs / "notes").mkdir()
    with_writer = RunFolder(runs / "busy", parts=())
    with_writer.write_text("config.toml", "steps = 3\n")
    try:
        code, out = said(capsys, "list", "--json")
        states = {each["name"]: each["state"] for each in json.loads(out)}
    finally:
        with_writer.close()
    assert code == 0
    assert states == {
        **{"runs/a": "done", "runs/b": "failed", "runs/busy": "running", "runs/cut": "damaged"},
        **{"runs/seeds/seed-1": "killed", "runs/torn": "damaged"},
    }
    code, out = said(capsys, "list", "--sort", "reward", "-r")
    assert "runs/b is failed: no disk\n" in out and "runs/cut is damaged: " in out
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["runs/a", "runs/b", "runs/seeds/seed-1"]
    assert said(capsys, "list", "runs/notes") == (0, "runs/notes has no runs\n")


def test_the_steps_of_both_phases_count(runs, capsys):
    config = 'mode = "sft+rl"\nsteps = 3\n[sft]\nsteps = 24\n[env]\nname = "toy"\n'

    def listed():
        return [line.split() for line in said(capsys, "list")[1].splitlines()[1:-1]]

    folder = make_run(runs / "a", config=config)
    make_run(folder / "sft", config=config)
    (folder / "sft" / "metrics.jsonl").write_text('{"step": 0, "policy/loss": 2.5}\n{"step": 7, "policy/loss": 1.5}\n')
    assert "8 of 27 –" in " ".join(listed()[0]), "it was killed in the first phase"
    (folder / "sft" / "summary.json").write_text('{"status": "done", "steps": 24}')
    make_run(folder / "rl", config=config, rewards=[0.25, 0.5])
    assert "26 of 27 0.500" in " ".join(listed()[0])
    (folder / "rl" / "summary.json").write_text('{"status": "done", "steps": 3}')
    (folder / "summary.json").write_text('{"status": "done", "steps": 3}')
    assert "27 of 27 0.500" in " ".join(listed()[0])


def test_no_file_is_waited_for(runs, capsys):
    """A named pipe has no content until somebody writes to it."""
    names = ("config.toml", "summary.json", "metrics.jsonl", "labels.json", "manifest.json", ".lock")
    for name in names:
        folder = make_run(runs / f"without-{name}", {"status": "done"}, rewards=[0.5])
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    os.mkfifo(runs / "pipe")
    listed = []
    thread = threading.Thread(target=lambda: listed.extend(said(capsys, "list", "--json")), daemon=True)
    thread.start()
    thread.join(60)
    assert listed and listed[0] == 0
    states = {each["name"].partition("without-")[2]: each["state"] for each in json.loads(listed[1])}
    assert states == dict.fromkeys(names, "done") | dict.fromkeys(names[:2], "damaged")


def test_a_long_metrics_file_is_sampled_and_a_short_one_read_whole(tmp_path):
    lines = [json.dumps({"step": step, "pad": "x" * (step % 97)}) + "\n" for step in range(20_000)]
    (tmp_path / "long").write_text("".join(lines) + '{"step": 20000, "pa')
    steps = [line["step"] for line in sampled_lines(tmp_path / "long", 50)]
    assert steps[0] == 0 and steps[-1] == 19_999 and 45 <= len(steps) <= 51 and steps == sorted(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) < 2 * 20_000 / 50, "evenly spread"
    (tmp_path / "short").write_text("".join(lines[:30]))
    assert [line["step"] for line in sampled_lines(tmp_path / "short", 50)] == list(range(30))
    assert sampled_lines(tmp_path / "none") == []


def test_a_table_fits_its_terminal(runs, monkeypatch, capsys):
    make_run(runs / ("a" * 50), {"status": "done", "steps": 2}, rewards=[0.0, 1.0])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for columns in (80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = re.sub(r"\x1b\[[\d;]*m", "", said(capsys, "list")[1]).splitlines()
        assert max(len(line.rstrip()) for line in lines) <= columns
        assert "a" * 50 in lines[1] and "done" in lines[1] and "1.000" in lines[1] and "…" not in lines[1]
        assert ("tiny" in lines[1]) == (columns == 200) and "tags" not in lines[0], "no run has a tag"


def test_labels(runs, capsys):
    folder = make_run(runs / "a")
    assert said(capsys, "tag", "runs/a", "best", "lora", "best") == (0, "runs/a: best lora\n")
    assert said(capsys, "note", "runs/a", "for the \x1b[31mpaper") == (0, "runs/a: for the \\x1b[31mpaper\n")
    assert said(capsys, "tag", "runs/a", "--remove", "lora") == (0, "runs/a: best\n")
    run = read_run(folder)
    assert (run.tags, run.note) == (["best"], "for the \x1b[31mpaper")
    make_run(runs / "b")
    assert [each["name"] for each in json.loads(said(capsys, "list", "--tag", "best", "--json")[1])] == ["runs/a"]
    assert said(capsys, "list", "--tag", "worst") == (0, "none of 2 runs in runs\n")
    assert said(capsys, "note", "runs/a", "") == (0, "runs/a: no note\n")
    code, out = said(capsys, "tag", "runs/a", "--remove", "bset")
    assert code == 2 and "did you mean: best?" in out
    assert said(capsys, "tag", "runs/a", "two words")[0] == 2
    code, out = said(capsys, "tag", "runs/aa", "x")
    assert code == 2 and "runs/aa holds no run" in out and "did you mean: runs/a" in out


def test_runs_are_compared(real, monkeypatch, capsys):
    monkeypatch.chdir(real.parent)
    code, out = said(capsys, "compare", "runs/trained", "runs/judged", "--json")
    found = json.loads(out)
    assert code == 0 and found["settings"]["mode"] == ["rl", "eval"] and "steps" not in found["settings"]
    assert found["paired"] == [
        {"difference": 0.0, "low": None, "high": None, "tasks": 4, "left_out": 0, "verdict": None}
        | {"against": "runs/trained"}
    ]
    assert [each["when"] for each in found["evaluations"][0]] == ["before", "after"]
    code, out = said(capsys, "compare", "runs/trained", "runs/judged", "--metric", "rollout/t*")
    assert "rollout/turns" in out and "policy/entropy" not in out and "both have only 4 tasks" in out
    code, out = said(capsys, "compare", "runs/trained", "runs/judged", "--metric", "rollout/turn")
    assert code == 2 and "did you mean: rollout/turns" in out
    code, out = said(capsys, "compare", "runs/trained")
    assert code == 2 and "two runs or more" in out


def test_settings_differ_by_the_names_of_flags(runs):
    one = make_run(runs / "a", config='lr = 1e-3\nout = "x"\n[env]\nname = "toy"\ndigits = 2\n')
    two = make_run(runs / "b", config='lr = 1e-3\nout = "y"\n[env]\nname = "toy"\ndigits = 3\n[[reward]]\nname = "r"\n')
    assert differing_settings([one, two]) == {"env.digits": [2, 3], "reward[0]": [None, "r"]}


def test_a_better_run_is_called_better(runs, capsys):
    rng = np.random.default_rng(0)
    first = {str(task): float(rng.random() < 0.3) for task in range(60)}
    second = {task: float(value or rng.random() < 0.4) for task, value in first.items()} | {"60": 1.0, "61": None}
    judged(runs / "a", first), judged(runs / "b", second)
    gain = np.mean([second[task] - first[task] for task in first])
    code, out = said(capsys, "compare", "runs/a", "runs/b", "runs/a")
    assert code == 0 and f"runs/b against runs/a: better, {gain:+.3f} with the 95 % interval +0." in out
    assert "over 60 tasks of both; 1 task of one alone" in out and "runs/a against runs/a: no difference shown" in out
    code, out = said(capsys, "compare", "runs/b", "runs/a")
    assert f"runs/a against runs/b: worse, {-gain:+.3f}" in out
    (runs / "a" / "trajectories" / "eval.jsonl").write_text("{}\n")
    code, out = said(capsys, "compare", "runs/b", "runs/a")
    assert code == 2 and "eval.jsonl, line 1 cannot be read" in out


def test_few_tasks_give_no_verdict(runs, capsys):
    for count in (4, 5):
        for name, reward in (("a", 0.0), ("b", 1.0)):
            judged(runs / f"{name}{count}", {f"{count} {task}": reward for task in range(count)})
        _, out = said(capsys, "compare", f"runs/a{count}", f"runs/b{count}")
        few = f"runs/b{count} against runs/a{count}: no verdict, because both have only 4 tasks, and it takes 5"
        assert (few in out, "better" in out) == (count == 4, count == 5), out


def leaderboard(runs, rng):
    """Evaluations of four models in two environments."""
    for env in ("toys", "sums"):
        easy = {f"{env} {task}": rng.random() for task in range(50)}
        for place, model in enumerate(("small", "medium", "large", "huge")):
            skill = (2, 0.2, 3, 0.3)[place] if env == "toys" else (0.1, 1, 4, 0.6)[place]
            rewards = {task: float(rng.random() < ease ** (1 / skill)) for task, ease in easy.items()}
            config = f'mode = "eval"\nmodel = "{model}"\n[env]\nname = "{env}"\n'
            yield judged(runs / f"{model}-{env}", rewards, config, reward_stderr=0.05, failed={"timeout": place // 3})


def test_models_in_environments_are_a_leaderboard(runs, capsys):
    folders = list(leaderboard(runs, np.random.default_rng(1)))
    names = [f"runs/{folder.name}" for folder in folders]
    code, out = said(capsys, "compare", *names)
    assert code == 0, out
    board = out[out.index("leaderboard") :].splitlines()[1:6]
    assert board[0].split() == ["model", "toys", "sums", "mean"]
    means = {folder.name: json.loads((folder / "summary.json").read_text())["reward_mean"] for folder in folders}
    expected = {
        each: (means[f"{each}-toys"] + means[f"{each}-sums"]) / 2 for each in ("small", "medium", "large", "huge")
    }
    assert [row.split()[0] for row in board[1:]] == sorted(expected, key=lambda each: -expected[each])
    for row in board[1:]:
        model, *words = row.split()
        cells = f"{means[f'{model}-toys']:.3f} ± 0.050 {means[f'{model}-sums']:.3f} ± 0.050 {expected[model]:.3f}"
        assert words == cells.split()
    lines = [line for line in out.splitlines() if " against " in line]
    assert [line.split()[:3] for line in lines] == [
        [f"runs/{model}-{env}", "against", f"runs/small-{env}:"]
        for env in ("toys", "sums")
        for model in ("medium", "large", "huge")
    ]
    assert "cannot be compared" not in out
    assert "to play the failed episodes of runs/huge-toys again, type: rollouts resume runs/huge-toys" in out
    found = json.loads(said(capsys, "compare", *names, "--json")[1])
    assert [each and each["against"] for each in found["paired"]] == [
        *["runs/small-toys"] * 3, None, *["runs/small-sums"] * 3
    ]  # fmt: skip


def test_an_evaluation_of_several_environments_is_a_row(runs, capsys):
    for model, rewards in (("a", (0.25, 0.5)), ("b", (0.75, 0.25)), ("c", (0.5, None))):
        own = {env: {"reward_mean": reward, "reward_stderr": 0.1} for env, reward in zip("xy", rewards, strict=True)}
        config = f'mode = "eval"\nmodel = "{model}"\n[[env]]\nname = "x"\n[[env]]\nname = "y"\n'
        judged(runs / model, {f"{model} {task}": 1.0 for task in range(3)}, config, environments=own)
    _, out = said(capsys, "compare", "runs/a", "runs/b", "runs/c")
    board = [line.split() for line in out[out.index("leaderboard") :].splitlines()[1:5]]
    assert board[1:] == [
        ["b", "0.750", "±", "0.100", "0.250", "±", "0.100", "0.500"],
        ["a", "0.250", "±", "0.100", "0.500", "±", "0.100", "0.375"],
        ["c", "0.500", "±", "0.100", "–", "–"],
    ]


def test_evaluations_of_different_tasks(runs, capsys):
    config = 'mode = "eval"\nseed = {seed}\nmodel = "m"\n[env]\nname = "toy"\ndigits = {digits}\n'
    judged(runs / "a", {f"a {task}": 1.0 for task in range(20)}, config.format(seed=0, digits=2))
    judged(runs / "b", {f"b {task}": 0.0 for task in range(30)} | {"a 0": 1.0}, config.format(seed=1, digits=3))
    code, out = said(capsys, "compare", "runs/a", "runs/b")
    assert code == 0 and "better" not in out and "worse" not in out
    assert (
        "runs/b cannot be compared by task: it shares 1 task of its 31 with the others, because they differ in seed, "
        "env.digits; evaluate all models on the same tasks, with one --env, --seed and --eval-tasks"
    ) in out


@pytest.mark.nightly
@pytest.mark.parametrize("tasks", [12, 40])
def test_the_interval_covers_the_truth_in_95_percent_of_cases(tasks):
    """Tasks differ, and so do rewards on one task: the difference has both sources of noise."""
    rng, covered, cases = np.random.default_rng(tasks), 0, 1500
    for case in range(cases):
        ease = rng.random(tasks)
        one, two = rng.normal(ease, 0.3), rng.normal(ease * 0.8 + 0.2, 0.3)  # the truth is 0.8 / 2 + 0.2 - 1 / 2 = 0.1
        named = [dict(enumerate(each)) for each in (one, two)]
        found = comparing.paired_difference(*named, resamples=400, seed=case)
        covered += found.low <= 0.1 <= found.high
    assert 0.93 <= covered / cases <= 0.97


def test_cleaning_asks_and_leaves_what_is_needed(real, runs, capsys):
    import shutil

    for name in ("trained", "kept", "source"):
        shutil.copytree(real / "trained", runs / name)
    make_run(runs / "empty", {"status": "failed", "steps": 0})
    make_run(runs / "user", config=f'model = "{runs}/source/checkpoints/step_000001"\n')
    (runs / "user" / "trajectories").mkdir()
    (runs / "user" / "trajectories" / "step_000000.jsonl.partial").write_text("{")
    said(capsys, "tag", "runs/kept", "keep")
    before = files_of(runs)
    what = ("clean", "--checkpoints", "--trajectories", "--empty")
    code, out = said(capsys, *what)
    assert code == 2 and "add --yes" in out and files_of(runs) == before, "nothing is removed without a question"
    locked = RunFolder.reopen(runs / "trained", parts=())
    try:
        assert "runs/trained" not in said(capsys, *what)[1]
    finally:
        locked.close()
    code, out = said(capsys, *what, "--yes")
    assert code == 0 and "removed " in out
    gone = {str(path.relative_to(runs)) for path in before - files_of(runs)}
    parts = {"/".join(Path(path).parts[:3]) for path in gone}
    names = [f"step_{step:06d}.jsonl" for step in range(3)]
    beside = [f".step_{step:06d}.{kind}" for step in range(3) for kind in ("index", "times")]
    steps = {f"trajectories/{each}" for each in [*names, *beside]}
    assert parts == {
        *(f"{run}/{step}" for run in ("trained", "source") for step in steps),
        *(f"trained/checkpoints/step_00000{number}" for number in (1, 2) if number != best_of(real)),
        *(f"source/checkpoints/step_00000{number}" for number in (2,) if number != best_of(real)),
        *("empty/config.toml", "empty/metrics.jsonl", "empty/summary.json"),
        "user/trajectories/step_000000.jsonl.partial",
    }
    assert not (runs / "empty").exists()
    assert removed_steps(runs / "trained") == 3 and removed_steps(runs / "kept") == 0
    assert rollouts.resume(runs / "trained", steps=4)["steps"] == 4, "the run can be made longer"


def files_of(folder):
    return {path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "labels.json")}


def best_of(real):
    from rollouts.models.folders import complete_checkpoints
    from rollouts.training.weights.store import checkpoints_to_prune

    folder = real / "trained" / "checkpoints"
    kept = set(complete_checkpoints(folder)[:-1]) - set(checkpoints_to_prune(folder, 1))
    return int(kept.pop().name.rpartition("_")[2]) if kept else None


def test_a_listing_imports_no_torch(runs):
    make_run(runs / "a", {"status": "done", "steps": 1}, rewards=[1.0])
    words = "import sys; from rollouts.cli.app import main; main(['runs', 'list']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", words], check=True, cwd=runs.parent, stdout=subprocess.DEVNULL)


def test_a_missing_directory(runs, capsys):
    code, out = said(capsys, "list")
    assert code == 2 and "there is no directory runs" in out
    assert listing.find_runs(make_run(runs / "a")) == [runs / "a"], "a run itself"


def test_without_numpy_all_but_the_paired_comparison_is_shown(runs, monkeypatch, capsys):
    judged(runs / "a", {"one": 0.0, "two": 1.0}), judged(runs / "b", {"one": 1.0, "two": 1.0})
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert main(["runs", "compare", "runs/a", "runs/b"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "note: a paired comparison needs numpy; type: pip install numpy\n"
    assert "settings" in captured.out and "against" not in captured.out
