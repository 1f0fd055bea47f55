"""`--seeds`: the same run with several seeds, and the table of their results."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollouts.cli.options import read_settings
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.config.flags import Tree
    from rollouts.runs.seeds import SeedRuns

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
"""The rows of the table. seeds.json has all metrics."""


def run_with_seeds(
    command: str, file: str | None, options: dict[str, Any], text: str, display: str, *, dry_run: bool
) -> None:
    """Run the `command` ("run" or "sft") once for each seed in `text`. Raises UserError, RunError."""
    from rollouts.runs.folder import default_out, numbered
    from rollouts.runs.seeds import SeedRuns, check_seeds, read_seeds

    seeds, context = read_seeds(text), click.get_current_context()
    if options.get("seed") is not None:
        raise ConfigError(f"--seeds {text} and --seed {options['seed']} contradict each other; leave one out")
    resolved, _ = read_settings(context, file, options, forced={"mode": "sft"} if command == "sft" else {})
    parent = Path(resolved.settings.out)
    if not resolved.settings.out:
        env = "+".join(each.alias or each.name for each in resolved.components["env"])
        wanted = Path(default_out(env, f"{resolved.settings.loss}-seeds"))
        parent = next(path for path in map(wanted.with_name, numbered(wanted.name)) if not path.exists())
    arguments = arguments_of(file, options, context.obj or {})
    runs = SeedRuns(parent, [command, *arguments], seeds, resolved, display)
    check_seeds(runs)
    if dry_run:
        from rollouts.runs.dry_run import dry_run as description

        same = f"the same for {len(seeds)} seeds: {', '.join(str(runs.folder(seed)) for seed in seeds)}"
        print(description(resolved._replace(settings=replace(resolved.settings, seed=seeds[0], out="")), same))
    else:
        _run(runs)


def resume_seeds(folder: Path, options: dict[str, Any], checkpoint: str | None, display: str) -> None:
    """Continue the runs in the folder of an earlier `--seeds`, with these settings in place of theirs. Raises
    UserError, RunError.
    """
    from rollouts.config.flags import take_dotted_flags
    from rollouts.runs.seeds import SeedRuns, read_parent

    (command, *arguments), seeds = read_parent(folder)
    if checkpoint:
        one = f"rollouts resume {folder / f'seed_{seeds[0]}'} --checkpoint {checkpoint}"
        raise ConfigError(f"--checkpoint {checkpoint}: {folder} has several runs; resume one of them: {one}")
    here = click.get_current_context()
    given = arguments_of(None, options, here.obj or {})
    replaced = {text.partition("=")[0] for text in given}  # all rules of --stop-when, too
    arguments = [text for text in arguments if text.partition("=")[0] not in replaced] + given
    assert here.parent is not None and isinstance(here.parent.command, click.Group), "resume is a command of rollouts"
    rest, dotted = take_dotted_flags(arguments)
    found = here.parent.command.get_command(here.parent, command)
    if command not in ("run", "sft") or found is None:
        raise ConfigError(f"{folder / 'seeds.json'}: {command!r} is no command that takes --seeds")
    with found.make_context(command, rest, parent=here.parent, obj=dotted) as context:
        others = ("file", "dry_run", "seeds", "display")
        own = {name: value for name, value in context.params.items() if name not in others}
        forced = {"mode": "sft"} if command == "sft" else {}
        resolved, _ = read_settings(context, context.params["file"], own, forced=forced)
    _run(SeedRuns(folder, [command, *arguments], seeds, resolved, display))


def arguments_of(
    file: str | None, options: Mapping[str, Any], dotted: Tree, without: Collection[str] = ("out", "resume", "seed")
) -> list[str]:
    """The command line for these settings, without the settings that differ between the runs."""
    arguments = [file] if file else []
    for name, value in options.items():
        if name not in without and value is not None:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [f"--{name.replace('_', '-')}={text}" for text in values]
    return arguments + [f"--{name}={text}" for name, text in _flattened(dotted)]


def _flattened(tree: Tree, path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        place = f"{path}{name.replace('_', '-')}"
        if isinstance(value, dict):
            yield from _flattened(value, f"{place}.")
        else:
            yield place, value.text


def _run(runs: SeedRuns) -> None:
    """Run all seeds, then show the table, even if some runs failed."""
    from rollouts.runs.folder import read_json
    from rollouts.runs.seeds import SEEDS, run_seeds

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        run_seeds(runs, say)
    finally:
        written = read_json(runs.parent / SEEDS)
        if any(run["status"] == "done" for run in written.get("runs", {}).values()):
            _show(written)
            say(f"{len(written['seeds'])} seeds · all numbers are in {runs.parent / SEEDS}")


def _show(written: dict[str, Any]) -> None:
    """Print the table: mean, interval, and if there are at most `SEEDS_SHOWN_MAX` seeds, the value of each."""
    from rich.console import Console
    from rich.table import Table

    seeds, metrics = written["seeds"], written["metrics"]
    done = sum(run["status"] == "done" for run in written["runs"].values())
    table = Table(title=f"{done} of {len(seeds)} seeds; {written['interval']}", title_justify="left")
    shown = seeds if len(seeds) <= SEEDS_SHOWN_MAX else []
    for name in ("", "mean", "95 % interval", *(f"seed {seed}" for seed in shown)):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    parts = {name: f"  {name.rpartition('/')[2]}, after" for name in metrics if name.startswith("after/parts/")}
    for name, label in (ROWS | (parts if len(parts) > 1 else {})).items():
        row = metrics.get(name)
        if row is not None and (name != "steps" or row["low"] != row["high"]):  # equal unless a rule stopped some
            interval = "–" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
            values = [_number(row["values"][str(seed)]) for seed in shown]
            table.add_row(label, _number(row["mean"]), interval, *values)
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
