"""A plan in words, without loading weights: what `--dry-run` prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.config import to_toml
from rollouts.config.settings import COMPONENT_KINDS
from rollouts.env.authoring import tools_of
from rollouts.errors import ModelError
from rollouts.run_folder import check_out
from rollouts.training.algorithms.algorithm import function_label
from rollouts.training.datasets.buffer import DataBuffer
from rollouts.training.models import resolve_model_name

if TYPE_CHECKING:
    from rollouts.compose.plan import Chosen, Plan

__all__ = ["describe", "memory_words"]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def describe(plan: Plan) -> str:
    """Settings, components with their distributions, what the loss needs, and the memory of weights and optimizer.

    Draws the first tasks and reads the model's configuration; raises the first UserError that a run would meet there.
    """
    if plan.settings.out:
        check_out(plan.settings.out)
    held_out = plan.eval_tasks()
    if plan.settings.mode == "rl":
        exclude = frozenset(task.key for task in held_out)
        DataBuffer(plan.training_source(), seed=plan.settings.seed, exclude=exclude).get_prompts(1)
    else:
        next(iter(plan.demonstrations()), None)
    algorithm = plan.algorithm
    terms = " + ".join(
        f"{'' if term.coefficient == 1 else f'{term.coefficient:g} * '}{function_label(term.function)}"
        for term in algorithm.terms
    )
    lines = [
        to_toml(plan.resolved).rstrip(),
        "",
        "# Composed",
        *(_component_line(key, each) for key in COMPONENT_KINDS for each in plan.chosen[key]),
        f"tools: {', '.join(tool.name for tool in tools_of(plan.make_env())) or 'none'}",
        f"held-out tasks: {len(held_out)}",
        f"objective: {terms}; advantage {function_label(algorithm.advantage)}; aggregation {algorithm.aggregation}",
        f"the loss needs: {', '.join(plan.needs)}",
        f"learning rate: {plan.lr:g}",
        f"memory: {memory_words(plan)}",
        "nothing was loaded or written",
    ]
    return "\n".join(lines)


def _component_line(key: str, chosen: Chosen) -> str:
    if chosen.ref is None:
        return f"{key}: {chosen.name or 'the algorithm’s own'}"
    origin = f"{chosen.ref.distribution} {chosen.ref.version}".strip() or chosen.ref.value
    return f"{key}: {chosen.name} ({origin})"


def memory_words(plan: Plan) -> str:
    """Weights, gradients and AdamW's two moments, from the model's configuration alone; activations come on top."""
    settings = plan.settings
    counts = _count_parameters(settings.model, settings.lora_rank)
    if counts is None:
        return f"not known: the configuration of {settings.model} is not on this machine yet"
    total, trained = counts
    size = DTYPE_BYTES.get(str(plan.one("training").settings.get("dtype", "float32")), 4)
    state = 4 if settings.lora_rank else size  # adapters are float32, whatever the model is
    total_bytes = (total - trained) * size + trained * state * 4
    return (
        f"{total / 1e6:.1f} M parameters, {trained / 1e6:.2f} M trained: about {total_bytes / 2**30:.2f} GiB for "
        f"weights, gradients and AdamW; activations of {settings.tokens_per_microbatch} tokens a microbatch come on top"
    )


def _count_parameters(model: str, lora_rank: int) -> tuple[int, int] | None:
    """(all, trained) parameters, on the meta device: shapes without memory; None for a hub's model that is not here.

    Raises ModelError for a folder that holds no model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    resolved = resolve_model_name(model)
    try:
        # What the hub would have to be asked for is left to the run: a dry run answers at once.
        config = AutoConfig.from_pretrained(resolved, local_files_only=True)
    except (OSError, ValueError) as error:
        if not Path(resolved).is_dir():
            return None
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"the configuration in {resolved} could not be read: {first}") from error
    with torch.device("meta"):
        causal: Any = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in causal.parameters())
    if not lora_rank:
        return total, total
    head = causal.get_output_embeddings()
    linears = [m for m in causal.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    trained = sum(lora_rank * (linear.in_features + linear.out_features) for linear in linears)
    return total + trained, trained
