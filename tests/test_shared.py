"""`shared(self)`: made once for each class and settings, given to the methods that name it, cleaned up at the end."""

from __future__ import annotations

import importlib
import io
import signal
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import forks
import pytest
import trio

import rollouts
from rollouts.cli import main
from rollouts.env.advice import EnvironmentWarning, warn_about
from rollouts.env.checks import check_environment
from rollouts.env.methods import with_inputs
from rollouts.env.shared import SharedValue, shared_value, shared_values
from rollouts.errors import EnvironmentDefinitionError
from rollouts.types import Status, Task

sys.path.insert(0, str(Path(__file__).parent))
from agent_fakes import FakeEngine, Quiz, play


class Base(Quiz):
    """Records, in `events`, what happens to the shared value and in which thread."""

    events: ClassVar[list[tuple[str, int]]]

    def record(self, word: str) -> None:
        self.events.append((word, threading.get_ident()))

    def setup(self, task: Task, shared: Any) -> None:
        self.index = shared


class Plain(Base):
    def shared(self) -> list[int]:
        self.record("made")
        return [1]


class Generator(Base):
    def shared(self) -> Any:
        self.record("made")
        yield [1]
        self.record("cleaned")


class Trio(Base):
    async def shared(self) -> list[int]:
        await trio.sleep(0.01)
        self.record("made")
        return [1]


class TrioGenerator(Base):
    async def shared(self) -> Any:
        async with trio.open_nursery() as nursery:  # open across the yield: start and end run in one task
            nursery.start_soon(trio.sleep_forever)
            self.record("made")
            yield [1]
            nursery.cancel_scope.cancel()
        self.record("cleaned")


class AsyncioGenerator(Base):
    async_library = "asyncio"

    async def shared(self) -> Any:
        import asyncio

        async with asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.sleep(3600))
            self.record("made")
            self.loop = asyncio.get_running_loop()
            yield [1, self.loop]
            task.cancel()
        self.record("cleaned")


def values_of(cls: type[Base], episodes: int = 3) -> tuple[list[Any], list[tuple[str, int]]]:
    """The shared values that concurrent episodes got, and what happened until the end of the block."""
    made: list[Any] = []

    class Env(cls):  # type: ignore[misc,valid-type]
        events: ClassVar[list[tuple[str, int]]] = []

        def close(self) -> None:
            made.append(self.index)

    def one() -> None:
        assert play(Env, FakeEngine("42")).status is Status.COMPLETED

    with shared_values():
        threads = [threading.Thread(target=one) for _ in range(episodes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [word for word, _ in Env.events] == ["made"]
    return made, Env.events


@pytest.mark.parametrize("cls", [Plain, Generator, Trio, TrioGenerator, AsyncioGenerator])
def test_episodes_of_several_runs_get_one_value_which_is_cleaned_up_in_the_thread_that_made_it(cls: Any) -> None:
    made, events = values_of(cls)
    assert len(made) == 3 and all(value is made[0] for value in made) and made[0][0] == 1
    has_cleanup = "Generator" in cls.__name__
    assert [word for word, _ in events] == ["made", "cleaned"][: 1 + has_cleanup]
    assert len({thread for _, thread in events}) == 1 and events[0][1] != threading.get_ident()


def test_what_asyncio_code_opens_works_in_the_tools() -> None:
    """One asyncio loop serves `shared` and all asyncio methods, so a client that `shared` opens can be used."""
    import asyncio

    from rollouts import tool

    class Env(AsyncioGenerator):
        events: ClassVar[list[tuple[str, int]]] = []

        @tool
        async def same(self) -> bool:
            """Whether this is the loop of `shared`."""
            return asyncio.get_running_loop() is self.index[1]

    with shared_values():
        assert play(Env, FakeEngine("[same {}]", "x")).trajectory.messages[2].text == "true"


def test_other_settings_have_another_value_and_equal_ones_the_same() -> None:
    made: list[dict[str, Any]] = []

    def value(settings: dict[str, Any]) -> Any:
        return shared_value(Plain, settings, lambda: Made(settings)).get_now()

    class Made:
        def __init__(self, settings: dict[str, Any]) -> None:
            self.settings = settings

        def shared(self) -> object:
            made.append(self.settings)
            return object()

    with shared_values():
        first = value({"size": [1], "path": "a"})
        assert value({"size": [1], "path": "a"}) is first
        assert value({"size": [2], "path": "a"}) is not first
    assert made == [{"size": [1], "path": "a"}, {"size": [2], "path": "a"}]
    with shared_values():
        assert value({"size": [1], "path": "a"}) is not first  # a later run makes its own


def test_the_last_open_block_cleans_up() -> None:
    class Env(Generator):
        events: ClassVar[list[tuple[str, int]]] = []

    with pytest.raises(KeyboardInterrupt), shared_values():
        with shared_values():
            assert shared_value(Env, {}, Env).get_now() == [1]
        assert [word for word, _ in Env.events] == ["made"]
        raise KeyboardInterrupt
    assert [word for word, _ in Env.events] == ["made", "cleaned"]


class Raises(Base):
    def shared(self) -> Any:
        raise KeyError("no index")


class YieldsNothing(Base):
    def shared(self) -> Any:
        yield from ()


class Wrong(Base):
    async def shared(self) -> None:
        await importlib.import_module("asyn" + "cio").sleep(1)  # which library this is cannot be read


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Raises, "shared() raised KeyError: 'no index'"),
        (YieldsNothing, "it yielded nothing; a generator yields the value once"),
        (Wrong, 'write `async_library = "asyncio"`'),
    ],
)
def test_an_error_of_shared_ends_the_run_with_the_line(cls: Any, words: str) -> None:
    cls.events = []
    with shared_values(), pytest.raises(EnvironmentDefinitionError) as caught:
        play(cls)
    assert words in str(caught.value) and f"{cls.__name__}.shared()" in str(caught.value)
    if cls is Raises:
        assert "test_shared.py, line " in str(caught.value)


def test_an_error_is_not_kept() -> None:
    failures = iter([OSError("busy")])

    class Env(Base):
        def shared(self) -> int:
            for error in failures:
                raise error
            return 5

    with shared_values():
        with pytest.raises(EnvironmentDefinitionError, match="busy"):
            shared_value(Env, {}, Env).get_now()
        assert shared_value(Env, {}, Env).get_now() == 5


def test_a_clean_up_that_fails_is_a_warning_with_the_line() -> None:
    class Env(Base):
        def shared(self) -> Any:
            yield 1
            raise OSError("still mounted")

    class Twice(Base):
        async def shared(self) -> Any:
            yield 1
            yield 2

    for cls, words in ((Env, "raised OSError: still mounted"), (Twice, "it yielded twice")):
        value = SharedValue(cls)
        value.get_now()
        with pytest.warns(EnvironmentWarning, match=words) as caught:
            value.close()
        assert caught[0].filename == __file__ and "the clean-up of" in str(caught[0].message)


def test_a_clean_up_that_hangs_is_left_after_its_deadline() -> None:
    gone = threading.Event()

    class Env(Base):
        def shared(self) -> Any:
            yield 1
            gone.wait(60)

    value = SharedValue(Env)
    value.get_now()
    with pytest.warns(EnvironmentWarning, match=r"took longer than 0\.01 seconds, and was left"):
        value.close(0.01)
    gone.set()


def test_an_episode_waits_for_shared_no_longer_than_for_setup() -> None:
    made = threading.Event()

    class Env(Base):
        def shared(self) -> Any:
            made.wait(60)

    with shared_values():
        episode = play(Env, setup_seconds=1.0)
        made.set()
    assert (episode.status, episode.trajectory.error) == (
        Status.TIMEOUT,
        "running shared took longer than 1 seconds",
    )


# --- by name --------------------------------------------------------------------------------------------------------


def shared_first(shared: str, task: str) -> tuple[str, str]:
    return task, shared


def only_by_name(task: str, *, shared: str) -> tuple[str, str]:
    return task, shared


def other_name(row: str, rest: int = 3, shared: str = "") -> tuple[str, str]:
    return row, shared


def by_place(task: str, /, shared: str) -> tuple[str, str]:
    return task, shared


def variadic(*arguments: str, shared: str) -> tuple[str, str]:
    return arguments[0], shared


@pytest.mark.parametrize("method", [shared_first, only_by_name, other_name, by_place, variadic])
def test_an_input_may_have_any_place_among_the_parameters(method: Any) -> None:
    call, *arguments = with_inputs(method, ["a task"], {"shared": "an index"})
    assert call(*arguments) == ("a task", "an index")


def test_methods_that_name_shared_are_checked() -> None:
    class Missing(Quiz):
        def setup(self, task: Task, shared: Any) -> None: ...

    class TooMany(Plain):
        def setup(self, task: Task, shared: Any, other: Any) -> None: ...

    class First(Plain):
        def setup(self, shared: Any, task: Task) -> None: ...

        def tasks(self, split: str, shared: Any, rng: Any) -> list[Task]:
            return []

    class Elsewhere(Plain):
        def reply(self, trajectory: Any, shared: Any) -> None: ...

    for env in (First, First()):
        check_environment(env)
    for cls, words in (
        (Missing, "Missing.setup names `shared`, and Missing has no method `shared`"),
        (TooMany, "missing a required argument: 'other'"),
        (Elsewhere, "missing a required argument: 'shared'"),
    ):
        for env in (cls, cls()):
            with pytest.raises(EnvironmentDefinitionError) as caught:
                check_environment(env)
            assert words in str(caught.value) and "test_shared.py" in str(caught.value)


def test_a_shared_that_no_method_names_is_a_warning() -> None:
    class Unused(Plain):
        def setup(self, task: Task) -> None: ...

    with pytest.warns(EnvironmentWarning, match="no method names `shared`; write `def setup"):
        warn_about(Unused())
    warn_about(Plain())


# --- commands -------------------------------------------------------------------------------------------------------

ENVIRONMENT = '''\
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from rollouts import Message, Task, reward


def record(word):
    with open("events.txt", "a") as file:
        file.write(word + "\\n")


@dataclass
class Indexed:
    """Its tasks come from a shared index."""

    size: int = 30
    interrupts: bool = False

    def shared(self):
        record("made")
        yield [f"Say {number}." for number in range(self.size)]
        record("cleaned")

    def tasks(self, split, rng, shared):
        return [Task(text) for text in shared]

    def setup(self, shared, task):
        self.index = shared
        if self.interrupts:
            self.interrupts = False
            os.kill(os.getpid(), signal.SIGINT)

    @reward
    def known(self, task):
        return float(task.prompt in self.index)

    def demonstrations(self, split, rng, shared):
        for text in shared:
            yield [Message("user", text), Message("assistant", "Yes.")]
'''
SIZES = (
    "--steps",
    "1",
    "--prompts-per-step",
    "2",
    "--samples-per-prompt",
    "2",
    "--eval-tasks",
    "2",
    "--max-tokens",
    "4",
)


@pytest.fixture
def indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "indexed.py").write_text(ENVIRONMENT)
    return "./indexed.py:Indexed"


@pytest.mark.parametrize(
    "command",
    [
        ("run", *SIZES),
        ("run", "--dry-run", *SIZES),
        ("sft", *SIZES),
        ("run", "--mode", "sft+rl", *SIZES),
        ("eval", "--eval-tasks", "2", "--max-tokens", "4"),
        ("chat", "tiny", "--task", "0", "--max-tokens", "4"),
    ],
)
def test_each_command_makes_the_value_once_and_cleans_it_up(
    indexed: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main([*command, "--env", indexed]) == 0
    assert Path("events.txt").read_text().split() == ["made", "cleaned"]


def test_two_runs_of_one_program_each_make_their_own(indexed: str) -> None:
    for _ in range(2):
        rollouts.run(env=indexed, mode="eval", eval_tasks=1, max_tokens=2, quiet=True)
    assert Path("events.txt").read_text().split() == ["made", "cleaned"] * 2


@pytest.mark.slow
def test_ctrl_c_cleans_up(indexed: str) -> None:
    arguments = ["-m", "rollouts", "run", "--env", indexed, "--env.interrupts", "true", *SIZES]
    done = forks.run([sys.executable, *arguments], timeout=120)
    assert done.returncode in (130, -signal.SIGINT), done.stderr
    assert Path("events.txt").read_text().split() == ["made", "cleaned"]


def test_a_mistake_in_shared_is_one_message_with_its_line(indexed: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("indexed.py").write_text(ENVIRONMENT.replace('    record("made")', "    record(1)", 1))
    for more in (("--dry-run",), ()):
        assert main(["run", "--env", indexed, *SIZES, *more]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: Indexed.shared() raised TypeError") and "indexed.py, line " in said
        assert "Traceback" not in said
