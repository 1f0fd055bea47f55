"""`rollouts rescore` judges saved trajectories as the run did, `rollouts run --from` trains on them as the run did.

What cannot be read, judged or trained on is refused.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import trio

from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.encoding import encode
from rollouts.errors import ConfigError, RunError
from rollouts.runs.earlier_run import run_of
from rollouts.runs.folder import episode_records
from rollouts.runs.saved import groups_of_file, open_runs
from rollouts.training.algorithms.recipes import DPO, GRPO
from rollouts.training.algorithms.selection import all_pairs
from rollouts.training.filters import any_success
from rollouts.training.loops.rl_batch import why_untrained
from rollouts.training.rollout_gen.groups import GroupRules, NamedFilter
from rollouts.training.rollout_gen.saved import SavedGroups, positions_buffer
from rollouts.training.rollout_gen.steps import StepSettings
from rollouts.types import Episode, Message, Score, Segment, Status, Task, ToolCall, Trajectory

ENVIRONMENT = f"{Path(__file__).parents[2] / 'benchmarks' / 'two_roles.py'}:Counting"
REWARDS = '''
from rollouts.types import Score


def odd(trajectory, *, scale: float = 1.0):
    """Its parts, its reason, and sometimes no value."""
    length = sum(segment.sampled_count for segment in trajectory.segments)
    if length == 0:
        return None
    return Score(scale * (len(trajectory.last_text) % 7), {"tokens": float(length)}, f"{trajectory.role} said it")


def longest(tasks, trajectories):
    """Of the whole group."""
    lengths = [len(trajectory.last_text) for trajectory in trajectories]
    return [length / (1 + max(lengths)) for length in lengths]


def of_env(env, trajectory):
    return 0.0
'''
REWARD_FLAGS = (
    "--reward env:2 --reward ./mine.py:odd:-0.5 --reward ./mine.py:longest:0.25 --reward.odd.scale 3 "
    "--on-invalid-reward zero"
)


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A run of two roles with the environment's rewards, one of a rollout and one of a group."""
    folder = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("mine.py").write_text(REWARDS)
        size = "--prompts-per-step 2 --samples-per-prompt 4 --max-tokens 6 --eval-tasks 0 --steps 2 --filter none"
        assert main(["run", "--env", ENVIRONMENT, *size.split(), *REWARD_FLAGS.split(), "--out", "live"]) == 0
    return folder


@pytest.fixture
def here(live, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(live / "mine.py", "mine.py")
    for part in ("metrics.jsonl", "config.toml", "manifest.json", "trajectories"):
        (shutil.copytree if part == "trajectories" else shutil.copy)(live / "live" / part, _made("live") / part)


def _made(name):
    Path(name).mkdir(exist_ok=True)
    return Path(name)


def lines_of(folder):
    files = sorted(Path(folder, "trajectories").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def changed(folder, change):
    """Change every line of a run's trajectories."""
    for file in Path(folder, "trajectories").glob("step_*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


def refused(capsys, *arguments):
    assert main(["rescore", *arguments]) == 2
    assert not Path("again").exists(), "nothing is left of a refused run"
    return capsys.readouterr().err


def without_given(line):
    """A line without what a live run adds after judging."""
    return {name: value for name, value in line.items() if name not in ("advantage", "dropped", "staleness")}


def test_it_equals_the_rewards_of_the_run(here, capsys):
    before = lines_of("live")

    def forget(line):
        """Only what the environment's own rewards gave is left."""
        parts = {name: part for name, part in line["parts"].items() if name in ("same", "above")}
        weights = {name: weight for name, weight in line["weights"].items() if name in parts}
        return line | {"reward": -99.0, "parts": parts, "weights": weights, "why": "forgotten"}

    changed("live", forget)
    assert main(["rescore", "live", *REWARD_FLAGS.split(), "--out", "again"]) == 0, capsys.readouterr().err
    assert [without_given(line) for line in lines_of("again")] == [without_given(line) for line in before]
    assert {line["role"] for line in before} == {"caller", "counter"}
    assert len({line["reward"] for line in before}) > 3, "the rewards differ"
    summary = json.loads(Path("again/summary.json").read_text())
    assert summary["rollouts"] == len(before) and summary["reward_mean_before"] == -99.0
    assert summary["reward_mean"] == pytest.approx(sum(line["reward"] for line in before) / len(before))


def test_other_weights_and_a_chain(here, capsys):
    before = lines_of("live")
    assert main(["rescore", "live", "--reward", "env:1", "--reward", "./mine.py:longest", "--out", "one"]) == 0
    assert main(["rescore", "one", "--reward", "env:4", "--out", "none"]) == 2, "nothing is asked"
    assert main(["rescore", "one", "--reward", "env:4", "--reward", "./mine.py:odd:0", "--out", "two"]) == 0
    for line, old in zip(lines_of("two"), before, strict=True):
        (own,) = {"caller": ["same"], "counter": ["above"]}[line["role"]]
        assert line["parts"].keys() - {"tokens"} == {own, "odd"} and line["advantage"] is None
        assert line["reward"] == 4 * old["parts"][own]
        assert line["segments"] == old["segments"] and line["messages"] == old["messages"]
    manifest = json.loads(Path("two/manifest.json").read_text())["rescored"]
    assert manifest["run"] == str(Path("one").absolute()) and manifest["rollouts"] == len(before)
    capsys.readouterr()
    assert main(["resume", "two"]) == 2 and "rollouts run --from two" in capsys.readouterr().err


def test_what_cannot_be_judged_is_refused(here, capsys):
    assert "its state" not in refused(capsys, "live", "--reward", "./mine.py:lost", "--out", "again")
    assert "names `env`" in refused(capsys, "live", "--reward", "./mine.py:of_env", "--out", "again")
    assert "--reward NAME" in refused(capsys, "live", "--reward", "env", "--out", "again")
    changed("live", lambda line: {name: value for name, value in line.items() if name != "weights"})
    both = ("--reward", "env", "--reward", "./mine.py:odd")
    assert main(["rescore", "live", *both, "--out", "late"]) == 2
    assert "earlier versions did not save" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[:-40], ["line 16", "is damaged"]),
        (lambda text: text.replace('"segments"', '"pieces"', 1), ["line 1", "missing required field `segments`"]),
        (lambda text: text.replace('"loss_mask":[', '"loss_mask":[0,', 1), ["line 1", "lengths"]),
        (lambda text: "\n".join(text.splitlines()[::2] + text.splitlines()[1::2]) + "\n", ["follow each other"]),
    ],
    ids=["cut", "field", "mask", "order"],
)
def test_a_damaged_line_is_named(here, capsys, damage, words):
    file = Path("live/trajectories/step_000001.jsonl")
    file.write_text(damage(file.read_text()))
    error = refused(capsys, "live", "--reward", "./mine.py:odd", "--out", "again")
    assert "step_000001.jsonl, line " in error and all(word in error for word in words), error


def test_another_version_and_other_folders_are_named(here, capsys):
    manifest = json.loads(Path("live/manifest.json").read_text())
    Path("live/manifest.json").write_text(json.dumps(manifest | {"rollouts": "9.9"}))
    changed("live", lambda line: line | {"status": "dreaming"})
    error = refused(capsys, "live", "--reward", "./mine.py:odd", "--out", "again")
    assert "dreaming" in error and "rollouts 9.9 wrote this run" in error
    Path("one.jsonl").write_text("{}")
    assert "holds no run" in refused(capsys, "one.jsonl", "--reward", "./mine.py:odd", "--out", "again")
    assert "did you mean: live" in refused(capsys, ".", "--reward", "./mine.py:odd", "--out", "again")
    for file in Path("live/trajectories").glob("*.jsonl"):
        file.unlink()
    assert "no trajectories of training steps" in refused(capsys, "live", "--reward", "./mine.py:odd", "--out", "again")


def test_episodes_are_read_back_as_they_were_written(tmp_path):
    """Several trajectories of an episode, rewards by turn, and roles that another model played."""
    task = Task([Message("user", "Play.")], answer={"best": 3}, id="a", env="game")

    def played(text, role=""):
        segment = Segment([5, 6, 7], [0.0, 1.0, 0.5], [0.0, -0.25, -1.5], [-1, 3, 4])
        messages = [*task.messages, Message("assistant", text, tool_calls=[ToolCall("look", {"at": 1}, "c1")])]
        metrics = {"turns": 1.0, "tool_calls": 1.0, "tool_failures": 0.0}
        return Trajectory(task, messages, [segment], Status.COMPLETED, metrics, role=role, info={"seen": [1]})

    score = Score(1.5, {"own": 1.5, "words": 4.0}, "own: well done", {"own": 1.0}, [0.5, 1.0])
    several = Episode((0, 0), task, [played("first"), played("second")], score, {"metric/depth": 2.0}, judged=0)
    failed = Trajectory(task, task.messages, status=Status.TIMEOUT, error="it took too long")
    lost = Episode((0, 1), task, [failed], Score(None, {}, "timeout: it took too long"), {"reward_failures": 1.0})
    against = Episode((1, 0), task, [played("mine", "buyer")], score, {}, 0, role="buyer")
    groups = [[several, lost], [against._replace(others=(played("theirs", "seller"),))]]
    written = [line for group in groups for episode in group for line in episode_records(episode)]
    file = tmp_path / "trajectories" / "step_000000.jsonl"
    file.parent.mkdir()
    file.write_bytes(b"".join(encode(line) + b"\n" for line in written))
    read = groups_of_file(file)
    assert [(group.number, group.role, len(group.episodes)) for group in read] == [(0, "", 2), (1, "buyer", 1)]
    assert read[0].rewards == [1.5, None] and read[0].episodes[0].trajectory.last_text == "first"
    assert read[0].turn_rewards([1.5, None]) == [[0.5, 1.0], []] and read[1].episodes[0].others[0].role == "seller"
    again = [line for group in read for episode in group.episodes for line in episode_records(episode)]
    assert [encode(line) for line in again] == [encode(line) for line in written]


# --- run --from -------------------------------------------------------------------------------------------------------

TRAINED = ("policy/loss", "policy/entropy", "optim/grad_norm", "reward/mean", "reward/std", "role/caller/reward")


def train(capsys, *flags, out="trained", code=0):
    """Train on `live`, without an evaluation; returns the lines of metrics.jsonl, or the error."""
    command = ["run", "--from", "live", "--eval-tasks", "0", "--filter", "none", "--out", out, *flags]
    assert main(command) == code, capsys.readouterr().err
    return metrics_of(out) if code == 0 else capsys.readouterr().err


def metrics_of(folder):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def test_a_step_on_saved_trajectories_is_the_step_of_the_run(here, capsys):
    Path("live/trajectories/step_000001.jsonl").unlink()
    (offline,) = train(capsys, "--steps", "1", "--prompts-per-step", "4", "--correction", "none")
    first = metrics_of("live")[0]
    assert {name: offline[name] for name in TRAINED} == pytest.approx({name: first[name] for name in TRAINED}, rel=1e-4)
    assert offline["mismatch/abs_logp_mean"] < 1e-4, "the stored logprobs are those of these weights"
    assert not [name for name in offline if name.startswith(("staleness", "perf/gen", "time/generate", "rollout/lat"))]
    manifest = json.loads(Path("trained/manifest.json").read_text())["from"]
    assert [(each["run"], each["groups"], each["rollouts"]) for each in manifest] == [
        (str(Path("live").absolute()), 4, 16)
    ]
    Path("live").rename("gone")
    assert run_of("trained").settings.env == ENVIRONMENT, "a run can be read without the one that it was trained on"
    read, saved = ([line["segments"][0]["tokens"] for line in lines_of(run)] for run in ("trained", "gone"))
    assert sorted(read) == sorted(saved)


def test_the_loss_sees_the_stored_logprobs(here, capsys):
    def shifted(line):
        for segment in line["segments"]:
            segment["logprobs"] = [
                lp - 0.5 if live else lp for lp, live in zip(segment["logprobs"], segment["loss_mask"], strict=True)
            ]
        return line

    Path("live/trajectories/step_000001.jsonl").unlink()
    changed("live", shifted)
    (line,) = train(capsys, "--steps", "1", "--prompts-per-step", "4")
    assert line["mismatch/abs_logp_mean"] == pytest.approx(0.5, abs=1e-4)
    assert line["mismatch/weight_mean"] > 1.2, "a correction weighs tokens of other weights"


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_next_groups(here, capsys):
    whole = train(capsys, "--prompts-per-step", "3", "--loss", "dpo", "--steps", "3", "--checkpoint-every", "1")
    assert main(["resume", "trained", "--checkpoint", "step_000001"]) == 0, capsys.readouterr().err
    same = ("policy/loss", "reward/mean", "optim/grad_norm", "data/epoch")
    assert [[line[name] for name in same] for line in metrics_of("trained")] == [
        [line[name] for name in same] for line in whole
    ]
    assert len({line["reward/mean"] for line in whole}) == 3 and whole[-1]["data/epoch"] == 1.0
    shutil.copy("live/trajectories/step_000001.jsonl", "live/trajectories/step_000002.jsonl")
    capsys.readouterr()
    assert main(["resume", "trained", "--steps", "4"]) == 2
    assert "12 groups" in capsys.readouterr().err


def test_rejection_keeps_the_best_of_each_group_by_new_rewards(here, capsys):
    """The rewards are those of the rescored folder, and one rollout of each group is trained on."""
    assert main(["rescore", "live", "--reward", "./mine.py:longest", "--out", "again"]) == 0
    flags = "--from again --loss rft --select top --steps 1 --prompts-per-step 8 --eval-tasks 0 --out best"
    assert main(["run", *flags.split()]) == 0, capsys.readouterr().err
    (line,) = metrics_of("best")
    rewards = [each["reward"] for each in lines_of("again")]
    assert line["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert {each["advantage"] for each in lines_of("best")} == {0.0, 1.0}
    assert sum(each["advantage"] for each in lines_of("best")) == 8, "one rollout of each group"


def test_where_nothing_is_left_the_selection_is_named(here, capsys):
    error = train(capsys, "--steps", "1", "--loss", "rft", "--select.threshold", "900", code=1)
    assert "nothing is left to train on of 8 saved groups" in error and "8 x select_reward_at_least" in error
    settings = resolve({"from_run": "live"}).settings
    saved = open_runs(settings, [])

    def step(algorithm, filters=()):
        source = SavedGroups(
            positions_buffer(8, 0),
            8,
            saved.group,
            StepSettings(3),
            why_untrained=lambda group, step: why_untrained(group, algorithm, step),
            rules=GroupRules(filters),
        )
        return trio.run(source.generate_batch)

    with pytest.raises(RunError, match="8 x no_success"):
        step(GRPO, [NamedFilter("any_success", any_success, {"threshold": 900.0})])
    with pytest.raises(RunError, match="8 x pairs_all_pairs"):
        step(DPO._replace(pairs=partial(all_pairs, margin=900.0)))
    best = [max(group.rewards) for group in map(saved.group, range(8))]
    some = step(GRPO, [NamedFilter("any_success", any_success, {"threshold": min(best)})])
    assert len(some.kept) == min(3, sum(each > min(best) for each in best)) > 0
    assert all(max(group.rewards) > min(best) for group in some.kept)
    assert len({group.number for group in some.groups}) == len(some.groups), "each has a number of its own"


def test_settings_that_do_not_fit_are_refused(here, capsys):
    refusals = {
        ("--temperature", "0.5"): "was sampled at temperature 1.0",
        ("--staleness", "1"): "nothing is sampled",
        ("--mode", "sft+rl"): "reads no trajectories",
        ("--from", "nowhere"): "holds no run",
    }
    for flags, words in refusals.items():
        assert words in train(capsys, *flags, code=2), flags
        assert not Path("trained").exists()
    changed(
        "live",
        lambda line: (
            line | {"segments": [each | {"tokens": [9999] * len(each["tokens"])} for each in line["segments"]]}
        ),
    )
    assert "has another tokenizer" in train(capsys, code=2)


def test_groups_of_held_out_tasks_are_left_out(here):
    """Two runs are read together; the held-out tasks of the new one are not trained on."""
    shutil.copytree("live", "second")
    settings = resolve({"from_run": ["live", "second"]}).settings
    tasks = open_runs(settings, []).group(0).task, open_runs(settings, []).group(15).task
    saved = open_runs(settings, tasks[:1])
    left = [saved.group(position) for position in range(len(saved.places))]
    assert saved.held_out + len(left) == 16 and saved.held_out >= 4, "both roles of both runs"
    assert tasks[0].key not in {group.task.key for group in left}
    with pytest.raises(ConfigError, match="--eval-tasks 0"):
        open_runs(settings, [group.task for group in (open_runs(settings, []).group(place) for place in range(16))])
