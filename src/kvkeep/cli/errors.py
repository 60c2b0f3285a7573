"""The end of a command: errors and interrupts on one line, and exit codes."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from kvkeep.errors import KVKeepError, MissingPackageError

OWN, OTHER = 2, 1
"""Exit codes: for kvkeep's own errors and wrong usage, and for all other errors."""

_INTERRUPTED, _NOT_READ = 128 + 2, 128 + 13  # as a shell reports SIGINT and SIGPIPE
_LAB_COMMANDS = ("bench", "calibrate", "eval", "inspect")
_DEBUG, _IMPORT = "--debug", "--import"

# click's class, or the class of typer's copy of click
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Group(TyperGroup):
    """A group of commands whose help shows the first paragraph of each command's help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """See click's `Group.format_commands`."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(one)) for name, one in self.commands.items()])


def summary(command: Any) -> str:
    """The first paragraph of a command's help."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


class Commands(Group):
    """The command `kvkeep`: handles the errors of all commands, and takes --debug and --import
    anywhere before "--"."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **more: Any,
    ) -> Any:
        """See click's `Command.main`."""
        given = _with_globals_first(sys.argv[1:] if args is None else args)
        run = partial(super().main, given, prog_name, complete_var, standalone_mode=False, **more)
        if not standalone_mode:
            return run()
        try:
            with reported(debug=given[:1] == [_DEBUG]):
                code = run()
        except typer.Exit as ended:
            code = ended.exit_code
        sys.exit(code or 0)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """See click's `Group.get_command`."""
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in _LAB_COMMANDS and not ctx.resilient_parsing:
            raise MissingPackageError(
                f"kvkeep {cmd_name} is a command of kvkeep-lab; pip install kvkeep-lab"
            )
        return command

    def invoke(self, ctx: Any) -> Any:
        """See click's `Command.invoke`."""
        with reported(debug=ctx.params["debug"]):
            return super().invoke(ctx)


@contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Turn an error into one line on stderr, and into typer.Exit with the exit code.

    Args:
        debug: show its traceback too.
    """
    try:
        yield
    except typer.Exit:
        raise
    except (KeyboardInterrupt, typer.Abort):
        typer.echo(err=True)  # ends the line with ^C
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:  # the reader of stdout has exited, e.g. `head`
        _discard_output()
        raise typer.Exit(_NOT_READ) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = _message(error)
        if message:
            print_error(message)
        raise typer.Exit(code) from None


def print_error(message: str) -> None:
    """Print an error on one line of stderr."""
    Console(stderr=True).print("error:", style="bold red", end=" ")
    typer.echo(" ".join(message.split()), err=True)


def _message(error: Exception) -> tuple[str, int]:
    """The message of an error, and the exit code."""
    if isinstance(error, KVKeepError):
        return str(error), OWN
    if not isinstance(error, _UsageError):
        return f"{type(error).__name__}: {error} ({_DEBUG} shows the traceback)", OTHER
    usage: Any = error
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(usage.message, err=True)
        return "", OWN
    own = isinstance(error, typer.BadParameter) and usage.param is None  # raised by a command
    if own or usage.ctx is None:
        return usage.message, OWN
    usage.message = _with_value(usage)
    message = usage.format_message().rstrip(".")
    see = " See" if message.endswith("?") else "; see"
    return f"{message}{see} `{usage.ctx.command_path} --help`", OWN


def _with_value(usage: Any) -> str:
    """The message of a usage error. Newer versions of typer call the value "Input"; pydantic's
    error has the value itself."""
    found: list[Any] = getattr(usage.__cause__, "errors", list)()
    if not found:
        return str(usage.message)
    return re.sub(r"^Input\b", lambda _: repr(found[0]["input"]), usage.message)


def _with_globals_first(args: Sequence[str]) -> list[str]:
    """Move --debug and each --import to the beginning of the arguments, --debug first."""
    args = list(args)
    end = args.index("--") if "--" in args else len(args)
    debug, imports, others = list[str](), list[str](), list[str]()
    given = iter(args[:end])
    for one in given:
        if one == _DEBUG:
            debug = [one]
        elif one.startswith(f"{_IMPORT}="):
            imports.append(one)
        elif one == _IMPORT:
            imports += [one, *islice(given, 1)]
        else:
            others.append(one)
    return [*debug, *imports, *others, *args[end:]]


def _discard_output() -> None:
    """Discard output that Python still writes to stdout at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
