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

from collections.abc import Iterable, Iterator

from rollouts.author_code import message_of

__all__ = [
    "AmbiguousComponentError",
    "BrokenPluginError",
    "CheckpointError",
    "ConfigError",
    "DamagedCheckpointError",
    "EnvironmentDefinitionError",
    "InferenceError",
    "ModelError",
    "OutputError",
    "PluginError",
    "RankError",
    "RewardError",
    "RolloutsError",
    "RunError",
    "SignatureError",
    "TrainingError",
    "UnknownComponentError",
    "UserError",
    "cause_of",
    "leaves_of",
    "named",
    "near_misses",
    "words_of",
]


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


def words_of(error: BaseException) -> str:
    """An error of somebody's code in one line: its type, its message, and the file and line that raised it.

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
    """The known names that look most like the given one, best first (at most three).

    >>> near_misses("calulator", ["calculator", "prompts"])
    ['calculator']
    """
    import difflib

    return difflib.get_close_matches(given, sorted(set(known)), n=3, cutoff=0.6)
