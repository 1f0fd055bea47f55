"""A run that can learn nothing says so, and why: by short runs of each cause, and by steps made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts.cli import main
from rollouts.config.settings import Settings
from rollouts.runs.jobs.learning import (
    CALLS,
    NOTHING,
    STEPS_MAX,
    LearningCheck,
    PartCounts,
    failing_calls,
    why_flat,
    why_nothing,
)
from rollouts.training.algorithms.recipes import DPO, GRPO, RFT
from rollouts.training.rollout_gen.groups import Group
from rollouts.types import Episode, Message, Score, Segment, Status, Task, ToolCall, Trajectory

PARTS = '''\
import itertools
import random
from dataclasses import dataclass

from rollouts import Message, Task, reward, tool
from rollouts.training.backends.torch import create_torch_backend


@dataclass
class Products:
    """Products without a tool."""

    def tasks(self, split, rng):
        while True:
            a, b = rng.randrange(100), rng.randrange(100)
            yield Task(f"What is {a} * {b}?", answer=a * b)

    def demonstrations(self, split, rng):
        while True:
            yield [Message("user", str(rng.random())), Message("assistant", "7")]

    @reward
    def right(self):
        return 0.25


class OfThePrompt(Products):
    @reward
    def right(self, task):
        return float(task.answer % 7)


class TwoParts(Products):
    @reward
    def polite(self):
        return 1.0


class Broken(Products):
    @tool
    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression."""
        return foo(expression)

    @reward
    def right(self):
        return random.random()


class Refusing(Broken):
    @tool
    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression."""
        raise ValueError("closed today")


class Moves(Products):
    """Its reward is flat for three steps of 4 rollouts."""

    numbers = itertools.count(1)

    @reward
    def right(self):
        number = next(Moves.numbers)
        return float(number > 12 and number % 2)


def dull(rewards):
    return "dull"


def zero(rewards):
    return 0 * rewards


class Frozen:
    """Another backend whose optimizer reports a learning rate of 0."""

    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def optim_step(self):
        from rollouts.training.backends.futures import ImmediateTrainFuture
        from rollouts.training.batches import StepResult

        result = self.backend.optim_step().wait()
        return ImmediateTrainFuture(StepResult(result.metrics | {"optim/lr": 0.0}, result.version))


def frozen(model, seed, steps, lr, lora_rank, tokens_per_microbatch, algorithms, auxiliary_models):
    given = model, seed, steps, lr, lora_rank, tokens_per_microbatch, algorithms, auxiliary_models
    return Frozen(create_torch_backend(*given))
'''

SHORT = f"--steps {STEPS_MAX + 1} --prompts-per-step 1 --samples-per-prompt 4 --max-tokens 48 --eval-tasks 0"
"""The settings of each run here; later flags win."""

PRODUCTS = "--env ./parts.py:Products"
LINE = PARTS[: PARTS.index("return foo")].count("\n") + 1
CAUSES = {
    PRODUCTS: "the reward `right` is flat: it is 0.250 in every rollout",
    f"{PRODUCTS} --kl rk3_loss": "the reward `right` is flat: it is 0.250 in every rollout",
    f"{PRODUCTS} --loss dpo": "the reward `right` is flat: it is 0.250 in every rollout",
    "--env ./parts.py:TwoParts": "is flat: it is 1.250 in every rollout (`right` is 0.250; `polite` is 1.000)",
    "--env ./parts.py:OfThePrompt --prompts-per-step 2": "the reward is flat in each group: the rollouts of one prompt",
    "--env calculator --samples-per-prompt 1": "one sample per prompt has nothing to compare with; type --samples-per",
    "--env calculator --max-tokens 3": "all replies were cut off at --max-tokens 3: raise it",
    "--env calculator --filter ./parts.py:dull": "the filters dropped every group (dull)",
    f"{PRODUCTS} --filter nonzero_std": "in every rollout, and the filters dropped every group (zero_std)",
    "--env ./parts.py:Refusing --prompts-per-step 8": "`calculator` failed in every call: ValueError: closed today",
    "--env ./parts.py:Broken --advantage ./parts.py:zero": "all advantages of zero are 0",
    "--env calculator --loss rft --select.threshold 9": "--select reward_at_least chose no rollout",
    "--env ./parts.py:Broken --training ./parts.py:frozen": "the learning rate is 0",
    f"--mode sft {PRODUCTS} --training ./parts.py:frozen": "the learning rate is 0",
    "--env ./parts.py:Broken --prompts-per-step 8": (
        f"`calculator` failed in every call: NameError: name 'foo' is not defined (parts.py, line {LINE}: return foo("
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def run(arguments, capsys, code=0):
    """Run it; gives what it said, and the warnings in its summary."""
    assert main(["run", *SHORT.split(), *arguments.split(), "--out", "r"]) == code, capsys.readouterr().err
    return capsys.readouterr().out.splitlines(), json.loads(Path("r/summary.json").read_text()).get("warnings", [])


@pytest.mark.parametrize(
    "arguments", [pytest.param(each, marks=[] if each == PRODUCTS else [pytest.mark.nightly]) for each in CAUSES]
)
def test_the_cause_is_named_within_ten_steps_and_at_the_end(arguments, capsys):
    lines, warnings = run(arguments, capsys)
    about = [
        line for line in lines if line.startswith("note: ") and CAUSES[arguments] in line and "warning" not in line
    ]
    assert len(about) == 1, lines
    (last_step,) = (index for index, line in enumerate(lines) if line.startswith(f"step {STEPS_MAX + 1}/"))
    assert lines.index(about[0]) < last_step
    assert any(CAUSES[arguments] in words for words in warnings)
    assert [f"warning: {words}" for words in warnings] == [line for line in lines if line.startswith("warning: ")]


@pytest.mark.parametrize(
    "arguments",
    [pytest.param("--env calculator --prompts-per-step 2", marks=pytest.mark.nightly), "--env ./parts.py:Moves"],
)
def test_a_run_that_learns_has_no_such_note(arguments, capsys):
    lines, warnings = run(arguments, capsys)
    assert not warnings and not any(line.startswith(("note: nothing", "note: the tool")) for line in lines)


def test_a_short_run_says_it_at_the_end(capsys):
    lines, warnings = run(f"{PRODUCTS} --steps 1", capsys)
    assert warnings == [
        "nothing was learned in the last step: the reward `right` is flat: it is 0.250 in every rollout"
    ]
    assert not any(line.startswith("note: nothing") for line in lines)


def test_one_sample_is_noticed_when_composing(capsys):
    words = "one sample per prompt has nothing to compare with; type --samples-per-prompt 8"
    lines, _ = run("--env calculator --samples-per-prompt 1 --steps 0", capsys)
    assert any(words in line for line in lines)


@pytest.mark.parametrize("advantage", ["baseline", "ones", "reinforce_pp"])
def test_other_advantages_allow_one_sample(advantage, capsys):
    lines, _ = run(f"--env calculator --samples-per-prompt 1 --advantage {advantage} --steps 0", capsys)
    assert not any("one sample" in line for line in lines)


# --- by hand --------------------------------------------------------------------------------------------------------


def group(*rewards, why=""):
    task = Task("?")
    trajectory = Trajectory(task, [*task.messages, Message("assistant", "!")], status=Status.COMPLETED)
    return Group(
        0, task, tuple(Episode((0, i), task, [trajectory], Score(r, {}, why), {}) for i, r in enumerate(rewards))
    )


def test_what_is_flat():
    assert why_flat([group(0.5, 0.5), group(0.5)]) == "the reward is flat: it is 0.500 in every rollout"
    assert "prompts differ, from 0.000 to 1.000" in why_flat([group(0.0, 0.0), group(1.0, 1.0)])
    assert why_flat([group(0.5, None, 0.5)]) and why_flat([group(0.1 + 0.2, 0.3)])
    assert not why_flat([]) and not why_flat([group(None)]) and not why_flat([group(0.5, 0.5), group(0.0, 1.0)])
    assert why_flat([group(0.0, 0.0, why="right: KeyError: 'a'\nmore")]).endswith("(right: KeyError: 'a')")


def cut(group, tokens):
    """The group with replies of so many tokens, which were cut off."""
    segment = Segment([1] * tokens, [1.0] * tokens, [-1.0] * tokens, [0] * tokens)

    def episode(each):
        trajectory = each.trajectory
        short = Trajectory(group.task, trajectory.messages, [segment], Status.TRUNCATED)
        return each._replace(trajectories=[short])

    return group._replace(episodes=tuple(map(episode, group.episodes)))


SKIPPED = {"optim/grad_norm": 0.0, "optim/skipped": 1.0}
MIXED = group(0.0, 1.0)


@pytest.mark.parametrize(
    ("words", "groups", "advantages", "metrics", "algorithm", "settings"),
    [
        ("", [MIXED], [1.0, -1.0], {}, GRPO, {}),
        ("the learning rate is 0", [MIXED], [1.0], {"optim/lr": 0.0}, GRPO, {}),
        ("the filters dropped every group (dull)", [MIXED._replace(dropped="dull")], [], SKIPPED, GRPO, {}),
        ("in every rollout, and the filters dropped", [group(1.0, 1.0)._replace(dropped="x")], [], SKIPPED, GRPO, {}),
        ("cut off at --max-tokens 3: raise it", [cut(MIXED, 3)], [0.0, 0.0], SKIPPED, GRPO, {"max_tokens": 3}),
        ("all replies were cut off: cut off", [cut(MIXED, 3)], [0.0, 0.0], SKIPPED, GRPO, {}),
        ("one sample per prompt", [group(1.0)], [0.0], SKIPPED, GRPO, {"samples_per_prompt": 1}),
        ("the reward is flat: it is 1.000", [group(1.0, 1.0)], [0.0, 0.0], SKIPPED, GRPO, {}),
        ("older than --staleness 2", [MIXED], [0.0], SKIPPED | {"staleness/dropped": 1.0}, GRPO, {"staleness": 2}),
        ("--select reward_at_least chose no rollout", [MIXED], [0.0], SKIPPED, RFT, {}),
        ("--pairs best_worst found nothing to compare", [MIXED], [], SKIPPED, DPO, {}),
        ("all advantages of group_norm are 0", [MIXED], [0.0, 0.0], SKIPPED, GRPO, {}),
    ],
)
def test_why_a_step_taught_nothing(words, groups, advantages, metrics, algorithm, settings):
    found = why_nothing(groups, advantages, metrics, algorithm, Settings(**settings))
    assert words in found and bool(words) is bool(found)


SEARCH = ToolCall("search")


def calls(*texts, call=SEARCH, role="tool", **errors):
    """A group of one rollout whose calls have these answers."""
    task = Task("?")
    asked = Message("assistant", "", [call] * len(texts))
    messages = [*task.messages, asked, *(Message(role, text) for text in texts)]
    tools = [{"type": "function", "function": {"name": "search"}}]
    trajectory = Trajectory(task, messages, status=Status.COMPLETED, tools=tools, tool_errors=errors)
    return Group(0, task, (Episode((0, 0), task, [trajectory], Score(0.0), {}),))


def test_which_calls_fail():
    error = {"search": "OSError: gone"}
    assert failing_calls([calls("Error: OSError: gone", **error), calls()]) == {
        "search": "the tool `search` failed in every call: OSError: gone"
    }
    assert failing_calls([calls("Error: OSError: gone", "found", **error)]) == {"search": ""}
    assert failing_calls([calls("found"), calls("Error: OSError: gone", **error)]) == {"search": ""}
    (words,) = failing_calls([calls("Error: no argument 'q'\nmore")]).values()
    assert words.startswith("the tool `search` got wrong arguments in every call: no argument 'q'; train on demonst")
    assert failing_calls([calls("found", role="user"), calls("Error: OSError: gone", **error)]) == {"search": ""}
    assert failing_calls([calls()]) == {}


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("call", [ToolCall("", error="bad"), ToolCall("find")], ids=["malformed", "unknown"])
def test_calls_that_no_tool_answers_are_found(call, role):
    bad = calls("Error: bad\nmore", call=call, role=role)
    words = "no tool ran, for every call was malformed or of an unknown tool: 'bad'; train on demonstrations"
    assert failing_calls([bad])[CALLS].startswith(words)
    assert failing_calls([bad, calls("found")]) == {CALLS: "", "search": ""}


def test_a_program_does_not_answer_a_call_that_it_saw_as_text():
    unread = ToolCall("", error="bad JSON")
    assert "'bad JSON'" in failing_calls([calls("Are you sure?", call=unread, role="user")])[CALLS]


def test_a_streak_is_noted_once_and_ends():
    notes = []
    check = LearningCheck(notes.append)
    for step in range(3 * STEPS_MAX):
        check.see({NOTHING: "" if step == 3 else "flat"})
        assert len(notes) == (step >= 3 + STEPS_MAX)
    assert check.at_the_end() == [f"nothing was learned in the last {3 * STEPS_MAX - 4} steps: flat"]
    check.see({NOTHING: ""})
    assert check.at_the_end() == []


def test_a_tool_that_is_not_called_keeps_its_count():
    notes = []
    check = LearningCheck(notes.append)
    for step in range(2 * STEPS_MAX):
        check.see({"search": "it failed"} if step % 2 else {})
    assert notes == ["it failed"] == check.at_the_end()


def test_parts_that_were_zero_in_every_rollout_are_counted():
    task, counts = Task("?"), PartCounts()
    for placed, polite in ((0.0, 1.0), (0.0, 0.0), (None, 0.0)):
        score = Score(0.0, {"placed": placed, "polite": polite, "long": 0.0}, weights={"long": -0.1})
        counts.see([Group(0, task, (Episode((0, 0), task, [Trajectory(task, [])], score, {}),))])
    assert counts.always_zero() == {"placed": 2}


def test_saved_trajectories_do_not_say_which_tools_there_were():
    def saved(text, **metrics):
        played = calls(text)
        (episode,) = played.episodes
        old = episode.trajectory
        trajectory = Trajectory(old.task, old.messages, status=Status.COMPLETED, metrics=metrics)
        return played._replace(episodes=(episode._replace(trajectories=[trajectory]),))

    assert failing_calls([saved("found")]) == {"search": ""}
    assert failing_calls([saved("Error: OSError: gone", **{"tool_failure/exception": 1.0})]) == {"search": ""}
    unknown = failing_calls([saved("Error: there is no tool", **{"tool_failure/unknown_tool": 1.0})])
    assert unknown[CALLS].startswith("no tool ran")
