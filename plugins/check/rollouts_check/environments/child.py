"""The programs that run in another process: one draws tasks, one imports an environment and watches it, one looks for
what is random in it, one plays episodes.

A program reads a request as JSON from its argument, and writes its answer as JSON into a file. What the author's code
prints does not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date as _date
from datetime import datetime as _datetime
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts_check.environments.subject import Subject

SOURCES = {
    "time.time": "the clock",
    "time.time_ns": "the clock",
    "time.monotonic": "the clock",
    "time.perf_counter": "the clock",
    "datetime.now": "the clock",
    "datetime.utcnow": "the clock",
    "datetime.today": "the clock",
    "date.today": "the clock",
    "posix.urandom": "random numbers of the operating system",
    "nt.urandom": "random numbers of the operating system",
    "posix.getpid": "the number of the process",
    "builtins.id": "the address of an object",
    "builtins.hash": "the hash of a text or an object",
}
"""Functions in C whose result differs between two runs, with words for it."""

SOCKETS = frozenset({"socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"})


def main(text: str) -> None:
    """Serve one request. An error ends the process with a message on stderr."""
    from rollouts.errors import RolloutsError

    request: dict[str, Any] = json.loads(text)
    if request.get("is_late"):
        _shift_clock()
    try:
        answer = PROGRAMS[request["program"]](request)
    except RolloutsError as error:
        sys.exit(str(error))
    Path(request["answer"]).write_text(json.dumps(answer))


@contextlib.contextmanager
def _subject(request: dict[str, Any]) -> Iterator[Subject]:
    """The environment of a request."""
    from rollouts.env.shared import shared_values
    from rollouts_check.environments.subject import make_subject
    from rollouts_check.packages import Found

    found, options = Found(request["name"], request["name"]), {"seed": request["seed"], "tasks": request["tasks"]}
    with tempfile.TemporaryDirectory() as scratch, shared_values():
        yield make_subject(found, request["settings"], Path(scratch), **options)


def _draw(request: dict[str, Any]) -> dict[str, Any]:
    """The encoded training tasks, and the file of the class."""
    from rollouts.encoding import encode

    with _subject(request) as subject:
        tasks = [encode(task).decode() for task in subject.draw(request["count"])]
    module = sys.modules.get(getattr(subject.component, "__module__", ""))
    return {"tasks": tasks, "file": getattr(module, "__file__", "") or ""}


def _play(request: dict[str, Any]) -> list[dict[str, Any]]:
    """What the first episodes of a check are here, in another order."""
    from rollouts_check.environments.processes import played_backwards

    with _subject(request) as subject:
        return played_backwards(subject)


def _sources(request: dict[str, Any]) -> list[str]:
    """What the environment's own code asks for that differs between two runs, each with its line."""
    from rollouts_check.environments.agents import example_script, play_each, says
    from rollouts_check.environments.subject import DRAWN

    found = dict[str, None]()
    with _subject(request) as subject:
        module = sys.modules[subject.component.__module__]
        tracer = _tracer(str(Path(module.__file__ or "").parent), found)
        threading.setprofile(tracer)  # for the threads that begin now
        sys.setprofile(tracer)
        try:
            subject.draw(DRAWN)
            if request["with_episode"]:
                script = example_script(subject)
                play_each(subject, subject.tasks[:1], [says(*script)], turns=len(script))
        finally:
            threading.setprofile(None)
            sys.setprofile(None)
    return list(found)


def _tracer(folder: str, found: dict[str, None]) -> Callable[[FrameType, str, Any], None]:
    """A profile function that records calls of `SOURCES`, and generators without a seed, by code in this folder."""
    from rollouts_check.report import place_of_frame

    def trace(frame: FrameType, event: str, about: Any) -> None:
        words = ""
        if event == "c_call" and frame.f_code.co_filename != tempfile.__file__:  # not the names of temporary files
            name = f"{about.__module__}.{about.__name__}" if about.__module__ else about.__qualname__
            words = f"{name} gave {SOURCES[name]}" if name in SOURCES else ""
        elif event == "call" and frame.f_code.co_name == "__init__" and frame.f_code.co_filename == random.__file__:
            words = "random.Random() had no seed" if frame.f_locals.get("x") is None else ""
        if words and (place := place_of_frame(frame)) is not None and place.file.startswith(folder):
            found[f"{words} ({place})"] = None

    return trace


def _import_watched(request: dict[str, Any]) -> dict[str, Any]:
    """The seconds of the import, its forbidden modules and sockets, each with the author's line, and the file of the
    component's module.
    """
    from rollouts.plugins.manager import PluginManager
    from rollouts_check.finding import find_ref, load

    manager = PluginManager()
    ref = find_ref(manager, request["kind"], request["name"])
    for module in request["first"]:
        with contextlib.suppress(ModuleNotFoundError):  # a component that needs it says so
            importlib.import_module(module)
    modules: dict[str, str] = {}
    effects: dict[str, str] = {}
    sys.meta_path.insert(0, _Watch(frozenset(request["forbidden"]), modules))
    sys.addaudithook(lambda event, _: _note(effects, f"it uses a socket ({event})") if event in SOCKETS else None)
    _patch(effects)
    begun = time.perf_counter() - _seconds_without_core()
    component = load(manager, ref)
    seconds = time.perf_counter() - _seconds_without_core() - begun
    own = ref.value.partition(":")[0] or getattr(component, "__module__", "")
    file = getattr(sys.modules.get(own.strip()), "__file__", "") or ""
    return {"seconds": seconds, "file": file, "modules": modules, "effects": effects}


PROGRAMS = {"draw": _draw, "import": _import_watched, "play": _play, "sources": _sources}


def _seconds_without_core() -> float:
    """How long this thread was ready and had to wait for a core, because others used them; 0 if the system does not
    say. A busy machine makes no import slow.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # only Linux has it
        return 0.0


class _Watch:
    """A finder that finds nothing, and records the first import of each forbidden module."""

    def __init__(self, forbidden: frozenset[str], modules: dict[str, str]) -> None:
        self._forbidden, self._modules = forbidden, modules

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name in self._forbidden:
            _note(self._modules, name)
        return None


def _note(found: dict[str, str], what: str) -> None:
    """Record the author's line that does something for the first time."""
    if what not in found:
        found[what] = _authors_line()


def _patch(effects: dict[str, str]) -> None:
    """Record calls of an author's code that change the process, with their lines."""

    def recorded(function: Callable[..., Any], words: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if line := _authors_line(may_import=False):
                effects.setdefault(words, line)
            return function(*args, **kwargs)

        return call

    for owner, name, words in (
        (signal, "signal", "it sets the handler of a signal"),
        (random, "seed", "it seeds the global generator"),
        (os, "chdir", "it changes the working directory"),
        (threading.Thread, "start", "it starts a thread"),
        (subprocess.Popen, "__init__", "it starts a process"),
        (asyncio, "set_event_loop", "it sets an event loop"),
    ):
        setattr(owner, name, recorded(getattr(owner, name), words))


def _authors_line(*, may_import: bool = True) -> str:
    """The innermost line outside of rollouts, the standard library and the installed packages. Without `may_import`: ""
    if that line imports a module which then does something, such as trio.
    """
    from rollouts_check.report import place_of_frame

    until = "\0" if may_import else "<frozen importlib"
    return str(place_of_frame(sys._getframe(1), is_own=True, until=until) or "")


# --- another date -----------------------------------------------------------------------------------------------------

_SHIFT_SECONDS = 400 * 86400 + 5 * 3600 + 17 * 60 + 23
"""Another year, month, weekday, hour and minute."""

_shift = datetime.timedelta(seconds=_SHIFT_SECONDS)


class _Shifted(type):
    """Makes objects of the original class instances of the shifted one."""

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, other: type) -> bool:
        wanted = cls.__mro__[1] if cls.__module__ == __name__ else cls
        return type.__subclasscheck__(wanted, other)


class _LateDate(_date, metaclass=_Shifted):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _date.__new__(_date if cls is _LateDate else cls, *args, **kwargs)

    @classmethod
    def today(cls) -> Any:
        return (_datetime.now() + _shift).date()


class _LateDatetime(_datetime, metaclass=_Shifted):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _datetime.__new__(_datetime if cls is _LateDatetime else cls, *args, **kwargs)

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _datetime.now(tz) + _shift

    today = now

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(datetime.UTC).replace(tzinfo=None)


def _shift_clock() -> None:
    """Let `time` and `datetime` answer as if it were more than a year later. Monotonic clocks are left alone, because
    deadlines use them. Modules that take names from `time` and `datetime` must be imported later.
    """
    clock, nanoseconds = time.time, time.time_ns
    datetime.date, datetime.datetime = _LateDate, _LateDatetime  # type: ignore[misc]
    time.time = lambda: clock() + _SHIFT_SECONDS
    time.time_ns = lambda: nanoseconds() + _SHIFT_SECONDS * 10**9

    def of_seconds(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda seconds=None: function(time.time() if seconds is None else seconds)

    def of_tuple(function: Callable[..., Any], place: int) -> Callable[..., Any]:
        return lambda *args: function(*args, *([time.localtime()] if len(args) == place else []))

    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, of_seconds(getattr(time, name)))
    for name, place in (("strftime", 1), ("asctime", 0)):
        setattr(time, name, of_tuple(getattr(time, name), place))
