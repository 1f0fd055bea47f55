"""The tree of errors that rollouts raises.

    RolloutsError
    ├── UserError                 the user's mistake: exit code 2, one message, no traceback
    │   ├── ConfigError           a setting: unknown, mistyped, contradictory, or in an unreadable file
    │   │   └── DamagedCheckpointError    a checkpoint that is unfinished, damaged or unreadable
    │   ├── PluginError           a component or plugin
    │   │   ├── UnknownComponentError
    │   │   ├── AmbiguousComponentError
    │   │   ├── BrokenPluginError     an installed component whose import fails
    │   │   │   └── MissingExtraError     it needs an extra of its distribution that is not installed
    │   │   └── SignatureError        a component names an input that its kind does not have
    │   ├── ModelError            a model or tokenizer that cannot be used
    │   ├── EnvironmentDefinitionError    an environment that cannot be used as it is written
    │   └── OutputError           a run folder that exists or cannot be written
    └── RunError                  the run failed: exit code 1
        ├── RewardError           a reward returned NaN, or raised with `--on-invalid-reward raise`
        ├── TrainingError         a training step failed: a loss returned NaN or a wrong shape
        │   ├── RankError             a rank of a distributed backend died, hangs or failed
        │   └── OutOfMemoryError      a step does not fit into the memory of its device
        ├── CheckpointError       a checkpoint cannot be written: the disk is full, for example
        ├── ProcessError          a process for a tool could not be started; in an episode the same as SandboxError
        ├── SandboxError          a sandbox cannot be opened; in an episode this becomes Status.ENVIRONMENT_ERROR
        │   └── SandboxLostError      an open sandbox does not exist any more
        ├── WorkerError           a worker died; in an episode this becomes Status.ENVIRONMENT_ERROR
        ├── ServiceLostError      a server that an environment or a tool needs was lost; in an episode the same
        ├── WorkersLostError      the workers of an environment die again and again
        ├── BudgetSpentError      the next request to an API could exceed a limit of dollars or tokens
        └── InferenceError        an engine failed; in an episode this becomes Status.INFERENCE_ERROR
            └── EngineRequestError    a request to a server got no usable reply

Each message says what was given, what was expected, and what to type next. A failed rollout is not an exception: it is
recorded as a `Status`. Errors of tools become messages to the model.
"""

from __future__ import annotations

import codecs
import contextlib
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator

from rollouts.author_code import Place, message_of, place_of, printable

NAME_CHARACTERS_MAX = 200
LEAVES_MAX = 5  # how many errors of an exception group a message lists


class RolloutsError(Exception):
    """The base class of the errors that rollouts raises."""

    exit_code = 1


class UserError(RolloutsError):
    """A mistake of the user. The message says what to type instead."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is unknown, has a wrong type or contradicts another setting."""


class DamagedCheckpointError(ConfigError):
    """A checkpoint is unfinished, damaged or unreadable. Another checkpoint of the run may be undamaged."""


class PluginError(UserError):
    """A component or plugin cannot be used."""


class UnknownComponentError(PluginError):
    """No installed distribution offers that name. `missing` is the name if it is one of a file that does not exist."""

    def __init__(self, message: str = "", *, missing: str = "") -> None:
        super().__init__(message)
        self.missing = missing


class AmbiguousComponentError(PluginError):
    """Two distributions offer that name."""


class BrokenPluginError(PluginError):
    """The component is installed, but its import fails."""


class MissingExtraError(BrokenPluginError):
    """The component needs the package `package`, which an extra of its distribution requires and which is not
    installed. `hint` says how to install it.
    """

    def __init__(self, message: str, *, package: str, hint: str) -> None:
        super().__init__(message)
        self.package, self.hint = package, hint


class SignatureError(PluginError):
    """The component names an input that its kind does not have, or its signature breaks another rule."""


class ModelError(UserError):
    """A model or tokenizer cannot be used."""


class EnvironmentDefinitionError(UserError):
    """The class of an environment has a mistake."""


class OutputError(UserError):
    """A run folder exists already or cannot be written."""


class RunError(RolloutsError):
    """The run failed."""


class RewardError(RunError):
    """A reward returned something that is not a reward."""


class TrainingError(RunError):
    """A training step failed."""


class RankError(TrainingError):
    """A rank of a distributed backend died, hangs or failed."""


class OutOfMemoryError(TrainingError):
    """A training step does not fit into memory. `tokens` are those of its microbatch; with `can_halve`, nothing has
    changed, and smaller microbatches may fit.
    """

    def __init__(self, message: str = "", *, tokens: int = 0, can_halve: bool = False) -> None:
        super().__init__(message)
        self.tokens, self.can_halve = tokens, can_halve


class CheckpointError(RunError):
    """A checkpoint cannot be written. `is_full` is True if the disk has no space left."""

    def __init__(self, message: str = "", *, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full


class ProcessError(RunError):
    """A process for a tool could not be started. Inside an episode: Status.ENVIRONMENT_ERROR."""


class SandboxError(RunError):
    """A sandbox cannot be opened. Inside an episode: Status.ENVIRONMENT_ERROR."""


class SandboxLostError(SandboxError):
    """An open sandbox does not exist any more: its keeper was killed, or its time to live is over."""


class WorkerError(RunError):
    """A worker of an environment died, hung or answered nonsense. The episode may be played again."""


class ServiceLostError(RunError):
    """A service that an environment or a tool needs was lost, such as a server that died or that answers nothing.

    Raised in a method of an environment or in a tool, it ends the episode with Status.ENVIRONMENT_ERROR: nothing is
    scored, and the episode may be played again.
    """


class WorkersLostError(RunError):
    """The workers of an environment die again and again."""


class BudgetSpentError(RunError):
    """The next request to an API could exceed a limit of dollars or tokens. `flags` are those of higher limits."""

    def __init__(self, message: str = "", *, flags: str = "") -> None:
        super().__init__(message)
        self.flags = flags


class InferenceError(RunError):
    """An inference engine failed. `is_transient` is False if the same request would fail again."""

    def __init__(self, message: str = "", *, is_transient: bool = True) -> None:
        super().__init__(message)
        self.is_transient = is_transient


class EngineRequestError(InferenceError):
    """A request to a server got no usable reply."""


class RemoteError(Exception):
    """An exception that an author's code raised in another process, as text: what `words_of` says of it there, its
    place and its traceback. `hint` says what to install; it may be empty.
    """

    def __init__(self, words: str, place: str, traceback: str, hint: str = "") -> None:
        super().__init__(words)
        self.words, self.place, self.traceback, self.hint = words, place, traceback, hint


@contextlib.contextmanager
def said_of(place: str) -> Iterator[None]:
    """Put `place: ` before the message of a UserError that the block raises. An empty `place` changes nothing."""
    try:
        yield
    except UserError as error:
        if not place:
            raise
        raise type(error)(f"{place}: {error}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def words_of(error: BaseException, place_in: Callable[[BaseException], Place | None] = place_of) -> str:
    """Describe an error of an author's code: its type, its message, and the author's line that raised it. For an
    exception group: the first few errors in it. `place_in` finds the line.

    With a line: `ZeroDivisionError: division by zero (x.py, line 3: return 1 / 0)`.

    >>> words_of(ZeroDivisionError("division by zero"))  # never raised, so it has no line
    'ZeroDivisionError: division by zero'
    """

    def said(leaf: BaseException) -> str:
        if isinstance(leaf, RemoteError):
            return leaf.words
        place = place_in(leaf) or place_in(error)
        words = _named(leaf)
        if isinstance(leaf, SyntaxError) and place:
            words = f"{type(leaf).__name__}: {printable(str(leaf.msg))}"
        elif isinstance(leaf, RolloutsError):  # the type is no help to an author
            words = message_of(leaf)
        return f"{words} ({place})" if place else words

    return _each_of(error, said)


def named(error: BaseException) -> str:
    """The type and message of an error, printable. For a group: of its first few errors.

    >>> named(ValueError("too long")), named(ExceptionGroup("both", [KeyError("a"), OSError()]))
    ('ValueError: too long', "2 errors: KeyError: 'a'; OSError")
    """
    return _each_of(error, _named)


def _named(error: BaseException) -> str:
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _each_of(error: BaseException, said: Callable[[BaseException], str]) -> str:
    """`said(error)`; for a group, the texts of its first few errors, each once."""
    if not isinstance(error, BaseExceptionGroup):
        return said(error)
    leaves = list(dict.fromkeys(map(said, leaves_of(error))))
    more = [f"{len(leaves) - LEAVES_MAX} more"] if len(leaves) > LEAVES_MAX else []
    count = f"{len(leaves)} errors: " if len(leaves) > 1 else ""
    return count + "; ".join([*leaves[:LEAVES_MAX], *more])


def words_of_exit(status: int | None) -> str:
    """Describe how a process ended. `status` is the exit status as `subprocess` returns it.

    A shell or a supervisor reports a child that signal n killed as exit code 128 + n. The child may also have exited
    with this code itself, so the text names both.

    >>> words_of_exit(3), words_of_exit(-9), words_of_exit(137)
    ('exit code 3', 'SIGKILL', 'exit code 137 = 128 + 9, probably SIGKILL')
    """
    import signal

    def name_of(number: int) -> str:
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"

    if status is None:
        return "unknown exit status"
    if status < 0:
        return name_of(-status)
    number = status - 128
    return f"exit code {status}" + (f" = 128 + {number}, probably {name_of(number)}" if 0 < number <= 64 else "")


def cause_of(error: BaseException) -> BaseException:
    """The error to report for an exception group: a KeyboardInterrupt, if the group has one; else the first error, if
    the group has only one or only RolloutsErrors; else the group itself. Any other error is returned unchanged.
    """
    leaves = list(leaves_of(error))
    for leaf in leaves:
        if isinstance(leaf, KeyboardInterrupt):
            return leaf
    if len(leaves) == 1 or all(isinstance(leaf, RolloutsError) for leaf in leaves):
        return leaves[0]
    return error


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """The errors inside a group, at any depth. A trio nursery always raises groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves_of(inner)
    else:
        yield error


def near_misses(given: str, known: Iterable[str]) -> list[str]:
    """At most three known names that resemble the given one, best first: those that differ in a few letters, then those
    that begin with it, then those that have it as a word. Case and leading dashes do not count. Empty for a name of
    more than NAME_CHARACTERS_MAX characters, because comparing it would take seconds.

    >>> near_misses("calulator", ["calculator", "prompts"]), near_misses("rk3", ["k3_loss", "rk3_loss"])
    (['calculator'], ['rk3_loss'])
    >>> near_misses("sum", ["minimum", "weighted_sum"])
    ['weighted_sum']
    """
    import difflib

    if len(given) > NAME_CHARACTERS_MAX:
        return []
    wanted = given.lower().lstrip("-")
    names = {name.lower().lstrip("-"): name for name in sorted(set(known), reverse=True)}
    close = difflib.get_close_matches(wanted, sorted(names), n=3, cutoff=0.6)
    longer = [name for name in sorted(names) if len(wanted) > 2 and name.startswith(wanted)]
    whole = [name for name in sorted(names) if wanted in re.split(r"[^a-z0-9]", name)[1:]]
    return [names[name] for name in dict.fromkeys([*close, *longer, *whole])][:3]


def suggestion(given: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str:
    """The near misses as a line of an error message, each written by `spelled`; empty if there are none.

    >>> suggestion("digts", ["digits", "seed"], "--env.{}".format)
    'did you mean: --env.digits?'
    """
    near = near_misses(given, known)
    return f"did you mean: {', '.join(map(spelled, near))}?" if near else ""


def check_known(given: Iterable[str], known: Collection[str], unknown: str, has: str) -> None:
    """Raise ConfigError for the first name that is not known: `unknown` with the name after it, near misses, and `has`
    with the names that are known.

    >>> check_known(["digts"], ["digits"], "there is no setting --env.", "settings")
    Traceback (most recent call last):
    rollouts.errors.ConfigError: there is no setting --env.digts
    did you mean: digits?
    settings: digits
    """
    for name in given:
        if name not in known:
            listed = f"{has}: {', '.join(known) or 'none'}"
            raise ConfigError(in_lines(f"{unknown}{name}", suggestion(name, known), listed))


def where_not_utf8(path: str, lines: Iterable[bytes] = ()) -> str:
    """In which of the lines a file is not text in UTF-8, and what to type.

    >>> print(where_not_utf8("a.txt", [b"ok\\n", b"caf\\xe9\\n"]))
    a.txt, line 2: byte 4 is not text in UTF-8
    if the file is text in WINDOWS-1252, type: iconv -f WINDOWS-1252 -t UTF-8 a.txt > NEW_FILE
    """
    place, coding = f"{path}: it", "WINDOWS-1252"
    for number, line in enumerate(lines, 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            place = f"{path}, line {number}: byte {error.start + 1}"
            coding = "UTF-16" if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else coding
            break
    command = f"iconv -f {coding} -t UTF-8 {shlex.quote(path)} > NEW_FILE"
    return f"{place} is not text in UTF-8\nif the file is text in {coding}, type: {command}"


def counted(count: int, thing: str) -> str:
    """A number of things, in the singular or the plural.

    >>> counted(1, "step"), counted(0, "held-out task"), counted(2, "process")
    ('1 step', '0 held-out tasks', '2 processes')
    """
    ending = "" if count == 1 else "es" if thing.endswith("s") else "s"
    return f"{count} {thing}{ending}"


def in_lines(*lines: str) -> str:
    """The lines that are not empty, as one message."""
    return "\n".join(filter(None, lines))
