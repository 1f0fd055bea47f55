"""The episodes of an evaluation, kept as they end. A killed evaluation loses only the episodes that it was playing.

`trajectories/eval.played` has a line of JSON for each finished episode, in the order in which they ended, without the
rewards of whole groups. A resumed evaluation reads it and plays the rest. The file is removed when no episode is left
to play.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollouts.disk import read_regular
from rollouts.encoding import encode
from rollouts.errors import ConfigError, counted
from rollouts.runs.folder import CONFIG, RunFolder
from rollouts.training.rollout_gen.groups import with_task
from rollouts.types import Episode, Task

PLAYED = "trajectories/eval.played"


def keep(folder: RunFolder, episode: Episode) -> None:
    """Add a finished episode. Raises OutputError if the disk refuses."""
    folder.append(PLAYED, encode(episode) + b"\n")


def read_played(folder: Path, tasks: Sequence[Task]) -> tuple[dict[tuple[int, int], Episode], list[str]]:
    """The episodes that an evaluation of these tasks has finished, by (task, sample), and notes for the user.

    Episodes that failed because of the infrastructure are left out, and so are lines that cannot be read, such as the
    last line of a killed process: they are played again. Raises ConfigError if the tasks are others now.
    """
    path = folder / PLAYED
    if not path.exists():
        return {}, []
    content = read_regular(path)
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))  # the next line begins on its own
    found, damaged = dict[tuple[int, int], Episode](), 0
    for row, line in enumerate(whole.splitlines(), start=1):
        try:
            episode = msgspec.json.decode(line, type=Episode)
        except (msgspec.DecodeError, UnicodeDecodeError):
            damaged += 1
            continue
        index = episode.order[0]
        if index >= len(tasks) or tasks[index].key != episode.task.key:
            again = shlex.quote(str(folder / CONFIG))
            raise ConfigError(
                f"{path}, line {row}: task {index} of this evaluation is another one now: the environment, its data or "
                f"its package has changed\nto begin a new evaluation, type: rollouts eval {again}"
            )
        found[episode.order] = with_task(episode, tasks[index])
    failed = {order for order, episode in found.items() if episode.status.is_infrastructure}
    notes = [f"warning: {counted(damaged, 'line')} of {PLAYED} cannot be read"] if damaged else []
    if failed:
        notes.append(f"{counted(len(failed), 'failed episode')} are played again")
    return {order: episode for order, episode in found.items() if order not in failed}, notes
