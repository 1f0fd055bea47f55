"""`rollouts export SOURCE OUT`: the model of a run or checkpoint as a folder that others load."""

from __future__ import annotations

import click


@click.command(
    help="Export a run's model for transformers, vLLM and SGLang.\n\n"
    "OUT is a new folder with safetensors, tokenizer and chat template; adapters are merged. "
    "SOURCE is the folder of a run (its last checkpoint is used), a checkpoint, or a LoRA adapter.\n\n"
    "\b\nExamples:\n  rollouts export runs/first models/first\n"
    "  rollouts export runs/first/checkpoints/step_000050 models/early --dtype bfloat16",
)
@click.argument("source", metavar="SOURCE")
@click.argument("out", metavar="OUT")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    default=None,
    help="The type of the exported weights.  [default: the stored type]",
)
@click.option("--adapter", is_flag=True, help="Export only the LoRA adapter, in peft's format.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
def export(source: str, out: str, dtype: str | None, adapter: bool, trust_remote_code: bool) -> int:
    """Export and say what was written; returns the exit code."""
    from rollouts.runs.export import export as write
    from rollouts.training.models import remote_code

    with remote_code(trust_remote_code):
        click.echo(write(source, out, dtype=dtype or "", adapter=adapter).words())
    return 0
