"""Loading plugins, each in isolation, and calling their hooks.

A plugin that cannot be loaded becomes a record with an error; it never stops the others or the CLI.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Any

import pluggy

from . import __version__, hookspecs
from .discovery import NOT_INSTALLED, EntryRecord, discover
from .errors import PluginError, SpecError
from .registry import CORE, Register, Registry
from .settings import early, plugins_note

if TYPE_CHECKING:
    import click

log = logging.getLogger("mlx_spec.plugins")
trace_log = logging.getLogger("mlx_spec.trace")

API_VERSION = (0, 1)  # a plugin may set MLX_SPEC_API = (major, minor): the oldest hook API it works with
DEFAULTS = "mlx_spec.defaults"


@dataclass(slots=True)
class PluginRecord:
    """What became of one entry point.

    Attributes:
        plugin: the registered module or object, None when it was not loaded.
        hooks: names of the hooks it implements.
        claims: what its spec_register asked for.
        errors: why it, or one of its claims or commands, is not usable; empty when all is well.
    """

    name: str
    distribution: str
    version: str
    value: str
    plugin: Any = None
    hooks: tuple[str, ...] = ()
    claims: Register | None = None
    errors: list[SpecError] = field(default_factory=list)

    @property
    def loaded(self) -> bool:
        """Whether its hooks are called."""
        return self.plugin is not None


class PluginManager:
    """The loaded plugins, what they claimed, and callers of their hooks."""

    core_name = CORE  # owner of the default hooks

    def __init__(self, entries: Sequence[EntryRecord], trace: bool = False):
        """entries: the plugins in the order they are registered; core's own (`core_entry()`) goes first."""
        self.registry = Registry()
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)
        self._traced = trace
        if trace:
            self._pm.add_hookcall_monitoring(_trace_call, _trace_result)
        self.records = [self._load_entry(entry) for entry in entries]
        for record in self.records:
            record.errors.extend(self.registry.conflicts(record.name))

    # -- calling ---------------------------------------------------------------------------------------

    @property
    def hook(self) -> Any:
        """pluggy's relay: every plugin is asked. Use keywords."""
        return self._pm.hook

    def owner_call(self, hook_name: str, owner: str) -> Callable[..., Any]:
        """A caller of one hook that reaches `owner`, core's defaults and observers, nobody else.

        Bind it once per pair and call it with keywords. Observers are wrapper=True implementations of
        any plugin. Raises PluginError when `owner` is not a loaded plugin.
        """
        if owner != CORE and self._pm.get_plugin(owner) is None:
            raise self._no_owner(hook_name, owner)
        hook = getattr(self._pm.hook, hook_name)
        others = [
            impl.plugin
            for impl in hook.get_hookimpls()
            if impl.plugin_name not in (owner, CORE) and not (impl.wrapper or impl.hookwrapper)
        ]
        caller = self._pm.subset_hook_caller(hook_name, others)
        return caller if self._traced else _only_one(caller) or caller

    def ask_each(self, hook_name: str, **arguments: Any) -> list[tuple[PluginRecord, Any]]:
        """Ask every plugin by itself: (record, answer) of those that implement the hook.

        One that raises is logged and left out, so it cannot take the others' answers with it; a
        SpecError is meant for the user and propagates.
        """
        answers: list[tuple[PluginRecord, Any]] = []
        for record in self.records:
            if not record.loaded or hook_name not in record.hooks:
                continue
            try:
                answers.append((record, self._call_one(record, hook_name, arguments)))
            except SpecError:
                raise
            except Exception as error:  # foreign code: said, and the others still answer
                log.warning("plugin %s: %s raised %s: %s", record.name, hook_name, type(error).__name__, error)
                log.debug("%s of plugin %s", hook_name, record.name, exc_info=True)
        return answers

    def add_commands(self, record: PluginRecord, cli: click.Group) -> None:
        """Let one plugin add its commands; what goes wrong is kept in its record."""
        try:
            self._call_one(record, "spec_register_commands", {"cli": cli})
        except (Exception, SystemExit) as error:
            record.errors.append(_load_error(record, error))
            log.debug("commands of plugin %s", record.name, exc_info=True)

    def _call_one(self, record: PluginRecord, hook_name: str, arguments: dict[str, Any]) -> Any:
        """One hook of one plugin alone; a non-firstresult answer is unpacked from pluggy's list."""
        others = [p for p in self._pm.get_plugins() if p is not record.plugin]
        answer = self._pm.subset_hook_caller(hook_name, others)(**arguments)
        return answer[0] if isinstance(answer, list) and len(answer) == 1 else answer

    def record(self, name: str) -> PluginRecord | None:
        """The loaded plugin of that name."""
        return next((r for r in self.records if r.name == name and r.loaded), None)

    def missing(self) -> str:
        """What to add where a plugin is missed: who failed to load, whom MLX_SPEC_PLUGINS lets in."""
        failed = ", ".join(record.name for record in self.records if not record.loaded)
        told = f" (spec plugins says why these failed to load: {failed})" if failed else ""
        return plugins_note() + told

    def failures(self) -> list[str]:
        """A note for every plugin that could not be loaded."""
        return [
            f"plugin {record.name} failed to load, so what it serves is not here: spec plugins says why"
            for record in self.records
            if not record.loaded
        ]

    def check_asked(self) -> None:
        """Raise the PluginError of a name in MLX_SPEC_PLUGINS that nothing installed provides.

        For what is about to use plugins: a setting that cannot be followed is refused, not guessed at.
        """
        for record in self.records:
            for error in record.errors:
                if error.code == NOT_INSTALLED:
                    raise error

    # -- loading ---------------------------------------------------------------------------------------

    def _load_entry(self, entry: EntryRecord) -> PluginRecord:
        """One entry, loaded or with the reason why not."""
        record = PluginRecord(entry.name, entry.distribution, entry.version, entry.value)
        if entry.error is not None:
            record.errors.append(entry.error)
        elif entry.name == CORE and entry.value != DEFAULTS:
            record.errors.append(_reserved(entry))
        elif entry.load is not None:
            self._load(record, entry.load)
        return record

    def _load(self, record: PluginRecord, load: Callable[[], Any]) -> None:
        """Import, check, register and ask one plugin; on any failure it is left out with the reason."""
        try:
            plugin = load()
            _check_api(record, plugin)
            hooks = _check_hooks(self._pm, record, plugin)
            self._pm.register(plugin, record.name)
        except (Exception, SystemExit) as error:
            record.errors.append(_load_error(record, error))
            log.debug("plugin %s failed to load", record.name, exc_info=True)
            return
        record.plugin, record.hooks = plugin, hooks
        try:
            register = Register(record.name, record.distribution)
            if "spec_register" in hooks:
                self._call_one(record, "spec_register", {"register": register})
            self.registry.add(register)
            record.claims = register
        except (Exception, SystemExit) as error:
            self._pm.unregister(plugin)
            record.plugin = None
            record.errors.append(_load_error(record, error))
            log.debug("plugin %s failed to register", record.name, exc_info=True)

    def _no_owner(self, hook_name: str, owner: str) -> PluginError:
        names = sorted(r.name for r in self.records if r.loaded)
        return PluginError(
            f"owner of {hook_name}",
            found=repr(owner),
            expected=f"a loaded plugin ({', '.join(names) or 'none'})",
            next_step="See what failed to load with spec plugins",
            code="G06",
        )


# -- the one manager of a process ------------------------------------------------------------------------

_lock = Lock()
_manager: PluginManager | None = None


def get_manager() -> PluginManager:
    """The manager with core's defaults and every plugin MLX_SPEC_PLUGINS lets in; built once."""
    global _manager
    with _lock:
        if _manager is None:
            settings = early()
            trace = "hooks" in settings.trace
            if trace and not trace_log.handlers:
                _trace_to_stderr()
            _manager = PluginManager([core_entry(), *discover(settings.plugins)], trace)
        return _manager


def reset() -> None:
    """Forget the manager; the next `get_manager` discovers and loads afresh (tests)."""
    global _manager
    with _lock:
        _manager = None


def core_entry() -> EntryRecord:
    """Core's own default hooks, as the first plugin."""
    return EntryRecord(CORE, "mlx-spec", __version__, DEFAULTS, load=lambda: import_module(DEFAULTS))


# -- checks ----------------------------------------------------------------------------------------------


def _check_api(record: PluginRecord, plugin: Any) -> None:
    """Refuse a plugin written for another hook API than core's."""
    wanted = getattr(plugin, "MLX_SPEC_API", API_VERSION)
    try:
        major, minor = wanted
        fits = major == API_VERSION[0] and minor <= API_VERSION[1]
    except (TypeError, ValueError) as error:
        step = "Correct it in the plugin"
        raise _error(record, "MLX_SPEC_API", repr(wanted), "a pair (major, minor)", step) from error
    if not fits:
        have = f"{API_VERSION[0]}.{API_VERSION[1]} (mlx-spec {__version__})"
        step = f"Update mlx-spec and {record.distribution} to versions that go together"
        raise _error(record, "hook API", f"a plugin for {major}.{minor}", f"one for {have}", step)


def _check_hooks(pm: pluggy.PluginManager, record: PluginRecord, plugin: Any) -> tuple[str, ...]:
    """Names of the hooks a plugin implements; raises PluginError for one that could never work as meant."""
    specs = _hook_names()
    found: list[str] = []
    for name in dir(plugin):
        options = pm.parse_hookimpl_opts(plugin, name)
        if options is None:
            _check_unmarked(record, plugin, name, specs)
            continue
        hook = options.get("specname") or name
        if hook not in specs:
            if options.get("optionalhook"):
                continue
            close = get_close_matches(hook, specs, n=1)
            step = f"Did you mean {close[0]}?" if close else f"The hooks are {', '.join(sorted(specs))}"
            raise _error(record, "hook name", repr(hook), "a hook of mlx_spec.hookspecs", step)
        _check_signature(record, hook, getattr(plugin, name), specs[hook])
        wraps = options.get("wrapper") or options.get("hookwrapper")
        if options.get("trylast") and not wraps and record.name != CORE:
            step = "Remove trylast: core's defaults are last, behind them it would never run"
            raise _error(record, f"hook {hook}", "trylast=True", "core alone to use it", step)
        found.append(hook)
    return tuple(sorted(found))


def _check_unmarked(record: PluginRecord, plugin: Any, name: str, specs: dict[str, Any]) -> None:
    """A module's own function named like a hook but not marked would silently never be called."""
    function = getattr(plugin, name, None) if name in specs else None
    if inspect.isfunction(function) and function.__module__ == getattr(plugin, "__name__", None):
        raise _error(record, f"function {name}", "it without @hookimpl", "a marked hook", "Add @mlx_spec.hookimpl")


def _check_signature(record: PluginRecord, hook: str, function: Any, spec: Any) -> None:
    """No default values (a caller could never override them) and no arguments the hook does not have."""
    allowed = set(inspect.signature(spec).parameters)
    for argument in inspect.signature(function).parameters.values():
        if argument.default is not argument.empty:
            step = f"Remove the default of {argument.name!r}"
            raise _error(record, f"hook {hook}", f"an argument with a default, {argument}", "none", step)
        if argument.name not in allowed:
            expected = f"some of {', '.join(inspect.signature(spec).parameters)}"
            raise _error(record, f"hook {hook}", f"argument {argument.name!r}", expected, "Rename or remove it")


def _hook_names() -> dict[str, Any]:
    """Hook name -> its specification function."""
    marker = hookspecs.PROJECT + "_spec"
    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, marker)}


def _only_one(caller: pluggy.HookCaller) -> Callable[..., Any] | None:
    """The one implementation of a hook with one answer, when it can be called as the hook is."""
    spec, impls = caller.spec, caller.get_hookimpls()
    if spec is None or not spec.opts["firstresult"] or len(impls) != 1:
        return None
    impl = impls[0]
    plain = not (impl.wrapper or impl.hookwrapper) and set(impl.argnames) == set(spec.argnames)
    return impl.function if plain else None


# -- errors and traces -----------------------------------------------------------------------------------


def _error(record: PluginRecord, what: str, found: str, expected: str, next_step: str) -> PluginError:
    where = f"plugin {record.name!r} of {record.distribution or 'mlx-spec'}"
    return PluginError(f"{where}: {what}", found=found, expected=expected, next_step=next_step, code="G07")


def _load_error(record: PluginRecord, error: BaseException) -> SpecError:
    """The error to show; SpecErrors stay as they are."""
    if isinstance(error, SpecError):
        return error
    place = f" ({error.filename}:{error.lineno})" if isinstance(error, SyntaxError) else ""
    step = "Set MLX_SPEC_LOG_LEVEL=debug for the traceback; reinstall or uninstall the distribution"
    shown = str(error.msg if isinstance(error, SyntaxError) else error)
    return _error(record, "loading", f"{type(error).__name__}: {shown}{place}", "a clean import", step)


def _reserved(entry: EntryRecord) -> PluginError:
    return PluginError(
        f"entry point {entry.name!r} of {entry.distribution}",
        found="the name mlx-spec uses for its own defaults",
        expected="another name",
        next_step="Rename it in the plugin's pyproject.toml",
        code="G01",
    )


def _trace_to_stderr() -> None:
    """Show the trace whatever the log level: it was asked for by name."""
    trace_log.addHandler(logging.StreamHandler())
    trace_log.setLevel(logging.INFO)
    trace_log.propagate = False


def _trace_call(hook_name: str, impls: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    names = ", ".join(impl.plugin_name for impl in reversed(impls))
    trace_log.info("%s(%s) -> %s", hook_name, ", ".join(kwargs), names or "nobody")


def _trace_result(outcome: Any, hook_name: str, impls: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if outcome.exception is not None:
        trace_log.info("%s raised %s: %s", hook_name, type(outcome.exception).__name__, outcome.exception)
    else:
        trace_log.info("%s returned %s", hook_name, type(outcome.get_result()).__name__)
