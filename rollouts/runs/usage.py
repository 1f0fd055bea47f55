"""How to use an exported model as its run did: the run's environment, its tools as JSON, and a snippet for the card.

An exported folder has `rollouts.toml`, the settings of the run for `rollouts chat`, `serve` and `eval`, and for each
environment with tools a file of their schemas. Not here: the rest of the card (`publish`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from rollouts.config.convert import toml_key, toml_value
from rollouts.config.files import load_as_written, load_file
from rollouts.config.flags import Tree
from rollouts.config.names import names_file
from rollouts.config.resolving import EXPORTED, Resolved, resolve, run_settings_file
from rollouts.config.settings import Settings
from rollouts.errors import UserError, first_line
from rollouts.models.loading import BUNDLED
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import added_tools, choose, with_data
from rollouts.runs.environments import plan_environments
from rollouts.runs.workers import Workers

_CORE = "mode model data system template max_tokens max_turns temperature seed eval_tasks".split()
_COMPONENTS = "env tool reward tool_parser".split()
_MODELS_MAX = 20  # the longest chain of runs that began with each other's models
_ABSOLUTE = re.compile(r"[/~]|\.\./|[A-Za-z]:[\\/]")  # or outside of the folder


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
