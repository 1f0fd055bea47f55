"""Checks of sandboxes, with real commands. They are skipped if no sandbox can be opened on this machine."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from rollouts.author_code import shown
from rollouts.errors import RolloutsError, SandboxLostError
from rollouts.plugins.signature import call_with
from rollouts.sandboxes.base import Result, Sandbox, Sandboxes
from rollouts_check.components.common import Subject
from rollouts_check.environments.traces import Leftovers, own_temporary_folder
from rollouts_check.report import FailedError, SkippedError, trying
from rollouts_check.runner import once

CONCURRENCY = 2
SECONDS = 30.0  # how long a usual command may take
LATE_SECONDS = 15.0  # how long the end of a late command may take


def protocol(subject: Subject) -> str:
    """It makes an object with `words`, `not_stopped`, `check` and `open`; `check` says if none can be opened here.

    Advice: write the methods and attributes of rollouts.sandboxes.Sandboxes
    """
    made = _made(subject)
    attempt = subject.attempt("make it")
    lacks = [name for name in ("words", "not_stopped", "check", "open") if not hasattr(made, name)]
    is_one = not lacks and isinstance(made, Sandboxes)
    attempt.require(is_one, f"it made {type(made).__name__}, which has no {', '.join(lacks)}")
    is_list = not isinstance(made.not_stopped, str) and all(isinstance(each, str) for each in made.not_stopped)
    is_said = isinstance(made.words, str) and made.words.strip() and is_list
    change = "say in one line what a sandbox is, and in a list of texts what it does not stop"
    attempt.require(is_said, f"words is {shown(made.words)}, not_stopped is {shown(made.not_stopped)}", change)
    _require_open(subject)
    return str(made.words)


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
        with subject.trying("write a file in a new folder, and read it"):
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
        for path in ("../../etc/passwd", "/etc/passwd", "link", "root/etc/passwd"):
            _expect_error(f"read {path}", functools.partial(sandbox.read, path), (ValueError, OSError), subject)
        for path in ("../rollouts-outside", "/tmp/rollouts-outside", "root/tmp/rollouts-outside"):
            _expect_error(f"write {path}", functools.partial(sandbox.write, path, "x"), (ValueError, OSError), subject)


def apart(subject: Subject) -> None:
    """Two sandboxes at the same time have workspaces of their own, which are empty at first."""
    with _opened(subject) as one, _opened(subject) as other:
        one.write("mine", "1")
        _expect("list the files of another sandbox", _run(other, "ls -A").stdout, "", subject)
        other.write("mine", "2")
        _expect("read a file that both have", one.read("mine"), b"1", subject)


def late(subject: Subject) -> str:
    """A command that takes too long is killed at its deadline, with all that it started; the sandbox goes on.

    Advice: kill the command at its deadline
    """
    with _opened(subject) as sandbox:
        begun = time.monotonic()
        result = _run(sandbox, "echo begun; sleep 300 & sleep 300", seconds=1.0)
        took = time.monotonic() - begun
        attempt = subject.attempt("run `sleep 300` with seconds=1")
        attempt.require(
            result.timed_out and took <= LATE_SECONDS, f"timed_out is {result.timed_out} after {took:.0f} s"
        )
        _expect("the output until then", result.stdout, "begun\n", subject)
        _expect("run another command afterwards", _run(sandbox, "echo alive").stdout, "alive\n", subject)
        left = _run(sandbox, "sleep 300 & echo done")
        _expect("run a command that leaves a process", (left.exit_code, left.timed_out), (0, False), subject)
    return f"killed after {took:.1f} s"


def limits(subject: Subject) -> None:
    """Output is limited, a command may lower limits, and an unknown limit is a TypeError.

    Advice: keep the first part
    """
    with _opened(subject) as sandbox:
        result = _run(sandbox, "yes | head -c 300000", output_kib=2)
        attempt = subject.attempt("run a command that writes 300,000 bytes, with output_kib=2")
        seen = f"is_cut is {result.is_cut}, and stdout has {len(result.stdout)} characters"
        attempt.require(result.is_cut and len(result.stdout) <= 2048, seen)
        unknown: Any = {"memory_gb": 1}
        call = functools.partial(sandbox.exec, "true", **unknown)
        _expect_error("run a command with the limit memory_gb", call, (TypeError,), subject)


def closed(subject: Subject) -> None:
    """After `close`, every method raises SandboxLostError; `close` may be called again; nothing is left.

    Advice: end all processes and remove all files in `close`
    """
    _require_open(subject)
    with own_temporary_folder(subject.scratch / "closed") as folder:
        before = Leftovers(folder)
        sandbox = _made(subject).open()
        _run(sandbox, "setsid sleep 300 & echo started")
        with subject.trying("close it twice", "let a second call do nothing"):
            sandbox.close()
            sandbox.close()
        _expect("why it was lost, after close", sandbox.lost, "", subject)
        for words, call in (
            ("run a command", lambda: sandbox.exec("true")),
            ("read a file", lambda: sandbox.read("x")),
            ("write a file", lambda: sandbox.write("x", "y")),
        ):
            _expect_error(f"{words} after close", call, (SandboxLostError,), subject)
        before.require_none(subject.attempt("close it"))


def time_to_live(subject: Subject) -> None:
    """At its time to live it ends by itself: its methods raise SandboxLostError, and `lost` says why.

    Advice: let `lost` say that its time to live is over
    """
    if not any(setting.name == "ttl_seconds" for setting in subject.signature.settings):
        raise SkippedError("it has no setting `ttl_seconds`")
    _require_open(subject)
    sandbox = call_with(subject.component, _INPUTS, {**subject.settings, "ttl_seconds": 1.0}).open()
    try:
        call = functools.partial(sandbox.exec, "sleep 300", seconds=LATE_SECONDS)
        _expect_error("run a command that takes longer than ttl_seconds=1", call, (SandboxLostError,), subject)
        subject.attempt("look why it was lost").require(sandbox.lost, "`lost` is empty")
    finally:
        sandbox.close()


# --- calls ------------------------------------------------------------------------------------------------------------

_INPUTS = {"concurrency": CONCURRENCY}


@once
def _made(subject: Subject) -> Any:
    with subject.trying("make it"):
        return call_with(subject.component, _INPUTS, subject.settings)


def _require_open(subject: Subject) -> None:
    """Raise SkippedError if no sandbox can be opened here, and FailedError if `check` raises anything else."""
    if reason := _why_closed(subject):
        raise subject.skipped(f"none can be opened here: {reason}")


@once
def _why_closed(subject: Subject) -> str:
    try:
        change = "raise ConfigError, with what to type, if no sandbox can be opened here"
        with subject.trying("call `check`", change):
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
    with subject.trying("open a sandbox"):
        sandbox: Sandbox = _made(subject).open()
    try:
        yield sandbox
    finally:
        sandbox.close()


def _run(sandbox: Sandbox, command: Any, **options: Any) -> Result:
    """The result of a command. Raises FailedError if it is no Result, or if an error is raised."""
    change = "return a rollouts.sandboxes.Result: a command that fails is no exception"
    with trying(f"run {shown(command, 60)}", sandbox.exec, change=change) as attempt:
        result = sandbox.exec(command, **{"seconds": SECONDS, **options})
    attempt.require(isinstance(result, Result), f"it returned {type(result).__name__}")
    return result


def _expect(tried: str, seen: Any, wanted: Any, subject: Subject) -> None:
    attempt = subject.attempt(tried, "see docs/sandboxes.md: what each method does")
    attempt.require(seen == wanted, f"{shown(seen)}, expected {shown(wanted)}")


def _expect_error(tried: str, call: Callable[[], Any], kinds: tuple[type[Exception], ...], subject: Subject) -> None:
    """Raise FailedError unless the call raises one of these errors."""
    attempt = subject.attempt(tried, f"raise {' or '.join(kind.__name__ for kind in kinds)}")
    try:
        returned = call()
    except kinds:
        return
    except Exception as other:  # the author's code may raise anything
        raise attempt.failed(f"it raised {type(other).__name__}: {other}") from other
    raise attempt.failed(f"it returned {shown(returned, 80)}")
