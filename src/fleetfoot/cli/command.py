"""What a command of the CLI is, and how it says that it was called wrongly."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the table in `fleetfoot.cli.main`."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Adds flags, or commands of the command's own (with `add_command`)."""
    run: Callable[[argparse.Namespace], int] | None = None
    """Does the work and returns the exit code; None where `add_arguments` adds commands that do."""
    epilog: str | None = None
    positional: str = ""
    """What stands before the flags in the usage."""


class UsageError(Exception):
    """The command was called with something that cannot work; its text is all that the user needs."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """What is refused in here was refused because of what the user gave: settings, files, prompts."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> None:
    """Put a command into a parser's table; the parsed arguments get its ``run`` and ``parser``."""
    parser = commands.add_parser(
        command.name,
        help=command.help,
        description=command.help[0].upper() + command.help[1:] + ".",
        epilog=command.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # else a new flag could make a script's abbreviation ambiguous
    )
    command.add_arguments(parser)
    if command.run is not None:
        parser.usage = (
            f"{parser.prog} {command.positional}[FLAG ...]"  # all of them would fill the screen before each error
        )
        parser.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks of errors")
        parser.set_defaults(run=command.run, parser=parser)
