"""`rollouts resume DIR`: go on with a run that was killed, interrupted or failed, or make one longer."""

from __future__ import annotations

import click

__all__ = ["resume"]


def _resume(folder: str, steps: str | None, checkpoint: str | None) -> int:
    from rollouts.compose import resume_command
    from rollouts.config.flags import read_flag

    given = dict(click.get_current_context().obj or {})
    if steps is not None:
        given["steps"] = read_flag(steps)
    return resume_command(folder, given, checkpoint or "")


resume = click.Command(
    "resume",
    callback=_resume,
    params=[
        click.Argument(["folder"], metavar="DIR"),
        click.Option(["--steps"], metavar="N", help="So many steps in all.  [default: as in DIR/config.toml]"),
        click.Option(
            ["--checkpoint"],
            metavar="NAME",
            help="Go back to this checkpoint: a name under DIR/checkpoints, or a path.  [default: the last one]",
        ),
    ],
    help="Go on with a run, or make it longer.\n\n"
    "It goes on from its last complete checkpoint, or from the beginning where there is none. "
    "DIR is the folder that the run has written; its config.toml says what the run is. Settings of components can be "
    "given anew: --training.processes 4.\n\n"
    "\b\nExamples:\n  rollouts resume runs/mine\n  rollouts resume runs/mine --steps 200\n"
    "  rollouts resume runs/mine --checkpoint step_000008",
)
