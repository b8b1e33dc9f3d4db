"""The `spec` command: a group that imports a subcommand when it runs, and the one error mapper.

Exit codes: 0 done, 1 refused or failed, 2 bad usage, 130 interrupted, 141 the reader of our output left.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import click

from .. import __version__
from ..errors import FINDINGS, PluginError, RefusedError, SpecError
from ..settings import check_variables, early, unknown_variables

log = logging.getLogger("mlx_spec.settings")

# name -> (where the command lives, its line in `spec --help`)
COMMANDS = {
    "generate": ("generate:command", "Generate text, with a summary of what speculation gained."),
    "inspect": ("inspect:command", "Say what a model directory is and which drafters fit it."),
    "pair": ("pair:command", "Say whether a target and a drafter work together, and what to expect."),
    "probe": ("probe:command", "Measure how exact a block verify is on this machine."),
    "bench": ("bench:command", "Time speculative against plain decoding in alternating runs."),
    "tune": ("tune:command", "Find the fastest block size for a pair on this machine, and keep it."),
    "convert": (
        "convert:command",
        "Write a GGUF file or a safetensors checkpoint as an MLX checkpoint, quantised on request.",
    ),
    "split-mtp": ("split:command", "Extract the drafter head of a checkpoint into a directory of its own."),
    "new": ("new:command", "Write the start of a plugin: a drafter, or a family."),
    "plugins": ("plugins:command", "List installed plugins, what they serve and what failed to load."),
    "doctor": ("doctor:command", "Check this installation and name the next step for each problem."),
}
ASKS_HELP = f"{__name__}.help"
INTERRUPTED, READER_LEFT = 130, 141
TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
NO_ARGUMENTS = getattr(click.exceptions, "NoArgsIsHelpError", ())  # older click prints the help and exits


class SpecGroup(click.Group):
    """Lists commands without importing them; plugins are loaded only when a name is not built in."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._asked: object = None  # the plugin manager whose plugins have added their commands
        self._own: set[str] = set()  # commands that are here without any plugin

    def list_commands(self, ctx: click.Context) -> list[str]:
        self.load_plugin_commands()
        return [*COMMANDS, *sorted(self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return _import_command(COMMANDS[cmd_name][0])
        self.load_plugin_commands()
        return self.commands.get(cmd_name)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """As click's, but a name that is taken is refused instead of replaced."""
        name = name or cmd.name or ""
        if name in COMMANDS or name in self.commands:
            raise PluginError(
                f"command {name!r}",
                found="it taken already",
                expected="a new name",
                next_step="Rename the command in the plugin's spec_register_commands",
                code="G08",
            )
        super().add_command(cmd, name)

    def load_plugin_commands(self) -> None:
        """Ask every plugin once; one that fails is reported by `spec plugins` and adds what it got to."""
        from ..plugins import get_manager

        manager = get_manager()
        if self._asked is manager:
            return
        if self._asked is None:
            self._own = set(self.commands)
        for name in set(self.commands) - self._own:  # added by plugins of a manager that is gone
            del self.commands[name]
        self._asked = manager
        for record in manager.records:
            if record.loaded and "spec_register_commands" in record.hooks:
                manager.add_commands(record, self)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help lines of the built-in commands come from COMMANDS, so nothing is imported for them."""
        rows = [(name, COMMANDS[name][1]) for name in COMMANDS]
        names = self.list_commands(ctx)
        rows += [(n, self.commands[n].get_short_help_str(80)) for n in names if n not in COMMANDS]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's; an unknown command also names the closest one."""
        ctx.meta[ASKS_HELP] = not set(args[1:]).isdisjoint(ctx.help_option_names)
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if isinstance(error, click.NoSuchOption):
                raise
            from .usage import unknown_command

            raise unknown_command(args[0], self.list_commands(ctx)) from error

    def main(self, args: Sequence[str] | None = None, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        """Run a command line; in standalone mode every outcome becomes an exit code."""
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        extra.setdefault("prog_name", "spec")
        try:
            _need_streams()
            result = super().main(args, standalone_mode=False, **extra)
            sys.stdout.flush()
            code = result if isinstance(result, int) else 0
        except BaseException as error:  # every way out is mapped here, once
            code = exit_code(error)
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # before click's own handler turns it into exit 1
            raise ReaderLeft from error


class ReaderLeft(Exception):
    """Whoever read our output has closed it (`spec ... | head`)."""


def _import_command(where: str) -> click.Command:
    module, _, attribute = where.partition(":")
    command: click.Command = getattr(import_module(f"{__name__}.{module}"), attribute)
    return command


def exit_code(error: BaseException) -> int:
    """Say what went wrong, on stderr and without a traceback; return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, ReaderLeft | BrokenPipeError):
        _discard_output()
        return READER_LEFT
    if isinstance(error, KeyboardInterrupt | click.Abort):
        with suppress(OSError):  # as below
            click.echo("interrupted", err=True)
        return INTERRUPTED
    shown = _shown(error)
    if isinstance(error, OSError) and isinstance(shown, SpecError):
        _discard_output()
    with suppress(OSError):  # nobody can be told when stderr is full too
        if isinstance(shown, click.ClickException):  # a plugin's own
            shown.show()
        elif isinstance(shown, SpecError):
            click.echo(shown.line(), err=True)
        else:
            hint = "" if early().debug else " Set MLX_SPEC_LOG_LEVEL=debug for the traceback."
            click.echo(f"internal error: {type(error).__name__}: {error}.{hint}", err=True)
        if early().debug:
            import traceback

            click.echo("".join(traceback.format_exception(error)), err=True)
    return shown.exit_code if isinstance(shown, SpecError | click.ClickException) else 1


def _shown(error: BaseException) -> BaseException:
    """What is told instead of `error`: click's refusals and a full output in our form, all else as it is."""
    if isinstance(error, click.UsageError) and not isinstance(error, NO_ARGUMENTS):
        from .usage import as_usage_error

        return as_usage_error(error)
    # An error of a file names it; one of an open stream, which here is the output, names nothing.
    if isinstance(error, OSError) and error.filename is None and error.errno in TAKES_NO_MORE:
        return _no_output(error.strerror or str(error))
    return error


def _need_streams() -> None:
    """Refuse to work for nobody; talk that nobody can read is dropped."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - as long as the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
        raise _no_output("standard output closed")
    # A model's files may hold what has no UTF-8, and a terminal may have another encoding: show it escaped.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _no_output(found: str) -> SpecError:
    return RefusedError(
        "writing the output",
        found=found,
        expected="a place that takes it",
        next_step="Make room, or send it elsewhere",
        code="R11",
    )


def _discard_output() -> None:
    """Python flushes stdout once more at exit; give it something that can be written to."""
    with suppress(OSError, ValueError):  # a captured stdout has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is now, not to what it was when logging was set up."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def configure_logging() -> None:
    """Messages of mlx_spec go to stderr at MLX_SPEC_LOG_LEVEL; other libraries keep their own say."""
    logger = logging.getLogger("mlx_spec")
    level = getattr(logging, early().log_level.upper(), logging.WARNING)
    logger.setLevel(level)
    if not logger.handlers:
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        handler.addFilter(lambda record: record.name != FINDINGS)  # the commands tell them, each once
        logger.addHandler(handler)


def warn_of_misspelt() -> None:
    """One line about MLX_SPEC_* variables that nothing reads."""
    unknown = unknown_variables()
    if unknown:
        told = [f"{name} (did you mean {close}?)" if close else name for name, close in unknown]
        log.warning("not read, since no setting is called so: %s; spec doctor lists the settings", ", ".join(told))


def refuse_variables(command: str | None) -> None:
    """UsageError for a variable of ours with a value that means nothing, once and before any work."""
    if command == "plugins":  # which shows what may be why a kernel is unknown, and asks then
        check_variables()
        return
    from ..kernels import check_kernels

    with suppress(ImportError):  # without mlx no name means anything; what needs it says that
        check_kernels()


@click.group("spec", cls=SpecGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="mlx-spec")
def cli() -> None:
    """Exact speculative decoding on MLX: a drafter guesses ahead, the text stays the target's own.

    A first try without models of your own: spec generate -p "def join(parts" runs a small bundled pair. spec doctor
    checks the installation.
    """
    configure_logging()
    ctx = click.get_current_context()
    if ctx.invoked_subcommand != "doctor":  # which tells of each in its table
        warn_of_misspelt()
        if not ctx.meta[ASKS_HELP]:
            refuse_variables(ctx.invoked_subcommand)


def main() -> NoReturn:
    """Entry point of the `spec` script."""
    cli.main()
    raise SystemExit(0)
