"""A rank above 0 of a distributed training backend: composes the same run as rank 0, and runs rank 0's commands.

    python -m rollouts_fsdp.rank

is the command with which rank 0 starts a rank on its own machine. A launcher starts ranks with `rollouts run`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
import traceback

from rollouts.config.resolving import Resolved, resolve
from rollouts.models import revisions
from rollouts.models.loading import remote_code
from rollouts.runs.jobs.train import make_training
from rollouts.runs.plan import make_plan
from rollouts.training.batches import RankServer


def without_episodes(resolved: Resolved) -> Resolved:
    """The configuration without what only rank 0 uses, because it plays all episodes: environments with their workers,
    rewards, tools and data.
    """
    components = resolved.components | {"env": [], "reward": [], "tool": [], "data": []}
    settings = dataclasses.replace(resolved.settings, data="", worker={})
    return resolved._replace(settings=settings, components=components)


def serve_rank(resolved: Resolved) -> None:
    """Compose the training of a run that rank 0 has checked, and serve rank 0 until it ends. Raises UserError."""
    backend = make_training(make_plan(without_episodes(resolved), needs_environment=False))
    assert isinstance(backend, RankServer), f"{backend} on a rank above 0"
    backend.serve()


def main() -> int:
    """Read the configuration from standard input, compose the run, and serve rank 0. Returns the exit code."""
    from rollouts_fsdp.ranks import ignore_interrupts, report_failure
    from rollouts_fsdp.rendezvous import join_ranks, place_of_this_process

    ignore_interrupts()
    place = place_of_this_process()
    assert place is not None, "rank 0 says which one this is"
    text = sys.stdin.buffer.read()
    channel = join_ranks(place)
    try:
        resolved = resolve(tomllib.loads(text.decode()))
        commits = revisions.pinned(revisions.given())
        with remote_code(resolved.settings.trust_remote_code), commits:
            serve_rank(resolved)
    except Exception as error:  # only rank 0 reports errors
        if os.environ.get("ROLLOUTS_TRACEBACK") == "1":
            traceback.print_exception(error)
        report_failure(channel, place.rank, error, "starting")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # leaving a process group whose other ranks have ended may abort
