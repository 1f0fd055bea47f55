"""What an exported model has besides its weights: a README.md about its training, the settings of its run for `rollouts
chat`, `serve` and `eval`, and the schemas of its tools. And its upload to the Hugging Face Hub.

`huggingface_hub` does the upload; it comes with transformers. Its environment variables apply: HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE. Left out: writing the model itself (`export`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from rollouts.config.convert import toml_key, toml_value
from rollouts.config.files import load_as_written, load_file
from rollouts.config.flags import Tree
from rollouts.config.names import names_file
from rollouts.config.resolving import EXPORTED, Resolved, resolve, run_settings_file
from rollouts.config.settings import Settings
from rollouts.errors import ConfigError, RunError, UserError, counted, first_line, named
from rollouts.models.folders import is_adapter, read_adapter_config
from rollouts.models.loading import BUNDLED
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import added_tools, choose, with_data
from rollouts.runs.environments import plan_environments
from rollouts.runs.folder import PHASES, SUMMARY, holds_run, read_config, read_json
from rollouts.runs.manifest import MANIFEST
from rollouts.runs.workers import Workers
from rollouts.terminal_text import number

CARD = "README.md"
_CORE = "mode model data system template max_tokens max_turns temperature seed eval_tasks".split()
_COMPONENTS = "env tool reward tool_parser".split()
_MODELS_MAX = 20  # the longest chain of runs that began with each other's models
_ABSOLUTE = re.compile(r"[/~]|\.\./|[A-Za-z]:[\\/]")  # or outside of the folder
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
    step = re.search(r"step_(\d+)$", checkpoint.name)
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
        "steps": int(step[1]) if step else summary.get("steps"),
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
    both = [("reward, sampled", "reward_mean"), ("reward, greedy", "greedy_mean")]
    rows = [[label, *(number(each.get(key)) for each in shown.values())] for label, key in both]
    parts = [each.get("parts") or {} for each in shown.values()]
    rows += [[part, *(number(each.get(part)) for each in parts)] for part in parts[-1]]
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


# --- how to use it ----------------------------------------------------------------------------------------------------


def write_usage(checkpoint: Path, folder: Path) -> str:
    """Write `rollouts.toml` and the schemas of the run's tools into `folder`.

    Returns what another machine needs besides the folder (the files of components), or why there are no schemas
    although a run wrote the checkpoint; empty if there is nothing to say.
    """
    file = run_settings_file(str(checkpoint))
    if file is None:
        return ""
    try:
        tree, source = load_file(file)
        written, _ = load_as_written(file)
        kept, files = portable(written | {"model": next(reversed(models_before(file)), "")})
        lines = [f"{toml_key(key)} = {toml_value(value)}" for key, value in kept.items()]
        head = "# Settings of the run that trained this model, for `rollouts chat`, `serve` and `eval`."
        (folder / EXPORTED).write_text("\n".join([head, *lines, ""]), encoding="utf-8")
        for alias, schemas in _schemas(resolve(tree, source, allow_left_out=True)).items():
            name = f"tools_{alias}.json" if alias else "tools.json"
            if schemas:
                (folder / name).write_text(json.dumps(schemas, indent=2) + "\n", encoding="utf-8")
    except UserError as error:
        return f"its environment cannot be loaded, so the schemas of its tools are not there: {first_line(error)}"
    if not files:
        return ""
    return f"to use its settings elsewhere, copy {' and '.join(files)} into the exported folder"


def portable(tree: Tree) -> tuple[Tree, list[str]]:
    """The settings of a run that `chat`, `serve` and `eval` need, without paths of this machine; and the files of code
    that they name.

    Left out are a model in a folder, files of rows, and absolute paths in the settings of components. A component in a
    file loses its absolute path: `./env.py:Env`.
    """
    files: dict[str, None] = {}

    def kept_of(value: Any, key: str = "name") -> Any:
        if isinstance(value, Mapping):
            return {name: kept_of(each, name) for name, each in value.items() if name == "name" or not _is_path(each)}
        if isinstance(value, list | tuple):
            return [kept_of(each, key) for each in value if key == "name" or not _is_path(each)]
        if key != "name" or not isinstance(value, str) or not names_file(value):
            return value
        path, _, attribute = value.rpartition(":")
        shown = f"./{PurePath(path).name}" if _ABSOLUTE.match(path) else path
        files[shown] = None
        return f"{shown}:{attribute}"

    data = tree.get("data")
    has_rows = _is_path(data.get("name") if isinstance(data, Mapping) else data)
    kept = {key: value for key, value in tree.items() if key in _CORE and not (key == "data" and has_rows)}
    kept |= {key: kept_of(tree[key]) for key in _COMPONENTS if key in tree}
    if not is_on_hub(kept["model"]) and kept["model"] not in BUNDLED:
        del kept["model"]
    return kept, list(files)


def models_before(file: Path | None) -> list[str]:
    """The model that the run with this settings file began from. If another run wrote that model, also the model that
    that run began from, and so on: the last one is the base model. Empty if the file of an exported model names none.
    """
    models: list[str] = []
    while file is not None and len(models) < _MODELS_MAX:
        model = load_file(file)[0].get("model", "" if file.name == EXPORTED else Settings.model)
        if not model:
            break
        models.append(str(model))
        file = run_settings_file(model)
    return models


def is_on_hub(model: str) -> bool:
    """Whether this is the name of a model on the hub, and not a folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", model) is not None and not Path(model).exists()


def _is_path(value: Any) -> bool:
    """Whether a setting is an absolute path, or a file of rows."""
    return isinstance(value, str) and bool(_ABSOLUTE.match(value) or PurePath(value).suffix in (".json", ".jsonl"))


def _schemas(run: Resolved) -> dict[str, list[dict[str, Any]]]:
    """The schemas of the tools of each environment, by its alias. Raises UserError."""
    manager = PluginManager()
    workers = Workers(run, manager)
    run = with_data(run, manager, workers)
    chosen = choose(manager, {key: run.components[key] for key in ("env", "tool")}, run.source, workers=workers)
    environments = plan_environments(manager, run.components["env"], chosen["env"], run.settings, run.source)
    tools = added_tools(chosen["tool"])
    return {env.alias: env._replace(tools=tools).schemas() for env in environments}


def usage_lines(settings: Settings, folder: Path, title: str) -> Iterator[str]:
    """The section of the card that asks the model with transformers, and shows it the tools in `folder`."""
    tools = next((file.name for file in sorted(folder.glob("tools*.json"))), None)
    system = f'{{"role": "system", "content": {json.dumps(settings.system)}}}, ' if settings.system else ""
    template = "".join(f"\n    {name}={value!r}," for name, value in settings.template.items())
    yield f"""\
## Use

```python
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

folder = Path({json.dumps(title)})  # this folder; huggingface_hub.snapshot_download("USER/MODEL") fetches it
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
messages = [{system}{{"role": "user", "content": "..."}}]
prompt = tokenizer.apply_chat_template(
    messages,
    tools={f'json.loads((folder / "{tools}").read_text())' if tools else None},{template}
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)
reply = model.generate(**prompt, max_new_tokens={settings.max_tokens})
print(tokenizer.decode(reply[0, prompt["input_ids"].shape[1]:]))
```

With rollouts and the environment installed: `rollouts chat {title}`.
"""
