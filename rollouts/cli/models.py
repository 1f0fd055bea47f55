"""`rollouts eval --model A --model B`: several models on the same tasks, and the table of their results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.options import read_settings
from rollouts.errors import UserError
from rollouts.runs.progress import reduced_words
from rollouts.terminal_text import number, print_table

if TYPE_CHECKING:
    from rollouts.runs.comparing import Evaluation
    from rollouts.runs.several_models import ModelRuns

_SAME = ("seed", "eval_tasks")
"""The settings that choose the tasks. A run has its own by default; here all models have those of the first."""


def evaluate_models(
    file: str | None, models: Sequence[str], options: dict[str, Any], display: str, *, dry_run: bool
) -> None:
    """Evaluate each model. Raises UserError, RunError."""
    from rollouts.cli.seeds import arguments_of
    from rollouts.runs.folder import default_out, numbered
    from rollouts.runs.several_models import ModelRuns, check_models, named_models

    named, context = named_models(models), click.get_current_context()
    first, _ = read_settings(context, file, options | {"model": models[0]}, forced={"mode": "eval"})
    parent = Path(first.settings.out)
    if not first.settings.out:
        env = "+".join(each.alias or each.name for each in first.components["env"])
        wanted = Path(default_out(env, "models"))
        parent = next(path for path in map(wanted.with_name, numbered(wanted.name)) if not path.exists())
    same = {name: str(getattr(first.settings, name)) for name in _SAME}
    arguments = arguments_of(file, options | same, context.obj or {}, without=("out", "resume", "model"))
    runs = ModelRuns(parent, ["eval", *arguments], named, display)
    check_models(runs)
    if not dry_run:
        run(runs)
        return
    from rollouts.runs.dry_run import dry_run as description

    for place, model in enumerate(models):
        resolved, _ = read_settings(context, file, options | same | {"model": model}, forced={"mode": "eval"})
        text = description(resolved._replace(settings=replace(resolved.settings, out="")))
        print(f"{text}\n" if not place else f"{model}: {text.rpartition(chr(10))[2]}")


def run(runs: ModelRuns) -> None:
    """Evaluate all models, then show the table, even if some failed."""
    from rollouts.runs import several_models

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        several_models.evaluate_models(runs, say)
    finally:
        show(runs)


def show(runs: ModelRuns) -> None:
    """Print the models with their rewards, the best first, and compare each with the best, task by task."""
    from rollouts.runs.comparing import evaluations_of, paired_difference, rewards_by_task
    from rollouts.runs.folder import SUMMARY, read_json

    rows = []
    for name, model in runs.models.items():
        for found in evaluations_of(runs.parent / name):
            if found.reward is not None:
                rows.append((found.reward, name, model, found, read_json(runs.parent / name / SUMMARY)))
    if not rows:
        return
    rows.sort(key=lambda row: -row[0])
    print_table("", _HEAD, [_row(*row[2:]) for row in rows])
    rewards = {name: rewards_by_task(runs.parent / name) for _, name, *_ in rows}
    _, best, best_model, *_ = rows[0]
    for _, name, model, *_ in itertools.islice(rows, 1, None):
        try:
            paired = paired_difference(rewards[best], rewards[name])
        except UserError as error:  # without numpy, all but this can be shown
            click.echo(f"note: {error}", err=True)
            break
        if paired is not None:
            click.echo(paired.words(model, best_model))
    click.echo(f"to look at them: rollouts view {runs.parent}")


_HEAD = ("model", "reward", "", "", "pass@k", "pass^k", "tasks", "failed", "tokens", "dollars")


def _row(model: str, found: Evaluation, summary: dict[str, Any]) -> list[str]:
    error = "" if found.stderr is None else f"± {found.stderr:.3f}"
    how = reduced_words(summary) if "reduce" in summary else ""
    both = [summary.get(kind, {}) for kind in ("pass@k", "pass^k")]
    passes = ["  ".join(f"{k}: {number(value)}" for k, value in each.items()) for each in both]
    passes[1] *= len(both[1]) > 1  # with one sample, both are the same
    tokens = (summary.get("tokens") or {}).get("completion_tokens")
    counts = (found.tasks, sum((summary.get("failed") or {}).values()), tokens)
    dollars = (summary.get("spent") or {}).get("dollars")
    paid = "" if dollars is None else f"{dollars:.4f}"
    return [model, number(found.reward), error, how, *passes, *(str(each or "") for each in counts), paid]
