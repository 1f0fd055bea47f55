"""What a newcomer gets wrong in the first hours, and what the commands answer: one table.

Each row is a command with the files around it. The answer must name what is wrong and what to type. A mistake that is
found before the run is one message on stderr, exit code 2, and leaves every file as it was; one that shows itself in
the middle of a run is exit code 1, and the run's folder says so. What is legal but surprising gets a note.
"""

from __future__ import annotations

import json
import shlex
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollouts.cli import main
from rollouts.env.advice import EnvironmentWarning

SMALL = "--steps 1 --prompts-per-step 2 --samples-per-prompt 2 --eval-tasks 2 --max-tokens 8 --out out"
CALC = f"run --env calculator {SMALL}"
DICE = f"run --env ./e.py:Dice {SMALL}"
PROMPTS = f"run --data rows.jsonl --reward ./r.py:good {SMALL}"
NEVER = ("Traceback", "<class", "object at 0x", "rollouts_file_", 'File "')
"""What no message holds."""

ENV = '''\
from rollouts import Task, reward, tool


class Dice:
    def __init__(self, sides: int = 6):
        self.sides = sides

    def tasks(self, split, rng):
        for number in range(1000):
            yield Task("Guess.", answer=rng.randrange(self.sides), id=f"{split}-{number}")

    @tool
    def look(self, guess: int) -> str:
        """Look at the dice."""
        return "no"

    @reward
    def correct(self, task, trajectory):
        return 1.0
'''
YIELD = """\
        for number in range(1000):
            yield Task("Guess.", answer=rng.randrange(self.sides), id=f"{split}-{number}")
"""
REWARD = """
    @reward
    def correct(self, task, trajectory):
        return 1.0
"""
RECORD = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Dice:\n    a: int = 1\n"
)
UNHINTED = (
    "from dataclasses import dataclass\n@dataclass\nclass Dice:\n    a = 1\n    def tasks(self, split, rng): ...\n"
)
ABSTRACT = "import abc\n\n\nclass Dice(abc.ABC):\n    @abc.abstractmethod\n    def roll(self): ...\n"
SHORT = "def a(rewards):\n    return rewards[1:]\n"
IMAGE = '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]'
ROW = '{"prompt": "a", "answer": "b"}\n'
GOOD = {"r.py": "def good(task, trajectory):\n    return 1.0\n"}


class Mistake(NamedTuple):
    """A command in a folder with these files, its exit code, and words that its message holds, or must not hold. With
    `after_run` the folder also has `done`, a finished run of the environment ./e.py:Dice.
    """

    name: str
    command: str
    says: tuple[str, ...]
    files: Mapping[str, str]
    code: int
    never: tuple[str, ...]
    after_run: bool


def row(
    name: str,
    command: str,
    *says: str,
    files: Mapping[str, str] | None = None,
    code: int = 2,
    never: tuple[str, ...] = (),
    after_run: bool = False,
) -> Any:
    mistake = Mistake(name, command, says, files or {}, code, never, after_run)
    return pytest.param(mistake, id=name.replace(" ", "-"))


def nightly(mistake: Any) -> Any:
    """A row whose branch another row is in."""
    return pytest.param(*mistake.values, id=mistake.id, marks=pytest.mark.nightly)


def env(*changes: tuple[str, str]) -> dict[str, str]:
    """The environment's file with these replacements."""
    text = ENV
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return {"e.py": text}


def dice(name: str, change: tuple[str, str], *says: str) -> Any:
    """The environment with a change."""
    return row(name, DICE, *says, files=env(change))


def reward(name: str, body: str, *says: str, code: int = 2) -> Any:
    """A file with the reward `r`."""
    return row(name, f"{CALC} --reward ./r.py:r", *says, files={"r.py": body}, code=code)


def loss(name: str, body: str, *says: str, code: int = 2) -> Any:
    """A file with the loss `l`."""
    return row(name, f"{CALC} --loss ./l.py:l", *says, files={"l.py": body}, code=code)


NOPE = env(('"no"', "nope"))
SET_UP = env(("    @tool", "    def set_up(self, task): ...\n\n    @tool"))
WORDLESS = env(('        """Look at the dice."""\n', ""))


def rows(text: str) -> dict[str, str]:
    return {**GOOD, "rows.jsonl": text}


COMMANDS = [
    row("train", "train --env calculator", "no command 'train'", "rollouts run"),
    row("help as a command", "help", "rollouts --help"),
    row("plugin", "plugin list", "did you mean: rollouts plugins?"),
    row("plugins install", "plugins install acme", "no command 'install'", "pip install PACKAGE"),
    nightly(row("a plugin's name mistyped", "plugins show gpro", "'gpro'", "did you mean", "grpo")),
    row("a kind in the singular", "plugins list --kind loss", "did you mean: losses?"),
    row("no environment", "run", "no environment was named", "--env calculator"),
    row("an environment without its flag", "run calculator", "there is no such settings file", "`--env calculator`"),
    row("an environment of a file here", "run e", "type `--env ./e.py:NAME`", files=env(), never=("did you mean",)),
    row("an environment as file", "run e.py:Dice", "type `--env ./e.py:Dice`", files=env(), never=("did you mean",)),
    row("settings as hydra takes them", "run env=calculator", "a setting is a flag: --env calculator"),
    row("a second one", "run a.toml steps=3", "a setting is a flag: --steps 3"),
    row("a model instead of a file", "eval runs/first --env calculator", "`--model runs/first`"),
    row("no run to resume", "resume runs/none", "no config.toml", "rollouts run --env NAME --out runs/none"),
    row("an empty folder to resume", "resume d", "d holds no run", files={"d/x.txt": ""}),
    row("a broken config.toml", "resume d", "d/config.toml, line 1", files={"d/config.toml": "env = \n"}),
    row("nothing to export", "export runs/first models/first", "runs/first does not exist", "give the folder"),
    row("export into a folder that exists", "export tiny m", "m exists already", files={"m/x": ""}),
    row("export of an empty folder", "export d m", "holds no run, no checkpoint, no model", files={"d/x": ""}),
    row("a short name of a type", "export d m --dtype bf16", "'bf16'", "'bfloat16'", files={"d/x": ""}),
    row("config of an unknown name", "config --env nope", "no environment is named 'nope'", "calculator"),
    row("a conversation with nothing", "chat runs/none", "no folder runs/none", "`--model tiny`"),
    row("a conversation without a model", "chat", "missing argument 'RUN'", "rollouts chat --help"),
    row("a push without a name", "export d m --push", "--push needs a value", "--push NAME", files={"d/x": ""}),
    row("public without a push", "export d m --public", "--push USER/MODEL, or leave", files={"d/x": ""}),
    row("no demonstrations", f"sft --env ./e.py:Dice {SMALL}", "has no demonstrations", "rollouts run", files=env()),
    row(
        "rows are no demonstrations",
        "sft --data rows.jsonl --eval-tasks 0",
        "no conversation in the columns prompt, answer",
        files=rows(ROW * 9),
    ),
    row("sft with an rl loss", "sft --env calculator --loss grpo", "advantages", "--loss sft"),
    row("sft with a mode", "sft --mode rl", "rollouts run --mode MODE", never=("--model",)),
]

NAMES = [
    row("a distribution", "run --env rollouts-calculator", "provides: calculator", never=("pip install",)),
    row("a typo of an environment", "run --env calculater", "did you mean: calculator?"),
    row("a loss in capitals", f"{CALC} --loss GRPO", "did you mean: grpo", never=("pip install",)),
    row("a typo of a flag", f"{CALC} --stepz 3", "no option --stepz", "did you mean: --steps?"),
    row("half a name", f"{CALC} --kl rk3", "did you mean: rk3_loss?", never=("pip install",)),
    row("a typo of a filter", f"{CALC} --filter nonzero", "did you mean: nonzero_std?"),
    row("another library's backend", f"{CALC} --training deepspeed", "'deepspeed'", "fsdp, torch"),
    row("a logger that is not installed", f"{CALC} --logger csvv", "'csvv'", "installed (loggers): console, jsonl"),
    row("a file that is not there", "run --env ./nope.py:Env", "there is no file './nope.py'"),
    row("a class that is not there", "run --env ./e.py:Dise", "did you mean: Dice?", files=env()),
    row("a module that is not there", "run --env nope.envs:Dice", "there is no module 'nope'", "PYTHONPATH=FOLDER"),
    row("what a module lacks", "run --env rollouts_calculator:Calculater", "did you mean: Calculator"),
    row("a module with a dot", "run --env e.Dice", "type: ./e.py:Dice", files=env(), never=("pip install",)),
    row("no name in the file", "run --env ./e.py", "path.py:Name", "it defines: Dice", files=env()),
    row("a call instead of a name", "run --env './e.py:Dice(sides=3)'", "path.py:Name", files=env()),
    row("a settings file as environment", "run --env a.toml", "'a.toml'", never=("pip install",)),
    row("an unknown alias", "run --env a=calculator --env b=calculator --env.c.digits 3", "alias 'c'", "a, b"),
    row("no weight above 0", "run --env calculator:0", "--env.calculator.weight 1"),
    row("a number as reward", f"{CALC} --reward 0.5", "'0.5'", "--reward env:1", never=("pip install",)),
    row("the environment's reward by name", f"{CALC} --reward correct", "'correct'", "--reward env:1"),
    row("a weight in words", f"{CALC} --reward env:high", "'high' is not a number", "--reward env:1.0"),
    row("a reward that the file lacks", f"{CALC} --reward ./r.py:bad", "'bad'", "good", files=GOOD),
]

VALUES = [
    row("no steps below 0", f"{CALC} --steps -5", "--steps: must be at least 0; got -5"),
    row("a number in words", f"{CALC} --steps ten", 'a whole number; got "ten"', "--steps 3"),
    row("a fraction of a step", f"{CALC} --steps 10.5", "a whole number; got 10.5"),
    row("a comma in a number", f"{CALC} --lr 3,5", 'a number or none; got "3,5"', "--lr 0.5"),
    row("lr nan", f"{CALC} --lr nan", "--lr: must be more than 0; got nan"),
    row("lr infinite", f"{CALC} --lr 1e400", "--lr: must be a finite number"),
    row("greedy training", f"{CALC} --temperature 0", "--temperature: must be more than 0"),
    row("no samples", f"{CALC} --samples-per-prompt 0", "must be at least 1; got 0"),
    row("too huge a number", f"{CALC} --max-tokens 99999999999999999999", "less than 2**63"),
    row("an unknown choice", f"{CALC} --on-invalid-reward ignore", "drop, zero, raise"),
    row("no rule", f"{CALC} --stop-when reward", "'reward' is no rule", "--stop-when 'eval/reward_mean >= 0.95'"),
    row("no time", f"{CALC} --max-hours 0", "--max-hours: must be more than 0"),
    row("no value", "run --env calculator --reward", "--reward needs a value", "type: --reward NAME"),
    row("a switch without a value", f"{CALC} --trust-remote-code", "needs a value", "true|false"),
    row("a flag as value", "run --env --steps 3", "--env needs a value, and --steps follows it"),
    row("a reward's setting", f"{CALC} --reward constant --reward.value 1", "type: --reward.constant.value 1"),
    row("a setting's value", f"{CALC} --env.digits three", '--env.digits: expected a whole number; got "three"'),
    row("a setting out of range", f"{CALC} --env.digits 0", "--env.digits 0: expected at least 1"),
    row("a setting that is nearly one", f"{CALC} --loss.clip_hi 1", "did you mean: --loss.clip-high"),
    row("a negative setting", f"{CALC} --loss.clip-high -1", "clip_high is -1.0", "--loss.clip-high 0.28"),
    row("a short name of a dtype", f"{CALC} --training.dtype bf16", "'bf16'", "bfloat16"),
    row("a device of another name", f"{CALC} --training.device gpu", "'gpu' cannot be used", "cuda"),
    row("a device that is not there", f"{CALC} --training.device cuda:77", "'cuda:77' cannot be used", "cpu"),
    row("layers that are not there", f"{CALC} --lora-rank 8 --training.lora-targets q,k", "'q,k'", "q_proj"),
    row("more minibatches than prompts", f"{CALC} --minibatches 100", "--minibatches 2 or less"),
    row("a critic is missing", f"{CALC} --loss ppo", "has no critic", "--critic head"),
    row("a teacher is missing", f"{CALC} --loss opd", "has no teacher", "--teacher"),
    row("a KL term is missing", f"{CALC} --kl.coef 0.1", "type: --kl rk3_loss"),
    row("one sample to compare", f"{CALC} --loss dpo --samples-per-prompt 1", "--samples-per-prompt 1", "2 or more"),
    row("a phase that is not there", f"{CALC} --sft.steps 5", "--mode sft+rl, or leave it out"),
    row("a settings table as a flag", f"{CALC} --schedule x", "[[schedule]]"),
    row("a file as system prompt", f"{CALC} --system p.txt", '--system "$(cat p.txt)"', files={"p.txt": "Be kind."}),
    row("an api cannot be trained", f"{CALC} --inference openai", "a run cannot train on its replies", "rollouts eval"),
    row("vllm is not installed", f"{CALC} --inference vllm", "pip install", "--inference.python"),
    row("a url without http", f"{CALC} --inference vllm --inference.url 127.0.0.1:9", "http://127.0.0.1:8000"),
    row("no key for an api", "eval --env calculator --inference openai --model m --out o", "export OPENAI_API_KEY="),
    row("tiny behind an api", "eval --env calculator --inference openai --out o", "--model gpt-4.1-mini"),
    row("no tasks to evaluate", "eval --env calculator --eval-tasks 0", "an evaluation needs tasks"),
    row("a learning rate to evaluate", "eval --env calculator --lr 1", "trains nothing", "leave it out"),
]

ELSEWHERE = [
    row("trl group", "run --env calculator --num_generations 8", "in rollouts this is: --samples-per-prompt"),
    row("bf16", "run --env calculator --bf16", "--training.dtype bfloat16"),
    row("gpus", "run --env calculator --gpus 2", "--training fsdp", never=("did you mean",)),
    row("config", "run --config a.toml", "rollouts run FILE"),
    row("device", "run --env calculator --device cuda", "--training.device"),
    row("n", "run --env calculator -n 8", "--samples-per-prompt"),
    row("no-eval", "run --env calculator --no-eval", "--eval-tasks 0"),
    row("tensorboard", "run --env calculator --tensorboard", "--logger tensorboard"),
    row("quantized", "run --env calculator --load_in_4bit", "no quantized models", "--lora-rank 16"),
    row("top-p", "run --env calculator --top-p 0.9", "leave it out"),
    row("quiet", "run --env calculator --quiet", "no option --quiet", never=("did you mean",)),
    row("verl tables", "run --env calculator --trainer.n_gpus_per_node 2", "--training fsdp", never=("--loss\n",)),
    row("verl data", "run --env calculator --data.train_batch_size 64", "--prompts-per-step"),
    row("a path of a model", "run --env calculator --model.path x", "type: --model VALUE"),
    row("beta of the loss", f"{CALC} --loss.beta 0.1", "--kl rk3_loss --kl.coef 0.01"),
    row("lr of the backend", f"{CALC} --training.lr 1e-3", "type --lr VALUE"),
    row("a setting without its component", "run --env calculator --digits 3", "--env.digits 3"),
]

FILES = [
    row("no such file", "run missing.toml", "missing.toml: there is no such settings file"),
    row(
        "no such run",
        "eval runs/nothing",
        "no run folder, checkpoint or settings file runs/nothing",
        never=("--env runs",),
    ),
    row(
        "a run misspelled",
        "eval runs/first1",
        "did you mean: runs/first?",
        files={"runs/first/config.toml": "steps = 1"},
    ),
    row("a model of the hub", "eval a/b", "to choose a model, `--model a/b`"),
    row("yaml", "run a.yaml", "ends in .toml, .json, .py", "rollouts config", files={"a.yaml": "steps: 3\n"}),
    row("yaml in toml", "run a.toml", "line 1: not TOML", "steps = 3", files={"a.toml": "steps: 3\n"}),
    row(
        "json with comments", "run a.json", "line 2: not JSON", "no comments", files={"a.json": '{\n// x\n"steps": 3}'}
    ),
    row("empty json", "run a.json", "a.json is empty", "rollouts config", files={"a.json": ""}),
    row("a list", "run a.json", "expected a table of settings, got list", files={"a.json": "[1]"}),
    row("an empty file", "run a.toml", "no environment was named", files={"a.toml": ""}),
    row("a folder", "run d", "d is a folder", files={"d/x": ""}),
    row("bytes", "run a.toml", "a.toml, line 1", files={"a.toml": "\0\1"}),
    row(
        "text without quotes",
        "run a.toml",
        'put text in quotes: env = "calculator"',
        files={"a.toml": "env = calculator\n"},
    ),
    row("True", "run a.toml", "resume = true", files={"a.toml": "resume = True\n"}),
    row("a path of windows", "run a.toml", "single quotes", files={"a.toml": 'model = "C:\\Users\\me"\n'}),
    row("a number in quotes", "run a.toml", "line 1: steps:", "steps = 3", files={"a.toml": 'steps = "10"\n'}),
    row("a bool as number", "run a.toml", "lora_rank: expected a whole", files={"a.toml": "lora_rank = true\n"}),
    row("an unknown key", "run a.toml", "line 1: step:", "steps", files={"a.toml": "step = 10\n"}),
    row("dashes in a key", "run a.toml", "prompts_per_step", files={"a.toml": "prompts-per-step = 4\n"}),
    row("another library's key", "run a.toml", "--prompts-per-step", files={"a.toml": "train_batch_size = 4\n"}),
    row("lr in training", "run a.toml", "line 3", "--lr", files={"a.toml": "env='calculator'\n[training]\nlr = 1\n"}),
    row(
        "a typo of a component's key",
        "run a.toml --env calculator",
        "line 2",
        "warmup_steps",
        files={"a.toml": "[training]\nwarmup = 3\n"},
    ),
    row("settings below a table", "run a.toml", "--steps", files={"a.toml": "[env]\nname='calculator'\nsteps = 3\n"}),
    row("an environment without a name", "run a.toml", "--env NAME", files={"a.toml": "[env]\ndigits = 3\n"}),
    row(
        "a weight as value",
        "run a.toml",
        "a.toml, line 2",
        "[reward.env]\nweight = 1",
        files={"a.toml": "[reward]\nenv=1\n"},
    ),
    row(
        "a name above its table",
        "run a.toml",
        "line 2",
        '[env]\nname = "x"',
        files={"a.toml": 'env = "x"\n[env]\na=1\n'},
    ),
    row("a number as component", "run a.toml", "reward: expected the name", files={"a.toml": "reward = 0.5\n"}),
    row("python that raises", "run a.py", "a.py", "line 1", "ZeroDivisionError", files={"a.py": "steps = 1 / 0\n"}),
    row("python that is no settings", "run e.py", "no setting 'a'", files={"e.py": "a = 1\n"}),
    row("an environment as settings", "run e.py", "no settings", "--env ./e.py:Dice", files=env()),
    row("a dataclass as settings", "run e.py", "no settings", "--env ./e.py:Dice", files={"e.py": RECORD}),
]

DATA = [
    row("no rows.jsonl", PROMPTS, "rows.jsonl cannot be read", "--data", files=GOOD),
    row("no rows.jsonl and no reward", "run --data rows.jsonl", "rows.jsonl cannot be read", never=("reward",)),
    row("no rows to evaluate on", "eval --data rows.csv", "rows.csv cannot be read", never=("reward",)),
    row(
        "no held-out rows",
        "run --data rows.jsonl --env.eval-data held_out.jsonl",
        "held_out.jsonl cannot be read",
        files=rows(ROW),
        never=("reward",),
    ),
    row("an empty rows.jsonl", PROMPTS, "holds no rows", '"prompt"', files=rows("")),
    row("csv in jsonl", PROMPTS, "line 1: not JSON", '{"prompt": "...", "answer": ...}', files=rows("prompt,answer\n")),
    row("other keys", PROMPTS, "line 1", "answer, question", files=rows('{"question": "a", "answer": "b"}\n')),
    row("one bad line", PROMPTS, "line 4: not JSON", files=rows(ROW * 3 + "{'prompt': 'a'}\n")),
    row("a prompt that is a table", PROMPTS, '"prompt" is text or a list', files=rows('{"prompt": {"a": 3}}\n')),
    row("prompts without rows", f"{CALC} --env prompts --reward ./r.py:good", "--data rows.jsonl", files=GOOD),
    row("a directory of rows", PROMPTS, "data files found in rows.jsonl", files={**GOOD, "rows.jsonl/x": ""}),
    row("a dataset of a hub", PROMPTS.replace("rows.jsonl", "acme/none"), "acme/none (split train)", files=GOOD),
    row("a column", PROMPTS.replace("rows", "r"), "--data.prompt text", files={**GOOD, "r.jsonl": '{"text": "a"}'}),
    row("rows without a reward", "run --data rows.jsonl", "no @reward", "--reward", files=rows(ROW * 9)),
    row("rows for another environment", f"{CALC} --data rows.jsonl", "`--env prompts` reads", files=rows(ROW)),
]

ENVIRONMENTS = [
    dice("no tasks", ("def tasks", "def get_tasks"), "no method `tasks`", "get_tasks"),
    dice("tasks without arguments", ("(self, split, rng)", "(self)"), "def tasks(self, split, rng)"),
    dice("tasks that are numbers", (YIELD, "        return [3]\n"), "3 (int)", "Task"),
    dice("tasks that are none", (YIELD, "        [Task('a')]\n"), "NoneType", "list of Task"),
    dice("one task", (YIELD, "        return Task('a')\n"), "cannot be iterated", "list of Task"),
    dice("tasks by name", (YIELD, "        return {'a': Task('a')}\n"), "gave dict", "only the keys", "a list of Task"),
    dice(
        "tasks in a set", (YIELD, "        return {'a', 'b'}\n"), "gave set", "order is not the same", "a list of Task"
    ),
    dice("tasks as text", (YIELD, "        return 'What is 2+2?'\n"), "gave str", "the characters", "a list of Task"),
    row(
        "demonstrations by name",
        "sft --env ./e.py:Dice --eval-tasks 0 --dry-run",
        "demonstrations('train', rng) gave dict, of which only the keys would be read",
        "a list of lists of Message",
        files=env(("    @tool", "    def demonstrations(self, split, rng):\n        return {'a': []}\n\n    @tool")),
    ),
    dice(
        "tasks as attribute", ("    def tasks(self, split, rng):\n" + YIELD, "    tasks = []"), "def tasks(self, split"
    ),
    dice("async tasks", ("    def tasks", "    async def tasks"), "tasks", "plain generator"),
    dice("tasks that raise", ("in range(1000)", "in open('x')"), "FileNotFoundError", "e.py, line 9"),
    dice("an unknown field of Task", ('Task("', 'Task(question="'), "'question'", "e.py, line 10"),
    dice("a constructor's argument", ("int = 6", "int"), "needs `sides`", "--env.sides"),
    dice("a default of another type", ("int = 6", 'int = "6"'), 'Dice.sides: the default "6" is not a', "e.py, line 5"),
    dice("a constructor that raises", ("= sides\n", "= sides / 0\n"), "ZeroDivisionError", "e.py, line 6"),
    row(
        "a field without a hint", f"{DICE} --env.a 2", "a has no type hint", "`a: TYPE = ...`", files={"e.py": UNHINTED}
    ),
    dice("an abstract class", ("class Dice:", ABSTRACT), "abstract", "roll"),
    dice("a syntax error", ("rng):", "rng)"), "e.py, line 8", "SyntaxError"),
    dice("tabs", ("        for", "\tfor"), "e.py, line 9", "TabError"),
    dice(
        "a package that is missing",
        ("class", "import pandaz\n\n\nclass"),
        "e.py, line 4",
        "install the package that has the module pandaz",
    ),
    dice("a wrong import", ("import Task", "import tools, Task"), "e.py, line 1", "cannot import name 'tools'"),
    dice("tool with *args", ("guess: int", "*guesses: int"), "'guesses'", "by name"),
    dice("tool with **kwargs", ("guess: int", "**kw"), "'kw'", "by name"),
    dice("tool without hints", ("guess: int", "guess"), "'guess' has no type hint", "`guess: str`"),
    dice("tool with a class of its own", ("guess: int", 'guess: "Dice"'), "type Dice cannot be described", "dataclass"),
    dice("tool with an unknown type", ("guess: int", 'guess: "DataFrame"'), "'DataFrame'", "import"),
    dice("tool timeout", ("@tool", "@tool(timeout=5)"), "e.py, line 12", "'timeout'"),
    dice("tool timeout 0", ("@tool", "@tool(timeout_seconds=0)"), "positive number of seconds"),
    dice("reward of a string", ("task, traj", "prompt, traj"), "asks for 'prompt'", "task, trajectory"),
    dice("tool without self", ("look(self, guess", "look(guess"), "no `self`", "def look(self, guess: int)", "line 13"),
    dice("tool with a name", ("@tool", '@tool("look")'), "@tool('look')", 'name="calc"', "line 12"),
    dice("reward without self", ("correct(self, ", "correct("), "no `self`", "def correct(self, task, traj", "line 18"),
    dice("reward with a number", ("@reward", "@reward(0.5)"), "@reward(0.5)", "@reward(weight=0.5)", "line 17"),
    dice(
        "an image", ('Task("Guess."', f"Task({IMAGE}"), "'image_url'", "text only", "rollouts eval --inference openai"
    ),
    dice("one text as tasks", (YIELD, "        return 'Guess.'\n"), "gave str", "list of Task"),
    dice("no reward", (REWARD, ""), "no @reward", "--reward"),
    dice("reward without its decorator", ("    @reward\n", ""), "no @reward"),
    row(
        "two classes",
        f"run --env ./e.py {SMALL}",
        "defines: Other, Dice",
        files=env(("class", "class Other: ...\n\n\nclass")),
    ),
    row("an empty module", DICE, "'Dice'", "nothing public", files={"e.py": ""}),
    row("a gym environment", DICE, "no method `tasks`", files={"e.py": "class Dice:\n    def reset(self): ...\n"}),
]

NO_RETURN = (
    "it returned None (r.py, line 1",
    "did you forget `return`?",
    "--on-invalid-reward zero",
    "2 sampled, 2 greedy",
)

REWARDS = [
    reward("trl's reward", "def r(prompts, **kw): ...\n", "'prompts'", "task:"),
    reward(
        "a default of another type in a reward", "def r(task, *, n: int = 0.5): ...\n", "r.n: the default 0.5", "line 1"
    ),
    reward("a number as function", "r = 1.0\n", "cannot be called", "a function"),
    reward("a reward that does not import", "def r(task)\n", "r.py, line 1", "SyntaxError"),
    nightly(reward("text", "def r(task):\n    return 'yes'\n", "'yes' (str)", "finite float", code=1)),
    nightly(reward("a tuple", "def r(task):\n    return 1, 2\n", "(tuple)", "finite float", code=1)),
    reward("nan", "def r(task):\n    return float('nan')\n", "returned nan", "finite float", code=1),
    reward("none", "def r(task):\n    print(task)\n", *NO_RETURN, code=1),
    reward("a name error", "def r(task):\n    return nope\n", "NameError", "r.py, line 2", code=1),
]

LOSSES = [
    row("a short advantage", f"{CALC} --advantage ./a.py:a", "2 rewards", "one per rollout", files={"a.py": SHORT}),
    loss("trl's loss", "def l(model, inputs): ...\n", "'model'", "logprobs:"),
    loss("a misspelled input", "def l(log_probs): ...\n", "did you mean: logprobs"),
    loss("a class as loss", "class l: ...\n", "def my_loss("),
    loss("a scalar", "def l(logprobs):\n    return -logprobs.mean()\n", "scalar", "drop its .mean()"),
    loss("no gradient", "def l(logprobs):\n    return -logprobs.detach()\n", "no gradient", ".detach()", code=1),
    loss("nothing returned", "def l(logprobs):\n    -logprobs\n", "NoneType", "one value per token"),
    loss("a number returned", "def l(logprobs):\n    return 0.5\n", "float", "one value per token"),
    loss("torch is not imported", "def l(logprobs):\n    return torch.exp(logprobs)\n", "NameError", "l.py, line 2"),
]

MODELS = [
    row("a model that is not there", f"{CALC} --model ./nowhere", "no folder ./nowhere", "--model tiny"),
    row("a typo of tiny", f"{CALC} --model tinny", "no folder tinny", "--model tiny"),
    row(
        "a web address",
        f"{CALC} --model https://huggingface.co/Qwen/Qwen3-0.6B",
        "type its name on the hub: --model Qwen/Qwen3-0.6B",
    ),
    row("a text file", f"{CALC} --model notes.txt", "is a file", "config.json", files={"notes.txt": "hi"}),
    row("a gguf file", f"{CALC} --model m.gguf", "is a file", "config.json", files={"m.gguf": "GGUF"}),
    row("a folder without config.json", f"{CALC} --model m", "m", "config.json", files={"m/x.txt": "hi"}),
    row("a broken config.json", f"{CALC} --model m", "not a valid JSON", "--model tiny", files={"m/config.json": "{"}),
    row(
        "a folder without a tokenizer",
        f"{CALC} --model m",
        "m holds no tokenizer",
        "copy the tokenizer's files",
        files={"m/config.json": '{"a": 1}'},
    ),
    row(
        "an evaluation of an empty folder",
        "eval --env calculator --model m",
        "m holds no run",
        "such as",
        files={"m/x": ""},
    ),
    row(
        "an evaluation of nothing",
        "eval --env calculator --model runs/missing --out o",
        "no folder runs/missing",
        "--model tiny",
    ),
]

FOLDERS = [
    row("out exists", CALC, "out exists already", "--out with another", files={"out/notes.txt": "mine"}),
    row("out is a file", CALC, "out exists already", files={"out": "mine"}),
    row("out in a file", f"{CALC} --out f/out", "f/out cannot be made", "--out with another", files={"f": "mine"}),
    row("out cannot be written", f"{CALC} --out /dev/null/out", "cannot be made", "--out with another"),
    row("out is a run", DICE.replace("--out out", "--out done"), "rollouts resume done", after_run=True),
    row("run of a run", "run done", "rollouts resume done", after_run=True),
    row("resume of a file of a run", "resume done/config.toml", "type: rollouts resume done\n", after_run=True),
    row("resume of a checkpoint", "resume done/checkpoints/step_000001", "--checkpoint step_000001", after_run=True),
    row("an unknown checkpoint", "resume done --checkpoint step_9", "step_9", "step_000001", after_run=True),
    row(
        "resume with another lr",
        "resume done --lr 1",
        "settings of components can change",
        "write lr = VALUE into",
        after_run=True,
    ),
    row("resume with many steps", "resume done --steps many", 'a whole number; got "many"', after_run=True),
    row(
        "resume with an unknown setting",
        "resume done --steps 2 --env.side 3",
        "did you mean: --env.sides?",
        after_run=True,
    ),
    row(
        "resume without the environment",
        "resume done --steps 2",
        "no file",
        "e.py",
        files={"e.py": "DELETE"},
        after_run=True,
    ),
    row(
        "resume with a changed environment",
        "resume done --steps 2",
        "'Dice'",
        files={"e.py": "x = 1\n"},
        after_run=True,
    ),
    row("export over itself", "export done done", "exists already", "a new folder", after_run=True),
    row("export of no adapter", "export done m --adapter", "no adapter; leave --adapter out", after_run=True),
    row("export of a file", "export done/metrics.jsonl m", "is a file; give the folder", after_run=True),
    row(
        "a checkpoint that is not there",
        "eval --env calculator --model done/checkpoints/step_000009",
        "there is no folder done/checkpoints/step_000009",
        after_run=True,
    ),
]

NOTES = [
    row(
        "a reference that nothing uses",
        f"{CALC} --reference ema --dry-run",
        "--reference ema is not used",
        "--kl rk3_loss",
        code=0,
    ),
    nightly(
        row(
            "a critic that nothing uses",
            f"{CALC} --critic head --dry-run",
            "--critic head is not used",
            "--loss ppo",
            code=0,
        )
    ),
    nightly(
        row(
            "a teacher that nothing uses",
            f"{CALC} --teacher tiny --dry-run",
            "--teacher tiny is not used",
            "--loss opd",
            code=0,
        )
    ),
    nightly(
        row(
            "lora without a rank", f"{CALC} --training.lora-alpha 16 --dry-run", "is not used", "--lora-rank 16", code=0
        )
    ),
    row("refill without a filter", f"{CALC} --refill 8 --dry-run", "is not used", "--filter nonzero_std", code=0),
    row("a near miss of setup", f"{DICE} --dry-run", "Dice.set_up", "did you mean `setup`", code=0, files=SET_UP),
    row("a tool without words", f"{DICE} --dry-run", "no docstring", "write one below", code=0, files=WORDLESS),
    row(
        "the environment's reward is dropped",
        f"{CALC} --reward ./r.py:good --dry-run",
        "--reward env:1",
        code=0,
        files=GOOD,
    ),
    row("a forgotten model", CALC, "toy model", "--model", code=0),
    row("a finished run", "resume done", "done is finished", "rollouts resume done --steps 2", code=0, after_run=True),
]

FLAT = [
    row("a constant reward", f"{CALC} --reward ./r.py:good", "flat", "good", code=0, files=GOOD),
    row("one sample in a group", f"{CALC} --samples-per-prompt 1", "--samples-per-prompt", code=0),
    row("a tool that raises", "run --env ./e.py:Dice --dry-run", "NameError", "a tool failed", code=0, files=NOPE),
]

TABLE = [
    *COMMANDS,
    *NAMES,
    *VALUES,
    *ELSEWHERE,
    *FILES,
    *DATA,
    *ENVIRONMENTS,
    *REWARDS,
    *LOSSES,
    *MODELS,
    *FOLDERS,
    *NOTES,
    *FLAT,
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a finished run, `done`, and its environment."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "e.py").write_text(ENV)
        assert main(shlex.split(DICE.replace("--out out", "--out done"))) == 0
    return folder


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text == "DELETE":
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


@pytest.mark.parametrize("mistake", TABLE)
def test_a_mistake(mistake, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if mistake.after_run:
        shutil.copytree(request.getfixturevalue("finished"), tmp_path, dirs_exist_ok=True)
        capsys.readouterr()
    write(tmp_path, mistake.files)
    before = contents(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", EnvironmentWarning)
        code = main(shlex.split(mistake.command))
    out, error = capsys.readouterr()
    assert code == mistake.code, error or out
    said = error if code else out + error + "".join(str(each.message) for each in warned)
    for words in mistake.says:
        assert words in said, said
    for words in (*NEVER, *mistake.never):
        assert words not in said, said
    if code:
        assert error.startswith("error: ") and error.count("error: ") == 1, error
    if code == 1:
        assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "failed"
        assert (tmp_path / "out" / "trajectories" / "eval_000000.jsonl").is_file(), "what was played can be read"
    elif code or "--dry-run" in mistake.command or mistake.after_run:
        assert contents(tmp_path) == before


def test_a_settings_file_with_every_default_gives_no_note(tmp_path, capsys):
    assert main(["config", "--env", "calculator"]) == 0
    (tmp_path / "a.toml").write_text(capsys.readouterr().out)
    assert main(["run", str(tmp_path / "a.toml"), "--dry-run"]) == 0
    assert "is not used" not in capsys.readouterr().out


def test_the_table_has_what_a_newcomer_gets_wrong():
    """Sixty and more, over every command, each with a name of its own."""
    names = [param.values[0].name for param in TABLE]
    assert len(names) == len(set(names)) >= 60
    commands = {param.values[0].command.split()[0] for param in TABLE}
    assert commands >= {"run", "sft", "eval", "resume", "export", "config", "plugins", "chat"}
