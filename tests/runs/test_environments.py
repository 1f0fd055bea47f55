"""Several environments in one run: their tasks, tools, rewards, shares and metrics, from the plan to the run folder."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import rollouts
from rollouts.cli import main
from rollouts.config.files import load_file
from rollouts.config.flags import take_dotted_flags
from rollouts.config.merging import merge
from rollouts.config.resolving import resolve
from rollouts.errors import BrokenPluginError, ConfigError, EnvironmentDefinitionError, SignatureError, UserError
from rollouts.runs.environments import demonstrations, few_held_out_notes, task_buffer
from rollouts.runs.jobs.chat_data import demonstration_samples
from rollouts.runs.plan import make_plan
from rollouts.runs.session import load_chat
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.datasets.mixing import MixedBuffer

PARTS = '''\
from dataclasses import dataclass

from rollouts import Message, Task, metric, reward, tool


@dataclass
class Echo:
    """Say a word again."""

    words: int = 40
    share: float = 0.5

    def tasks(self, split, rng):
        sign = 1 if split == "train" else -1
        return [Task(f"Say {split} {n}.", answer=str(n), id=str(sign * n)) for n in range(self.words)]

    def demonstrations(self, split, rng):
        for n in range(3):
            yield [Message("user", f"Say {n}."), Message("assistant", str(n))]

    @tool
    def shout(self, word: str) -> str:
        """Say it loudly.

        Args:
            word: what to say
        """
        return word.upper()

    @reward
    def said(self, task, trajectory, env):
        assert isinstance(env, Echo) and [each["function"]["name"] for each in trajectory.tools] == ["shout"]
        return float(task.answer in trajectory.last_text)

    @metric
    def reward(self, trajectory):
        return 7.0


class Sums:
    def tasks(self, split, rng):
        while True:
            yield "What is 1 * 1?"

    @reward
    def fine(self, trajectory):
        return 1.0


class Needy(Echo):
    def tasks(self, split, rng):
        import absent_library


@dataclass
class Unbuilt(Echo):
    def __post_init__(self):
        import absent_library


class Weighty(Echo):
    weight: float = 2.0

    def __init__(self, weight: float = 2.0, alias: str = "x"):
        assert (weight, alias) == (2.0, "x")
        self.words = 3


class NoReward:
    def tasks(self, split, rng):
        return ["a", "b"]


def harder(step, *, until: int = 10) -> float:
    return min(1.0, step / until)


def sinking(step) -> float:
    return 1.5 - step


def of_the_task(task) -> float:
    return 1.0


def brief(trajectory) -> float:
    return -0.001 * len(trajectory.last_text)


'''
BROKEN = "import absent_library\n\n\nclass Env:\n    pass\n"
SMALL = ["--steps", "3", "--prompts-per-step", "4", "--samples-per-prompt", "2", "--eval-tasks", "6",
         "--max-tokens", "12"]  # fmt: skip
TWO = ["--env", "easy=calculator:2", "--env", "./parts.py:Echo", "--env.easy.digits", "1"]
TIMED = ("time/", "perf/", "sync/seconds", "rollout/latency")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*env, dotted=(), **settings):
    """The plan of these environments, as they are typed."""
    return make_plan(resolve(merge({"env": list(env)} | settings, take_dotted_flags(dotted)[1])))


def buffer_of(plan, held_out):
    return task_buffer(plan.environments, held_out, plan.settings.prompts_per_step)


def demonstrations_of(plan, held_out):
    return demonstrations(plan.environments, held_out, plan.settings.prompts_per_step)


def refused(error, *env, **settings):
    with pytest.raises(error) as caught:
        made = plan(*env, **settings)
        buffer_of(made, made.eval_tasks())
    return str(caught.value)


def lines_of(folder):
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


def trajectories_of(folder):
    paths = sorted(Path(folder, "trajectories").glob("step_*"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


# --- plans ----------------------------------------------------------------------------------------------------------


def test_one_environment_is_as_it_was():
    made = plan("calculator")
    assert [(env.alias, env.share) for env in made.environments] == [("", 1.0)]
    buffer = buffer_of(made, made.eval_tasks())
    assert type(buffer) is DataBuffer and not buffer.epochs
    assert [task.env for task in (*made.eval_tasks()[:3], *buffer.get_prompts(3))] == [""] * 6


def test_tasks_say_whose_they_are():
    made = plan("easy=calculator:3", "./parts.py:Echo", system="Be brief.", eval_tasks=8)
    held_out = made.eval_tasks()
    assert Counter(task.env for task in held_out) == {"easy": 6, "Echo": 2}
    buffer = buffer_of(made, held_out)
    assert isinstance(buffer, MixedBuffer)
    tasks = buffer.get_prompts(80)
    assert Counter(task.env for task in tasks) == pytest.approx({"easy": 60, "Echo": 20}, abs=3)
    for task in (*held_out, *tasks):
        (environment,) = (each for each in made.environments if each.alias == task.env)
        assert type(environment.make()).__name__ == {"easy": "Calculator", "Echo": "Echo"}[task.env]
        assert task.messages[0].text == "Be brief." and ("Say" in task.messages[1].text) == (task.env == "Echo")


def test_two_of_one_kind_draw_different_tasks():
    made = plan("a=calculator", "b=calculator", eval_tasks=40)
    tasks = made.eval_tasks()
    assert len({task.prompt for task in tasks}) > 30
    again = plan("a=calculator", "b=calculator", eval_tasks=40)
    assert again.eval_tasks() == tasks


def test_a_prompt_is_held_out_of_all_and_an_id_of_its_own():
    made = plan("./parts.py:Sums", "b=./parts.py:Echo", eval_tasks=4, system="x")
    assert Counter(task.env for task in made.eval_tasks()) == {"b": 2}, "there is one sum, which is for training"
    of_sums = made.environments[0]._replace(trains=False).held_out(1)
    with pytest.raises(EnvironmentDefinitionError, match="Sums: the environment has no training task"):
        buffer_of(made, of_sums)
    other = plan("a=./parts.py:Echo", "b=./parts.py:Echo", eval_tasks=40)
    buffer = buffer_of(other, other.eval_tasks())
    assert isinstance(buffer, MixedBuffer)
    ids = {name: {task.id for task in buffer.get_prompts(120) if task.env == name} for name in ("a", "b")}
    assert ids["a"] == ids["b"] == {str(n) for n in range(1, 40)}, "0 is an id of the split eval, and held out"


def test_data_goes_to_those_who_read_it(here):
    (here / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    made = plan("prompts", "./parts.py:Echo", data="rows.jsonl", reward=["env:1", "./parts.py:brief"])
    assert (
        made.environments[0].chosen.settings["data"] == "rows.jsonl"
        and "data" not in made.environments[1].chosen.settings
    )
    assert "calculator and ./parts.py:Echo has no setting `data`" in refused(
        ConfigError, "calculator", "./parts.py:Echo", data="rows.jsonl"
    )


def test_the_settings_that_the_table_itself_has_stay_at_their_defaults():
    made = plan("calculator", {"name": "./parts.py:Weighty", "weight": 3})
    assert made.environments[1].chosen.settings == {} and made.environments[1].weight == 3.0
    made.environments[1].make()


def test_curricula_are_components():
    made = plan(
        "calculator",
        "./parts.py:Echo",
        dotted=["--env.Echo.weight", "./parts.py:harder"],
        steps=20,
        prompts_per_step=8,
        eval_tasks=0,
    )
    assert made.resolved.components["env"][1].weight == {"name": "./parts.py:harder", "until": 10}
    buffer = buffer_of(made, [])
    counts = [Counter(task.env for task in buffer.get_prompts(8))["Echo"] for _ in range(20)]
    assert counts[0] == 0 and all(3 <= count <= 5 for count in counts[10:])
    assert counts[3] in (1, 2, 3)
    assert made.environments[1].share == pytest.approx(0.37, abs=0.03)


def test_shares_of_held_out_tasks_are_those_of_the_whole_run():
    made = plan("a=calculator", "b=calculator", dotted=["--env.b.weight", "[[0, 0], [10, 1]]"], steps=11, eval_tasks=40)
    counts = Counter(task.env for task in made.eval_tasks())
    assert counts["a"] > counts["b"] > 5


def test_demonstrations_are_mixed_and_keep_their_tools():
    made = plan("easy=calculator:3", "./parts.py:Echo", mode="sft", steps=10, prompts_per_step=4)
    found = list(itertools.islice(demonstrations_of(made, []), 40))
    assert Counter(each.env.alias for each in found) == pytest.approx({"easy": 30, "Echo": 10}, abs=2)
    assert {each.messages[0].text for each in found if each.env.alias == "Echo"} == {"Say 0.", "Say 1.", "Say 2."}
    chat = load_chat(made.settings, made.environments)
    rows = demonstration_samples(made.environments, [], made.settings, chat)
    assert len(rows) == 40
    decode = chat.tokenizer.decode
    for row, each in zip(rows, found, strict=True):
        text = decode(row.tokens)
        assert ("shout" in text, "calculator" in text) == (each.env.alias == "Echo", each.env.alias == "easy")


def test_an_environment_without_a_share_demonstrates_nothing():
    made = plan("a=./parts.py:Echo", "b=./parts.py:Echo:0", "c=./parts.py:Echo", mode="sft")
    found = Counter(each.env.alias for each in itertools.islice(demonstrations_of(made, []), 20))
    assert found == pytest.approx({"a": 10, "c": 10}, abs=1)


# --- mistakes, all before a model loads -----------------------------------------------------------------------------


def test_weights():
    two = ("calculator", "./parts.py:Echo")

    def of(weight):
        return refused(UserError, "calculator:0", {"name": "./parts.py:Echo", "weight": weight}, steps=5)

    assert "are all 0 at step 0" in of("./parts.py:harder")
    assert "the weight of Echo at step 2 is -0.5" in of("./parts.py:sinking")
    assert "are all 0 at step 0" in of([[0, 0], [3, 1]])
    assert "no setting 'untl'" in of({"name": "./parts.py:harder", "untl": 3})
    assert "did you mean: until?" in of({"name": "./parts.py:harder", "untl": 3})
    assert "no curriculum 'hard'" in of("./parts.py:hard")
    assert "no curriculum is named 'steep'" in of("steep")
    with pytest.raises(SignatureError, match="'task'"):
        plan(*two[:1], {"name": two[1], "weight": "./parts.py:of_the_task"})


def test_each_environment_is_checked():
    assert "has no @reward method" in refused(EnvironmentDefinitionError, "calculator", "./parts.py:NoReward")
    plan("calculator", "./parts.py:NoReward", reward=["env:1", "./parts.py:brief:0.1"])
    assert "no environment is named 'lost'" in refused(UserError, "calculator", "lost")
    assert "digitss" in refused(ConfigError, {"name": "calculator", "digitss": 3}, "./parts.py:Echo")


@pytest.mark.parametrize("env", [["./parts.py:Needy"], ["calculator", "./parts.py:Needy"], ["./parts.py:Unbuilt"]])
def test_a_module_that_is_missing_is_told_with_what_to_install(env):
    message = refused(EnvironmentDefinitionError, *env)
    assert "ModuleNotFoundError: No module named 'absent_library'" in message
    assert message.endswith("install the package that has the module absent_library; its name may differ")


def test_also_where_it_is_missing_at_the_import():
    message = refused(BrokenPluginError, "calculator", "./broken.py:Env")
    assert message.endswith("install the package that has the module absent_library; its name may differ")


def test_the_command_tells_it_and_writes_nothing(here, capsys):
    assert main(["run", *SMALL, "--env", "./parts.py:Needy", "--out", "out"]) == 2
    assert "install the package that has the module absent_library; its name may differ" in capsys.readouterr().err
    assert main(["run", *SMALL, *TWO, "--env.easy.weight", "0", "--env.Echo.weight", "0"]) == 2
    assert "the weights of easy and Echo are 0, so no environment has a task to draw" in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir() if path.is_dir() and path.name != "__pycache__") == []


# --- a run ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_how_they_are_mixed(capsys):
    assert main(["run", *SMALL, *TWO, "--env.Echo.weight", "./parts.py:harder", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "env easy: calculator (rollouts-calculator" in out
    assert "share 0 to 0.0909, of the whole run 0.0462 (curriculum: ./parts.py:harder" in out
    assert "tools of easy: calculator\ntools of Echo: shout\n" in out
    assert "held-out tasks: 6 (easy 5, Echo 1)" in out


def test_a_run_in_two_environments(here):
    assert main(["run", *SMALL, *TWO, "--reward", "env:1", "--reward", "./parts.py:brief", "--out", "out"]) == 0
    tree = tomllib.loads((here / "out/config.toml").read_text())
    assert tree["env"] == [
        {"name": "calculator", "alias": "easy", "weight": 2.0, "digits": 1, "operators": "*"},
        {"name": "./parts.py:Echo", "alias": "Echo", "weight": 1.0, "words": 40, "share": 0.5},
    ]
    records = trajectories_of("out")
    assert {record["task"]["env"] for record in records} == {"easy", "Echo"}
    for record in records:
        own = "correct" if record["task"]["env"] == "easy" else "said"
        assert set(record["parts"]) == {own, "brief"} and record["status"] in ("completed", "truncated")
    (last,) = lines_of("out")[-1:]
    shares = last["env/easy/share"], last["env/Echo/share"]
    assert sum(shares) == 1.0 and last["env/Echo/metric/reward"] == 7.0 == last["metric/reward"]
    both = last["env/easy/reward"] * shares[0] + last["env/Echo/reward"] * shares[1]
    assert both == pytest.approx(last["reward/mean"]) and "env/easy/reward_part/correct" in last
    summary = json.loads((here / "out/summary.json").read_text())
    own = summary["evaluation"]["after"]["environments"]
    assert {alias: each["tasks"] for alias, each in own.items()} == {"easy": 4, "Echo": 2}
    assert set(own["Echo"]["parts"]) == {"said", "brief"}
    components = json.loads((here / "out/manifest.json").read_text())["components"]
    assert [each["name"] for each in components if each["kind"] == "environments"] == ["calculator", "Echo"]


@pytest.mark.slow
def test_its_config_repeats_it_and_a_resume_goes_on_with_it(here):
    changing = ["--env.Echo.weight", "[[0, 0.5], [2, 4]]", "--checkpoint-every", "1", "--eval-every", "2"]
    assert main(["run", *SMALL, *TWO, *changing, "--out", "out"]) == 0
    assert any("eval/Echo/reward_mean" in line for line in lines_of("out"))
    rollouts.run("out/config.toml", out="again")
    assert lines_of("again") == lines_of("out") and trajectories_of("again") == trajectories_of("out")
    assert main(["resume", "again", "--checkpoint", "step_000001"]) == 0
    assert lines_of("again") == lines_of("out")
    assert [each["task"] for each in trajectories_of("again")] == [each["task"] for each in trajectories_of("out")]


def test_other_environments_cannot_go_on_with_it(here, capsys):
    assert main(["run", *SMALL, *TWO, "--steps", "1", "--eval-tasks", "2", "--out", "out"]) == 0
    with pytest.raises(ConfigError, match="the tasks came from easy and Echo, and now they come from calculator and"):
        rollouts.resume("out", steps=2, env=["calculator", "./parts.py:Echo"])
    with pytest.raises(ConfigError, match="and now they come from one source"):
        rollouts.resume("out", steps=2, env="calculator")
    assert main(["resume", "out", "--steps", "2", "--env.Echo.weight", "0"]) == 0
    assert "env.Echo.weight: 1.0 -> 0.0" in capsys.readouterr().out


@pytest.mark.nightly
def test_two_phases(here):
    text = 'mode = "sft+rl"\n[[env]]\nname = "calculator"\nalias = "easy"\n[[env]]\nname = "./parts.py:Echo"\n'
    (here / "run.toml").write_text(text + "[sft]\nsteps = 2\n[sft.env.Echo]\nwords = 7\n")
    settings = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "eval_tasks": 2, "max_tokens": 16}
    rollouts.run("run.toml", **settings, out="out")
    assert [line.get("policy/loss") is not None for line in lines_of("out/sft")] == [True, True]
    tree, _ = load_file("out/sft/config.toml")
    assert [each["alias"] for each in tree["env"]] == ["easy", "Echo"] and tree["env"][1]["words"] == 7
    tree, _ = load_file("out/rl/config.toml")
    assert tree["env"][1]["words"] == 40
    rollouts.run("out/config.toml", out="again")
    assert lines_of("again/rl") == lines_of("out/rl")
    assert Path("again/config.toml").read_text() == Path("out/config.toml").read_text()


FINITE = """\
from rollouts import Task, reward


class Listed:
    def __init__(self, n: int = 100, apart: bool = False):
        self.n, self.apart = n, apart

    def tasks(self, split, rng):
        return [Task(f"Say {number} {split if self.apart else ''}") for number in range(self.n)]

    @reward
    def good(self, trajectory):
        return 1.0


class Yielded(Listed):
    def tasks(self, split, rng):
        tasks = super().tasks(split, rng)
        rng.shuffle(tasks)
        yield from tasks
"""


@pytest.mark.parametrize(
    ("env", "n", "eval_tasks", "held"),
    [
        ("Listed", 100, 512, 20),
        ("Yielded", 100, 512, 20),
        ("Listed", 600, 512, 120),
        ("Listed", 100, 10, 10),
        ("Listed", 3, 512, 1),
        ("Listed", 1, 512, 0),
    ],
)
def test_of_tasks_that_ignore_the_split_a_fifth_is_held_out(here, env, n, eval_tasks, held):
    Path("finite.py").write_text(FINITE)
    settings = {"env": {"name": f"./finite.py:{env}", "n": n}, "eval_tasks": eval_tasks}
    made = make_plan(resolve(settings))
    tasks = made.eval_tasks()
    assert len(tasks) == held
    prompts = {task.prompt for task in buffer_of(made, tasks).get_prompts(n - held)}
    assert len(prompts) == n - held and not prompts & {task.prompt for task in tasks}
    notes = few_held_out_notes(made.environments, tasks, made.settings)
    assert len(notes) == (held != eval_tasks)
    if held > 1 and notes:
        assert f"has {n} tasks, the same" in notes[0] and f"at most a fifth of them is held out: {held};" in notes[0]
    alone = make_plan(resolve(settings | {"mode": "eval"}))
    assert len(alone.eval_tasks()) == min(n, eval_tasks), "no run has trained on the others"


@pytest.mark.parametrize(("asked", "notes"), [(512, []), (500, ["there are 3 different held-out tasks, --eval-"])])
def test_a_note_about_few_held_out_tasks_only_if_a_number_was_asked_for(here, asked, notes):
    Path("finite.py").write_text(FINITE)
    made = make_plan(resolve({"env": {"name": "./finite.py:Listed", "apart": True}, "eval_tasks": asked}))
    found = few_held_out_notes(made.environments, made.eval_tasks()[:3], made.settings)
    assert [note[: len(words)] for note, words in zip(found, notes, strict=True)] == notes


def test_a_run_of_an_earlier_version_keeps_its_held_out_tasks(here):
    """What it has evaluated so far is not trained on when it is resumed."""
    Path("finite.py").write_text(FINITE)
    settings = {"env": {"name": "./finite.py:Listed", "n": 1000}, "out": "run"}
    assert len(make_plan(resolve(settings)).eval_tasks()) == 200
    Path("run").mkdir()
    for manifest, held in (('{"seed": 0}', 512), ('{"seed": 0, "files": []}', 200), ("{", 200)):
        Path("run/manifest.json").write_text(manifest)
        made = make_plan(resolve(settings))
        assert len(made.eval_tasks()) == held
        assert len(few_held_out_notes(made.environments, made.eval_tasks(), made.settings)) == (held == 200)


def test_tasks_of_their_own_are_all_held_out(here):
    Path("finite.py").write_text(FINITE)
    made = make_plan(resolve({"env": {"name": "./finite.py:Listed", "apart": True}}))
    assert len(made.eval_tasks()) == 100 and not few_held_out_notes(made.environments, made.eval_tasks(), made.settings)
