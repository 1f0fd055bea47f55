"""How much a run will play and write, as lines of a dry run: the evaluations, their tokens and time; and the disk that
trajectories need. All numbers are upper bounds: every reply is as long as `--max-tokens` allows. Not here: memory
(`dry_run`), and the trajectories of a run that goes on (`jobs.saving`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.errors import ConfigError, counted, first_line
from rollouts.models.estimates import ModelSize, decode_seconds, how_estimated, measure_rates
from rollouts.models.loading import resolve_device
from rollouts.runs.jobs.saving import size_words
from rollouts.runs.plan import Plan
from rollouts.types import Task

TOKEN_BYTES = 24
"""What a token takes in a file of trajectories: its id, its logprob, its mask and version, and its text."""

TASKS_FEWER = 64


def amount_lines(plan: Plan, held_out: Sequence[Task], chosen: int, size: ModelSize | None) -> list[str]:
    """The lines for a run with these held-out tasks, of which an evaluation (mode eval) plays `chosen`. `size` is that
    of its model; None: it is not known, so there is no time.
    """
    settings = plan.settings
    is_evaluation = settings.mode == "eval"
    if is_evaluation:
        times, episodes = 1, chosen * settings.samples_per_prompt
        what = f"the evaluation: {counted(episodes, 'episode')}"
    else:
        between = (settings.steps - 1) // settings.eval_every if settings.eval_every and settings.steps else 0
        times, episodes = 2 + between, 2 * len(held_out) if plan.rewards else 0
        when = f"before step 1, {f'{between} times between steps' if between else 'not between steps'}, and at the end"
        tasks = f"{counted(len(held_out), 'task')}, sampled and greedy"
        what = f"evaluations: {times} ({when}) of {tasks}: {episodes:,} episodes each"
    steps = settings.steps * settings.prompts_per_step * settings.samples_per_prompt if settings.samples else 0
    lines = []
    if episodes:
        tokens = episodes * settings.max_tokens
        lines.append(f"{what}, at most {tokens:,} tokens{_time_words(plan, size, episodes)}")
        if times * episodes > steps and len(held_out) > TASKS_FEWER and not is_evaluation and settings.samples:
            more = f"  the evaluations play more episodes than the training ({steps:,})"
            lines.append(f"{more}; to play fewer, type --eval-tasks {TASKS_FEWER}")
    kept = settings.steps if settings.keep_trajectories == "all" else min(settings.steps, settings.keep_trajectories)
    written = times * episodes + (steps // max(1, settings.steps)) * kept
    if written:
        disk = size_words(written * settings.max_tokens * TOKEN_BYTES)
        lines.append(f"trajectories: {written:,} episodes, at most about {disk} on the disk, without their prompts")
    return lines


def _time_words(plan: Plan, size: ModelSize | None, episodes: int) -> str:
    """How long they take on this machine, if the engine is the embedded one."""
    inference, settings = plan.one("inference"), plan.settings
    if size is None or how_estimated(inference.component) != "embedded":
        return ""
    given = plan.one("training").settings if settings.mode != "eval" else inference.settings
    dtype, device = str(given.get("dtype", "float32")), str(given.get("device", "auto"))
    dtype = "float32" if dtype == "auto" else dtype
    rows = min(settings.concurrency, int(inference.settings.get("rows_max", 256)))
    try:
        device = resolve_device(device)
        rates = measure_rates(device, dtype)
    except (ConfigError, RuntimeError) as error:  # such as a GPU that only the run will have
        return f"; the time cannot be estimated here: {first_line(error)}"
    seconds = decode_seconds(size, rates, episodes=episodes, tokens=settings.max_tokens, rows=rows, dtype=dtype)
    return f", about {_duration(seconds)} on {device} (an estimate, without prompts, tools and rewards)"


def _duration(seconds: float) -> str:
    """
    >>> _duration(8), _duration(1500), _duration(90000)
    ('8 s', '25 min', '25.0 h')
    """
    if seconds < 120:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
