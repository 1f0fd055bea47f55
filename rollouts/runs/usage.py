"""How to use an exported model as its run did: the run's environment, its tools as JSON, and a snippet for the card.

An exported folder has `rollouts.toml`, the settings of the run for `rollouts chat`, `serve` and `eval`, and for each
environment with tools a file of their schemas. Not here: the rest of the card (`publish`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollouts.config.convert import toml_key, toml_value
from rollouts.config.files import load_file
from rollouts.config.resolving import EXPORTED, Resolved, resolve, run_settings_file
from rollouts.config.settings import Settings
from rollouts.errors import UserError, first_line
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import added_tools, choose, with_data
from rollouts.runs.environments import plan_environments

KEPT = """
mode model env tool reward data system template loss lora_rank max_tokens max_turns temperature seed eval_tasks
""".split()
"""The settings of the run in an exported folder: no addresses, and no paths but those of models, code and data."""


def write_usage(checkpoint: Path, folder: Path) -> str:
    """Write `rollouts.toml` and the schemas of the run's tools into `folder`. Returns the reason if there are no
    schemas although a run wrote the checkpoint, else an empty text.
    """
    file = run_settings_file(str(checkpoint))
    if file is None:
        return ""
    try:
        tree, source = load_file(file)
        kept = [f"{toml_key(key)} = {toml_value(value)}" for key, value in tree.items() if key in KEPT]
        head = "# Settings of the run that trained this model, for `rollouts chat`, `serve` and `eval`."
        (folder / EXPORTED).write_text("\n".join([head, *kept, ""]), encoding="utf-8")
        for alias, schemas in _schemas(resolve(tree, source, allow_left_out=True)).items():
            name = f"tools_{alias}.json" if alias else "tools.json"
            if schemas:
                (folder / name).write_text(json.dumps(schemas, indent=2) + "\n", encoding="utf-8")
    except UserError as error:
        return f"its environment cannot be loaded, so the schemas of its tools are not there: {first_line(error)}"
    return ""


def _schemas(run: Resolved) -> dict[str, list[dict[str, Any]]]:
    """The schemas of the tools of each environment, by its alias. Raises UserError."""
    manager = PluginManager()
    run = with_data(run, manager)
    chosen = choose(manager, {key: run.components[key] for key in ("env", "tool")}, run.source)
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
