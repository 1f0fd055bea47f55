"""The Protocol of loggers, and two helpers for your own logger: `plain_settings` and `import_library`.

A logger is a class with the methods of `MetricsLogger`. Its `__init__` may have the parameters `folder`, `settings` and
`first_step`. Its keyword-only parameters are its settings. Register it in the entry-point group `rollouts.loggers`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from rollouts.errors import BrokenPluginError, UserError


@runtime_checkable
class MetricsLogger(Protocol):
    """Records the metrics of a run. A run may have several loggers, so a logger must not change its arguments."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of one step. Metric names have the form `group/name`. Values may be NaN. Steps come in
        order. For the last step there are two calls: the second has the metrics of the evaluation at the end.

        A resumed run begins at `first_step` in the same folder, and logs the steps from there on again.
        """

    def close(self) -> None:
        """Write everything that is not written yet. Called once at the end, also if the run failed or was
        interrupted.
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
        raise BrokenPluginError(
            f"{needs} installed but does not import ({type(error).__name__}: {error}); "
            f"type `pip install --force-reinstall {install}`"
        ) from error
