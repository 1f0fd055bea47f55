"""`rollouts serve RUN`: serves a run's model over OpenAI's API."""

from __future__ import annotations

from typing import Any

import click

from rollouts.cli.options import SettingsCommand, chosen_infos, given_settings

SHOWN = "tool_parser template inference max_tokens temperature trust_remote_code".split()
"""The settings that have a flag."""


def _serve(
    model: str, role: str, host: str, port: int, name: str, connections: int, request_seconds: float, **options: Any
) -> int:
    """Serve a run's model at an address that speaks OpenAI's API.

    RUN is the folder of a run (its newest checkpoint is used), a checkpoint, or any other model. There are
    /v1/chat/completions, /v1/models and /health. Requests that wait at the same time are sampled together. Ctrl-C ends
    the server with exit code 0; requests in flight have ten seconds.

    \b
    Examples:
      rollouts serve runs/first
      rollouts serve runs/first --port 0 --name mine
      rollouts serve runs/first --inference vllm --inference.python ~/venvs/vllm
      rollouts eval --env calculator --model first --inference openai --inference.url http://127.0.0.1:8000/v1
    """
    from rollouts.gateway.http_server import HTTPLimits
    from rollouts.runs.export import model_of_role
    from rollouts.runs.run_model import model_plan
    from rollouts.runs.serve import SETTINGS, serve_model

    given = given_settings(options)
    with model_plan(model_of_role(model, role), given, SETTINGS) as plan:
        for note in plan.notes:
            click.echo(f"note: {note}", err=True)
        limits = HTTPLimits(connections_max=connections)
        serve_model(plan, host, port, name, request_seconds, limits, click.echo)
    return 0


_DOCS = {
    "max_tokens": "Tokens of a reply, if a request does not say.",
    "temperature": "The sampling temperature, if a request does not say. 0 is greedy.",
}

serve = SettingsCommand(
    "serve",
    callback=_serve,
    infos=chosen_infos(SHOWN, _DOCS, "that of the run"),
    argument=click.Argument(["model"], metavar="RUN"),
    own=[
        click.Option(["--role"], default="", metavar="NAME", help="The role whose LoRA adapter is served."),
        click.Option(["--host"], default="127.0.0.1", show_default=True, help="The address to listen on."),
        click.Option(
            ["--port"],
            type=click.IntRange(0, 65535),
            default=8000,
            show_default=True,
            help="The port to listen on. 0: any free port.",
        ),
        click.Option(["--name"], default="", help="The model's name for clients.  [default: that of the run's folder]"),
        click.Option(
            ["--connections"],
            type=click.IntRange(1),
            default=256,
            show_default=True,
            help="How many clients may be connected at the same time. A further one replaces a client that is idle, or "
            "waits.",
        ),
        click.Option(
            ["--request-seconds"],
            type=click.FloatRange(0, min_open=True),
            default=600.0,
            show_default=True,
            help="Deadline of one request. A request that passes it gets status 504.",
        ),
    ],
)
