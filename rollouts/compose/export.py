"""A checkpoint becomes a model that others serve: adapters merged, whole weights, tokenizer and template beside them.

The folder appears under its name in one rename, whole, or not at all. Left out: other formats than transformers' (which
vLLM and SGLang load as well) and peft's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.disk import sync_file, sync_folder
from rollouts.errors import ConfigError, ModelError, OutputError
from rollouts.training.adapters import ADAPTER_CONFIG, has_tokenizer, is_adapter, read_adapter_config
from rollouts.training.backends.checkpoint_files import STATE, check_folder, last_checkpoint
from rollouts.training.backends.checkpoint_writing import open_as_its_folder
from rollouts.training.models import adapters_beneath, load_config, load_hf_model, load_tokenizer, no_progress_bars

__all__ = ["Exported", "export", "find_checkpoint"]

_ADAPTER_FILES = ("adapter_*", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")


class Exported(NamedTuple):
    """What was written: from which folder, of which kind (`full` or `adapter`), and how large it is. `merged` counts
    the adapters that went into the weights.
    """

    source: Path
    out: Path
    kind: str
    dtype: str
    merged: int
    total_bytes: int
    has_tokenizer: bool

    def words(self) -> str:
        """One line for a person."""
        what = "the adapter alone" if self.kind == "adapter" else f"a whole model in {self.dtype}"
        merged = f", {self.merged} adapter{'s' if self.merged > 1 else ''} merged in" if self.merged else ""
        without = "" if self.has_tokenizer else "; there was no tokenizer beside it, so there is none"
        return f"{self.source} -> {self.out}: {what}{merged}, {self.total_bytes / 1e6:.1f} MB{without}"


def export(source: str, out: str, *, dtype: str = "", adapter: bool = False) -> Exported:
    """Write the model of a run, a checkpoint or an adapter to the new folder `out`.

    `dtype` "" is that of the stored weights, for an adapter that of the model beneath it. `adapter`: only the adapter,
    in peft's format. Raises OutputError where `out` exists or cannot be written, ConfigError, ModelError.
    """
    target = Path(out)
    if target.exists():
        raise OutputError(f"{out} exists already and is kept as it is; give the name of a new folder")
    if adapter and dtype:
        raise ConfigError(
            "--dtype is for whole models, and --adapter writes the adapter as it is; leave one of them out"
        )
    folder = find_checkpoint(source)
    if (folder / STATE).exists():
        check_folder(str(folder))
    with _new_folder(target) as inside:
        if adapter:
            kind, chosen, merged, beside = "adapter", "", 0, _write_adapter(folder, inside)
        else:
            kind = "full"
            chosen, merged, beside = _write_model(folder, inside, dtype)
        total = sum(file.stat().st_size for file in inside.rglob("*") if file.is_file())
    return Exported(folder, target, kind, chosen, merged, total, beside)


def find_checkpoint(source: str) -> Path:
    """The folder with the weights: `source` itself, or the last checkpoint of the run in it. Raises ConfigError."""
    path = Path(source).expanduser()
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"{source} {what}; give the folder of a run, a checkpoint, a model or a LoRA adapter")
    if (path / "config.json").is_file() or is_adapter(path):
        return path
    phases = [path / phase for phase in ("rl", "sft") if (path / phase).is_dir()]  # of a run of mode sft+rl
    for run in (*phases, path):
        found = last_checkpoint(run / "checkpoints") or last_checkpoint(run)
        if found is not None:
            return found
    if (path / "config.toml").is_file():
        raise ConfigError(f"the run in {source} has no checkpoint yet; `rollouts resume {source}` goes on with it")
    raise ConfigError(
        f"the folder {source} holds no run, no checkpoint, no model and no adapter; give a folder that a run wrote, "
        "such as runs/first or runs/first/checkpoints/step_000120"
    )


def _write_model(folder: Path, inside: Path, dtype: str) -> tuple[str, int, bool]:
    """The whole model and its tokenizer; returns the dtype, how many adapters were merged, whether a tokenizer was
    there.
    """
    whole, adapters = adapters_beneath(str(folder))
    chosen = dtype or _stored_dtype(whole)
    model = load_hf_model(str(folder), dtype=chosen, device="cpu")
    tokenizer = _tokenizer(str(folder))
    with no_progress_bars():
        model.save_pretrained(str(inside))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(inside))
    return chosen, len(adapters), tokenizer is not None


def _write_adapter(folder: Path, inside: Path) -> bool:
    """The adapter's own files, with the place of its model as it is now; returns whether a tokenizer was there."""
    if not is_adapter(folder):
        raise ConfigError(f"{folder} holds a whole model and no adapter; leave --adapter out")
    config = read_adapter_config(folder)
    files = sorted({file for pattern in _ADAPTER_FILES for file in folder.glob(pattern) if file.is_file()})
    for file in files:
        shutil.copyfile(file, inside / file.name)
    whole, adapters = adapters_beneath(str(folder))
    base = adapters[-2] if len(adapters) > 1 else whole
    if Path(base).is_dir():
        config["base_model_name_or_path"] = str(Path(base).absolute())
        (inside / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return any(file.name.startswith("tokenizer") for file in files)


def _stored_dtype(whole: str) -> str:
    """The type of a model's weights as its config.json says it."""
    return str(getattr(load_config(whole), "dtype", None) or "float32").removeprefix("torch.")


def _tokenizer(name: str) -> Any:
    """None where there is none: weights alone are a model too."""
    whole, adapters = adapters_beneath(name)
    if Path(whole).is_dir() and not any(has_tokenizer(folder) for folder in (whole, *adapters)):
        return None  # transformers would make one up for some architectures
    try:
        return load_tokenizer(name)
    except ModelError:
        return None


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target, which gets its name at the end; nothing stays where something fails.

    Raises OutputError where the disk refuses.
    """
    from safetensors import SafetensorError

    temporary = target.with_name(f".{target.name}.writing-{os.getpid()}")
    made = [each for each in target.absolute().parents if not each.exists()]
    done = False
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                open_as_its_folder(file)
                sync_file(file)
        if target.exists():
            raise OutputError(f"{target} exists by now and is kept as it is; give the name of a new folder")
        sync_folder(temporary)
        os.rename(temporary, target)
        done = True
        sync_folder(target.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OutputError(f"{target} cannot be written: {reason}; give another folder, or make room") from error
    finally:
        if not done:
            shutil.rmtree(temporary, ignore_errors=True)
            for parent in made:
                with contextlib.suppress(OSError):  # something else has been written there meanwhile
                    parent.rmdir()
