"""What an evaluation takes over from the run that wrote its model: the settings that say what was held out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollouts.config.convert import plain
from rollouts.config.files import load_file
from rollouts.config.flags import Tree

__all__ = ["HOLDING_OUT", "run_settings_file", "with_settings_of_run"]

HOLDING_OUT = ("seed", "eval_tasks")


def run_settings_file(model: Any) -> Path | None:
    """The settings file of the run that wrote this model: its folder or one of its checkpoints; None for other models.

    >>> run_settings_file("tiny") is None
    True
    """
    if not isinstance(model, str) or not model:
        return None
    path = Path(model).expanduser().absolute()
    folders = [path]
    if path.name == "checkpoints":
        folders.append(path.parent)
    elif path.parent.name == "checkpoints":
        folders.append(path.parents[1])
    return next((folder / "config.toml" for folder in folders if (folder / "config.toml").is_file()), None)


def with_settings_of_run(tree: Tree) -> Tree:
    """The settings of an evaluation with the seed and the number of held-out tasks of the run that it evaluates, where
    they are not given. A run that held nothing out leaves that number at its default.

    Raises ConfigError where the run's settings cannot be read.
    """
    file = run_settings_file(plain(tree.get("model")))
    if file is None or all(name in tree for name in HOLDING_OUT):
        return tree
    run, _ = load_file(file)
    return {name: run[name] for name in HOLDING_OUT if run.get(name) and name not in tree} | tree
