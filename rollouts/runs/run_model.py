"""A model to talk to, with the settings of the run that wrote it, for `chat` and `serve`."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence

from rollouts.child_environment import pass_on
from rollouts.config.files import NOWHERE, load_file
from rollouts.config.flags import Tree, flag_name
from rollouts.config.merging import merge
from rollouts.config.objects import held_names
from rollouts.config.resolving import EXPORTED, resolve, run_settings_file
from rollouts.env.shared import shared_values
from rollouts.errors import ConfigError, PluginError, first_line
from rollouts.inference.base import InferenceBackend
from rollouts.models.loading import remote_code
from rollouts.runs.environments import PlannedEnvironment
from rollouts.runs.plan import Plan, make_plan
from rollouts.runs.session import make_inference
from rollouts.runs.workers import worker_pools


@contextlib.contextmanager
def model_plan(model: str, given: Tree, settings: Sequence[str]) -> Iterator[Plan]:
    """The plan of a conversation with a model: the folder of a run, a checkpoint, or any other model.

    The run's values of these `settings` (names of core settings) apply, unless they are `given`. The plan may have no
    environment; if that of an exported model cannot be loaded, a note says so. Raises UserError.
    """
    if not model:
        raise ConfigError("no model was named; give the folder of a run, such as runs/first, or a model")
    file = run_settings_file(model)
    tree, source = load_file(file) if file else ({}, NOWHERE)
    # A run may have no held-out tasks.
    tree = {key: value for key, value in tree.items() if key in settings and (key != "eval_tasks" or value)}
    lost = list(held_names(tree))
    notes = [f"{flag_name((key,))} of the run was in the memory of a Python program, so it is left out" for key in lost]
    tree = {key: value for key, value in tree.items() if key not in lost}
    chosen = merge(given, {"mode": "eval", "model": model})
    resolved = resolve(merge(tree, chosen), source)
    own = resolved.settings
    pass_on(own.pass_env)
    with shared_values(own.cleanup_seconds), worker_pools(), remote_code(own.trust_remote_code):
        try:
            plan = make_plan(resolved, needs_environment=False)
        except PluginError as error:
            if file is None or file.name != EXPORTED or "env" in given:
                raise
            notes.append(f"the environment of the run cannot be loaded ({first_line(error)}); type --env NAME")
            rest = {key: value for key, value in tree.items() if key not in ("env", "tool", "reward", "data")}
            plan = make_plan(resolve(merge(rest, chosen), source), needs_environment=False)
        yield plan._replace(notes=(*notes, *plan.notes))


@contextlib.contextmanager
def temporary_engine(plan: Plan, environments: Sequence[PlannedEnvironment]) -> Iterator[InferenceBackend]:
    """The plan's engine, not entered, with a folder for the logs of its servers. The folder is removed at the end,
    unless the block fails and there are logs. Do not call it inside trio, because it may check the engine. Raises
    UserError.
    """
    folder = tempfile.mkdtemp(prefix="rollouts-")
    try:
        spec = plan.engine._replace(folder=folder)
        yield make_inference(plan.one("inference"), spec, environments, must_train=False)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder is not empty
            os.rmdir(folder)
        raise
    shutil.rmtree(folder, ignore_errors=True)
