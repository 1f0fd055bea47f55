"""The loaders of the core: `jsonl`, `json`, `csv`, `parquet`, `arrow` and `hub`.

    rollouts run --data rows.parquet --data.prompt question --reward pkg/f

A loader takes what `--data` names and returns the rows, each a dict. JSON needs only the standard library. All other
formats are read by the library datasets, which is in the extra `data`. Not here: which loader reads a file (`source`).
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import json as json_library
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.bounds import ROW_CHARACTERS_MAX, excess
from rollouts.errors import ConfigError, first_line, in_lines, suggestion, where_not_utf8
from rollouts.models import revisions

SAMPLE_CHARACTERS = 80
HUB_SECONDS = 5.0  # for the request for the newest commit


class NotARow(NamedTuple):
    """A place without a row: why, in words. Empty words mean a blank line."""

    why: str


def jsonl(source: str) -> Iterator[Any]:
    """One JSON object a line. The file may be compressed with gzip. Blank lines are skipped."""
    opener: Any = gzip.open if Path(source).suffix == ".gz" else open
    try:
        # Windows' editors write a byte order mark. Only "\n" ends a line: JSON text may contain U+2028.
        with opener(source, "rt", encoding="utf-8-sig", newline="\n") as lines:
            yield from json_lines(lines)
    except OSError as error:
        raise unreadable_source(source, error) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(source, opener) from error


def json(source: str) -> Iterator[Any]:
    """One JSON list of objects, or an object whose only list of objects is the rows."""
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise unreadable_source(source, error) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(source) from error
    if not text.strip():
        raise ConfigError(f"{source} is empty; expected a JSON list of rows")
    try:
        rows = json_library.loads(text)
    except json_library.JSONDecodeError as error:
        place = source if error.lineno == 1 else f"{source}, line {error.lineno}"
        raise ConfigError(f"{place}: {_not_json(error)}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists inside lists
        raise ConfigError(f"{source} cannot be read as JSON: {first_line(error)}") from error
    if isinstance(rows, dict) and len(lists := [each for each in rows.values() if _is_table(each)]) == 1:
        rows = lists[0]
    if not isinstance(rows, list):
        raise ConfigError(f"{source}: expected a list of rows, got {type(rows).__name__}; one object a line is .jsonl")
    yield from rows


def csv(source: str, *, delimiter: str = ",") -> Iterator[Any]:
    """A table of text with a line of column names.

    Args:
        delimiter: the character between two columns
    """
    return _file("csv", source, sep=delimiter)


def parquet(source: str) -> Iterator[Any]:
    """A Parquet file."""
    return _file("parquet", source)


def arrow(source: str, *, split: str = "train") -> Iterator[Any]:
    """A folder that `save_to_disk` of the library datasets wrote, or an Arrow file.

    Args:
        split: which part of a folder with several
    """
    if Path(source).is_file():
        return _file("arrow", source)
    import datasets

    try:
        found = datasets.load_from_disk(source)
    except Exception as error:  # the library raises many kinds
        raise ConfigError(f"{source} cannot be read as an Arrow folder: {first_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            has = f"{source} has no split {split!r}; it has: {', '.join(found)}"
            raise ConfigError(in_lines(has, suggestion(split, found, "--data.split {}".format)))
        found = found[split]
    return map(plain_row, found)


def hub(source: str, streaming: bool, *, split: str = "train", config: str = "", revision: str = "") -> Iterator[Any]:
    """A dataset of the Hugging Face hub, or a folder of data files.

    Args:
        split: which split; a part of it is `train[:10%]`
        config: which configuration of the dataset
        revision: a branch, a tag or a commit; default: that of the run, which is the newest one when it begins
    """
    try:
        found = load_hub(source, config, split=split, revision=revision, streaming=streaming)
    except (ConfigError, ImportError):
        raise
    except Exception as error:  # the library raises many kinds: no such name, no network, no such split
        raise ConfigError(
            f"the dataset {source} (split {split}) cannot be loaded: {first_line(error)}\n"
            "type a file, or OWNER/NAME with --data.split SPLIT and --data.config CONFIG"
        ) from error
    return map(plain_row, found)


def load_hub(source: str, config: str = "", *, split: str, revision: str = "", streaming: bool = False) -> Any:
    """A dataset of the hub, at one commit in a run (`rollouts.models.revisions`), or a folder of data files.

    Raises ConfigError if the run needs another commit than the one that is on this machine, and what the library
    datasets raises.
    """
    import datasets

    if Path(source).exists():
        return datasets.load_dataset(source, config or None, split=split, streaming=streaming)
    name = f"datasets/{source}" + (f"@{revision}" if revision else "")
    commit = revisions.commit_of(name) or _newest_commit(source, revision)
    given = {"revision": commit or revision} if commit or revision else {}
    found = datasets.load_dataset(source, config or None, split=split, streaming=streaming, **given)
    # Without a network, the library takes what is in its cache, whatever the revision.
    paths = [Path(each["filename"]) for each in getattr(found, "cache_files", ())]
    cached = next((part for path in paths for part in path.parts if re.fullmatch("[0-9a-f]{40}", part)), "")
    if revisions.commit_of(name) and cached and cached != commit:
        raise ConfigError(
            f"the dataset {source} is on this machine at commit {cached}, and this run has {commit}\nconnect to the "
            f"hub, or begin a new run with the data that is here: --data.revision {cached}"
        )
    revisions.record(name, cached or commit)
    return found


def _newest_commit(source: str, revision: str) -> str:
    """The commit of a dataset's revision on the hub now; "" if the hub cannot be asked."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return ""
    try:
        return str(HfApi().dataset_info(source, revision=revision or None, timeout=HUB_SECONDS).sha or "")
    except Exception:  # its HTTP library has its own errors; `load_dataset` says what is wrong
        return ""


def json_lines(lines: Iterable[str]) -> Iterator[Any]:
    """The rows of lines of JSON, with a NotARow in place of each line that has none."""
    for line in lines:
        if not line.strip():
            yield NotARow("")
            continue
        try:
            yield json_library.loads(line.rstrip("\r\n"))
        except json_library.JSONDecodeError as error:
            yield NotARow(_not_json(error))
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists inside lists
            yield NotARow(f"not a row: {first_line(error)}")


def bounded_row(value: Any) -> Any:
    """The row, or a NotARow for one that is nested too deep or too long."""
    problem = excess(value, ROW_CHARACTERS_MAX)
    return NotARow(f"the row is {problem}") if problem else value


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of an Arrow table as JSON would hold it.

    Arrow gives every struct of a column all keys that any of them has, and None for those that it lacks. So inner keys
    with None are left out. Dates and decimals become text.

    >>> plain_row({"id": None, "messages": [{"role": "user", "content": "Hi", "tool_calls": None}]})
    {'id': None, 'messages': [{'role': 'user', 'content': 'Hi'}]}
    """
    return {key: _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value) if isinstance(value, decimal.Decimal) else value


def _file(form: str, source: str, **options: Any) -> Iterator[Any]:
    """The rows of a file, read piece by piece: nothing is copied to the library's cache."""
    import datasets

    if not Path(source).is_file():
        raise unreadable_source(source)
    try:
        rows = datasets.load_dataset(form, data_files=source, split="train", streaming=True, **options)
        for row in rows:
            yield plain_row(row)
    except Exception as error:  # the library raises many kinds
        cause = error.__cause__ or error
        if isinstance(cause, UnicodeDecodeError):
            raise _not_utf8(source) from error
        raise ConfigError(f"{source} cannot be read as {form}: {first_line(cause)}") from error


OF_FILES = (jsonl, json, csv, parquet)
"""The loaders whose source is a file on this machine."""


def unreadable_source(source: str, error: OSError | None = None) -> ConfigError:
    """The error for a file that the system does not read; without one, for a file that is not there."""
    why = "No such file or directory" if error is None else error.strerror or error
    return ConfigError(f"{source} cannot be read: {why}; type --data PATH-OF-ROWS")


def _not_utf8(source: str, opener: Any = open) -> ConfigError:
    """The error for a file that is not text in UTF-8. What is no file, such as a pipe, cannot be read again."""
    if not Path(source).is_file():
        return ConfigError(where_not_utf8(source))
    with opener(source, "rb") as lines:
        return ConfigError(where_not_utf8(source, lines))


def _not_json(error: json_library.JSONDecodeError) -> str:
    """What is wrong, with the text around it. A file may be one long line."""
    first = error.pos - min(error.colno - 1, SAMPLE_CHARACTERS // 2)
    sample = error.doc[first : first + SAMPLE_CHARACTERS].partition("\n")[0]
    return f"not JSON: {error.msg} (column {error.colno}): {sample!r}"


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
