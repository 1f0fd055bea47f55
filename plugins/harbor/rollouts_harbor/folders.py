"""Task folders in the format of Harbor 0.25, and why one cannot be served.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh

Not here: how a task runs (`places`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.errors import ConfigError
from rollouts_harbor.dockerfiles import Step, read_dockerfile

CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
ROOT = (None, "root", 0, "0")


class Verifier(msgspec.Struct):
    """The table [verifier]."""

    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class Agent(msgspec.Struct):
    """The table [agent]."""

    user: str | int | None = None


class Environment(msgspec.Struct):
    """The table [environment]."""

    docker_image: str | None = None
    os: str = "linux"
    workdir: str | None = None
    env: dict[str, str] = {}
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    healthcheck: dict[str, Any] | None = None


class Config(msgspec.Struct):
    """What this package reads of a task.toml. Other keys are for other programs."""

    verifier: Verifier = msgspec.field(default_factory=Verifier)
    agent: Agent = msgspec.field(default_factory=Agent)
    environment: Environment = msgspec.field(default_factory=Environment)
    steps: list[Any] = []


class TaskFolder(NamedTuple):
    """A task that can be served. `steps` are those of its Dockerfile, for a sandbox without images."""

    folder: Path
    config: Config
    instruction: str
    steps: tuple[Step, ...]

    @property
    def image(self) -> str:
        """The name of its image, or the folder of its Dockerfile."""
        return self.config.environment.docker_image or str(self.folder / "environment")

    @property
    def has_dockerfile(self) -> bool:
        return (self.folder / "environment" / "Dockerfile").is_file()

    def solution(self) -> dict[str, str] | None:
        """The files of the solution by their paths in the sandbox; None if there is none, or one is no text."""
        folder = self.folder / "solution"
        if not (folder / "solve.sh").is_file():
            return None
        try:
            return {
                f"/solution/{path.relative_to(folder)}": path.read_text(encoding="utf-8")
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
        except UnicodeDecodeError:
            return None


def read_folders(flag: str, path: str, system: str, *, skips: bool) -> Mapping[str, TaskFolder]:
    """The tasks below a folder, by their ids. With `skips`, without those that cannot be served. Raises ConfigError."""
    found, refused = dict[str, TaskFolder](), list[str]()
    for folder in _folders(Path(path)):
        name = folder.relative_to(path).as_posix() if folder != Path(path) else folder.resolve().name
        try:
            found[name] = read_folder(folder, system)
        except ConfigError as error:
            if not skips:
                hint = "" if folder == Path(path) else "\nto leave such tasks out, type: --env.unserved skip"
                raise ConfigError(f"{flag} {path}: {error}{hint}") from error
            refused.append(str(error))
    if not found:
        words = f"none of its {len(refused)} tasks can be served; {refused[0]}" if refused else "it has no task.toml"
        raise ConfigError(f"{flag} {path}: {words}\nexpected a folder with task.toml, or a folder of such folders")
    return found


def _folders(path: Path) -> Iterator[Path]:
    """The folders with a task.toml, sorted. One in another one is a file of that task."""
    if (path / "task.toml").is_file():
        yield path
        return
    for each in sorted(path.iterdir()):
        if each.is_dir() and not each.name.startswith("."):
            yield from _folders(each)


def read_folder(folder: Path, system: str) -> TaskFolder:
    """The task of a folder. Raises ConfigError if it is incomplete, or cannot be served."""
    try:
        config = msgspec.toml.decode((folder / "task.toml").read_bytes(), type=Config)
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"the task {folder.name} has a task.toml that cannot be read: {error}") from error
    except OSError as error:
        if config_has_steps(folder):
            raise ConfigError(_refused(folder, "it has several steps ([[steps]])")) from error
        raise ConfigError(f"the task {folder.name} is incomplete: it has no {Path(error.filename).name}") from error
    for reason in _reasons(folder, config, system):
        raise ConfigError(reason)
    steps = read_dockerfile(folder / "environment" / "Dockerfile") if system == "sandbox" else ()
    return TaskFolder(folder, config, _without_canary(instruction), steps)


def config_has_steps(folder: Path) -> bool:
    """Whether the task has several steps, each with an instruction of its own."""
    return bool(msgspec.toml.decode((folder / "task.toml").read_bytes(), type=Config).steps)


def _reasons(folder: Path, config: Config, system: str) -> Iterator[str]:
    """Why a task cannot be served."""
    environment, verifier, has = config.environment, config.verifier, (folder / "environment").joinpath
    if not (folder / "tests" / "test.sh").is_file():
        yield f"the task {folder.name} is incomplete: it has no tests/test.sh, which writes the reward"
    is_separate = verifier.environment is not None or verifier.environment_mode == "separate"
    refused = {
        "it has several steps ([[steps]])": config.steps,
        f"it runs on {environment.os}": environment.os.lower() != "linux",
        "it has several containers (environment/docker-compose.yaml)": has("docker-compose.yaml").exists(),
        "its tests run in a container of their own ([verifier] environment_mode)": is_separate,
        "it collects files before its tests ([[verifier.collect]])": verifier.collect,
        "it has MCP servers ([environment] mcp_servers)": environment.mcp_servers,
        "it needs a GPU or TPU ([environment] gpus, tpu)": environment.gpus or environment.tpu,
        "it has a healthcheck ([environment.healthcheck])": environment.healthcheck,
        f"its agent is the user {config.agent.user}": config.agent.user not in ROOT,
        f"its tests run as the user {verifier.user}": verifier.user not in ROOT,
        "it begins with a conversation (trajectory.json)": (folder / "trajectory.json").exists(),
    }
    for reason, holds in refused.items():
        if holds:
            yield _refused(folder, reason)
    if not environment.docker_image and not has("Dockerfile").is_file():
        yield f"the task {folder.name} is incomplete: it has neither environment/Dockerfile nor a docker_image"
    for name, value in [*environment.env.items(), *verifier.env.items()]:
        if value_of(value) is None:
            yield f"the task {folder.name} needs the environment variable {value}, for {name} in its task.toml\nset it"
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            yield _refused(folder, f"{path.relative_to(folder)} links to a file outside of it")


def _refused(folder: Path, reason: str) -> str:
    return f"the task {folder.name} cannot be served: {reason}"


def value_of(text: str) -> str | None:
    """The value of a variable in task.toml; `${NAME}` and `${NAME:-default}` are variables of this process. None if
    it is not set.

    >>> value_of("1"), value_of("${NO_SUCH_NAME:-2}"), value_of("${NO_SUCH_NAME}")
    ('1', '2', None)
    """
    found = VARIABLE.fullmatch(text)
    return os.environ.get(found[1], found[2]) if found else text


def _without_canary(text: str) -> str:
    """The instruction without marks against training on it, as Harbor shows it."""
    lines = text.split("\n")
    while lines and CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    while lines and not lines[0].strip():
        del lines[0]
    return "\n".join(lines)
