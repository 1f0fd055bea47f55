"""An environment that is silently not what its author meant: refused when the run is composed, or warned about."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import pytest

from rollouts.cli import main
from rollouts.env import metric, reward, tool
from rollouts.env.advice import EnvironmentWarning, warn_about
from rollouts.env.authoring import metrics_of, rewards_of, tools_of
from rollouts.env.checks import check_environment
from rollouts.errors import EnvironmentDefinitionError
from rollouts.types import Task


class Base:
    def tasks(self, split, rng):
        yield Task("2 + 2?")

    @reward
    def right(self, trajectory):
        return 1.0


class ToolWithoutSelf(Base):
    @tool
    def double(x: int):
        """Double a number."""


class ToolOfNothing(Base):
    @tool
    def stop():
        """Stop."""


class UntypedTool(Base):
    @tool
    def double(x, y: int):
        """Double a number."""


class RewardWithoutSelf(Base):
    @reward
    def short(task, trajectory):
        return 1.0


class MetricWithoutSelf(Base):
    @metric
    def length(trajectory):
        return 1.0


class CloseWithoutSelf(Base):
    def close():
        pass


class SetupWithoutSelf(Base):
    def setup(task):
        pass


class RestoreOfNothing(Base):
    def state(self):
        return 1

    def restore(self):
        pass


LOST = "@tool ToolWithoutSelf.double(x: int) has no `self`, so 'x' receives the environment; write "
REFUSED = [
    (ToolWithoutSelf, LOST + "`def double(self, x: int)`, or write @staticmethod above @tool\n"),
    (ToolOfNothing, "so it takes no environment; write `def stop(self)`"),
    (UntypedTool, "write `def double(self, x, y: int)`"),
    (RewardWithoutSelf, "@reward RewardWithoutSelf.short(task, trajectory) has no `self`, so 'task' receives the"),
    (MetricWithoutSelf, "write `def length(self, trajectory)`"),
    (CloseWithoutSelf, "; write `def close(self)`"),
    (SetupWithoutSelf, "write `def setup(self, task)`"),
    (RestoreOfNothing, "write `def restore(self, state)`"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("is_object", [True, False])
def test_a_method_without_self_is_refused(cls, words, is_object):
    with pytest.raises(EnvironmentDefinitionError, match=re.escape(words)) as caught:
        check_environment(cls() if is_object else cls)
    if "has no `self`" in words:
        assert re.search(r"test_advice.py, line \d+: def ", str(caught.value))


def test_methods_that_are_handed_nothing_and_other_words_for_self_are_allowed():
    class Fine(Base):
        @staticmethod
        @tool
        def double(x: int) -> int:
            """Double a number."""
            return 2 * x

        @tool
        @staticmethod
        def half(x: int) -> float:
            """Halve a number."""
            return x / 2

        @staticmethod
        @reward
        def short(task, trajectory):
            return float(task.answer == 4)

        @classmethod
        @metric
        def size(cls, trajectory):
            return 1.0

        @metric
        def level(this, trajectory):
            return 1.0

        @reward()
        def second(self):
            return 1.0

        @metric()
        def third(_self):
            return 1.0

    check_environment(Fine)
    check_environment(Fine())
    env = Fine()
    assert {each.name: each.function(x=4) for each in tools_of(env)} == {"double": 8, "half": 2.0}
    by_name = {each.name: each.function for each in [*rewards_of(env), *metrics_of(env)]}
    assert by_name["short"](Task("x", answer=4), None) == by_name["size"](None) == by_name["third"]() == 1.0


def plain():
    pass


def two_marks(outer, inner):
    def fresh(self):
        pass

    outer(inner(fresh))


BY_NAME = "settings of a mark are given by name, "
MARKS = [
    (lambda: reward(0.5), f"@reward(0.5): {BY_NAME}such as @reward(weight=0.5); `--reward env:0.5` weighs all"),
    (lambda: reward("right"), f"@reward('right'): {BY_NAME}such as @reward(weight=0.5)"),
    (lambda: reward(weight="much"), "@reward(weight='much'): a weight is a finite number"),
    (lambda: tool(5), "@tool(5): settings of a mark are given by name, such as @tool(timeout_seconds=5)"),
    (lambda: tool(timeout_seconds="5"), "@tool(timeout_seconds='5'): a deadline is a positive number"),
    (lambda: metric("x"), "@metric('x'): settings of a mark are given by name, such as @metric(role="),
    (lambda: tool(Base), "@tool is on the class Base; it marks one method"),
    (lambda: reward(property(plain)), "@reward is on a property"),
    (lambda: metric(len), "@metric cannot mark len, a builtin_function_or_method"),
    (lambda: two_marks(tool, tool(name="a")), "fresh is marked twice, by @tool, with different settings"),
    (lambda: two_marks(tool, reward), "is marked as @tool and as @reward"),
]  # fmt: skip


@pytest.mark.parametrize(("mark", "words"), MARKS)
def test_a_mark_that_is_written_wrongly_says_how_it_is_written(mark, words):
    with pytest.raises(EnvironmentDefinitionError, match=re.escape(words)):
        mark()


def test_the_same_mark_twice_is_one():
    two_marks(tool, tool)
    two_marks(reward(weight=0.5), reward(weight=0.5))


def warned(cls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_about(cls)
    assert all(each.category is EnvironmentWarning and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def test_near_misses_of_the_contract_and_silent_tools_are_warned_about():
    class Odd(Base):
        def set_up(self, task): ...
        def respond(self, trajectory): ...
        def teardown(self): ...
        def restore_state(self, state): ...
        def demonstration(self, split, rng): ...

        @tool
        def double(self, x: int):
            return x

    words = warned(Odd)
    assert "Odd.set_up is never called by rollouts; did you mean `setup`?" in "\n".join(words)
    meant = {re.match(r"Odd\.(\w+)", each)[1]: re.search(r"did you mean `(\w+)`", each)[1] for each in words[:-1]}
    assert meant == {"set_up": "setup", "respond": "reply", "teardown": "close", "restore_state": "restore",
                     "demonstration": "demonstrations"}  # fmt: skip
    assert "name it `_set_up`" in "\n".join(words) and words[-1].startswith("the tool Odd.double has no docstring")


def test_helpers_and_methods_beside_the_real_one_are_not_warned_about():
    class Fine(Base):
        set_up = 5

        def setup(self, task): ...
        def _respond(self): ...
        def start(self): ...
        def task(self): ...
        def get_tasks(self): ...
        def prepare(self): ...

        @metric
        def replay(self):
            return 1.0

        @tool
        def finish(self):
            """End it."""

    assert warned(Fine) == warned(Fine()) == []


@pytest.mark.parametrize("name", ["get_tasks", "task"])
def test_an_environment_without_tasks_names_what_it_has(name):
    with pytest.raises(EnvironmentDefinitionError, match=rf"has no method `tasks` \(it has '{name}'\)"):
        check_environment(type("Wrong", (), {name: Base.tasks}))


IMAGE = """
from rollouts import Message, Task, reward

PICTURE = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]


class Picture:
    first, kind = 0, "train"

    def tasks(self, split, rng):
        for number in range(10):
            is_picture = split == self.kind and number >= self.first
            content = PICTURE if is_picture else f"{split} {number}?"
            yield Task([{"role": "user", "content": content}], id=f"{split} {number}")

    @reward
    def right(self):
        return 1.0


class Later(Picture):
    first = 3


class HeldOut(Picture):
    kind = "eval"


class Spoken(Picture):
    first = 99

    def reply(self, trajectory):
        return Message("user", PICTURE)
"""
RUN = ["--prompts-per-step", "1", "--samples-per-prompt", "2", "--max-tokens", "4", "--steps", "9", "--eval-tasks", "2"]


@pytest.mark.parametrize(
    ("name", "more", "whose"),
    [
        ("Picture", ["--dry-run"], "the task 'train 0'"),
        ("HeldOut", ["--dry-run"], "the task 'eval 0'"),
        ("Later", [], "the task 'train 3'"),
        ("Spoken", ["--eval-tasks", "0", "--max-tokens", "30"], "the task 'train 0'"),
    ],
)
def test_a_picture_is_refused_and_never_dropped(name, more, whose, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures.py").write_text(IMAGE)
    assert main(["run", "--env", f"./pictures.py:{name}", *RUN, *more]) == 2
    error = capsys.readouterr().err
    assert whose in error and "(user) has a part of type 'image_url'" in error and "rollouts eval" in error


STRAY = """
import threading
import rollouts.cli.app as app
from rollouts.errors import ConfigError
from rollouts.env.advice import EnvironmentWarning
import warnings, click, sys

class Late:
    def __del__(self):
        raise ValueError("in a destructor")

def work():
    raise KeyError("in a thread")

def callback(**_):
    thread = threading.Thread(target=work, name="mine")
    thread.start(); thread.join()
    Late()
    warnings.warn_explicit("odd", EnvironmentWarning, "x.py", 3)
    raise ZeroDivisionError("ours")

import rollouts.cli.config as config
config.config.callback = callback
sys.argv = ["rollouts", "config"]
sys.exit(app.main())
"""


def test_the_terminal_never_shows_a_traceback(tmp_path):
    (tmp_path / "stray.py").write_text(STRAY)
    done = subprocess.run([sys.executable, "stray.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    thread, destructor, odd, bug, *_ = done.stderr.splitlines()
    assert "warning: a thread failed: KeyError: 'in a thread' (" in thread and "raise KeyError" in thread
    assert "ValueError: in a destructor" in destructor and odd == "warning: odd (x.py, line 3)"
    assert bug.startswith("error: ZeroDivisionError: ours (stray.py, line 20")
