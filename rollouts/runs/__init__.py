"""Names become functions, only here: a resolved configuration becomes a plan, and a plan a run.

To follow `rollouts run` to an optimizer step, see "Where to begin" in docs/design.md.

plan.py          every component found, imported, checked and given its settings; no model is loaded
components.py    one component: found, and given its settings
earlier_run.py   the run that wrote the model: its checkpoint, and which of its settings differ
environments.py  the chosen environments: tasks, demonstrations, shares
workers.py       which environments run in workers, and the classes in their place; the sandboxes of a run
connectors.py    what starts workers
algorithms.py    the algorithm of each stage, composed of components, with every check
dry_run.py       describes a plan and estimates its memory: the output of `--dry-run`
rehearsal.py     the trial of a dry run: a scripted episode, a small training step
session.py       one run in its folder, from the opened folder to summary.json
jobs/            what a session runs: train, evaluate
sft_then_rl.py   one run after another: demonstrations, then reinforcement
several.py       a run for each seed, or an evaluation of each model
records.py       one trajectory of a run, with the values of its tokens
times.py         when a run began, when everything in a step happened, and where the lines of a file begin
token_files.py   the values of each trained token, beside the trajectories
saved.py         the trajectories of earlier runs, read back
rescore.py       judges them again
comparing.py     the evaluations of runs, with a paired comparison
resume.py        the checkpoint from which a run resumes; removes what later steps wrote
folder.py        the files of a run
manifest.py      versions, files and hardware of a run
observer.py      the protocol of observers, which show a run's progress
progress.py      the observer of a terminal, a log or a notebook
panel.py         the live view of a run in a terminal or a notebook
sample_rows.py   a few rollouts as the rows of a table, for loggers
streams.py       an output that can no longer be written
held_objects.py  Python objects that no name finds again: what to type
export.py        a checkpoint becomes a model
publish.py       the card of an exported model, how it is used, and its repository on the hub
run_model.py     the model of a run with its settings, to talk to
chat.py          a conversation with the model of a run
serve.py         serves the model of a run over HTTP
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts.config.flags import Tree
    from rollouts.config.resolving import Resolved
    from rollouts.runs.observer import Observer

__all__ = ["resume_run", "run"]


def run(
    resolved: Resolved, observer: Observer | None = None, *, folder: Path | None = None, checkpoint: str = ""
) -> dict[str, Any]:
    """Compose and run. Returns the content of summary.json. A run that is finished does not change.

    `folder` is the folder of an earlier run, which resumes from its last checkpoint, or from the checkpoint named
    `checkpoint`. Loaded objects stay excluded from garbage collection; call `gc.unfreeze()` if the process continues.
    Raises UserError, RunError, KeyboardInterrupt.
    """
    from rollouts.runs.times import Start

    started = Start.now()
    from rollouts.child_environment import pass_on
    from rollouts.env.shared import shared_values
    from rollouts.models.loading import remote_code
    from rollouts.models.revisions import pinned
    from rollouts.runs.folder import choose_folder, default_out
    from rollouts.runs.manifest import known_revisions, naming_copies
    from rollouts.runs.observer import NullObserver
    from rollouts.runs.plan import make_plan
    from rollouts.runs.resume import finished, finished_words, named_checkpoint, run_to_resume
    from rollouts.runs.workers import has_workers, worker_pools

    settings, is_first = resolved.settings, os.environ.get("RANK", "0") == "0"
    if observer is None or not is_first:  # under a launcher, rank 0 shows the run
        observer = NullObserver()
    home = Path.cwd()  # relative paths begin here; an author's code may change the working directory
    folder = folder or run_to_resume(resolved)
    summary = finished(folder, settings.steps, settings.stop_when) if folder is not None and not checkpoint else None
    if folder is not None and summary is not None:
        observer.finished(finished_words(folder, summary, settings.steps))
        return summary
    pass_on(settings.pass_env)
    observer.phase("preparing the run")
    commits = pinned(known_revisions(folder, resolved.source))
    with shared_values(settings.cleanup_seconds), worker_pools(), remote_code(settings.trust_remote_code), commits:
        if settings.mode == "eval":
            from rollouts.runs.jobs.evaluate import run_evaluation

            return run_evaluation(make_plan(resolved), observer, started, home, folder)
        if settings.mode == "sft+rl":
            from rollouts.runs.sft_then_rl import train_phases

            return train_phases(resolved, observer, started, home, resume=folder, checkpoint=checkpoint)
        from rollouts.runs.jobs.train import train

        if not is_first and has_workers(resolved):  # only rank 0 plays episodes
            from rollouts.doors import open_module

            with naming_copies(folder):
                open_module("rollouts_fsdp.rank").serve_rank(resolved)
            return {}
        with naming_copies(folder):
            plan = make_plan(resolved)
        make_folder = choose_folder(settings.out, default_out(plan.env_name, plan.one("loss").name), home, folder)
        chosen = named_checkpoint(folder, checkpoint, home) if folder is not None and checkpoint else None
        return train(plan, make_folder, observer, started, resumes=folder is not None, checkpoint=chosen)


def resume_run(folder: str, given: Tree, observer: Observer | None = None, *, checkpoint: str = "") -> dict[str, Any]:
    """Resume the run in `folder`, with the `given` settings in place of its own. Returns and raises like `run`."""
    from rollouts.errors import ConfigError
    from rollouts.runs.resume import check_steps, read_run

    resolved = read_run(Path(folder), given)
    if checkpoint and resolved.settings.mode == "eval":
        raise ConfigError(f"--checkpoint {checkpoint}: {folder} holds an evaluation, which writes none; leave it out")
    if "steps" in given and not checkpoint:
        check_steps(Path(folder), resolved.settings.steps)
    return run(resolved, observer, folder=Path(folder), checkpoint=checkpoint)
