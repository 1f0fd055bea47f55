"""Requests that ask a server what it offers, and texts of what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from rollouts import Task
from rollouts.errors import ConfigError, EnvironmentDefinitionError, near_misses

SECONDS = 30.0  # the deadline of a request


def check_url(url: str, example: str) -> None:
    """Raise ConfigError if this is no HTTP address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        given = f"{url!r} is no address of a server" if url else "no server is given"
        raise ConfigError(f"--env.url: {given}\ntype: --env.url {example}")


class Service:
    """A server that is asked for facts. Raises EnvironmentDefinitionError if it cannot be reached, or if it answers
    with something else than JSON. `kind` names what it should be.
    """

    def __init__(self, url: str, kind: str, headers: Mapping[str, str]) -> None:
        self.url, self.kind, self._headers = url.rstrip("/"), kind, dict(headers)

    def get(self, path: str) -> Any:
        """The JSON of a GET; None if the server does not have this path."""
        return self._ask("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a POST; None if the server does not have this path."""
        return self._ask("POST", path, json=body)

    def require(self, path: str) -> Any:
        """Like `get`, but a path that is absent is an error."""
        found = self.get(path)
        if found is None:
            raise self._error(f"it answers, but has no {path}, as every {self.kind} has")
        return found

    def _ask(self, method: str, path: str, **body: Any) -> Any:
        try:
            answer = httpx.request(
                method, self.url + path, headers=self._headers, timeout=SECONDS, follow_redirects=True, **body
            )
        except httpx.HTTPError as error:
            raise self._error(f"{type(error).__name__}: {error}") from error
        if answer.status_code in (404, 405, 501):
            return None
        try:
            if answer.is_success:
                return answer.json()
        except ValueError:
            raise self._error(f"{method} {path} gave no JSON: {answer.text[:200]!r}") from None
        raise self._error(f"{method} {path} gave the status {answer.status_code}: {answer.text[:200]}")

    def _error(self, why: str) -> EnvironmentDefinitionError:
        return EnvironmentDefinitionError(
            f"--env.url {self.url}: no {self.kind} can be asked there: {why}\nstart the server, or correct the address"
        )


def split_name(known: Sequence[Mapping[str, Any]], given: str, split: str, flag: str) -> str:
    """The server's split for `train` or `eval`: the given one, else one of the type `train`, or of `test` or
    `validation`. Raises ConfigError.
    """
    names = [str(each.get("name")) for each in known]
    if given:
        if given in names:
            return given
        near = "".join(f"\ndid you mean: {each}?" for each in near_misses(given, names)[:1])
        raise ConfigError(f"{flag} {given}: the server has the splits {', '.join(names)}{near}")
    types = ("train",) if split == "train" else ("test", "validation")
    for kind in types:
        found = [str(each["name"]) for each in known if kind in (each.get("name"), each.get("type"))]
        if found:
            return found[0]
    return names[0]


def numbered_tasks(name: str, split: str, count: Any, prompt: str) -> list[Task]:
    """A task for each of the server's tasks in a split."""
    if not isinstance(count, int) or count < 1:
        raise EnvironmentDefinitionError(f"the server says that the split {split} of {name} has {count!r} tasks")
    return [Task(prompt, info={"split": split, "index": index}, id=f"{name}/{split}/{index}") for index in range(count)]


def as_text(value: Any) -> str:
    """What the model reads of data: a text as it is, and a dict with one text as this text; anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if each not in (None, "", {}, [])}
        if len(kept) == 1 and isinstance(only := next(iter(kept.values())), str):
            return only
        value = kept or value
    return json.dumps(value, ensure_ascii=False)


def text_of_blocks(blocks: Any) -> str:
    """The text of content blocks of MCP and ORS. What is no text becomes a note."""
    parts = []
    for block in blocks if isinstance(blocks, list) else []:
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            parts.append(block["text"])
        else:
            kind = block.get("type", "content") if isinstance(block, dict) else "content"
            parts.append(f"[{kind}, which cannot be shown as text]")
    return "\n".join(parts)
