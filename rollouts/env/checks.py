"""An environment's mistakes, found when the run is composed, before a model loads.

Not here: whether tasks can be drawn, which runs the author's code (`rollouts.runs.environments`), and warnings about
mistakes with which the environment still works (`advice`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollouts.author_code import shown, why_no_list, with_place
from rollouts.bounds import excess
from rollouts.config.settings import REQUIRED
from rollouts.env.authoring import (
    WORDS,
    JudgeMethod,
    ToolMethod,
    WorkerEnvironment,
    environment_name,
    marked_in,
    metrics_of,
    rewards_of,
    roles_of,
    tools_of,
)
from rollouts.env.calls import UNDER_TRIO, RemoteCall, async_library_of
from rollouts.env.methods import inputs_of, names_input, with_inputs
from rollouts.env.mixing import RewardTerm
from rollouts.env.schema import check_tool
from rollouts.errors import EnvironmentDefinitionError, SignatureError, near_misses
from rollouts.plugins.signature import check_signature, read_signature
from rollouts.plugins.vocabulary import GROUP_REWARD
from rollouts.types import Message, Role

METHODS: Mapping[str, tuple[str, ...]] = {
    "tasks": ("split", "rng"),
    "demonstrations": ("split", "rng"),
    "setup": ("task",),
    "tools": ("task",),
    "shared": (),
    "close": (),
    "reply": ("trajectory",),
    "rollout": ("task", "model"),
    "state": (),
    "restore": ("state",),
}
"""The methods that the core calls, and their arguments in order. Only `tasks` is required. `inputs` has what some of
them may name besides.
"""

OWN_NAMES = ("task", "trajectory", "env")
SELVES = ("self", "this", "env", "environment")  # names for a method's first parameter; `_self` too
_ROLE_NAME = re.compile(r"[A-Za-z0-9_-]+")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_environment(env: Any, rewards: Sequence[RewardTerm] | None = None) -> None:
    """Raise EnvironmentDefinitionError for the environment's first mistake. `env` is a class or an object.

    The checks: `tasks` exists, the core's calls fit the methods, marked methods have a `self`, every tool has a schema,
    and the parameters of `@reward` and `@metric` methods are among `task`, `trajectory`, `env`. Roles have different
    names, and marks name a role that exists. With `rewards` (a run's terms): at least one reward judges the rollouts.
    Without one, raises ConfigError if the rows of an environment that reads them are not there.
    """
    if isinstance(env, WorkerEnvironment):
        env.remote_check()
    else:
        _check_class(env)
    if rewards is None or (rewards and (rewards_of(env) or any(term.function is not None for term in rewards))):
        return
    # Without its rows, what is said of rewards leads nowhere.
    if isinstance(env, WorkerEnvironment):
        env.remote_check_data()
    else:
        from rollouts.env.prompts import Prompts

        if isinstance(env, Prompts):
            env.check_data()
    label = environment_name(env)
    if not rewards:
        raise EnvironmentDefinitionError(f"no reward was named; type --reward env:1 for the rewards of {label} itself")
    raise EnvironmentDefinitionError(
        f"{label} has no @reward method, so `--reward env:1` judges nothing; "
        "type --reward pkg/name or --reward ./file.py:function (rollouts plugins list shows what is installed), "
        "or give the class a method with @reward if it is yours\n"
        "supervised training without an evaluation needs no reward: --eval-tasks 0"
    )


def _check_class(env: Any) -> None:
    label = environment_name(env)
    if getattr(env, "tasks", None) is None:
        near = "".join(f" (it has {name!r})" for name in near_misses("tasks", set(dir(env)) - {"tasks"})[:1])
        raise EnvironmentDefinitionError(
            f"{label} has no method `tasks`{near}; write `def tasks(self, split, rng)` that yields Task objects"
        )
    check_methods(env, METHODS)
    if not inspect.isclass(env):
        async_library_of(env.tasks)  # refuses a misspelt `async_library`
    has_rollout = hasattr(env, "rollout")
    if has_rollout and not inspect.iscoroutinefunction(env.rollout):
        raise EnvironmentDefinitionError(
            f"{label}.rollout must be `async def rollout(self, task, model)`: it awaits model.chat(...), under trio"
        )
    if has_rollout and getattr(env, "async_library", None) == "asyncio":
        raise EnvironmentDefinitionError(
            f'{label}.async_library is "asyncio", but {UNDER_TRIO}; remove `async_library`, and each method runs under '
            "the library that it names"
        )
    tools, own, metrics = tools_of(env), rewards_of(env), metrics_of(env)
    for tool in tools:
        check_tool(tool)
    with line_of(getattr(env, "rollout", None)):
        _check_roles(env, label)
    _check_marked_roles(env, label, {"tool": tools, "reward": own, "metric": metrics})
    for kind, methods in (("rewards", own), ("metrics", metrics)):
        for method in methods:
            with line_of(method.function):
                _check_own(env, label, kind, method.name, method.function)


def check_methods(env: Any, names: Iterable[str]) -> None:
    """Raise EnvironmentDefinitionError for the first of these methods that does not fit how it is called, and for a
    marked method without `self`. `env` is an environment, or a class of tools (`toolsets`).
    """
    label = environment_name(env)
    for name in names:
        with line_of(getattr(env, name, None)):
            _check_method(env, label, name, METHODS[name])
            if names_input(env, name, "shared") and not hasattr(env, "shared"):
                raise EnvironmentDefinitionError(
                    f"{label}.{name} names `shared`, and {label} has no method `shared`; write `def shared(self)` that "
                    "returns what all episodes use"
                )
    _check_selves(env, label)


def _check_roles(env: Any, label: str) -> None:
    """Raise EnvironmentDefinitionError for the first mistake in the environment's `roles`."""
    given = getattr(env, "roles", ())
    if isinstance(given, property):  # of a class; only an object has its value
        return
    example = 'write `roles = (Role("seller", system="You sell a lamp."), Role("buyer"))`'
    if not isinstance(given, list | tuple) or not all(isinstance(each, Role) for each in given):
        raise EnvironmentDefinitionError(f"{label}.roles is {shown(given)}, not a tuple of Role; {example}")
    for role in given:
        if not isinstance(role.name, str) or not _ROLE_NAME.fullmatch(role.name):
            raise EnvironmentDefinitionError(
                f"{label} has a role named {shown(role.name)}; a name has letters, digits, - and _, because it is part "
                f"of the names of metrics: {example}"
            )
        if not isinstance(role.system, str):
            raise EnvironmentDefinitionError(
                f"the role {role.name} of {label} has the system prompt {shown(role.system)}; write text"
            )
        if role.model:
            raise EnvironmentDefinitionError(
                f"the role {role.name} of {label} names a model, {shown(role.model)}; which model plays a role is "
                f"a setting of the run\nremove `model` here, and type: --role.{role.name}.model MODEL"
            )
    twice = [name for name, count in Counter(role.name for role in given).items() if count > 1]
    if twice:
        raise EnvironmentDefinitionError(f"{label} has two roles named {twice[0]!r}; give each role a name of its own")
    if given and not hasattr(env, "rollout"):
        raise EnvironmentDefinitionError(
            f"{label} has roles, but no `rollout`, which says who speaks when; write "
            f"`async def rollout(self, task, model)` with `await model.role({given[0].name!r}).say(task.prompt)`"
        )


def _check_marked_roles(env: Any, label: str, methods: Mapping[str, Sequence[ToolMethod | JudgeMethod]]) -> None:
    """Raise EnvironmentDefinitionError if a mark names a role that the environment does not have."""
    if isinstance(getattr(env, "roles", ()), property):
        return
    names = [role.name for role in roles_of(env)]
    for word, marked in methods.items():
        for method in marked:
            if method.role is None or method.role in names:
                continue
            near = "".join(f"; did you mean {each!r}?" for each in near_misses(str(method.role), names)[:1])
            has = f"the roles of {label} are {', '.join(names)}{near}" if names else f"{label} has no `roles`"
            with line_of(method.function):
                raise EnvironmentDefinitionError(
                    f"{label}.{method.name} is marked @{word}(role={method.role!r}); {has}"
                )


def check_source(values: Any, label: str, of: str = "Task") -> None:
    """Raise EnvironmentDefinitionError if the result of `tasks` or `demonstrations` is no list and no iterator of
    values. `label` names the call, and `of` what it must give.
    """
    if reason := why_no_list(values):
        if inspect.iscoroutine(values):
            values.close()
        raise EnvironmentDefinitionError(
            f"{label} gave {type(values).__name__}, {reason}; it must be a plain generator or return a list of {of}"
        )


def check_text(messages: Sequence[Message], whose: str) -> None:
    """Raise EnvironmentDefinitionError if a message has a part that is not text, or a call that is nested too deep. The
    tokens would not contain the part, and the model would be trained on a prompt without it. The error begins with
    `whose`, which names the messages.
    """
    for number, message in enumerate(messages, start=1):
        if problem := excess(message.tool_calls):
            raise EnvironmentDefinitionError(f"{whose}: message {number} has tool calls that are {problem}")
        parts = message.content if isinstance(message.content, list) else []
        other = next((p for p in parts if not (isinstance(p, dict) and p.get("type") == "text")), None)
        if other is not None:
            kind = shown(other.get("type")) if isinstance(other, dict) else type(other).__name__
            raise EnvironmentDefinitionError(
                f"{whose}: message {number} ({message.role}) has a part of type {kind}, and the model reads text only, "
                'so that the part would be lost\nwrite text, or parts such as {"type": "text", "text": "..."}; only '
                "an engine that takes messages sees other parts: rollouts eval --inference openai"
            )


def reward_term(
    alias: str, function: Callable[..., Any], weight: float = 1.0, settings: Mapping[str, Any] | None = None
) -> RewardTerm:
    """A reward function as a term of a run. Raises SignatureError if a parameter is not an input of rewards."""
    requests = check_signature(function, "rewards", f"reward {alias}").requests
    is_group = any(name in GROUP_REWARD for name in requests)
    return RewardTerm(alias, function, weight, dict(settings or {}), requests, is_group)


def requests_of(method: Any) -> tuple[str, ...]:
    """The parameters of a `@reward` or `@metric` method, in order. They are read once for each function."""
    if isinstance(method, RemoteCall):
        return method.requests
    return _requests_of_plain(getattr(method, "__func__", method), hasattr(method, "__func__"))


@functools.lru_cache(maxsize=1024)
def _requests_of_plain(plain: Callable[..., Any], bound: bool) -> tuple[str, ...]:
    requests = read_signature(plain, "rewards").requests
    return requests[1:] if bound else requests


@contextlib.contextmanager
def line_of(function: Any) -> Iterator[None]:
    """Put the line of the function's `def` below the message of an EnvironmentDefinitionError of the block."""
    try:
        yield
    except EnvironmentDefinitionError as error:
        raise EnvironmentDefinitionError(with_place(error, function)) from error


def _check_method(env: Any, label: str, name: str, arguments: tuple[str, ...]) -> None:
    method = getattr(env, name, None)
    if method is None:
        return
    wanted = f"def {name}({', '.join(('self', *arguments))})"
    if not callable(method):
        raise EnvironmentDefinitionError(f"{label}.{name} is {type(method).__name__}, not a method; write `{wanted}`")
    unbound = inspect.isclass(env) and inspect.isfunction(inspect.getattr_static(env, name))
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError) as error:
        if inspect.isfunction(inspect.getattr_static(env, name)):  # a function without parameters, bound as a method
            raise EnvironmentDefinitionError(f"{label}.{name} takes no `self`; write `{wanted}`") from error
        return  # no readable signature, as in compiled code: the first episode shows whether the call fits
    try:
        inputs = dict.fromkeys(inputs_of(method, name))
        function, *rest = with_inputs(method, (env, *arguments) if unbound else arguments, inputs)
        inspect.signature(function).bind(*rest)
    except TypeError as error:
        raise EnvironmentDefinitionError(
            f"{label}.{name}{signature} does not fit how it is called ({error}); write `{wanted}`"
        ) from error


def _check_selves(env: Any, label: str) -> None:
    """Raise EnvironmentDefinitionError if the first parameter of a marked method is not the environment. Python passes
    the environment as the first argument, so the model's or the run's value for that parameter would be lost.
    """
    cls = env if inspect.isclass(env) else type(env)
    for mark, word in WORDS.items():
        for name, raw in marked_in(cls, mark):
            if not inspect.isfunction(raw):
                continue  # such as a staticmethod: Python does not pass the environment
            parameters = list(inspect.signature(raw).parameters.values())
            first = parameters[0] if parameters else None
            if first is not None and (first.name in SELVES or first.name.startswith("_") or first.kind in _VARIADIC):
                continue
            texts = [_as_written(each) for each in parameters]
            where = f"{label}.{name}({', '.join(texts)})"
            lost = f"{first.name!r} receives the environment" if first is not None else "it takes no environment"
            written = ", ".join(["self", *texts])
            with line_of(raw):
                raise EnvironmentDefinitionError(
                    f"@{word} {where} has no `self`, so {lost}; write `def {name}({written})`, or write @staticmethod "
                    f"above @{word}"
                )


def _as_written(parameter: inspect.Parameter) -> str:
    """The parameter with its hint as text, also if the module's hints are strings."""
    hint = parameter.annotation
    return str(parameter).replace(repr(hint), hint, 1) if isinstance(hint, str) else str(parameter)


def _check_own(env: Any, label: str, kind: str, name: str, function: Callable[..., Any]) -> None:
    word = kind.removesuffix("s")
    where = f"@{word} {label}.{name}"
    if inspect.isclass(env) and inspect.isfunction(inspect.getattr_static(env, name)):
        function = functools.partial(function, None)
    try:
        signature = read_signature(function, kind)
        for request in signature.requests:
            if request not in OWN_NAMES and not (kind == "rewards" and request == "turn"):
                raise EnvironmentDefinitionError(f"{where} asks for {request!r}{_hint(request)}")
        check_signature(function, kind, where)
    except SignatureError as error:
        raise EnvironmentDefinitionError(str(error)) from error
    for setting in signature.settings:
        if setting.default is REQUIRED:
            raise EnvironmentDefinitionError(
                f"{where}: {setting.name!r} is keyword-only and has no default; "
                "a method's settings are the fields of its environment"
            )


def _hint(request: str) -> str:
    may = f"; a method of an environment may name {', '.join(OWN_NAMES)}"
    if request in GROUP_REWARD:
        return f"{may} (a reward of a whole group is a function of its own: --reward ./my_rewards.py:name)"
    near = near_misses(request, OWN_NAMES)
    return f"{may}; did you mean {near[0]!r}?" if near else may
