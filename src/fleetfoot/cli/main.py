"""The `fleetfoot` command: parses arguments, runs the subcommand, and turns errors into messages and exit codes.

Nothing here imports torch, so `fleetfoot --help` and wrong flags are answered immediately.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fleetfoot._version import __version__
from fleetfoot.cli import bench, chat, compile, generate, plan, pool, processes, quantize, serve, verify
from fleetfoot.cli.command import UsageError, add_command, discard, print_status
from fleetfoot.compat.arguments import FlexibleArgumentParser
from fleetfoot.compat.names import ENGINE_FLAGS
from fleetfoot.utils.logs import TextFormatter
from fleetfoot.utils.process import Terminated, error_text, terminable

COMMANDS = (
    *(generate.COMMAND, chat.COMMAND, serve.COMMAND, bench.COMMAND, plan.COMMAND, verify.COMMAND, compile.COMMAND),
    quantize.COMMAND,
    *pool.COMMANDS,
    *(processes.WORKER, processes.ENGINE, processes.PROXY),
)

_OTHER_COMMANDS = {
    "run": "fleetfoot generate answers prompts, fleetfoot chat talks",
    "complete": "it is fleetfoot generate",
    "run-batch": "fleetfoot generate takes a file of prompts",
}
"""Commands of other engines -> the command to use instead."""
_STRUCTURED = {f"--guided-{name}": name for name in ("json", "regex", "choice", "grammar")} | {"--json-schema": "json"}
"""Flags of other engines -> the key of --structured-outputs."""

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, the convention of shells."""
EXIT_TERMINATED = 143
"""128 + SIGTERM. `fleetfoot engine` and `proxy`, which serve until a signal, end with 0."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of standard output has closed it."""

_EXIT_CODES = f"""\
exit codes: 0 fine; {EXIT_FAILURE} something failed; {EXIT_USAGE} a wrong flag, value or file;
            {EXIT_INTERRUPTED} ended by Ctrl-C; {EXIT_TERMINATED} ended by SIGTERM, which engine and proxy serve until;
            {EXIT_BROKEN_PIPE} the reader of the output has left"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments without the program's name; None: those of the process.

    Returns:
        The exit code.
    """
    _open_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    lists_commands = words in ([], [bench.COMMAND.name])
    try:
        with contextlib.redirect_stdout(sys.stderr if lists_commands else sys.stdout):
            arguments = _parse(make_parser(words), [*words, "--help"] if lists_commands else words)
    except SystemExit as exit:  # argparse has printed help, the version or an error
        if lists_commands:
            return EXIT_USAGE
        return exit.code if isinstance(exit.code, int) else 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # prints a question mark for what the encoding lacks
    with logs_on_stderr(verbose=arguments.verbose), terminable():
        return _run(arguments)


def make_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of all commands. ``words``: that it is to parse; commands which are not among them get no flags, since
    all of them together take 25 ms."""
    parser = FlexibleArgumentParser(
        prog="fleetfoot",
        description="An LLM inference and serving engine.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fleetfoot {__version__}")
    table = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        add_command(table, command, has_flags=words is None or command.name in words)
    return parser


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    names = [command.name for command in COMMANDS]
    if words and not words[0].startswith("-") and words[0] not in names:
        near = difflib.get_close_matches(words[0], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        parser.error(f"there is no command {words[0]!r}; {_OTHER_COMMANDS.get(words[0], hint)}")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        flag = unknown[0].partition("=")[0] if unknown[0].startswith("-") else unknown[0]
        known: argparse.ArgumentParser = arguments.parser
        known.error(f"unknown argument {flag!r}; {_hint(flag, known)}")
    return arguments


def _hint(flag: str, known: argparse.ArgumentParser) -> str:
    """What to use instead of an unknown flag."""
    flags = [option for option, action in known._option_string_actions.items() if action.help is not argparse.SUPPRESS]
    if not flag.startswith("-") and "--prompt" in flags:
        return "a prompt goes to --prompt"
    if flag in _STRUCTURED and "--structured-outputs" in flags:
        return f"""it is --structured-outputs '{{"{_STRUCTURED[flag]}": ...}}'"""
    long = f"--{ENGINE_FLAGS.get('-' + flag.lstrip('-'), '').replace('_', '-')}"
    if long in known._option_string_actions:
        return f"it is {long}"
    near = difflib.get_close_matches(flag, flags, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"{known.prog} --help lists what it takes"


def _run(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a closed pipe is still handled
        return code
    except UsageError as error:
        _print_error(arguments, str(error))
        return EXIT_USAGE
    except KeyboardInterrupt as interrupt:
        if sys.stderr.isatty():
            print_status("")  # ends the line with the terminal's ^C, or of a prompt
        return EXIT_TERMINATED if isinstance(interrupt, Terminated) else EXIT_INTERRUPTED
    except BrokenPipeError:
        discard(sys.stdout)
        return EXIT_BROKEN_PIPE
    except Exception as error:
        _print_error(arguments, error_text(error))
        if not arguments.verbose:
            print_status("(--verbose shows the traceback)")
        return EXIT_FAILURE


def _print_error(arguments: argparse.Namespace, message: str) -> None:
    if arguments.verbose:
        traceback.print_exc()
    print_status(f"{arguments.parser.prog}: error: {message}")


def _open_closed_streams() -> None:
    """Open the null device for standard streams that the parent process closed, and so that no other file takes their
    descriptors. Standard input stays None."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            if number:
                setattr(sys, name, os.fdopen(number, "w", closefd=False))


class _StderrHandler(logging.Handler):
    """Looks standard error up for each record: a progress bar replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print_status(self.format(record))


@contextmanager
def logs_on_stderr(*, verbose: bool) -> Iterator[None]:
    """Print warnings, or with ``verbose`` everything from INFO on. Restores the logger's state at the end."""
    logger = logging.getLogger("fleetfoot")
    handler = _StderrHandler()
    handler.setFormatter(TextFormatter("%(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
