"""From which commit a model of the Hugging Face hub was loaded. What a run does with commits: `rollouts.revisions`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rollouts import revisions


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
