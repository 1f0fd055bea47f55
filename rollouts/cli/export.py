"""`rollouts export SOURCE OUT`: the model of a run or checkpoint as a folder for other programs, or on the hub."""

from __future__ import annotations

import click

from rollouts.cli.app import NamedCommand


@click.command("export", cls=NamedCommand)
@click.argument("source", metavar="SOURCE")
@click.argument("out", metavar="OUT")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    default=None,
    help="The type of the exported weights.  [default: the stored type]",
)
@click.option("--role", default="", metavar="NAME", help="The role whose LoRA adapter is exported.")
@click.option("--adapter", is_flag=True, help="Export only the LoRA adapter, in peft's format.")
@click.option("--push", metavar="NAME", help="Also upload OUT to this repository on the Hugging Face Hub: USER/MODEL.")
@click.option("--public", is_flag=True, help="With --push: make the repository public, if the upload creates it.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
def export_command(
    source: str,
    out: str,
    dtype: str | None,
    role: str,
    adapter: bool,
    push: str | None,
    public: bool,
    trust_remote_code: bool,
) -> int:
    """Export a run's model for transformers, vLLM and SGLang.

    OUT is a new folder with safetensors, tokenizer, chat template and a README; adapters are merged. SOURCE is the
    folder of a run (its last checkpoint is used), a checkpoint, or a LoRA adapter.

    \b
    Examples:
      rollouts export runs/first models/first
      rollouts export runs/first/checkpoints/step_000050 models/early --dtype bfloat16
      rollouts export runs/first models/first --push ada/calculator
    """
    from rollouts.errors import ConfigError
    from rollouts.models.loading import remote_code
    from rollouts.runs.export import export as write
    from rollouts.runs.export import model_of_role
    from rollouts.runs.publish import check_push
    from rollouts.runs.publish import push as upload

    if push is not None:
        check_push(push)
    elif public:
        raise ConfigError(
            "--public is for an upload, and there is none\ntype: --push USER/MODEL, or leave --public out"
        )
    with remote_code(trust_remote_code):
        exported = write(model_of_role(source, role), out, dtype=dtype or "", adapter=adapter)
    click.echo(exported.words())
    if push is not None:
        click.echo(f"uploaded to {upload(exported.out, push, is_public=public)}")
    return 0
