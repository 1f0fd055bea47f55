"""Tools in processes of their own: what comes back, what is killed, what is left."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import trio

from rollouts.env import processes, tool
from rollouts.env.authoring import ToolReference, reference_of, tools_of
from rollouts.env.calls import CallTimeoutError
from rollouts.env.results import ToolOutcome
from rollouts.env.schema import tool_schema
from rollouts.env.tools import run_tool
from rollouts.env.worker import answer, find_function
from rollouts.errors import EnvironmentDefinitionError
from rollouts.types import ToolCall

sys.path.insert(0, str(Path(__file__).parent))
from isolated_tools import Isolated, at_the_top

NIGHTLY = pytest.mark.nightly
TOOLS = {each.name: each for each in tools_of(Isolated())}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process, file descriptor or thread outlives a run."""
    before = left()
    yield
    trio.run(functools.partial(trio.sleep, 0))
    assert left() == before


def left() -> tuple[int, int, int]:
    me = psutil.Process()
    waiting = ("Trio", "rollouts-worker")  # threads that wait for work, and end where none comes
    threads = sum(not thread.name.startswith(waiting) for thread in threading.enumerate())
    return len(me.children(recursive=True)), me.num_fds(), threads


class Outcome(NamedTuple):
    text: str
    failure: str | None


async def ask(name, **arguments):
    """The outcome without the author's line."""
    return Outcome(*(await run_tool(TOOLS, ToolCall(name, arguments)))[:2])


def outcome(name, **arguments):
    return trio.run(functools.partial(ask, name, **arguments))


@pytest.mark.parametrize("name", ["outside", "double"])
def test_a_result_comes_back(name):
    assert outcome(name, n=21) == ("42", None)


def test_marks_below_and_above_staticmethod():
    assert outcome("shout", text="aé\u2028\ud800") == ("AÉ\u2028\\ud800", None)
    assert Isolated.shout("a") == Isolated().shout("a") == "A", "in this process it stays a plain function"
    assert tool_schema(TOOLS["shout"].function, "shout")["function"]["parameters"]["required"] == ["text"]


def test_arguments_are_converted_there_and_results_are_json():
    assert outcome("add", point={"x": "3", "y": 4}, times=2) == ('{"x":14,"y":0}', None)
    text, failure = outcome("add", point={"x": "three"})
    assert failure == "bad_arguments" and "argument 'point' of add" in text


@pytest.mark.parametrize("name", ["spin", *(pytest.param(name, marks=NIGHTLY) for name in ("deaf", "hold_the_gil"))])
def test_the_deadline_kills_whatever_it_does(name):
    earlier = set(psutil.Process().children())  # of other tests

    async def main():
        began = trio.current_time()
        result = await ask(name)
        assert trio.current_time() - began < 5, "killed, not waited for"
        assert set(psutil.Process().children()) <= earlier, "gone at once"
        assert await ask("double", n=1) == ("2", None), "and another one takes its place"
        return result

    assert trio.run(main) == (f"Error: {name} took longer than 0.3 seconds", "timeout")


def test_a_cap_on_every_tool():
    async def main():
        return await run_tool(TOOLS, ToolCall("deaf", {}), seconds_max=0.05)

    assert trio.run(main).text == "Error: deaf took longer than 0.05 seconds"


def test_what_a_tool_started_dies_with_it(tmp_path):
    file = tmp_path / "pid"
    assert outcome("wait_for_child", file=str(file)).failure == "timeout"
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(int(file.read_text()))], timeout=5)
    assert not psutil.pid_exists(int(file.read_text()))


def test_a_call_gets_its_own_answer_after_a_tool_that_forked():
    async def main():
        assert await ask("fork", x=1) == ("1", None)
        return [await ask("double", n=n) for n in range(1, 6)]

    assert trio.run(main) == [(str(2 * n), None) for n in range(1, 6)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process can leave its group")
@pytest.mark.parametrize(
    ("name", "text"), [("daemonize", "begun"), pytest.param("daemonize_and_crash", "exit code 3", marks=NIGHTLY)]
)
def test_a_daemon_that_a_tool_started_does_not_outlive_the_run(name, text, tmp_path):
    answered = outcome(name, file=str(tmp_path / "pid"))
    assert text in answered.text
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process can leave its group")
def test_a_process_that_a_list_of_processes_misses_is_killed_all_the_same():
    """It was started while the list was read, and what had started it had ended by then."""
    code = """if True:
        import os, sys
        from rollouts import supervisor
        lists, left = [([], {})], supervisor._left
        supervisor._left = lambda *given: lists.pop() if lists else left(*given)
        sys.exit(supervisor.main(0, os.getppid(), 0.0, ["sh", "-c", "sleep 60 & echo $!; exit 3"]))
    """
    command = [sys.executable, "-c", code]
    supervisor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert supervisor.stdin is not None and supervisor.stdout is not None
    with supervisor, supervisor.stdin, supervisor.stdout:
        pid = int(supervisor.stdout.readline())
        assert supervisor.wait() == 3
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("segfault", "exit code 139 = 128 + 11, probably SIGSEGV"),
        pytest.param("vanish", "exit code 3", marks=pytest.mark.nightly),
        ("garble", "exit code 137 = 128 + 9, probably SIGKILL"),
    ],
)
def test_a_crash_is_told(name, words):
    async def main():
        assert await ask(name) == (f"Error: {name} crashed its process ({words})", "crashed")
        assert await ask("double", n=1) == ("2", None)

    trio.run(main)


def test_exceptions_are_text():
    assert outcome("fail") == ("Error: ValueError: no \\ud800 good", "exception")
    assert outcome("leave") == ("Error: SystemExit: enough", "exception")


def test_an_exception_has_its_file_and_line():
    error = trio.run(run_tool, TOOLS, ToolCall("fail")).error
    assert re.search(r"isolated_tools\.py, line \d+: raise ValueError\(", error), error


def test_what_it_prints_is_no_answer(capfd):
    assert outcome("talk") == ("read ''", None)
    assert "not an answer" in capfd.readouterr().err


def test_a_long_result_is_cut():
    text, failure = outcome("long")
    assert failure is None and text.endswith("[cut: the first 16000 of 50000 characters]") and len(text) < 16_100


def test_one_process_is_used_again_and_many_are_bounded():
    async def main():
        first = {(await ask("pid")).text for _ in range(5)}
        assert len(first) == 1
        seen = set()

        async def once():
            seen.add((await ask("pid")).text)

        async with trio.open_nursery() as nursery:
            for _ in range(5 * processes.WORKERS_MAX):
                nursery.start_soon(once)
        assert first <= seen and len(seen) <= processes.WORKERS_MAX

    trio.run(main)


def test_the_wait_for_a_process_is_not_part_of_the_deadline(monkeypatch):
    monkeypatch.setattr(processes, "WORKERS_MAX", 1)

    async def main():
        results = []

        async def once(name, **arguments):
            results.append(await run_tool(TOOLS, ToolCall(name, arguments), seconds_max=0.2))

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(once, "spin")
            nursery.start_soon(functools.partial(once, "double", n=1))
        return sorted(str(result.failure) for result in results)

    assert trio.run(main) == ["None", "timeout", "timeout"]


def test_cancellation_kills():
    earlier = set(psutil.Process().children())  # of other tests

    async def main():
        with trio.move_on_after(0.5) as scope:
            await run_tool(TOOLS, ToolCall("wait_for_child", {"file": os.devnull}), seconds_max=60)
        assert scope.cancelled_caught
        assert set(psutil.Process().children()) <= earlier

    trio.run(main)


def test_one_that_died_while_it_was_idle_is_not_used():
    async def main():
        os.kill(int((await ask("pid")).text), signal.SIGKILL)
        await trio.sleep(0.05)
        assert (await ask("double", n=2)).text == "4"

    trio.run(main)


def test_another_run_has_processes_of_its_own():
    assert outcome("pid").text != outcome("pid").text


def test_no_process_can_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(processes.ProcessError, match="no process could be started"):
        outcome("double", n=1)


def test_a_process_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(processes, "BOOT", "import time; time.sleep(60)")
    monkeypatch.setattr(processes, "START_SECONDS", 0.2)
    with pytest.raises(processes.ProcessError, match=r"died, or did not import isolated_tools in 0\.2 s"):
        outcome("double", n=1)


def test_a_module_that_does_not_import_there(tmp_path, monkeypatch):
    (tmp_path / "fussy_tools.py").write_text(
        textwrap.dedent("""
            import sys
            from rollouts import tool
            assert "pytest" in sys.modules, "only here"

            @tool(isolate="process")
            def here() -> str:
                return "here"
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    import fussy_tools

    async def main():
        await processes.call_isolated(fussy_tools.here, {}, label="here", timeout_seconds=5)

    with pytest.raises(
        EnvironmentDefinitionError, match=r"fussy_tools does not import there \(AssertionError: only here"
    ):
        trio.run(main)


def test_a_tool_of_a_file_and_of_the_script_itself(tmp_path):
    """`./my_env.py:Env`, and a script that plays its own environment: neither has a name that can be imported."""
    (tmp_path / "my_env.py").write_text(
        textwrap.dedent("""
            from rollouts import tool
            from neighbor import FACTOR

            class Env:
                @staticmethod
                @tool(isolate="process")
                def triple(n: int) -> int:
                    return FACTOR * n

            if __name__ == "__main__":
                import trio
                from rollouts.env.tools import run_tool
                from rollouts.env.authoring import tools_of
                from rollouts.types import ToolCall
                from rollouts.plugins import find_component, load_component
                for env in (Env, load_component(find_component("environments", f"{__file__}:Env"))):
                    tools = {tool.name: tool for tool in tools_of(env())}
                    print(trio.run(run_tool, tools, ToolCall("triple", {"n": 2})).text)
        """)
    )
    (tmp_path / "neighbor.py").write_text("FACTOR = 3\n")
    done = subprocess.run(
        [sys.executable, "my_env.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["6", "6"], done.stderr


@pytest.mark.parametrize(
    "name", ["spin", "a fork", *(pytest.param(each, marks=NIGHTLY) for each in ("hold_the_gil", "pid"))]
)
def test_processes_end_when_their_owner_is_killed(name, tmp_path):
    script = textwrap.dedent(f"""
        import os
        import time
        import trio
        from isolated_tools import Isolated
        from rollouts.env.tools import run_tool
        from rollouts.env.authoring import tools_of
        from rollouts.types import ToolCall
        tools = {{each.name: each._replace(timeout_seconds=60) for each in tools_of(Isolated())}}
        async def main():
            pid = (await run_tool(tools, ToolCall("pid", {{}}))).text
            if {name!r} == "a fork" and (fork := os.fork()) == 0:  # as an environment may do: it outlives the owner
                time.sleep(60)
            print(pid, fork if {name!r} == "a fork" else "", flush=True)
            await run_tool(tools, ToolCall({name!r}, {{}}))
            await trio.sleep(60)
        trio.run(main)
    """)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environ) as owner:
        try:
            worker, *forks = (psutil.Process(int(pid)) for pid in owner.stdout.readline().split())
            time.sleep(0.3)
        finally:
            owner.kill()
    try:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            worker.wait(timeout=5)
        assert not worker.is_running()
        assert all(fork.is_running() for fork in forks)
    finally:
        for fork in forks:
            fork.kill()


def test_what_cannot_be_isolated_is_told_what_to_write():
    with pytest.raises(
        EnvironmentDefinitionError, match=r"names 'self'.*\n.*@staticmethod\n.*\n    def go\(n: 'int'\)"
    ):

        class Bound:
            @tool(isolate="process")
            def go(self, n: int) -> int:
                return n

    with pytest.raises(EnvironmentDefinitionError, match="names 'cls'"):

        class OfClass:
            @tool(isolate="process")
            @classmethod
            def go(cls) -> int:
                return 1

    with pytest.raises(EnvironmentDefinitionError, match="is async"):

        @tool(isolate="process")
        async def later() -> None: ...

    with pytest.raises(EnvironmentDefinitionError, match="written with `def`"):
        tool(isolate="process")(functools.partial(at_the_top, 1))
    with pytest.raises(EnvironmentDefinitionError, match="may be 'process'"):
        tool(isolate="thread")


def test_what_another_process_would_not_find_is_refused():
    class Local:
        @staticmethod
        @tool(isolate="process")
        def go() -> int:
            return 1

    with pytest.raises(EnvironmentDefinitionError, match="inside a function, where another process does not find it"):
        tools_of(Local())

    def other() -> int:
        return 2

    other.__qualname__, other.__module__ = "at_the_top", "isolated_tools"
    with pytest.raises(EnvironmentDefinitionError, match=r"not what .* finds as isolated_tools\.at_the_top"):
        reference_of(other)


def test_the_worker_answers_in_words():
    reference = reference_of(at_the_top)
    assert find_function(reference) is at_the_top
    request = {"call": reference, "label": "at_the_top", "characters_max": 10}
    assert answer({"load": reference})["outcome"] == ToolOutcome("")
    assert answer(request | {"arguments": {"n": 4}})["outcome"] == ToolOutcome("8")
    assert answer(request | {"arguments": {}})["outcome"].failure == "bad_arguments"
    missing = ToolReference("isolated_tools", "nobody")
    assert "no attribute 'nobody'" in answer({"load": missing})["outcome"].text
    assert answer({"load": ToolReference("no_such_module", "f", "/nowhere.py")})["outcome"].failure == "exception"


def test_a_deadline_of_the_tools_own_is_no_deadline_of_ours():
    from rollouts.env import calls

    async def own() -> None:
        with trio.fail_after(0.01):
            await trio.sleep_forever()

    with pytest.raises(trio.TooSlowError) as caught:
        trio.run(functools.partial(calls.call, own, timeout_seconds=5))
    assert not isinstance(caught.value, CallTimeoutError)
