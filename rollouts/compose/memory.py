"""How much memory a plan would take, per rank, as lines for `--dry-run`; from the models' configurations alone.

What is counted, and by which formulas: docs/memory-and-speed.md. A dry run answers at once, so no hub is asked. Left
out: the arithmetic (`rollouts.training.estimates`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.errors import ModelError, RolloutsError
from rollouts.training.estimates import ModelSize, estimate_memory, model_size
from rollouts.training.models import adapters_beneath, load_config, resolve_device

if TYPE_CHECKING:
    from rollouts.compose.plan import Chosen, Plan

__all__ = ["memory_lines"]

_CORE = "rollouts-rl"
_ESTIMATED = ("fsdp", "torch")
_SHOWN_MIN = 0.01  # of the total; smaller parts are counted, but have no line
_DTYPES = ("bfloat16", "float16", "float32", "float64")


class _NotKnown(Exception):
    """Why there is no estimate, in words."""


def memory_lines(plan: Plan) -> list[str]:
    """Parameters and memory per rank, part by part; one line that says why, where they cannot be estimated.

    Raises ModelError and ConfigError for what the run would refuse.
    """
    training = plan.one("training")
    if not _is_core(training) or training.name not in _ESTIMATED:
        return [f"memory: not estimated: how the training backend {training.name} keeps a model is its own affair"]
    settings = plan.settings
    dtype = str(training.settings.get("dtype", "float32"))
    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r} (choices: {', '.join(_DTYPES)})")
    sharded = training.name == "fsdp"
    ranks = _ranks(training) if sharded else 1
    optimizer = str(training.settings.get("optimizer", "adamw"))
    beside = plan.companions
    try:
        size, positions = _size_of(
            settings.model, settings.lora_rank, str(training.settings.get("lora_targets", "all-linear"))
        )
        has_critic = beside is not None and beside.critic not in ("", "head")  # a head is nothing beside a model
        critic = _size_of(beside.critic)[0] if beside is not None and has_critic else None
        teacher = _size_of(beside.teacher)[0] if beside is not None and beside.teacher else None
    except _NotKnown as why:
        return [f"memory: cannot be estimated: {why}"]
    inference = plan.one("inference")
    has_engine = _is_core(inference) and inference.name == "hf"
    parts = estimate_memory(
        size,
        tokens=settings.tokens_per_microbatch,
        # Sharded weights that are trained stay float32, whatever layers compute in; a base that is only read does not.
        dtype="float32" if sharded and not size.lora else dtype,
        compute_dtype=dtype,
        optimizer=optimizer,
        shards=max(1, ranks // int(training.settings.get("replicas", 1) or 1)),
        sharded=sharded,
        gradient_checkpointing=bool(training.settings.get("gradient_checkpointing", False)),
        reference=beside is not None and beside.reference is not None,
        critic=critic,
        teacher=teacher,
        engine_copy=sharded and has_engine,
        whole_logits="logits" in plan.needs,
        cache_bytes=_cache_bytes(plan, size, positions, dtype) if has_engine else 0.0,
    )
    words = {
        "optimizer": f"moments of {optimizer}",
        "reference": "reference policy",
        "critic": f"critic ({_count(critic.parameters)})" if critic is not None else "",
        "teacher": f"teacher ({_count(teacher.parameters)})" if teacher is not None else "",
        "activations": f"activations of {settings.tokens_per_microbatch} tokens",
        "logits": "logits" if "logits" in plan.needs else "logits, a chunk",
        "unsharded": "layers put together",
        "engine copy": "the engine's copy",
        "kv cache": "keys and values, at most",
    }
    trained = f"{_count(size.trained)} of them trained" if size.lora else "all of them trained"
    return [f"parameters: {_count(size.parameters)}, {trained}", *_table(parts, words, ranks)]


def _table(parts: dict[str, float], words: dict[str, str], ranks: int) -> list[str]:
    """The total, and below it every part that is more than a hundredth of it."""
    total = sum(parts.values())
    digits = 2 if total >= 2**30 else 4
    shown = [(words.get(name, name), number) for name, number in parts.items() if number > _SHOWN_MIN * total]
    width = max(len(label) for label, _ in shown)
    of = f" of {ranks}" if ranks > 1 else ""
    return [
        f"memory per rank{of} (an estimate): {total / 2**30:.{digits}f} GiB",
        *(f"  {label:<{width}}  {number / 2**30:.{digits}f} GiB" for label, number in shown),
    ]


def _size_of(name: str, lora_rank: int = 0, lora_targets: str = "all-linear") -> tuple[ModelSize, int]:
    """The model's size, and how many positions it knows (0 where it does not say). Raises _NotKnown, and ModelError
    for a folder that holds no causal language model.
    """
    whole, _ = adapters_beneath(name)
    try:
        config: Any = load_config(whole, local_files_only=True)
    except ModelError as error:
        if not Path(whole).is_dir() and "--trust-remote-code" not in str(error):
            raise _NotKnown(
                f"the configuration of {whole} is not on this machine, and a dry run asks no hub; "
                f"`hf download {whole} config.json` fetches it"
            ) from error
        raise
    try:
        size = model_size(config, lora_rank=lora_rank, lora_targets=lora_targets)
    except RolloutsError:
        raise
    except ValueError as error:
        raise ModelError(f"{name} is no causal language model: {_first_line(error)}") from error
    except Exception as error:  # a model's own code may refuse to be built without memory in any way
        raise _NotKnown(f"{name} cannot be built without weights: {_first_line(error)}") from error
    return size, int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", 0) or 0)


def _cache_bytes(plan: Plan, size: ModelSize, positions: int, dtype: str) -> float:
    """What the embedded engine may keep: keys and values of the rows that are decoded, and those of the sessions that
    wait, either within its `cache_gib` and within as many rows as there can be.
    """
    settings, engine = plan.settings, plan.one("inference").settings
    most = float(engine.get("cache_gib", 4.0)) * 2**30
    live = max(settings.prompts_per_step * settings.samples_per_prompt, settings.eval_tasks)
    context = int(engine.get("context_tokens", 0) or 0)
    columns = min(context or positions, positions or context)
    if not columns:
        return 2 * most
    number = {"float64": 8, "float32": 4}.get(dtype, 2)
    row = columns * 2 * size.layers * size.kv_width * number
    return min(most, min(live, int(engine.get("rows_max", 256))) * row) + min(most, live * row)


def _ranks(training: Chosen) -> int:
    """As many as a launcher has started; else as the setting says, 0 being one a GPU."""
    import torch

    launched = os.environ.get("WORLD_SIZE", "")
    if launched.isdigit():
        return max(1, int(launched))
    gpus = torch.cuda.device_count() if resolve_device(str(training.settings.get("device", "auto"))) != "cpu" else 0
    return int(training.settings.get("processes", 0)) or max(1, gpus)


def _is_core(chosen: Chosen) -> bool:
    return chosen.ref is not None and chosen.ref.distribution == _CORE


def _count(parameters: int) -> str:
    """
    >>> _count(355_712), _count(72_703_307_776)
    ('0.36 M', '72.70 B')
    """
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
