"""A pytest plugin: `pytest --rollouts-check NAME` adds one test for each check of a component.

NAME is what `rollouts check` takes. Without the option, the plugin only adds its options to pytest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("rollouts")
    group.addoption(
        "--rollouts-check",
        action="append",
        default=[],
        metavar="NAME",
        help="check this component: an installed name, the folder of a package, or ./file.py:Name",
    )
    group.addoption(
        "--rollouts-check-kind", metavar="KIND", help="the kind, if components of several kinds have this name"
    )
    group.addoption("--rollouts-check-skip", action="append", default=[], metavar="CHECK", help="leave out this check")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the checks after the tests of files. `-k` chooses among them."""
    for name in config.getoption("--rollouts-check"):
        items.extend(_Component.from_parent(session, name=f"rollouts-check {name}", given=name).collect())


class _Component(pytest.Collector):
    """The checks of one name. Each component is checked once, when the first of its checks runs."""

    def __init__(self, *, given: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.given = given
        self._results: dict[Any, dict[str, Any]] = {}

    def collect(self) -> Iterable[pytest.Item]:
        """One item for each component and check."""
        from rollouts.errors import UserError
        from rollouts_check import api

        self.options = api.Options(skip=self.config.getoption("--rollouts-check-skip"))
        try:
            found = api.find(self.given, self.options, self.config.getoption("--rollouts-check-kind"))
        except UserError as error:
            raise pytest.UsageError(f"--rollouts-check {self.given}: {error}") from error
        for each in found:
            for check in api.checks_for(each, self.options):
                name = f"{each.label}::{check.name}"
                yield _CheckItem.from_parent(self, name=name, found=each, check=check.name)

    def result_of(self, found: Any, check: str) -> Any:
        """The result of one check; None if the component cannot be imported and another check says so."""
        from rollouts_check import api

        if found not in self._results:
            report = api.check(found, self.options)
            self._results[found] = {result.name: result for result in report.results}
        return self._results[found].get(check)


class _CheckItem(pytest.Item):
    """One check."""

    def __init__(self, *, found: Any, check: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.found, self.check = found, check

    def runtest(self) -> None:
        """Run the check, or skip it with its reason. Raises FailedError."""
        from rollouts_check.report import FailedError

        parent = self.parent
        assert isinstance(parent, _Component), "only _Component makes items"
        result = parent.result_of(self.found, self.check)
        if result is None:
            pytest.skip("the component cannot be imported")
        if result.status == "skipped":
            pytest.skip(result.remark)
        for note in result.notes:
            self.add_report_section("call", "note", note)
        if result.status == "failed":
            raise FailedError(result.tried, result.seen, result.change)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A failed check as `rollouts check` prints it, without a traceback."""
        from rollouts_check.report import FailedError, Result

        error = excinfo.value
        if not isinstance(error, FailedError):
            return super().repr_failure(excinfo, style)
        result = Result(self.check, "failed", tried=error.tried, seen=error.seen, change=error.change)
        return "\n".join(result.lines())

    def reportinfo(self) -> tuple[str, int | None, str]:
        """The place of a check in reports."""
        return self.path.as_posix(), None, self.name
