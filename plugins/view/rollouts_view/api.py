"""The API of the page. docs/viewer.md lists its paths. Every answer is a JSON object; an error is {"error": "..."}."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec

from rollouts.encoding import encode
from rollouts.errors import ConfigError, OutputError, UserError
from rollouts.runs.folder import CONFIG, read_config
from rollouts.version import __version__
from rollouts_view.catalog import Catalog
from rollouts_view.comparing import compare
from rollouts_view.data_api import DataAPI
from rollouts_view.health import causes, health, timeline
from rollouts_view.listing import Labels, check_tags, read_labels, write_labels
from rollouts_view.rollout import SIDE_BY_SIDE_MAX, Tokenizers, group_of, read_rollout
from rollouts_view.settings_api import SettingsAPI

ROWS_MAX = 500  # of one answer
WAIT_SECONDS = 0.4  # how long an answer waits for the rest of a table
RUNS_MAX = 12  # in one chart or comparison
NOTE_CHARACTERS = 10_000
DOCS = "docs/viewer.md lists the paths of the API"

Route = tuple[str, str, Callable[..., Any]]
"""A method, the pattern of a path, and the function that answers."""


class APIError(Exception):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Query(NamedTuple):
    """The part of an address after `?`."""

    pairs: list[tuple[str, str]]

    @classmethod
    def of(cls, text: str) -> Query:
        """Read it. Raises APIError for one with too many parts."""
        try:
            return cls(parse_qsl(text, keep_blank_values=True, max_num_fields=100))
        except ValueError as error:
            raise APIError(400, "the address has more than 100 parameters") from error

    def one(self, name: str, default: str = "") -> str:
        """The last value of a name."""
        return next((value for key, value in reversed(self.pairs) if key == name), default)

    def all(self, name: str) -> list[str]:
        """All values of a name, each once."""
        return list(dict.fromkeys(value for key, value in self.pairs if key == name))

    def number(self, name: str, default: int, most: int) -> int:
        """A number from 0 to `most`. Raises APIError."""
        value = self.one(name, str(default))
        if not re.fullmatch(r"\d{1,12}", value):
            raise APIError(400, f"{name}={value!r} is no number; type one from 0 on")
        return min(int(value), most)

    def only(self, *names: str) -> None:
        """Raise APIError for a name that is not one of these."""
        for key, _ in self.pairs:
            if key not in names:
                raise APIError(400, f"there is no parameter {key!r} here; there are: {', '.join(names) or 'none'}")


class ViewAPI:
    """Answers the requests of the page. Several threads may ask it."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._tokenizers = Tokenizers()
        settings, data, run = SettingsAPI(catalog), DataAPI(catalog, catalog.data), r"/api/runs/([^/]+)"
        routes: list[Route] = [
            ("GET", r"/api/settings", _of_query(settings.form)),
            ("GET", r"/api/settings/component", _of_query(settings.component, "key", "name", "loss")),
            ("GET", r"/api/settings/draft", _of_query(settings.draft, "run", "root", "file")),
            ("POST", r"/api/settings/check", settings.check),
            ("POST", r"/api/settings/run-file", settings.run_file),
            ("POST", r"/api/settings/file", settings.write),
            ("GET", r"/api/data", _of_query(data.rows, "file", "run", "settings", "from", "count")),
            ("GET", r"/api/data/summary", _of_query(data.summary, "file", "run", "settings", "first")),
            ("GET", r"/api/runs", _of_query(self._runs)),
            ("GET", r"/api/metrics", self._metrics),
            ("GET", r"/api/compare", self._compare),
            ("GET", run, _of_query(self._run)),
            ("POST", rf"{run}/labels", self._label),
            ("GET", rf"{run}/causes", _of_query(partial(causes, catalog))),
            ("GET", rf"{run}/health", _of_query(partial(health, catalog))),
            ("GET", rf"{run}/([^/]+)", self._table),
            ("GET", rf"{run}/([^/]+)/times", _of_query(partial(timeline, catalog))),
            ("GET", rf"{run}/([^/]+)/lines/(\d+)", _of_query(self._rollout)),
            ("GET", rf"{run}/([^/]+)/groups/(\d+)", _of_query(self._group)),
        ]
        self._routes = [(method, re.compile(pattern), answer) for method, pattern, answer in routes]

    def answer(self, method: str, path: str, query: str = "", body: bytes = b"") -> bytes:
        """The answer to a request, as JSON. Raises APIError."""
        fitting = [(own, match, do) for own, pattern, do in self._routes if (match := pattern.fullmatch(path))]
        if not fitting:
            raise APIError(404, f"there is no path {path}; {DOCS}")
        for own, match, do in fitting:
            if own == method:
                words = [unquote(each) for each in match.groups()]
                try:
                    return encode(do(*words, body if method == "POST" else Query.of(query)))
                except OutputError as error:
                    raise APIError(507, str(error)) from error
                except ConfigError as error:
                    raise APIError(400, str(error)) from error
                except UserError as error:
                    raise APIError(404, str(error)) from error
        allowed = ", ".join(own for own, _, _ in fitting)
        raise APIError(405, f"{path} takes {allowed}, not {method}")

    def _runs(self) -> dict[str, Any]:
        places, runs = [str(place) for place in self.catalog.places], self.catalog.runs()
        return {"version": __version__, "places": places, "data": list(self.catalog.data), "runs": runs}

    def _run(self, run: str) -> dict[str, Any]:
        info = self.catalog.info(run)
        try:
            settings: dict[str, Any] | None = read_config(self.catalog.folder(run))[0]
        except ConfigError:
            settings = None  # `problem` of the run says why
        return {
            "run": info,
            "settings": settings,
            "settings_file": CONFIG,
            "files": self.catalog.files(run),
            "metrics": {name: curve[-1][1] for name, curve in self.catalog.metrics(run).items()},
            "summary": self.catalog.summary(run),
            "notes": self.catalog.notes(run),
        }

    def _metrics(self, query: Query) -> dict[str, Any]:
        query.only("run", "metric")
        runs, metrics = _chosen(query.all("run"), 1), query.all("metric")
        found = {run: self.catalog.metrics(run) for run in runs}
        if not metrics:
            return {"names": sorted({name for each in found.values() for name in each})}
        return {"curves": {run: {name: each.get(name, []) for name in metrics} for run, each in found.items()}}

    def _compare(self, query: Query) -> dict[str, Any]:
        query.only("run")
        return compare(self.catalog, _chosen(query.all("run"), 2))

    def _label(self, run: str, body: bytes) -> dict[str, Any]:
        """Replace the tags or the note."""
        folder = self.catalog.folder(run)
        try:
            given = msgspec.json.decode(body, type=dict[str, Any])
            labels = msgspec.convert(msgspec.structs.asdict(read_labels(folder)) | given, Labels)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise APIError(400, f'{error}; send {{"tags": ["best"], "note": "text"}}, or one of them') from error
        if unknown := sorted(given.keys() - {"tags", "note"}):
            raise APIError(400, f"a run has tags and a note, not {', '.join(map(repr, unknown))}")
        check_tags(labels.tags)
        if len(labels.note) > NOTE_CHARACTERS:
            raise APIError(400, f"the note has {len(labels.note)} characters; {NOTE_CHARACTERS} are the most")
        labels = Labels(list(dict.fromkeys(labels.tags)), labels.note)
        write_labels(folder, labels)
        return msgspec.structs.asdict(labels)

    def _table(self, run: str, name: str, query: Query) -> dict[str, Any]:
        query.only("where", "sort", "desc", "from", "count")
        table = self.catalog.table(run, name)
        table.wait(WAIT_SECONDS)
        start, count = query.number("from", 0, 10**9), query.number("count", 100, ROWS_MAX)
        view = table.view(query.one("where"), query.one("sort"), descending=query.one("desc") in ("1", "true"))
        columns = [{"name": each, "kind": column.kind} for each, column in table.columns().items()]
        return {
            "file": name,
            "lines": table.lines.total,
            "scanned": view.scanned,
            "done": table.is_done,
            "damaged": table.damaged,
            "problems": [{"line": line, "error": error} for line, error in table.problems[:20]],
            "columns": columns,
            "matched": len(view.rows),
            "from": start,
            "rows": [table.row(row) for row in view.rows[start : start + count]],
            "summary": table.summary(),
        }

    def _rollout(self, run: str, name: str, line: str) -> dict[str, Any]:
        lines = self.catalog.lines(run, name)
        found = read_rollout(self.catalog.folder(run), lines, int(line), self._tokenizers)
        return found | {"siblings": group_of(lines, int(line))}

    def _group(self, run: str, name: str, line: str) -> dict[str, Any]:
        lines, folder = self.catalog.lines(run, name), self.catalog.folder(run)
        places = group_of(lines, int(line))
        rollouts = [read_rollout(folder, lines, each["line"], self._tokenizers) for each in places[:SIDE_BY_SIDE_MAX]]
        return {"rollouts": rollouts, "total": len(places)}


def _of_query(do: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Answers with a function whose arguments are the parts of the path, and these parameters of the address."""

    def answer(*arguments: Any) -> Any:
        *parts, query = arguments
        query.only(*names)
        return do(*parts, *(query.one(name) for name in names))

    return answer


def _chosen(runs: Sequence[str], least: int) -> list[str]:
    if not least <= len(runs) <= RUNS_MAX:
        raise APIError(400, f"{len(runs)} runs were given; give {least} to {RUNS_MAX}: ?run=runs/first&run=runs/second")
    return list(runs)
