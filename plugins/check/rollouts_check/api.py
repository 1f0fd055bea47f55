"""Check components by a name or a path, or an object in the tests of its author.

from rollouts_check import check_component, check_environment_class

def test_contract():
    check_environment_class(MyEnv, digits=1)

def test_loss():
    check_component(my_loss, "loss", cap=3.0)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rollouts.author_code import message_of
from rollouts.config.flags import Tree, flag_name
from rollouts.config.objects import import_name, label_of, take_objects
from rollouts.config.settings import MULTIPLE
from rollouts.config.workers import INLINE, worker_table
from rollouts.env.shared import shared_values
from rollouts.errors import BrokenPluginError, ConfigError, PluginError, SignatureError
from rollouts.plugins.index import ANY_KIND
from rollouts.plugins.manager import PluginManager
from rollouts_check.components import common
from rollouts_check.components.common import KEYS, WORDS
from rollouts_check.components.table import FAMILIES, checks_of
from rollouts_check.environments.subject import TASKS, make_subject
from rollouts_check.environments.table import IN_WORKER
from rollouts_check.finding import find_components
from rollouts_check.packages import Found
from rollouts_check.report import Report, Result, failure_text
from rollouts_check.runner import Check, run_checks, select
from rollouts_check.scaffold.packages import kind_of

MORE_SETTINGS = {"environments": ("reward", "sandbox", "worker"), "rewards": ("env",)}
"""The settings of other kinds that the checks of a kind use: an environment's reward, the tasks of a reward."""

ENVIRONMENTS = "environments"
PROCESS = "process"
IMPORTED = "imports"  # the check that fails if the component cannot be imported


class Options(NamedTuple):
    """Which checks run, on how many tasks. `settings` is a tree with the settings of each kind: `env`, `loss`, ..."""

    only: Collection[str] = ()
    skip: Collection[str] = ()
    seed: int = 0
    tasks: int = TASKS
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def worker(self) -> str:
        """Where the environment runs: the kind of its worker; empty for this process."""
        kind = str(worker_table(self.settings.get("worker", INLINE)).get("kind", INLINE))
        return "" if kind == INLINE else kind


def find(name: str, options: Options, kind: str | None = None) -> list[Found]:
    """The components that a name or a path means; of any kind if `kind` is None. Raises UserError for an unknown name,
    also of a check.
    """
    is_elsewhere = options.worker not in ("", PROCESS)
    try:
        found = find_components(name, None if kind is None else kind_of(kind), PluginManager())
    except PluginError:
        if not is_elsewhere:
            raise
        found = [Found(name, name)]  # the worker may have packages that this Python has not
    if is_elsewhere:  # it knows the names of installed packages, not the modules of a folder
        found = [each._replace(name=each.label) for each in found]
    if options.worker:
        found = [each._replace(label=f"{each.label} in a worker") for each in found if each.kind == ENVIRONMENTS]
    kinds = list(dict.fromkeys(each.kind for each in found))
    known = {check.name: check for each in kinds for check in table_of(each, options)}
    select(tuple(known.values()), options.only, options.skip)
    if ANY_KIND not in kinds:
        _refuse_other_settings(kinds, options.settings)
    return found


def _refuse_other_settings(kinds: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of a kind that is not checked."""
    keys = {KEYS[kind] for kind in kinds if kind in KEYS}
    for kind, more in MORE_SETTINGS.items():
        keys |= set(more) if kind in kinds else set()
    for key in settings:
        if key not in keys:
            flags = (f"--{each}.NAME.SETTING" if each in MULTIPLE else f"--{each}.SETTING" for each in sorted(keys))
            words = " and ".join(flags) or "no settings"
            checked = " and ".join(WORDS[kind] for kind in kinds)
            raise ConfigError(f"{flag_name((key,))}: the check of a {checked} takes {words}")


def table_of(kind: str, options: Options) -> tuple[Check, ...]:
    """All checks of a kind that apply."""
    return IN_WORKER if kind == ENVIRONMENTS and options.worker else checks_of(kind)


def checks_for(found: Found, options: Options) -> list[Check]:
    """The checks of this component that `options` choose. They may choose none of a component of a folder."""
    table = table_of(found.kind, options)
    names = {check.name for check in table}
    if options.only and names.isdisjoint(options.only):
        return []
    return select(table, names & set(options.only), names & set(options.skip))


def check(
    found: Found, options: Options, observe: Callable[[Result], None] = lambda result: None, component: Any = None
) -> Report:
    """Check one component, or the object `component`. `observe` receives each result when it is known. Raises UserError
    for a wrong setting.
    """
    report = Report(WORDS.get(found.kind, found.kind), found.label)
    temporary = tempfile.TemporaryDirectory(prefix="rollouts-check-", ignore_cleanup_errors=True)
    with temporary as folder, shared_values():
        scratch, seed = Path(folder).resolve(), options.seed
        subject: Any
        try:
            if found.kind == ENVIRONMENTS:
                subject = make_subject(found, dict(options.settings), scratch, seed=seed, tasks=options.tasks)
            else:
                trial = FAMILIES[found.kind].trial if found.kind in FAMILIES else None
                subject = common.make_subject(found, options.settings, scratch, trial, component, seed)
        except (BrokenPluginError, SignatureError) as error:
            change = "correct the module; the other checks need it"
            tried, seen = f"import the {report.kind}", message_of(error)
            report.results.append(Result(IMPORTED, "failed", tried=tried, seen=seen, change=change))
            observe(report.results[0])
            return report
        try:
            if chosen := [each.name for each in checks_for(found, options)]:
                report.results += run_checks(table_of(found.kind, options), subject, only=chosen, observe=observe)
        finally:
            if found.kind == ENVIRONMENTS:
                subject.close()
    return report


def check_component(
    component: Any,
    kind: str,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    seed: int = 0,
    **settings: Any,
) -> Report:
    """Check a component of any kind in a test of its author. `component` is the object, or a name as for `rollouts
    check`. `kind` is its kind, such as "loss".

    Args:
        only: names of the checks to run; empty: all
        skip: names of checks to leave out
        seed: the seed of the random numbers
        settings: those of the component

    Raises:
        AssertionError: a check failed. The message has the failed checks, what they saw, and what to change.
        UserError: there is no such component, kind or check, or a setting is wrong.
    """
    chosen = kind_of(kind)
    if chosen == ENVIRONMENTS:
        return check_environment_class(component, only=only, skip=skip, seed=seed, **settings)
    options = Options(only, skip, seed, settings={KEYS[chosen]: settings} if settings else {})
    name = component if isinstance(component, str) else import_name(component) or f"<{label_of(component)}>"
    return _checked(component, Found(label_of(component), name, kind=chosen), options)


def _checked(component: Any, named: Found, options: Options) -> Report:
    """The report on a component, or the first one on those that its name means. `named` is the component if it is an
    object. Raises AssertionError if a check failed.
    """
    if isinstance(component, str):
        reports = [check(found, options) for found in find(component, options, named.kind)]
    else:
        select(checks_of(named.kind), options.only, options.skip)
        reports = [check(named, options, component=component)]
    failed = [report for report in reports if not report.has_passed]
    texts = [f"{report.verdict()}\n{failure_text(report.results)}" for report in failed]
    if failed:  # no `assert`: pytest rewrites its message
        raise AssertionError("\n".join(texts))
    return reports[0]


def check_environment_class(
    environment: Any,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    seed: int = 0,
    tasks: int = TASKS,
    reward: Any = None,
    **settings: Any,
) -> Report:
    """Check an environment in a test of its author. `environment` is a class, or a name as for `rollouts check`.

    Args:
        only: names of the checks to run; empty: all
        skip: names of checks to leave out
        seed: the seed of the random numbers
        tasks: how many tasks are played
        reward: as in `rollouts.run`, for an environment without a @reward
        settings: those of the environment

    Raises:
        AssertionError: a check failed. The message has the failed checks, what they saw, and what to change.
        UserError: there is no such environment or check, or a setting is wrong.
    """
    tree: Tree = {"env": {"name": environment, **settings}} | ({} if reward is None else {"reward": reward})
    name = take_objects(tree)[0]["env"]["name"]
    if isinstance(environment, str):
        tree["env"] = dict(settings)
    options = Options(only, skip, seed, tasks, tree)
    return _checked(environment, Found(getattr(environment, "__name__", name), name), options)
