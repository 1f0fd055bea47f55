"""The setting `worker`: where environments run.

    worker = "process"                    # every environment

    [worker]                              # the same, with settings
    kind = "process"
    count = 2

    [worker.easy]                         # the environment with the alias `easy`
    kind = "inline"

As flags: `--worker process --worker.count 2 --worker easy=inline`. A kind may come from a package (a component of the
kind `workers`), and has settings of its own: `--worker ray --worker.num-cpus 2`. They are kept as they are, because
only the component knows their types. Not here: workers (`rollouts.env.workers`), and which kinds are installed
(`rollouts.runs.workers`).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from rollouts.config.convert import convert_value, unflagged
from rollouts.config.files import NOWHERE, Source, refused, unknown_key
from rollouts.config.flags import Flag
from rollouts.config.hints import argument_docs
from rollouts.config.names import split_alias
from rollouts.errors import ConfigError, in_lines, suggestion

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
            env serve`. Or a kind of a package.
        count: how many workers there are
        episodes: how many episodes a worker plays at the same time; others wait
        memory_gib: the largest address space of a worker, in GiB; `none` for no limit
        cpu_seconds: the CPU time of one worker process, which then ends and is started again; `none` for no limit
        silent_seconds: a worker, or a host, that does not answer for this long is lost
        token_file: a file with the token for an address; else the environment variable ROLLOUTS_WORKER_TOKEN has it
        certificate: a file with certificates to trust for a `wss://` address, besides those of the system
        own: the settings of a package's kind, not checked yet
    """

    kind: str = INLINE
    count: int = 1
    episodes: int = 256
    memory_gib: float | None = None
    cpu_seconds: float | None = None
    silent_seconds: float = 60.0
    token_file: str = ""
    certificate: str = ""
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_url(self) -> bool:
        """Whether the workers are at an address."""
        return self.kind.startswith(URLS)

    @property
    def is_component(self) -> bool:
        """Whether the kind comes from a package."""
        return _is_component(self.kind)


def _is_component(kind: str) -> bool:
    return kind not in KINDS and not kind.startswith(URLS)


_FIELDS = {each.name: each for each in dataclasses.fields(WorkerSettings) if each.name != "own"}
_ABOVE_ZERO = ("count", "episodes", "memory_gib", "cpu_seconds", "silent_seconds")
_OF_THE_HOST = ("memory_gib", "cpu_seconds")


def worker_table(value: Any) -> Table:
    """A value of the setting as one table: the settings of all environments, and a table for each alias. Raises
    ConfigError.

    >>> worker_table(["process", "easy=inline"])
    {'kind': 'process', 'easy': {'kind': 'inline'}}
    """
    if isinstance(value, dict):
        texts = [name for name, each in value.items() if name not in _FIELDS and isinstance(unflagged(each), str)]
        return value | {name: {"kind": value[name]} for name in texts}
    table: Table = {}
    for each in value if isinstance(value, list | tuple) else [value]:
        text = INLINE if unflagged(each) is None else unflagged(each)
        if not isinstance(text, str):
            raise ConfigError(f"worker: expected {_expected()}; got {text!r}")
        alias, kind = split_alias(text)
        chosen = {"kind": Flag(kind, kind) if isinstance(each, Flag) else kind}
        table |= {alias: chosen} if alias else chosen
    return table


def read_workers(value: Any, source: Source = NOWHERE) -> Table:
    """The checked table of the setting, as plain data. Raises ConfigError."""
    table = worker_table(value)
    checked = _checked({name: each for name, each in table.items() if name in _FIELDS}, ("worker",), source)
    kind = checked.get("kind", INLINE)
    for name, each in table.items():
        if name in _FIELDS:
            continue
        if isinstance(each, dict) and not (_is_component(kind) and _is_text_setting(each, kind)):
            checked[name] = _checked(each, ("worker", name), source, kind)
        elif _is_component(kind):
            checked[name] = unflagged(each["kind"] if isinstance(each, dict) else each)
        else:
            raise _unknown(("worker", name), each, source)
    return checked


def _is_text_setting(table: Table, kind: str) -> bool:
    """Whether `worker_table` took a text for the kind of an alias, and it is a setting of the package's kind."""
    text = unflagged(table.get("kind"))
    return table.keys() == {"kind"} and isinstance(text, str) and _is_component(text) and text != kind


def _unknown(path: tuple[str, ...], value: Any, source: Source) -> ConfigError:
    docs = argument_docs(WorkerSettings.__doc__)
    listing = "its settings: " + ", ".join(f"{each} ({docs[each]})" for each in _FIELDS)
    return unknown_key(path, value, source, f"a worker has no setting {path[-1]!r}", _FIELDS, listing)


def _checked(table: Table, path: tuple[str, ...], source: Source, common: str = INLINE) -> Table:
    """A checked table. `common` is the kind of workers of an alias that has none of its own."""
    hints, found = typing.get_type_hints(WorkerSettings), Table()
    kind = unflagged(table.get("kind", common))
    for name, value in table.items():
        place = (*path, name)
        if name in _FIELDS:
            found[name] = converted = convert_value(value, hints[name], place, source)
            if name in _ABOVE_ZERO and converted is not None and not converted > 0:
                raise refused(place, value, source, f"must be more than 0; got {converted}")
            if name == "kind" and converted.startswith(URLS):
                _check_url(converted)
        elif isinstance(kind, str) and _is_component(kind):
            found[name] = unflagged(value)
        else:
            raise _unknown(place, value, source)
    return found


def workers_of(table: Mapping[str, Any], environments: Iterable[tuple[str, str]]) -> dict[str, WorkerSettings]:
    """The workers of each environment, by its alias. `environments` are pairs of an alias, which is empty for a single
    environment, and the last part of the name. Raises ConfigError for an alias that no environment has.
    """
    environments = list(environments)
    known = [alias or name for alias, name in environments]
    common = {name: value for name, value in table.items() if name not in known or name in _FIELDS}
    others = [name for name, value in common.items() if name not in _FIELDS and isinstance(value, dict)]
    for other in others if not _is_component(common.get("kind", INLINE)) else ():
        there = f"there are: {', '.join(known) or 'none'}"
        raise ConfigError(f"worker.{other}: no environment has the alias {other!r}; {there}")
    found = {alias: _settings_of(common, table.get(alias or name, {})) for alias, name in environments}
    for settings in found.values():
        for name in _OF_THE_HOST if settings.is_url else ():
            if (value := getattr(settings, name)) is not None:
                limits = "the limits of a worker at an address are those of its server"
                again = f"rollouts env serve NAME --{name.replace('_', '-')} {value:g}"
                raise ConfigError(f"worker.{name}: {limits}\nleave it out here, and type there: {again}")
    return found


def _settings_of(common: Table, own: Table) -> WorkerSettings:
    """The settings of one environment. Those of a package's kind are common only to workers of that kind."""
    kind = common.get("kind", INLINE)
    is_same = own.get("kind", kind) == kind
    merged = {name: value for name, value in common.items() if name in _FIELDS or is_same} | own
    fields = {name: value for name, value in merged.items() if name in _FIELDS}
    return WorkerSettings(**fields, own={name: value for name, value in merged.items() if name not in _FIELDS})


def _check_url(url: str) -> None:
    """Raise ConfigError for an address that cannot be one, or that has a password."""
    try:
        parts = urlsplit(url)
        has_host, _ = bool(parts.hostname), parts.port
    except ValueError as error:
        raise ConfigError(f"worker: {url!r} is not an address: {error}") from error
    if parts.username is not None or parts.password is not None:
        shows = f"the address of {parts.hostname} has a password, which config.toml would show"
        raise ConfigError(f"worker: {shows}\nwrite the token into a file: --worker.token-file FILE")
    if not has_host:
        raise ConfigError(f"worker: {url!r} is not an address; type: {parts.scheme}://HOST:PORT")


def _expected() -> str:
    return f"where the environment runs, [ALIAS=]KIND, with a kind of: {', '.join(KINDS)}, ws://HOST:PORT"


def unknown_kind(kind: str, installed: Iterable[str]) -> ConfigError:
    """The error for a kind that is neither built in nor installed."""
    kinds = (*KINDS, *installed)
    text = f"worker: expected {_expected()}{''.join(f', {each}' for each in installed)}; got {kind!r}"
    return ConfigError(in_lines(text, suggestion(kind, kinds)))
