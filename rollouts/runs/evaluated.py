"""The model of an evaluation: what `--model` and a server's name for it mean, checked before anything loads."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from rollouts.config.settings import Settings
from rollouts.errors import ConfigError
from rollouts.inference.chatting import is_evaluation_only
from rollouts.runs.components import Chosen


def evaluated(settings: Settings, inference: Chosen) -> tuple[Settings, tuple[str, ...]]:
    """The settings of an evaluation, with the checkpoint's path as the model, and notes about what will be evaluated.
    Raises ConfigError.
    """
    if is_evaluation_only(inference.component):  # only the server knows its models
        if settings.template:
            name = next(iter(settings.template))
            raise ConfigError(
                f"--template.{name.replace('_', '-')}: with --inference {inference.name} the server applies "
                "the chat template, not rollouts; vLLM and SGLang take the argument in the request: "
                f"--inference.body '{{chat_template_kwargs = {{{name} = ...}}}}'"
            )
        return settings, ()
    given = settings.model
    path = Path(given).expanduser()
    if not path.is_dir():  # not a folder but a name, which the engine resolves
        return settings, _check_served(given, given, inference, of_run=False)
    from rollouts.runs.export import find_checkpoint, is_written_by_run
    from rollouts.training.weights.store import STATE, check_folder

    found = find_checkpoint(given)
    if (found / STATE).exists():
        check_folder(str(found))
    model = given if found == path else str(found)
    notes = [] if found == path else [f"{given} is a run's folder: its newest checkpoint is used, {found.name}"]
    served = _check_served(given, model, inference, of_run=found != path or is_written_by_run(path))
    return dataclasses.replace(settings, model=model), (*notes, *served)


def _check_served(given: str, model: str, inference: Chosen, *, of_run: bool) -> tuple[str, ...]:
    """Check that a server at a URL serves --model, and note what cannot be checked. An evaluation sends no weights, so
    the server keeps the weights that it loaded at its start. If a run wrote the model, the user must confirm that the
    server loaded it.

    Raises ConfigError.
    """
    url, name = inference.settings.get("url"), inference.settings.get("served_model")
    if not url or name is None:
        return ()
    if name:
        place = url if isinstance(url, str) else ",".join(url)
        return (f"what is evaluated is what {place} serves as {name!r}; that this is {model} is not checked",)
    if not of_run:
        return ()
    raise ConfigError(
        f"--model {given} with --inference.url: an evaluation sends no weights to a running server, so "
        "the results would be those of the model that the server has loaded. Leave --inference.url out, and a server "
        f"is started with {given}; or export it (`rollouts export {shlex.quote(given)} FOLDER`), start the server with "
        "the exported folder, and type --inference.served-model NAME with the server's name for the model"
    )
