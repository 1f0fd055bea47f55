"""Functions and classes in place of names: `rollouts.run(env=MyEnv, reward=my_reward)`, and in a settings file."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import trio

import rollouts
from rollouts.cli import main
from rollouts.config.files import NOWHERE, load_file
from rollouts.config.objects import held_names, take_objects
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, RunError, SignatureError, UserError
from rollouts.runs.dry_run import objective_words
from rollouts.runs.jobs.stopping import FinishedStep, call_on_step
from rollouts.runs.manifest import source_of
from rollouts.runs.plan import make_plan
from rollouts.training.algorithms.advantages import group_norm
from rollouts.training.algorithms.aggregation import token_mean
from rollouts.training.algorithms.losses import ppo_clip
from rollouts.training.algorithms.recipes import GRPO

Calculator = pytest.importorskip("rollouts_calculator").Calculator

TINY = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 8, "eval_tasks": 0, "quiet": True}

MODULE = """\
def flat(trajectory, *, height: float = 1.0) -> float:
    return height * (len(trajectory.last_text) % 7)


def scaled(logprobs, advantages, *, scale: float = 1.0):
    return -logprobs * advantages * scale
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def local(source: str, name: str):
    """The object of this name in a program whose source is given, as in a notebook: no module holds it."""
    namespace = {"__name__": "__main__"}
    exec(source, namespace)
    return namespace[name]


def brevity():
    return local("def brevity(trajectory, *, target: int = 20) -> float:\n    return 0.5\n", "brevity")


def composed(**settings):
    tree, objects = take_objects({"env": Calculator, "eval_tasks": 0, **settings})
    return make_plan(resolve(tree, replace(NOWHERE, objects=objects)))


def metrics(folder):
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    timed = re.compile(r"time/|perf/|memory/|sync/seconds|rollout/latency")
    return [{name: value for name, value in line.items() if not timed.match(name)} for line in lines]


# --- what is composed ---------------------------------------------------------------------------------------------


def test_functions_give_the_metrics_of_names_bit_for_bit():
    settings = TINY | {"eval_tasks": 2}
    Path("own.py").write_text(MODULE)
    named = {"loss": "grpo", "advantage": "group_norm", "aggregation": "token_mean"}
    rollouts.run(env="calculator", reward=["env:1", "short=./own.py:flat:0.5"], **named, out="names", **settings)
    parts = {"loss": ppo_clip, "advantage": group_norm, "aggregation": token_mean}
    flat = local(MODULE, "flat")
    rollouts.run(env=Calculator, reward={"env": "env", "short": (flat, 0.5)}, **parts, out="objects", **settings)
    (names,), (objects,) = metrics("names"), metrics("objects")
    assert names == objects and names["optim/grad_norm"] > 0


def test_every_key_of_a_component_takes_an_object():
    flat, scaled = local(MODULE, "flat"), local(MODULE, "scaled")
    plan = composed(
        reward=flat,
        loss={"name": scaled, "scale": 2.0},
        mix=local("def mine(parts, weights): return parts @ weights", "mine"),
        shaping=local("def mine(rewards): return rewards", "mine"),
        select=local("def mine(rewards): return rewards > 0", "mine"),
        kl=local("def mine(logprobs, ref_logprobs): return logprobs - ref_logprobs", "mine"),
        reference=local("def mine(reference, policy): pass", "mine"),
        correction=local("def mine(old_logprobs, rollout_logprobs): return old_logprobs - rollout_logprobs", "mine"),
        filter=[lambda rewards: True, lambda rewards: False],
        logger=local("class Mine:\n    def __init__(self, folder): pass", "Mine"),
        inference=local("def engine(model, training): pass", "engine"),
        tool=local('def look(place: str) -> str:\n    """Look at a place."""\n    return place', "look"),
        optimizer=local("import torch\ndef steps(params, lr): return torch.optim.SGD(params, lr)", "steps"),
    )
    assert plan.one("reward").component is flat
    assert plan.algorithm.terms[0].function.func is scaled
    assert plan.chosen["loss"][0].settings["scale"] == 2.0
    assert [each.alias for each in plan.chosen["filter"]] == ["lambda", "lambda_2"]
    assert plan.filters[0].function([]) and not plan.filters[1].function([])
    held = {key: [each.name for each in chosen] for key, chosen in plan.chosen.items()}
    assert held["mix"] == ["<mine>"] and held["shaping"] == ["<mine_2>"] and held["logger"] == ["jsonl", "<Mine>"]


def test_one_object_has_one_name_and_two_have_two():
    first, second = brevity(), brevity()
    plan = composed(reward=[first, (second, -0.1), {"name": first, "target": 7, "alias": "again"}])
    assert [(each.alias, each.component is first) for each in plan.chosen["reward"]] == [
        ("brevity", True),
        ("brevity_2", False),
        ("again", True),
    ]
    assert [term.weight for term in plan.rewards] == [1.0, -0.1, 1.0]
    assert plan.settings.reward == ("<brevity>:1", "<brevity_2>:-0.1", "again=<brevity>:1")


def test_names_objects_and_weights_mix():
    Path("own.py").write_text(MODULE)
    plan = composed(reward=["env:2", ("./own.py:flat", 0.25), (brevity(), 1)])
    assert [(term.alias, term.weight) for term in plan.rewards] == [("env", 2), ("flat", 0.25), ("brevity", 1)]
    assert [term.alias for term in composed(reward=("env", 0.5)).rewards] == ["env"]


def test_an_environment_is_a_class_a_factory_or_a_partial():
    def make(*, digits: int = 5):
        return Calculator(digits=digits)

    assert composed().environments[0].make().digits == Calculator().digits
    assert composed(env=make).environments[0].make().digits == 5
    assert composed(env=functools.partial(Calculator, digits=3)).environments[0].make().digits == 3
    several = composed(env={"easy": (Calculator, 2), "hard": {"name": Calculator, "digits": 4}})
    assert [(env.alias, env.weight, env.make().digits) for env in several.environments] == [
        ("easy", 2.0, Calculator().digits),
        ("hard", 1.0, 4),
    ]
    growing = composed(env=[(Calculator, lambda step: 1.0 + step), ("again=calculator", 1)])
    assert growing.environments[0].weight(step=3) == 4.0


def test_an_object_of_an_installed_component_is_this_component():
    plan = composed(loss=GRPO)
    assert plan.one("env").ref.distribution == "rollouts-calculator"
    assert objective_words(plan.algorithm) == objective_words(composed(loss="grpo").algorithm)


def test_a_setting_in_angle_brackets_is_no_object():
    names = held_names({"inference": {"name": "<engine>", "stop": "<pad>", "body": {"name": "<x>"}}, "system": "<s>"})
    assert names == {"inference": ["<engine>"]}
    weights = {"env": {"easy": {"name": "a", "weight": {"name": "<growing>"}, "token": "<pad>"}}}
    assert held_names(weights | {"sft": {"loss": "<mine>"}}) == {"env": ["<growing>"], "loss": ["<mine>"]}


def test_a_schedule_and_the_supervised_phase_take_objects():
    scaled = local(MODULE, "scaled")
    plan = composed(schedule=[{"step": 5, "loss": {"name": scaled, "scale": 3.0}}])
    assert plan.schedule[1].algorithm.terms[0].function.keywords == {"scale": 3.0}
    tree, _ = take_objects({"sft": {"loss": scaled, "steps": 3}})
    assert tree == {"sft": {"loss": "<scaled>", "steps": 3}}


def test_a_settings_file_in_python_holds_objects(capsys):
    Path("beside.py").write_text(MODULE)
    Path("mine.py").write_text(
        "from rollouts_calculator import Calculator\nfrom beside import flat\n\n\n"
        "def own(trajectory) -> float:\n    return 1.0\n\n\n"
        "env = Calculator\nreward = [own, (flat, 0.5), lambda trajectory: 2.0]\nsteps = 3\neval_tasks = 0\n"
    )
    tree, source = load_file("mine.py")
    plan = make_plan(resolve(tree, source))
    names = [each.name for each in plan.chosen["reward"]]
    assert names == ["./mine.py:own", "beside:flat", "<lambda>"]
    assert plan.chosen["reward"][0].component(None) == 1.0
    assert main(["run", "mine.py", "--dry-run"]) == 0
    assert "./mine.py:own" in capsys.readouterr().out
    assert main(["config", "mine.py"]) == 0
    assert 'name = "beside:flat"' in capsys.readouterr().out
    sys.modules.pop("beside")


def test_a_module_and_a_name_are_a_component_on_the_command_line(capsys):
    Path("my_rewards.py").write_text(MODULE)
    argv = ["run", "--env", "rollouts_calculator:Calculator", "--eval-tasks", "0", "--dry-run"]
    assert main([*argv, "--reward", "tall=my_rewards:flat:0.5", "--reward.tall.height", "3"]) == 0
    out = capsys.readouterr().out
    assert 'name = "my_rewards:flat"\nweight = 0.5\nheight = 3.0' in out
    assert "env: rollouts_calculator:Calculator (rollouts-calculator" in out
    for name, words in (
        ("my_rewards:flt", "did you mean: flat?"),
        ("my_reward:flat", "there is no module 'my_reward'"),
        ("env:high", "'high' is not a number; type: --reward env:1.0"),
    ):
        assert main([*argv, "--reward", name]) == 2
        assert words in capsys.readouterr().err
    sys.modules.pop("my_rewards")


# --- prompts and on_step ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prompts_are_the_rows_of_a_file_and_the_run_keeps_them(capsys):
    rows = [{"prompt": f"What is {n}+2?", "answer": n + 2, "level": n} for n in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("my_own.py").write_text(MODULE)
    reward = {"flat": "./my_own.py:flat"}
    rollouts.run(data="rows.jsonl", reward=reward, out="file", **TINY | {"eval_tasks": 2})
    given = [rows[0], rollouts.Task("What is 1+2?", 3, {"level": 1}), *rows[2:]]
    rollouts.run(prompts=(row for row in given), reward=reward, out="python", **TINY | {"eval_tasks": 2})
    (file,), (python,) = metrics("file"), metrics("python")
    assert file == python and file
    capsys.readouterr()
    assert main(["resume", "python", "--steps", "2"]) == 0, "the run has a copy of its prompts"
    assert main(["eval", "python", "--out", "evaluated"]) == 0
    assert main(["eval", "evaluated/config.toml", "--out", "again"]) == 0
    assert "not known" not in capsys.readouterr().out


def test_on_step_is_called_after_each_step_and_its_metrics_are_logged():
    seen = []

    def plain(report):
        seen.append(report)
        return {"mine/groups": len(report.groups)}

    async def later(report):
        return {"mine/reward": report.groups[0].rewards[0] or 0, "mine/loss": report.metrics["policy/loss"]}

    rollouts.run(env=Calculator, on_step=[plain, later], out="out", **TINY | {"steps": 2})
    assert [(report.step, len(report.groups)) for report in seen] == [(0, 2), (1, 2)]
    logged = metrics("out")
    assert [line["mine/groups"] for line in logged] == [2.0, 2.0]
    assert all(line["mine/loss"] == line["policy/loss"] and "mine/reward" in line for line in logged)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("3", "on_step: broken returned 3; expected a dict of metrics, or None"),
        ("{'x': 'a'}", "on_step: broken returned 'a' as 'x'; expected a number"),
        ("{'reward/mean': 1}", "on_step: broken returned the metric 'reward/mean', which the step has already"),
        ("1 / 0", "on_step: broken raised ZeroDivisionError: division by zero (my_step.py, line 2: return 1 / 0)"),
    ],
)
def test_what_a_function_of_on_step_does_wrong_names_it(returned, words):
    file = Path("my_step.py").absolute()
    file.write_text(f"def broken(report):\n    return {returned}\n")
    namespace = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    with pytest.raises(RunError, match=re.escape(words)):
        trio.run(call_on_step, [namespace["broken"]], FinishedStep(0, {"reward/mean": 0.5}))


# --- what a run keeps, and how it is resumed ----------------------------------------------------------------------


def test_a_run_keeps_the_source_of_its_objects_and_says_how_to_resume(capsys):
    Path("program.py").write_text("def mine(trajectory, *, target: int = 20) -> float:\n    return 0.5\n")
    namespace = {"__name__": "__main__"}
    exec(compile(Path("program.py").read_text(), str(Path("program.py").absolute()), "exec"), namespace)
    mine = namespace["mine"]
    reward = ["env:1", ({"name": mine, "target": 7}, 0.5)]
    rollouts.run(env=Calculator, reward=reward, out="out", **TINY)
    text = Path("out/config.toml").read_text()
    assert "# a function in memory: __main__:mine" in text and "line 1" in text
    assert tomllib.loads(text)["reward"]["mine"] == {"name": "<mine>", "weight": 0.5, "target": 7}
    (copy,) = Path("out/code").glob("mine_*.py")
    assert copy.read_text() == Path("program.py").read_text()
    before = Path("out/config.toml").read_bytes()
    for argv, again in (
        (["resume", "out", "--steps", "2"], 'rollouts.resume("out", reward=mine)'),
        (["eval", "out", "--eval-tasks", "2"], 'rollouts.run("out/config.toml", mode="eval", model="out", reward=mine'),
        (["run", "out/config.toml"], 'rollouts.run("out/config.toml", reward=mine)'),
    ):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert "these objects of it are not in its files: reward mine\n" in err and again in err
    assert Path("out/config.toml").read_bytes() == before
    assert main(["export", "out", "exported"]) == 0, "an export needs no reward"
    assert main(["resume", "out"]) == 0, "a finished run needs nothing"

    with pytest.raises(ConfigError, match="reward mine"):
        rollouts.resume("out", steps=2, quiet=True)
    assert rollouts.resume("out", steps=2, reward=mine, quiet=True)["steps"] == 2
    resumed = tomllib.loads(Path("out/config.toml").read_text())["reward"]
    assert list(resumed) == ["env", "mine"] and resumed["mine"]["target"] == 7 and resumed["mine"]["weight"] == 0.5
    summary = rollouts.run("out/config.toml", mode="eval", model="out", reward=mine, eval_tasks=2, quiet=True)
    assert summary["parts"]["mine"] == 0.5


def test_objects_of_one_name_that_are_given_again_keep_their_weights_and_settings():
    first, second = brevity(), brevity()
    tree, _ = take_objects(
        {"filter": lambda rewards: True, "reward": [(first, 0.5), ({"name": second, "target": 7}, 2.0)]}
    )
    kept, objects = take_objects({"reward": [first, second]}, tree)
    assert "reward" not in kept and objects.components == {"<brevity>": first, "<brevity_2>": second}
    only, objects = take_objects(
        {"reward": lambda trajectory: 1.0}, {"reward": [{"name": "<lambda_2>", "weight": 2.0}]}
    )
    assert "reward" not in only and list(objects.components) == ["<lambda_2>"], "another key had <lambda>"

    schedule, _ = take_objects({"schedule": [{"step": 5, "loss": first}]})
    assert take_objects({"schedule": [{"step": 5, "loss": first}]}, schedule)[0] == schedule, "it replaces the file's"


def test_a_run_of_importable_objects_just_resumes():
    Path("importable_rewards.py").write_text(MODULE)
    sys.path.insert(0, str(Path.cwd()))
    try:
        from importable_rewards import flat

        rollouts.run(env=Calculator, reward=[flat, "env:1"], out="out", **TINY)
        assert main(["resume", "out", "--steps", "2"]) == 0
        assert [Path(each).stem.rpartition("_")[0] for each in Path("out/code").iterdir()] == ["importable_rewards"]
    finally:
        sys.path.remove(str(Path.cwd()))
        sys.modules.pop("importable_rewards")


def test_a_lost_environment_leaves_a_conversation_without_tools():
    from rollouts.runs.chat import SETTINGS
    from rollouts.runs.run_model import model_plan

    env = local(
        "from rollouts_calculator import Calculator\nclass Mine(Calculator):\n    pass\n",
        "Mine",
    )
    rollouts.run(env=env, out="out", **TINY | {"steps": 0})
    with model_plan("out", {}, SETTINGS) as plan:
        assert plan.environments == () and "--env of the run was in the memory" in plan.notes[0]

    find = local("def find(query: str) -> str:\n    return query\n", "find")
    rollouts.run(env=Calculator, tool=find, out="other", **TINY | {"steps": 0})
    with model_plan("other", {}, SETTINGS) as plan:
        assert plan.tools == () and "--tool of the run was in the memory" in plan.notes[0]


def test_the_source_of_a_lambda_is_the_lambda_alone():
    one = {"reward": lambda trajectory: 0.5, "api_key": "sk-secret"}["reward"]
    assert source_of(one) == "lambda trajectory: 0.5"
    two = [lambda trajectory: 1.0, lambda trajectory: 2.0]
    assert source_of(two[0]) is None, "which of them it is cannot be known"
    assert source_of(brevity()) is None
    plan = composed(reward=brevity())
    assert "the source of <brevity> cannot be read, so the run keeps no copy of it" in plan.notes


# --- bad input ----------------------------------------------------------------------------------------------------


async def coroutine(trajectory):
    return 1.0


def generator():
    yield "a prompt"
    raise ValueError("no more")


class Table:
    """Like a table of pandas: its iterator gives the names of the columns."""

    def __iter__(self):
        return iter(["prompt", "answer"])

    def iterrows(self):
        return enumerate([("What is 2+2?", "4")])

    def __repr__(self):
        return "a table"


class NoEnvironment:
    pass


@dataclass
class Loaded:
    """An object of a logger."""

    def log(self, metrics, step):
        pass


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"env": Calculator()},
            "env: got an object of Calculator, but a run makes its objects\ngive the class",
        ),
        ({"env": NoEnvironment}, "NoEnvironment has no method `tasks`"),
        ({"env": 3}, "env: expected the name of a component, as text, or a function or a class of Python; got 3"),
        ({"env": functools.partial(Calculator, 3)}, "functools.partial(Calculator, name=value)"),
        ({"reward": [brevity(), 3]}, "reward[1]: expected the name of a component"),
        ({"reward": lambda x: 1.0}, "it names 'x', but a reward has no such input"),
        ({"reward": lambda trajectory, *rest: 1.0}, "it takes *rest, which names no inputs"),
        ({"loss": coroutine}, "is async, but a loss is called and never awaited"),
        ({"reward": coroutine(None)}, "got a coroutine, the result of calling coroutine\ngive the function itself"),
        ({"reward": generator()}, "reward: got a generator, the result of calling generator"),
        ({"reward": [(brevity(), "0.5")]}, "a finite number as the weight; got (brevity, '0.5')\nwrite (brevity, 0.5)"),
        ({"reward": [(brevity(), math.nan)]}, "got (brevity, nan)"),
        ({"reward": [(brevity(), 1, 2)]}, "expected a pair (component, weight), and a finite number as the weight"),
        ({"filter": [(brevity(), 1)]}, "a filter has no weight; got (brevity, 1)"),
        ({"logger": Loaded()}, "logger: got an object of Loaded, but a run makes its objects\ngive the class"),
        ({"loss": {"name": local(MODULE, "scaled"), "scal": 3}}, "did you mean: scale?"),
        ({"rewards": brevity()}, "did you mean: reward"),
        ({"env": None, "prompts": []}, "prompts: got an empty list, so the run has no task"),
        ({"env": None, "prompts": "What is 2+2?"}, "prompts: expected a list of prompts; got 'What is 2+2?'"),
        ({"env": None, "prompts": {"a", "b"}}, "prompts: expected a list of prompts; got {"),
        ({"env": None, "prompts": Table()}, "prompts: expected a list of prompts; got a table"),
        ({"env": None, "prompts": generator()}, "prompts: they cannot be read to the end: ValueError: no more (tests/"),
        ({"env": None, "prompts": ["a", {"role": "user"}]}, "prompts[1]: got {'role': 'user'}"),
        ({"env": None, "prompts": ["a", ""]}, "prompts[1]: the prompt is empty"),
        ({"env": None, "prompts": [{"prompt": "a", "answer": object}]}, "prompts[0]: a run keeps its prompts as JSON"),
        ({"env": None, "prompts": [[{"rol": "user"}]]}, "prompts[0]: its prompt is no text and no list of messages"),
        (
            {"env": None, "prompts": [rollouts.Task("a", info={"id": 3})]},
            "the key 'id', which is a field of a Task",
        ),
        ({"prompts": ["a"]}, "prompts and env: both give the tasks of the run"),
        ({"env": None, "prompts": ["a"], "data": "rows.jsonl"}, "prompts and data: both"),
        (
            {"seeds": [0, 1]},
            "a run has one seed; for several, type: rollouts run --seeds 0-4, or in Python:\nfor seed in",
        ),
        (
            {"optimizer": torch.optim.Adam},
            "optimizer=adam\ndef adam(params, lr, *, weight_decay=0.0):\n    return Adam(",
        ),
        ({"on_step": 3}, "on_step: expected a function of one argument, got 3"),
        ({"on_step": [print, lambda: None]}, "on_step: expected a function of one argument, got lambda"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "settings",  # the same in every worker
)
def test_bad_input_is_one_clear_error(settings, words, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])  # the places of errors are relative
    with pytest.raises(UserError, match=re.escape(words)):
        composed(**settings)


def test_a_wrong_signature_names_the_line_of_the_function():
    with pytest.raises(SignatureError, match=r"<lambda>: it takes \*\*all[\s\S]*test_python_objects\.py, line \d+: "):
        composed(reward=lambda **all: 1.0)


def test_a_wrong_lambda_has_its_own_line_not_that_of_the_next_function(here):
    Path("program.py").write_text("wrong = lambda completion: 1.0\ndef other(trajectory):\n    return 1.0\n")
    namespace = {"__name__": "__main__"}
    exec(compile(Path("program.py").read_text(), str(here / "program.py"), "exec"), namespace)
    with pytest.raises(SignatureError, match=r"program.py, line 1: wrong = lambda completion: 1.0"):
        composed(reward=namespace["wrong"])


def test_an_evaluation_has_no_steps():
    with pytest.raises(ConfigError, match="on_step: an evaluation has no steps"):
        rollouts.run(env=Calculator, mode="eval", on_step=print)


def test_ranks_need_names_that_they_can_import(monkeypatch):
    several = {"name": "fsdp", "processes": 2, "device": "cpu"}
    with pytest.raises(ConfigError, match=r"starts 2 ranks[\s\S]*that another process finds: lambda\nwrite them at"):
        composed(reward=lambda trajectory: 1.0, training=several)
    composed(loss=ppo_clip, training=several)
    composed(reward=lambda trajectory: 1.0, training={**several, "processes": 1})


# --- progress -----------------------------------------------------------------------------------------------------


def test_progress_goes_to_standard_error_unless_quiet(capsys):
    settings = {key: value for key, value in TINY.items() if key != "quiet"} | {"steps": 0}
    rollouts.run(env=Calculator, out="out", **settings)
    shown = capsys.readouterr()
    assert shown.out == "" and "writing to out\n" in shown.err
    rollouts.run(env=Calculator, out="again", quiet=True, **settings)
    assert capsys.readouterr() == ("", "")
