"""The revisions of models and data of a hub: a run uses the same commits again when it is resumed or repeated.

    with revisions.pinned({"acme/model": "5f0c..."}):  # of the manifest of the run
        revisions.commit_of("acme/model")              # '5f0c...': load this one
        revisions.record("acme/model", "5f0c...")      # what was loaded, and is loaded from now on
        revisions.used()                               # what was loaded, for the manifest

A name is `OWNER/NAME`, or `OWNER/NAME@REVISION` with a branch, a tag or a commit; that of data begins with `datasets/`.
Outside of `pinned`, nothing is recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollouts.errors import ModelError, first_line

VARIABLE = "ROLLOUTS_REVISIONS"
"""An environment variable for the other ranks of a run, and for runs of other seeds: commits to begin with, as JSON."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_known: dict[str, str] | None = None  # for the whole process, because models are loaded in several threads
_loaded: set[str] = set()


@contextlib.contextmanager
def pinned(revisions: Mapping[str, str]) -> Iterator[None]:
    """In this block, in any thread, these names have these commits, and the commits of other names are recorded."""
    global _known, _loaded
    before = _known, _loaded
    _known, _loaded = dict(revisions), set()
    try:
        yield
    finally:
        _known, _loaded = before


def split(name: str) -> tuple[str, str]:
    """The name without its revision, and the revision; "" if it has none.

    >>> split("acme/model@v1.0"), split("acme/model")
    (('acme/model', 'v1.0'), ('acme/model', ''))
    """
    repository, _, revision = name.partition("@")
    return repository, revision


def location(model: str) -> tuple[str, str]:
    """Where to load a model from: a folder and "", or its name on the hub without a revision, and its commit in this
    run, or the revision; "" for the newest one.
    """
    if Path(model).is_dir():
        return model, ""
    repository, revision = split(model)
    return repository, commit_of(model) or revision


def given() -> dict[str, str]:
    """The commits in the environment variable."""
    found: dict[str, str] = json.loads(os.environ.get(VARIABLE, "{}"))
    return found


def adopt(revisions: Mapping[str, str]) -> None:
    """Use these commits from now on, in place of those that are known."""
    if _known is not None:
        _known.update(revisions)


def commit_of(name: str) -> str:
    """The commit of a name in this run; "" if it is not known yet."""
    return (_known or {}).get(name, "")


def record(name: str, commit: str | None) -> None:
    """Note which commit of a name was loaded, unless one is known. Anything but a commit is left out."""
    if _known is not None and commit and _COMMIT.fullmatch(commit):
        _known.setdefault(name, commit)
        _loaded.add(name)


def known() -> dict[str, str]:
    """The commits that are known in this run, also of names that it has not loaded."""
    return dict(_known or {})


def used() -> dict[str, str]:
    """The commits of all names that were loaded in this run so far, sorted by name."""
    return {name: known()[name] for name in sorted(_loaded)}


# --- models -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_revision(resolved: str) -> Iterator[tuple[str, dict[str, str]]]:
    """For a block that loads files of a model with a function of transformers: the name and the settings to load it by.
    All parts of a model of the hub have one commit in a run, which the block records.

        with at_revision("acme/model@v1.0") as (name, revision):
            AutoConfig.from_pretrained(name, **revision)
    """
    name, revision = location(resolved)
    yield name, {"revision": revision} if revision else {}
    record(resolved, loaded_commit(resolved))


def loaded_commit(resolved: str) -> str:
    """The commit of a hub's model in the cache, from which it was loaded; "" for a folder."""
    from huggingface_hub import try_to_load_from_cache

    name, revision = location(resolved)
    for file in () if Path(resolved).is_dir() else ("config.json", "tokenizer_config.json", "tokenizer.json"):
        path = try_to_load_from_cache(name, file, revision=revision or None)
        if isinstance(path, str):  # .../snapshots/COMMIT/config.json
            return Path(path).parent.name
    return ""


def model_file(resolved: str, name: str, *, local_files_only: bool = False) -> Path | None:
    """A file of a model; None if the model has none. If the hub may not be asked, the model has the files that are in
    the cache. Raises ModelError if the hub cannot be asked.
    """
    from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if Path(resolved).is_dir():
        return Path(resolved, name) if Path(resolved, name).exists() else None
    with at_revision(resolved) as (repository, settings):
        revision = settings.get("revision")
        try:
            return Path(hf_hub_download(repository, name, revision=revision, local_files_only=local_files_only))
        except (EntryNotFoundError, OSError, ValueError) as error:
            is_absent = isinstance(error, EntryNotFoundError) and (
                not isinstance(error, LocalEntryNotFoundError)
                or local_files_only
                or constants.HF_HUB_OFFLINE
                or try_to_load_from_cache(repository, name, revision=revision) is _CACHED_NO_EXIST
            )
            if is_absent:
                return None
            raise ModelError(
                f"{name} of the model {resolved} could not be loaded from the hub: {first_line(error)}\n"
                "check the connection; if all of its files are in the cache, type HF_HUB_OFFLINE=1 before the command"
            ) from error
