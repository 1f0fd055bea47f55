"""`--seeds`, and `rollouts eval` with several models: the runs of a command, and the table of their results."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.options import given_flags, read_settings
from rollouts.errors import ConfigError, UserError
from rollouts.terminal_text import number, print_table

if TYPE_CHECKING:
    from rollouts.config.flags import Tree
    from rollouts.config.resolving import Resolved
    from rollouts.runs.comparing import RunEvaluation
    from rollouts.runs.several import Several

SEEDS_SHOWN_MAX = 6  # with more seeds, the table has no column for each seed

ROWS = {
    "before/reward_mean": "reward, sampled, before",
    "after/reward_mean": "reward, sampled, after",
    "before/greedy_mean": "reward, greedy, before",
    "after/greedy_mean": "reward, greedy, after",
    "reward/mean": "reward, last step",
    "policy/loss": "loss, last step",
    "policy/entropy": "entropy, last step",
    "steps": "steps",
    "wall_seconds": "seconds",
}
"""The rows of the table of seeds. seeds.json has all metrics."""

_SAME = ("seed", "eval_tasks")
"""The settings that choose the tasks. A run has its own by default; here all models have those of the first."""

_HEAD = ("model", "reward", "", "", "pass@k", "pass^k", "tasks", "failed", "tokens", "dollars")


def run_with_seeds(
    command: str, file: str | None, options: dict[str, Any], text: str, display: str, *, dry_run: bool
) -> None:
    """Run the `command` ("run" or "sft") once for each seed in `text`. Raises UserError, RunError."""
    from rollouts.runs.several import Several, check_several, read_seeds, runs_of_seeds

    seeds, context = read_seeds(text), click.get_current_context()
    if options.get("seed") is not None:
        raise ConfigError(f"--seeds {text} and --seed {options['seed']} contradict each other; leave one out")
    resolved, _ = read_settings(context, file, options, forced={"mode": "sft"} if command == "sft" else {})
    arguments = _command_line(file, {**options, "seed": None}, context.obj or {})
    parent = _parent_of(resolved, f"{resolved.settings.loss}-seeds")
    runs = Several(parent, [command, *arguments], runs_of_seeds(seeds), display, resolved)
    check_several(runs)
    if not dry_run:
        _run(runs)
        return
    from rollouts.runs.dry_run import dry_run as description

    same = f"the same for {len(seeds)} seeds: {', '.join(str(parent / name) for name in runs.runs)}"
    print(description(resolved._replace(settings=replace(resolved.settings, seed=seeds[0], out="")), same))


def run_with_models(
    file: str | None, models: Sequence[str], options: dict[str, Any], display: str, *, dry_run: bool
) -> None:
    """Evaluate each model. Raises UserError, RunError."""
    from rollouts.runs.several import Several, check_several, runs_of_models

    named, context = runs_of_models(models), click.get_current_context()
    first, _ = read_settings(context, file, options | {"model": models[0]}, forced={"mode": "eval"})
    same = {name: str(getattr(first.settings, name)) for name in _SAME}
    arguments = _command_line(file, {**options, **same, "model": None}, context.obj or {})
    runs = Several(_parent_of(first, "models"), ["eval", *arguments], named, display, first)
    check_several(runs)
    if not dry_run:
        _run(runs)
        return
    from rollouts.runs.dry_run import dry_run as description

    for place, model in enumerate(models):
        resolved, _ = read_settings(context, file, options | same | {"model": model}, forced={"mode": "eval"})
        text = description(resolved._replace(settings=replace(resolved.settings, out="")))
        print(f"{text}\n" if not place else f"{model}: {text.rpartition(chr(10))[2]}")


def resume_several(folder: Path, options: dict[str, Any], checkpoint: str | None, display: str) -> None:
    """Continue the runs in the folder of an earlier command. Those of seeds may get other settings. Raises UserError,
    RunError.
    """
    from rollouts.runs.several import read_several

    runs, dotted = read_several(folder)._replace(display=display), click.get_current_context().obj or {}
    flags = _command_line(None, options, dotted)
    if checkpoint:
        one = f"rollouts resume {folder / next(iter(runs.runs))} --checkpoint {checkpoint}"
        raise ConfigError(f"--checkpoint {checkpoint}: {folder} has several runs; resume one of them: {one}")
    if flags and runs.are_models:
        raise ConfigError(
            f"{' '.join(flags)}: {folder} has evaluations of several models, which keep their settings; leave it "
            f"out, or resume one of them: rollouts resume {folder}/NAME"
        )
    replaced = {text.partition("=")[0] for text in flags}  # all rules of --stop-when, too
    command = [text for text in runs.command if text.partition("=")[0] not in replaced] + flags
    _run(runs._replace(command=command, given=(flags, dotted | given_flags(options))))


def _parent_of(resolved: Resolved, word: str) -> Path:
    """The folder of the runs: --out, or a free one whose name ends in this word."""
    from rollouts.runs.folder import default_out, numbered

    if resolved.settings.out:
        return Path(resolved.settings.out)
    env = "+".join(each.alias or each.name for each in resolved.components["env"])
    wanted = Path(default_out(env, word))
    return next(path for path in map(wanted.with_name, numbered(wanted.name)) if not path.exists())


def _command_line(file: str | None, options: dict[str, Any], dotted: Tree) -> list[str]:
    """The command line for these settings, without the folder of a run."""
    from rollouts.runs.earlier_run import flattened

    arguments = [file] if file else []
    for name, value in options.items():
        if name not in ("out", "resume") and value is not None:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [f"--{name.replace('_', '-')}={text}" for text in values]
    return arguments + [f"--{name.replace('_', '-')}={flag.text}" for name, flag in flattened(dotted)]


def _run(runs: Several) -> None:
    """Run all of them, then show the table, even if some runs failed."""
    from rollouts.runs.several import run_several

    try:
        run_several(runs, lambda line: print(line, flush=True))
    finally:
        _show_models(runs) if runs.are_models else _show_seeds(runs)


def _show_seeds(runs: Several) -> None:
    """Print the table: mean, interval, and if there are at most `SEEDS_SHOWN_MAX` seeds, the value of each."""
    from rich.console import Console
    from rich.table import Table

    from rollouts.runs.folder import read_json

    written = read_json(runs.file)
    done = sum(run["status"] == "done" for run in written.get("runs", {}).values())
    if not done:
        return
    seeds, metrics = list(runs.runs.values()), written["metrics"]
    table = Table(title=f"{done} of {len(seeds)} seeds; {written['interval']}", title_justify="left")
    shown = seeds if len(seeds) <= SEEDS_SHOWN_MAX else []
    for name in ("", "mean", "95 % interval", *(f"seed {seed}" for seed in shown)):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    parts = {name: f"  {name.rpartition('/')[2]}, after" for name in metrics if name.startswith("after/parts/")}
    for name, label in (ROWS | (parts if len(parts) > 1 else {})).items():
        row = metrics.get(name)
        if row is not None and (name != "steps" or row["low"] != row["high"]):  # equal unless a rule stopped some
            interval = "–" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
            values = [row["mean"], *(row["values"][seed] for seed in shown)]
            first, *others = ("–" if value is None else f"{value:.3f}" for value in values)
            table.add_row(label, first, interval, *others)
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print(table)
    print(f"{len(seeds)} seeds · all numbers are in {runs.file}", flush=True)


def _show_models(runs: Several) -> None:
    """Print the models with their rewards, the best first, and compare each with the best, task by task."""
    from rollouts.runs.comparing import evaluations_of, paired_difference, rewards_by_task
    from rollouts.runs.folder import SUMMARY, read_json

    rows = [
        (found.reward, name, found)
        for name in runs.runs
        for found in evaluations_of(runs.parent / name)
        if found.reward is not None
    ]
    if not rows:
        return
    rows.sort(key=lambda row: -row[0])
    summaries = {name: read_json(runs.parent / name / SUMMARY) for _, name, _ in rows}
    print_table("", _HEAD, [_row(runs.runs[name], found, summaries[name]) for _, name, found in rows])
    rewards = {name: rewards_by_task(runs.parent / name) for name in summaries}
    best = rows[0][1]
    for _, name, _ in itertools.islice(rows, 1, None):
        try:
            paired = paired_difference(rewards[best], rewards[name])
        except UserError as error:  # without numpy, all but this can be shown
            click.echo(f"note: {error}", err=True)
            break
        if paired is not None:
            click.echo(paired.words(runs.runs[name], runs.runs[best]))
    click.echo(f"to look at them: rollouts view {runs.parent}")


def _row(model: str, found: RunEvaluation, summary: dict[str, Any]) -> list[str]:
    from rollouts.runs.progress import reduced_words

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
