"""The setting `worker`: where environments run.

    worker = "process"                    # every environment

    [worker]                              # the same, with settings
    kind = "process"
    count = 2

    [worker.easy]                         # the environment with the alias `easy`
    kind = "inline"

As flags: `--worker process --worker.count 2 --worker easy=inline`. Not here: workers (`rollouts.env.workers`).
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from rollouts.config.convert import convert_value, plain
from rollouts.config.files import NOWHERE, Source, refusal, unknown_key
from rollouts.config.flags import Flag
from rollouts.config.hints import argument_docs
from rollouts.errors import ConfigError, suggestion

INLINE = "inline"
VENV = "venv"
KINDS = (INLINE, "process", VENV)
URLS = ("ws://", "wss://")
Table = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """The workers of one environment.

    Args:
        kind: `inline`: in the process of the run. `process`: in another process. `venv`: in a process of the virtual
            environment that `rollouts env install` made. `ws://HOST:PORT` or `wss://...`: at the address of `rollouts
            env serve`.
        count: how many workers there are
        episodes: how many episodes a worker plays at the same time; others wait
        memory_gib: the largest address space of a worker, in GiB; `none` for no limit
        cpu_seconds: the CPU time of one worker process, which then ends and is started again; `none` for no limit
        silent_seconds: a worker, or a host, that does not answer for this long is lost
        token_file: a file with the token for an address; else the environment variable ROLLOUTS_WORKER_TOKEN has it
        certificate: a file with certificates to trust for a `wss://` address, besides those of the system
    """

    kind: str = INLINE
    count: int = 1
    episodes: int = 256
    memory_gib: float | None = None
    cpu_seconds: float | None = None
    silent_seconds: float = 60.0
    token_file: str = ""
    certificate: str = ""

    @property
    def is_url(self) -> bool:
        """Whether the workers are at an address."""
        return self.kind.startswith(URLS)


_FIELDS = {each.name: each for each in dataclasses.fields(WorkerSettings)}
_ABOVE_ZERO = ("count", "episodes", "memory_gib", "cpu_seconds", "silent_seconds")
_OF_THE_HOST = ("memory_gib", "cpu_seconds")


def worker_table(value: Any) -> Table:
    """A value of the setting as one table: the settings of all environments, and a table for each alias. Raises
    ConfigError.

    >>> worker_table(["process", "easy=inline"])
    {'kind': 'process', 'easy': {'kind': 'inline'}}
    """
    if isinstance(value, dict):
        of_aliases = {name for name in value if name not in _FIELDS}
        return {
            name: {"kind": each} if name in of_aliases and isinstance(plain(each), str) else each
            for name, each in value.items()
        }
    table: Table = {}
    for each in value if isinstance(value, list | tuple) else [value]:
        text = plain(each)
        if text is None:
            text = INLINE
        if not isinstance(text, str):
            raise ConfigError(f"worker: expected {_expected()}; got {text!r}")
        alias, kind = re.fullmatch(r"(?:([A-Za-z_][\w-]*)=)?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        kind = Flag(kind, kind) if isinstance(each, Flag) else kind
        if alias:
            table[alias.replace("-", "_")] = {"kind": kind}
        else:
            table["kind"] = kind
    return table


def read_workers(value: Any, source: Source = NOWHERE) -> Table:
    """The checked table of the setting, as plain data. Raises ConfigError."""
    table = worker_table(value)
    own = {name: each for name, each in table.items() if name in _FIELDS}
    others = {name: each for name, each in table.items() if name not in _FIELDS}
    for name, value in others.items():
        if not isinstance(value, dict):
            raise _unknown(("worker", name), value, source)
    return _checked(own, ("worker",), source) | {
        alias: _checked(each, ("worker", alias), source) for alias, each in others.items()
    }


def _unknown(path: tuple[str, ...], value: Any, source: Source) -> ConfigError:
    docs = argument_docs(WorkerSettings.__doc__)
    listing = "its settings: " + ", ".join(f"{each} ({docs[each]})" for each in _FIELDS)
    return unknown_key(path, value, source, f"a worker has no setting {path[-1]!r}", _FIELDS, listing)


def _checked(table: Table, path: tuple[str, ...], source: Source) -> Table:
    hints, found = typing.get_type_hints(WorkerSettings), Table()
    for name, value in table.items():
        place = (*path, name)
        if name not in _FIELDS:
            raise _unknown(place, value, source)
        found[name] = converted = convert_value(value, hints[name], place, source)
        if name in _ABOVE_ZERO and converted is not None and not converted > 0:
            raise refusal(place, value, source, f"must be more than 0; got {converted}")
        if name == "kind" and converted.startswith(URLS):
            _check_url(converted)
        elif name == "kind" and converted not in KINDS:
            hint = suggestion(converted, KINDS)
            raise refusal(place, value, source, f"expected {_expected()}; got {converted!r}", hint)
    return found


def workers_of(table: Mapping[str, Any], environments: Iterable[tuple[str, str]]) -> dict[str, WorkerSettings]:
    """The workers of each environment, by its alias. `environments` are pairs of an alias, which is empty for a single
    environment, and the last part of the name. Raises ConfigError for an alias that no environment has.
    """
    common = {name: value for name, value in table.items() if name in _FIELDS}
    own = {name: value for name, value in table.items() if name not in _FIELDS}
    found = {}
    for alias, name in environments:
        found[alias] = WorkerSettings(**{**common, **own.pop(alias or name, {})})
        _check_limits(found[alias])
    if own:
        known = [alias or name for alias, name in environments]
        first = next(iter(own))
        raise ConfigError(
            f"worker.{first}: no environment has the alias {first!r}; there are: {', '.join(known) or 'none'}"
        )
    return found


def _check_limits(settings: WorkerSettings) -> None:
    """Raise ConfigError if a worker at an address has limits, which only its own host can set."""
    for name in _OF_THE_HOST:
        if settings.is_url and (value := getattr(settings, name)) is not None:
            raise ConfigError(
                f"worker.{name}: the limits of a worker at an address are those of its server\n"
                f"leave it out here, and type there: rollouts env serve NAME --{name.replace('_', '-')} {value:g}"
            )


def _check_url(url: str) -> None:
    """Raise ConfigError for an address that cannot be one, or that has a password."""
    try:
        parts = urlsplit(url)
        has_host, _ = bool(parts.hostname), parts.port
    except ValueError as error:
        raise ConfigError(f"worker: {url!r} is not an address: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"worker: the address of {parts.hostname} has a password, which config.toml would show\n"
            "write the token into a file: --worker.token-file FILE"
        )
    if not has_host:
        raise ConfigError(f"worker: {url!r} is not an address; type: {parts.scheme}://HOST:PORT")


def _expected() -> str:
    return f"where the environment runs, [ALIAS=]KIND, with a kind of: {', '.join(KINDS)}, ws://HOST:PORT"
