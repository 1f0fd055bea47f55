"""manifest.json: what this run was made of, so that a difference between two runs can be explained."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.config.secrets import command_without_secrets
from rollouts.plugins.index import ComponentRef
from rollouts.runs.folder import RunFolder, read_json
from rollouts.version import __version__

MANIFEST = "manifest.json"

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "trio", "msgspec", "pluggy", "numpy")


def make_manifest(seed: int, components: Sequence[ComponentRef]) -> dict[str, Any]:
    """Versions of every distribution that takes part, the seed, the hardware, and the command that was typed."""
    return {
        "rollouts": __version__,
        "seed": seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command_without_secrets(sys.argv),
        "python": platform.python_version(),
        "components": [
            {"kind": ref.kind, "name": ref.name, "distribution": ref.distribution, "version": ref.version}
            for ref in components
        ],
        "distributions": {name: version for name in LIBRARIES if (version := _version(name))},
        "hardware": _hardware(),
    }


def resumed_manifest(
    before: dict[str, Any], now: Mapping[str, Any], step: int, checkpoint: str | None
) -> dict[str, Any]:
    """The run's manifest with what it was resumed with: when, after which step, from which checkpoint (None: from the
    beginning), the command and the versions `now`.
    """
    again = {"when": now["started"], "step": step, "checkpoint": checkpoint} | {
        name: now[name] for name in ("command", "rollouts", "python", "components", "distributions", "hardware")
    }
    return {**(before or now), "resumed": [*before.get("resumed", []), again]}


def update_manifest(folder: RunFolder, change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
    """Write the run's manifest anew, changed. One that cannot be read stays as it is, since a new one would lose what
    it holds; a note says so.
    """
    found = read_json(folder.path / MANIFEST)
    if not found and os.path.lexists(folder.path / MANIFEST):
        return [
            f"warning: {folder.shown / MANIFEST} cannot be read. It is left as it is, and does not say which "
            "checkpoint is the last one; mend the file, or move it away"
        ]
    folder.write_json(MANIFEST, change(found))
    return []


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware() -> dict[str, Any]:
    """What the run computes on. An evaluation that has a server compute needs no torch, and has none loaded."""
    here = {"system": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is None:
        return here
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return here | {"torch_threads": torch.get_num_threads(), "gpus": gpus}
