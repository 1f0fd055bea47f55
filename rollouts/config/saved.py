"""The settings of a run whose saved trajectories another run reads (`--from RUN`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollouts.config.convert import plain
from rollouts.config.files import load_file, runs_inside
from rollouts.config.flags import Tree
from rollouts.config.merging import merge
from rollouts.config.paths import CONFIG
from rollouts.config.settings import EVAL
from rollouts.errors import ConfigError

OWN_ONLY = ("mode", "inference", "logger", "out")
"""The settings of an evaluation that a run with `--from` does not take from the run that it reads."""


def saved_folder(run: str) -> Path:
    """The folder of the run whose trajectories are meant, as an absolute path: of a run of mode sft+rl, its
    reinforcement. Raises ConfigError if there is no run, or if it is an evaluation or was trained on demonstrations.
    """
    folder = Path(run).expanduser().absolute()
    if (folder / "rl" / CONFIG).is_file():
        folder = folder / "rl"
    if not (folder / CONFIG).is_file():
        inside = runs_inside(Path(run).expanduser())
        hint = f"\ndid you mean: {', '.join(inside[-3:])}?" if inside else "\ngive the folder that a run has written"
        raise ConfigError(f"{run} holds no run: it has no {CONFIG}{hint}")
    mode = load_file(folder / CONFIG)[0].get("mode", "rl")
    if mode != "rl":
        why = {
            "eval": "an evaluation, whose tasks are held out",
            "sft": "a run of mode sft, which saves no trajectories",
        }.get(mode, f"a run of mode {mode} that has not begun to reinforce")
        raise ConfigError(f"{run} holds {why}: give a run of mode rl")
    return folder


def with_settings_of_saved(tree: Tree) -> Tree:
    """The tree with the environment, the model, the template and all other settings of episodes from the first run of
    `from_run`, unless they are given. The folders become absolute. Raises ConfigError.
    """
    runs = [str(saved_folder(run)) for run in _listed(tree["from_run"])]
    run, _ = load_file(Path(runs[0]) / CONFIG)
    return merge({key: run[key] for key in run if key in EVAL and key not in OWN_ONLY}, tree | {"from_run": runs})


def _listed(given: Any) -> list[str]:
    values = [plain(each) for each in given] if isinstance(given, list | tuple) else [plain(given)]
    for value in values:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"--from {value}: expected the folder of a run")
    return values
