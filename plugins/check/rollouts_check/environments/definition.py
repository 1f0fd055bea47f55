"""Checks of the class and its settings."""

from __future__ import annotations

import dataclasses
import gc

from rollouts.author_code import message_of, place_of_function, place_of_parameter, shown
from rollouts.config.files import load_as_written
from rollouts.config.render import to_toml
from rollouts.config.resolving import resolve
from rollouts.config.settings import is_secret
from rollouts.env.authoring import metrics_of, rewards_of, tools_of
from rollouts.env.checks import check_environment
from rollouts.errors import ConfigError, EnvironmentDefinitionError, counted
from rollouts.plugins.manager import PluginManager
from rollouts.runs.components import choose, completed
from rollouts_check.environments.subject import Subject
from rollouts_check.environments.surroundings import state_of_process
from rollouts_check.environments.traces import Leftovers, own_temporary_folder
from rollouts_check.report import FailedError


def definition(subject: Subject) -> str:
    """The methods, marks and signatures of the class are those that a run accepts. The constructor leaves nothing."""
    subject.kept["process"] = state_of_process()
    env = subject.environment.make_checked()
    _require_empty(subject)
    try:
        check_environment(env)
    except EnvironmentDefinitionError as error:
        raise FailedError("read the class", message_of(error), "correct this method") from error
    numbers = (("tool", tools_of(env)), ("reward", rewards_of(env)), ("metric", metrics_of(env)))
    return ", ".join(counted(len(found), word) for word, found in numbers)


def _require_empty(subject: Subject) -> None:
    """Make an object twice. Raises FailedError if files, threads or processes remain: `close` runs for objects of an
    episode only.
    """
    with own_temporary_folder(subject.scratch / "constructor") as folder:
        left = Leftovers(folder)
        for _ in range(2):
            subject.environment.make_checked()
        gc.collect()
        if lines := left.found():
            place = place_of_function(getattr(subject.component, "__post_init__", None)) or place_of_function(
                getattr(subject.component, "__init__", None)
            )
            seen = f"it left {'; '.join(lines)}" + (f" ({place})" if place else "")
            change = "open it in `setup`, and end it in `close`: `close` runs for objects of an episode only"
            raise FailedError("make two objects that play no episode", seen, change)


def settings(subject: Subject) -> str:
    """The settings can be written to a settings file and read back, and give an equal environment."""
    chosen, own = subject.environment.chosen, subject.resolved.components["env"]
    whole = {"env": completed({"env": own}, {"env": [chosen]})["env"], "reward": []}
    tried = "write the settings to a TOML file, as a run does, and read them back"
    file = subject.scratch / "settings.toml"
    try:
        text = to_toml(resolve({}).without_secrets()._replace(components={**resolve({}).components, **whole}))
        file.write_text(text[text.index("[env]") :].partition("\n[")[0], encoding="utf-8")
        tree, source = load_as_written(file)
        read = resolve(tree, source.with_objects(subject.resolved.source.objects))
        manager = PluginManager(read.source.objects.components)
        (again,) = choose(manager, {"env": read.components["env"]}, read.source)["env"]
    except ConfigError as error:
        change = "give every setting a default that TOML can hold: text, numbers, lists, tables with text keys"
        raise FailedError(tried, message_of(error), change) from error
    for name, value in chosen.settings.items():
        back = again.settings.get(name)
        if not is_secret(name) and (type(back) is not type(value) or back != value):
            place = place_of_parameter(subject.component, name)
            seen = f"{name} was {shown(value)} and is {shown(back)} afterwards" + (f" ({place})" if place else "")
            raise FailedError(tried, seen, f"give the setting {name} a type hint and a default that TOML can hold")
    if dataclasses.is_dataclass(subject.component):
        made = [subject.environment._replace(chosen=each).make_checked() for each in (chosen, again)]
        if made[0] != made[1]:
            seen = f"two objects with these settings differ: {shown(made[0])} and {shown(made[1])}"
            change = "do not compare by what is no setting: field(init=False, compare=False) for state of an episode"
            raise FailedError(tried, seen, change)
    return counted(len(chosen.settings), "setting")
