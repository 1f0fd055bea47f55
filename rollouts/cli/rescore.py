"""`rollouts rescore RUN --reward ...`: judge saved trajectories again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.options import DISPLAY, SettingsCommand, given_settings
from rollouts.config.settings import setting_infos

if TYPE_CHECKING:
    from rollouts.runs.progress import Display

SETTINGS = ("reward", "on_invalid_reward", "concurrency", "reward_seconds", "out")


def _rescore(run: str, display: Display, **options: Any) -> int:
    """Judge the saved trajectories of a run again, with other rewards. No model is loaded.

    RUN is the folder of a run. The result is a new folder with the same tokens and the new rewards, which `rollouts run
    --from` reads.

    \b
    Examples:
      rollouts rescore runs/first --reward ./brevity.py:brevity
      rollouts rescore runs/first --reward env:1 --reward ./brevity.py:brevity:-0.1 --out runs/brief
    """
    from rollouts.runs.progress import shown_progress
    from rollouts.runs.rescore import rescore as rescore_run

    given = given_settings(options)
    with shown_progress("stdout", display) as progress:
        rescore_run(run, given, progress)
    return 0


rescore = SettingsCommand(
    "rescore",
    callback=_rescore,
    argument=click.Argument(["run"], metavar="RUN"),
    own=[DISPLAY],
    infos=[
        info._replace(shown="runs/<time>-<run>-rescored" if info.name == "out" else info.shown)
        for info in setting_infos()
        if info.name in SETTINGS
    ],
)
