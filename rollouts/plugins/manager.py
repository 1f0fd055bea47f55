"""Hook plugins, and the one place that finds a component wherever it is: metadata first, then packs.

A thin wrapper on `pluggy.PluginManager`, which keeps the plugins and checks implementations against the specifications.
What it adds is honesty about failure: plugins load one by one, implementations are called one at a time, and each that
fails becomes a PluginFault with its distribution, version and cause. Nothing loads before it is needed.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pluggy
from pluggy import HookimplOpts, PluginValidationError

from rollouts.author_code import authors_code, shown
from rollouts.errors import BrokenPluginError, PluginError, UnknownComponentError, near_misses
from rollouts.plugins import hookspecs
from rollouts.plugins.index import (
    KIND_WORDS,
    KINDS,
    ComponentRef,
    cause_of,
    check_kind,
    find_component,
    installed_components,
    installed_hooks,
    load_component,
    names_file,
    normalise,
    one_line,
    scan,
    sort_refs,
    unknown_component,
)

__all__ = ["PluginFault", "PluginManager"]

_HOOK_NAMES = tuple(sorted(name for name in hookspecs.__all__ if name.startswith("rollouts_")))


class PluginFault(NamedTuple):
    """What went wrong with one plugin; it stopped nothing else."""

    distribution: str
    version: str
    cause: str

    def __str__(self) -> str:
        return f"{' '.join(part for part in (self.distribution, self.version) if part)}: {self.cause}"


class PluginManager:
    """Finds, lists and loads components, and calls hooks.

    `faults` holds what went wrong while plugins were loaded or asked for components, each once, in order.
    """

    def __init__(self) -> None:
        self.faults: builtins.list[PluginFault] = []
        self._pluggy = _Pluggy()
        self._pluggy.add_hookspecs(hookspecs)
        self._owners: dict[str, tuple[str, str]] = {}
        self._made: dict[ComponentRef, Any] = {}
        self._hooks_loaded = False

    def register(self, plugin: object, *, distribution: str, version: str = "") -> builtins.list[PluginFault]:
        """Add a hook plugin (a module or an object with `@hookimpl` functions); returns what is wrong with it.

        A function that is refused is left out alone; the plugin's other hooks count. Registering it twice does nothing.
        """
        if self._pluggy.is_registered(plugin):
            return []
        name = f"{distribution}#{len(self._owners)}"
        self._owners[name] = (distribution, version)
        causes = self._pluggy.register_checked(plugin, name)
        return self._note([PluginFault(distribution, version, cause) for cause in causes])

    def load_hooks(self) -> builtins.list[PluginFault]:
        """Load every installed hook plugin, one by one, once; returns the faults of this loading."""
        if self._hooks_loaded:
            return []
        self._hooks_loaded = True
        faults: builtins.list[PluginFault] = []
        # pluggy calls the last one registered first; reversed, calls go by the distributions' names.
        for ref in reversed(sorted(installed_hooks(), key=lambda ref: (normalise(ref.distribution), ref.name))):
            try:
                plugin = load_component(ref)
            except BrokenPluginError as exc:
                cause = " ".join(cause_of(exc.__cause__ or exc, ref).splitlines())
                faults += self._note([PluginFault(ref.distribution, ref.version, f"{ref.value}: {cause}")])
                continue
            faults += self.register(plugin, distribution=ref.distribution, version=ref.version)
        return faults

    def find(self, kind: str, name: str) -> ComponentRef:
        """The component: from installed metadata or a file, else from the first pack that has it.

        Hook plugins load only after metadata failed. Raises UnknownComponentError and AmbiguousComponentError.
        """
        try:
            return find_component(kind, name)
        except UnknownComponentError:
            if names_file(name):
                raise
        self.load_hooks()
        faults = builtins.list(self.faults)
        for implementation in self._implementations("rollouts_find_component"):
            distribution, version = self._owners[implementation.plugin_name]
            owner, _, rest = name.partition("/")
            mine = rest and normalise(owner) == normalise(distribution)
            for asked in (rest, name) if mine else (name,):
                found, new_faults = self._call("rollouts_find_component", implementation, {"kind": kind, "name": asked})
                faults += self._note(new_faults)
                if isinstance(found, ComponentRef):
                    return found
                if found is not None:
                    ref = ComponentRef(kind, asked, "", distribution, version)
                    self._made[ref] = found
                    return ref
        known = [*installed_components(), *self._listed(kind)]
        notes = [f"could not answer: {fault}" for fault in dict.fromkeys(faults)]
        raise unknown_component(kind, name, known, notes)

    def load(self, ref: ComponentRef) -> Any:
        """Import a component that `find` or `list` returned. Raises BrokenPluginError, UnknownComponentError."""
        if ref.distribution and not ref.value:
            found = ref if ref in self._made else self.find(ref.kind, ref.qualified)
            return self._made[found] if found in self._made else load_component(found)
        return load_component(ref)

    def list(self, kind: str | None = None, *, hooks: bool = False) -> builtins.list[ComponentRef]:
        """Components (of one kind), sorted, from metadata; with `hooks` also those that packs name.

        No component's module is imported; `hooks` imports the hook plugins.
        """
        found = installed_components(kind)
        if hooks:
            self.load_hooks()
            for each in KINDS if kind is None else (kind,):
                found += self._listed(each)
        return sort_refs(dict.fromkeys(found))

    def call_event(self, name: str, /, **values: Any) -> builtins.list[PluginFault]:
        """Call every implementation of a run event, one at a time; returns those that raised.

        `values` are all the arguments of the specification. Hook plugins are loaded if they are not yet.
        """
        assert name in hookspecs.EVENTS, f"{name!r} is no event; events: {hookspecs.EVENTS}"
        expected = set(inspect.signature(getattr(hookspecs, name)).parameters)
        assert set(values) == expected, f"{name} takes {sorted(expected)}, got {sorted(values)}"
        self.load_hooks()
        faults: builtins.list[PluginFault] = []
        for implementation in self._implementations(name):
            faults += self._call(name, implementation, values)[1]
        return faults

    def doctor(self) -> builtins.list[str]:
        """Everything that is wrong with what is installed, in words; imports every component and hook plugin."""
        scanned = scan()
        reports = builtins.list(scanned.faults)
        for ref in scanned.components:
            reports += _examine(ref)
        self.load_hooks()
        reports += [str(fault) for fault in self.faults]
        reports += self._pluggy.remarks(self._owners)
        return reports + _clashes(scanned.components)

    def _implementations(self, name: str) -> builtins.list[pluggy.HookImpl]:
        """In pluggy's calling order: the last one registered first, `tryfirst` and `trylast` heeded."""
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, name)
        return builtins.list(reversed(caller.get_hookimpls()))

    def _call(
        self, name: str, implementation: pluggy.HookImpl, values: Mapping[str, Any]
    ) -> tuple[Any, builtins.list[PluginFault]]:
        """One implementation's result, or the fault that names it."""
        owner = self._owners[implementation.plugin_name]
        try:
            with authors_code():
                result = implementation.function(*[values[argument] for argument in implementation.argnames])
        except Exception as exc:
            return None, [PluginFault(*owner, f"{name}: {one_line(exc)}")]
        if inspect.iscoroutine(result):
            result.close()
            return None, [PluginFault(*owner, f"{name} returned a coroutine; hooks are plain functions")]
        return result, []

    def _listed(self, kind: str) -> builtins.list[ComponentRef]:
        """What the packs name of this kind; a pack that fails is noted."""
        check_kind(kind)
        refs: builtins.list[ComponentRef] = []
        for implementation in self._implementations("rollouts_list_components"):
            owner = self._owners[implementation.plugin_name]
            names, faults = self._call("rollouts_list_components", implementation, {"kind": kind})
            try:
                with authors_code():
                    listed = [] if names is None else _checked_names(names)
            except Exception as exc:  # a generator raises only here
                faults, listed = [PluginFault(*owner, f"rollouts_list_components: {one_line(exc)}")], []
            self._note(faults)
            refs += [ComponentRef(kind, name, "", *owner) for name in listed]
        return refs

    def _note(self, faults: builtins.list[PluginFault]) -> builtins.list[PluginFault]:
        self.faults += [fault for fault in faults if fault not in self.faults]
        return faults


class _Pluggy(pluggy.PluginManager):
    """pluggy's manager, which refuses by function what it could not call honestly, and says why."""

    def __init__(self) -> None:
        super().__init__("rollouts")
        self._refusals: list[str] = []
        self._remarks: list[tuple[str, str]] = []
        self._current = ""

    def register_checked(self, plugin: object, name: str) -> list[str]:
        """Register; returns the causes for which the plugin, or functions of it, were refused."""
        if inspect.isclass(plugin):
            return [f"{plugin.__qualname__} is a class; the entry point must name a module or an object"]
        self._refusals, self._current = [], name
        try:
            with authors_code():
                self.register(plugin, name)
        except PluginValidationError as exc:
            self._drop(plugin)
            known = {hook: list(inspect.signature(getattr(hookspecs, hook)).parameters) for hook in _HOOK_NAMES}
            offered = next((f"; it may take: {', '.join(known[h])}" for h in _HOOK_NAMES if f"{h!r}" in str(exc)), "")
            return [*self._refusals, " ".join(str(exc).split()) + offered]
        except Exception as exc:  # an attribute of a strange object that raises when pluggy looks at it
            self._drop(plugin)
            return [*self._refusals, f"cannot be registered: {one_line(exc)}"]
        return self._refusals

    def _drop(self, plugin: object) -> None:
        if self.is_registered(plugin):  # some versions of pluggy register before they check
            self.unregister(plugin)

    def parse_hookimpl_opts(self, plugin: object, name: str) -> HookimplOpts | None:
        """pluggy's question whether an attribute is an implementation; None leaves it out."""
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None:
            function = getattr(plugin, name, None) if name.startswith("rollouts_") else None
            if inspect.isroutine(function) and not hasattr(function, "rollouts_spec"):
                self._remarks.append((self._current, f"{name} has no @hookimpl, so it is never called"))
            return None
        hook = options["specname"] or name
        function = getattr(plugin, name)
        if hook not in _HOOK_NAMES:
            near = near_misses(hook, _HOOK_NAMES)
            meant = f"did you mean {', '.join(near)}?" if near else f"hooks: {', '.join(_HOOK_NAMES)}"
            self._remarks.append((self._current, f"{name} is no hook of rollouts, so it is never called; {meant}"))
            return None
        refusal = _refusal(hook, function, options)
        if refusal:
            self._refusals.append(f"{name} {refusal}")
            return None
        return options

    def remarks(self, owners: Mapping[str, tuple[str, str]]) -> list[str]:
        """Functions that look like hooks but are none, each with its distribution."""
        return [str(PluginFault(*owners[name], remark)) for name, remark in self._remarks]


def _refusal(hook: str, function: Any, options: HookimplOpts) -> str:
    """Why a function cannot be called as this hook; empty where it can."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is async; hooks are plain functions (nothing would await it): write `def`"
    if options["wrapper"] or options["hookwrapper"]:
        return "is a wrapper; implementations are called one at a time, so there is nothing to wrap"
    if inspect.isgeneratorfunction(function) and hook != "rollouts_list_components":
        return "is a generator, so its body would never run: remove `yield`"
    return ""


def _checked_names(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"returned the text {names!r}; it must return a list of names")
    listed = list(names)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"returned {shown(name)} among the names; each must be text")
    return listed


def _examine(ref: ComponentRef) -> list[str]:
    """What is wrong with one component: it does not import, or asks for what its kind does not offer."""
    from rollouts.plugins.signature import SIGNED_KINDS, check_signature

    try:
        component = load_component(ref)
        if ref.kind in SIGNED_KINDS:
            check_signature(component, ref.kind, f"{ref.distribution} {ref.version}: {KIND_WORDS[ref.kind]} {ref.name}")
    except PluginError as exc:
        return [str(exc)]
    return []


def _clashes(refs: Iterable[ComponentRef]) -> list[str]:
    """Names that more than one distribution claims."""
    by_name: dict[tuple[str, str], list[ComponentRef]] = {}
    for ref in refs:
        by_name.setdefault((ref.kind, ref.name), []).append(ref)
    return [
        f"{KIND_WORDS[kind]} {name!r} is offered by {len(found)} distributions; type one of: "
        + ", ".join(ref.qualified for ref in found)
        for (kind, name), found in by_name.items()
        if len(found) > 1
    ]
