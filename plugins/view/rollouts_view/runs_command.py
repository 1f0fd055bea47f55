"""`rollouts runs list | compare | tag | note | clean`: the runs on the disk, in a terminal."""

from __future__ import annotations

import fnmatch
import json
import shlex
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rollouts.cli.app import NamedGroup
from rollouts.config.settings import Settings
from rollouts.errors import UserError, counted, in_lines, suggestion
from rollouts.terminal_text import curve, number, print_table, visible

if TYPE_CHECKING:
    from rollouts.reducers import Reducer
    from rollouts.runs.comparing import RunEvaluation
    from rollouts_view.listing import RunInfo

CURVE_WIDTH = 16
RUN_COLUMNS_MAX = 4
SORTS = ("started", "name", "reward", "steps", "size")
_SHOWN_METRICS = (
    "reward/mean eval/reward_mean policy/loss policy/entropy policy/kl_ref optim/lr rollout/tokens rollout/turns "
    "mismatch/k3 time/step".split()
)
_SPARE = ("model", "mode", "size", "loss", "environment", "tags", "curve", "steps")


@click.group("runs", cls=NamedGroup, no_args_is_help=True)
def runs() -> None:
    """List, compare, label and clean the runs on the disk."""


@runs.command("list")
@click.argument("directory", default="runs", metavar="[DIR]")
@click.option("--tag", metavar="TAG", help="Only runs with this tag.")
@click.option("--search", metavar="TEXT", help="Only runs with this text in their name, settings, tags or note.")
@click.option("--sort", type=click.Choice(SORTS), default="started", show_default=True, help="The order; reversed: -r.")
@click.option("-r", "--reverse", is_flag=True, help="The last one first.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects.")
def list_(directory: str, tag: str | None, search: str | None, sort: str, reverse: bool, as_json: bool) -> int:
    """List the runs in DIR and below it.

    DIR is `runs` by default. A run is running, done, failed, interrupted, killed or damaged. The curve is the mean
    reward over the steps, or of a run without rewards the loss.
    """
    from rollouts_view.listing import find_runs, read_run

    found = [read_run(folder) for folder in find_runs(Path(directory))]
    kept = [run for run in found if (not tag or tag in run.tags) and (not search or _matches(run, search))]
    kept.sort(key=lambda run: _rank(run, sort), reverse=reverse)
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(run) for run in kept], indent=2))
        return 0
    if not kept:
        click.echo(f"none of {counted(len(found), 'run')} in {directory}" if found else f"{directory} has no runs")
        return 0
    rows = [_row(run) for run in kept]
    head = ("run", "state", "mode", "environment", "model", "loss", "steps", "reward", "curve", "size", "tags")
    print_table("", head, rows, _SPARE)
    for run in kept:
        if run.problem:
            click.echo(visible(f"{run.name} is {run.state}: {run.problem.splitlines()[0]}"))
    click.echo(f"{counted(len(kept), 'run')}, {_size(sum(run.bytes for run in kept))}")
    return 0


def _matches(run: RunInfo, text: str) -> bool:
    words = (run.name, run.state, run.mode, run.environment, run.model, run.loss, run.note, *run.tags)
    return any(text.lower() in each.lower() for each in words)


def _rank(run: RunInfo, sort: str) -> tuple[Any, str]:
    last = float("-inf")
    ranks: dict[str, Any] = {
        "started": run.started,
        "name": "",
        "reward": last if run.reward is None else run.reward,
        "steps": run.steps or 0,
        "size": run.bytes,
    }
    return ranks[sort], run.name


def _row(run: RunInfo) -> list[str]:
    steps = "" if run.steps is None else f"{run.steps} of {run.steps_asked}" if run.steps_asked else str(run.steps)
    words = [run.name, run.state, run.mode, run.environment, run.model, run.loss, steps, number(run.reward)]
    tags = " ".join(run.tags) + (f"  {run.note}" if run.note else "")
    return [*words, curve(run.curve, CURVE_WIDTH), _size(run.bytes), tags]


@runs.command()
@click.argument("run", nargs=-1, required=True, metavar="RUN RUN...")
@click.option("--metric", multiple=True, metavar="PATTERN", help="Show these metrics, such as 'rollout/*'. Repeatable.")
@click.option("--reduce", metavar="HOW", help="Compare by the mean, best, worst or majority of a task's samples.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(run: Sequence[str], metric: Sequence[str], reduce: str | None, as_json: bool) -> int:
    """Show what differs between runs: settings, metrics and evaluations.

    Each run's last evaluation is compared, task by task, with that of the first run that has the same tasks. The 95 %
    interval is a bootstrap over the tasks that both have, of which there must be five. Several samples of a task are
    reduced as the evaluation did, or all by --reduce.
    """
    from rollouts.runs import comparing
    from rollouts.runs.folder import METRICS, phases_of
    from rollouts_view.comparing import differing_settings, opponents_of, reduced_evaluations
    from rollouts_view.listing import numbers_of, require_run, sampled_lines

    if len(run) < 2:
        raise UserError(f"compare needs two runs or more, not {run[0]} alone; `rollouts runs list` lists them")
    folders = [require_run(each) for each in run]
    settings = differing_settings(folders)
    lines = {name: sampled_lines(phases_of(folder)[-1] / METRICS) for name, folder in zip(run, folders, strict=True)}
    metrics = _chosen_metrics(lines, metric)
    evaluations = [comparing.evaluations_of(folder) for folder in folders]
    reducers = _reducers(folders, run, reduce)
    rewards = [comparing.rewards_by_task(*each) for each in zip(folders, reducers, strict=True)]
    if reduce:
        evaluations = [reduced_evaluations(*each) for each in zip(evaluations, rewards, reducers, strict=True)]
    against = opponents_of(rewards)
    try:
        paired = [
            None if other is None else comparing.paired_difference(rewards[other], own)
            for other, own in zip(against, rewards, strict=True)
        ]
    except UserError as error:  # without numpy, all but this can be shown
        click.echo(f"note: {error}", err=True)
        paired, rewards = [None] * len(run), [{}] * len(run)
    if as_json:
        found: dict[str, Any] = {
            "runs": run,
            "settings": settings,
            "metrics": {name: [numbers_of(lines[each], name) for each in run] for name in metrics},
            "evaluations": [[one._asdict() for one in each] for each in evaluations],
            "paired": [
                each and {**each.as_json(), "against": run[other or 0]}
                for each, other in zip(paired[1:], against[1:], strict=True)
            ],
        }
        click.echo(json.dumps(found, indent=2, default=str))
        return 0
    rows = [[name, *("–" if value is None else str(value) for value in row)] for name, row in settings.items()]
    _print_by_run("settings that differ", run, rows) if rows else click.echo("the settings are the same")
    rows = [[name, *(_last_with_curve(numbers_of(lines[each], name)) for each in run)] for name in metrics]
    if rows:
        _print_by_run("metrics at the last step", run, rows)
    _print_evaluations(run, evaluations)
    for name, other, each in zip(run, against, paired, strict=True):
        if each is not None and other is not None:
            click.echo(each.words(name, run[other]))
    for words in _not_compared(run, rewards, settings):
        click.echo(words)
    return 0


TASK_SETTINGS = ("env", "worker", "data", "seed", "eval-tasks", "tasks", "system")
"""The settings that determine the held-out tasks; also those inside of `env` and `data`."""


def _not_compared(
    runs: Sequence[str], rewards: Sequence[Mapping[str, float]], settings: Mapping[str, Any]
) -> Iterator[str]:
    """One line for each run that was judged on tasks which no other run has."""
    judged = [(name, own) for name, own in zip(runs, rewards, strict=True) if own]
    for name, own in judged:
        others = [each for each in judged if each[1] is not own]
        if not others or any(len(own.keys() & tasks.keys()) >= 2 for _, tasks in others):
            continue
        shared = max(len(own.keys() & tasks.keys()) for _, tasks in others)
        differ = [each for each in settings if each.partition(".")[0].partition("[")[0] in TASK_SETTINGS]
        what = f", because they differ in {', '.join(differ)}" if differ else ""
        yield (
            f"{name} cannot be compared by task: it shares {counted(shared, 'task')} of its {len(own)} with the others"
            f"{what}; evaluate all models on the same tasks, with one --env, --seed and --eval-tasks"
        )


def _reducers(folders: Sequence[Path], runs: Sequence[str], how: str | None) -> list[Reducer]:
    """How the samples of a task are reduced in each run. Raises UserError if the runs cannot be compared."""
    from rollouts.runs.comparing import reducer_of

    choices = typing.get_args(typing.get_type_hints(Settings)["reduce"])
    if how is not None and how not in choices:
        raise UserError(in_lines(f"--reduce {how}: expected one of {', '.join(choices)}", suggestion(how, choices)))
    found = [reducer_of(folder) for folder in folders]
    if how is not None:
        return [each._replace(how=how) for each in found]
    words = [each.how + (f" of the answers {each.pattern!r}" if each.pattern else "") for each in found]
    for name, other, each in zip(runs, words, found, strict=True):
        if each != found[0]:
            raise UserError(
                f"{runs[0]} reduces the samples of a task to their {words[0]}, and {name} to their {other}\n"
                "to compare all of them by one number, type: --reduce mean"
            )
    return found


def _chosen_metrics(lines: dict[str, list[dict[str, Any]]], patterns: Sequence[str]) -> list[str]:
    """The metrics to show. Raises UserError for a pattern that fits none."""
    names = sorted({name for each in lines.values() for line in each for name in line if name != "step"})
    if not patterns:
        return [name for name in _SHOWN_METRICS if name in names]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            listed = f"metrics: {', '.join(names)}" if names else "none of these runs has logged a metric"
            hint = suggestion(pattern, names) or listed
            raise UserError(in_lines(f"--metric {pattern}: no run has such a metric", hint))
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _last_with_curve(values: Sequence[float]) -> str:
    return f"{number(values[-1])}  {curve(values, CURVE_WIDTH)}" if values else "–"


def _print_evaluations(run: Sequence[str], evaluations: Sequence[Sequence[RunEvaluation]]) -> None:
    """The rewards on held-out tasks; of several models and several environments, also as a leaderboard."""
    from rollouts_view.listing import read_run

    rows, cells = [], dict[str, dict[str, tuple[float | None, float | None]]]()
    for name, found in zip(run, evaluations, strict=True):
        info = read_run(Path(name))
        for each in found:
            how = "" if each.reduce == "mean" else each.reduce
            words = (name, each.when, info.environment, info.model)
            counts = str(each.tasks), str(each.failed or "")
            greedy = "" if each.greedy is None else number(each.greedy)
            rows.append([*words, _with_error(each.reward, each.stderr), how, greedy, *counts])
        for each in found[-1:]:
            own = each.environments or {info.environment: (each.reward, each.stderr)}
            cells.setdefault(info.model, {}).update(own)
    if rows:
        head = ("run", "", "environment", "model", "reward", "", "greedy", "tasks", "failed")
        print_table("held-out tasks", head, rows)
    for name, found in zip(run, evaluations, strict=True):
        if found and found[-1].failed and not found[-1].when:
            click.echo(f"to play the failed episodes of {name} again, type: rollouts resume {shlex.quote(name)}")
    _print_leaderboard(cells)


def _print_leaderboard(cells: Mapping[str, Mapping[str, tuple[float | None, float | None]]]) -> None:
    """The rewards of several models in several environments: a row for each model, the best mean first. A model that
    lacks an environment has no mean, and comes last.
    """
    environments = list(dict.fromkeys(env for own in cells.values() for env in own))
    if len(cells) < 2 or len(environments) < 2:
        return
    rows = []
    for model, own in cells.items():
        rewards = [reward for env in environments if (reward := own.get(env, (None, None))[0]) is not None]
        mean = sum(rewards) / len(rewards) if len(rewards) == len(environments) else None
        rows.append((mean, [model, *(_with_error(*own.get(env, (None, None))) for env in environments), number(mean)]))
    rows.sort(key=lambda row: float("inf") if row[0] is None else -row[0])
    print_table("leaderboard", ("model", *environments, "mean"), [words for _, words in rows])


def _print_by_run(title: str, run: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with a column for each run; with many runs, a row for each."""
    if len(run) <= RUN_COLUMNS_MAX:
        print_table(title, ("", *run), rows)
        return
    head, *columns = zip(*rows, strict=True)
    print_table(title, ("run", *head), [[name, *column] for name, column in zip(run, columns, strict=True)])


def _with_error(reward: float | None, error: float | None) -> str:
    return number(reward) + ("" if reward is None or error is None else f" ± {error:.3f}")


@runs.command()
@click.argument("run")
@click.argument("tags", nargs=-1, metavar="[TAG]...")
@click.option("--remove", multiple=True, metavar="TAG", help="Take this tag away. Repeatable.")
def tag(run: str, tags: Sequence[str], remove: Sequence[str]) -> int:
    """Give a run tags, or show those that it has.

    `rollouts runs clean` leaves a run with the tag `keep` alone.
    """
    from rollouts_view.listing import Labels, check_tags, read_labels, require_run, write_labels

    folder = require_run(run)
    labels = read_labels(folder)
    check_tags(tags)
    for each in remove:
        if each not in labels.tags:
            has = f"it has: {', '.join(labels.tags)}" if labels.tags else "it has none"
            raise UserError(in_lines(f"--remove {each}: {run} has no such tag", suggestion(each, labels.tags), has))
    kept = [each for each in dict.fromkeys([*labels.tags, *tags]) if each not in remove]
    if kept != labels.tags:
        write_labels(folder, Labels(kept, labels.note))
    click.echo(f"{run}: {' '.join(kept) or 'no tags'}")
    return 0


@runs.command()
@click.argument("run")
@click.argument("text", required=False)
def note(run: str, text: str | None) -> int:
    """Write a note about a run, or show the one that it has. An empty TEXT removes it."""
    from rollouts_view.listing import Labels, read_labels, require_run, write_labels

    folder = require_run(run)
    labels = read_labels(folder)
    if text is not None and text != labels.note:
        labels = Labels(labels.tags, text)
        write_labels(folder, labels)
    click.echo(f"{run}: {visible(labels.note) or 'no note'}")
    return 0


@runs.command()
@click.argument("directory", default="runs", metavar="[DIR]")
@click.option("--empty", is_flag=True, help="Remove runs that have neither a checkpoint nor a trajectory.")
@click.option("--checkpoints", is_flag=True, help="Remove all checkpoints but the newest and the best of each run.")
@click.option("--trajectories", is_flag=True, help="Remove the trajectories of training. Those of evaluations stay.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clean(directory: str, yes: bool, **what: bool) -> int:
    """Free disk space: say what would be removed from the runs in DIR, ask, and remove it.

    Without an option, only files that killed processes left half-written are removed. A run that is running is left
    alone, and so is one with the tag `keep`, or what the settings of another run in DIR name.
    """
    from rollouts_view.cleaning import removals, remove
    from rollouts_view.listing import find_runs

    found = removals(find_runs(Path(directory)), [name for name, chosen in what.items() if chosen])
    if not found:
        click.echo(f"there is nothing to remove in {directory}" + ("" if any(what.values()) else _OTHERS))
        return 0
    rows = [[str(each.run), each.what, str(len(each.paths)), _size(each.bytes)] for each in found]
    print_table("to be removed", ("run", "what", "number", "size"), rows)
    total = _size(sum(each.bytes for each in found))
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UserError(f"nothing was removed: {total} would be; to remove it without a question, add --yes")
        if not click.confirm(f"Remove {total}?"):
            click.echo("nothing was removed")
            return 0
    for each in found:
        remove(each)
    click.echo(f"removed {total}")
    return 0


_OTHERS = "; --empty, --checkpoints and --trajectories remove more"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
