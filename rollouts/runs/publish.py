"""Uploads an exported model to the Hugging Face Hub, and writes a README.md about its training.

`huggingface_hub` does the upload; it comes with transformers. Its environment variables apply: HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE. Left out: writing the model itself (`export`).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.config.files import load_as_written
from rollouts.config.resolving import EXPORTED, Resolved, resolve, run_settings_file
from rollouts.errors import ConfigError, RunError, UserError, counted, named
from rollouts.models.folders import is_adapter, read_adapter_config
from rollouts.models.loading import BUNDLED
from rollouts.runs.folder import PHASES, SUMMARY, holds_run, read_config, read_json
from rollouts.runs.manifest import MANIFEST
from rollouts.runs.usage import is_on_hub, models_before, usage_lines

CARD = "README.md"
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRAINED = {
    "sft": "demonstrations (sft)",
    "rl": "reinforcement (rl)",
    "sft+rl": "demonstrations, then reinforcement (sft+rl)",
}


def check_push(name: str) -> None:
    """Check before anything is written that an upload can work. Makes no network requests.

    Raises ConfigError if the name is not valid, if HF_HUB_OFFLINE is set, or if there is no token.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"--push {name}: {error}\ntype the name as USER/MODEL, such as --push ada/calculator"
        ) from error
    if constants.HF_HUB_OFFLINE:
        variable = next((each for each in _OFFLINE if os.environ.get(each)), _OFFLINE[0])
        raise ConfigError(
            f"--push {name}: the variable {variable} is set, so nothing may be sent to the hub\n"
            f"type: unset {variable}, or leave --push out"
        )
    if not get_token():
        raise ConfigError(
            f"--push {name}: there is no token for {constants.ENDPOINT}\n"
            "type: hf auth login, or export HF_TOKEN=... with a token that may write"
        )


def push(folder: Path, name: str, *, is_public: bool = False) -> str:
    """Upload the folder to the repository `name`, which is made if it does not exist; returns its address.

    A new repository is private unless `is_public`. An existing repository keeps its visibility and its other files.
    Raises RunError if the hub refuses or cannot be reached, and KeyboardInterrupt. Both messages say how to upload the
    folder, which does not change.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()
    privacy = "--no-private" if is_public else "--private"
    retry = f"{folder} is complete\nto upload it, type: hf upload {name} {shlex.quote(str(folder))} . {privacy}"
    api = HfApi()
    try:
        repository = api.create_repo(name, private=not is_public, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            commit_message="A model trained with rollouts",
        )
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"interrupted: the upload to {name} is not complete; {retry}") from error
    except Exception as error:  # the hub's HTTP library and its helpers raise their own errors
        raise RunError(f"the upload to {name} failed: {_words_of(error, api.endpoint)}\n{retry}") from error
    return str(repository)


def _words_of(error: Exception, endpoint: str) -> str:
    """The hub's error in one line, with advice if there is advice for its status."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = str(getattr(error, "server_message", None) or "") or named(error).strip().splitlines()[0]
    if status in (401, 403):
        return f"{endpoint} refuses the token (status {status}: {said}); see whether it may write there"
    if status is None:
        return f"{endpoint} cannot be reached, or broke off ({said})"
    return f"{endpoint} answered with status {status}: {said}"


# --- the model card -------------------------------------------------------------------------------------------------


def model_card(checkpoint: Path, title: str, folder: Path | None = None) -> str:
    """The README.md of an exported model: its base model, how a run trained it, how to ask it, and the rewards. Empty
    if no run wrote the checkpoint. `folder` has the exported files.
    """
    file = run_settings_file(str(checkpoint))
    if file is None:
        return ""
    first = _supervised_phase(file.parent)
    summary, manifest = read_json(file.parent / SUMMARY), read_json(file.parent / MANIFEST)
    try:
        run = resolve(*load_as_written(file), allow_left_out=True)
    except UserError as error:  # for example, the run is of another version of rollouts
        facts, base, usage = {"settings": f"they cannot be read ({str(error).splitlines()[0]})"}, "", list[str]()
    else:
        chain = [_shown(model) for model in models_before(file)]
        base = next(reversed(chain), "")
        facts = _facts(run, checkpoint, summary, chain, first)
        usage = list(usage_lines(run.settings, folder or checkpoint, title))
    head = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- rollouts"]
    head += [f"base_model: {base}"] if is_on_hub(base) else []
    lines = ["---", *head, "---", "", f"# {title}", "", "A language model that was trained with rollouts.", ""]
    if folder is not None and is_adapter(folder):
        needed = read_adapter_config(folder)["base_model_name_or_path"]
        lines += [f"This folder has only the adapter. It needs the base model `{needed}`.", ""]
    lines += [*_table("", "", facts), "", *usage, *_reward_lines(checkpoint, summary, _before_sft(file.parent, first))]
    versions = {"rollouts": manifest.get("rollouts"), "Python": manifest.get("python")}
    versions |= manifest.get("distributions") or {}
    lines += ["## Versions", "", *_table("package", "version", versions)]
    return "\n".join(lines) + "\n"


def _supervised_phase(run: Path) -> Path | None:
    """The folder of the supervised phase, if the run is the reinforcement of mode sft+rl."""
    last, first = (run.parent / phase for phase in PHASES)
    return first if run == last and holds_run(run.parent) and holds_run(first) else None


def _before_sft(run: Path, sft: Path | None) -> dict[str, Any] | None:
    """The evaluation before the supervised phase; None if there is none, or if it was of other tasks."""
    if sft is None:
        return None
    of_tasks = [{key: read_config(each)[0].get(key) for key in ("env", "eval_tasks")} for each in (run, sft)]
    found: dict[str, Any] | None = (read_json(sft / SUMMARY).get("evaluation") or {}).get("before")
    return found if of_tasks[0] == of_tasks[1] else None


def _facts(
    run: Resolved, checkpoint: Path, summary: Mapping[str, Any], chain: Sequence[str], sft: Path | None
) -> dict[str, Any]:
    settings = run.settings
    number = re.search(r"step_(\d+)$", checkpoint.name)
    trains = Path(run.source.path).name != EXPORTED  # the settings of an exported model say less
    chosen = {key: " + ".join(each.name for each in run.components[key]) for key in ("env", "loss")}
    return {
        "base model": chain[-1] if chain else None,
        "begins from": ", which begins from ".join(chain) if len(chain) > 1 else None,
        "environment": chosen["env"],
        "trained by": _TRAINED.get(mode := "sft+rl" if sft else settings.mode, mode),
        "loss": chosen["loss"] if trains else None,
        "LoRA rank": settings.lora_rank or None,
        "supervised steps": read_json(sft / SUMMARY).get("steps") if sft else None,
        "steps": int(number[1]) if number else summary.get("steps"),
        "seed": settings.seed,
    }


def _shown(model: str) -> str:
    """A model in words, without the folders above the run that wrote it."""
    if model in BUNDLED:
        return f"{model} (comes with rollouts)"
    file = run_settings_file(model)
    return str(Path(model).relative_to(file.parent.parent)) if file and Path(model).is_absolute() else model


def _reward_lines(checkpoint: Path, summary: Mapping[str, Any], before_sft: Mapping[str, Any] | None) -> Iterator[str]:
    """The rewards of held-out tasks; the last ones only for the checkpoint that was evaluated. `before_sft` is the
    evaluation before the supervised phase, if there is one.
    """
    evaluation = summary.get("evaluation") or {}
    before, after = evaluation.get("before"), evaluation.get("after")
    is_last = Path(str(summary.get("checkpoint") or "")).name == checkpoint.name
    if not before or not after or not is_last:
        return
    shown = {"before": before, "after": after}
    if before_sft:
        shown = {"before": before_sft, "after SFT": before, "after RL": after}
    rows = [
        [label, *(_number(each.get(key)) for each in shown.values())]
        for label, key in (("reward, sampled", "reward_mean"), ("reward, greedy", "greedy_mean"))
    ]
    rows += [
        [part, *(_number((each.get("parts") or {}).get(part)) for each in shown.values())]
        for part in after.get("parts") or {}
    ]
    tasks = counted(after.get("tasks"), "held-out task")
    yield from ("## Rewards", "", f"On {tasks}. Before: the model that the run begins from.", "")
    yield from (
        f"| | {' | '.join(shown)} |",
        f"|---|{'---:|' * len(shown)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    )
    yield ""


def _table(first: str, second: str, rows: Mapping[str, Any]) -> list[str]:
    shown = [f"| {key} | {value} |" for key, value in rows.items() if value is not None]
    return [f"| {first} | {second} |", "|---|---|", *shown]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
