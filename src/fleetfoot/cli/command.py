"""What a command of the CLI is, how it reports wrong usage, and how it starts an engine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import engine_config

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand; `fleetfoot.cli.main` lists all of them."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Adds flags, or nested commands (with `add_command`)."""
    run: Callable[[argparse.Namespace], int] | None = None
    """Runs the command and returns its exit code; None if `add_arguments` adds nested commands."""
    epilog: str | None = None
    positional: str = ""
    """Positional arguments in the usage line, before the flags."""


class UsageError(Exception):
    """A flag, value or file cannot work. The message is shown without a traceback, and the exit code is 2."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors about settings, files and prompts into `UsageError`."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], command: Command) -> None:
    """Add a command's parser. The parsed arguments get its ``run`` and ``parser``."""
    parser = commands.add_parser(
        command.name,
        help=command.help,
        description=command.help[0].upper() + command.help[1:] + ".",
        epilog=command.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # with abbreviations, a new flag could make an old script ambiguous
    )
    command.add_arguments(parser)
    if command.run is not None:
        # short: the list of all flags would fill the screen before each error
        parser.usage = f"{parser.prog} {command.positional}[FLAG ...]"
        parser.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks of errors")
        parser.set_defaults(run=command.run, parser=parser)


@contextmanager
def started_engine(arguments: argparse.Namespace, **defaults: Any) -> Iterator[tuple[LLMEngine, float]]:
    """Load the engine that the flags describe, and shut it down at the end.

    Args:
        defaults: values of settings that were not given.

    Yields:
        The engine, and the seconds from the first import until it accepts requests.

    Raises:
        UsageError: settings, model and machine do not fit together.
    """
    begin = time.perf_counter()
    with usage_errors():
        config = engine_config(arguments, **defaults)  # validated before torch is imported

        from fleetfoot.engine.engine import LLMEngine

        engine = LLMEngine.from_config(config)
    try:
        yield engine, time.perf_counter() - begin
    finally:
        engine.shutdown()
