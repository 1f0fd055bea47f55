"""Every error of rollouts, in one tree.

    RolloutsError
    ├── UserError                 the user's mistake: exit code 2, one message, no traceback
    │   ├── ConfigError           a setting: unknown, mistyped, contradictory, or in an unreadable file
    │   │   └── DamagedCheckpointError    a checkpoint that is unfinished, damaged or unreadable
    │   ├── PluginError           a component or plugin
    │   │   ├── UnknownComponentError
    │   │   ├── AmbiguousComponentError
    │   │   ├── BrokenPluginError     it is installed, but does not import
    │   │   └── SignatureError        it asks for something its kind does not offer
    │   ├── ModelError            a model or tokenizer that cannot be used
    │   ├── EnvironmentDefinitionError    an environment that cannot be used as it is written
    │   └── OutputError           a run folder that exists or cannot be written
    └── RunError                  the run failed: exit code 1
        ├── RewardError           a reward returned NaN, or raised under the policy `raise`
        ├── TrainingError         a loss returned a wrong shape or NaN, a step cannot be taken
        │   └── RankError             a rank of a distributed backend died, hangs, or failed
        ├── CheckpointError       a checkpoint cannot be written: the disk is full, say
        └── InferenceError        an engine failed; inside an episode it becomes Status.INFERENCE_ERROR

Each message says what was given, what was expected, and what to type next. A failed rollout is data (`Status`), not an
exception; tool errors become messages to the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from rollouts.author_code import message_of

NAME_CHARACTERS_MAX = 200


class RolloutsError(Exception):
    """Base of every error that rollouts raises on purpose."""

    exit_code = 1


class UserError(RolloutsError):
    """The user's mistake; the message says what to type instead."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is unknown, mistyped or contradicts another one."""


class DamagedCheckpointError(ConfigError):
    """A checkpoint that was named is unfinished, damaged or unreadable: another one may do."""


class PluginError(UserError):
    """A component or plugin cannot be used."""


class UnknownComponentError(PluginError):
    """No installed distribution offers that name."""


class AmbiguousComponentError(PluginError):
    """Two distributions offer that name."""


class BrokenPluginError(PluginError):
    """The component is installed but does not import."""


class SignatureError(PluginError):
    """The component asks for something that its kind does not offer."""


class ModelError(UserError):
    """A model or tokenizer cannot be used."""


class EnvironmentDefinitionError(UserError):
    """An environment cannot be used as it is written."""


class OutputError(UserError):
    """A run folder exists already or cannot be written."""


class RunError(RolloutsError):
    """The run failed."""


class RewardError(RunError):
    """A reward returned something that is not a reward."""


class TrainingError(RunError):
    """A training step cannot be taken."""


class RankError(TrainingError):
    """A rank of a distributed backend died, hangs, or failed."""


class CheckpointError(RunError):
    """A checkpoint cannot be written; `is_full`: for want of space."""

    def __init__(self, message: str = "", *, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full


class InferenceError(RunError):
    """An inference engine failed. `is_transient` False: asking the same again would fail again."""

    def __init__(self, message: str = "", *, is_transient: bool = True) -> None:
        super().__init__(message)
        self.is_transient = is_transient


@contextlib.contextmanager
def said_of(place: str) -> Iterator[None]:
    """A mistake of the user's in this block is said of a place, if that has a name: a stage, say, or a phase."""
    try:
        yield
    except UserError as error:
        if not place:
            raise
        raise type(error)(f"{place}: {error}") from error


def first_line(error: BaseException) -> str:
    """The first line of a library's message; the type of an error that has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def words_of(error: BaseException) -> str:
    """An error of an author's code in one line: its type, its message, and the file and line that raised it.

    >>> try:
    ...     [].pop()
    ... except IndexError as error:
    ...     words_of(error).split(" (")[0]
    'IndexError: pop from empty list'
    """
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return (
        f"{type(error).__name__}: {message_of(error)}{place}; with ROLLOUTS_TRACEBACK=1 all of its traceback is shown"
    )


def named(error: BaseException) -> str:
    """Type and message of an error of an author's, printable; of a group, its first member's.

    >>> named(ValueError("too long")), named(ExceptionGroup("both", [KeyError()]))
    ('ValueError: too long', 'KeyError')
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def words_of_exit(status: int | None) -> str:
    """How a process ended, by its exit status as `subprocess` gives it.

    >>> words_of_exit(3), words_of_exit(-9)
    ('exit code 3', 'SIGKILL')
    """
    import signal

    if status is None or status >= 0:
        return "how it ended is not known" if status is None else f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def cause_of(error: BaseException) -> BaseException:
    """Ctrl-C wherever it is in a group; else the first of its errors, if all are known ones or there is one only."""
    leaves = list(leaves_of(error))
    for leaf in leaves:
        if isinstance(leaf, KeyboardInterrupt):
            return leaf
    if len(leaves) == 1 or all(isinstance(leaf, RolloutsError) for leaf in leaves):
        return leaves[0]
    return error


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group of groups; trio's nurseries always raise groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves_of(inner)
    else:
        yield error


def near_misses(given: str, known: Iterable[str]) -> list[str]:
    """The known names that look most like the given one, best first (at most three): those that differ in a few
    letters, then those that begin with it. Case and leading dashes do not count. A name that is longer than any that is
    written by hand looks like none: to compare it takes seconds.

    >>> near_misses("calulator", ["calculator", "prompts"]), near_misses("rk3", ["k3_loss", "rk3_loss"])
    (['calculator'], ['rk3_loss'])
    """
    import difflib

    if len(given) > NAME_CHARACTERS_MAX:
        return []
    wanted = given.lower().lstrip("-")
    names = {name.lower().lstrip("-"): name for name in sorted(set(known), reverse=True)}
    close = difflib.get_close_matches(wanted, sorted(names), n=3, cutoff=0.6)
    longer = [name for name in sorted(names) if len(wanted) > 2 and name.startswith(wanted)]
    return [names[name] for name in dict.fromkeys([*close, *longer])][:3]


def suggestion(given: str, known: Iterable[str], spelled: Callable[[str], str] = str) -> str:
    """The near misses as a line of a message, each as it is `spelled`; empty where there are none.

    >>> suggestion("digts", ["digits", "seed"], "--env.{}".format)
    'did you mean: --env.digits?'
    """
    near = near_misses(given, known)
    return f"did you mean: {', '.join(map(spelled, near))}?" if near else ""


def in_lines(*lines: str) -> str:
    """A message of these lines, without the empty ones."""
    return "\n".join(filter(None, lines))


def line_in(file: str, error: BaseException) -> int | None:
    """The last line of a file that an error passed through; None where it did not."""
    import traceback

    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    return next((line for frame, line in frames if frame.f_code.co_filename == file), None)
