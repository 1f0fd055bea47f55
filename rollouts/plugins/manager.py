"""Hook plugins, and the one place that finds a component wherever it is: metadata first, then packs.

A thin wrapper on `pluggy.PluginManager`, which keeps the plugins and checks implementations against the specifications.
What it adds is honesty about failure: plugins load one by one, implementations are called one at a time, and each that
fails becomes a PluginFault with its distribution, version and cause. Nothing loads before it is needed.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pluggy
from pluggy import HookimplOpts, PluginValidationError

from rollouts.author_code import authors_code, shown
from rollouts.errors import BrokenPluginError, PluginError, UnknownComponentError, suggestion
from rollouts.plugins import hookspecs, index
from rollouts.plugins.index import ComponentRef
from rollouts.plugins.loading import cause_of, load_component
from rollouts.plugins.signature import SIGNED_KINDS, check_signature

_HOOKS = {
    name: tuple(inspect.signature(getattr(hookspecs, name)).parameters)
    for name in sorted(vars(hookspecs))
    if name.startswith("rollouts_")
}
"""The arguments of each hook."""


class PluginFault(NamedTuple):
    """What went wrong with one plugin; it stopped nothing else."""

    distribution: str
    version: str
    cause: str

    def __str__(self) -> str:
        return f"{' '.join(part for part in (self.distribution, self.version) if part)}: {self.cause}"


Faults = list[PluginFault]
Refs = list[ComponentRef]
Texts = list[str]


class PluginManager:
    """Finds, lists and loads components, and calls hooks.

    `faults` holds what went wrong while plugins were loaded or asked for components, each once, in order.
    """

    def __init__(self) -> None:
        self.faults: Faults = []
        self._pluggy = _Pluggy()
        self._pluggy.add_hookspecs(hookspecs)
        self._owners: dict[str, tuple[str, str]] = {}
        self._made: dict[ComponentRef, Any] = {}
        self._hooks_loaded = False

    def register(self, plugin: object, *, distribution: str, version: str = "") -> Faults:
        """Add a hook plugin (a module or an object with `@hookimpl` functions); returns what is wrong with it.

        A function that is refused is left out alone; the plugin's other hooks count. Registering it twice does nothing.
        """
        if self._pluggy.is_registered(plugin):
            return []
        name = f"{distribution}#{len(self._owners)}"
        self._owners[name] = (distribution, version)
        causes = self._pluggy.register_checked(plugin, name)
        return self._note([PluginFault(distribution, version, cause) for cause in causes])

    def load_hooks(self) -> Faults:
        """Load every installed hook plugin, one by one, once; returns the faults of this loading."""
        if self._hooks_loaded:
            return []
        self._hooks_loaded = True
        faults: Faults = []
        # pluggy calls the last one registered first; reversed, calls go by the distributions' names.
        for ref in reversed(sorted(index.scan().hooks, key=lambda ref: (index.normalize(ref.distribution), ref.name))):
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
            return index.find_component(kind, name)
        except UnknownComponentError:
            if index.names_file(name):
                raise
        self.load_hooks()
        faults = self.faults[:]
        for implementation in self._implementations("rollouts_find_component"):
            distribution, version = self._owners[implementation.plugin_name]
            owner, _, rest = name.partition("/")
            mine = rest and index.normalize(owner) == index.normalize(distribution)
            for asked in (rest, name) if mine else (name,):
                found = self._call("rollouts_find_component", implementation, {"kind": kind, "name": asked})
                if isinstance(found, ComponentRef):
                    return found
                if isinstance(found, PluginFault):
                    faults += self._note([found])
                elif found is not None:
                    ref = ComponentRef(kind, asked, "", distribution, version)
                    self._made[ref] = found
                    return ref
        known = [*index.installed_components(), *self._listed(kind)]
        notes = [f"could not answer: {fault}" for fault in dict.fromkeys(faults)]
        raise index.unknown_component(kind, name, known, notes)

    def load(self, ref: ComponentRef) -> Any:
        """Import a component that `find` or `list` returned. Raises BrokenPluginError, UnknownComponentError."""
        if ref.distribution and not ref.value:
            found = ref if ref in self._made else self.find(ref.kind, ref.qualified)
            return self._made[found] if found in self._made else load_component(found)
        return load_component(ref)

    def list(self, kind: str | None = None, *, hooks: bool = False) -> Refs:
        """Components (of one kind), sorted, from metadata; with `hooks` also those that packs name.

        No component's module is imported; `hooks` imports the hook plugins.
        """
        found = index.installed_components(kind)
        if hooks:
            self.load_hooks()
            for each in index.KINDS if kind is None else (kind,):
                found += self._listed(each)
        return index.sort_refs(dict.fromkeys(found))

    def call_event(self, name: str, /, **values: Any) -> Faults:
        """Call every implementation of a run event, one at a time; returns those that raised.

        `values` are all the arguments of the specification. Hook plugins are loaded if they are not yet.
        """
        assert name in hookspecs.EVENTS, f"{name!r} is no event; events: {hookspecs.EVENTS}"
        assert set(values) == set(_HOOKS[name]), f"{name} takes {list(_HOOKS[name])}, got {sorted(values)}"
        self.load_hooks()
        results = [self._call(name, implementation, values) for implementation in self._implementations(name)]
        return [result for result in results if isinstance(result, PluginFault)]

    def doctor(self) -> Texts:
        """Everything that is wrong with what is installed, in words; imports every component and hook plugin."""
        scanned = index.scan()
        reports = [*scanned.faults, *filter(None, map(_fault_of, scanned.components))]
        self.load_hooks()
        remarks = [PluginFault(*self._owners[name], remark) for name, remark in self._pluggy.remarks]
        return [*reports, *map(str, self.faults), *map(str, remarks), *_clashes(scanned.components)]

    def _implementations(self, name: str) -> Sequence[pluggy.HookImpl]:
        """In pluggy's calling order: the last one registered first, `tryfirst` and `trylast` heeded."""
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, name)
        return caller.get_hookimpls()[::-1]

    def _call(self, name: str, implementation: pluggy.HookImpl, values: Mapping[str, Any]) -> Any:
        """One implementation's result, read whole where it is a generator; or the PluginFault that names it."""
        owner = self._owners[implementation.plugin_name]
        try:
            with authors_code():
                result = implementation.function(*[values[argument] for argument in implementation.argnames])
                if inspect.iscoroutine(result):
                    result.close()
                    return PluginFault(*owner, f"{name} returned a coroutine; hooks are plain functions")
                return result if result is None or name != "rollouts_list_components" else _checked_names(result)
        except Exception as exc:
            return PluginFault(*owner, f"{name}: {index.one_line(exc)}")

    def _listed(self, kind: str) -> Refs:
        """What the packs name of this kind; a pack that fails is noted."""
        index.check_kind(kind)
        refs: Refs = []
        for implementation in self._implementations("rollouts_list_components"):
            names = self._call("rollouts_list_components", implementation, {"kind": kind})
            if isinstance(names, PluginFault):
                self._note([names])
            elif names is not None:
                refs += [ComponentRef(kind, name, "", *self._owners[implementation.plugin_name]) for name in names]
        return refs

    def _note(self, faults: Faults) -> Faults:
        self.faults += [fault for fault in faults if fault not in self.faults]
        return faults


class _Pluggy(pluggy.PluginManager):
    """pluggy's manager, which refuses by function what it could not call honestly, and says why.

    `refusals` are those of the plugin that is registered now; `remarks` are functions that look like hooks but are
    none, each with the plugin's name.
    """

    def __init__(self) -> None:
        super().__init__("rollouts")
        self.refusals: list[str] = []
        self.remarks: list[tuple[str, str]] = []
        self._current = ""

    def register_checked(self, plugin: object, name: str) -> list[str]:
        """Register; returns the causes for which the plugin, or functions of it, were refused."""
        if inspect.isclass(plugin):
            return [f"{plugin.__qualname__} is a class; the entry point must name a module or an object"]
        self.refusals, self._current = [], name
        try:
            with authors_code():
                self.register(plugin, name)
        except Exception as exc:  # pluggy's own, or that of a strange object's attribute
            if self.is_registered(plugin):  # some versions of pluggy register before they check
                self.unregister(plugin)
            self.refusals.append(_why_refused(exc))
        return self.refusals

    def parse_hookimpl_opts(self, plugin: object, name: str) -> HookimplOpts | None:
        """pluggy's question whether an attribute is an implementation; None leaves it out."""
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
    """Why pluggy did not register a plugin; where an argument is unknown, with those that its hook has."""
    if not isinstance(exc, PluginValidationError):
        return f"cannot be registered: {index.one_line(exc)}"
    text = " ".join(str(exc).split())
    hook = next((hook for hook in _HOOKS if f"{hook!r}" in text), None)
    return text + (f"; it may take: {', '.join(_HOOKS[hook])}" if hook else "")


def _refusal(hook: str, function: Any, options: HookimplOpts) -> str:
    """Why a function cannot be called as this hook; empty where it can."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is async; hooks are plain functions (nothing would await it): write `def`"
    if options["wrapper"] or options["hookwrapper"]:
        return "is a wrapper; implementations are called one at a time, so there is nothing to wrap"
    if inspect.isgeneratorfunction(function) and hook != "rollouts_list_components":
        return "is a generator, so its body would never run: remove `yield`"
    return ""


def _checked_names(names: Any) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"returned the text {names!r}; it must return a list of names")
    listed = list(names)
    for name in listed:
        if not isinstance(name, str):
            raise TypeError(f"returned {shown(name)} among the names; each must be text")
    return listed


def _fault_of(ref: ComponentRef) -> str:
    """What is wrong with one component: it does not import, or asks for what its kind does not offer; else empty."""
    label = f"{ref.distribution} {ref.version}: {index.KIND_WORDS[ref.kind]} {ref.name}"
    try:
        component = load_component(ref)
        if ref.kind in SIGNED_KINDS:
            check_signature(component, ref.kind, label)
    except PluginError as exc:
        return str(exc)
    return ""


def _clashes(refs: Iterable[ComponentRef]) -> list[str]:
    """Names that more than one distribution claims."""
    by_name = itertools.groupby(refs, key=lambda ref: (ref.kind, ref.name))  # they are sorted so
    claimed = [(kind, name, list(found)) for (kind, name), found in by_name]
    return [
        f"{index.KIND_WORDS[kind]} {name!r} is offered by {len(found)} distributions; type one of: "
        + ", ".join(ref.qualified for ref in found)
        for kind, name, found in claimed
        if len(found) > 1
    ]
