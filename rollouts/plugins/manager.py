"""Find components in installed metadata and through hook plugins, and call hooks.

`PluginManager` wraps `pluggy.PluginManager`. It loads hook plugins one by one, only when they are needed, and calls
implementations one at a time. Each failure is recorded as a PluginFault with its distribution, version and cause, and
does not stop the other plugins.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pluggy
from pluggy import HookimplOpts, PluginValidationError

from rollouts.author_code import authors_code, shown
from rollouts.config.names import HELD, names_file, normalize
from rollouts.error_log import report
from rollouts.errors import BrokenPluginError, MissingExtraError, PluginError, UnknownComponentError, named, suggestion
from rollouts.plugins import hookspecs, index
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.loading import import_cause, load_component
from rollouts.plugins.signature import SIGNED_KINDS, check_signature

_HOOKS = {
    name: tuple(inspect.signature(getattr(hookspecs, name)).parameters)
    for name in sorted(vars(hookspecs))
    if name.startswith("rollouts_")
}
"""The names of the arguments of each hook."""


class PluginFault(NamedTuple):
    """The failure of one plugin."""

    distribution: str
    version: str
    cause: str

    def __str__(self) -> str:
        return f"{' '.join(part for part in (self.distribution, self.version) if part)}: {self.cause}"


class Diagnosis(NamedTuple):
    """What `doctor` found: the faults as messages, and the components that need an extra that is not installed, by the
    missing package and how to install it.
    """

    faults: list[str]
    lacking: dict[tuple[str, str], list[str]]


Faults = list[PluginFault]
Refs = list[ComponentRef]


class PluginManager:
    """Finds, lists and loads components, and calls hooks.

    `faults` holds the failures so far of loading hook plugins and of finding components, each once, in order. `objects`
    are components in memory, by their names. With `installed` False, the installed hook plugins are never loaded.
    """

    def __init__(self, objects: Mapping[str, Any] = MappingProxyType({}), *, installed: bool = True) -> None:
        self.faults: Faults = []
        self._objects = objects
        self._pluggy = _Pluggy()
        self._pluggy.add_hookspecs(hookspecs)
        self._owners: dict[str, tuple[str, str]] = {}
        self._made: dict[ComponentRef, Any] = {}
        self._hooks_loaded = not installed

    def register(self, plugin: object, *, distribution: str, version: str = "") -> Faults:
        """Add a hook plugin (a module or an object with `@hookimpl` functions), and return its faults.

        A function with a fault is left out; the other functions of the plugin are added. Adding a plugin twice has no
        effect.
        """
        if self._pluggy.is_registered(plugin):
            return []
        name = f"{distribution}#{len(self._owners)}"
        self._owners[name] = (distribution, version)
        causes = self._pluggy.register_checked(plugin, name)
        return self._note([PluginFault(distribution, version, cause) for cause in causes])

    @property
    def remarks(self) -> Faults:
        """The functions of hook plugins that look like hooks and are not, each with the reason."""
        return [PluginFault(*self._owners[name], remark) for name, remark in self._pluggy.remarks]

    @property
    def hooks(self) -> list[str]:
        """The names of the hooks that plugins implement."""
        return [name for name in _HOOKS if self._implementations(name)]

    def load_hooks(self) -> Faults:
        """Load every installed hook plugin, and return the faults. A second call does nothing."""
        if self._hooks_loaded:
            return []
        self._hooks_loaded = True
        faults: Faults = []
        # pluggy calls the last plugin first, so register them in reverse order of their distributions' names.
        for ref in reversed(sorted(index.scan().hooks, key=lambda ref: (normalize(ref.distribution), ref.name))):
            try:
                plugin = load_component(ref)
            except BrokenPluginError as exc:
                cause = "; ".join(import_cause(exc.__cause__ or exc, ref).splitlines())
                faults += self._note([PluginFault(ref.distribution, ref.version, f"{ref.value}: {cause}")])
                continue
            faults += self.register(plugin, distribution=ref.distribution, version=ref.version)
        return faults

    def find(self, kind: str, name: str) -> ComponentRef:
        """Find a component in memory, in installed metadata, in a file or in a module, else with the hook
        `rollouts_find_component`.

        Hook plugins are loaded only if the metadata has no such name. Raises UnknownComponentError and
        AmbiguousComponentError.
        """
        if name in self._objects:
            return self.replace(ComponentRef(kind, name.strip("<>"), name), self._objects[name])
        try:
            return index.find_component(kind, name)
        except UnknownComponentError:
            if names_file(name) or HELD.fullmatch(name):
                raise
        self.load_hooks()
        faults = self.faults[:]
        owner, _, rest = name.partition("/")
        for implementation in self._implementations("rollouts_find_component"):
            distribution, version = self._owners[implementation.plugin_name]
            is_its_own = rest and normalize(owner) == normalize(distribution)
            for asked in (rest, name) if is_its_own else (name,):
                found = self._call("rollouts_find_component", implementation, {"kind": kind, "name": asked})
                if isinstance(found, PluginFault):
                    faults += self._note([found])
                elif found is not None:
                    ref = ComponentRef(kind, asked, "", distribution, version)
                    return found if isinstance(found, ComponentRef) else self.replace(ref, found)
        known = [*index.installed_components(), *self._listed(kind)]
        notes = [f"this hook plugin failed: {fault}" for fault in dict.fromkeys(faults)]
        raise index.unknown_component(kind, name, known, notes)

    def replace(self, ref: ComponentRef, component: Any) -> ComponentRef:
        """From now on, `load` returns this component for the reference, which is returned."""
        self._made[ref] = component
        return ref

    def load(self, ref: ComponentRef) -> Any:
        """Import a component that `find` or `list` returned. Raises BrokenPluginError, UnknownComponentError."""
        if ref in self._made:
            return self._made[ref]
        found = ref if ref.value or not ref.distribution else self.find(ref.kind, ref.qualified)
        return self._made[found] if found in self._made else load_component(found)

    def list(self, kind: str | None = None, *, hooks: bool = False) -> Refs:
        """The components of one kind, or of all kinds, sorted. With `hooks`, hook plugins are loaded and their
        components included. No component is imported.
        """
        found = index.installed_components(kind)
        if hooks:
            self.load_hooks()
            for each in index.KINDS if kind is None else (kind,):
                found += self._listed(each)
        return index.sort_refs(dict.fromkeys(found))

    def call_event(self, name: str, /, **values: Any) -> Faults:
        """Call every implementation of an event hook, one at a time, and return the faults of those that raised.

        `values` holds all arguments of the hook. Hook plugins are loaded first if they are not yet.
        """
        assert name in hookspecs.EVENTS, f"{name!r} is no event; events: {hookspecs.EVENTS}"
        assert set(values) == set(_HOOKS[name]), f"{name} takes {list(_HOOKS[name])}, got {sorted(values)}"
        self.load_hooks()
        results = [self._call(name, implementation, values) for implementation in self._implementations(name)]
        return [result for result in results if isinstance(result, PluginFault)]

    def doctor(self) -> Diagnosis:
        """What is wrong with the installed plugins. Imports every component and hook plugin."""
        scanned = index.scan()
        lacking = dict[tuple[str, str], Any]()
        reports = [*scanned.faults]
        late = dict[str, PluginError]()  # by distribution: no other component of it is waited for
        for ref in scanned.components:
            error = late.get(ref.distribution) or _error_of(ref)
            if error is not None and isinstance(error.__cause__, TimeoutError):
                late[ref.distribution] = error
            if isinstance(error, MissingExtraError):
                lacking.setdefault((error.package, error.hint), []).append(f"{index.KIND_WORDS[ref.kind]} {ref.name}")
            elif error is not None:
                reports.append(str(error))
        self.load_hooks()
        faults = [*reports, *map(str, self.faults), *map(str, self.remarks), *_clashes(scanned.components)]
        return Diagnosis([*dict.fromkeys(faults)], lacking)

    def _implementations(self, name: str) -> Sequence[pluggy.HookImpl]:
        """The implementations of a hook in pluggy's calling order, with `tryfirst` and `trylast`."""
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, name)
        return caller.get_hookimpls()[::-1]

    def _call(self, name: str, implementation: pluggy.HookImpl, values: Mapping[str, Any]) -> Any:
        """The result of one implementation, or its PluginFault. A generator of names is read to its end."""
        owner = self._owners[implementation.plugin_name]
        try:
            with authors_code():
                result = implementation.function(*[values[argument] for argument in implementation.argnames])
                if inspect.iscoroutine(result):
                    result.close()
                    return PluginFault(*owner, f"{name} returned a coroutine; hooks are plain functions")
                return result if result is None or name != "rollouts_list_components" else _checked_names(result)
        except Exception as exc:
            said = report(exc, f"the hook {name} of {owner[0]}", is_noted=False)
            return PluginFault(*owner, f"{name}: {' '.join(said.split())}")

    def _listed(self, kind: str) -> Refs:
        """The components of this kind that hook plugins list. A failing plugin is added to `faults`."""
        index.check_kind(kind)
        refs: Refs = []
        for implementation in self._implementations("rollouts_list_components"):
            names = self._call("rollouts_list_components", implementation, {"kind": kind})
            if isinstance(names, PluginFault):
                self._note([names])
            elif names is not None:
                owner = self._owners[implementation.plugin_name]
                refs += [ComponentRef(kind, name, "", *owner, about) for name, about in names.items()]
        return refs

    def _note(self, faults: Faults) -> Faults:
        self.faults += [fault for fault in faults if fault not in self.faults]
        return faults


class _Pluggy(pluggy.PluginManager):
    """pluggy's manager. It leaves out functions that cannot be called as hooks, and records why.

    `refusals` holds the messages for the plugin that is being registered. `remarks` holds a message for each function
    that looks like a hook but is not one, with the name of its plugin.
    """

    def __init__(self) -> None:
        super().__init__("rollouts")
        self.refusals: list[str] = []
        self.remarks: list[tuple[str, str]] = []
        self._current = ""

    def register_checked(self, plugin: object, name: str) -> list[str]:
        """Register a plugin, and return why it or some of its functions were refused."""
        if inspect.isclass(plugin):
            return [f"{plugin.__qualname__} is a class; the entry point must name a module or an object"]
        self.refusals, self._current = [], name
        try:
            with authors_code():
                self.register(plugin, name)
        except Exception as exc:  # from pluggy, or from an attribute of the plugin
            if self.is_registered(plugin):  # some versions of pluggy register before they check
                self.unregister(plugin)
            self.refusals.append(_why_refused(exc))
        return self.refusals

    def parse_hookimpl_opts(self, plugin: object, name: str) -> HookimplOpts | None:
        """The options of a hook implementation; None if the attribute is not one, or is refused. Called by pluggy."""
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None:
            function = getattr(plugin, name, None) if name.startswith("rollouts_") else None
            if inspect.isroutine(function) and not hasattr(function, "rollouts_spec"):
                self.remarks.append((self._current, f"{name} has no @hookimpl, so it is never called"))
            return None
        hook = options["specname"] or name
        if hook not in _HOOKS:
            meant = suggestion(hook, _HOOKS) or f"hooks: {', '.join(_HOOKS)}"
            self.remarks.append((self._current, f"{name} is no hook of rollouts, so it is never called; {meant}"))
            return None
        refusal = _refusal(hook, getattr(plugin, name), options)
        self.refusals += [f"{name} {refusal}"] if refusal else []
        return None if refusal else options


def _why_refused(exc: Exception) -> str:
    """Why pluggy did not register a plugin. For an unknown argument, it lists the arguments of the hook."""
    if not isinstance(exc, PluginValidationError):
        return " ".join(f"cannot be registered: {named(exc)}".split())
    text = " ".join(str(exc).split())
    listing = (f"; the arguments of the hook: {', '.join(_HOOKS[hook])}" for hook in _HOOKS if f"{hook!r}" in text)
    return text + next(listing, "")


def _refusal(hook: str, function: Any, options: HookimplOpts) -> str:
    """Why a function cannot be called as this hook; empty if it can."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is async, but hooks are called and never awaited: write `def`"
    if options["wrapper"] or options["hookwrapper"]:
        return "is a hook wrapper, which rollouts does not support: remove `wrapper` or `hookwrapper`"
    if inspect.isgeneratorfunction(function) and hook != "rollouts_list_components":
        return "is a generator, so its body would never run: remove `yield`"
    return ""


def _checked_names(names: Any) -> dict[str, str]:
    """The listed names, with their descriptions. Raises TypeError."""
    if isinstance(names, str):
        raise TypeError(f"returned the text {names!r}; it must return a list of names")
    listed = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, "")
    for name in (name for name in (*listed, *listed.values()) if not isinstance(name, str)):
        raise TypeError(f"returned {shown(name)} among the names; each must be text")
    return listed


def _error_of(ref: ComponentRef) -> PluginError | None:
    """The fault of one component: its import fails, or its signature breaks a rule; None if it has no fault."""
    label = f"{ref.distribution} {ref.version}: {index.KIND_WORDS[ref.kind]} {ref.name}"
    try:
        component = load_component(ref)
        if ref.kind in SIGNED_KINDS:
            check_signature(component, ref.kind, label)
    except PluginError as exc:
        return exc
    return None


def _clashes(refs: Iterable[ComponentRef]) -> list[str]:
    """A message for each name that several distributions offer."""
    owners: dict[tuple[str, str], list[str]] = {}
    for ref in refs:
        owners.setdefault((ref.kind, ref.name), []).append(ref.qualified)
    several = ((*named, found) for named, found in owners.items() if len(found) > 1)
    words = "{} {!r} is offered by {} distributions; type one of: {}".format
    return [words(index.KIND_WORDS[kind], name, len(found), ", ".join(found)) for kind, name, found in several]
