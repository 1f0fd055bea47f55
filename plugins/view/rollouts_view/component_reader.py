"""The components that the form for settings can show: their names, and the settings of those that are chosen.

Names come from metadata. A component is imported when it is chosen, in a thread of its own: one whose import takes long
or fails is one message in the page, and the rest works. A file is run only after the user has said so, and only if it
is below an opened folder.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollouts_check.descriptions import description

from rollouts.config.files import NOWHERE
from rollouts.config.merging import Component
from rollouts.config.names import names_file, names_module
from rollouts.config.settings import COMPONENT_KINDS
from rollouts.data.source import KIND
from rollouts.errors import AmbiguousComponentError, ConfigError, UnknownComponentError, UserError, words_of
from rollouts.plugins.index import scan
from rollouts.plugins.manager import PluginManager
from rollouts.plugins.signature import Signature
from rollouts.runs.components import OF_LOSS, Chosen, choose, read_component

WAIT_SECONDS = 3.0  # how long an answer waits for an import
FAILED_SECONDS = 10.0  # after this time, a component that failed is tried again

State = Literal["read", "reading", "asks", "unknown", "failed"]
"""`reading`: its import is not done yet. `asks`: it is in a file, which is run only if the user allows it."""


class ReadComponent(NamedTuple):
    """A component. `words` say why it has no signature (yet), and of one that has, what it is and where it is from."""

    state: State
    words: str
    signature: Signature = Signature((), ())
    label: str = ""


class ComponentReader:
    """The components that were chosen, each read once. Several threads may ask. `roots` are the opened folders."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [root.resolve() for root in roots]
        self._lock = threading.Lock()
        self._reading: dict[tuple[Any, ...], _Reading] = {}
        self._allowed: set[Path] = set()

    def read(self, key: str, name: str, loss: str) -> ReadComponent:
        """The component `name` of the setting `key`. `loss` is the run's loss, whose own parts may be meant."""
        refusal = self._refusal(key, name)
        if refusal is not None:
            return refusal
        of_loss = loss if is_own(key, name) else ""
        if of_loss and (refusal := self._refusal("loss", of_loss)) is not None:
            return refusal
        place = (key, name, of_loss, _stamp(key, name), _stamp("loss", of_loss))
        with self._lock:
            found = self._reading.get(place)
            if found is None or found.has_expired():
                found = self._reading[place] = _Reading(key, name, of_loss)
                found.start()
        return found.result()

    def allow(self, name: str) -> None:
        """Let the file of this component be run. Raises ConfigError if it is outside of the opened folders."""
        file = _file_of("", name)
        if file is None or not self._is_inside(file):
            raise ConfigError(self._outside(name))
        with self._lock:
            self._allowed.add(file)

    def _refusal(self, key: str, name: str) -> ReadComponent | None:
        """Why this component is not read; None if it may be."""
        file = _file_of(key, name)
        if file is not None:
            if not self._is_inside(file):
                return ReadComponent("failed", self._outside(name))
            if file.is_file() and file not in self._allowed:
                return ReadComponent("asks", f"its settings are in {file}, which has to be run to read them")
        elif names_module(name) and not _is_installed(key, name):
            again = f"to see its settings, type: rollouts plugins show {name}"
            return ReadComponent("failed", f"this page imports no module by its name\n{again}")
        return None

    def _is_inside(self, file: Path) -> bool:
        return any(file.is_relative_to(root) for root in self._roots)

    def _outside(self, name: str) -> str:
        folders = " and ".join(map(str, self._roots)) or "none"
        return (
            f"{name} is not below the folders that this viewer has opened ({folders}), so it is not run here\n"
            "to see its settings, open its folder: rollouts view --new FOLDER"
        )


class _Reading(threading.Thread):
    """The import of one component."""

    def __init__(self, key: str, name: str, loss: str) -> None:
        super().__init__(daemon=True, name=f"reads {name}")  # an import that hangs does not keep the viewer alive
        self._asked = (key, name, loss)
        self._begun = time.monotonic()
        self._found: ReadComponent | None = None

    def run(self) -> None:
        try:
            self._found = _read(*self._asked)
        except (UnknownComponentError, AmbiguousComponentError) as error:
            self._found = ReadComponent("unknown", str(error))
        except UserError as error:
            self._found = ReadComponent("failed", str(error))
        except Exception as error:  # an author's code, such as a property or the default factory of a field
            self._found = ReadComponent("failed", f"{self._asked[1]} cannot be read: {words_of(error)}")

    def result(self) -> ReadComponent:
        """The component, as soon as it is read; `reading` if that takes longer than WAIT_SECONDS."""
        self.join(max(0.0, self._begun + WAIT_SECONDS - time.monotonic()))
        seconds = time.monotonic() - self._begun
        return self._found or ReadComponent("reading", f"{self._asked[1]} has been importing for {seconds:.0f} seconds")

    def has_expired(self) -> bool:
        """Whether it failed some time ago: what it lacked may have been installed meanwhile."""
        has_failed = self._found is not None and self._found.state in ("failed", "unknown")
        return has_failed and time.monotonic() - self._begun > FAILED_SECONDS


def _read(key: str, name: str, loss: str) -> ReadComponent:
    manager = PluginManager()
    of_loss = choose(manager, {"loss": [Component(loss, {})]}, NOWHERE)["loss"][0] if loss else None
    found = read_component(manager, key, Component(name, {}), of_loss, NOWHERE, (key,))
    words = ""
    if found.ref is not None:
        origin = f"{found.ref.distribution} {found.ref.version}" if found.ref.distribution else found.ref.value
        words = f"{sentence}. ({origin})" if (sentence := description(found.ref)) else origin
    return ReadComponent("read", words, found.signature, found.label)


def chosen_alone(key: str, component: Component, loss: str = "") -> Chosen:
    """One component with its settings, checked as a run checks it. `loss` is the one whose part is meant. Raises
    UserError.
    """
    components = {"loss": [Component(loss, {})]} if loss else {}
    return choose(PluginManager(), components | {key: [component]}, NOWHERE)[key][0]


def is_own(key: str, name: str) -> bool:
    """Whether the name of a component means a part of the loss."""
    return OF_LOSS.get(key) == name


def names_of(key: str) -> list[dict[str, str]]:
    """The installed components that a setting can name, with their descriptions. Nothing is imported."""
    refs = PluginManager().list(COMPONENT_KINDS[key])
    names = [ref.name for ref in refs]
    return [
        {
            "name": ref.name if names.count(ref.name) == 1 else ref.qualified,
            "about": description(ref),
            "from": f"{ref.distribution} {ref.version}",
        }
        for ref in refs
    ]


def _file_of(key: str, name: str) -> Path | None:
    """The file of a component that is in one: `./my_env.py:Name`, also if its name is not complete. Of data, other
    files are rows.
    """
    if key == "data":
        with_source = re.fullmatch(r"(?P<name>.*\.py:\w+)(?::.*)?", name)
        name = with_source["name"] if with_source else ""
    if not names_file(name):
        return None
    path, colon, _ = name.rpartition(":")  # as `find_component` reads it
    return Path(path if colon else name).expanduser().resolve()


def _is_installed(key: str, name: str) -> bool:
    """Whether an installed package has this component: by its entry point, or as the loader in `hub:NAME`."""
    if key == "data" and any(ref.kind == KIND and ref.name == name.partition(":")[0] for ref in scan().components):
        return True
    return any(ref.value == name for ref in scan().components)


def _stamp(key: str, name: str) -> int:
    file = _file_of(key, name)
    try:
        return file.stat().st_mtime_ns if file else 0
    except OSError:
        return 0
