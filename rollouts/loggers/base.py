"""The Protocols of loggers, and two helpers for your own logger: `plain_settings` and `import_library`.

A logger is a class with the methods of `MetricsLogger`. Its `__init__` may have the parameters `folder`, `settings` and
`first_step`. Its keyword-only parameters are its settings. Register it in the entry-point group `rollouts.loggers`. A
logger that can store tables also has the members of `SampleLogger`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rollouts.errors import BrokenPluginError, ConfigError, UserError


@runtime_checkable
class MetricsLogger(Protocol):
    """Records the metrics of a run. A run may have several loggers, so a logger must not change its arguments.

    A run makes, calls and closes a logger in a thread of its own. If a method raises, the run goes on, and the thread
    calls the method again later, with the same arguments. A class with `in_step = True` is called by the run itself,
    which waits for it, and fails if it raises: for files that a run cannot be without.
    """

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of one step. Metric names have the form `group/name`. Values may be NaN. Steps come in
        order. For the last step there are two calls: the second has the metrics of the evaluation at the end.

        A resumed run begins at `first_step` in the same folder, and logs the steps from there on again.
        """

    def close(self) -> None:
        """Write everything that is not written yet. Called once at the end, also if the run failed or was
        interrupted.
        """


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """Which rollouts a logger gets. Make it the default of a keyword-only parameter, so that its fields are settings.

    Args:
        samples: how many rollouts to record of a step and of an evaluation, from the lowest reward to the highest; 0:
            none
        samples_every: steps between recorded steps; evaluations are always recorded
        sample_characters: how much of a conversation to record
    """

    samples: int = 8
    samples_every: int = 10
    sample_characters: int = 10_000

    def __post_init__(self) -> None:
        for name, least in (("samples", 0), ("samples_every", 1), ("sample_characters", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: expected {least} or more")


Row = Mapping[str, str | float | None]
"""One rollout. All rows of a call have the same columns, in the same order. `conversation` is the longest text."""


@runtime_checkable
class SampleLogger(MetricsLogger, Protocol):
    """A logger that also records some rollouts of a run, as the rows of a table.

    A run recognizes it by both members. Without them, a logger gets metrics alone.
    """

    sample_settings: SampleSettings
    """How many rollouts it gets, and how often. The run reads this once, when it begins."""

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Record rollouts of one step: `name` is "samples" for rollouts that are trained on, after the `log` of their
        step, and "eval_samples" for those of an evaluation, before the `log` of theirs.

        `rows` has at least one row. A resumed run calls it again for the steps that it repeats.
        """


@runtime_checkable
class AddsToSteps(MetricsLogger, Protocol):
    """A logger that can also add metrics to an earlier step."""

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Add metrics to a step that was logged before. With `--eval-inference`, an evaluation ends while later steps
        are logged. A logger without this method gets its metrics together with those of the next step, and
        `eval/step`, the step whose weights were evaluated.
        """


def plain_settings(settings: Any) -> dict[str, Any]:
    """The settings of a run as plain dicts, lists, text and numbers, for trackers that show them.

    >>> plain_settings({"env": {"digits": 2}, "reward": ("env:1",)})
    {'env': {'digits': 2}, 'reward': ['env:1']}
    """
    plain = _plain(settings)
    return plain if isinstance(plain, dict) else {"settings": plain}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def import_library(module: str, *, logger: str, install: str) -> Any:
    """Import the library that a logger needs.

    Raises:
        UserError: the library is not installed. The message says what to type.
        BrokenPluginError: the library is installed, but its import fails.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # an import may raise anything
        needs = f"the logger {logger!r} needs the library {module!r}, which is"
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0]
        if missing == module.split(".")[0]:
            raise UserError(
                f"{needs} not installed; type `pip install {install}`, or choose another logger: `--logger jsonl`"
            ) from error
        what = f"{needs} installed but does not import ({type(error).__name__}: {error})"
        raise BrokenPluginError(f"{what}; type `pip install --force-reinstall {install}`") from error
