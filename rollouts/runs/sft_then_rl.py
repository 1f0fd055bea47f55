"""Mode sft+rl: a supervised phase, then a reinforcement phase that begins with its checkpoint; one run, one config.

Each phase is a complete run in its own folder, OUT/sft and OUT/rl. OUT has the settings of both and one summary. Both
phases are composed before the first begins, so that a mistake in the second is found at once. Not here: how a phase
runs (`jobs.train`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from rollouts.config.flags import Tree
from rollouts.config.merging import Component, component_names, component_tables, components_of, merge
from rollouts.config.render import to_toml
from rollouts.config.resolving import Resolved, resolve
from rollouts.config.settings import COMPONENT_KINDS, Settings
from rollouts.errors import ConfigError, DamagedCheckpointError, RolloutsError, UserError, said_of
from rollouts.runs.folder import PHASES, SUMMARY, RunFolder, choose_folder, default_out, holds_run, read_json
from rollouts.runs.held_objects import refuse_lost
from rollouts.runs.jobs.sources import check_data
from rollouts.runs.jobs.train import train
from rollouts.runs.observer import NullObserver, Observer
from rollouts.runs.plan import Plan, config_text, make_plan
from rollouts.runs.resume import changed_settings, finished, named_checkpoint, read_run, resume_command
from rollouts.runs.session import Session
from rollouts.runs.times import Start
from rollouts.training.weights.store import check_folder, newest_checkpoint

RL, SFT = PHASES
SUPERVISED = "the supervised phase"

_SHARED = ("env", "data", "sandbox", "tool", "tool_parser", "reward", "inference", "training", "optimizer", "logger")
"""The components of the run that the supervised phase also uses, unless `[sft]` changes them. All others are for
rollouts.
"""

_FOR_ROLLOUTS = tuple("critic critic_lr keep_best lr minibatches schedule stop_when teacher teacher_top_k".split())
"""Settings of the run that do not apply to the supervised phase, which has their defaults or its own learning rate."""


class PhasePlans(NamedTuple):
    """Both phases as plans, and the content of OUT/config.toml."""

    sft: Plan
    rl: Plan
    whole: Resolved


def phases(resolved: Resolved) -> tuple[Resolved, Resolved]:
    """The settings of the supervised phase and of the reinforcement phase, each as a separate run.

    The second still has the run's own model, because the checkpoint of the first does not exist yet.
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
        # `[sft]` names another environment, to which the run's data and rewards do not belong.
        components = components if "data" in given else components | {"data": []}
        values |= component_names(components) | {"eval_tasks": 0}
    values |= core | {"mode": "sft", "sft": {}, "lora_per_role": False, "out": _inside(settings.out, SFT)}
    sft = dataclasses.replace(settings, **values)
    return Resolved(sft, components, resolved.source), resolved._replace(settings=rl)


def train_phases(
    resolved: Resolved,
    observer: Observer,
    started: Start,
    home: Path,
    *,
    resume: Path | None = None,
    checkpoint: str = "",
) -> dict[str, Any]:
    """Run both phases to their end. Returns the content of OUT/summary.json. `started` is the start of the run.

    `resume` is the folder of an earlier run of this mode, which resumes in the phase where it stopped, from the last
    checkpoint of that phase or from the checkpoint named `checkpoint`. Relative paths begin at `home`. Raises like
    `train`; a mistake in either phase is raised before anything is written.
    """
    default = default_out(_env_names(resolved.components, "alias"), resolved.settings.loss)
    make_folder = choose_folder(resolved.settings.out, default, home, resume)
    plans = compose_phases(resolved)
    if resume is None:
        _check_data(plans)
    else:
        _check_resumed(home / resume, plans, home)
    with Session(NullObserver(), started) as session:
        folder = session.open(make_folder, parts=())
        job = _BothPhases(folder, config_text(plans.whole))
        if resume is None:
            job.begin()
        sft, rl = (_with(plan, out=str(folder.path / name)) for plan, name in ((plans.sft, SFT), (plans.rl, RL)))
        now, both = started, {"whole": str(folder.shown)}
        try:
            with _worded_for_both(folder):
                if not holds_run(folder.path / RL):
                    first = cast(Observer, _PhaseObserver(observer, both | {"checkpoint": None}))
                    also = plans.rl.eval_tasks()
                    _train_phase(sft, first, started, started, home, checkpoint, job.begin, also_held_out=also)
                    checkpoint, now = "", Start.now()
                    if _summary_of_finished(sft) is None:  # its hours are over
                        return job.summary
                begins_with = newest_checkpoint(folder.path / SFT / "checkpoints")
                if begins_with is None:
                    raise ConfigError(
                        f"the supervised phase in {folder.path / SFT} has no checkpoint, so reinforcement cannot begin"
                    )
                # The default learning rate depends on the run's model, not on the checkpoint, so it is set explicitly.
                rl = _with(rl, model=str(begins_with), lr=rl.lr)
                changes = both | {"before_sft": _evaluated_first(sft, rl)}
                second = cast(Observer, _PhaseObserver(observer, changes))
                _train_phase(rl, second, now, started, home, checkpoint, job.begin)
                job.begin()  # both phases were already finished
        finally:
            if job.has_begun and holds_run(folder.path / SFT):
                session.job = job
    return job.summary


def compose_phases(resolved: Resolved, *, may_be_absent: bool = False) -> PhasePlans:
    """Both phases as plans. `may_be_absent` is that of `make_plan`. Raises UserError; the message says so if the
    mistake is in the supervised phase.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "--mode sft+rl: under a launcher each process composes one run; let the backend start its ranks "
            "(--training fsdp --training.processes 2), or type `rollouts sft ... --out OUT` and then `rollouts run ... "
            "--model OUT/checkpoints/step_N`"
        )
    refuse_lost(resolved, COMPONENT_KINDS)
    first, second = phases(resolved)
    rl = make_plan(second, may_be_absent=may_be_absent)
    with said_of(SUPERVISED):
        sft = make_plan(first, may_be_absent=may_be_absent, used_elsewhere=_SHARED)
    tables = component_tables(sft.resolved.components)
    own: Tree = {"steps": sft.settings.steps}  # written down: those of the run may be others when it is resumed
    own |= {key: tables[key] if key in COMPONENT_KINDS else value for key, value in resolved.settings.sft.items()}
    settings = dataclasses.replace(rl.resolved.settings, mode="sft+rl", sft=own, out="", resume="never")
    return PhasePlans(sft, rl, rl.resolved._replace(settings=settings))


def _check_data(plans: PhasePlans) -> None:
    """Raise EnvironmentDefinitionError if there are no demonstrations or no tasks."""
    held_out = plans.rl.eval_tasks()
    with said_of(SUPERVISED):
        check_data(plans.sft, [*plans.sft.eval_tasks(), *held_out])
    check_data(plans.rl, held_out)


def _check_resumed(out: Path, plans: PhasePlans, home: Path) -> None:
    """Raise ConfigError for settings that would change the supervised phase after the next phase has begun."""
    begun = read_run(out, {}, home=home, allow_left_out=True)
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
            f"the supervised phase of {out} is over, and reinforcement has begun with its model, so its settings "
            f"cannot change: {', '.join(f'sft.{each}' for each in changed)}\n"
            "give the old values again, or another --out"
        )


def _supervised_as_written(resolved: Resolved) -> Tree:
    """The table `sft` for the run's file: without secrets, and with the word `none` for None."""
    written: Tree = tomllib.loads(to_toml(resolved.without_secrets())).get("sft", {})
    return written


class _BothPhases:
    """The job of both phases. Its summary has the keys of a run's summary; its steps are those of the second phase."""

    def __init__(self, folder: RunFolder, config: str) -> None:
        self._folder, self._config = folder, config
        self.has_begun = False
        self.summary: dict[str, Any] = {"status": "done"}

    def begin(self) -> None:
        """Called when a phase begins or resumes. From here on, the folder changes."""
        if not self.has_begun:
            self._folder.write_config(self._config)
            self._folder.forget_end()
            self.has_begun = True

    def finish(self, failure: BaseException | None) -> None:
        """Combine the phases' summaries."""
        parts = {name: read_json(self._folder.path / name / SUMMARY) or None for name in (SFT, RL)}
        first, last = parts[SFT] or {}, parts[RL] or {}
        self.summary |= {
            "steps": last.get("steps", 0),
            "evaluation": {
                "before": first.get("evaluation", {}).get("before"),
                "after": last.get("evaluation", {}).get("after"),
            },
            "phases": parts,
        }
        if stopped := (last or first).get("stopped"):
            self.summary["stopped"] = stopped
        checkpoints = [f"{name}/{part['checkpoint']}" for name, part in parts.items() if part and "checkpoint" in part]
        if checkpoints:
            self.summary["checkpoint"] = checkpoints[-1]

    def message(self, failure: BaseException) -> str:
        """The message of the phase's error."""
        return str(failure)


class _PhaseObserver:
    """The observer of a phase. At its end, it sees the phase's summary with these `changes`."""

    def __init__(self, observer: Observer, changes: dict[str, Any]) -> None:
        self._observer, self._changes = observer, changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)

    def end(self, summary: dict[str, Any]) -> None:
        self._observer.end(summary | self._changes)


def _evaluated_first(sft: Plan, rl: Plan) -> dict[str, Any] | None:
    """The evaluation before the supervised phase; None if there is none, or if it was of other tasks."""
    of_tasks = [(plan.settings.eval_tasks, plan.resolved.components["env"]) for plan in (sft, rl)]
    if of_tasks[0] != of_tasks[1]:
        return None
    found: dict[str, Any] | None = read_json(Path(sft.settings.out) / SUMMARY).get("evaluation", {}).get("before")
    return found


def _train_phase(
    plan: Plan,
    observer: Observer,
    started: Start,
    hours_from: Start,
    home: Path,
    checkpoint: str,
    on_begin: Callable[[], None],
    **options: Any,
) -> None:
    """Begin the phase or resume it; `options` are more arguments of `train`. A finished phase does not change, unless
    it resumes from an earlier checkpoint.
    """
    folder = Path(plan.settings.out)
    if checkpoint or not _is_over(plan):
        os.chdir(home)  # a tool of the first phase may have gone elsewhere; the second one's files are loaded now
        resumes = holds_run(folder)
        make_folder = choose_folder(plan.settings.out, "", home, folder if resumes else None)
        chosen = named_checkpoint(folder, checkpoint, home) if checkpoint else None
        options |= {"resumes": resumes, "checkpoint": chosen, "on_begin": on_begin, "hours_from": hours_from}
        train(plan, make_folder, observer, started, **options)


def _is_over(plan: Plan) -> bool:
    """Whether the phase is finished. The supervised phase is not, if its last checkpoint is damaged: resuming it uses
    an earlier one, or says what to type.
    """
    if _summary_of_finished(plan) is None:
        return False
    if plan.settings.mode == "sft":
        try:
            last = newest_checkpoint(Path(plan.settings.out) / "checkpoints")
            if last is not None:
                check_folder(str(last))
        except DamagedCheckpointError:
            return False
    return True


def _summary_of_finished(plan: Plan) -> dict[str, Any] | None:
    return finished(Path(plan.settings.out), plan.settings.steps, plan.settings.stop_when)


@contextlib.contextmanager
def _worded_for_both(folder: RunFolder) -> Iterator[None]:
    """Change the command in an error of one phase, so that it resumes both."""
    try:
        yield
    except (RolloutsError, KeyboardInterrupt) as error:
        words = str(error)
        for phase in (SFT, RL):
            words = words.replace(resume_command(folder.shown / phase), resume_command(folder.shown))
            words = words.replace(f'rollouts.resume("{folder.shown / phase}"', f'rollouts.resume("{folder.shown}"')
        if isinstance(error, UserError) and finished(folder.path / SFT, 0) and not holds_run(folder.path / RL):
            words += f"\nthe supervised phase is done; go on with: {resume_command(folder.shown)}"
        if words != str(error):
            error.args = (words,)
        raise


def _with(plan: Plan, **changes: Any) -> Plan:
    settings = dataclasses.replace(plan.settings, **changes)
    return plan._replace(resolved=plan.resolved._replace(settings=settings))


def _env_names(components: Mapping[str, list[Component]], prefer: str = "name") -> str:
    """The environments as text: their names, or their aliases if they have any."""
    return " + ".join(getattr(each, prefer) or each.name for each in components["env"])


def _inside(out: str, phase: str) -> str:
    return str(Path(out) / phase) if out else ""
