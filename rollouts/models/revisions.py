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
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "ROLLOUTS_REVISIONS"
"""An environment variable for the other ranks of a run, with `known()` as JSON."""

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
