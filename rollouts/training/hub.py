"""From which commit a model of the Hugging Face hub was loaded, and single files of a model. What a run does with
commits: `rollouts.revisions`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rollouts import revisions
from rollouts.errors import ModelError, first_line


@contextlib.contextmanager
def at_revision(resolved: str) -> Iterator[tuple[str, dict[str, str]]]:
    """For a block that loads files of a model with a function of transformers: the name and the settings to load it by.
    All parts of a model of the hub have one commit in a run, which the block records.

        with at_revision("acme/model@v1.0") as (name, revision):
            AutoConfig.from_pretrained(name, **revision)
    """
    name, revision = revisions.location(resolved)
    yield name, {"revision": revision} if revision else {}
    revisions.record(resolved, loaded_commit(resolved))


def loaded_commit(resolved: str) -> str:
    """The commit of a hub's model in the cache, from which it was loaded; "" for a folder."""
    from huggingface_hub import try_to_load_from_cache

    name, revision = revisions.location(resolved)
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
