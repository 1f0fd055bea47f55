"""Mode sft+rl: reinforcement begins with what the supervised phase has left; a mistake in either is told first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import rollouts
from rollouts.cli import main
from rollouts.config.files import load_file
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, RunError, UserError
from rollouts.models.loading import load_hf_model, load_tokenizer
from rollouts.runs import run as run_resolved
from rollouts.runs import sft_then_rl as room
from rollouts.runs.folder import RunFolder
from rollouts.runs.plan import make_plan
from rollouts.runs.sft_then_rl import phases

PARTS = '''\
from dataclasses import dataclass
from pathlib import Path

from rollouts import Message, Task, reward, tool
from rollouts.errors import UserError


class Stop:
    """Fails in the mode that the file `stop` says, if there is one."""

    in_step = True

    def __init__(self, settings, *, refuses: bool = False):
        if refuses:
            raise UserError("--logger: no key")
        self.mode = settings["mode"]

    def log(self, metrics, step):
        if Path("stop").exists() and Path("stop").read_text() == f"{self.mode} {step}":
            raise OSError("disk full")

    def close(self):
        pass


@dataclass
class Teacher:
    """Demonstrations only, and nothing that could be judged."""

    word: str = "seven"

    def tasks(self, split, rng):
        return ["Say it."]

    def demonstrations(self, split, rng):
        while True:
            yield [Message("user", "Say it."), Message("assistant", self.word)]


class NoDemonstrations:
    def tasks(self, split, rng):
        return [str(n) for n in range(100)]

    @reward
    def right(self, task):
        return 1.0
'''

SMALL = {
    "env": "calculator",
    "mode": "sft+rl",
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "eval_tasks": 2,
    "max_tokens": 16,
    "logger": ["jsonl", "./parts.py:Stop"],
    "out": "out",
}
TIMED = ("time/", "perf/", "sync/seconds", "rollout/latency")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(**settings):
    return rollouts.run(**SMALL | settings)


def flags(**settings):
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def command(*arguments, code=0):
    own = flags(**{name: value for name, value in SMALL.items() if name != "logger"})
    assert main(["run", *own, "--logger", "jsonl", "--logger", "./parts.py:Stop", *arguments]) == code


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def lines_of(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


def weights_of(folder):
    return load_hf_model(str(folder), device="cpu").state_dict()


def same(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


# --- the settings of the phases -------------------------------------------------------------------------------------


def test_the_phases_are_runs_by_themselves():
    resolved = resolve(
        {
            "env": "calculator",
            "mode": "sft+rl",
            "out": "o",
            "loss": {"name": "ppo", "clip_high": 0.3},
            "critic": "head",
            "minibatches": 2,
            "lr": 1e-5,
            "aggregation": "rollout_mean",
            "filter": ["nonzero_std"],
            "training": {"name": "torch", "warmup_steps": 3},
            "sft": {"steps": 7, "training": {"weight_decay": 0.1}, "lora_rank": 4},
        }
    )
    before = resolve({"env": "calculator"})
    sft, rl = phases(resolved)
    assert (sft.settings.mode, sft.settings.out, sft.settings.steps, sft.settings.lora_rank) == ("sft", "o/sft", 7, 4)
    assert (sft.settings.loss, sft.settings.lr, sft.settings.critic, sft.settings.minibatches) == ("sft", None, "", 1)
    assert sft.settings.aggregation == "" and sft.settings.filter == before.settings.filter
    assert sft.components["training"][0].settings == {"warmup_steps": 3, "weight_decay": 0.1}
    assert sft.components["env"] == resolved.components["env"] and sft.settings.eval_tasks == 512
    assert (rl.settings.mode, rl.settings.out, rl.settings.steps, rl.settings.lora_rank) == ("rl", "o/rl", 120, 0)
    assert (rl.settings.loss, rl.settings.critic, rl.settings.sft) == ("ppo", "head", {})
    assert rl.components == resolved.components and resolved.settings.sft["steps"] == 7
    assert resolve({"mode": "sft+rl"}).settings.loss == "grpo"


def test_each_phase_has_a_plan_of_its_own():
    with pytest.raises(ConfigError, match="two runs"):
        make_plan(resolve(SMALL))
    assert [make_plan(each).settings.mode for each in phases(resolve(SMALL))] == ["sft", "rl"]


def test_both_phases_have_the_sandbox_of_the_run():
    given = {"name": "subprocess", "memory_gib": 1.0}
    for phase in phases(resolve({"mode": "sft+rl", "env": "python", "sandbox": given})):
        assert phase.components["sandbox"][0][:2] == ("subprocess", {"memory_gib": 1.0})


def test_demonstrations_of_another_environment():
    tree = {"env": {"name": "calculator", "digits": 3}, "mode": "sft+rl", "data": "rows.jsonl"}
    sft, rl = phases(resolve(tree | {"sft": {"env": {"digits": 1}}}))
    assert sft.components["env"][0][:2] == ("calculator", {"digits": 1}) and sft.settings.eval_tasks == 512
    assert rl.components["env"][0].settings == {"digits": 3} and sft.settings.data == "rows.jsonl"
    sft, rl = phases(resolve(tree | {"sft": {"env": "./parts.py:Teacher"}}))
    assert sft.components["env"][0][:2] == ("./parts.py:Teacher", {})
    assert (sft.settings.data, sft.settings.eval_tasks) == ("", 0), "the run's rewards are not for it"
    assert (rl.settings.data, rl.settings.eval_tasks) == ("rows.jsonl", 512)


# --- running them ---------------------------------------------------------------------------------------------------


def test_reinforcement_begins_with_the_checkpoint(here):
    """Without a step of its own it leaves what it was given."""
    summary = run(steps=0, sft={"steps": 3, "prompts_per_step": 8})
    one, two = here / "out/sft/checkpoints/step_000003", here / "out/rl/checkpoints/step_000000"
    assert same(weights_of(one), weights_of(two)) and not same(weights_of(one), weights_of("tiny"))
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert load_tokenizer(str(two)).chat_template == load_tokenizer("tiny").chat_template
    sft, rl = (summary_of(here / "out" / name) for name in ("sft", "rl"))
    assert sft["evaluation"]["after"] == rl["evaluation"]["before"]
    assert summary["evaluation"] == {"before": sft["evaluation"]["before"], "after": rl["evaluation"]["after"]}
    assert summary["phases"] == {"sft": sft, "rl": rl} and summary == summary_of("out")
    for spent in ("cpu_seconds", "wall_seconds"):
        assert 0 < sft[spent] + rl[spent] <= summary[spent], "each phase counts its own"
    assert (summary["status"], summary["checkpoint"]) == ("done", "rl/checkpoints/step_000000")
    assert {path.name for path in Path("out").iterdir()} == {".lock", "config.toml", "summary.json", "sft", "rl"}
    assert resolve(load_file("out/rl/config.toml")[0]).settings.lr == 3e-4, "that of tiny, written down"


@pytest.mark.slow
def test_lora_begins_with_the_merged_model(here):
    run(steps=0, lora_rank=2, sft={"steps": 3, "prompts_per_step": 8, "lr": 1e-2})
    one, two = here / "out/sft/checkpoints/step_000003", here / "out/rl/checkpoints/step_000000"
    assert (one / "adapter_config.json").exists() and (two / "adapter_config.json").exists()
    assert json.loads((two / "adapter_config.json").read_text())["base_model_name_or_path"] == str(one)
    assert same(weights_of(one), weights_of(two)) and not same(weights_of(one), weights_of("tiny"))
    greedy = [summary_of(here / "out" / name)["evaluation"] for name in ("sft", "rl")]
    assert greedy[0]["after"]["greedy_mean"] == greedy[1]["before"]["greedy_mean"]


@pytest.mark.nightly
def test_an_adapter_after_full_training_and_the_other_way(here):
    run(steps=1, lora_rank=2, sft={"steps": 1, "lora_rank": 0})
    assert (here / "out/sft/checkpoints/step_000001/model.safetensors").exists()
    assert (here / "out/rl/checkpoints/step_000001/adapter_model.safetensors").exists()
    run(steps=1, sft={"steps": 1, "lora_rank": 2}, out="other")
    assert (here / "other/sft/checkpoints/step_000001/adapter_model.safetensors").exists()
    assert (here / "other/rl/checkpoints/step_000001/model.safetensors").exists()


@pytest.mark.slow
def test_it_is_two_runs_one_after_the_other(here):
    """The same as `rollouts sft` and then `rollouts run --model`; and its config repeats it."""
    run(sft={"steps": 3})
    single = {name: value for name, value in SMALL.items() if name != "mode"}
    rollouts.run(**single | {"mode": "sft", "steps": 3, "out": "one"})
    rollouts.run(**single | {"model": "one/checkpoints/step_000003", "lr": 3e-4, "out": "two"})
    assert lines_of("out/sft") == lines_of("one") and len(lines_of("out/sft")) == 3
    assert lines_of("out/rl") == lines_of("two") and len(lines_of("out/rl")) == 2
    rollouts.run("out/config.toml", out="again")
    assert lines_of("again/rl") == lines_of("out/rl")
    assert Path("again/config.toml").read_text() == Path("out/config.toml").read_text()
    rollouts.run("out/rl/config.toml", out="rl_again")
    assert lines_of("rl_again") == lines_of("out/rl")


def test_the_command_announces_both_phases(capsys):
    command("--sft.steps", "1", "--sft.env", "./parts.py:Teacher", "--sft.env.word", "nine")
    out = capsys.readouterr().out
    assert "./parts.py:Teacher · sft · tiny · 1 step of 2 prompts" in out
    assert "writing to out/sft" in out and "writing to out/rl" in out and "calculator · grpo" in out
    assert 'word = "nine"' in Path("out/config.toml").read_text()
    following = [line for line in out.splitlines() if line.startswith("next: ")]
    assert following == ["next: rollouts chat out, rollouts eval out, rollouts export out models/out"]
    assert out.splitlines()[-1] == following[0]


def test_a_dry_run_describes_both(here, capsys):
    command("--sft.steps", "5", "--dry-run")
    out = capsys.readouterr().out
    assert out.index("# The supervised phase") < out.index('mode = "sft"') < out.index("# Reinforcement")
    assert 'mode = "rl"' in out and "steps = 5" in out and "steps = 2" in out
    first, second = out.split("# Reinforcement")
    tried = [text.partition("# Tried out\n")[2] for text in (first, second)]
    assert all("a scripted episode" in each and "a small training step" in each for each in tried)
    assert "loss: grpo (rollouts-rl 0.1.0)" in second
    assert '[loss]\nname = "sft"' in first and '[loss]\nname = "grpo"' in second
    assert [path.name for path in here.iterdir()] == ["parts.py"]


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--loss.clip-hihg", "0.3"], "did you mean: --loss.clip-high?"),
        (["--kl", "k1_loss"], "k1_loss"),
        (["--reward", "lost"], "lost"),
        (["--sft.loss", "grpo"], "error: the supervised phase: --loss grpo asks for"),
        (["--sft.stpes", "3"], "did you mean: --sft.steps?"),
        (["--sft.out", "x"], "'out' cannot differ in the supervised phase"),
        (["--sft.env.digitss", "3"], "did you mean"),
        (["--sft.training", "lost"], "error: the supervised phase: "),
        (["--env", "./parts.py:NoDemonstrations"], "NoDemonstrations has no demonstrations; write `def demonstrations"),
        (["--env", "none"], "no environment was named"),
        (["--model", "./lost"], "there is no folder ./lost"),
        (["--training.dtype", "int8"], "dtype"),
        (["--mode", "rl", "--sft.steps", "3"], "this setting is for the supervised phase of mode sft+rl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_before_anything_is_written(here, arguments, words, capsys):
    command(*arguments, code=2)
    assert words in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["parts.py"]


def test_a_folder_that_exists_is_kept(here, capsys):
    (here / "out").mkdir()
    (here / "out" / "thesis.txt").touch()
    command(code=2)
    assert "exists already and is not overwritten" in capsys.readouterr().err
    assert [path.name for path in (here / "out").iterdir()] == ["thesis.txt"]


def test_a_launcher_is_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"--training\.processes"):
        run_resolved(resolve(SMALL))


# --- going on -------------------------------------------------------------------------------------------------------


def stopped(at, **settings):
    Path("stop").write_text(at)
    with pytest.raises(RunError) as caught:
        run(checkpoint_every=1, sft={"steps": 3}, **settings)
    Path("stop").unlink()
    return str(caught.value)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run with one supervised step and a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "parts.py").write_text(PARTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(checkpoint_every=1, sft={"steps": 1})
    return folder / "out"


@pytest.fixture(scope="module", params=[0, pytest.param(2, marks=pytest.mark.nightly)], ids=["full", "lora"])
def unbroken(request, tmp_path_factory):
    """A LoRA rank, and a run with it that nothing stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "parts.py").write_text(PARTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(checkpoint_every=1, sft={"steps": 3}, lora_rank=request.param, out="whole")
    return request.param, folder / "whole"


@pytest.mark.slow
@pytest.mark.parametrize(
    "at", ["sft 2", *(pytest.param(at, marks=pytest.mark.nightly) for at in ("sft 0", "rl 0", "rl 1"))]
)
def test_it_goes_on_where_it_stopped(at, unbroken, capsys):
    rank, whole = unbroken
    message = stopped(at, lora_rank=rank)
    phase = at.split()[0]
    assert message.count("go on with: rollouts resume out") == 1 and f"rollouts resume out/{phase}" not in message
    summary = summary_of("out")
    assert summary["status"] == "failed" and "disk full" in summary["error"]
    assert (summary["phases"]["rl"] is None) == (phase == "sft")
    capsys.readouterr()
    assert main(["resume", "out"]) == 0
    assert ("writing to out/sft" in capsys.readouterr().out) == (phase == "sft"), "what is done is left alone"
    for name in ("sft", "rl"):
        assert lines_of(f"out/{name}") == lines_of(whole / name)
        assert summary_of("out")["phases"][name]["evaluation"] == summary_of(whole)["phases"][name]["evaluation"]
    assert summary_of("out")["status"] == "done"
    assert main(["resume", "out"]) == 0
    assert "is finished" in capsys.readouterr().out


@pytest.mark.slow
def test_a_copy_and_a_run_that_was_moved_go_on(here):
    """The model of a copy is the checkpoint of its own first phase, though that of the first run is there still."""
    stopped("rl 1", lora_rank=2)
    shutil.copytree("out", "copy")
    assert main(["resume", "copy"]) == 0
    (here / "out").rename(here / "elsewhere")
    assert main(["resume", "elsewhere"]) == 0
    assert lines_of("copy/rl") == lines_of("elsewhere/rl")


@pytest.mark.slow
def test_another_first_phase_is_another_model(here, capsys):
    stopped("rl 1")
    assert main(["resume", "out/sft", "--steps", "4"]) == 0
    capsys.readouterr()
    assert main(["resume", "out/rl"]) == 0, "its config says which"
    shutil.copytree("out", "copy")
    Path("copy/rl/summary.json").unlink()
    text = Path("copy/config.toml").read_text()
    Path("copy/config.toml").write_text(text.replace("steps = 3", "steps = 4"))
    assert main(["resume", "copy"]) == 2
    error = capsys.readouterr().err
    assert "was written by a run of the model" in error and "copy/sft/checkpoints/step_000004" in error


def test_a_second_phase_that_is_killed_as_it_goes_back(here, short, monkeypatch, capsys):
    """Then the whole is not finished either."""
    shutil.copytree(short, "out")
    before = lines_of("out/rl")

    class Killed(BaseException):
        pass

    def dies(*arguments, **settings):
        raise Killed

    def dies_later(plan, observer, now, started, home, checkpoint, on_begin, **also):
        on_begin()
        raise Killed

    monkeypatch.setattr(room, "_train_phase", dies_later)
    monkeypatch.setattr(RunFolder, "write_json", dies)
    with pytest.raises(Killed):
        rollouts.resume("out", checkpoint="step_000001")
    assert not Path("out/summary.json").exists()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert main(["resume", "out"]) == 0 and summary_of("out")["status"] == "done" and lines_of("out/rl") == before
    capsys.readouterr()
    assert main(["resume", "out", "--steps", "1"]) == 2
    assert "has finished 2 steps, and --steps is 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", ["between", *(pytest.param(phase, marks=pytest.mark.nightly) for phase in ("sft", "rl"))]
)
def test_resume_auto_falls_back_in_either_phase(phase, capsys):
    """Also where the first is over, with a checkpoint that is damaged, and the second has not begun with it."""
    steps = "3"
    if phase == "between":
        steps = "2"
        run(steps=0, checkpoint_every=1, sft={"steps": 2})
        shutil.rmtree("out/rl")
        Path("out/summary.json").unlink()
        phase = "sft"
    else:
        stopped(f"{phase} 2", steps=3)
    weights = Path(f"out/{phase}/checkpoints/step_000002/model.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert main(["resume", "out"]) == 2
    assert "go on from step_000001 with: rollouts resume out --checkpoint step_000001\n" in capsys.readouterr().err
    command("--resume", "auto", "--checkpoint-every", "1", "--sft.steps", steps, "--steps", "3")
    assert "continuing from step_000001 instead" in capsys.readouterr().out
    assert summary_of("out")["status"] == "done"


def test_it_is_made_longer(short):
    shutil.copytree(short, "out")
    assert main(["resume", "out", "--steps", "3"]) == 0
    assert (summary_of("out/sft")["steps"], summary_of("out/rl")["steps"]) == (1, 3)
    assert "steps = 3\n" in Path("out/config.toml").read_text()


def test_it_goes_back_to_a_checkpoint(short):
    shutil.copytree(short, "out")
    before = lines_of("out/rl")
    assert main(["resume", "out", "--checkpoint", "step_000001"]) == 0
    assert summary_of("out/rl")["resumed_from"] == 1 and lines_of("out/rl") == before
    assert "resumed_from" not in summary_of("out/sft")


@pytest.mark.slow
def test_resume_auto_leaves_the_phase_that_is_over_as_it_was(here, capsys):
    stopped("rl 0")
    command("--resume", "auto", "--checkpoint-every", "1", "--sft.steps", "4", code=2)
    assert "sft.steps: 3 -> 4" in capsys.readouterr().err
    command("--resume", "auto", "--checkpoint-every", "1", "--sft.steps", "3")
    assert summary_of("out")["status"] == "done"
    assert "writing to out/sft" not in capsys.readouterr().out
    shutil.rmtree(here / "out" / "rl")
    (here / "out" / "summary.json").unlink()
    command("--resume", "auto", "--checkpoint-every", "1", "--sft.steps", "4")
    assert summary_of("out/sft")["steps"] == 4 and summary_of("out")["status"] == "done"


def test_a_second_phase_that_cannot_begin_says_how_to_go_on(here, monkeypatch):
    """Its mistake shows only when its parts are built."""
    train = room.train

    def refuse(plan, *arguments, **settings):
        if plan.settings.mode == "rl":
            raise ConfigError("no")
        return train(plan, *arguments, **settings)

    monkeypatch.setattr(room, "train", refuse)
    with pytest.raises(UserError, match="no\nthe supervised phase is done; go on with: rollouts resume out"):
        run(sft={"steps": 1})
    assert summary_of("out")["status"] == "failed"
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert main(["resume", "out"]) == 0
    assert summary_of("out")["status"] == "done"


def test_a_resume_that_a_logger_refuses_changes_nothing(here, short):
    shutil.copytree(short, "out")
    before = {path: path.read_bytes() for path in here.glob("out/**/*") if path.is_file() and path.name != ".lock"}
    assert main(["resume", "out", "--steps", "3", "--logger.Stop.refuses", "true"]) == 2
    after = {path: path.read_bytes() for path in here.glob("out/**/*") if path.is_file() and path.name != ".lock"}
    assert after == before


def test_another_run_s_folder_is_refused(here, capsys):
    rollouts.run(**SMALL | {"mode": "sft", "steps": 1})
    command("--resume", "auto", code=2)
    assert "holds a run of mode sft" in capsys.readouterr().err
