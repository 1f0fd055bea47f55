"""How many environments of upstream packages equal upstream's own loop: counted by kind, and shown at the end.

A test with the mark `equals_upstream(kind)` plays one environment, its parameter, beside upstream's own loop. Each
environment is counted once, however many tests play it. With `--equal-at-least N` a run that counts fewer fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

MARK = "equals_upstream"
LEFT_OUT = f"{MARK}: left out"


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "fail if fewer environments equal upstream's own loop"
    parser.addoption("--equal-at-least", type=int, default=0, metavar="N", help=words)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A report has what is counted, so that it reaches the process that shows the numbers."""
    for item in items:
        for mark in item.iter_markers(MARK):
            item.user_properties.append((MARK, [mark.args[0], item.callspec.id]))


@pytest.fixture
def not_counted(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Call it in a test whose environment turns out not to be played."""
    return lambda: request.node.user_properties.append((LEFT_OUT, True))


def counts(reports: Iterable[pytest.TestReport]) -> dict[str, int]:
    """The number of environments of each kind, from the reports of tests that passed."""
    found: dict[str, set[str]] = {}
    for report in reports:
        properties = dict(report.user_properties)
        if MARK in properties and LEFT_OUT not in properties:
            kind, name = properties[MARK]
            found.setdefault(kind, set()).add(name)
    return {kind: len(names) for kind, names in sorted(found.items())}


def passed(config: pytest.Config) -> list[pytest.TestReport]:
    """The reports of the tests that passed; none where another process shows them."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return [] if reporter is None else [each for each in reporter.stats.get("passed", []) if each.when == "call"]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    least, total = session.config.getoption("--equal-at-least"), sum(counts(passed(session.config)).values())
    if total < least and session.exitstatus == pytest.ExitCode.OK and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = counts(passed(config))
    if found:
        terminalreporter.section("environments that equal upstream's own loop")
        for kind, count in found.items():
            terminalreporter.line(f"{count:5}  {kind}")
        terminalreporter.line(f"{sum(found.values()):5}  in all")
    if (least := config.getoption("--equal-at-least")) > sum(found.values()):
        terminalreporter.line(f"--equal-at-least {least}: fewer environments were counted", red=True)
