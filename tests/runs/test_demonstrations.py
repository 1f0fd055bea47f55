"""Demonstrations as a run trains on them: without held-out tasks, in an order that the seed and the epoch decide."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.errors import EnvironmentDefinitionError
from rollouts.models.loading import load_tokenizer
from rollouts.runs.environments import HeldOutPrompts, demonstrations
from rollouts.training.datasets.buffer import shuffled
from rollouts.types import Message, Task

sys.path.insert(0, str(Path(__file__).parent))
from composing import plan

PARTS = '''\
import json
from dataclasses import dataclass

from rollouts import Message, Task, reward
from rollouts.training.backends.optimizer import TorchSettings
from rollouts.training.backends.torch import create_torch_backend


def spy(model, seed, steps, lr, lora_rank, tokens_per_microbatch, algorithms, auxiliary_models):
    """The torch backend, which writes down what it is trained on."""
    backend = create_torch_backend(
        *(model, seed, steps, lr, lora_rank, tokens_per_microbatch, algorithms, auxiliary_models),
        settings=TorchSettings(device="cpu"),
    )
    inner = backend.forward_backward

    def forward_backward(batch):
        with open("seen.jsonl", "a") as file:
            rows = [[row.rollout_index, row.tokens] for row in batch.rows]
            file.write(json.dumps([batch.step, sorted(rows)]) + "\\n")
        return inner(batch)

    backend.forward_backward = forward_backward
    return backend


@dataclass
class Words:
    """Ten demonstrations, as a list or read one by one."""

    is_list: bool = True

    def tasks(self, split, rng):
        return [Task(f"Say {n}.", answer=str(n)) for n in range(10)]

    def demonstrations(self, split, rng):
        given = [[Message("user", f"Say {n}."), Message("assistant", str(n))] for n in range(10)]
        return given if self.is_list else iter(given)

    @reward
    def said(self, task, trajectory):
        return float(task.answer in trajectory.last_text)


class Silent(Words):
    def demonstrations(self, split, rng):
        return [[Message("user", "Say it.")]]
'''

SMALL = ["--samples-per-prompt", "2", "--max-tokens", "8", "--training", "./parts.py:spy"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(*arguments: str) -> list[list[str]]:
    """Run a command; the user's first words in each row that was trained on, step by step."""
    Path("seen.jsonl").unlink(missing_ok=True)
    assert main([*arguments, *SMALL] if arguments[0] != "resume" else list(arguments)) == 0
    decode = load_tokenizer("tiny").decode
    steps = [json.loads(line)[1] for line in Path("seen.jsonl").read_text().splitlines()]
    texts = [[decode(tokens) for _, tokens in step] for step in steps]
    return [[text.partition("user\n")[2].partition("<|im_end|>")[0].strip() for text in step] for step in texts]


# --- held-out tasks -------------------------------------------------------------------------------------------------


def of_plan(plan, held_out):
    """The plan's demonstrations, without those of these tasks."""
    return demonstrations(plan.environments, held_out, plan.settings.prompts_per_step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["sft", "--steps", "4", "--prompts-per-step", "16"],
        pytest.param(
            ["run", "--mode", "sft+rl", "--steps", "1", "--prompts-per-step", "4", "--sft.steps", "8"],
            marks=pytest.mark.nightly,
        ),
        ["run", "--mode", "sft+rl", "--steps", "0", "--sft.steps", "4", "--sft.eval-tasks", "0"],
    ],
    ids=["sft", "sft+rl", "evaluated-later"],
)
def test_held_out_tasks_are_never_demonstrated(command):
    """One-digit products: there are a hundred of them, so that draws do meet."""
    prompts = {
        p for step in trained(*command, "--env", "calculator", "--env.digits", "1", "--eval-tasks", "40") for p in step
    }
    settings = {"env": {"name": "calculator", "digits": 1}, "eval_tasks": 40}
    held_out = {task.prompt for task in plan(**settings).eval_tasks()}
    assert len(held_out) == 40 and len(prompts) > 10 and all(p.startswith("What is") for p in prompts)
    assert not held_out & prompts


def test_nothing_but_held_out_tasks_is_refused(capsys, here):
    with Path("parts.py").open("a") as file:
        file.write(
            "\n\nclass Apart(Words):\n    def tasks(self, split, rng):\n"
            "        return super().tasks(split, rng) if split == 'eval' else ['Other?']\n"
        )
    assert main(["sft", "--env", "./parts.py:Apart", "--out", "out", "--eval-tasks", "10000", "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert "all belong to held-out tasks" in error and "lower --eval-tasks" in error
    assert "Traceback" not in error and not Path("out").exists()


def test_a_conversation_that_teaches_nothing_is_refused(capsys):
    assert main(["sft", "--env", "./parts.py:Silent", "--out", "out", "--eval-tasks", "1", "--steps", "1"]) == 2
    assert "teaches no reply; expected a list of Message" in capsys.readouterr().err


LATE = """\
from rollouts import Message, Task, reward


class Late:
    def tasks(self, split, rng):
        return [Task(f"Say {word}.") for word in self.OWN]

    def setup(self, task):
        self.words = ["tea", "salt"]

    def demonstrations(self, split, rng):
        for word in self.words:
            yield [Message("user", f"Say {word}."), Message("assistant", word)]

    @reward
    def length(self, trajectory):
        return float(len(trajectory.last_text))
"""


@pytest.mark.parametrize(("own", "method"), [("words", "tasks"), ("__class__.__name__", "demonstrations")])
def test_an_attribute_that_only_setup_sets_is_explained(own, method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(LATE.replace("OWN", own))
    for command in (["sft", "--env", "./late.py:Late", "--dry-run"], ["check", "./late.py:Late", "--only", method]):
        assert main(command) == (2 if command[0] == "sft" else 1)
        said = " ".join("".join(capsys.readouterr()).split())
        assert f"Late.{method}('" in said and "raised AttributeError: 'Late' object has no attribute 'words'" in said
        assert (
            "`setup` does not run before `tasks` and `demonstrations`: write what they need as `shared(self)`" in said
        )


def test_another_missing_attribute_is_only_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(LATE.replace("OWN", "setup.words"))
    assert main(["sft", "--env", "./late.py:Late", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "'method' object has no attribute 'words'" in said or "'function' object has no attribute 'words'" in said
    assert "does not run before" not in said


def ask(*texts: str) -> list[Message]:
    return [Message(role, text) for role, text in (text.split(": ", 1) for text in texts)]


SHOTS = ask("user: 1?", "assistant: 1", "user: 2?")


@pytest.mark.parametrize(
    ("task", "demonstration", "expected"),
    [
        (Task("2 + 2?"), ask("user: 2 + 2?", "assistant: 4"), True),
        (Task("2 + 2?", id="a"), ask("user: 2 + 2? ", "assistant: 4"), True),
        (Task("2 + 2?"), ask("system: Be brief.", "user: 2 + 2?", "assistant: 4"), True),
        (Task(ask("system: Be kind.", "user: 2 + 2?")), ask("user: 2 + 2?", "assistant: 4"), True),
        (Task(SHOTS), [*SHOTS, Message("assistant", "2")], True),
        (Task(SHOTS), ask("user: 1?", "assistant: 1"), False),
        (Task("2 + 2?"), ask("user: 2 + 22?", "assistant: 24"), False),
        (Task([Message("user", [{"type": "text", "text": "2 + 2?"}])]), ask("user: 2 + 2?", "assistant: 4"), True),
        (Task(ask("system: 2 + 2?")), ask("system: 3 + 3?", "assistant: 6"), False),
    ],
)  # fmt: skip
def test_a_demonstration_is_known_by_its_prompt(task, demonstration, expected):
    assert HeldOutPrompts([task, Task("something else")]).asks(demonstration) is expected
    assert HeldOutPrompts([]).asks(demonstration) is False


def test_tasks_that_share_a_prompt_are_told_apart_by_nothing_else():
    shared = [Task(ask("system: Add.", "user: 2, 2"), id="a"), Task(ask("system: Multiply.", "user: 2, 2"), id="b")]
    prompts = HeldOutPrompts(shared)
    assert prompts.asks(ask("system: Add.", "user: 2, 2", "assistant: 4")) and prompts.shared == 0
    assert not prompts.asks(ask("system: Subtract.", "user: 2, 2", "assistant: 0"))
    assert HeldOutPrompts([Task("Play.", id="a"), Task("Play.", id="b"), Task("Play.", id="b")]).shared == 2


def test_a_prompt_that_two_environments_hold_out_is_not_demonstrated():
    env = {"name": "calculator", "digits": 1}
    made = plan(env=[env | {"alias": "easy"}, env | {"alias": "hard"}], mode="sft", eval_tasks=64)
    held_out = made.eval_tasks()
    prompts = [task.prompt for task in held_out]
    assert len(set(prompts)) < len(prompts), "both hold out some of them"
    stream = of_plan(made, held_out)
    assert not {next(stream).messages[0].text for _ in range(200)} & set(prompts)
    assert HeldOutPrompts(held_out).shared == 0


def test_what_either_phase_holds_out_is_not_demonstrated():
    """One id may be of another task in each phase, and one task may have another system message in each."""
    first, second = Task("1 + 1?", id="1"), Task("2 + 2?", id="1")
    kind = Task(ask("system: Be kind.", "user: 3 + 3?"), id="3")
    brief = Task(ask("system: Be brief.", "user: 3 + 3?"), id="3")
    prompts = HeldOutPrompts([first, kind, second, brief])
    for asked in ("1 + 1?", "2 + 2?", "3 + 3?"):
        assert prompts.asks(ask(f"user: {asked}", "assistant: ."))
    assert prompts.shared == 0


def test_tasks_of_both_phases_that_share_a_prompt_are_noted(capsys, here):
    Path("parts.py").write_text(
        PARTS
        + """

@dataclass
class Numbered(Words):
    first: int = 0

    def tasks(self, split, rng):
        return [Task("Play." if split == "eval" else "Say it.", id=f"{split} {self.first}", answer="4")]
"""
    )
    words = ["--env", "./parts.py:Numbered", "--sft.env.first", "1", "--steps", "0", "--sft.steps", "1"]
    words += ["--eval-tasks", "1", "--sft.eval-tasks", "1", "--prompts-per-step", "2"]
    assert main(["run", "--mode", "sft+rl", *words, *SMALL]) == 0
    assert "2 held-out tasks have the same prompt as another task" in capsys.readouterr().out.replace("\n", " ")


# --- their order ----------------------------------------------------------------------------------------------------


WORDS = ["sft", "--env", "./parts.py:Words", "--eval-tasks", "0", "--prompts-per-step", "4"]


def test_each_epoch_is_shuffled_anew_and_a_longer_run_begins_alike():
    words = [*WORDS, "--env.is-list", "false", "--checkpoint-every", "3"]
    whole = [prompt for step in trained(*words, "--steps", "6", "--out", "whole") for prompt in step]
    epochs = whole[:10], whole[10:20]
    written = [f"Say {n}." for n in range(10)]
    assert [sorted(epoch) for epoch in epochs] == [written, written]
    assert epochs[0] != epochs[1] and written not in epochs
    first = trained(*words, "--steps", "3", "--out", "out")
    rest = trained("resume", "out", "--steps", "6")
    assert [prompt for step in first + rest for prompt in step] == whole, "a resumed run trains on what comes next"


def test_the_seed_decides_the_order():
    def order(**settings):
        stream = of_plan(plan(env="./parts.py:Words", mode="sft", eval_tasks=0, **settings), [])
        return [next(stream).messages[0].text for _ in range(30)]

    assert order(seed=0) == order(seed=0, steps=1, prompts_per_step=3) != order(seed=1)


def test_two_copies_in_one_batch_are_two_rollouts(here):
    trained(*WORDS, "--steps", "1", "--prompts-per-step", "25")
    ((_, rows),) = [json.loads(line) for line in (here / "seen.jsonl").read_text().splitlines()]
    assert sorted(index for index, _ in rows) == list(range(25))


def test_a_mixture_keeps_its_weights_and_shuffles_each_environment():
    words = {"name": "./parts.py:Words"}
    made = plan(env=[words | {"alias": "a", "weight": 3}, words | {"alias": "b"}], mode="sft", eval_tasks=0)
    stream = of_plan(made, [])
    found = [next(stream) for _ in range(80)]
    assert Counter(each.env.alias for each in found) == pytest.approx({"a": 60, "b": 20}, abs=2)
    order = {alias: [each.messages[0].text for each in found if each.env.alias == alias] for alias in "ab"}
    assert order["a"][:10] != order["b"][:10] != order["b"][10:20]
    assert all(len(set(order[alias][:10])) == 10 for alias in "ab")


def test_an_endless_iterator_is_shuffled_through_a_window():
    def counting():
        number = 0
        while True:
            yield number
            number += 1

    stream = shuffled(counting(), random.Random(0), window=100)
    found = [next(stream) for _ in range(1000)]
    assert len(set(found)) == 1000 and max(found) < 1100
    assert all(value < place + 101 for place, value in enumerate(found))
    assert sum(a > b for a, b in itertools.pairwise(found)) > 300
    assert list(shuffled([], random.Random(0))) == []


def test_what_an_authors_sequence_raises_is_named():
    Path("parts.py").write_text(PARTS + '''

class Lazy(list):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise KeyError("lost")


class Broken(Words):
    def demonstrations(self, split, rng):
        return Lazy()
''')  # fmt: skip
    made = plan(env="./parts.py:Broken", mode="sft", eval_tasks=0)
    with pytest.raises(EnvironmentDefinitionError, match=r"demonstrations\('train', rng\) raised KeyError"):
        next(of_plan(made, []))
