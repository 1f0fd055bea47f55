"""The main job, end to end on the tiny model: it learns, from the reward; one seed is one result; the folder holds.

Runs of more than a few steps are commands in processes of their own, on one thread; the shorter ones go through the
Python interface. Most of those processes are forks (forks.py); one of them is a new interpreter.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import forks
import pytest

import rollouts
from rollouts.doors import HOMES

CONFIGS = Path(__file__).parents[1] / "configs"
SHORT = {"prompts_per_step": 4, "samples_per_prompt": 4, "eval_tasks": 4, "steps": 3, "max_tokens": 24}
LEARNING = ["--steps", 24]  # enough to learn; the controls get as many
TIMED = ("time/", "perf/", "sync/seconds", "rollout/latency")

MODULES_MAX = 170
"""The modules of rollouts that a run with one process and one engine loads: those that it calls, the faces of their
packages, and the parts of the other algorithms. Servers, workers, data, exports and displays are for other runs.
"""
CORE_ALONE = f"""\
import sys

sys.path[:] = ["core", *(folder for folder in sys.path if folder not in {[*map(str, HOMES.values())]})]
from rollouts.cli import main

code = main(sys.argv[1:])
with open("modules.txt", "w") as file:
    file.writelines(name + "\\n" for name in sys.modules if (name + ".").startswith("rollouts."))
sys.exit(code)
"""

CONTROLS = '''\
import hashlib


def coin(trajectory, *, seed: int = 0):
    """0 or 1 by the text of the trajectory: nothing about the task can be learned from it."""
    text = repr((seed, trajectory.task.prompt, [(m.role, m.text, m.tool_calls) for m in trajectory.messages]))
    return float(hashlib.blake2b(text.encode()).digest()[0] & 1)


def entropy_only(entropy):
    """Lowers the entropy, and knows no reward."""
    return entropy


def negative_entropy(entropy):
    return -entropy


def shortest(tasks, trajectories):
    """A group reward: 1 for the shortest reply of the group."""
    lengths = [trajectory.sampled_count for trajectory in trajectories]
    return [float(length == min(lengths)) for length in lengths]


def says_seven(trajectory):
    return float("7" in trajectory.last_text)
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The controls lie beside the run."""
    (tmp_path / "controls.py").write_text(CONTROLS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments, name="run", is_fork=True):
    """Run the command on one thread; returns its standard output. A new interpreter has the core alone, and writes
    modules.txt.
    """
    words = [sys.executable, *(["-m", "rollouts"] if is_fork else ["-c", CORE_ALONE]), name, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if is_fork:
        done = forks.run(words, timeout=240, env=environment)
    else:
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a good run says nothing on stderr"
    return done.stdout


def learn(out, *arguments, eval_tasks=128):
    command("--env", "calculator", "--out", out, "--eval-tasks", eval_tasks, "--seed", 0, *arguments)
    return summary_of(out)


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def lines_of(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def untimed(folder):
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines_of(folder)]


def records_of(folder):
    paths = sorted((Path(folder) / "trajectories").glob("step_*"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def rewards(summary, name="reward_mean"):
    return summary["evaluation"]["before"][name], summary["evaluation"]["after"][name]


# --- it learns, and from the reward ---------------------------------------------------------------------------------


@pytest.mark.nightly  # .ci/run trains the whole job
def test_it_learns(here):
    summary = learn("out", *LEARNING, "--max-tokens", 64)
    before, after = rewards(summary)
    assert before <= 0.5 and after >= before + 0.3
    assert (summary["status"], summary["steps"]) == ("done", 24)
    assert summary["wall_seconds"] > 0 and summary["cpu_seconds"] > 0
    assert summary["evaluation"]["after"]["parts"]["correct"] == after


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [
        ["--reward", "./controls.py:coin"],
        ["--loss", "./controls.py:entropy_only"],
        ["--loss", "./controls.py:negative_entropy"],
    ],
    ids=lambda arguments: arguments[-1].partition(":")[2],
)
def test_the_controls_learn_nothing(here, arguments):
    """The held-out score is always that of the environment: `correct`."""
    watch = ["--reward", "env:0"] if "--reward" in arguments else []
    summary = learn("out", *LEARNING, "--max-tokens", 32, *arguments, *watch, eval_tasks=64)
    before, after = (summary["evaluation"][when]["parts"]["correct"] for when in ("before", "after"))
    assert after < before + 0.1
    greedy_before, greedy_after = (summary["evaluation"][w]["greedy_parts"]["correct"] for w in ("before", "after"))
    assert greedy_after < greedy_before + 0.1


@pytest.mark.nightly
def test_lora_learns(here):
    summary = learn("out", *LEARNING, "--lora-rank", 8, "--max-tokens", 64)
    before, after = rewards(summary)
    assert after >= before + 0.2


@pytest.mark.nightly
def test_supervised_training(here):
    arguments = ["--env", "calculator", "--out", "out", "--steps", 40, "--lr", "1e-3", "--eval-tasks", 64]
    command(*arguments, name="sft")
    losses = [line["policy/loss"] for line in lines_of("out")]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    before, after = rewards(summary_of("out"))
    assert after >= before + 0.3, "the demonstrations use the tool"
    assert summary_of("out")["steps"] == 40


# --- one seed, one result -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_seed_is_one_result(here):
    """More evaluation tasks than live episodes too: the batches of the engine depend on counts only. One run has a hash
    seed of its own, and no package beside `rollouts`.
    """
    (here / "core").mkdir()
    (here / "core" / "rollouts").symlink_to(HOMES["rollouts"] / "rollouts", target_is_directory=True)
    size = ["--env", "calculator", "--steps", 2, "--prompts-per-step", 4, "--eval-tasks", 30, "--max-tokens", 24]
    size += ["--concurrency", 24]
    command(*size, "--seed", 3, "--out", "a", "--display", "none", is_fork=False)
    loaded = sorted((here / "modules.txt").read_text().split())
    assert len(loaded) <= MODULES_MAX, f"move what this run does not call out of its way: {loaded}"
    command(*size, "--seed", 3, "--out", "b")
    command(*size, "--seed", 4, "--out", "c", "--eval-tasks", 0)
    command(here / "a" / "config.toml", "--out", "d")
    assert len(lines_of("a")) == 2
    assert untimed("a") == untimed("b") == untimed("d") != untimed("c")
    assert lines_of("a") != lines_of("b"), "the control: times differ"
    strip = {"metrics"}  # latencies
    first, second = ([{k: v for k, v in r.items() if k not in strip} for r in records_of(n)] for n in "ab")
    assert first == second
    for name in "bd":
        assert summary_of("a")["evaluation"] == summary_of(name)["evaluation"]
    assert (here / "a" / "config.toml").read_text() == (here / "d" / "config.toml").read_text()


def test_held_out_tasks_are_never_trained(here):
    """One-digit products: there are a hundred of them, so that the draws do meet."""
    from rollouts.config.resolving import resolve
    from rollouts.runs.plan import make_plan

    settings = {"env": {"name": "calculator", "digits": 1}, **SHORT, "eval_tasks": 60, "steps": 4, "max_tokens": 8}
    rollouts.run(**settings, out="out")
    held_out = {task.prompt for task in make_plan(resolve(settings)).eval_tasks()}
    trained = {record["task"]["prompt"] for record in records_of("out")}
    assert len(held_out) == 60 and len(trained) > 10
    assert not held_out & trained


# --- what the folder holds ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that several tests read."""
    out = tmp_path_factory.mktemp("run") / "out"
    summary = rollouts.run(env="calculator", **SHORT, filter=["nonzero_std"], out=str(out))
    assert summary == summary_of(out) | {"wall_seconds": summary["wall_seconds"]}
    return out


def test_trained_ids_are_sampled_ids(folder):
    from rollouts.models.loading import load_tokenizer

    tokenizer = load_tokenizer("tiny")
    records = records_of(folder)
    assert len(records) == 3 * 16
    sampled = 0
    for record in records:
        for segment in record["segments"]:
            streams = [segment[name] for name in ("tokens", "loss_mask", "logprobs", "versions")]
            assert len({len(stream) for stream in streams}) == 1
            for _, weight, logprob, version in zip(*streams, strict=True):
                assert (weight > 0) == (version >= 0)
                assert logprob <= 0 and math.isfinite(logprob) and (weight > 0 or logprob == 0)
                sampled += weight > 0
        text = tokenizer.decode(record["segments"][0]["tokens"])
        assert record["task"]["prompt"] in text and record["messages"][-1].get("content", "") in text
        assert (record["advantage"] is None) == (record["dropped"] is not None)
    per_step = [line["rollout/tokens"] * 16 for line in lines_of(folder)]
    assert sampled == pytest.approx(sum(per_step))


def test_the_sampler_is_the_model(folder):
    assert all(line["mismatch/abs_logp_max"] <= 1e-4 for line in lines_of(folder) if "mismatch/abs_logp_max" in line)


def test_the_folder_explains_itself(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {
        ".lock",
        "checkpoints",
        "config.toml",
        "manifest.json",
        "metrics.jsonl",
        "summary.json",
        "trajectories",
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["seed"] == 0 and manifest["distributions"]["torch"]
    found = {(each["kind"], each["name"], each["distribution"]) for each in manifest["components"]}
    assert ("losses", "grpo", "rollouts-rl") in found
    assert ("environments", "calculator", "rollouts-calculator") in found
    assert not list(folder.rglob("*.partial"))


def test_the_checkpoint_loads_in_transformers(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rollouts.models.loading import TINY_PATH

    path = folder / summary_of(folder)["checkpoint"]
    tokens = AutoTokenizer.from_pretrained(path).apply_chat_template(
        [{"role": "user", "content": "What is 3 * 4?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        first, second, start = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(tokens).logits
            for each in (path, path, TINY_PATH)
        )
    assert torch.equal(first, second)
    assert (first - start).abs().max() > 1e-4, "it was trained"


def test_a_checkpoint_is_a_model_to_start_from(folder):
    path = folder / summary_of(folder)["checkpoint"]
    again = rollouts.run(env="calculator", model=str(path), **SHORT | {"steps": 0}, out="again")
    assert rewards(again)[0] == rewards(again)[1] == rewards(summary_of(folder))[1]


# --- other ways to run ----------------------------------------------------------------------------------------------


def test_checkpoints_and_evaluations_on_the_way(here):
    rollouts.run(env="calculator", **SHORT | {"steps": 4}, eval_every=2, checkpoint_every=2, out="out")
    assert sorted(path.name for path in (here / "out" / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    found = [sorted(name for name in line if name.startswith("eval/")) for line in lines_of("out")]
    evaluated = ["eval/greedy_mean", "eval/metric/used_tool", "eval/reward_mean", "eval/reward_part/correct"]
    assert found == [evaluated, evaluated, [], evaluated], "before, on the way, and after"


@pytest.mark.slow
def test_the_environment_prompts(here):
    rows = [{"prompt": f"Say {number}.", "answer": number, "id": number} for number in range(40)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = ["--steps", 2, "--prompts-per-step", 4, "--samples-per-prompt", 4, "--max-tokens", 32]
    out = command(
        "--env", "prompts", "--data", "rows.jsonl", "--reward", "./controls.py:says_seven", "--out", "o", *size
    )
    assert "says_seven" in out
    assert all("reward_part/says_seven" in line for line in lines_of("o"))


def test_a_group_reward_is_mixed_and_logged(here):
    rollouts.run(env="calculator", **SHORT, reward=["env:1", "short=./controls.py:shortest:0.5"], out="out")
    for line in lines_of("out"):
        assert 0 < line["reward_part/short"] <= 1
    for record in records_of("out"):
        assert record["reward"] == record["parts"]["correct"] + 0.5 * record["parts"]["short"]
    assert summary_of("out")["evaluation"]["after"]["parts"]["short"] == 1.0, "alone in its group it is the shortest"


def test_the_pack_of_filters_drops_groups_and_says_why(folder):
    lines = lines_of(folder)
    assert sum(line.get("group/drop/zero_std", 0) for line in lines) > 0
    for line in lines:
        assert line["group/kept_frac"] == 1 - line.get("group/drop/zero_std", 0) / 4


def test_no_steps_and_no_evaluation(here):
    summary = rollouts.run(env="calculator", steps=0, eval_tasks=0, out="out")
    assert summary["evaluation"] == {"before": None, "after": None} and summary["steps"] == 0
    assert (here / "out" / summary["checkpoint"] / "config.json").exists()


def test_dr_grpo_divides_by_the_longest_reply_allowed(here, monkeypatch):
    from rollouts.training.algorithms import aggregation

    seen = []
    right = aggregation.dr_grpo

    def watched(masks, rollout_index, max_tokens):
        seen.append(max_tokens)
        return right(masks, rollout_index, max_tokens)

    monkeypatch.setattr(aggregation, "dr_grpo", watched)
    settings = SHORT | {"steps": 1, "eval_tasks": 0}
    summary = rollouts.run(env="calculator", **settings, aggregation="dr_grpo", out="out")
    assert summary["status"] == "done" and seen[-1] == 24  # before that it was tried on invented numbers
    assert lines_of("out")[0]["optim/skipped"] == 0.0


def test_without_a_logger(here):
    rollouts.run(env="calculator", **SHORT | {"steps": 1}, logger=[], out="out")
    assert not (here / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["calculator_tiny.toml", "qwen3_8b_eight_gpus.toml"])  # all: runs/test_presets.py
def test_a_dry_run_of_a_preset_writes_nothing(here, name):
    out = command(CONFIGS / name, "--dry-run")
    assert "ok: everything was checked; no model was loaded, " in out
    assert [path.name for path in here.iterdir()] == ["controls.py"]
