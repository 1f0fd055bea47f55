"""manifest.json: what this run was made of, so that a difference between two runs can be explained."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Mapping
from typing import Any

from rollouts import __version__
from rollouts.compose.evaluation_plan import EvaluationPlan
from rollouts.compose.plan import Plan
from rollouts.config.secrets import command_without_secrets
from rollouts.plugins.index import ComponentRef
from rollouts.run_folder import RunFolder

__all__ = ["make_manifest", "manifest_to_change", "resumed_manifest", "unreadable_words"]

MANIFEST = "manifest.json"

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "trio", "msgspec", "pluggy", "numpy")


def make_manifest(plan: Plan | EvaluationPlan) -> dict[str, Any]:
    """Versions of every distribution that takes part, the seed, the hardware, and the command that was typed."""
    return {
        "rollouts": __version__,
        "seed": plan.settings.seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command_without_secrets(sys.argv),
        "python": platform.python_version(),
        "components": [
            {"kind": ref.kind, "name": ref.name, "distribution": ref.distribution, "version": ref.version}
            for ref in _references(plan)
        ],
        "distributions": {name: version for name in LIBRARIES if (version := _version(name))},
        "hardware": _hardware(),
    }


def resumed_manifest(manifest: Mapping[str, Any], plan: Plan, step: int, checkpoint: str | None) -> dict[str, Any]:
    """The run's manifest with what it was resumed with: when, after which step, from which checkpoint (None: from the
    beginning), the command and the versions.
    """
    now = make_manifest(plan)
    again = {"when": now["started"], "step": step, "checkpoint": checkpoint} | {
        name: now[name] for name in ("command", "rollouts", "python", "components", "distributions", "hardware")
    }
    return {**(manifest or now), "resumed": [*manifest.get("resumed", []), again]}


def manifest_to_change(folder: RunFolder) -> dict[str, Any] | None:
    """The run's manifest; empty where there is none, and None where there is one that cannot be read: to write it anew
    would lose what it holds.
    """
    found = folder.read_json(MANIFEST)
    return found or (None if os.path.lexists(folder.path / MANIFEST) else {})


def unreadable_words(folder: RunFolder) -> str:
    """That the manifest cannot be read, and what to do."""
    return (
        f"warning: {folder.shown / MANIFEST} cannot be read. It is left as it is, and does not say which "
        "checkpoint is the last one; mend the file, or move it away"
    )


def _references(plan: Plan | EvaluationPlan) -> list[ComponentRef]:
    """Every component of the run, those of later stages too; each once, in the order of the settings."""
    parts = [plan.chosen, *plan.stages_chosen[1:]]
    found = [each.ref for chosen in parts for several in chosen.values() for each in several]
    found += [env.curriculum.ref for env in plan.environments if env.curriculum is not None]
    return list(dict.fromkeys(ref for ref in found if ref is not None))


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
