"""Check environments by a name or a path, or a class in the tests of its author.

from rollouts.check import check_environment_class

def test_contract():
    check_environment_class(MyEnv, digits=1)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rollouts.author_code import message_of
from rollouts.check.environments.subject import TASKS, Found, find_environments, make_subject
from rollouts.check.environments.table import CHECKS, IN_WORKER
from rollouts.check.report import Report, Result, failure_text
from rollouts.check.runner import Check, run_checks, select
from rollouts.config.flags import Tree
from rollouts.config.workers import INLINE, worker_table
from rollouts.env.shared import shared_values
from rollouts.errors import BrokenPluginError, PluginError, SignatureError
from rollouts.plugins.manager import PluginManager

KIND = "environment"
PROCESS = "process"
IMPORTED = "imports"  # the check that fails if the component cannot be imported


class Options(NamedTuple):
    """Which checks run, on how many tasks. `settings` is a tree with `env`, `reward` and `worker`."""

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

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks that apply."""
        return IN_WORKER if self.worker else CHECKS


def find(name: str, options: Options) -> list[Found]:
    """The environments that a name or a path means. Raises UserError for an unknown name, also of a check."""
    select(options.checks, options.only, options.skip)
    try:
        found = find_environments(name, PluginManager())
    except PluginError:
        if options.worker in ("", PROCESS):
            raise
        found = [Found(name, name)]  # the worker may have packages that this Python has not
    return [each._replace(label=f"{each.label} in a worker") for each in found] if options.worker else found


def check(found: Found, options: Options, observe: Callable[[Result], None] = lambda result: None) -> Report:
    """Check one environment. `observe` receives each result when it is known. Raises UserError for a wrong setting."""
    report = Report(KIND, found.label)
    temporary = tempfile.TemporaryDirectory(prefix="rollouts-check-", ignore_cleanup_errors=True)
    with temporary as folder, shared_values():
        try:
            subject = make_subject(
                found, dict(options.settings), Path(folder).resolve(), seed=options.seed, tasks=options.tasks
            )
        except (BrokenPluginError, SignatureError) as error:
            change = "correct the module; the other checks need it"
            seen = message_of(error)
            report.results.append(Result(IMPORTED, "failed", tried="import the environment", seen=seen, change=change))
            observe(report.results[0])
            return report
        try:
            report.results += run_checks(options.checks, subject, only=options.only, skip=options.skip, observe=observe)
        finally:
            subject.close()
    return report


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
    options = Options(only, skip, seed, tasks, tree)
    if isinstance(environment, str):
        tree["env"] = dict(settings)
        reports = [check(found, options) for found in find(environment, options)]
    else:
        select(CHECKS, only, skip)
        from rollouts.config.objects import take_objects

        plain, _ = take_objects(tree)
        reports = [check(Found(environment.__name__, plain["env"]["name"]), options)]
    failed = [report for report in reports if not report.has_passed]
    texts = [f"{report.verdict()}\n{failure_text(report.results)}" for report in failed]
    assert not failed, "\n".join(texts)
    return reports[0]
