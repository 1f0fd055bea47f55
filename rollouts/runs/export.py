"""Turns a checkpoint into a model for servers: adapters merged, with whole weights, tokenizer and template.

The folder gets its name by one rename when it is complete. Not here: other formats than transformers' (which vLLM and
SGLang load as well) and peft's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from rollouts.disk import new_folder
from rollouts.errors import ConfigError, ModelError, OutputError, counted, first_line
from rollouts.models import folders, loading
from rollouts.plugins.loading import require_packages
from rollouts.runs.earlier_run import find_checkpoint
from rollouts.runs.publish import CARD, model_card, write_usage
from rollouts.training.weights.files import ModelFiles, write_weights
from rollouts.training.weights.store import STATE, check_folder

_ADAPTER_FILES = ("adapter_*", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")


class Exported(NamedTuple):
    """An export: the source folder, the kind (`full` or `adapter`), and the size in bytes. `merged` is the number of
    adapters that were merged into the weights. `problem` is what the folder lacks, if it lacks anything. `base` is the
    model that an adapter alone needs.
    """

    source: Path
    out: Path
    kind: str
    dtype: str
    merged: int
    total_bytes: int
    has_tokenizer: bool
    problem: str = ""
    base: str = ""

    def words(self) -> str:
        """Describe the export in one line."""
        alone = f"the adapter alone, which needs the base model {self.base}"
        what = alone if self.kind == "adapter" else f"a whole model in {self.dtype}"
        merged = f", {counted(self.merged, 'adapter')} merged in" if self.merged else ""
        without = "" if self.has_tokenizer else "; there was no tokenizer beside it, so there is none"
        return f"{self.source} -> {self.out}: {what}{merged}, {self.total_bytes / 1e6:.1f} MB{without}" + (
            self.problem and f"; {self.problem}"
        )


def export(source: str, out: str, *, dtype: str = "", adapter: bool = False) -> Exported:
    """Write the model of a run, a checkpoint or an adapter to the new folder `out`.

    `dtype` "": that of the stored weights, or for an adapter, of its base model. `adapter`: only the adapter, in peft's
    format. A README.md says how the run trained it and how to ask it; tools.json has the schemas of the run's tools.
    Before the folder gets its name, the model is loaded from it and its logits are compared. Raises OutputError if
    `out` exists or cannot be written; ConfigError; ModelError.
    """
    target = Path(out)
    if target.exists():
        raise OutputError(f"{out} exists already and is not overwritten; give the name of a new folder")
    if adapter and dtype:
        raise ConfigError(
            "--dtype is for whole models, and --adapter writes the adapter as it is; leave one of them out"
        )
    folder = find_checkpoint(source)
    if (folder / STATE).exists():
        check_folder(str(folder))
    try:
        with new_folder(target, replaces=False) as inside:
            written = _write_adapter(folder, inside) if adapter else _write_model(folder, inside, dtype)
            problem = write_usage(folder, inside)
            if card := model_card(folder, target.name, inside):
                (inside / CARD).write_text(card, encoding="utf-8")
            total = sum(file.stat().st_size for file in inside.rglob("*") if file.is_file())
    except OSError as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise OutputError(f"{target} cannot be written: {reason}; give another folder, or make room") from error
    return written._replace(out=target, total_bytes=total, problem=problem)


def model_of_role(source: str, role: str) -> str:
    """The adapter of a role in `source`, the folder of a run or a checkpoint. If roles have no adapters of their own,
    there must be no `role`, and the result is `source`. Raises ConfigError.
    """
    own = folders.role_adapters(find_checkpoint(source)) if role or Path(source).expanduser().is_dir() else {}
    if role in own or (not own and not role):
        return str(own.get(role, source))
    if not own:
        raise ConfigError(f"--role {role}: {source} has one model for all roles; leave --role out")
    asked = f"--role {role}" if role else "which role?"
    raise ConfigError(f"{asked}: {source} has an adapter for each of {', '.join(own)}; type --role {next(iter(own))}")


def _write_model(folder: Path, inside: Path, dtype: str) -> Exported:
    """The whole model and its tokenizer."""
    require_packages(f"the model in {folder}")
    whole, adapters = loading.adapters_beneath(str(folder))
    chosen = dtype or str(getattr(loading.load_config(whole), "dtype", None) or "float32").removeprefix("torch.")
    model = loading.load_hf_model(str(folder), dtype=chosen, device="cpu")
    wanted = loading.probe_logits(model)
    # If a folder has no tokenizer, transformers would make one up for some architectures.
    own = not Path(whole).is_dir() or any(folders.has_tokenizer(each) for each in (whole, *adapters))
    has = write_weights(inside, "full", model.state_dict(), ModelFiles(model, source=str(folder) if own else None))
    del model  # memory need not have room for two models
    again = loading.load_hf_model(str(inside), dtype=chosen, device="cpu")
    if not loading.same_logits(wanted, loading.probe_logits(again)):
        raise ModelError(
            f"the exported model, loaded again, gives other logits than the model in {folder}, so nothing was "
            "exported; check the disk, and which version of transformers wrote the checkpoint"
        )
    return Exported(folder, inside, "full", chosen, len(adapters), 0, has)


def _write_adapter(folder: Path, inside: Path) -> Exported:
    """Write the adapter's own files, with the current path of its base model."""
    if not folders.is_adapter(folder):
        raise ConfigError(f"{folder} holds a whole model and no adapter; leave --adapter out")
    config = folders.read_adapter_config(folder)
    files = {file for pattern in _ADAPTER_FILES for file in folder.glob(pattern) if file.is_file()}
    for file in files:
        shutil.copyfile(file, inside / file.name)
    whole, adapters = loading.adapters_beneath(str(folder))
    base = adapters[-2] if len(adapters) > 1 else whole
    if Path(base).is_dir():
        config["base_model_name_or_path"] = str(Path(base).absolute())
        (inside / folders.ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    has = any(file.name.startswith("tokenizer") for file in files)
    return Exported(folder, inside, "adapter", "", 0, 0, has, base=config["base_model_name_or_path"])
