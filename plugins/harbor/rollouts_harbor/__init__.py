"""Task folders in the format of Harbor: `--env harbor --env.path FOLDER --sandbox podman`.

The model works with a shell in a sandbox. When it has finished, the tests of the task are copied into the sandbox, run,
and write the reward.

    folders      reading task folders, and why one cannot be served
    dockerfiles  the lines of a Dockerfile, for sandboxes without images
    places       the sandbox of a task: its files, commands and tests
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from rollouts import Message, Score, Task, reward, tool
from rollouts.env import tool_use
from rollouts.errors import ConfigError
from rollouts.sandboxes import Sandbox
from rollouts_harbor.folders import TaskFolder, read_folders
from rollouts_harbor.places import SOLUTION, Place, prepared

__all__ = ["Harbor"]

TOOL_SECONDS = 3600.0  # the deadline of a tool; that of a command is lower
SOLVE = f"chmod +x {SOLUTION}/solve.sh; {SOLUTION}/solve.sh > /logs/agent/oracle.txt 2>&1; echo $?"

Seconds = Annotated[float, msgspec.Meta(gt=0, lt=TOOL_SECONDS)]


@dataclass
class Harbor:
    """Tasks in folders in the format of Harbor, each with a sandbox and tests."""

    path: str = ""  # a task folder, or a folder of them
    eval_path: str = ""  # other task folders, for evaluation; by default some of `path` are held out
    system: Literal["image", "sandbox"] = "image"  # a task runs in its own image, or in the system of the sandbox
    unserved: Literal["refuse", "skip"] = "refuse"  # what to do with a task that cannot be served
    command_seconds: Seconds = 120.0  # how long a command of the model may take
    reward_key: str = "reward"  # which number of reward.json is the reward; the others are logged

    def __post_init__(self) -> None:
        for flag, path in (("--env.path", self.path), ("--env.eval-path", self.eval_path)):
            if not path and flag == "--env.path":
                raise ConfigError("--env.path: no folder of tasks is given\ntype: --env.path FOLDER")
            if path and not Path(path).is_dir():
                raise ConfigError(f"{flag} {path}: there is no such folder")

    def shared(self) -> Mapping[str, Mapping[str, TaskFolder]]:
        """The tasks of each split, by their ids. Raises ConfigError."""
        skips = self.unserved == "skip"
        train = held_out = read_folders("--env.path", self.path, self.system, skips=skips)
        if self.eval_path:
            held_out = read_folders("--env.eval-path", self.eval_path, self.system, skips=skips)
        return {"train": train, "eval": held_out}

    def tasks(self, split: str, rng: random.Random, shared: Mapping[str, Mapping[str, TaskFolder]]) -> Sequence[Task]:
        """A task for each folder."""
        place = "eval" if split == "eval" and self.eval_path else "train"
        return [
            Task(folder.instruction, info={"split": place, "folder": name}, id=name)
            for name, folder in shared[place].items()
        ]

    def demonstrations(
        self, split: str, rng: random.Random, shared: Mapping[str, Mapping[str, TaskFolder]]
    ) -> Iterator[list[Message]]:
        """The solution of each task that has one: its files are written, and solve.sh is run."""
        for task in self.tasks(split, rng, shared):
            files = shared[task.info["split"]][task.info["folder"]].solution()
            if files is None:
                continue
            messages = [*task.messages]
            for number, (path, text) in enumerate(files.items()):
                messages += tool_use("write_file", {"path": path, "text": text}, "written", number)
            messages += tool_use("shell", {"command": SOLVE}, "0", len(files))
            yield [*messages, Message("assistant", "Done.")]

    def setup(self, task: Task, sandbox: Sandbox, shared: Mapping[str, Mapping[str, TaskFolder]]) -> None:
        """Make the place of the task. Raises EnvironmentDefinitionError if the sandbox cannot be one."""
        self._place: Place = prepared(sandbox, shared[task.info["split"]][task.info["folder"]], self.system)

    @tool(timeout_seconds=TOOL_SECONDS)
    def shell(self, command: str) -> str:
        """Run a shell command, and read what it prints. It begins in the working directory each time.

        Args:
            command: the command, such as `ls -l`
        """
        return self._place.run(command, self.command_seconds).text

    @tool(timeout_seconds=TOOL_SECONDS)
    def write_file(self, path: str, text: str) -> str:
        """Write a file, and make the folders above it.

        Args:
            path: an absolute path, or one below the working directory
            text: the whole content
        """
        self._place.write(path, text)
        return "written"

    @reward
    def verifier(self) -> Score:
        """What the task's tests wrote as the reward; None if they wrote none."""
        return self._place.verified(self.reward_key)
