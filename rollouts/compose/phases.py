"""Mode sft+rl: a supervised phase, then reinforcement that begins with its checkpoint; one run from one config.

Each phase is a whole run in a folder of its own, OUT/sft and OUT/rl; OUT itself holds the settings of both and one
summary. Both are composed before the first begins, so that a mistake in the second is told at once. Left out: how a
phase runs (`launch`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.compose.describe import describe
from rollouts.compose.launch import launch, without_interrupts
from rollouts.compose.plan import Plan, make_plan
from rollouts.compose.resume import changed_settings, finished, read_run, resume_command, says_the_same
from rollouts.compose.watch import Watcher
from rollouts.config import COMPONENT_KINDS, Component, Resolved, Settings, Tree, merge, resolve, to_toml
from rollouts.config.merging import component_tables, components_of
from rollouts.config.resolving import component_names
from rollouts.config.secrets import resolved_without_secrets
from rollouts.disk import write_whole
from rollouts.encoding import encode_indented
from rollouts.errors import ConfigError, DamagedCheckpointError, OutputError, RolloutsError, UserError
from rollouts.run_folder import CONFIG, check_out, default_out, holds_run, make_new, shown_path
from rollouts.training.backends.checkpoint_files import check_folder, newest_checkpoint
from rollouts.types import Task

__all__ = ["describe_phases", "launch_phases", "phases"]

SFT, RL = "sft", "rl"
SUMMARY = "summary.json"

_SHARED = ("env", "reward", "inference", "training", "logger")
"""The components that the supervised phase has too, unless `[sft]` says otherwise. The others are for rollouts."""

_FOR_ROLLOUTS = ("critic", "critic_lr", "lr", "minibatches", "schedule", "teacher", "teacher_top_k")
"""Settings that the supervised phase has at their defaults; the learning rate is another one by nature."""


class _Plans(NamedTuple):
    """Both phases, composed, and what OUT/config.toml says of them."""

    sft: Plan
    rl: Plan
    whole: Resolved


def phases(resolved: Resolved) -> tuple[Resolved, Resolved]:
    """The settings of the supervised phase and of the reinforcement after it, each of a run by itself.

    The second has the run's own model still: where the checkpoint of the first will be is known only once it is there.
    """
    settings = resolved.settings
    rl = dataclasses.replace(settings, mode="rl", sft={}, out=_inside(settings.out, RL))
    given = {key: value for key, value in settings.sft.items() if key in COMPONENT_KINDS}
    core = {key: value for key, value in settings.sft.items() if key not in COMPONENT_KINDS}
    tables = component_tables(resolve({"mode": "sft"}).components)
    tables |= component_tables({key: resolved.components[key] for key in _SHARED})
    components = components_of(merge(tables, given), COMPONENT_KINDS, resolved.source, ("sft",))
    defaults = Settings()
    values = {key: getattr(defaults, key) for key in _FOR_ROLLOUTS} | component_names(components)
    if _env_names(components) != _env_names(resolved.components):
        # Another environment's demonstrations: data and rewards are not for it.
        values |= {"data": "", "eval_tasks": 0}
    values |= core | {"mode": "sft", "sft": {}, "out": _inside(settings.out, SFT)}
    sft = dataclasses.replace(settings, **values)
    return Resolved(sft, components, resolved.source), resolved._replace(settings=rl)


def launch_phases(
    resolved: Resolved,
    watcher: Watcher,
    started: float,
    *,
    resume: Path | None = None,
    checkpoint: str = "",
    home: Path | None = None,
) -> dict[str, Any]:
    """Run both phases to their end; returns what OUT/summary.json holds. `started` is `time.perf_counter()` at the
    start.

    `resume` is the folder of an earlier run of this mode, which goes on in the phase where it stopped, from the last
    checkpoint of that phase or from the one named `checkpoint`. Relative paths begin at `home`. Raises as `launch`
    does; a mistake in either phase is told before anything is written.
    """
    settings = resolved.settings
    home = home or Path.cwd()
    named = resume or (Path(settings.out) if settings.out else None)
    out = home / (named or default_out(_env_names(resolved.components, "alias"), settings.loss))
    if resume is None and (named or not out.exists()):  # another name is taken instead of one that nobody chose
        check_out(str(shown_path(out, home)), home)
    plans = _compose(resolved._replace(settings=dataclasses.replace(settings, out=str(out))))
    if resume is None:
        _check_data(plans)
    else:
        _check_resumed(out, plans)
    with contextlib.nullcontext(out) if resume else _new_folder(out, home, is_named=named is not None) as made:
        if made != out:
            plans = plans._replace(sft=_with(plans.sft, out=str(made / SFT)), rl=_with(plans.rl, out=str(made / RL)))
        text = to_toml(resolved_without_secrets(plans.whole))
        if not says_the_same(made, text):
            _write(made / CONFIG, text)
        return _run(made, home, plans, watcher, started, checkpoint)


def describe_phases(resolved: Resolved) -> str:
    """What `--dry-run` prints: both phases, as `describe` has them."""
    if resolved.settings.out:
        check_out(resolved.settings.out)
    plans = _compose(resolved)
    with _supervised():
        first = describe(plans.sft)
    return (
        f"# The supervised phase, in OUT/{SFT}\n{first}\n\n"
        f"# Reinforcement, in OUT/{RL}; its model is the last checkpoint of the supervised phase\n{describe(plans.rl)}"
    )


def _compose(resolved: Resolved) -> _Plans:
    """Both phases as plans. Raises UserError, which says where it is in the supervised one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "--mode sft+rl: under a launcher each process composes one run; let the backend start its ranks "
            "(--training fsdp --training.processes 2), or type `rollouts sft ... --out OUT` and then `rollouts run ... "
            "--model OUT/checkpoints/step_N`"
        )
    first, second = phases(resolved)
    rl = make_plan(second)
    with _supervised():
        sft = make_plan(first)
    tables = component_tables(sft.resolved.components)
    own: Tree = {"steps": sft.settings.steps}  # written down: those of the run may be others when it is resumed
    own |= {key: tables[key] if key in COMPONENT_KINDS else value for key, value in resolved.settings.sft.items()}
    settings = dataclasses.replace(rl.resolved.settings, mode="sft+rl", sft=own, out="", resume="never")
    return _Plans(sft, rl, rl.resolved._replace(settings=settings))


def _check_data(plans: _Plans) -> None:
    """There are demonstrations, and there are tasks. Raises EnvironmentDefinitionError."""
    held_out = plans.rl.eval_tasks()
    with _supervised():
        next(plans.sft.demonstrations([*plans.sft.eval_tasks(), *held_out]))
    plans.rl.task_buffer(held_out)


def _check_resumed(out: Path, plans: _Plans) -> None:
    """Refuse what would change a phase on which another one is built already. Raises ConfigError."""
    begun = read_run(out, {}, allow_left_out=True)
    before = begun.settings
    if before.mode != "sft+rl":
        raise ConfigError(
            f"{out} holds a run of mode {before.mode}, and this one is of mode sft+rl; type another --out"
        )
    if plans.whole.settings.eval_tasks > before.eval_tasks and holds_run(out / SFT):
        raise ConfigError(
            f"eval_tasks was {before.eval_tasks} and is {plans.whole.settings.eval_tasks} now, which would hold out "
            f"tasks that may have been demonstrated; give {before.eval_tasks} again, or another --out"
        )
    changed = changed_settings(_supervised_as_written(begun), _supervised_as_written(plans.whole))
    if changed and holds_run(out / RL):
        raise ConfigError(
            f"the supervised phase of {out} is over, and reinforcement has begun with it; this would change it: "
            f"{', '.join(f'sft.{each}' for each in changed)}\nleave that as it was, or give another --out"
        )


def _supervised_as_written(resolved: Resolved) -> Tree:
    """The table `sft` as the run's file has it: without secrets, and with the word `none` for None."""
    written: Tree = tomllib.loads(to_toml(resolved_without_secrets(resolved))).get("sft", {})
    return written


def _run(out: Path, home: Path, plans: _Plans, watcher: Watcher, started: float, checkpoint: str) -> dict[str, Any]:
    """What is left of both phases; the summary is written whatever happens."""
    failure: BaseException | None = None
    with contextlib.ExitStack() as ending:
        try:
            _forget_end(out)
            if not holds_run(out / RL):
                _run_phase(plans.sft, home, watcher, started, checkpoint, plans.rl.eval_tasks())
                started_again, checkpoint = time.perf_counter(), ""
            else:
                started_again = started
            _run_phase(_begun_with(plans.rl, _checkpoint(out / SFT)), home, watcher, started_again, checkpoint)
        except BaseException as error:  # raised again below
            if isinstance(error, KeyboardInterrupt):
                ending.enter_context(without_interrupts())
            failure = _retold(error, out, home)
        if failure is not None and not holds_run(out / SFT):
            raise failure  # nothing has begun
        summary = _summary(out, failure) | {
            "wall_seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time(),
        }
        try:
            _write(out / SUMMARY, encode_indented(summary))
        except OutputError as error:
            failure = failure or error  # the first error is the one to tell
        if failure is not None:
            raise failure
        return summary


def _run_phase(
    plan: Plan, home: Path, watcher: Watcher, started: float, checkpoint: str, also_held_out: Sequence[Task] = ()
) -> None:
    """Begin the phase or go on with it; one that is done is left as it is, unless it is to go back."""
    folder = Path(plan.settings.out)
    if checkpoint or not _is_over(plan):
        os.chdir(home)  # a tool of the first phase may have gone elsewhere; the second one's files are loaded now
        resume = folder if holds_run(folder) else None
        launch(plan, watcher, started, resume=resume, checkpoint=checkpoint, home=home, also_held_out=also_held_out)


def _is_over(plan: Plan) -> bool:
    """Whether nothing of the phase is left to do. The supervised one is not over where what the reinforcement is to
    begin with is damaged: going on with it falls back, or says what to type.
    """
    folder = Path(plan.settings.out)
    if finished(folder, plan.settings.steps) is None:
        return False
    if plan.settings.mode == "sft":
        try:
            last = newest_checkpoint(folder / "checkpoints")
            if last is not None:
                check_folder(str(last))
        except DamagedCheckpointError:
            return False
    return True


def _retold(error: BaseException, out: Path, home: Path) -> BaseException:
    """The same error, which says how to go on with both phases, not with one."""
    words = str(error)
    shown = shown_path(out, home)
    for phase in (SFT, RL):
        words = words.replace(resume_command(shown / phase), resume_command(shown))
    if isinstance(error, UserError) and finished(out / SFT, 0) and not holds_run(out / RL):
        words += f"\nthe supervised phase is done; go on with: {resume_command(shown)}"
    if words != str(error):
        error.args = (words,)
    return error


def _begun_with(plan: Plan, checkpoint: Path) -> Plan:
    """The same plan for the model that the supervised phase has left. The learning rate stays that of the run's model,
    and is written down.
    """
    return _with(plan, model=str(checkpoint), lr=plan.lr)


def _with(plan: Plan, **changes: Any) -> Plan:
    settings = dataclasses.replace(plan.settings, **changes)
    return plan._replace(settings=settings, resolved=plan.resolved._replace(settings=settings))


def _checkpoint(folder: Path) -> Path:
    """The last checkpoint of the supervised phase. Raises ConfigError."""
    found = newest_checkpoint(folder / "checkpoints")
    if found is None:
        raise ConfigError(f"the supervised phase in {folder} has no checkpoint, so there is nothing to begin with")
    return found


def _summary(out: Path, failure: BaseException | None) -> dict[str, Any]:
    """One summary of what both phases say, in the words of a run's; its steps are those of the second."""
    parts = {name: _read(out / name / SUMMARY) for name in (SFT, RL)}
    first, last = parts[SFT] or {}, parts[RL] or {}
    checkpoints = [f"{name}/{part['checkpoint']}" for name, part in parts.items() if part and "checkpoint" in part]
    summary: dict[str, Any] = {
        "status": "done",
        "steps": last.get("steps", 0),
        "evaluation": {
            "before": first.get("evaluation", {}).get("before"),
            "after": last.get("evaluation", {}).get("after"),
        },
        "phases": parts,
    }
    if checkpoints:
        summary["checkpoint"] = checkpoints[-1]
    if failure is not None:
        summary["status"] = "interrupted" if isinstance(failure, KeyboardInterrupt) else "failed"
        summary["error"] = f"{type(failure).__name__}: {failure}"
    return summary


@contextlib.contextmanager
def _supervised() -> Iterator[None]:
    """A mistake in the supervised phase says so."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"the supervised phase: {error}") from error


@contextlib.contextmanager
def _new_folder(out: Path, home: Path, *, is_named: bool) -> Iterator[Path]:
    """The run's folder, under another name where `out` is taken and not `is_named`; it goes away where the first phase
    is refused before it has written anything.
    """
    if is_named:
        made = [each for each in (out, *out.parents) if not each.exists()]
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            shown = shown_path(out, home)
            raise OutputError(f"the output folder {shown} cannot be made: {error.strerror or error}") from error
    else:
        out, made = make_new(out, home)
    try:
        yield out
    except (RolloutsError, KeyboardInterrupt):
        if not (out / SFT).exists():
            (out / CONFIG).unlink(missing_ok=True)
            for each in made:
                with contextlib.suppress(OSError):  # another run has written beside it meanwhile
                    each.rmdir()
        raise


def _forget_end(out: Path) -> None:
    """Remove what says that both phases have ended, before one of them goes back or on."""
    try:
        (out / SUMMARY).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror or error}") from error


def _env_names(components: Mapping[str, list[Component]], prefer: str = "name") -> str:
    """The environments in words: their names, or where they have them their aliases."""
    return " + ".join(getattr(each, prefer) or each.name for each in components["env"])


def _inside(out: str, phase: str) -> str:
    return str(Path(out) / phase) if out else ""


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, text: str) -> None:
    """Write a file whole."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
