"""Loads a causal language model or a tokenizer by name, with errors that say what to type.

A name is `tiny` (the model that comes with rollouts), a folder, or a repository of the Hugging Face hub, also at a
revision: `OWNER/NAME@REVISION`. A folder may contain a LoRA adapter with its adapter_config.json: one of our
checkpoints, or the result of peft, TRL and others. Then its base model is loaded, and the adapter is merged into it by
peft.

A model may bring its own Python code. Loading such a model fails outside of `remote_code(True)`; no question is asked
at the terminal. Not here: training adapters (`lora`), writing models
(`rollouts.training.weights.files`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from rollouts.errors import ConfigError, ModelError, first_line, named
from rollouts.models import revisions
from rollouts.models.folders import (
    ADAPTER_CONFIG,
    has_tokenizer,
    is_adapter,
    nearest_checkpoints,
    read_adapter_config,
    role_adapters,
)
from rollouts.models.futures import memory_cause
from rollouts.models.revisions import at_revision, loaded_commit, model_file
from rollouts.plugins.loading import require_packages

TINY_PATH = Path(__file__).resolve().parent.parent / "tiny"


class Bundled(NamedTuple):
    """A model that comes with rollouts: its folder, and a suitable learning rate."""

    path: Path
    lr: float


BUNDLED = {"tiny": Bundled(TINY_PATH, lr=3e-4)}
"""The models that come with rollouts, by name."""

_SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

_OF_TOKENIZERS = ("transformers",)
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PROBE_TOKENS = 16
# A fraction of the largest logit: float32 sums in another order differ much less, other weights much more.
_AGREEMENT = 1e-3
_HUB_SECONDS = 5.0  # for one request, before a model is downloaded
_loading = threading.RLock()  # transformers changes torch for the whole process while it loads a model
_remote_code_allowed = False  # for the whole process, because models are loaded in several threads


@contextlib.contextmanager
def remote_code(allowed: bool) -> Iterator[None]:
    """Whether models and tokenizers that are loaded in this block, in any thread, may run their own Python code."""
    global _remote_code_allowed
    before, _remote_code_allowed = _remote_code_allowed, allowed
    try:
        yield
    finally:
        _remote_code_allowed = before


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """A block that one thread of the process at a time enters, to load a model or change its layers. While transformers
    loads a model, it replaces torch's functions that initialize weights. Its lazy imports fail in two threads.
    """
    with _loading:
        yield


def is_remote_code_allowed() -> bool:
    """Whether this is inside `remote_code(True)`."""
    return _remote_code_allowed


# --- names ------------------------------------------------------------------------------------------------------------


def resolve_model_name(name: str) -> str:
    """The folder of `tiny`, an existing folder with a model or an adapter, or a hub name. Raises ModelError."""
    if name in BUNDLED:
        return str(BUNDLED[name].path)
    if not name:
        raise ModelError("no model was given; give a folder, a hub name, or `--model tiny`")
    path = Path(name).expanduser()
    if path.is_dir():
        if own := role_adapters(path):
            listed = ", ".join(map(str, own.values()))
            raise ModelError(f"{name} has an adapter for each role; give that of one role: {listed}")
        if not (path / "config.json").is_file() and not is_adapter(path):
            found = [*path.glob("*/config.json"), *path.glob(f"*/{ADAPTER_CONFIG}"), *path.glob("*/config.toml")]
            hint = "; give a folder that a run or save_pretrained wrote, a hub name, or `--model tiny`"
            if found:
                hint = f"; did you mean {path / max(entry.parent.name for entry in found)}?"
            raise ModelError(f"the folder {name} holds no config.json, so it is no transformers model{hint}")
        return str(path)
    if path.exists():
        raise ModelError(f"the model {name} is a file; give the folder that holds config.json and the weights")
    if "://" in name:
        hub = "/".join(name.rstrip("/").split("/")[-2:])
        raise ModelError(f"the model {name} is a web address; type its name on the hub: --model {hub}")
    repository, _ = revisions.split(name)
    above, _, last = repository.rpartition("/")
    if name.startswith((".", "/", "~", "runs/")) or repository.count("/") > 1 or "\\" in name:
        hint = nearest_checkpoints(path) or "give a folder that exists, a hub name, or `--model tiny`"
        raise ModelError(f"there is no folder {name}; {hint}")
    if above and Path(above).is_dir():
        what = f"there is no folder {name}, and {above} is a folder here, so this is no name of the hub"
        hint = nearest_checkpoints(path) or f"if it is meant as one, type: hf download {name} --local-dir {name}"
        raise ModelError(f"{what}; give a folder that exists; {hint}" if last else f"{what}; give a folder that exists")
    return name


def _check_hub(name: str) -> None:
    """Raise ModelError if a name of the hub is not in the cache, and the hub may not be asked, cannot be reached, or
    has no such model. Asks once: the loading functions of transformers ask many times, which takes a minute.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    if (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")).is_dir():
        return
    folder = f"there is no folder {name}, and as a name of the hub"
    hint = "give a folder that exists, or try `--model tiny`, which needs neither"
    if constants.HF_HUB_OFFLINE:
        what = f"{folder} it is not in the cache, and HF_HUB_OFFLINE is set"
        raise ModelError(f"{what}; download it first (`hf download {name}` with HF_HUB_OFFLINE=0), or {hint}")
    api = HfApi()
    try:
        api.model_info(name, timeout=_HUB_SECONDS)
    except GatedRepoError:
        return  # its own message says where to ask for access
    except RepositoryNotFoundError as error:
        raise ModelError(f"{folder}, {api.endpoint} does not know it; check the spelling, or {hint}") from error
    except HfHubHTTPError:
        return  # a mirror may only have files
    except Exception as error:  # the hub's HTTP library has its own errors
        what = f"{folder}, {api.endpoint} could not be reached ({named(error)})"
        raise ModelError(f"{what}; check the connection, {hint}") from error


def bundled(name: str) -> Bundled | None:
    """The bundled model with this name, or the bundled model with the same shape as the model in this folder (a
    checkpoint, an export, or an adapter). None for any other model. Only reads configurations.
    >>> bundled("tiny").lr
    0.0003
    """
    try:
        whole, _ = adapters_beneath(name)
    except ModelError:
        return None
    shape = _shape(Path(whole))
    return next((each for each in BUNDLED.values() if shape and shape == _shape(each.path)), None)


def _shape(folder: Path) -> list[Any]:
    """What distinguishes the model in a folder from models of other shapes; empty if its config.json is unreadable."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return [config.get(key) for key in _SHAPE]
    except (OSError, ValueError, AttributeError):
        return []


def adapters_beneath(name: str) -> tuple[str, tuple[str, ...]]:
    """The whole model behind a name, in a form for transformers, and the folders of the adapters to merge into it, the
    oldest first. No adapters if the name is that of a whole model. Raises ModelError.
    """
    folders: list[str] = []
    resolved = resolve_model_name(name)
    while is_adapter(resolved):
        if resolved in folders:
            what = f"{ADAPTER_CONFIG} in {resolved} names its own folder as the base model"
            raise ModelError(f"{what}; write the model that the adapter was trained on as base_model_name_or_path")
        folders.append(resolved)
        try:
            resolved = resolve_model_name(base_of(Path(resolved)))
        except ModelError as error:
            raise _of_adapter(folders[-1], error) from error
    return resolved, tuple(reversed(folders))


def is_stored_as(name: str, dtype: Any) -> bool:
    """Whether the weights of a model have this dtype in its files. False for a model with adapters, which are merged in
    float32.
    """
    whole, adapters = adapters_beneath(name)
    return not adapters and getattr(load_config(whole), "dtype", None) == dtype


def resolve_dtype(dtype: str, device: str) -> str:
    """The dtype of a trainer's computations: `auto` is bfloat16 on a GPU that has it, else float32."""
    if dtype != "auto":
        return dtype
    import torch

    has_half = resolve_device(device).startswith("cuda") and torch.cuda.is_bf16_supported()
    return "bfloat16" if has_half else "float32"


def resolve_device(device: str) -> str:
    """`auto` becomes cuda if available, else cpu. Raises ConfigError for a device that does not exist here."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no class for it
        what = f"the device {device!r} cannot be used here: {first_line(error)}"
        raise ConfigError(f"{what}; type auto, cpu, cuda or cuda:1") from error
    return device


def base_of(folder: Path) -> str:
    """The base model of an adapter: `tiny`, an existing folder, or a hub name, at the revision that the adapter names.

    `tiny` is found wherever the package is installed. If a run of mode sft+rl was moved, the checkpoint of its first
    phase is found: the adapter is in `OUT/rl/checkpoints/Y`, and the model in `OUT/sft/checkpoints/X`. Raises
    ModelError if there is no such model.
    """
    config = read_adapter_config(folder)
    given = config.get("base_model_name_or_path")
    if not given or not isinstance(given, str):
        raise ModelError(f"the adapter in {folder} does not say on which model it was trained; {_how_to_say(folder)}")
    path = Path(given).expanduser()
    if path.is_dir():
        return str(path)
    parts = PurePosixPath(given.replace("\\", "/")).parts
    if given == "tiny" or parts[-2:] == ("rollouts", "tiny"):
        return "tiny"
    above = folder.absolute().parents
    if parts[-3:-1] == ("sft", "checkpoints") and [each.name for each in above[:2]] == ["checkpoints", "rl"]:
        moved = above[2].joinpath(*parts[-3:])
        if moved.is_dir():
            return str(moved)
    if path.is_absolute() or len(parts) > 2 or given.startswith((".", "~")) or "\\" in given:
        what = f"the adapter in {folder} was trained on the model in {given}, and there is no such folder here"
        raise ModelError(f"{what}; put the model there, or {_how_to_say(folder)}")
    revision = config.get("revision")
    return f"{given}@{revision}" if revision and isinstance(revision, str) and "@" not in given else given


def _how_to_say(folder: str | Path) -> str:
    return f'write its folder or hub name into {Path(folder) / ADAPTER_CONFIG}, as "base_model_name_or_path"'


def _of_adapter(folder: str, error: ModelError) -> ModelError:
    """The error for an adapter's base model, which also names the adapter."""
    words = str(error)
    return error if folder in words else ModelError(f"the adapter in {folder} needs its model: {words}")


# --- loading ----------------------------------------------------------------------------------------------------------


@one_at_a_time()
def load_hf_model(name: str, *, dtype: str = "float32", device: str = "auto", attention: str = "auto") -> Any:
    """Load a causal LM in evaluation mode on `device`, with adapters merged in. `attention` is an implementation of
    transformers (auto: transformers chooses). Raises ModelError, ConfigError.
    """
    require_packages(f"the model {name}")
    import torch

    dtype = resolve_dtype(dtype, device)
    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r} (choices: auto, {', '.join(_DTYPES)})")
    place = resolve_device(device)  # before weights are read
    whole, adapters = adapters_beneath(name)
    try:
        model = _load_merged(whole, adapters, getattr(torch, dtype), **_attention_setting(attention))
    except ModelError as error:
        raise (_of_adapter(adapters[0], error) if adapters else error) from error
    try:
        return model.eval().to(place)
    except RuntimeError as error:
        if not (why := memory_cause(error)):
            raise
        what = f"the model {name} in {dtype} does not fit into the memory of {place}: {why}"
        raise ModelError(f"{what}\ntype --training.dtype bfloat16, or choose a smaller model") from None


@one_at_a_time()
def build_hf_model(name: str, *, dtype: str = "float32", attention: str = "auto") -> Any:
    """Make the model of `load_hf_model` on the CPU with uninitialized weights, which take no memory. For a rank that
    gets its shards from another one. Raises ModelError.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    whole, _ = adapters_beneath(name)
    settings: dict[str, Any] = {"dtype": getattr(torch, dtype), "trust_remote_code": _remote_code_allowed}
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(load_config(whole), **settings, **_attention_setting(attention))
    model.tie_weights()
    return model.eval()


def _attention_setting(name: str) -> dict[str, str]:
    return {} if name == "auto" else {"attn_implementation": name}


@one_at_a_time()
def load_tokenizer(name: str, **settings: Any) -> Any:
    """Load the tokenizer of a model, or of an adapter if it has one. `settings` are those of transformers, such as
    `local_files_only`. Its attribute `model_ends` has the ids that the model's files list as ends. Raises ModelError.
    """
    require_packages(f"the tokenizer of {name}", _OF_TOKENIZERS)
    from transformers import AutoTokenizer

    whole, adapters = adapters_beneath(str(next(iter(role_adapters(name).values()), name)))  # all have the same one
    own = [folder for folder in adapters if has_tokenizer(folder)]
    tokenizer = _from_pretrained(AutoTokenizer, own[-1] if own else whole, "tokenizer", **settings)
    tokenizer.model_ends = _model_ends(whole, **settings)
    return tokenizer


def _model_ends(whole: str, **settings: Any) -> tuple[int, ...]:
    """The ids that generation_config.json and config.json of a whole model list as ends. A file may be absent."""
    found = set[int]()
    for name in ("generation_config.json", "config.json"):
        if (path := model_file(whole, name, **settings)) is None:
            continue
        try:
            ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{name} of the model {whole} cannot be read: {error}; copy it from the hub again"
            ) from error
        found.update(each for each in (ends if isinstance(ends, list) else [ends]) if type(each) is int and each >= 0)
    return tuple(sorted(found))


@one_at_a_time()
def load_config(whole: str, **settings: Any) -> Any:
    """The transformers configuration of a whole model, from a folder or a hub name. Raises ModelError."""
    require_packages(f"the configuration of {whole}", _OF_TOKENIZERS)
    from transformers import AutoConfig

    return _from_pretrained(AutoConfig, whole, "configuration", **settings)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars for weight files, which would disturb our own progress line."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _load_merged(whole: str, adapters: tuple[str, ...], dtype: Any, **attention: str) -> Any:
    """Merge adapters into the model, one after the other. In half precision it merges in float32, and rounds the sum
    once.
    """
    import torch

    if not adapters or dtype not in (torch.bfloat16, torch.float16):
        model = _load_causal(whole, dtype=dtype, **attention)
        for folder in adapters:
            model = merge_adapter(model, folder)
        return model
    exact = _load_merged(whole, adapters, torch.float32)
    # transformers keeps some tensors of a half-precision model in float32. Copying preserves the types.
    half = _load_causal(whole, dtype=dtype, **attention)
    half.load_state_dict(exact.state_dict())
    half.name_or_path = half.config._name_or_path = exact.name_or_path
    return half


def _load_causal(resolved: str, **settings: Any) -> Any:
    """Load a whole model. It stores its absolute path, because adapters save it."""
    from transformers import AutoModelForCausalLM

    model = _from_pretrained(AutoModelForCausalLM, resolved, "model", **settings)
    if getattr(model, "_hf_peft_config_loaded", False):
        download = f"download it (`hf download {revisions.split(resolved)[0]} --local-dir adapter`) and give its folder"
        raise ModelError(f"the model {resolved!r} of the hub is a LoRA adapter; {download}")
    if Path(resolved).is_dir():
        model.name_or_path = model.config._name_or_path = str(Path(resolved).absolute())
    model.hub_commit = loaded_commit(resolved) or None  # adapters save it too
    return model


def _from_pretrained(loader: Any, resolved: str, what: str, **settings: Any) -> Any:
    from safetensors import SafetensorError

    try:
        if not Path(resolved).is_dir() and not settings.get("local_files_only"):
            _check_hub(revisions.split(resolved)[0])
        with no_progress_bars(), at_revision(resolved) as (name, revision):
            return loader.from_pretrained(name, trust_remote_code=_remote_code_allowed, **revision, **settings)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(_explain(resolved, what, error)) from error


def _explain(resolved: str, what: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        code = f"the {what} of {resolved} is Python code that comes with the model, and would run on this machine"
        return f"{code}; read it, then type --trust-remote-code true, or give another model"
    if Path(resolved).is_dir():
        of_tokenizers = ("token", "vocab", "merges", "spiece")
        has_one = any(each.name.startswith(of_tokenizers) for each in Path(resolved).iterdir())
        if what == "tokenizer" and not has_one and "tokenizer" in str(error):
            copies = "copy the tokenizer's files of the model into it, or try `--model tiny`"
            return f"the folder {resolved} holds no tokenizer (tokenizer.json); {copies}"
        whole = "give a folder that save_pretrained wrote, with the model and its tokenizer, or try `--model tiny`"
        return f"the {what} in {resolved} could not be loaded: {first_line(error).rstrip(':.')}; {whole}"
    part = "it" if what == "model" else f"its {what}"
    missing = f"the model {resolved!r} is no folder here, and {part} could not be loaded from the hub"
    hint = "give a folder with the model, or try `--model tiny`, which needs neither"
    return f"{missing}: {first_line(error)} Check the spelling and the connection, {hint}"


# --- adapters ---------------------------------------------------------------------------------------------------------


@one_at_a_time()
def merge_adapter(causal: Any, folder: str) -> Any:
    """Merge an adapter into the causal LM. Returns a plain model whose weights are all trainable. `causal` is consumed.

    Checks that the merged model gives the same logits as the model with the adapter beside it. Raises ModelError for
    unreadable files, for an adapter of another model, and for an adapter on a tied weight.
    """
    from safetensors import SafetensorError

    if not any((Path(folder) / name).is_file() for name in _ADAPTER_WEIGHTS):
        what = f"the adapter in {folder} has no {_ADAPTER_WEIGHTS[0]}"
        raise ModelError(f"{what}, so it cannot be loaded; give another folder")
    config = read_adapter_config(folder)
    if config.get("megatron_config"):
        # peft would import the module that the file names.
        raise ModelError(f"the adapter in {folder} is one of Megatron's, which is not supported; give another adapter")
    try:
        with no_peft_warnings():
            merged = _merge(causal, folder, config)
    except (OSError, SafetensorError, EOFError) as error:
        raise ModelError(f"the adapter in {folder} cannot be read: {first_line(error)}") from error
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:  # peft has no errors of its own
        lines = str(error).strip().splitlines()
        # The first line of torch's message only says that loading failed.
        detail = lines[1].strip() if lines[1:] and lines[0].startswith("Error(s) in loading") else first_line(error)
        base = config.get("base_model_name_or_path")
        what = f"the adapter in {folder} does not fit the model that it names, {base}: {detail}"
        raise ModelError(f"{what}\nif another model is meant, {_how_to_say(folder)}") from error
    merged.requires_grad_(True)  # peft has frozen it
    merged.name_or_path = merged.config._name_or_path = str(Path(folder).absolute())
    return merged.eval()


def tied_with_adapter(causal: Any) -> tuple[str, str] | None:
    """Two layers that share one weight, of which the first has an adapter (injected by peft). A merge would change the
    other layer too. None if there are no such layers.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in causal.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.removesuffix(".weight"))
    for layers in names.values():
        adapted = [layer for layer in layers if layer.endswith(".base_layer")]
        if adapted and len(layers) > 1:
            other = next(layer for layer in layers if layer != adapted[0])
            return adapted[0].removesuffix(".base_layer"), other.removesuffix(".base_layer")
    return None


@contextlib.contextmanager
def no_peft_warnings() -> Iterator[None]:
    """Hide warnings of peft about things that are handled elsewhere."""
    with warnings.catch_warnings():
        # GPT-2's linear layers are transposed. peft sets fan_in_fan_out itself, and warns about it.
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        # peft reads a property of the model that newer versions of transformers have renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        # Both are errors here.
        warnings.filterwarnings("ignore", message=".*missing adapter keys.*|.*tie_word_embeddings.*")
        yield


def probe_logits(causal: Any) -> Any:
    """The float32 logits [1, T, V] of a causal LM for a fixed sequence, without gradient."""
    import torch

    weight = causal.get_input_embeddings().weight
    ids = (torch.arange(_PROBE_TOKENS) * 7919 % weight.shape[0])[None].to(weight.device)
    attention = causal.config._attn_implementation
    if attention not in ("eager", "sdpa"):  # other implementations need a GPU, or compile
        causal.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return causal(input_ids=ids, use_cache=False).logits.float()
    finally:
        if attention not in ("eager", "sdpa"):
            causal.set_attn_implementation(attention)


def same_logits(one: Any, other: Any) -> bool:
    """Whether two models' `probe_logits` are equal up to rounding."""
    import torch

    largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(one, other, rtol=0.0, atol=_AGREEMENT * max(1.0, largest), equal_nan=True)


def _merge(causal: Any, folder: str, config: dict[str, Any]) -> Any:
    """Check that adapter and model have the same layers. Raises ModelError, ValueError, and what peft raises."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights

    peft_model = PeftModel.from_pretrained(causal, folder)
    if not hasattr(peft_model, "merge_and_unload"):
        kind = config.get("peft_type")
        raise ModelError(f"the adapter in {folder} is of the kind {kind}, which cannot be merged into weights")
    # peft ignores layers that only one of the two has.
    own = set(get_peft_model_state_dict(peft_model, save_embedding_layers=False))
    stored = set(load_peft_weights(folder, device="cpu"))
    strange = sorted(own - stored) or sorted(name for name in stored - own if "lora_" in name)
    if strange:
        raise ValueError(f"one of them has {strange[0]}, and the other does not")
    tied = tied_with_adapter(causal)
    if tied is not None:
        what = f"the adapter in {folder} changes {tied[0]}, and its model ties the weight of that layer to {tied[1]}"
        hint = "Serve the adapter beside its model (`rollouts export ... --adapter`), or train one without that layer"
        raise ModelError(f"{what}: merged, it would change both. {hint}")
    beside = probe_logits(causal)
    merged = peft_model.merge_and_unload(safe_merge=True)
    if not same_logits(beside, probe_logits(merged)):
        merging = f"merged into the weights of {config.get('base_model_name_or_path')}, the adapter in {folder}"
        raise ModelError(f"{merging} gives other logits than beside them, so this version of peft cannot merge it")
    return merged
