"""Resuming a run: chooses and reads the checkpoint, compares the settings, and removes what later steps wrote.

`read_run` and `finished` need the folder only; `restore` and `take_back` also need the backend. Not here: the files of
a checkpoint (training.backends).
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollouts.config.flags import Tree
from rollouts.config.merging import merge
from rollouts.config.objects import take_objects
from rollouts.config.resolving import Resolved, resolve
from rollouts.config.secrets import flat_without_secrets
from rollouts.config.settings import EVAL, Settings
from rollouts.config.stopping import read_rule
from rollouts.disk import sync_folder
from rollouts.errors import CheckpointError, ConfigError, DamagedCheckpointError, ModelError, UserError, counted
from rollouts.loggers.jsonl import read_lines
from rollouts.models.folders import all_checkpoints, complete_checkpoints, nearest_checkpoints, step_of
from rollouts.models.loading import resolve_model_name
from rollouts.runs.components import Chosen
from rollouts.runs.folder import (
    CONFIG,
    REMOVED_BY,
    SUMMARY,
    RunFolder,
    holds_run,
    numbered,
    read_config,
    read_json,
    removed_steps,
    step_of_file,
)
from rollouts.runs.manifest import MANIFEST, resumed_manifest, update_manifest
from rollouts.training.batches import TrainingBackend
from rollouts.training.weights.store import remove_leftovers

ASIDE = ".aside"

Logged = Mapping[str, Mapping[int, bool]]
"""For each file of metrics, its steps; True for a step whose metrics include the time of a save before it."""

_OF_EVALUATION = ("inference", "concurrency", "retries", "max_failures", "logger", "pass_env", "worker")
"""Settings that a resumed evaluation may change: where and how fast it plays, and not what it measures."""

REVISION = 1
"""The version of the meaning of settings. Raise it if a change makes the same settings another run, and add a note to
`_revised`. 1: demonstrations are shuffled, and those of held-out tasks left out; `rloo` sums over tokens.
"""


class RunState(msgspec.Struct):
    """The run's own state in a checkpoint, beside the backend's: everything that is needed to continue the run exactly.

    `step` steps are done. `data`, `rollouts` and `loop` are the states of the buffer, the manager and the loop (mode
    rl); `evaluation` has the results `before`, and at the end `after`; `metric` ranks checkpoints: name, value,
    higher_is_better. `by_clock`: the next checkpoint replaces this one. `stopped`: why the run ends after this step, as
    summary.json has it. `patience` is the state of an early stop by the held-out loss. `evaluating`: the weights after
    so many steps were still being evaluated (`--eval-inference`); 0: none. `revision` is the REVISION that wrote it; 0
    for older checkpoints.
    """

    step: int
    mode: str
    settings: dict[str, Any]
    data: dict[str, Any] = {}
    rollouts: dict[str, Any] = {}
    loop: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    metric: dict[str, Any] | None = None
    by_clock: bool = False
    stopped: dict[str, str] | None = None
    patience: dict[str, float] = {}
    evaluating: int = 0
    revision: int = 0


class Resumed(NamedTuple):
    """Where a run resumes: the checkpoint (None: there is none, so the run starts again), its state, and notes for the
    user.

    `is_own`: this run wrote the checkpoint. If False, it is of another run, or this run resumed from an earlier
    checkpoint since then.
    """

    checkpoint: Path | None
    state: RunState
    notes: tuple[str, ...] = ()
    is_own: bool = True


def logged_steps(folder: Path, loggers: Sequence[Chosen]) -> Logged:
    """The logged steps in the files of the run's own loggers."""
    files = [folder / file for each in loggers if (file := each.settings.get("file", "metrics.jsonl")) is not None]
    return {file.name: {step: "time/save" in line for step, line, _ in read_lines(file)} for file in files}


def resume_command(folder: Path, checkpoint: Path | None = None, *, more: str = "") -> str:
    """The command that resumes the run in this folder."""
    words = ["rollouts", "resume", shlex.quote(str(folder))]
    if checkpoint is not None:
        is_inside = checkpoint.parent == folder / "checkpoints"
        words += ["--checkpoint", shlex.quote(checkpoint.name if is_inside else str(checkpoint))]
    return " ".join([*words, *filter(None, [more])])


def read_run(folder: Path, given: Tree, *, home: Path | None = None, allow_left_out: bool = False) -> Resolved:
    """The settings of the run in this folder, with the `given` settings in place of them, which may hold Python
    objects. `home` is that of `load_file`, and `allow_left_out` that of `resolve`.

    Raises ConfigError.
    """
    if not holds_run(folder):
        raise ConfigError(f"{folder} holds no run: it has no {CONFIG}{_hint(folder)}")
    if "rescored" in read_json(folder / MANIFEST):
        again = f"rollouts run --from {shlex.quote(str(folder))}"
        raise ConfigError(f"{folder} holds rescored trajectories, and no run\nto train on them, type: {again}")
    for name in ("out", "resume"):
        if name in given:
            raise ConfigError(f"{name}: a run that is resumed stays in its folder, {folder}; leave {name} out")
    tree, source = read_config(folder, home)
    given, objects = take_objects(given, tree)
    source = source.with_objects(objects)
    resolved = resolve(merge(tree, given), source, allow_left_out=allow_left_out)
    if resolved.settings.mode == "eval":
        _check_evaluation(folder, given, tree)
    return resolved._replace(settings=dataclasses.replace(resolved.settings, out=str(folder)))


def _check_evaluation(folder: Path, given: Tree, tree: Tree) -> None:
    """Raise ConfigError if `given` changes what an evaluation measures, whose settings are `tree`."""
    for name, value in given.items():
        if name not in EVAL:
            raise ConfigError(f"{name}: {folder} holds an evaluation, which does not have this setting; leave it out")
        if name not in _OF_EVALUATION and not name.endswith("_seconds") and value != tree.get(name):
            again = f"rollouts eval {shlex.quote(str(folder / CONFIG))} --{name.replace('_', '-')} ..."
            raise ConfigError(
                f"{name}: a resumed evaluation keeps its settings, so that all of its episodes are comparable\n"
                f"to evaluate with other settings, type: {again}"
            )


def _hint(folder: Path) -> str:
    """A hint for a folder without a run: the run that it is inside, or the runs inside it."""
    path = Path(os.path.abspath(folder))
    run = next((above for above in (folder.parent, folder.parent.parent) if holds_run(above)), None)
    if run is not None and path.exists():
        is_checkpoint = path.parent.name == "checkpoints" and path.is_dir()
        what = "it is a checkpoint of one" if is_checkpoint else "it is inside the folder of one"
        return f", {what}\ntype: {resume_command(run, folder if is_checkpoint else None)}"
    if run is not None and path.parent.name == "checkpoints":
        return f", and does not exist; {nearest_checkpoints(folder) or 'its run has no checkpoint'}"
    inside = sorted(each for each in path.iterdir() if holds_run(each)) if path.is_dir() else []
    if inside:
        return f"\ndid you mean: {', '.join(str(folder / each.name) for each in inside[-3:])}?"
    return "\nto begin one, type: rollouts run --env NAME --out " + shlex.quote(str(folder))


def finished(folder: Path, steps: int, stop_when: Sequence[str] = ()) -> dict[str, Any] | None:
    """The summary of a run that has done all of its steps, or that one of its rules `stop_when` has ended, and of an
    evaluation that has played all of its episodes; None for any other run.
    """
    summary = read_json(folder / SUMMARY)
    if summary.get("status") == "done" and "episodes_asked" in summary:  # an evaluation; failed episodes are not done
        return None if summary.get("failed") else summary
    if summary.get("status") != "done" or not isinstance(summary.get("steps"), int):
        return None
    has_stopped = stopped_by(summary) in [str(read_rule(text)) for text in stop_when]
    return summary if summary["steps"] >= steps or has_stopped else None


def stopped_by(summary: Mapping[str, Any]) -> str | None:
    """The rule of `--stop-when` that ended the run with this summary."""
    stopped = summary.get("stopped") or {}
    return stopped.get("rule") if stopped.get("by") == "stop_when" else None


def check_steps(folder: Path, steps: int) -> None:
    """Raise ConfigError if the run in this folder is finished with more steps than these."""
    summary = finished(folder, steps)
    if summary is not None and summary["steps"] > steps:
        longer = resume_command(folder, more=f"--steps {2 * summary['steps']}")
        raise ConfigError(
            f"{folder} has finished {counted(summary['steps'], 'step')}, and --steps is {steps}\n"
            f"go back with --checkpoint NAME, or make it longer: {longer}"
        )


def finished_words(folder: Path, summary: Mapping[str, Any], steps_now: int) -> str:
    """A message that the run with this summary has done all of its steps, and how to make it longer. `steps_now` is the
    present number of steps.
    """
    if "episodes_asked" in summary:
        again = f"to repeat it, type: rollouts eval {shlex.quote(str(folder / CONFIG))}"
        return f"{folder} is finished: all of its {counted(summary['episodes'], 'episode')} are played\n{again}"
    steps: int = summary["steps"]
    if stopped_by(summary) is not None:
        is_changed = read_config(folder)[0].get("steps", Settings.steps) != steps_now
        on = resume_command(folder, more=f"{f'--steps {steps_now} ' if is_changed else ''}--stop-when none")
        return f"{folder} is finished: {summary['stopped']['why']}\nto continue without this rule, type: {on}"
    longer = resume_command(folder, more=f"--steps {max(1, 2 * steps)}")
    done = f"{folder} is finished: all of its {steps} steps are done" if steps > 1 else f"{folder} is finished"
    return f"{done}\nto make it longer, type: {longer}"


def run_to_resume(resolved: Resolved) -> Path | None:
    """With `resume = "auto"`, the folder of the run to resume; None if these settings start a new run.

    Raises ConfigError if `resume` is "auto" and `out` is not set.
    """
    settings = resolved.settings
    if settings.resume != "auto":
        return None
    if not settings.out:
        names = (settings.env or "NAME",) if isinstance(settings.env, str) else settings.env
        envs = " ".join(f"--env {name}" for name in names)
        raise ConfigError(
            "--resume auto continues the run in the folder --out, and --out is not given\n"
            f"type: rollouts run {envs} --out runs/NAME --resume auto"
        )
    folder = Path(settings.out)
    if not holds_run(folder):
        return None
    read_config(folder)
    return folder


def named_checkpoint(folder: Path, name: str, home: Path) -> Path:
    """The checkpoint of this name under the run's checkpoints/, or at this path, as an absolute path. Relative paths
    begin at `home`. Raises ConfigError.
    """
    inside = home / folder / "checkpoints" / name
    if inside.is_dir():
        return inside
    path = home / name
    if path.is_dir():
        folder = home / folder
        is_inside = path.resolve().parent == (folder / "checkpoints").resolve()
        return folder / "checkpoints" / path.name if is_inside else path
    known = [each.name for each in complete_checkpoints(home / folder / "checkpoints")]
    raise ConfigError(
        f"--checkpoint {name}: there is no such folder, neither here nor under {folder / 'checkpoints'}\n"
        f"the run's checkpoints: {', '.join(known) or 'none'}"
    )


def restore(
    backend: TrainingBackend,
    folder: RunFolder,
    settings: Settings,
    flat: Mapping[str, Any],
    logged: Logged,
    chosen: Path | None,
) -> Resumed:
    """Load the `chosen` checkpoint into the backend, or the last one; with `resume = "auto"`, an earlier one if the
    last one is damaged. `flat` are the settings from `Plan.flat`, `logged` the logged steps.

    This process must hold the folder's lock. Raises ConfigError and ModelError. If the checkpoint is damaged, the
    message names the earlier one and what to type.
    """
    remove_leftovers(folder.checkpoints)
    there = complete_checkpoints(folder.checkpoints)
    candidates = [chosen] if chosen is not None else all_checkpoints(folder.checkpoints)[::-1]
    auto = settings.resume == "auto" and chosen is None
    notes = _missing_checkpoint(logged, folder, auto=auto) if chosen is None else []
    for path in candidates:
        earlier = _before(path, there)
        try:
            state = _checked(backend.load(str(path)).wait(), path, settings, folder.path)
        except UserError as error:
            words = str(error)
            if isinstance(error, DamagedCheckpointError):  # for what else is refused, so would be an earlier one
                if auto and earlier is not None:
                    notes.append(folder.in_words(f"{error}; continuing from {earlier.name} instead"))
                    continue
                words += f"\n{_instead(folder.path, earlier, is_other=path not in there and bool(there))}"
            error.args = (folder.in_words(words),)
            raise
        is_own = path == folder.checkpoint_path(state.step)
        shown = path.name if path.parent == folder.checkpoints else folder.in_words(str(path))
        notes.append(f"going on after step {state.step} of {settings.steps}, from {shown}")
        if not is_own and state.step:
            notes.append(
                f"metrics.jsonl and trajectories/ tell of the steps before as this run took them; {shown} has not come "
                "from them"
            )
        notes += _revised(state, settings)
        notes += _missing_steps(logged, folder, state.step, with_trajectories=settings.mode == "rl")
        before = folder.move._replace(base=folder.move.home).flat(state.settings)
        notes += changed_settings(flat_without_secrets(before), folder.move.flat(flat))
        return Resumed(path, state, tuple(notes), is_own)
    notes.append("the run has no checkpoint yet: it begins again")
    return Resumed(None, RunState(0, settings.mode, {}), tuple(notes))


def _revised(state: RunState, settings: Settings) -> list[str]:
    """Notes about settings whose meaning has changed since the checkpoint was written."""
    if state.revision >= 1 or not state.step:
        return []
    notes = []
    if settings.mode == "sft":
        notes.append(
            "warning: an earlier version wrote this checkpoint. It took the demonstrations in their written order, "
            "those of held-out tasks too. They are shuffled now, so that some may come twice and others never"
        )
    if settings.loss == "rloo" and not settings.aggregation:
        notes.append(
            "warning: an earlier version wrote this checkpoint. Its loss rloo had the aggregation rollout_mean, and "
            f"has rollout_sum now; to go on as before, choose rollout_mean as the aggregation in {CONFIG}"
        )
    return notes


def _missing_checkpoint(logged: Logged, folder: RunFolder, *, auto: bool) -> list[str]:
    """Raise DamagedCheckpointError if the run's checkpoint is missing, because starting again would overwrite its
    results. With `auto`, an earlier checkpoint is used instead, and a note says so.
    """
    named = [read_json(folder.path / name).get("checkpoint") for name in (MANIFEST, SUMMARY)]
    written = [step for each in named if isinstance(each, str) and (step := step_of(Path(each))) is not None]
    written += [step for lines in logged.values() for step, is_saved in lines.items() if is_saved]
    last = folder.checkpoint_path(max(written, default=0))
    there = complete_checkpoints(folder.checkpoints)
    is_there = any(each.name.partition(ASIDE)[0] == last.name for each in folder.checkpoints.iterdir())
    newer = [each for each in all_checkpoints(folder.checkpoints) if (step_of(each) or 0) > (step_of(last) or 0)]
    if not written or is_there or newer:
        return []
    lost = f"the run has written the checkpoint {folder.shown / 'checkpoints' / last.name}, which is missing"
    if auto and there:
        return [f"{lost}; continuing from {there[-1].name} instead"]
    raise DamagedCheckpointError(
        f"{lost}; a fresh start would overwrite the run, so nothing was changed\n"
        f"put the checkpoint back, or {_instead(folder.shown, there[-1] if there else None, is_other=False)}"
    )


def _missing_steps(logged: Logged, folder: RunFolder, steps: int, *, with_trajectories: bool) -> list[str]:
    """A note for each file that lacks some of the run's first `steps` steps, and one for those that the run has removed
    itself.
    """
    notes, wanted = [], set(range(steps))
    absent = wanted - _steps_with_own_logger(folder.path, steps)
    there = {name: set(lines) | absent for name, lines in logged.items()}
    if with_trajectories:
        files = [path for path in (folder.path / "trajectories").glob("*.jsonl") if path.stat().st_size]
        kept = {step for path in files if (step := step_of_file(path)) is not None}
        on_purpose = set(range(min(steps, removed_steps(folder.path)))) - kept
        if on_purpose:
            has = f"trajectories/ has {counted(len(kept & wanted), 'step')} of the {steps} before"
            notes.append(f"{has}; the others were removed by {REMOVED_BY}, and resuming needs none of them")
        there["trajectories/"] = kept | on_purpose
    return notes + [
        f"warning: {name} lacks {len(lost)} of the {steps} steps before (the first is step {min(lost)}): "
        "something has removed or damaged them; the run goes on without"
        for name, has_steps in there.items()
        if (lost := wanted - has_steps)
    ]


def _steps_with_own_logger(folder: Path, steps: int) -> set[int]:
    """Those of the first `steps` steps of the run that its manifest says were logged by its own logger: an earlier
    version left it out if another logger was chosen.
    """
    manifest, (own,) = read_json(folder / MANIFEST), Settings.logger
    found = set[int]()
    for begun in ({**manifest, "step": 0}, *manifest.get("resumed", ())):
        components = begun.get("components")
        later = set(range(begun["step"], steps))
        found -= later
        if components is None or any((each["kind"], each["name"]) == ("loggers", own) for each in components):
            found |= later
    return found


def _instead(folder: Path, earlier: Path | None, *, is_other: bool) -> str:
    """What to type instead of a damaged checkpoint. `is_other`: the checkpoint is not of this run, which has its
    own.
    """
    if earlier is not None:
        return f"go on from {earlier.name} with: {resume_command(folder, folder / 'checkpoints' / earlier.name)}"
    if is_other:
        return f"go on with the run as it is with: {resume_command(folder)}"
    return f"begin again with: rollouts run {shlex.quote(str(folder / CONFIG))} --out FOLDER"


def _before(path: Path, there: Sequence[Path]) -> Path | None:
    """The run's newest checkpoint that is older than this one."""
    own = step_of(path.with_name(path.name.partition(ASIDE)[0]))
    earlier = [each for each in there if own is not None and (step_of(each) or 0) < own]
    return earlier[-1] if earlier else None


def _checked(found: Mapping[str, Any], path: Path, settings: Settings, folder: Path) -> RunState:
    """The run's state. Raises ConfigError if a run of these settings cannot resume from it."""
    try:
        state = msgspec.convert(dict(found), RunState)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the checkpoint {path} does not say how far its run was ({error}); to begin a new run from its weights, "
            f"type --model {shlex.quote(str(path))}"
        ) from error
    if state.mode != settings.mode:
        raise ConfigError(
            f"the checkpoint {path} was written in mode {state.mode}, and {folder / CONFIG} says {settings.mode}; to "
            f"begin a new run from its weights, type: rollouts run --mode {settings.mode} --model "
            f"{shlex.quote(str(path))} ..."
        )
    if state.step > settings.steps:
        more = f"--steps {max(state.step, settings.steps)}"
        raise ConfigError(
            f"the checkpoint {path} was written after {counted(state.step, 'step')}, and --steps is {settings.steps}; "
            f"go back with --checkpoint NAME, or make it longer: {resume_command(folder, more=more)}"
        )
    _check_same(state.settings, settings, path, folder)
    return state


def _check_same(before: Mapping[str, Any], settings: Settings, path: Path, folder: Path) -> None:
    """Raise ConfigError for settings that must not change in a run: its model, and settings that determine the order of
    tasks or demonstrations.
    """
    again = f"rollouts run --mode {settings.mode} --model {shlex.quote(str(path))} ..."
    begin = f"or begin a new run from its weights: {again}"
    names = ("model", "seed", "prompts_per_step", "eval_tasks")
    old = {name: before.get(name, getattr(settings, name)) for name in names}
    if not _is_same_model(old["model"], settings.model, path, folder):
        raise ConfigError(
            f"the checkpoint {path} was written by a run of the model {old['model']}, and this one has the model "
            f"{settings.model}; give --model {old['model']} (in a run's folder: model in {CONFIG}), {begin}"
        )
    is_sft = settings.mode == "sft"
    holds_out_more = is_sft or settings.eval_tasks > old["eval_tasks"]
    others = "would hold out other tasks, and some of them may have been trained on"
    refused = (
        ("seed", True, "would order the tasks or demonstrations anew"),
        ("prompts_per_step", is_sft, "would give some demonstrations twice and others never"),
        ("eval_tasks", holds_out_more, others),
    )
    for name, matters, why in refused:
        now = getattr(settings, name)
        if matters and now != old[name]:
            raise ConfigError(f"{name} was {old[name]} and is {now} now, which {why}; give {old[name]} again, {begin}")


def _is_same_model(old: str, new: str, checkpoint: Path, folder: Path) -> bool:
    """Whether two names mean one model, judged by the names only: a moved folder keeps its name."""
    then, now = _place_of(old), _place_of(new)
    if old == new or then == now:
        return True
    if not now.is_dir():
        return False  # two names of the hub
    # The checkpoint of the supervised phase before this run (mode sft+rl), whose folder was copied or moved as a whole.
    of_phase = now.parent == folder.resolve().parent / "sft" / "checkpoints" and then.parts[-3:] == now.parts[-3:]
    if checkpoint.parent == folder / "checkpoints" and of_phase:
        return True
    return not then.exists() and _tail(then) == _tail(now)


def _place_of(model: str) -> Path:
    """The model's folder. For a hub name, and for a folder that does not exist any more, a path that does not exist."""
    try:
        return Path(resolve_model_name(model)).resolve()
    except ModelError:
        return Path(model).expanduser().resolve()


def _tail(path: Path) -> tuple[str, ...]:
    """The end of a path that identifies a model; for a checkpoint, it includes the folder of its run."""
    return path.parts[-3:] if path.parent.name == "checkpoints" else path.parts[-1:]


def take_back(backend: TrainingBackend, folder: RunFolder, resumed: Resumed, manifest: Mapping[str, Any]) -> Resumed:
    """Make the checkpoint from which the run resumes its last one: rename later checkpoints, and update the manifest.
    `manifest` is the manifest of a run that begins now. Returns `resumed` with more notes.

    The summary is removed first, and files of later steps are removed after this function. If the process is killed in
    between, the next resume finds a run that has not ended, and no checkpoint that is later than its other files.
    """
    step, path = resumed.state.step, resumed.checkpoint
    own = folder.checkpoint_path(step)

    def change(before: dict[str, Any]) -> dict[str, Any]:
        shown = None if path is None else folder.in_words(str(path))
        changed = resumed_manifest(before, manifest, step, shown)
        if path is not None and not resumed.is_own:
            changed["resumed"][-1]["from"] = str(path)
        return changed | {"checkpoint": None if path is None else folder.relative(own)}

    folder.forget_end()
    moved = set_aside(folder, step + 1 if resumed.is_own else step)
    if path is not None and not resumed.is_own:  # copy the checkpoint into this run
        folder.sync()
        backend.save(str(own), msgspec.to_builtins(resumed.state)).wait()
    notes = update_manifest(folder, change)
    if moved:
        names = ", ".join(sorted(each.name for each in moved))
        notes.append(f"set aside in {folder.shown / 'checkpoints'}: {names}")
    return resumed._replace(notes=(*resumed.notes, *notes))


def set_aside(folder: RunFolder, first: int) -> list[Path]:
    """Rename the checkpoints after `first` steps or more, which the run will repeat, to `<name>.aside` (then `.aside-2`
    and so on), so that no later resume finds them. Returns their new paths.

    The newest is renamed first, so a kill in between leaves all checkpoints up to some step. Raises CheckpointError.
    """
    later = [(step, path) for path in folder.checkpoints.iterdir() if (step := step_of(path)) is not None]
    moved = []
    for _, path in sorted((each for each in later if each[0] >= first), reverse=True):
        target = next(each for name in numbered(path.name + ASIDE) if not (each := path.with_name(name)).exists())
        try:
            path.rename(target)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {path} cannot be renamed: {error.strerror or error}") from error
        moved.append(target)
    sync_folder(folder.checkpoints)
    return moved


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One note for each setting that has changed: `lr: 0.001 -> 0.0003`."""

    def shown(settings: Mapping[str, Any], name: str) -> str:
        return msgspec.json.encode(settings[name]).decode() if name in settings else "not there"

    return [
        f"{name}: {shown(old, name)} -> {shown(new, name)}"
        for name in dict.fromkeys([*old, *new])
        if (name in old) != (name in new) or old.get(name) != new.get(name)
    ]
