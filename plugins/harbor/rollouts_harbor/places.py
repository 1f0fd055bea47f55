"""The sandbox of a task: its files, the commands of the model, and the tests, which write the reward.

The model may have written a reward or a test, and so both folders are emptied before the tests come in. No process of
the model lives then, because a sandbox ends them with their command.
"""

from __future__ import annotations

import io
import json
import math
import shlex
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rollouts import Score
from rollouts.errors import ConfigError, EnvironmentDefinitionError
from rollouts.sandboxes import Result, Sandbox
from rollouts.sandboxes.base import ImageSandbox
from rollouts_harbor.dockerfiles import Step
from rollouts_harbor.folders import TaskFolder, value_of

WORKSPACE = "/workspace"  # of sandboxes whose files are not those of this machine
LOGS, TESTS, SOLUTION = "/logs", "/tests", "/solution"
VERIFIER = f"{LOGS}/verifier"
SECONDS = 120.0  # how long a command of this package may take
RUN_SECONDS = 600.0  # how long a RUN of a Dockerfile may take
WORDS = 300  # how much of the tests' output explains why there is no reward

EMPTIED = """\
for folder; do
  if [ -L "$folder" ]; then rm -f "$folder"; fi
  chmod -R u+rwx "$folder" 2>/dev/null
  rm -rf "$folder" 2>/dev/null
  mkdir -p "$folder" && [ -z "$(ls -A "$folder")" ] || { echo "$folder" >&2; exit 1; }
done
"""
"""A folder that is a mount cannot be removed, but its content can."""


class Place:
    """A sandbox in which a task can be done. Raises SandboxLostError if it is lost."""

    def __init__(self, sandbox: Sandbox, task: TaskFolder) -> None:
        self._sandbox, self._task = sandbox, task
        self.shell, self.workdir = "sh", WORKSPACE
        self.variables = _values(task.config.environment.env)

    def run(self, command: str, seconds: float, more: Mapping[str, str] | None = None, stdin: bytes = b"") -> Result:
        """Run a command in the working directory, with the variables of the task and `more`."""
        pairs = [f"{name}={value}" for name, value in {**self.variables, **(more or {})}.items()]
        script = f'mkdir -p "$0"; cd "$0" || exit 1\n{command}'
        return self._sandbox.exec(["env", *pairs, self.shell, "-c", script, self.workdir], seconds=seconds, stdin=stdin)

    def write(self, path: str, text: str) -> None:
        """Write a file. Raises OSError."""
        where = shlex.quote(str(PurePosixPath(self.workdir, path)))
        done = self.run(f'mkdir -p "$(dirname {where})" && cat > {where}', SECONDS, stdin=text.encode())
        if done.exit_code:
            raise OSError(f"{path} cannot be written: {done.text}")

    def put(self, files: Iterable[tuple[Path, str]], where: str) -> None:
        """Copy files of the task below a folder of the sandbox. Raises EnvironmentDefinitionError."""
        done = self.run(f"mkdir -p {where} && tar -xof - -C {where}", SECONDS, stdin=_tar(files))
        if done.exit_code:
            raise EnvironmentDefinitionError(
                f"the task {self._task.folder.name} cannot be copied to {where} in the sandbox: {done.text}\n"
                "the sandbox needs the programs sh, mkdir and tar"
            )

    # --- the verdict --------------------------------------------------------------------------------------------------

    def verified(self, key: str) -> Score:
        """Run the tests, and read the reward that they write. None, with the reason, if they write none."""
        emptied = self._sandbox.exec(["sh", "-c", EMPTIED, "sh", VERIFIER, TESTS], seconds=SECONDS)
        if emptied.exit_code:
            return Score(None, why=f"the folder of the tests could not be emptied: {emptied.text}")
        folder, verifier = self._task.folder / "tests", self._task.config.verifier
        self.put(_files(folder, folder), TESTS)
        command = f"chmod +x {TESTS}/test.sh; ({TESTS}/test.sh) > {VERIFIER}/test-stdout.txt 2>&1"
        done = self.run(command, verifier.timeout_sec, _values(verifier.env))
        if done.timed_out:
            return Score(None, why=f"the tests took longer than {verifier.timeout_sec:g} seconds")
        for name, read in (("reward.json", _of_json), ("reward.txt", _of_text)):
            found = self._sandbox.exec(["cat", f"{VERIFIER}/{name}"], seconds=SECONDS)
            if found.exit_code == 0:
                return read(found.stdout, key)
        said = self._sandbox.exec(["cat", f"{VERIFIER}/test-stdout.txt"], seconds=SECONDS).stdout[-WORDS:].strip()
        return Score(
            None, why=f"the tests wrote no reward; {done.text or 'exit code 0'}; they said: {said or 'nothing'}"
        )


def prepared(sandbox: Sandbox, task: TaskFolder, system: str) -> Place:
    """A place with the files of the task. Raises EnvironmentDefinitionError if this sandbox cannot be one."""
    place, environment = Place(sandbox, task), task.config.environment
    if system == "image":
        _use_image(sandbox, task)
        place.workdir = environment.workdir or _first_line(sandbox, "readlink /proc/1/cwd") or "/"
    else:
        _check_own_files(sandbox, task)
    if _first_line(sandbox, "command -v bash"):
        place.shell = "bash"
    _make_folders(sandbox, task, [f"{LOGS}/agent", VERIFIER, f"{LOGS}/artifacts", TESTS, SOLUTION])
    if system == "image" and not task.has_dockerfile:
        folder = task.folder / "environment"
        place.put(_files(folder, folder), shlex.quote(place.workdir))
    for step in task.steps:
        _follow(place, task, step)
    place.workdir = environment.workdir or place.workdir
    _make_folders(sandbox, task, [place.workdir])
    return place


def _use_image(sandbox: Sandbox, task: TaskFolder) -> None:
    if not isinstance(sandbox, ImageSandbox):
        raise EnvironmentDefinitionError(
            f"the task {task.folder.name} has an image, and this sandbox has none\n"
            "type: --sandbox podman (or docker), or --env.system sandbox --sandbox bubblewrap"
        )
    try:
        sandbox.use_image(task.image)
    except ConfigError as error:
        raise EnvironmentDefinitionError(f"the task {task.folder.name} cannot begin: {error}") from error


def _check_own_files(sandbox: Sandbox, task: TaskFolder) -> None:
    """Refuse a sandbox whose files are those of this machine: the paths of a task, such as /tests, are absolute."""
    if sandbox.exec(["sh", "-c", f'[ "$(pwd)" = {WORKSPACE} ]'], seconds=SECONDS).exit_code:
        folders = json.dumps(_needed(task))
        raise EnvironmentDefinitionError(
            f"the task {task.folder.name} has absolute paths, and this sandbox has the files of this machine\n"
            f"type: --sandbox bubblewrap --sandbox.folders '{folders}'"
        )


def _make_folders(sandbox: Sandbox, task: TaskFolder, folders: list[str]) -> None:
    script = 'for folder; do mkdir -p "$folder" && [ -w "$folder" ] || exit 1; done'
    done = sandbox.exec(["sh", "-c", script, "sh", *folders], seconds=SECONDS)
    if done.exit_code:
        raise EnvironmentDefinitionError(
            f"the task {task.folder.name} cannot write {', '.join(folders)} in this sandbox: {done.text}\n"
            f"type, for bubblewrap: --sandbox.folders '{json.dumps(_needed(task))}'\n"
            'type, for an image whose root folder is read-only: --sandbox.options \'["--cap-add", "DAC_OVERRIDE"]\''
        )


def _needed(task: TaskFolder) -> list[str]:
    """The folders at the top of the file system that a task writes."""
    paths = [step.values[-1] for step in task.steps if step.word in ("WORKDIR", "COPY")]
    tops = [PurePosixPath(path).parts[1] for path in paths if PurePosixPath(path).parts[:1] == ("/",)]
    kept = {f"/{top}" for top in tops} - {WORKSPACE, "/tmp"}
    return sorted({*kept, LOGS, TESTS, SOLUTION})


def _follow(place: Place, task: TaskFolder, step: Step) -> None:
    """Do what a line of the Dockerfile says."""
    if step.word == "WORKDIR":
        place.workdir = str(PurePosixPath(place.workdir, step.values[0]))
    elif step.word == "ENV":
        place.variables |= dict(zip(step.values[::2], step.values[1::2], strict=True))
    elif step.word == "COPY":
        *sources, goal = step.values
        _copy(place, task, sources, goal)
    else:
        done = place.run(step.values[0], RUN_SECONDS)
        if done.exit_code or done.timed_out:
            raise EnvironmentDefinitionError(
                f"the task {task.folder.name} cannot begin: line {step.line} of its Dockerfile failed: {done.text}\n"
                "type: --env.system image --sandbox podman"
            )


def _copy(place: Place, task: TaskFolder, sources: list[str], goal: str) -> None:
    """COPY of a Dockerfile: the content of a folder, or files."""
    context, where = task.folder / "environment", str(PurePosixPath(place.workdir, goal))
    found = [path for source in sources for path in sorted(context.glob(source.strip("/") or "*"))]
    if not found or sources == ["."]:
        found = [context]
    files = [pair for path in found for pair in _files(path, path if path.is_dir() else path.parent)]
    if len(found) == 1 and found[0].is_file() and not goal.endswith(("/", ".")):
        files, where = [(found[0], PurePosixPath(where).name)], str(PurePosixPath(where).parent)
    place.put(files, shlex.quote(where))


def _files(path: Path, root: Path) -> list[tuple[Path, str]]:
    """The files at or below a path, with their paths below a root."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(each, each.relative_to(root).as_posix()) for each in found if each.is_file()]


def _tar(files: Iterable[tuple[Path, str]]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, name in files:
            about, content = tarfile.TarInfo(name), path.read_bytes()
            about.size, about.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(about, io.BytesIO(content))
    return data.getvalue()


def _first_line(sandbox: Sandbox, command: str) -> str:
    done = sandbox.exec(["sh", "-c", command], seconds=SECONDS)
    return done.stdout.strip().partition("\n")[0] if done.exit_code == 0 else ""


def _values(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value_of(text) or "" for name, text in given.items()}


# --- the reward -------------------------------------------------------------------------------------------------------


def _of_text(text: str, key: str) -> Score:
    """The reward of reward.txt.

    >>> _of_text("0.5\\n", "reward").value, _of_text("nan", "reward").why
    (0.5, "reward.txt is 'nan', which is no finite number")
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        return Score(None, why=f"reward.txt is {text[:80]!r}, which is no finite number")
    return Score(value)


def _of_json(text: str, key: str) -> Score:
    """The reward of reward.json, whose numbers are all logged.

    >>> _of_json('{"reward": 1, "style": 0.5}', "reward")[:2]
    (1.0, {'style': 0.5})
    """
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found or not all(_is_number(each) for each in found.values()):
        return Score(None, why=f"reward.json is {text[:80]!r}, which is no table of finite numbers")
    chosen = next(iter(found)) if len(found) == 1 else key
    if chosen not in found:
        has = ", ".join(map(str, found))
        return Score(None, why=f"reward.json has {has}, and no {key}; type: --env.reward-key {next(iter(found))}")
    return Score(float(found[chosen]), {name: float(value) for name, value in found.items() if name != chosen})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
