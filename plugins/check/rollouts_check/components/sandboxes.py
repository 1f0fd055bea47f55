"""Checks of sandboxes, with real commands. They are skipped if no sandbox can be opened on this machine."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from rollouts.author_code import shown
from rollouts.errors import RolloutsError, SandboxError, SandboxLostError
from rollouts.plugins.signature import call_with
from rollouts.sandboxes.base import Result, Sandbox, Sandboxes
from rollouts_check.components.common import Subject, trying
from rollouts_check.environments.traces import Leftovers, own_temporary_folder
from rollouts_check.report import FailedError, SkippedError, at
from rollouts_check.runner import once

CONCURRENCY = 2
SECONDS = 30.0  # how long a usual command may take
LATE_SECONDS = 15.0  # how long the end of a late command may take


def protocol(subject: Subject) -> str:
    """It makes an object with `words`, `not_stopped`, `check` and `open`; `check` says if none can be opened here."""
    made = _made(subject)
    lacks = [name for name in ("words", "not_stopped", "check", "open") if not hasattr(made, name)]
    if lacks or not isinstance(made, Sandboxes):
        seen = f"it made {type(made).__name__}, which has no {', '.join(lacks)}"
        raise subject.failed("make it", seen, "write these methods and attributes: rollouts.sandboxes.Sandboxes")
    is_list = not isinstance(made.not_stopped, str) and all(isinstance(each, str) for each in made.not_stopped)
    if not isinstance(made.words, str) or not made.words.strip() or not is_list:
        seen = f"words is {shown(made.words)}, not_stopped is {shown(made.not_stopped)}"
        change = "say in one line what a sandbox is, and in a list of texts what it does not stop"
        raise subject.failed("read `words` and `not_stopped`", seen, change)
    _require_open(subject)
    return made.words


def commands(subject: Subject) -> None:
    """A command's exit code, stdout and stderr are in its result; one that fails or does not exist raises nothing."""
    with _opened(subject) as sandbox:
        result = _run(sandbox, "echo out; echo err >&2; exit 3")
        _expect("echo out; echo err >&2; exit 3", tuple(result[:3]), (3, "out\n", "err\n"), subject)
        _expect("['cat'], stdin='typed'", _run(sandbox, ["cat"], stdin="typed").stdout, "typed", subject)
        _expect("['echo', 'a b', '$HOME']", _run(sandbox, ["echo", "a b", "$HOME"]).stdout, "a b $HOME\n", subject)
        missing = _run(sandbox, ["no-such-program-of-rollouts"]).exit_code
        _expect("a program that does not exist: the exit code", missing, 127, subject)
        killed = _run(sandbox, "kill -9 $$").exit_code
        _expect("a command that a signal kills: the exit code", killed, 137, subject)


def files(subject: Subject) -> None:
    """Files are written and read as bytes, folders are made, and remain for the next command."""
    with _opened(subject) as sandbox:
        with trying("write a file in a new folder, and read it"):
            sandbox.write("a/b.txt", "é")
            sandbox.write("bytes", b"\x00\xff")
        _expect("read a file", (sandbox.read("a/b.txt"), sandbox.read("bytes")), ("é".encode(), b"\x00\xff"), subject)
        given = _run(sandbox, "cat a/b.txt given; printf made > made", files={"given": "g"})
        _expect("read files in a command", given.stdout, "ég", subject)
        _expect("read a file that a command made", sandbox.read("made"), b"made", subject)
        _expect_error("read a file that does not exist", lambda: sandbox.read("none"), (OSError,), subject)


def outside(subject: Subject) -> None:
    """`read` and `write` do not leave the workspace: not by a path upwards, an absolute path, or a link."""
    with _opened(subject) as sandbox:
        _run(sandbox, "ln -s /etc/passwd link; ln -s / root")
        calls: list[tuple[str, ...]] = [
            ("read", path) for path in ("../../etc/passwd", "/etc/passwd", "link", "root/etc/passwd")
        ]
        for path in ("../rollouts-outside", "/tmp/rollouts-outside", "root/tmp/rollouts-outside"):
            calls.append(("write", path, "x"))
        for name, path, *content in calls:
            call = functools.partial(getattr(sandbox, name), path, *content)
            _expect_error(f"{name} {path}", call, (ValueError, OSError), subject)


def apart(subject: Subject) -> None:
    """Two sandboxes at the same time have workspaces of their own, which are empty at first."""
    with _opened(subject) as one, _opened(subject) as other:
        one.write("mine", "1")
        seen = _run(other, "ls -A").stdout
        _expect("list the files of another sandbox", seen, "", subject)
        other.write("mine", "2")
        _expect("read a file that both have", one.read("mine"), b"1", subject)


def late(subject: Subject) -> str:
    """A command that takes too long is killed at its deadline, with all that it started; the sandbox goes on."""
    with _opened(subject) as sandbox:
        begun = time.monotonic()
        result = _run(sandbox, "echo begun; sleep 300 & sleep 300", seconds=1.0)
        took = time.monotonic() - begun
        _expect("run a command that takes 300 seconds, with seconds=1: timed_out", result.timed_out, True, subject)
        if took > LATE_SECONDS:
            seen = f"it took {took:.0f} seconds"
            raise subject.failed("run a command with seconds=1", seen, "kill the command at its deadline")
        _expect("the output until then", result.stdout, "begun\n", subject)
        _expect("run another command afterwards", _run(sandbox, "echo alive").stdout, "alive\n", subject)
        left = _run(sandbox, "sleep 300 & echo done")
        _expect("run a command that leaves a process", (left.exit_code, left.timed_out), (0, False), subject)
    return f"killed after {took:.1f} s"


def limits(subject: Subject) -> None:
    """Output is limited, a command may lower limits, and an unknown limit is a TypeError."""
    with _opened(subject) as sandbox:
        result = _run(sandbox, "yes | head -c 300000", output_kib=2)
        if not result.is_cut or len(result.stdout) > 2048:
            tried = "run a command that writes 300,000 bytes, with output_kib=2"
            seen = f"is_cut is {result.is_cut}, and stdout has {len(result.stdout)} characters"
            raise subject.failed(tried, seen, "keep the first part")
        unknown: Any = {"memory_gb": 1}
        call = functools.partial(sandbox.exec, "true", **unknown)
        _expect_error("run a command with the limit memory_gb", call, (TypeError,), subject)


def closed(subject: Subject) -> None:
    """After `close`, every method raises SandboxLostError; `close` may be called again; nothing is left."""
    _require_open(subject)
    with own_temporary_folder(subject.scratch / "closed") as folder:
        before = Leftovers(folder)
        sandbox = _made(subject).open()
        _run(sandbox, "setsid sleep 300 & echo started")
        with trying("close it twice", "let a second call do nothing"):
            sandbox.close()
            sandbox.close()
        _expect("why it was lost, after close", sandbox.lost, "", subject)
        for words, call in (
            ("run a command", lambda: sandbox.exec("true")),
            ("read a file", lambda: sandbox.read("x")),
            ("write a file", lambda: sandbox.write("x", "y")),
        ):
            _expect_error(f"{words} after close", call, (SandboxLostError,), subject)
        change = "end all processes and remove all files in `close`"
        subject.require_nothing_left(before, "close it", change)


def time_to_live(subject: Subject) -> None:
    """At its time to live it ends by itself: its methods raise SandboxLostError, and `lost` says why."""
    if not any(setting.name == "ttl_seconds" for setting in subject.signature.settings):
        raise SkippedError("it has no setting `ttl_seconds`")
    _require_open(subject)
    sandbox = call_with(subject.component, _INPUTS, {**subject.settings, "ttl_seconds": 1.0}).open()
    try:
        call = functools.partial(sandbox.exec, "sleep 300", seconds=LATE_SECONDS)
        _expect_error("run a command that takes longer than ttl_seconds=1", call, (SandboxLostError,), subject)
        if not sandbox.lost:
            raise subject.failed("look why it was lost", "`lost` is empty", "let it say that its time to live is over")
    finally:
        sandbox.close()


# --- calls ------------------------------------------------------------------------------------------------------------

_INPUTS = {"concurrency": CONCURRENCY}


@once
def _made(subject: Subject) -> Any:
    with trying("make it"):
        return call_with(subject.component, _INPUTS, subject.settings)


def _require_open(subject: Subject) -> None:
    """Raise SkippedError if no sandbox can be opened here, and FailedError if `check` raises anything else."""
    if reason := _why_closed(subject):
        raise subject.skipped(f"none can be opened here: {reason}")


@once
def _why_closed(subject: Subject) -> str:
    try:
        with trying("call `check`", "raise ConfigError, with what to type, if no sandbox can be opened here"):
            _made(subject).check()
    except FailedError as error:
        if not isinstance(error.__cause__, RolloutsError):
            raise
        return " ".join(str(error.__cause__).split())
    return ""


@contextlib.contextmanager
def _opened(subject: Subject) -> Iterator[Sandbox]:
    """An open sandbox."""
    _require_open(subject)
    with trying("open a sandbox"):
        sandbox: Sandbox = _made(subject).open()
    try:
        yield sandbox
    finally:
        sandbox.close()


def _run(sandbox: Sandbox, command: Any, **options: Any) -> Result:
    """The result of a command. Raises FailedError if it is no Result, or if an error is raised."""
    tried = f"run {shown(command, 60)}"
    try:
        with trying(tried, "return a Result: a command that fails is no exception"):
            result = sandbox.exec(command, **{"seconds": SECONDS, **options})
    except SandboxError as error:
        raise FailedError(tried, str(error), "keep the sandbox while it is open") from error
    if not isinstance(result, Result):
        seen = f"it returned {type(result).__name__}{at(sandbox.exec)}"
        raise FailedError(tried, seen, "return a rollouts.sandboxes.Result")
    return result


def _expect(tried: str, seen: Any, wanted: Any, subject: Subject) -> None:
    if seen != wanted:
        words = f"{shown(seen)}, expected {shown(wanted)}"
        raise subject.failed(tried, words, "see docs/sandboxes.md: what each method does")


def _expect_error(tried: str, call: Callable[[], Any], kinds: tuple[type[Exception], ...], subject: Subject) -> None:
    """Raise FailedError unless the call raises one of these errors."""
    change = f"raise {' or '.join(kind.__name__ for kind in kinds)}"
    try:
        returned = call()
    except kinds:
        return
    except Exception as other:  # the author's code may raise anything
        raise subject.failed(tried, f"it raised {type(other).__name__}: {other}", change) from other
    raise subject.failed(tried, f"it returned {shown(returned, 80)}", change)
