"""What an environment's code leaves behind or touches outside itself: threads, processes, files, random generators,
attributes of its classes and modules, and the state of the process.

Also asks programs in another process. Files are watched with an audit hook of Python, so writes of other processes are
not seen. Class attributes, module variables and what `shared` returned are compared by what they hold: text, numbers,
lists, mappings, and the attributes of objects in them, down to a depth. Functions and modules are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from rollouts.author_code import INSTALLED, Place, shown
from rollouts.config.convert import unflagged
from rollouts.env import calls
from rollouts.errors import counted
from rollouts_check.environments.agents import watched
from rollouts_check.environments.subject import Subject
from rollouts_check.packages import without_own_path
from rollouts_check.report import Attempt, FailedError, SkippedError, place_of_frame

CHILD_SECONDS = 300.0
GRACE_SECONDS = 3.0  # how long threads and processes may take to end after the last episode
PATH = "import sys; sys.path[:] = sys.argv[2:]; "
BOOT = "import sys; from rollouts_check.environments.child import main; main(sys.argv[1])"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = frozenset(
    {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "shutil.rmtree"}
)
"""Audit events of calls that change the file system. The first argument is a path."""

WAITS = frozenset(
    {"os.system", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "time.sleep"}
)
"""Audit events of calls that wait, and `time.sleep`, which has none."""

LOOPS = ("rollouts-check", "rollouts-asyncio")
"""The threads in which the checks run trio, and the engine runs asyncio."""

LOOP_PACKAGES = (f"{os.sep}asyncio{os.sep}", f"{os.sep}trio{os.sep}", f"{os.sep}anyio{os.sep}")
ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
LOOK_SECONDS = 0.01
IDLE_SECONDS = 0.05  # how long a loop may be idle inside an async method
OWN_CHILDREN = ("resource_tracker", "ps -axo", "rollouts.env.workers")
"""Child processes of Python itself, of this module and of workers."""

OURS = ("rollouts", "Trio ", "MainThread", "pydevd", "ThreadPoolExecutor", "AnyIO", "asyncio_")
"""How the names of threads begin that belong to rollouts, trio and asyncio."""


# --- random numbers ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def random_calls() -> Iterator[list[str]]:
    """A list that has, after the block, each use of the global generators of `random` and numpy in it."""
    calls: dict[str, None] = {}
    found: list[str] = []
    owner = random.random.__self__  # type: ignore[attr-defined]  # the hidden generator of the module
    numpy = sys.modules.get("numpy")
    saved = random.getstate(), numpy and numpy.random.get_state()
    random.seed("rollouts check")  # a state that no environment sets, because an earlier episode may have seeded it
    if numpy is not None:
        numpy.random.seed(list(b"rollouts check"))
    before, numpys = random.getstate(), _numpy_state()

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = place_of_frame(sys._getframe(1))
            calls[f"random.{name} was called" + (f" ({place})" if place else "")] = None
            return function(*args, **kwargs)

        return call

    functions = {name: value for name, value in vars(random).items() if getattr(value, "__self__", None) is owner}
    del functions["getstate"]
    try:
        with contextlib.ExitStack() as patches:
            for name, value in functions.items():
                patches.enter_context(mock.patch.object(random, name, recorded(name, value)))
            yield found
    finally:
        if random.getstate() != before:
            found += list(calls) or ["the state of the global `random` changed"]
        if numpys is not None and _numpy_state() != numpys:
            found.append("the state of the global `numpy.random` changed")
        random.setstate(saved[0])
        if numpy is not None:
            numpy.random.set_state(saved[1])


def _numpy_state() -> str | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else repr([str(part) for part in numpy.random.get_state()])


# --- another process --------------------------------------------------------------------------------------------------


def ask_child_of(
    subject: Subject, program: str, *, hash_seed: str = "", python: Path | None = None, name: str = "", **more: Any
) -> Any:
    """The answer of a program of `child` for this environment, in this Python or in another one, where it has another
    name. Raises FailedError and SkippedError like `ask_child`.
    """
    settings = unflagged(subject.settings)
    if name:
        settings["env"] = settings["env"] | {"name": name} if isinstance(settings["env"], dict) else name
    own = {"name": name or subject.found.name, "settings": settings, "seed": subject.seed, "tasks": subject.tasks_max}
    command, path = ([str(python), "-P"], None) if python else ([sys.executable], sys.path)
    return ask_child(command, program, own | more, {"PYTHONHASHSEED": hash_seed} if hash_seed else {}, path)


def random_sources(subject: Subject, *, with_episode: bool = False) -> list[str]:
    """What another process saw the environment's code ask for that differs between two runs: the clock, the operating
    system's random numbers, generators without a seed. Empty if it cannot tell.
    """
    if not subject.found.is_importable:
        return []
    with contextlib.suppress(FailedError, SkippedError):
        found: list[str] = ask_child_of(subject, "sources", with_episode=with_episode)
        return found[:3]
    return []


def first_difference(first: bytes | None, second: bytes | None) -> str:
    """Where two encoded values differ: "answer was 3, then 4". Empty if they are equal."""
    if first is None or second is None:
        texts = ["nothing" if each is None else shown(each.decode()) for each in (first, second)]
        return f"it was {texts[0]}, then {texts[1]}"
    return _difference(json.loads(first), json.loads(second), "")


def _difference(first: Any, second: Any, path: str) -> str:
    if type(first) is type(second) is dict and first.keys() == second.keys():
        inside = [_difference(first[key], second[key], f"{path}.{key}" if path else key) for key in first]
    elif type(first) is type(second) is list and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        inside = [_difference(one, other, f"{path}[{number}]") for number, (one, other) in pairs]
    else:
        inside = [] if first == second else [f"{path or 'it'} was {shown(first)}, then {shown(second)}"]
    return next(filter(None, inside), "")


def ask_child(
    python: list[str], program: str, request: dict[str, Any], variables: dict[str, str], path: list[str] | None
) -> Any:
    """Run a program of `child` to its end. Returns its answer. `path` is its `sys.path`; None: its own.

    Raises FailedError if it fails or takes longer than CHILD_SECONDS, and SkippedError if a setting cannot be sent to
    it, or if it is its episodes that take longer.
    """
    attempt = Attempt("import the environment in another process", change="make the module importable on its own")
    environment = {**(os.environ if path else without_own_path()), **variables}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        try:
            text = msgspec.json.encode({"program": program, "answer": str(answer), **request}).decode()
        except (TypeError, ValueError) as error:
            raise SkippedError(f"a setting cannot be sent to another process: {error}") from error
        command = [*python, "-c", f"{PATH if path else ''}{BOOT}", text, *(path or ())]
        try:
            code, errors, left = _run_alone(command, environment)
        except subprocess.TimeoutExpired:
            seen = f"it took longer than {CHILD_SECONDS:g} seconds"
            if program == "play":
                raise SkippedError(f"another process: {seen}") from None
            raise attempt.failed(seen, "load heavy things in `shared`, and make a task when it is drawn") from None
        if code != 0 and request.get("is_late"):  # a library may not work with the shifted clock
            return ask_child(python, program, {**request, "is_late": False}, variables, path)
        lines = errors.strip().splitlines() or [f"exit code {code}"]
        attempt.require(code == 0, "\n".join(lines[-3:]))
        change = "end it in `close`; what `shared` started, after its `yield`"
        attempt.require(not left, f"it left {counted(len(left), 'process')}: {', '.join(left[:3])}", change)
        return json.loads(answer.read_text())


def _run_alone(command: list[str], environment: dict[str, str]) -> tuple[int, str, list[str]]:
    """Run a command in a session of its own. Returns its exit code, its last errors, and the processes that it left,
    which are killed. Raises TimeoutExpired.
    """
    with tempfile.TemporaryFile() as errors:
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": errors}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        try:
            code = process.wait(CHILD_SECONDS)
        except BaseException:
            _kill_group(process.pid)
            process.wait()
            raise
        left = _processes_of(process.pid)
        deadline = time.monotonic() + GRACE_SECONDS
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = _processes_of(process.pid)
        if left:
            _kill_group(process.pid)
        errors.seek(0)
        return code, errors.read().decode(errors="replace"), left


def _kill_group(group: int) -> None:
    with contextlib.suppress(OSError):  # it has ended, or the system has no groups
        os.killpg(group, signal.SIGKILL)


def _processes_of(group: int) -> list[str]:
    """The command lines of the processes of a group that have not ended."""
    try:
        os.killpg(group, 0)
    except OSError:  # the usual case: there is none
        return []
    found = []
    for pid, _, words in _running():
        with contextlib.suppress(OSError):
            found += [words] if os.getpgid(pid) == group else []
    return found


# --- event loops ------------------------------------------------------------------------------------------------------


class Blocked(threading.Thread):
    """Watches, in a `with` block, the threads in which trio and asyncio run an environment's async methods.

    `calls` are the calls by which an async method blocked its event loop, each with its line. `idle` are the lines at
    which a loop was idle for long inside an async method: it neither computed nor waited for a core. Only Linux says
    how long a thread was busy, so `idle` is empty elsewhere. Of the installed packages, only `package` is watched.
    """

    def __init__(self, package: str) -> None:
        super().__init__(name="rollouts-blocked", daemon=True)
        self.calls: dict[str, None] = {}
        self.idle: dict[str, None] = {}
        self._package = package
        self._done = threading.Event()

    def __enter__(self) -> Blocked:
        sleep = time.sleep

        def call(seconds: float, /) -> None:
            if seconds > 0:
                self._see("time.sleep", ())
            sleep(seconds)

        self._stack = contextlib.ExitStack()
        self._stack.enter_context(audited(self._see))
        self._stack.enter_context(mock.patch.object(time, "sleep", call))
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self.join()
        self._stack.close()

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record a call that blocks, if it is made in the thread of an event loop."""
        if event not in WAITS or threading.current_thread().name not in LOOPS:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        if event == "socket.connect" and arguments[0].gettimeout() == 0:
            return
        if event == "subprocess.Popen" and not _is_waiting(frame):
            return
        if place := _place_in_async(frame, self._package):
            self.calls[f"{event} ({place})"] = None

    def run(self) -> None:
        """Look again and again what each loop does, and whether it has been idle since it began that."""
        before: dict[threading.Thread, tuple[tuple[int, int], float]] = {}
        while not self._done.wait(LOOK_SECONDS):
            for thread in threading.enumerate():
                if thread.name not in LOOPS or (idle := _idle_seconds(thread)) is None:
                    continue
                frame = sys._current_frames().get(thread.ident or 0)
                doing = id(frame), frame.f_lasti if frame else 0
                known, since = before.get(thread, (None, 0.0))
                if known != doing:
                    before[thread] = doing, idle
                elif idle - since > IDLE_SECONDS and (place := _place_in_async(frame, self._package)):
                    self.idle[f"it was idle for more than {IDLE_SECONDS:g} seconds ({place})"] = None


def _idle_seconds(thread: threading.Thread) -> float | None:
    """How long a thread neither ran nor waited for a core, by a clock of unknown start; None if it is not known."""
    try:
        busy, waiting, _ = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
    except (OSError, ValueError):  # only Linux has it
        return None
    return time.monotonic() - (int(busy) + int(waiting)) / 1e9


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether a process is started by a function that waits for its end, such as `subprocess.run`."""
    while frame is not None and frame.f_code.co_filename == subprocess.__file__:
        if frame.f_code.co_name in ("run", "call"):
            return True
        frame = frame.f_back
    return False


def _place_in_async(frame: FrameType | None, package: str) -> Place | None:
    """The line of the author's async function that runs here; None if that of another package does, or none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_flags & ASYNC or any(part in file for part in LOOP_PACKAGES):
            place = place_of_frame(frame, is_own=not any(f"{part}{package}" in file for part in INSTALLED))
            return place if place and place.file == file else None
        frame = frame.f_back
    return None


# --- files ------------------------------------------------------------------------------------------------------------

_watching: list[Callable[[str, tuple[Any, ...]], None]] = []
_is_hooked = False


@contextlib.contextmanager
def audited(listener: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `listener(event, arguments)` for each audit event of Python in the block."""
    global _is_hooked
    if not _is_hooked:  # a hook cannot be removed
        _is_hooked = True
        sys.addaudithook(_notify)
    _watching.append(listener)
    try:
        yield
    finally:
        _watching.remove(listener)


def _notify(event: str, arguments: tuple[Any, ...], watching: list[Any] = _watching) -> None:
    for listener in watching:  # a default, because the variables of a module are None when Python ends
        listener(event, arguments)


@contextlib.contextmanager
def writes_outside(allowed: Path) -> Iterator[list[str]]:
    """A list of the files that the block changes outside of `allowed` and of the user's caches."""
    caches = [os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"), "/dev", "/proc"]
    places = [os.path.realpath(each) for each in (str(allowed), *caches)]
    found: dict[str, None] = {}

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            is_write = (flags or 0) & WRITES if mode is None else any(letter in str(mode) for letter in "wax+")
        else:
            path, is_write = arguments[0] if arguments else None, event in CHANGES
            if is_write and event != "os.truncate" and isinstance(arguments[-1], int) and arguments[-1] >= 0:
                return  # the path begins at an open folder, as in shutil.rmtree, which has an event of its own
        if not is_write or not isinstance(path, str | bytes | Path):
            return
        name: str = os.fsdecode(path)
        full = os.path.realpath(name)
        if "__pycache__" in full or any(full == each or full.startswith(f"{each}{os.sep}") for each in places):
            return
        place = place_of_frame(sys._getframe(1))
        if place is not None:
            found[f"{full} ({place})"] = None

    values: list[str] = []
    with audited(listen):
        yield values
    values += found


@contextlib.contextmanager
def own_temporary_folder(folder: Path) -> Iterator[Path]:
    """Make `folder` the temporary folder of this process and of its children."""
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        with mock.patch.object(tempfile, "tempdir", str(folder)):
            yield folder
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)


# --- leftovers --------------------------------------------------------------------------------------------------------


class Leftovers:
    """Compares threads, child processes, temporary files and asyncio tasks with those at its creation."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._tasks = folder, Counter(calls.asyncio_tasks())
        self._threads, self._processes, self._files = set(threading.enumerate()), _children(), self._temporary()

    def require_none(self, attempt: Attempt, without: str = "nothing") -> None:
        """Raise the failure of this attempt if something is left, other than what has `without` in its name."""
        left = [line for line in self.found() if without not in line]
        attempt.require(not left, f"it left {'; '.join(left)}")

    def found(self) -> list[str]:
        """What is left and does not end within a few seconds."""
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _left(self) -> list[str]:
        threads = [
            thread.name
            for thread in threading.enumerate()
            if thread not in self._threads and thread.is_alive() and not thread.name.startswith(OURS)
        ]
        processes = {pid: words for pid, words in _children().items() if pid not in self._processes}
        files, tasks = sorted(self._temporary() - self._files), Counter(calls.asyncio_tasks()) - self._tasks
        found = {
            "thread": threads,
            "process": [*processes.values()],
            "temporary file": files,
            "asyncio task": sorted(tasks.elements()),
        }
        return [f"{counted(len(each), word)}: {', '.join(each[:3])}" for word, each in found.items() if each]

    def _temporary(self) -> set[str]:
        return {each.name for each in self._folder.iterdir()} if self._folder.is_dir() else set()


def _children() -> dict[int, str]:
    """The command lines of the child processes of this process, by process id."""
    return {pid: words for pid, parent, words in _running() if parent == os.getpid()}


def _running() -> Iterator[tuple[int, int, str]]:
    """The id, the parent and the command line of all processes but ended ones, and those of Python and of workers."""
    for pid, parent, state, words in _rows_of_proc() if Path("/proc/self/stat").exists() else _rows_of_ps():
        if not state.startswith("Z") and not any(part in words for part in OWN_CHILDREN):
            yield pid, parent, words[:80]


def _rows_of_proc() -> Iterator[tuple[int, int, str, str]]:
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # the process has ended meanwhile
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield int(folder.name), int(parent), state, words


def _rows_of_ps() -> Iterator[tuple[int, int, str, str]]:
    done = subprocess.run(["ps", "-axo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        pid, parent, state, words = [*line.split(None, 3), ""][:4]
        yield int(pid), int(parent), state, words


# --- what is kept around the objects ----------------------------------------------------------------------------------


DEPTH = 4  # attributes of attributes that are compared
ITEMS_MAX = 500  # items of a container that are compared
SIGNALS = ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGHUP", "SIGUSR1", "SIGUSR2")
OWN_VARIABLES = ("TMPDIR", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST")
"""Environment variables that the checks, the terminal and pytest set."""

VARIABLE = "the environment variable "
CONTAINERS = (list, dict, set, deque)
SKIPPED = (ModuleType, FunctionType, property, staticmethod, classmethod)


class Kept(NamedTuple):
    """What a class attribute or a module variable holds: a digest, how many items, and a text for a message."""

    digest: str
    size: int | None
    text: str


def kept_by_author(subject: Subject) -> dict[str, Kept]:
    """What the class attributes and module variables of the environment's package hold, by name, and what `shared`
    returned.
    """
    found: dict[str, Kept] = {}
    classes = [each for each in getattr(watched(subject.component), "__mro__", ()) if _is_authors(each)]
    names = list(dict.fromkeys(each.__module__ for each in classes))
    for name in names:
        for variable, value in list(vars(sys.modules.get(name, ModuleType(name))).items()):
            if isinstance(value, type):
                classes += [value] if value.__module__ == name and value not in classes else []
            elif _is_state(variable, value):
                found[f"the module variable {variable}"] = _kept(value)
    for each in classes:
        for attribute, value in list(vars(each).items()):
            defaults = value.__defaults__ or () if isinstance(value, FunctionType) else ()
            if kept := [default for default in defaults if isinstance(default, CONTAINERS)]:
                found[f"a default of {each.__name__}.{attribute}"] = _kept(kept)
            if _is_state(attribute, value):
                found[f"the class attribute {each.__name__}.{attribute}"] = _kept(value)
    if subject.has("shared") and subject.environment.remote is None:
        found["the value of `shared`"] = _kept(subject.environment.shared().get_now())
    return found


def changes(before: Mapping[str, Kept], after: Mapping[str, Kept]) -> list[str]:
    """The names whose value is another one afterwards, each with both values."""
    nothing = Kept("", None, "not there")
    pairs = [(name, before.get(name, nothing), kept) for name, kept in after.items()]
    return [f"{name} was {one.text}, then {two.text}" for name, one, two in pairs if one.digest != two.digest]


def grown(states: list[dict[str, Kept]]) -> list[str]:
    """The names of lists, mappings and sets with more items each time."""
    found = []
    for name, last in states[-1].items():
        sizes = [size for each in states if name in each and (size := each[name].size) is not None]
        if len(sizes) == len(states) and all(one < two for one, two in itertools.pairwise(sizes)):
            found.append(f"{name} had {', '.join(map(str, sizes[:-1]))} and then {sizes[-1]} items: {last.text}")
    return found


def _is_authors(value: Any) -> bool:
    module = getattr(value, "__module__", "builtins") or "builtins"
    top = module.partition(".")[0]
    return top not in ("builtins", "typing", "abc", "rollouts") and top not in sys.stdlib_module_names


def _is_state(name: str, value: Any) -> bool:
    if name.startswith("__") or isinstance(value, SKIPPED) or (callable(value) and not hasattr(value, "__dict__")):
        return False
    return name not in ("_abc_impl", "__warningregistry__")


def _kept(value: Any) -> Kept:
    sizes: list[int] = []
    text = "".join(_parts(value, 0, set(), sizes))
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return Kept(digest, sum(sizes) if sizes else None, shown(value))


def _parts(value: Any, depth: int, seen: set[int], sizes: list[int]) -> Iterator[str]:
    """Texts that are equal if two values hold the same. Adds the size of each container to `sizes`."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value)[:1000]
        return
    yield type(value).__name__
    if depth > DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, CONTAINERS):
        sizes.append(len(value))
    if isinstance(value, random.Random):
        yield str(hash(value.getstate()))
    elif isinstance(value, dict | set | frozenset | list | tuple | deque):
        yield str(len(value))
        items = list(value.items() if isinstance(value, dict) else value)[:ITEMS_MAX]
        items = [each for pair in items for each in pair] if isinstance(value, dict) else items
        texts = ["".join(_parts(each, depth + 1, seen, sizes)) for each in items]
        yield from sorted(texts) if isinstance(value, set | frozenset) else texts
    elif type(value).__module__ == "itertools":
        yield repr(value)
    else:
        for name, each in _attributes(value).items():
            yield name
            yield from _parts(each, depth + 2, seen, sizes)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an author's object; empty for others, such as a lock or a class."""
    if isinstance(value, type) or isinstance(value, SKIPPED) or not _is_authors(type(value)):
        return {}
    found = getattr(value, "__dict__", None)
    return dict(found) if isinstance(found, dict) else {}


# --- the process ------------------------------------------------------------------------------------------------------


def state_of_process() -> dict[str, Any]:
    """The working directory, the handlers of signals, and the environment variables, with words for each."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = "a folder that does not exist"
    handled = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    return (
        {"the working directory": folder, "sys.path": list(sys.path)}
        | {f"the handler of {number.name}": signal.getsignal(number) for number in handled}
        | {f"{VARIABLE}{name}": value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    )


def process_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What another process state has that the first has not."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name} was {shown(before.get(name))}, then {shown(after.get(name))}" for name in names]


def restore_process(before: Mapping[str, Any]) -> None:
    """Set the working directory and the environment variables as they were."""
    os.chdir(before["the working directory"])
    known = {name.removeprefix(VARIABLE): value for name, value in before.items() if name.startswith(VARIABLE)}
    for name in [each for each in os.environ if each not in known and each not in OWN_VARIABLES]:
        del os.environ[name]
    os.environ.update(known)
